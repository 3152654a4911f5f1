"""Python interface of `c/experts.c`: products of experts, in one call for all of them.

`sort_routes` sorts the choices of tokens by expert; of `ExpertKernels`, `grouped` multiplies each expert's rows with its matrix
and `combine` adds up a token's results. Bits are those of a product for each expert (`rollout.engine.cpu.exact_modules`),
whichever rows share it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import torch

from rollout.engine.cpu.build import check_layout
from rollout.engine.cpu.functions import plain_calls
from rollout.engine.cpu.kernels import Kernels, Linear

PADDING = 15
"""rows that a group takes in the packed buffer beyond its own, at most"""


class _Grouped(ctypes.Structure):
    _fields_ = [
        ("all", Linear), *((name, c_int64) for name in ("gated", "groups", "k")),
        *((name, c_void_p) for name in ("expert", "begin", "choice", "blocks", "parts", "x", "gathered", "packed", "out")),
    ]  # fmt: skip


class _Combine(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("tokens", "k", "width", "rows", "is_bf16")),
        *((name, c_void_p) for name in ("place", "choice", "weights", "x", "out")),
    ]


class Routes(NamedTuple):
    """Choices of T tokens, k each, sorted by expert; R of them are of an expert. int64, contiguous."""

    expert: np.ndarray
    """[groups], the experts that were chosen, ascending"""
    begin: np.ndarray
    """[groups + 1], first row of each"""
    choice: np.ndarray
    """[R], token · k + place, ascending for each expert"""
    place: np.ndarray
    """[T, k], rows of a token's choices, ascending; R and above: of no expert"""


def sort_routes(chosen: np.ndarray, experts: int) -> Routes:
    """Sort choices [T, k] of integers ≥ 0; those from `experts` on are of no expert."""
    flat = np.ascontiguousarray(chosen, np.int64).reshape(-1)
    assert not len(flat) or flat.min() >= 0
    order = np.argsort(flat, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    counts = np.bincount(flat, minlength=experts)[:experts]
    hit = np.flatnonzero(counts)
    begin = np.zeros(len(hit) + 1, np.int64)
    np.cumsum(counts[hit], out=begin[1:])
    return Routes(hit, begin, order[: begin[-1]], np.sort(place.reshape(chosen.shape), 1))


def as_routes(groups: int, rows: int) -> Routes:
    """Return the routes of `groups` · `rows` rows in order, of which each group has `rows`."""
    at = np.arange(groups * rows)
    return Routes(np.arange(groups), np.arange(groups + 1) * rows, at, at.reshape(-1, 1))


class ExpertKernels:
    """The products of experts of one instruction set. Raises LayoutMismatch."""

    def __init__(self, kernels: Kernels) -> None:
        check_layout(kernels.library, "rollout_layout_experts", Grouped=_Grouped, Combine=_Combine)
        self.kernels = kernels

    @plain_calls
    def grouped(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        routes: Routes,
        gather: bool,
        gated: bool = False,
        by_input: bool = False,
    ) -> torch.Tensor:
        """Return x · weight[expert]ᵀ (+ bias[expert]) for each row of `routes`, [R, outputs].

        Args:
            x: [T, inputs] if `gather`, else [R, inputs]; bf16 or fp32, on the CPU.
            weight, bias: [E, outputs, inputs], [E, outputs] or None, contiguous, of x's dtype.
            by_input: the weight is [E, inputs, outputs]; not if `gated`.
            gated: outputs are two halves, gate and up: return silu(gate) · up, [R, outputs / 2].
        """
        k, groups, rows = routes.place.shape[1], len(routes.expert), len(routes.choice)
        outputs, inputs = weight.shape[:0:-1] if by_input else weight.shape[1:]
        x, is_bf16 = x.contiguous(), x.dtype == torch.bfloat16
        assert not (gated and by_input) and weight.is_contiguous() and x.dtype == weight.dtype and x.shape[1] == inputs
        assert bias is None or (bias.is_contiguous() and bias.dtype == x.dtype)
        assert len(x) == (len(routes.place) if gather else rows) and (not groups or routes.expert[-1] < len(weight))
        out = x.new_empty(rows, outputs // 2 if gated else outputs)
        gathered = x.new_empty(rows if gather else 0, inputs)
        packed = self.kernels.packed(rows + PADDING * groups, (inputs,), x.dtype)
        room = np.empty((2, groups + 1), np.int64)
        work = _Grouped(
            Linear(weight.data_ptr(), None if bias is None else bias.data_ptr(), outputs, inputs, is_bf16, by_input, 0, inputs),
            gated, groups, k if gather else 0, *(each.ctypes.data for each in routes[:3]), room[0].ctypes.data,
            room[1].ctypes.data, x.data_ptr(), gathered.data_ptr(), packed.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        self.kernels.library.rollout_grouped(ctypes.byref(self.kernels.team()), ctypes.byref(work))
        return out

    @plain_calls
    def combine(self, x: torch.Tensor, weights: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return the sums [T, width] of results x [R, width] times weights [T, k], in order of expert, in fp32,
        rounded once."""
        x, weights = x.contiguous(), weights.float().contiguous()
        assert len(x) == len(routes.choice) and weights.shape == routes.place.shape
        out = x.new_empty(len(routes.place), x.shape[1])
        work = _Combine(
            *routes.place.shape, x.shape[1], len(x), x.dtype == torch.bfloat16,
            *(each.ctypes.data for each in (routes.place, routes.choice)), *(each.data_ptr() for each in (weights, x, out)),
        )  # fmt: skip
        self.kernels.library.rollout_combine(ctypes.byref(self.kernels.team()), ctypes.byref(work))
        return out
