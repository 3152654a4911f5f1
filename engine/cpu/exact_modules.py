"""Installs the products of `rollout.engine.cpu.products` in the modules of a model, in place.

    use_products(module, isa)    nn.Linear, SiLU, experts and their routers use these products; parameters, names and state_dict
                                 stay unchanged
    plain_products(module)       undoes it

Only the forward is ours. The backward is torch's: grad · w, gradᵀ · x (both by `rollout.engine.cpu.backward`, which avoids
torch's bf16 if it is slow), and the sum of grad.

Experts are modules that transformers' `use_experts_implementation` decorates: rows are sorted by expert, each expert's rows go
through its two products, and a token's results are summed in order of expert id in fp32, rounded once. So a row's result does
not depend on which rows share its experts. Routers, and the experts of DBRX, multiply matrices that are no nn.Linear's by
`F.linear`, `matmul` or `mm`, which are answered with our product.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import _default_apply_gate

from rollout.engine.cpu.backward import product
from rollout.engine.cpu.experts import ExpertKernels, as_routes, sort_routes
from rollout.engine.cpu.functions import Callers, plain_calls, plain_functions
from rollout.engine.cpu.int8 import Int8Linear
from rollout.engine.cpu.products import DTYPES, Products, products_of
from rollout.engine.cpu.sums import SumKernels
from rollout.engine.forward.experts import is_experts, norms_after
from rollout.engine.forward.latent import latent_heads_of, torch_heads
from rollout.engine.forward.shaped import shaped
from rollout.engine.forward.summed import Summed, summed_of

MATMULS = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
"""products of rows with a matrix [inputs, outputs] that are answered with ours"""
PRODUCTS = frozenset(("linear", *(each.__name__ for each in MATMULS)))
OTHER_PRODUCTS = frozenset(("addmm", "baddbmm", "bmm", "einsum"))
"""products of torch that a module with matrices of its own may not call"""
SILU = ("SiLU", "SiLUActivation")
"""activation classes that the decoders support"""


class NotServed(ValueError):
    """A product of this module cannot be replaced by ours; the message names the first one."""


class ExactLinear(nn.Linear):
    """An nn.Linear whose class `use_products` replaced."""

    isa: str

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @plain_calls
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[…, inputs] → […, outputs]. Raises ValueError under autocast, and for inputs of another dtype or device; RankLost if
        it is summed over ranks."""
        if torch.is_autocast_enabled(input.device.type):
            raise ValueError("autocast would convert the weights to another dtype: call the exact model without it")
        if input.dtype != self.weight.dtype or input.device.type != "cpu":
            raise ValueError(
                f"an input in {input.dtype} on {input.device} for a weight in {self.weight.dtype}: must have "
                "the weight's dtype, on the CPU"
            )
        return linear(input, self.weight, self.bias, products_of(self.isa), summed_of(self))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, isa={self.isa}"


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, products: Products, summed: Summed | None = None
) -> torch.Tensor:
    """Return […, inputs] · [outputs, inputs]ᵀ (+ [outputs]) → […, outputs], with a gradient if gradients are on."""
    if not torch.is_grad_enabled():
        return _product(x, weight, bias, products, summed)
    out: torch.Tensor = _Product.apply(x, weight, bias, products, summed)  # type: ignore[no-untyped-call]
    return out


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, products: Products, summed: Summed | None
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if summed is None:
        out = products.linear(rows, weight, bias)
    else:
        assert products.sums is not None, "use_products refuses"
        out = products.sums.linear(rows, weight, bias, summed)
    return shaped(out, *x.shape[:-1], len(weight))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        return _product(x, weight, *others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = product(rows, weight).view(*grad.shape[:-1], weight.shape[1]) if ctx.needs_input_grad[0] else None
        of_weight = product(rows.T, x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None


class ExactSiLU(nn.Module):
    """An activation whose class `use_products` replaced. torch's own SiLU computes the last elements of each thread's share
    with another exp, so they depend on the batch and on the number of threads."""

    isa: str
    plain: type[nn.Module]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Silu.apply(input, products_of(self.isa))  # type: ignore[no-untyped-call]
        return out


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, products: Products) -> torch.Tensor:
        ctx.save_for_backward(x)
        return shaped(products.silu(x), *x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.aten.silu_backward(grad, *ctx.saved_tensors), None


class LinearProducts(TorchFunctionMode):
    """While active, `F.linear` and MATMULS are our product. Raises NotServed for one of MATMULS between other tensors than rows
    and a matrix in our dtypes on the CPU."""

    def __init__(self, isa: str) -> None:
        super().__init__()
        self.products = products_of(isa)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
            x, weight, bias = given["input"], given["weight"], given.get("bias")
            if weight.dtype in DTYPES and x.dtype == weight.dtype and x.is_cpu:
                return linear(x, weight, bias, self.products)
        elif func in MATMULS:
            x, matrix = args[:2]
            if kwargs or matrix.ndim != 2 or matrix.dtype not in DTYPES or x.dtype != matrix.dtype or not x.is_cpu:
                raise NotServed(
                    f"{func.__name__} of {x.dtype} {tuple(x.shape)} and {matrix.dtype} {tuple(matrix.shape)}: need rows and a "
                    "matrix of their dtype"
                )
            return linear(x, matrix.T.contiguous(), None, self.products)
        return func(*args, **(kwargs or {}))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exact_products(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward of a module with matrices of its own, whose products are ours."""
    with LinearProducts(self.isa):
        return type(self).forward(self, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exact_experts(self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Forward of experts: hidden [T, H], the k experts of each token [T, k] and their weights [T, k] → [T, H]."""
    products, k = products_of(self.isa), top_k_index.shape[1]
    if products.experts is not None and not torch.is_grad_enabled():
        return _experts_at_once(self, products.experts, products.sums, hidden, top_k_index, top_k_weights)
    first = _matrices(self, "gate_up_proj" if self.has_gate else "up_proj")
    second = _matrices(self, "down_proj")
    chosen, order = torch.sort(top_k_index.flatten(), stable=True)
    experts, counts = (each.tolist() for each in torch.unique_consecutive(chosen, return_counts=True))
    total = hidden.new_zeros(hidden.shape, dtype=torch.float32)
    begin = 0
    for expert, count in zip(experts, counts, strict=True):
        at, begin = order[begin : begin + count], begin + count
        if expert >= self.num_experts:
            continue  # a token that a router gives to no expert
        tokens = at // k
        up = linear(hidden[tokens], *first(expert), products)
        inner = self._apply_gate(up) if self.has_gate else self.act_fn(up)
        out = linear(inner, *second(expert), products, summed_of(self))
        if norms_after(self):
            out = self.post_expert_norm(out)
        total = total.index_add(0, tokens, out.float() * top_k_weights.flatten()[at].float()[:, None])
    return total.to(hidden.dtype)


def _experts_at_once(
    self: Any,
    kernels: ExpertKernels,
    sums: SumKernels | None,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute `exact_experts` without gradients: the products of all experts in one call, in the same bits."""
    routes = sort_routes(top_k_index.numpy(), self.num_experts)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    weight, bias = getattr(self, name), getattr(self, f"{name}_bias") if self.has_bias else None
    by_input, plain_gate = self.is_transposed, type(self)._apply_gate is _default_apply_gate
    in_c = self.has_gate and plain_gate and type(self.act_fn) is ExactSiLU and not by_input
    inner = kernels.grouped(hidden, weight, bias, routes, gather=True, gated=in_c, by_input=by_input)
    if not in_c:
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    bias = self.down_proj_bias if self.has_bias else None
    if (summed := summed_of(self)) is None:
        out = kernels.grouped(inner, self.down_proj, bias, routes, gather=False, by_input=by_input)
    else:
        assert sums is not None and bias is None and not by_input, "use_products and cuts refuse"
        out = sums.grouped(inner, self.down_proj, routes, summed)
    return kernels.combine(self.post_expert_norm(out) if norms_after(self) else out, top_k_weights, routes)


def _matrices(experts: Any, name: str) -> Callable[[int], tuple[torch.Tensor, torch.Tensor | None]]:
    """Return a function that takes an expert and returns its matrix [outputs, inputs] and its bias."""
    weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias") if experts.has_bias else None
    if weight.requires_grad and torch.is_grad_enabled():  # then one gradient is stacked, instead of added up expert by expert
        weight, bias = weight.unbind(0), None if bias is None else bias.unbind(0)

    def of(expert: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        matrix = weight[expert].T.contiguous() if experts.is_transposed else weight[expert]
        return matrix, None if bias is None else bias[expert]

    return of


@plain_calls
def exact_heads(isa: str, x: torch.Tensor, weight: torch.Tensor, by_input: bool) -> torch.Tensor:
    """`rollout.engine.forward.latent.HeadProducts` of ours, with a gradient if gradients are on."""
    out: torch.Tensor = _Heads.apply(x, weight, by_input, products_of(isa))  # type: ignore[no-untyped-call]
    return out


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, by_input: bool, products: Products) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_input = by_input
        heads, rows, inputs = x.shape
        if products.experts is None:
            matrices = weight.transpose(1, 2).contiguous() if by_input else weight
            return torch.stack([products.linear(each, matrix, None) for each, matrix in zip(x, matrices, strict=True)])
        routes = as_routes(heads, rows)
        out = products.experts.grouped(x.reshape(-1, inputs), weight, None, routes, gather=False, by_input=by_input)
        return shaped(out, heads, rows, out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            matrices = weight.transpose(1, 2) if ctx.by_input else weight
            of_x = torch.stack([product(each, matrix) for each, matrix in zip(grad, matrices, strict=True)])
        if ctx.needs_input_grad[1]:
            pairs = zip(x, grad, strict=True) if ctx.by_input else zip(grad, x, strict=True)
            of_weight = torch.stack([product(a.T, b) for a, b in pairs])
        return of_x, of_weight, None, None


def unreached(module: nn.Module, called: Callers) -> Iterator[nn.Module]:
    """Yield the submodules of which a forward of text called none and used no parameter, such as towers for images. Not those
    of a list: other tokens may reach them."""
    for child in module.children():
        inside = (each for part in child.modules() for each in (part, *part.parameters(recurse=False)))
        if any(id(each) in called.reached for each in inside):
            yield from unreached(child, called)
        elif not isinstance(module, nn.ModuleList):
            yield from child.modules()


def use_products(module: nn.Module, isa: str, skipped: Collection[nn.Module] = ()) -> None:
    """Make every nn.Linear, SiLU, router and module of experts, and the heads that store latents, compute with
    `products_of(isa)`, in place. skipped: submodules that are left as they are. An nn.Linear that computes in eight bits stays.

    Raises NotServed for weights on another device or of another dtype, for subclasses of nn.Linear (quantised ones), and for
    other matrices than those of embeddings, experts and routers; NativeUnavailable. The module is unchanged then."""
    products = products_of(isa)
    named = [(name, each) for name, each in module.named_modules() if each not in skipped and type(each) is not Int8Linear]
    linears = [_served(name, each) for name, each in named if isinstance(each, nn.Linear)]
    if products.sums is None and (summed := [name for name, each in named if summed_of(each) is not None]):
        raise NotServed(f"{summed[0]} is summed in a tree over slices, and isa={isa} has no kernels for it")
    others: list[tuple[Any, Any]] = []
    for name, each in named:
        if isinstance(each, (nn.Linear, nn.Embedding)) or is_depthwise(each):
            continue
        matrices = {key: tensor for key, tensor in each.named_parameters(recurse=False) if tensor.squeeze().ndim > 1}
        if matrices and (function := _function_of(each)) is not None:
            others += [(each, function)]
            _check_served(name, each)
        else:
            for parameter in matrices:
                raise NotServed(
                    f"{name}.{parameter} is a matrix of a {type(each).__name__}, not of an nn.Linear: its product would stay "
                    "torch's own"
                )
    for linear in linears:
        linear.__class__, linear.isa = ExactLinear, isa
    for each, function in others:
        each.forward, each.isa = MethodType(function, each), isa
    activation: Any
    for _, activation in named:
        if type(activation).__name__ in SILU:
            activation.plain, activation.isa = type(activation), isa
            activation.__class__ = ExactSiLU
        elif type(activation) is ExactSiLU:
            activation.isa = isa
        if (latent := latent_heads_of(activation)) is not None:
            latent.products = partial(exact_heads, isa)


def is_depthwise(module: nn.Module) -> bool:
    """Return whether a module is a convolution of each channel by itself, which is no matrix product."""
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels


def plain_products(module: nn.Module) -> None:
    """Undo `use_products` and `rollout.engine.cpu.functions.use_whole_vectors`."""
    modules: list[Any] = list(module.modules())
    for each in modules:
        kind = type(each)
        if (latent := latent_heads_of(each)) is not None:
            latent.products = torch_heads
        if getattr(vars(each).get("forward"), "__func__", None) in (exact_experts, exact_products):
            del each.forward, each.isa
        if kind is ExactLinear:
            each.__class__ = nn.Linear
            del each.isa
        elif kind is ExactSiLU:
            each.__class__ = each.plain
            del each.plain, each.isa
    plain_functions(module)


def _served(name: str, linear: nn.Linear) -> Any:
    if type(linear) not in (nn.Linear, ExactLinear) or type(linear.weight) is not nn.Parameter:
        kind = type(linear).__name__ if type(linear.weight) is nn.Parameter else type(linear.weight).__name__
        raise NotServed(f"{name} is a {kind}: need a plain nn.Linear, neither quantised nor parametrised")
    _check_served(name, linear)
    return linear


def _check_served(name: str, module: nn.Module) -> None:
    for tensor in module.parameters(recurse=False):
        if tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
            raise NotServed(f"{name} is in {tensor.dtype} on {tensor.device}: need bfloat16 or float32 on the CPU")


def _function_of(module: nn.Module) -> Any:
    """Return the forward of ours for experts, routers and others that multiply by known products; None for other modules."""
    if is_experts(module):
        return exact_experts
    names = set(inspect.unwrap(type(module).forward).__code__.co_names)
    return exact_products if names & PRODUCTS and not names & OTHER_PRODUCTS else None
