"""What Triton's interpreter multiplies with here: sums in one order, so that a kernel's own order is what tests of bits see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from rollout.engine.cuda.exact import exact_linear  # noqa: E402
from tests.support import interpreter  # noqa: E402
from tests.support.interpreter import ordered_dot  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device multiplies by itself")


@triton.jit
def narrowed(x, out, size, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [size] = x [size] in out's dtype."""
    n = tl.arange(0, WIDTH)
    tl.store(out + n, tl.load(x + n, mask=n < size, other=0.0).to(out.dtype.element_ty), mask=n < size)


@triton.jit
def combined(x, out, number, other, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [WIDTH] = (x [WIDTH] + number) · other, and then the last of x, less number."""
    n = tl.arange(0, WIDTH)
    tl.store(out + n, (tl.load(x + n) + number) * other)
    tl.store(out + WIDTH, tl.load(x + (WIDTH - 1)) - number)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("inputs", [1, 16, 33])
def test_a_row_is_the_same_wherever_it_stands(inputs: int) -> None:
    """Among other rows, at another place, in another memory order; and right."""
    a, b, added = normal(32, inputs), normal(inputs, 24, seed=1), normal(32, 24, seed=2)
    whole = ordered_dot(a, b, added)
    np.testing.assert_allclose(whole, a.astype(float) @ b + added, rtol=1e-5, atol=1e-5)
    order = np.random.default_rng(3).permutation(32)
    np.testing.assert_array_equal(ordered_dot(a[order], b, added[order]), whole[order])
    np.testing.assert_array_equal(ordered_dot(np.asfortranarray(a)[5:8], np.asfortranarray(b), added[5:8]), whole[5:8])
    np.testing.assert_array_equal(ordered_dot(a, b[:, 7:8], added[:, 7:8]), whole[:, 7:8])


def test_bf16_is_rounded_to_the_nearest() -> None:
    """By kernels as by torch: all halves between two numbers, denormals, infinities and NaN."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    bits[::2] = bits[::2] & 0xFFFF0000 | 0x8000
    x = torch.from_numpy(np.append(bits.view(np.float32), np.float32([0, -0.0, 1e-45, np.inf, -np.inf, np.nan, 3.4e38])))
    made = torch.empty(len(x), dtype=torch.bfloat16)
    narrowed[(1,)](x, made, len(x), WIDTH=8192)
    assert torch.equal(made.isnan(), x.isnan()) and torch.equal(made[~x.isnan()], x[~x.isnan()].bfloat16())
    wide = torch.empty(len(x))
    narrowed[(1,)](made, wide, len(x), WIDTH=8192)
    assert torch.equal(wide[~x.isnan()], made[~x.isnan()].float())


@pytest.mark.parametrize(
    ("numbers", "number", "other", "wrong"),
    [
        ([0, 5], 2**31 - 6, 1, ""),
        ([0, 6], 2**31 - 6, 1, "add"),
        ([-5, -4], 4, 2**31 - 1, ""),
        ([-6, -4], 4, 2**31 - 1, "mul"),
        ([2, -(2**31)], 1, 1, "sub"),
    ],
)
def test_an_integer_that_overflows_is_seen(numbers: list[int], number: int, other: int, wrong: str) -> None:
    """In any element of a block, at the first number that 32 bits do not hold, and not before it."""
    x, out = torch.tensor(numbers, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    if wrong:
        with pytest.raises(Exception, match=f"int32 overflow detected for operation {wrong}"):
            combined[(1,)](x, out, number, other, WIDTH=2)
    else:
        combined[(1,)](x, out, number, other, WIDTH=2)
        assert out.tolist() == [(one + number) * other for one in numbers] + [numbers[-1] - number]


def by_place(a: np.ndarray, b: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Odd rows are summed from the last input to the first, as a BLAS sums the rows at the end of a block by other code."""
    made = ordered_dot(a, b, added)
    made[1::2] = ordered_dot(a[1::2, ::-1], b[::-1], added[1::2])
    return made


def test_an_order_that_depends_on_the_place_of_a_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control, and that kernels multiply by what is ours."""
    x, weight = torch.from_numpy(normal(40, 100)), torch.from_numpy(normal(20, 100, seed=1))
    assert torch.equal(exact_linear(x[[3]], weight), exact_linear(x, weight)[[3]])
    monkeypatch.setattr(interpreter, "ordered_dot", by_place)
    assert not torch.equal(exact_linear(x[[3]], weight), exact_linear(x, weight)[[3]])
