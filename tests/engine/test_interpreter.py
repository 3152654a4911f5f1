"""What Triton's interpreter multiplies with here: sums in one order, so that a kernel's own order is what tests of bits see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda.exact import exact_linear  # noqa: E402
from tests.support import interpreter  # noqa: E402
from tests.support.interpreter import ordered_dot  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device multiplies by itself")


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
