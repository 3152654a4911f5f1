"""Products of weights and activations in eight bits (`c/product_int8.c`), and the nn.Linear that computes with them.

    Int8Codes      the codes and scales of a weight, which a product reads in place of it: 1.03 bytes a number
    Int8Linear     an nn.Linear whose product reads them; with a straight-through gradient, if gradients are on

The parameter of an `Int8Linear` stays as it is. In an engine, its codes are a copy that each refresh replaces in place together
with it (`rollout.engine.weights.twins`); in a trainer they are made anew in each forward.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rollout.engine.cpu.backward import product
from rollout.engine.cpu.build import check_layout
from rollout.engine.cpu.functions import plain_calls
from rollout.engine.cpu.kernels import Kernels, Linear
from rollout.engine.forward.shaped import shaped

GROUP = 64
"""inputs that share a scale"""
BLOCK = 16
"""outputs that lie together"""


class _Encode(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p), *((name, c_int64) for name in ("rows", "inputs", "is_bf16", "is_weight")), ("out", c_void_p),
        ("first", c_int64), ("end", c_int64),
    ]  # fmt: skip


class Int8Kernels:
    """Products in eight bits of one instruction set. Tensors are bf16 or fp32, on the CPU. Raises LayoutMismatch."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, library = kernels, kernels.library
        check_layout(library, "rollout_layout_int8", Encode=_Encode)
        library.rollout_int8_bytes.restype = c_int64

    def nbytes(self, weight: torch.Tensor) -> int:
        """Return the bytes of the codes and scales of a weight [outputs, inputs]."""
        outputs, inputs = weight.shape
        return int(self.kernels.library.rollout_int8_bytes(c_int64(outputs), c_int64(inputs)))

    @plain_calls
    def encode(self, weight: torch.Tensor, codes: torch.Tensor, first: int, end: int, threads: int | None = None) -> None:
        """Write the codes and scales of the outputs from `first` on, a multiple of BLOCK, to `end`, another one or the last
        output. weight: [outputs, inputs], contiguous. codes: [nbytes] uint8. threads: None = those of the kernels."""
        assert weight.is_contiguous() and codes.numel() == self.nbytes(weight) and codes.dtype == torch.uint8
        assert first % BLOCK == 0 and (end % BLOCK == 0 or end == len(weight)) and 0 <= first <= end <= len(weight)
        work = self._work(weight, True, codes)
        work.first, work.end = first // BLOCK, -(-end // BLOCK)
        team = self.kernels.team()
        team.threads = threads or team.threads
        self.kernels.library.rollout_int8_encode(ctypes.byref(team), ctypes.byref(work))

    @plain_calls
    def linear(self, x: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [T, inputs] · the weight of these codes (+ bias) → [T, outputs] in x's dtype. weight: for its shape alone.

        The bits of a row depend only on that row, the codes and the bias."""
        assert x.ndim == 2 and x.shape[1] == weight.shape[1] and (bias is None or bias.dtype == x.dtype)
        x, out = x.contiguous(), x.new_empty(len(x), len(weight))
        if not len(x):
            return out
        packed = self.kernels.packed(len(x), (weight.shape[1],), x.dtype, int8=True)
        self.kernels.library.rollout_linear(
            ctypes.byref(self.kernels.team()), ctypes.byref(int8_struct(weight, codes, bias)), c_void_p(x.data_ptr()),
            c_int64(len(x)), c_void_p(packed.data_ptr()), c_void_p(out.data_ptr()),
        )  # fmt: skip
        return out

    @plain_calls
    def rounded(self, x: torch.Tensor, is_weight: bool) -> torch.Tensor:
        """Return what the codes and scales of [rows, inputs] stand for, rounded to x's dtype. is_weight: with the scales of a
        weight, else those of activations."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self.kernels.library.rollout_int8_rounded(
            ctypes.byref(self.kernels.team()), ctypes.byref(self._work(x, is_weight, out))
        )
        return out

    def _work(self, x: torch.Tensor, is_weight: bool, out: torch.Tensor) -> _Encode:
        assert x.ndim == 2 and x.is_cpu and x.dtype in (torch.bfloat16, torch.float32)
        return _Encode(x.data_ptr(), *x.shape, x.dtype == torch.bfloat16, is_weight, out.data_ptr(), 0, 0)


def int8_struct(weight: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Describe codes, and a bias, which must outlive the struct."""
    of_bias = None if bias is None else bias.data_ptr()
    return Linear(codes.data_ptr(), of_bias, *weight.shape, weight.dtype == torch.bfloat16, 0, 1, weight.shape[1])


@cache
def int8_kernels(isa: str) -> Int8Kernels:
    """Return the products of an instruction set, with torch's number of threads. Raises NativeUnavailable."""
    return Int8Kernels(Kernels(isa))


class Int8Codes:
    """Codes and scales of a weight in an engine (`rollout.engine.weights.twins.Twin`). data: [bytes] uint8."""

    unit = BLOCK

    def __init__(self, isa: str, data: torch.Tensor) -> None:
        self.isa, self.data = isa, data

    def fill(self, weight: torch.Tensor, data: torch.Tensor, first: int, end: int) -> None:
        """Write the codes of the outputs from `first` to `end` of a weight [outputs, inputs] into `data`, of the size of
        `self.data`, in the calling thread alone."""
        int8_kernels(self.isa).encode(weight, data, first, end, threads=1)


class Int8Linear(nn.Linear):
    """An nn.Linear whose class `rollout.engine.cpu.int8_modules.use_int8` replaced."""

    isa: str
    twin: Int8Codes | None
    """codes of the weight; None: they are made in each forward"""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @plain_calls
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[…, inputs] → […, outputs]. Raises ValueError under autocast, and for inputs of another dtype or device."""
        if torch.is_autocast_enabled(input.device.type):
            raise ValueError("autocast would convert the weights to another dtype: call the exact model without it")
        if input.dtype != self.weight.dtype or not input.is_cpu:
            raise ValueError(
                f"an input in {input.dtype} on {input.device} for a weight in {self.weight.dtype}: must have "
                "the weight's dtype, on the CPU"
            )
        kernels, codes = int8_kernels(self.isa), None if self.twin is None else self.twin.data
        if not torch.is_grad_enabled():
            return int8_product(input, self.weight, self.bias, kernels, codes)
        out: torch.Tensor = _Int8Product.apply(input, self.weight, self.bias, kernels, codes)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8, isa={self.isa}"


def int8_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Int8Kernels, codes: torch.Tensor | None
) -> torch.Tensor:
    """Return […, inputs] · weightᵀ (+ bias) in eight bits. codes: of the weight; None: made here."""
    if codes is None:
        codes = torch.empty(kernels.nbytes(weight), dtype=torch.uint8)
        kernels.encode(weight.contiguous(), codes, 0, len(weight))
    return shaped(kernels.linear(x.reshape(-1, x.shape[-1]), codes, weight, bias), *x.shape[:-1], len(weight))


class _Int8Product(torch.autograd.Function):
    """Its gradient is straight-through: rounding to codes counts as the identity, so that it is the gradient of the product of
    the rounded numbers."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Int8Kernels, codes: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.kernels = kernels
        return int8_product(x, weight, bias, kernels, codes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, of_x, of_weight = grad.reshape(-1, grad.shape[-1]), None, None
        if ctx.needs_input_grad[0]:
            of_x = product(rows, ctx.kernels.rounded(weight, True)).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            of_weight = product(rows.T, ctx.kernels.rounded(x.reshape(-1, x.shape[-1]), False))
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None
