"""Products y = x · wᵀ + b of nn.Linear layers, in which a row's result does not depend on the other rows; for engines and
trainers.

torch's own products choose the order of their sums by the number of rows: below a few rows on every CPU, and at any number of
rows on CPUs with AMX. These products give a row the same bits alone, in a batch and padded. `arithmetic` names these bits: with
the same name, weights and tokens, service and trainer get the same numbers.

    use_products(module, isa)    every nn.Linear uses these products; parameters, names and state_dict stay unchanged
    plain_products(module)       undoes it

Only the forward is ours. The backward is torch's: grad · w, gradᵀ · x (both by `rollout.engine.cpu.backward`, which avoids
torch's bf16 if it is slow), and the sum of grad."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rollout.engine.cpu.backward import product
from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.cpu.functions import in_whole_vectors, plain_calls, plain_functions
from rollout.engine.cpu.isa import here, isa_of
from rollout.engine.cpu.kernels import Kernels, choose
from rollout.engine.forward.arithmetic import torch_arithmetic

DTYPES = (torch.bfloat16, torch.float32)
SILU = ("SiLU", "SiLUActivation")
"""activation classes that the decoders support"""


class Products(Protocol):
    isa: str
    """instruction set, or "torch\""""
    arithmetic: str

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [T, inputs] · [outputs, inputs]ᵀ (+ [outputs]) → [T, outputs], all of one dtype of `DTYPES`, on the CPU."""

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """Return x · sigmoid(x), of any shape, in one of `DTYPES`."""


class NotServed(ValueError):
    """A product of this module cannot be replaced by ours; the message names the first one."""


class Pieces(NamedTuple):
    """Numbers of rows in which a product is given to torch."""

    least: int
    step: int
    """numbers of rows are padded to a multiple of this"""
    most: int
    steady: bool
    """whether a row had the same bits in all numbers and positions that were tried"""

    def padded(self, rows: int) -> int:
        return max(self.least, -(-rows // self.step) * self.step)


class TorchProducts:
    """torch's products, in pieces of rows found by trial: all rows at once if torch gives a row the same bits at every
    position, else padded to whole tiles, else as few rows at a time as needed."""

    isa, arithmetic = "torch", torch_arithmetic()
    LEAST = {torch.bfloat16: 2, torch.float32: 16}
    """rows below which torch uses another code path on every CPU"""
    TRIED = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 33, 129, 213, 513, 1000)
    STEPS = (1, 16, 64)
    MOST = (1024, 256, 64)
    MOST_WORK = 4e9
    """floating-point operations beyond which a larger piece brings nothing"""

    def __init__(self) -> None:
        self._pieces: dict[tuple[Any, ...], Pieces] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        pieces = self.pieces(weight, bias)
        if len(x) == 0 or (len(x) <= pieces.most and pieces.padded(len(x)) == len(x)):
            return nn.functional.linear(x, weight, bias)
        return torch.cat([_padded_linear(part, weight, bias, pieces.padded(len(part))) for part in x.split(pieces.most)])

    def pieces(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Pieces:
        """Return the pieces for a product of this shape, with torch's current number of threads."""
        key = (*weight.shape, bias is None, weight.dtype, torch.get_num_threads())
        if key not in self._pieces:
            self._pieces[key] = self._try(weight, bias)
        return self._pieces[key]

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = in_whole_vectors(nn.functional.silu, (x,), {})
        return out

    @torch.no_grad()
    def _try(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Pieces:
        sizes = [n for n in self.MOST if 2 * n * weight.numel() <= self.MOST_WORK] or [self.MOST[-1]]
        x, probe = sensitive(sizes[0], weight)
        for most in sizes:
            want = nn.functional.linear(x[:most], probe, bias)
            for step in self.STEPS:
                pieces = Pieces(self.LEAST[weight.dtype], step, most, True)
                if all(
                    torch.equal(_padded_linear(x[at], probe, bias, pieces.padded(n)), want[at])
                    for n in self.TRIED
                    if n <= most
                    for at in (slice(n), slice(most - n, most))
                ):
                    return pieces
        return Pieces(sizes[-1], sizes[-1], sizes[-1], False)


def sensitive(rows: int, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, inputs] and a weight of the given shape whose exact product is 0, so that the result is the rounding
    error of the sums: another order of summation changes nearly every number, while rounding to bf16 would hide all but one in
    thousands. The magnitudes differ widely; otherwise sums of bf16 products would be exact in fp32 in any order."""
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(0)
    half = inputs // 2
    order = torch.randperm(2 * half, generator=generator)
    x, w = (torch.randn(n, half, generator=generator) for n in (rows, outputs))
    powers = (torch.randint(-8, 8, each.shape, generator=generator, dtype=torch.float32).exp2_() for each in (x, w))
    x, w = (each.mul_(power).to(weight.dtype) for each, power in zip((x, w), powers, strict=True))
    x, w = torch.cat([x, -x], 1)[:, order], torch.cat([w, w], 1)[:, order]
    return nn.functional.pad(x, (0, inputs - 2 * half)), nn.functional.pad(w, (0, inputs - 2 * half))


class NativeProducts:
    """The products of `c/products.h`."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.isa, self.arithmetic = kernels, kernels.isa, kernels.arithmetic

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.kernels.linear(x, weight, bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.silu(x)


@cache
def products_of(isa: str) -> Products:
    """Return the products of an instruction set; torch's for "torch". Raises NativeUnavailable."""
    return TorchProducts() if isa == "torch" else NativeProducts(Kernels(isa))


def isas_for(arithmetic: str | None) -> tuple[str, str]:
    """Return the instruction sets of products and of attention that compute the arithmetic `engine.arithmetic` on this machine;
    None = the best one, as a service here uses. Raises ValueError, listing what is available, if it has none."""
    if arithmetic is None:
        best = choose().isa
        return products_of(best).isa, best
    of_products, of_attention = {}, {}
    for isa in reversed([*here(), "torch"]):
        try:
            of_products[products_of(isa).arithmetic] = isa
        except NativeUnavailable:
            continue
        of_attention[torch_arithmetic() if isa == "torch" else isa_of(isa).arithmetic] = isa
    first, _, second = arithmetic.partition("+")
    for name, have in ((first, of_products), (second or first, of_attention)):
        if name not in have:
            raise ValueError(
                f"the service computes with arithmetic {arithmetic!r}, and this machine has {', '.join(reversed(have))}: start "
                "the service with an isa whose arithmetic both machines have, or train on a machine like the service's"
            )
    return of_products[first], of_attention[second or first]


class ExactLinear(nn.Linear):
    """An nn.Linear whose class `use_products` replaced."""

    isa: str

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @plain_calls
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[…, inputs] → […, outputs]. Raises ValueError under autocast, and for inputs of another dtype or device."""
        if torch.is_autocast_enabled(input.device.type):
            raise ValueError("autocast would convert the weights to another dtype: call the exact model without it")
        if input.dtype != self.weight.dtype or input.device.type != "cpu":
            raise ValueError(
                f"an input in {input.dtype} on {input.device} for a weight in {self.weight.dtype}: must have "
                "the weight's dtype, on the CPU"
            )
        products = products_of(self.isa)
        if not torch.is_grad_enabled():
            return _product(input, self.weight, self.bias, products)
        out: torch.Tensor = _Product.apply(input, self.weight, self.bias, products)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, isa={self.isa}"


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, products: Products) -> torch.Tensor:
    """Return […, inputs] · [outputs, inputs]ᵀ → […, outputs]."""
    out = products.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], len(weight))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, products: Products) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        return _product(x, weight, bias, products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = product(rows, weight).view(*grad.shape[:-1], weight.shape[1]) if ctx.needs_input_grad[0] else None
        of_weight = product(rows.T, x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


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
        return products.silu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.aten.silu_backward(grad, *ctx.saved_tensors), None


def use_products(module: nn.Module, isa: str) -> None:
    """Make every nn.Linear and SiLU of `module` compute with `products_of(isa)`, in place.

    Raises NotServed for weights on another device or of another dtype, for subclasses of nn.Linear (quantised ones), and for
    matrices that belong neither to a Linear nor to an embedding (experts); NativeUnavailable. The module is unchanged
    then."""
    products_of(isa)
    linears = [_served(name, each) for name, each in module.named_modules() if isinstance(each, nn.Linear)]
    for name, each in module.named_modules():
        for parameter, tensor in each.named_parameters(recurse=False):
            if tensor.squeeze().ndim > 1 and not isinstance(each, (nn.Linear, nn.Embedding)) and not is_depthwise(each):
                raise NotServed(
                    f"{name}.{parameter} is a matrix of a {type(each).__name__}, not of an nn.Linear: its product would stay "
                    "torch's own"
                )
    for linear in linears:
        linear.__class__, linear.isa = ExactLinear, isa
    activation: Any
    for activation in module.modules():
        if type(activation).__name__ in SILU:
            activation.plain, activation.isa = type(activation), isa
            activation.__class__ = ExactSiLU
        elif type(activation) is ExactSiLU:
            activation.isa = isa


def is_depthwise(module: nn.Module) -> bool:
    """Return whether a module is a convolution of each channel by itself, which is no matrix product."""
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels


def plain_products(module: nn.Module) -> None:
    """Undo `use_products` and `rollout.engine.cpu.functions.use_whole_vectors`."""
    modules: list[Any] = list(module.modules())
    for each in modules:
        kind = type(each)
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
    for tensor in linear.parameters():
        if tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
            raise NotServed(f"{name} is in {tensor.dtype} on {tensor.device}: need bfloat16 or float32 on the CPU")
    return linear


def _padded_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Return the product of x, computed with the last row repeated until there are `rows`."""
    more = torch.cat([x, x[-1:].expand(rows - len(x), -1)]) if rows > len(x) else x
    return nn.functional.linear(more, weight, bias)[: len(x)]
