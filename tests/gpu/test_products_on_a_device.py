"""Products of `exact` on a device: cuBLASLt's are proven there, or it says why not; and so are Triton's with a tile by the
number of rows. What is proven holds for numbers of rows and places that the proof did not try."""

from __future__ import annotations

import pytest
import torch

from rollout.engine.cuda import exact
from rollout.engine.cuda.library_products import TILED_ROWS, PaddedProduct, by_library, by_rows, library_version, proven
from rollout.engine.cuda.proofs import Unproven, WeightShape, numbers, prove_row_invariant
from tests.support.on_device import needs_cuda

SHAPES = [WeightShape((2048, 1024, 1024), 1024), WeightShape((3072, 3072), 1024), WeightShape((1024,), 3072)]
"""of Qwen3-0.6B"""
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), needs_cuda]


def test_what_is_proven_of_the_library_holds() -> None:
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    try:
        products = proven(PaddedProduct(by_library), SHAPES, library_version(), like)
    except Unproven as error:
        pytest.skip(f"Triton's product runs here: {error}")
    print(products.name)
    x, weight = torch.randn(9000, 1024, device="cuda").bfloat16(), torch.randn(4096, 1024, device="cuda").bfloat16()
    whole = products.multiply(x, weight, None)
    torch.testing.assert_close(whole, x @ weight.T, rtol=2**-6, atol=0.5)
    for begin, rows in ((0, 1), (8999, 1), (17, 3), (100, 77), (5, 270), (333, 1000), (1, 8999)):
        piece = x[begin : begin + rows]
        assert torch.equal(products.multiply(piece, weight, None), whole[begin : begin + rows])
        assert torch.equal(products.multiply(piece, weight[2048:3072], None), whole[begin : begin + rows, 2048:3072])


def test_what_is_proven_of_tiles_by_rows_holds() -> None:
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    try:
        prove_row_invariant(by_rows, SHAPES, TILED_ROWS, like, against=exact.product)
    except Unproven as error:
        pytest.skip(f"one tile runs here: {error}")
    x, weight = numbers(3000, 1024, 7, like), numbers(1000, 1024, 8, like)
    for rows in (1, 40, 64, 65, 500, 3000):
        assert torch.equal(by_rows(x[:rows], weight), exact.product(x[:rows], weight))
