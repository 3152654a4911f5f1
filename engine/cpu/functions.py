"""Element-wise functions whose results do not depend on an element's position in its tensor, for the forward of a torch module.

torch computes such a function in vectors; the rest at the end of a tensor, of a row that is not contiguous, or of a thread's
share goes through scalar code, whose exp, tanh and roots give other bits. So a token's numbers would depend on the number of
tokens in the step, unless each row is a multiple of the vector length. Here the elements are made contiguous and padded with
ones to a length without a rest, in every thread; if that is the case already, torch is called unchanged:

    callers(module)                 finds the modules whose own code calls a function of `FUNCTIONS` in a forward
    use_whole_vectors(modules)      makes them compute these functions in whole vectors
    plain_functions(module)         undoes it

The functions themselves and their backward are torch's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from math import lcm
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
R = TypeVar("R")
VECTOR = 64
"""most elements that torch processes at a time: two vectors of 32 bf16 numbers"""
GRAIN = 32768
"""elements per thread, if torch uses as many threads as there is work for (at::internal::GRAIN_SIZE)"""
SERIAL = 16384
"""elements up to which one thread does the work (the smallest such limit is gelu's)"""
Rule = Callable[[tuple[Any, ...], dict[str, Any]], bool]
"""whether torch's scalar code may give other bits than its vectors, for the arguments of a call"""
ALWAYS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "celu", "cos", "cosh", "digamma", "elu", "erf", "erfc",
    "erfinv", "exp", "exp2", "expit", "expm1", "float_power", "gelu", "hardsigmoid", "hardswish", "lgamma", "log", "log10",
    "log1p", "log2", "logaddexp", "logaddexp2", "logit", "logsigmoid", "mish", "selu", "sigmoid", "silu", "sin", "sinc",
    "sinh", "softplus", "tan", "tanh", "tanhshrink", "xlogy",
)  # fmt: skip


def _functions(rule: Rule, *names: str) -> dict[Callable[..., Any], Rule]:
    """Return all functions of torch with these names: functions, methods, operators, in-place versions."""
    places, forms = (torch, torch.Tensor, nn.functional, torch.special), ("{}", "{}_", "__{}__", "__i{}__", "__r{}__")
    found = (getattr(place, form.format(name), None) for place in places for form in forms for name in names)
    return {each: rule for each in found if callable(each)}


def _no_product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    power = args[1] if len(args) > 1 else kwargs.get("exponent")
    return not (isinstance(power, (int, float)) and power in (0.5, 1, 2, 3))


FUNCTIONS = {
    **_functions(lambda args, kwargs: True, *ALWAYS),
    **_functions(_no_product, "pow"),
    **_functions(lambda args, kwargs: any(x.dtype != torch.float32 for x in _tensors(args, kwargs)), "rsqrt"),
    **_functions(lambda args, kwargs: kwargs.get("alpha", 1) != 1, "add", "sub"),
    **_functions(lambda args, kwargs: any(isinstance(x, torch.Tensor) and x.is_complex() for x in args), "mul"),
}
"""Sums, products, quotients and single roots are rounded the same way everywhere and are not listed, except for the calls that
the rules above name"""


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]


def whole(size: int, threads: int) -> int:
    """Return the smallest length ≥ `size` that torch splits into whole vectors for every thread."""
    while left := size % (unit := VECTOR if size <= SERIAL else VECTOR * lcm(threads, min(threads, -(-size // GRAIN)))):
        size += unit - left
    return size


def in_whole_vectors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an element-wise function of CPU tensors, which may have different shapes, with the bits of its vector code."""
    given = [each for each in _tensors(args, kwargs) if each.ndim]
    if not given or "out" in kwargs or not all(each.is_cpu for each in given):
        return func(*args, **kwargs)
    shape = given[0].shape if len(given) == 1 else torch.broadcast_shapes(*(each.shape for each in given))
    size = shape.numel()
    padded = whole(size, torch.get_num_threads())
    if padded == size and all(each.shape == shape and each.is_contiguous() for each in given):
        return func(*args, **kwargs)

    def laid(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or not each.ndim:
            return each
        flat = each.reshape(-1) if each.shape == shape else each.expand(shape).reshape(-1)
        return flat if padded == size else torch.constant_pad_nd(flat, (0, padded - size), 1)

    there = [laid(each) for each in args]
    result = func(*there, **{name: laid(each) for name, each in kwargs.items()})
    made: torch.Tensor = result[:size].view(shape)
    if there and result is there[0]:  # an in-place function
        return args[0].copy_(made)
    return made


class _Active(threading.local):
    whole_vectors = False


_active = _Active()
"""of each thread"""


class WholeVectors(TorchFunctionMode):
    """While active, element-wise functions give the bits of their vector code."""

    def __enter__(self) -> Self:
        self.outer, _active.whole_vectors = _active.whole_vectors, True
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        _active.whole_vectors = self.outer
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (rule := FUNCTIONS.get(func)) and rule(args, kwargs := kwargs or {}):
            return in_whole_vectors(func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)


class Callers(TorchFunctionMode):
    """While active, records in `found` the modules that call an element-wise function. `inside`: modules whose forward is
    running, innermost last. `reached`: ids of the modules whose forward ran, and of the parameters that a function computed
    with."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[nn.Module] = []
        self.found: dict[int, nn.Module] = {}
        self.reached: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside and (rule := FUNCTIONS.get(func)) and rule(args, kwargs):
            self.found[id(self.inside[-1])] = self.inside[-1]
        out = func(*args, **kwargs)
        if isinstance(out, (torch.Tensor, list, tuple)):  # others look at a dtype or a device
            for each in (*args, *kwargs.values()):
                self.reached.update(map(id, each if isinstance(each, (list, tuple)) else (each,)))
        return out


def plain_calls(kernel: Callable[P, R]) -> Callable[P, R]:
    """Make a mode such as `WholeVectors` skip what a wrapper of our kernels does with tensors: each size, dtype or address that
    it looks up would cost a call of the mode. The kernel itself must depend on no mode."""

    @wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return kernel(*args, **kwargs)

    return call


@contextmanager
def callers(module: nn.Module) -> Iterator[Callers]:
    """Record the modules inside `module` that call element-wise functions in a forward, and all that it reaches."""
    noted = Callers()

    def enter(each: nn.Module, *_: Any) -> None:
        noted.inside.append(each)
        noted.reached.add(id(each))

    def leave(*_: Any) -> None:
        noted.inside.pop()

    hooks = [each.register_forward_pre_hook(enter) for each in module.modules()]
    hooks += [each.register_forward_hook(leave, always_call=True) for each in module.modules()]
    try:
        with noted:
            yield noted
    finally:
        for hook in hooks:
            hook.remove()


@cache
def _in_whole_vectors(plain: Any) -> type[nn.Module]:
    """Return a subclass of `plain` whose calls run under `WholeVectors`: also of an instance with a forward of its own."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @wraps(plain.__call__)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _active.whole_vectors:  # a second mode would see every call again
            return plain.__call__(self, *args, **kwargs)
        with WholeVectors():
            return plain.__call__(self, *args, **kwargs)

    def reduce(self: nn.Module) -> tuple[Any, ...]:
        return _empty, (plain,), self.__dict__

    members = {"__call__": call, "plain_class": plain, "__reduce__": reduce, "__doc__": plain.__doc__}
    return type(plain.__name__, (plain,), {**members, "__module__": plain.__module__})


def _empty(plain: Any) -> nn.Module:
    """Make an empty instance, for copying a module: pickle cannot find this class by name."""
    kind = _in_whole_vectors(plain)
    return kind.__new__(kind)


def use_whole_vectors(modules: Iterable[nn.Module]) -> None:
    """Make these modules compute element-wise functions with the bits of torch's vector code, in place."""
    for each in modules:
        kind: Any = type(each)
        if "plain_class" not in vars(kind):
            each.__class__ = _in_whole_vectors(kind)


def plain_functions(module: nn.Module) -> None:
    """Undo `use_whole_vectors` in a module and its submodules."""
    for each in module.modules():
        if plain := vars(type(each)).get("plain_class"):
            each.__class__ = plain
