"""Products and norms on CUDA that do not depend on the batch: the option `exact`, and the same for a trainer's module.

    make_exact(module)    replaces every linear layer, RMSNorm, router and module of experts of a transformers model, in place;
                          gradients are torch's

All other operations of such a module are element-wise, and attention (`rollout.engine.devices`) and sampling
(`rollout.engine.cuda.sampling`) do not depend on the batch either. So a seeded sample is the same to the bit in every batch.
`rollout.exact` gives a trainer's forward the same numbers."""

from __future__ import annotations

import inspect
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rollout.engine.cuda.experts import LinearsAnswered, adds_rows, exact_experts, is_router, programs_of
from rollout.engine.cuda.launches import power_of_two
from rollout.engine.cuda.norms import agree, candidates
from rollout.engine.cuda.proofs import Linear
from rollout.engine.cuda.reduce import joined, rows_at_once
from rollout.engine.forward.experts import is_experts
from rollout.engine.forward.shaped import shaped
from rollout.engine.forward.summed import Summed, summed_of

ARITHMETIC = "exact/1"
"""of products and norms; every change of their sums or roundings increases the version"""
FUSED_LAYERS = "/fused"
"""suffix of the name of products if the kernels of fused layers compute rotary positions, norms of heads and silu"""


class NotExact(ValueError):
    """Products of this model would depend on the batch; the message names them."""


class Tile(NamedTuple):
    """Tile of a product, the same for any number of rows."""

    rows: int
    outs: int
    inputs: int
    warps: int
    stages: int


TILES = {2: Tile(64, 128, 64, 8, 3), 4: Tile(32, 32, 32, 4, 2)}
"""by element size in bytes; the sums fit into registers, and the copies into 99 KiB"""
OTHER_SUMS = frozenset(("sum", "var", "std", "norm", "layer_norm", "rms_norm", "group_norm", "linalg", "prod", "cumsum"))
"""functions that add up numbers, which a norm may not call beside `mean`"""
FUSED = {"enable_fp_fusion": True}
"""set explicitly, so that the environment cannot change the kernel"""


def make_exact(module: nn.Module, multiply: Linear | None = None) -> None:
    """Replace the linear layers, RMSNorms, routers and experts of a transformers model by kernels whose results do not depend
    on the number of rows. They read the parameters at each call, so in-place updates take effect. Recurrent mixers are not
    replaced here. multiply: products of linear layers whose rows do not depend on the number of rows; None: `product`. Raises
    NotExact naming the layer if the model has other products; the model is unchanged then."""
    linears = [each for each in module.modules() if type(each) is nn.Linear]
    mixtures = {each: _experts for each in module.modules() if is_experts(each)}
    mixtures |= {each: _router for each in module.modules() if _has_matrix(each) and is_router(each)}
    known = {id(parameter) for each in (*linears, *mixtures) for parameter in each.parameters(recurse=False)}
    known |= {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding) or is_depthwise(each)}
    for name, parameter in module.named_parameters():
        if parameter.squeeze().dim() > 1 and id(parameter) not in known:
            raise NotExact(f"exact=true: {name} belongs to no linear layer, so its products would depend on the batch")
    for name, each in module.named_modules():
        if not is_experts(each) and (sums := adds_rows(each)):
            raise NotExact(f"exact=true: {name} ({type(each).__name__}) adds rows up by {sums}, in any order")
    norms = list(candidates(module))
    special = {type(norm) for norm in _kinds(norms) if not agree(norm, _norm)}  # gpt-oss rounds after the weight
    norms = [norm for norm in norms if type(norm) not in special]
    special |= {kind for kind in map(type, module.modules()) if "norm" in kind.__name__.lower()} - {*map(type, norms)}
    by_mean = [each for each in module.modules() if type(each) in special]
    if others := {type(each).__name__ for each in by_mean if not is_norm_by_mean(each)}:
        raise NotExact(f"exact=true: norms other than RMSNorm: {', '.join(sorted(others))}")
    for linear in linears:
        summed = summed_of(linear)
        product_of = multiply if summed is None else partial(sum_of_slices, summed=summed)
        linear.forward = ExactForward(linear, product_of)  # type: ignore[method-assign]
    for norm in norms:
        norm.forward = MethodType(_norm, norm)
    mixtures |= dict.fromkeys(by_mean, _norm_by_mean)
    for each, function in mixtures.items():
        each.forward = MethodType(function, each)


def make_plain(module: nn.Module) -> None:
    """Undo `make_exact`."""
    for each in module.modules():
        made = vars(each).get("forward")
        replaced = getattr(made, "__func__", None) in (_norm, _norm_by_mean, _experts, _router)
        if replaced or isinstance(made, ExactForward):
            del each.forward


def exact_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, multiply: Linear | None = None
) -> torch.Tensor:
    """Return […, out] of x […, in] and weight [out, in], as `torch.nn.functional.linear`, with a fixed order of summation.
    multiply: as for `make_exact`."""
    made: torch.Tensor = _Linear.apply(x, weight, bias, multiply)  # type: ignore[no-untyped-call]
    return made


class ExactForward:
    """The forward of a linear layer by an exact product. Copied with its layer, it works for the copy."""

    def __init__(self, layer: nn.Linear, multiply: Linear | None) -> None:
        self.layer, self.multiply = layer, multiply

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return exact_linear(input, self.layer.weight, self.layer.bias, self.multiply)


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm over the last dimension, rounded as in transformers."""
    made: torch.Tensor = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return made


def exact_mean(x: torch.Tensor) -> torch.Tensor:
    """Return [..., 1] means over the last dimension, with a fixed order of summation in fp32."""
    made: torch.Tensor = _Mean.apply(x)  # type: ignore[no-untyped-call]
    return made


def is_depthwise(module: nn.Module) -> bool:
    """Return whether a module is a convolution of each channel by itself, whose weight recurrent mixers read."""
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels


def is_norm_by_mean(norm: nn.Module) -> bool:
    """Return whether a norm adds its numbers up by `mean` alone: RMSNorms with a gate, in groups, with 1 + weight."""
    names = {name for function in (type(norm).forward, getattr(type(norm), "_norm", None)) for name in _names_in(function)}
    return "mean" in names and not names & OTHER_SUMS


def _names_in(function: Any) -> tuple[str, ...]:
    return getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ()) if function is not None else ()


class MeansAnswered(TorchFunctionMode):
    """While active, means over the last dimension that keep it are exact."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.mean, torch.mean):
            assert args[1:] == (-1,) and kwargs == {"keepdim": True}, "a mean over another dimension"
            return exact_mean(args[0])
        return func(*args, **(kwargs or {}))


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        from rollout.engine.cuda import exact_kernels

        ctx.size = size = x.shape[-1]
        rows = x.reshape(-1, size).contiguous()
        out = rows.new_empty(len(rows), dtype=torch.float32)
        exact_kernels.row_means[(len(rows),)](
            rows, out, size, WIDTH=power_of_two(size), num_warps=8 if size > 1024 else 4, enable_fp_fusion=False
        )
        return shaped(out.to(x.dtype), *x.shape[:-1], 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        share: torch.Tensor = grad / ctx.size
        return share.expand(*grad.shape[:-1], ctx.size)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, multiply: Linear | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return shaped((multiply or product)(x.reshape(-1, x.shape[-1]), weight, bias), *x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            (flat @ weight).view(x.shape) if of_x else None,
            flat.T @ rows if of_weight else None,
            flat.sum(0) if of_bias and ctx.biased else None,
            None,
        )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        from rollout.engine.cuda import fused_kernels

        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out, size = torch.empty_like(rows), rows.shape[1]
        fused_kernels.add_norm[(len(rows),)](
            rows, rows, weight, out, size, eps, ADD=False, WIDTH=power_of_two(size), num_warps=8 if size > 1024 else 4,
            enable_fp_fusion=False,
        )  # fmt: skip
        return shaped(out, *x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            wide = x.float()
            normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.eps)).to(x.dtype)
            of_x, of_weight = torch.autograd.grad(weight * normed, (x, weight), grad)
        return of_x, of_weight, None


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tile: Tile | None = None) -> torch.Tensor:
    """Return [rows, out] of x [rows, in] and weight [out, in]. tile: another one than TILES has, for measurements."""
    out = x.new_empty(1, len(x), len(weight))
    _multiply(x, weight, bias, out, tile)
    return out[0]


def sum_of_slices(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, summed: Summed) -> torch.Tensor:
    """Return the same with the inputs cut into slices, whose sums in fp32 are added in a tree, over the ranks, with the bits of
    any number of them. Raises RankLost."""
    made = []
    for piece in x.split(rows_at_once(summed, len(weight))):
        out = x.new_empty(summed.slices, len(piece), len(weight), dtype=torch.float32)
        _multiply(piece, weight, None, out)
        made.append(joined(out, bias, x.dtype, summed))
    return made[0] if len(made) == 1 else torch.cat(made)


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile | None = None
) -> None:
    """Write the product of each slice of the inputs to out [slices, rows, out]."""
    from rollout.engine.cuda import exact_kernels

    x = x if x.stride(-1) == 1 else x.contiguous()
    assert weight.stride(-1) == 1
    slices, rows, outs = out.shape
    tile = tile or TILES[x.element_size()]
    tiles = -(-rows // tile.rows) * -(-outs // tile.outs) * slices
    exact_kernels.product[(min(tiles, programs_of(x.device)),)](
        x, weight, bias if bias is not None else weight, out, rows, outs, x.shape[1] // slices, x.stride(0), weight.stride(0),
        SLICES=slices, BIAS=bias is not None, M=tile.rows, N=tile.outs, K=tile.inputs, WIDEN=x.device.type == "cpu",
        num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip


def _kinds(norms: list[Any]) -> list[Any]:
    """Return one norm of each class and size."""
    return list({(type(norm), norm.weight.numel()): norm for norm in norms}.values())


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module has a matrix of its own, and is neither a linear layer nor an embedding nor one of experts."""
    if isinstance(module, (nn.Linear, nn.Embedding)) or is_experts(module):
        return False
    return any(parameter.squeeze().dim() > 1 for parameter in module.parameters(recurse=False))


def _experts(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    return exact_experts(self, hidden_states, top_k_index, top_k_weights, TILES[hidden_states.element_size()])


def _router(self: Any, *args: Any, **kwargs: Any) -> Any:
    with LinearsAnswered(exact_linear):
        return type(self).forward(self, *args, **kwargs)


def _norm_by_mean(self: Any, *args: Any, **kwargs: Any) -> Any:
    with MeansAnswered():
        return type(self).forward(self, *args, **kwargs)


def _norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return exact_norm(hidden_states, self.weight, self.variance_epsilon)
