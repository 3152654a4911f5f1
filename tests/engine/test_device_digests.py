"""xxh3-128 by kernels, in Triton's interpreter where there is no GPU: always xxhash's own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import xxhash

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda import digests  # noqa: E402
from rollout.engine.cuda.digests import DeviceHashes, device_hashes, digests_of  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [0, 1, 16, 17, 128, 129, 240, 241, 255, 256, 960, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 33_793, 70_000]
"""where xxh3 is another function, and beside the ends of stripes and blocks"""


def data_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)).to(DEVICE)


def wanted(data: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(data.cpu().numpy().tobytes())


def test_every_size_beside_each_other() -> None:
    tensors = [data_of(size, size) for size in SIZES]
    assert digests_of(tensors) == [wanted(each) for each in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_every_dtype_wherever_it_lies(dtype: torch.dtype) -> None:
    """Also in the middle of a storage, where no word of 64 bits begins."""
    whole = torch.arange(3000, device=DEVICE).remainder(2).to(dtype)
    tensors = [each.view(torch.uint8) for each in (whole, whole[1:], whole[7:2500], whole[3:3])]
    assert digests_of(tensors) == [wanted(each) for each in tensors]


@pytest.mark.parametrize("seed", range(3))
def test_slices_batches_and_rows_in_turn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come slice by slice, between each other, with fewer sums at once than a slice has blocks."""
    r = random.Random(seed)
    monkeypatch.setattr(digests, "SLICE_BYTES", r.choice([1024, 4096, 9 * 1024]))
    rows = [data_of(r.choice([r.randrange(300), r.randrange(5000), r.randrange(20_000)]), seed * 100 + i) for i in range(5)]
    hashes = DeviceHashes(len(rows), DEVICE, r.choice([1024, 3 * 1024, 20 * 1024]))
    left = {row: [(a, b) for a, b in hashes.cuts(len(data))] for row, data in enumerate(rows)}
    while left:
        row = r.choice(sorted(left))
        begin, end = left[row].pop(0)
        hashes.update(row, rows[row][begin:end], last=not left[row])
        if not left[row]:
            del left[row]
    assert hashes.read()() == [wanted(each) for each in rows]


def test_cuts_are_made_one_by_one() -> None:
    """Of data of any size, the first costs no more than that."""
    assert next(iter(DeviceHashes(1, DEVICE).cuts(2**60))) == (0, digests.SLICE_BYTES)


def test_an_engine_makes_them_by_their_number() -> None:
    """As `CudaMemory.hashes` is called by staging, sleep and refreshes within a process."""
    make = device_hashes(DEVICE)
    assert make is not None
    hashes, rows = make(2), [data_of(700), data_of(3000, 1)]
    for i, data in enumerate(rows):
        hashes.add(i, data)
    assert hashes.read()() == [wanted(each) for each in rows]


def test_one_bit_changes_it() -> None:
    """In any lane of any stripe, in the rest and in the last stripe."""
    data = data_of(3000)
    others = []
    for at in (0, 7, 63, 64, 1023, 1024, 2047, 2048, 2935, 2936, 2999):
        others.append(data.clone())
        others[-1][at] ^= 1
    found = digests_of([data, *others])
    assert len(set(found)) == len(found) and found == [wanted(each) for each in (data, *others)]


def test_a_chain_that_forgets_a_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    chained = DeviceHashes._sum
    monkeypatch.setattr(DeviceHashes, "_sum", lambda self, row, data, blocks: chained(self, row, data[1024:], blocks - 1))
    assert digests_of([data_of(5000)]) != [wanted(data_of(5000))]
