"""Mixtures of experts on CUDA that do not depend on the batch: a part of `rollout.engine.cuda.exact`.

Experts are modules that transformers' `use_experts_implementation` decorates. Rows are sorted by expert on the device, each
expert's rows go through its two products in tiles of their own, and a token's results are summed in order of expert id in fp32,
rounded once. Routers multiply a matrix that is no nn.Linear's by `F.linear`, which is answered with the exact product. The
forward never waits for the device, so a step can be captured; only the backward, which is torch's, does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from rollout.engine.cuda.launches import power_of_two
from rollout.engine.cuda.reduce import joined, rows_at_once
from rollout.engine.forward.experts import norms_after
from rollout.engine.forward.summed import Summed, summed_of

OTHER_PRODUCTS = frozenset(("addmm", "baddbmm", "bmm", "einsum", "matmul", "mm"))
"""products of torch that a router may not call"""
ATOMIC = frozenset(("index_add", "index_add_", "scatter_add", "scatter_add_"))
CHOICES_AT_ONCE = 1024
"""that a program of `count` and `sort` looks at"""
WIDTH = 1024
"""numbers of a token that a program of `combine` adds up"""
PLAIN = {"enable_fp_fusion": False}
"""round every product and every sum separately"""


class Grouping(NamedTuple):
    """Choices of T tokens, k each, sorted by expert, on their device."""

    order: torch.Tensor
    """[T · k] int32: the choice of each row; rows without an expert are not written"""
    place: torch.Tensor
    """[T, k] int32: the row of each choice; -1: of no expert"""
    counts: torch.Tensor
    """[experts] int32: rows of each"""
    tiles: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """[most] int32 each: expert, first row and end of each tile; [1] the number of tiles"""


def is_router(module: nn.Module) -> bool:
    """Return whether a module multiplies its matrix by `F.linear` alone."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = set(() if code is None else code.co_names)
    return "linear" in names and not names & OTHER_PRODUCTS


def adds_rows(module: nn.Module) -> str:
    """Return the function by which a module adds rows up atomically, in an order that changes from run to run; "" if none."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return next(iter(sorted(ATOMIC & set(() if code is None else code.co_names))), "")


def group(chosen: torch.Tensor, experts: int, rows_of_a_tile: int) -> Grouping:
    """Sort choices [T, k] of integers ≥ 0 by expert, and cut tiles; those from `experts` on are of no expert."""
    from rollout.engine.cuda import experts_kernels

    flat, choices = chosen.to(torch.int64).contiguous(), chosen.numel()
    new = flat.new_empty
    order, place = new(choices, dtype=torch.int32), new(chosen.shape, dtype=torch.int32)
    counts = new(experts, dtype=torch.int32)
    most = -(-choices // rows_of_a_tile) + min(experts, choices)
    tiles = tuple(new(size, dtype=torch.int32) for size in (most, most, most, 1))
    experts_kernels.count[(experts,)](flat, counts, choices, N=CHOICES_AT_ONCE)
    experts_kernels.sort[(experts + 1,)](
        flat, counts, order, place, *tiles, choices, EXPERTS=experts, EXPERTS_PAD=power_of_two(experts), M=rows_of_a_tile,
        N=CHOICES_AT_ONCE,
    )  # fmt: skip
    return Grouping(order, place, counts, tiles)  # type: ignore[arg-type]


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grouping: Grouping,
    tile: Any,
    choices: int,
    by_input: bool,
    summed: Summed | None = None,
) -> torch.Tensor:
    """Return [T · k, outputs] rows of x · weight[expert]ᵀ + bias[expert], those of no expert not written.

    Args:
        x: [T, inputs], or [T · k, inputs] if `choices` is 0.
        weight: [E, outputs, inputs], or [E, inputs, outputs] if `by_input`.
        tile: `rollout.engine.cuda.exact.Tile`.
        choices: of a token.
        summed: the inputs are cut into slices, whose sums are added in a tree, over the ranks. Raises RankLost.
    """
    from rollout.engine.cuda import experts_kernels

    x, (experts, *_) = x if x.stride(-1) == 1 else x.contiguous(), weight.shape
    outs, size = (weight.shape[2], weight.shape[1]) if by_input else weight.shape[1:]
    w_out, w_in = (weight.stride(2), weight.stride(1)) if by_input else weight.stride()[1:]
    assert x.dtype == weight.dtype and x.shape[1] == size and experts == len(grouping.counts)
    rows = grouping.place.numel()
    slices = 1 if summed is None else summed.slices
    out = x.new_empty(slices, rows, outs, dtype=x.dtype if summed is None else torch.float32)
    if not rows:
        return x.new_empty(rows, outs)
    programs = min(len(grouping.tiles[0]) * -(-outs // tile.outs) * slices, programs_of(x.device))
    experts_kernels.grouped[(programs,)](
        x, weight, weight if bias is None else bias.contiguous(), out, grouping.order, *grouping.tiles, rows, outs,
        size // slices, x.stride(0), weight.stride(0), w_out, w_in, SLICES=slices, CHOICES=choices, BIAS=bias is not None,
        M=tile.rows, N=tile.outs, K=tile.inputs, WIDEN=x.device.type == "cpu", num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out[0] if summed is None else joined(out, None, x.dtype, summed)


def programs_of(device: torch.device) -> int:
    """Return the programs of a persistent kernel: one for each streaming multiprocessor."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def exact_experts(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, tile: Any
) -> torch.Tensor:
    """Run a module of experts: hidden [T, H], the k experts of each token [T, k] and their weights [T, k] → [T, H]. tile:
    `rollout.engine.cuda.exact.Tile` of the dtype."""
    if (summed := summed_of(self)) is None:
        return _experts(self, hidden, top_k_index, top_k_weights, tile, None)
    at_once = rows_at_once(summed, hidden.shape[1]) // top_k_index.shape[1] or 1
    parts = zip(hidden.split(at_once), top_k_index.split(at_once), top_k_weights.split(at_once), strict=True)
    return torch.cat([_experts(self, x, index, weights, tile, summed) for x, index, weights in parts])


def _experts(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, tile: Any, summed: Summed | None
) -> torch.Tensor:
    grouping = group(top_k_index, self.num_experts, tile.rows)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    multiply: Any = _GroupedProduct.apply
    inner = multiply(
        hidden, getattr(self, name), getattr(self, f"{name}_bias") if self.has_bias else None, grouping, tile,
        top_k_index.shape[1], self.is_transposed, None,
    )  # fmt: skip
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    bias = self.down_proj_bias if self.has_bias else None
    out = multiply(inner, self.down_proj, bias, grouping, tile, 0, self.is_transposed, summed)
    out = self.post_expert_norm(out) if norms_after(self) else out
    total: Any = _Combined.apply
    made: torch.Tensor = total(out, top_k_weights, grouping)
    return made


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, grouping: Any, tile: Any, choices: int, by_input: bool, summed: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rest = grouping, choices, by_input, bias is not None
        return product(x, weight, bias, grouping, tile, choices, by_input, summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Multiply expert by expert; waits for the device once, to read how many rows each has."""
        (x, weight), (grouping, choices, by_input, biased) = ctx.saved_tensors, ctx.rest
        of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
        of_bias = grad.new_zeros(len(weight), grad.shape[1]) if biased else None
        begin = 0
        for expert, count in enumerate(grouping.counts.tolist()):
            rows, begin = slice(begin, begin + count), begin + count
            at = grouping.order[rows].long() // choices if choices else torch.arange(rows.start, rows.stop, device=x.device)
            matrix = weight[expert].T if by_input else weight[expert]
            of_x.index_add_(0, at, grad[rows] @ matrix)
            made = grad[rows].T @ x[at]
            of_weight[expert] = made.T if by_input else made
            if of_bias is not None:
                of_bias[expert] = grad[rows].sum(0)
        return of_x, of_weight, of_bias, None, None, None, None, None


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, grouping: Grouping) -> torch.Tensor:
        from rollout.engine.cuda import experts_kernels

        ctx.save_for_backward(x, weights, grouping.place)
        tokens, k = weights.shape
        out = x.new_empty(tokens, x.shape[1])
        if tokens:
            experts_kernels.combine[(tokens, -(-x.shape[1] // WIDTH))](
                x, weights.float().contiguous(), grouping.order, grouping.place, out, x.shape[1], CHOICES=k,
                CHOICES_PAD=power_of_two(k), WIDTH=WIDTH, **PLAIN,
            )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, place = ctx.saved_tensors
        real = (place >= 0).flatten()
        tokens = torch.arange(len(grad), device=x.device).repeat_interleave(weights.shape[1])[real]
        rows, wide = place.flatten()[real].long(), grad.float()
        of_x, of_weights = torch.zeros_like(x), torch.zeros_like(weights).flatten()
        of_x[rows] = (wide[tokens] * weights.flatten()[real].float()[:, None]).to(x.dtype)
        of_weights[real] = (wide[tokens] * x[rows].float()).sum(-1).to(weights.dtype)
        return of_x, of_weights.view(weights.shape), None


class LinearsAnswered(TorchFunctionMode):
    """While active, `F.linear` is another product."""

    def __init__(self, linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
            return self._linear(given["input"], given["weight"], given.get("bias"))
        return func(*args, **(kwargs or {}))
