"""Products of Triton's interpreter whose order of sums is written here. Its own are numpy's, whose BLAS picks an order by the
shape, the place of a row and the CPU; a test of bits judges the order of our kernels, and nothing of the machine's. And its
conversions to bf16 round to the nearest, as a device and torch do; its own cut the bits off.

What it computes again at each operation, types and whether an integer overflows, is computed once, or in numpy."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np


def ordered_dot(a: np.ndarray, b: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Return a [M, K] · b [K, N] + added [M, N] in `added`'s dtype: a sum from the first k to the last, then what is added.
    Multiplications and additions are of one number each, so every CPU rounds them alike."""
    total, product = np.zeros_like(added), np.empty_like(added)
    for column, row in zip(a.astype(added.dtype, copy=False).T, b.astype(added.dtype, copy=False), strict=True):
        total += np.multiply(column[:, None], row, out=product)
    total += added
    return total


def to_bf16(numbers: np.ndarray) -> np.ndarray:
    """Return the bits of fp32 numbers in bf16, uint16: the nearest one, of two the even one."""
    bits = numbers.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), bits >> 16 | 64, nearest).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Return bf16 numbers, given as uint16, in fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def use_ordered_dot() -> None:
    """Give both to the interpreter where it is what runs kernels. Before the first launch; for the whole process."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    # it replaces the members of Triton's modules at each launch and call, which takes a third of a small kernel's time, and
    # puts them back: nothing else in the process needs them
    replace, replaced = interpreter._patch_lang, set[frozenset[str]]()

    def replace_once(function: Any) -> Any:
        modules = frozenset(one.__name__ for one in function.__globals__.values() if one is tl or one is tl.core)
        kept = interpreter._LangPatchScope()
        if modules not in replaced:
            replace(function)
            replaced.add(modules)
        return kept

    interpreter._patch_lang = replace_once

    def create_dot(self: object, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
        assert a.dtype.primitive_bitwidth >= 16 and b.dtype.primitive_bitwidth >= 16, "no products of 8 bits"
        return TensorHandle(ordered_dot(a.data, b.data, d.data), d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
    convert = interpreter._convert_float

    def convert_float(numbers: np.ndarray, given: Any, wanted: Any, rounding: Any) -> np.ndarray:
        names = given.scalar.name, wanted.scalar.name
        if names == ("bf16", "fp32"):
            return from_bf16(numbers.view(np.uint16)).view(np.uint32)
        if names == ("fp32", "bf16"):
            assert rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE)
            return to_bf16(numbers.view(np.float32))
        made: np.ndarray = convert(numbers, given, wanted, rounding)
        return made

    interpreter._convert_float = convert_float
    keep_types()
    check_overflows_in_numpy()


def keep_types() -> None:
    """Make types and shapes of tensors once for all tensors that have them, which takes a third of an operation's time."""
    from triton.language import core
    from triton.runtime import interpreter

    blocks, sizes, arrays = dict[Any, dict[str, Any]](), dict[Any, Any](), dict[str, Any]()
    make_block, make_tensor, array_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = (getattr(one, "value", one) for one in getattr(shape, "values", shape))
        key = element_ty.name, getattr(element_ty, "address_space", ""), *numbers
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in sizes:
            make_tensor(self, handle, type)
            sizes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype, (self.numel, self.shape) = handle, type, type.scalar, sizes[key]

    def kept_array_type(type: Any) -> Any:
        if type.name not in arrays:
            arrays[type.name] = array_type(type)
        return arrays[type.name]

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    interpreter._get_np_dtype = kept_array_type


WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def check_overflows_in_numpy() -> None:
    """Check sums, differences and products of integers as Triton does, in 64 bits, without its tensors of the numbers between:
    they take as long as all else."""
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def checked(self: Any, one: Any, other: Any, operation: Any) -> None:
        kind = one.type.scalar
        if kind.int_bitwidth < 8 or kind.int_bitwidth >= 64 or kind != other.type.scalar:
            return check(self, one, other, operation)
        wide = WIDE[operation.__name__](one.handle.data, other.handle.data, dtype=np.int64)
        assert wide.min() >= kind.get_int_min_value() and wide.max() <= kind.get_int_max_value(), (
            f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"
        )

    TritonSemantic.binary_op_sanitize_overflow_impl = checked
