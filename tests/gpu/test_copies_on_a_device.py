"""KV offload with the real copy stream: blocks, and whole samples under pressure."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.engine.cuda.copies import StreamCopies
from rollout.engine.cuda.memory import CudaMemory
from rollout.engine.kv.block import BlockCopies, Copied, Spans
from rollout.engine.kv.copies import Copy, SlotClaims
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.kv.sizing import PoolSizes
from tests.support.equivalence import groups
from tests.support.on_device import DEVICE, agree, engine, needs_cuda
from tests.support.toy import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
BUSY_CYCLES = 5_000_000
"""of the device: some milliseconds"""


@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize("ahead", [False, True])
def test_under_pressure_as_with_room(ahead: bool) -> None:
    tight = engine(kv_tokens=320, cpu_offload_gib=0.01, mirror_ahead=ahead, copy_ahead=ahead)
    agree(run(engine(kv_tokens=16_384), groups()), run(tight, groups()))
    counters = tight.counters
    assert counters.offloads > 0 and counters.restored_blocks > 0 and counters.recomputed_tokens == 0
    assert counters.move_seconds > 0 and tight.scheduler.state.rates.copy_blocks_per_second > 0
    assert isinstance(tight.worker.kv.copy_engine, StreamCopies) == (DEVICE == "cuda")


def wrong_blocks(kv: PagedKV, rounds: int = 12) -> int:
    """The compute stream is kept busy, so that copies which do not wait for it come too early, and work that does not wait
    for copies writes over what they read. Returns how many blocks came back other than they went."""
    wrong = 0
    for i in range(rounds):
        value, host = float(i + 1), i % 4
        torch.cuda._sleep(BUSY_CYCLES)
        kv.data[0].fill_(value)
        kv.move(BlockCopies(offloads=[(0, host)]))
        kv.data[0].fill_(-1)  # its slot is somebody else's now
        kv.move(BlockCopies(restores=[(host, 1)], copies=[(1, 2)]))
        back, copied = kv.data[1].clone(), kv.data[2].clone()
        torch.cuda._sleep(BUSY_CYCLES)
        kv.data[3].fill_(value)
        kv.move(BlockCopies(mirrors=[(3, 4 + host)]))
        kv.data[3].fill_(-2)
        kv.move(BlockCopies(restores=[(4 + host, 5)]))
        wrong += sum(not bool((block == value).all()) for block in (back, copied, kv.data[5].clone()))
    kv.copy_engine.finish()
    return wrong


class Hasty(StreamCopies):
    """The negative control: copies that wait for nobody, and for which nobody waits."""

    def run(self, moves: BlockCopies, copy: Copy, uses: SlotClaims) -> Copied:
        for way, act, pairs in (
            (self._out, copy.out, [*moves.offloads, *moves.mirrors]),
            (self._into, copy.into, moves.restores),
        ):
            with torch.cuda.stream(way.stream):
                act(pairs)
        copy.within(moves.copies)
        return Copied(0, 0.0)


@needs_cuda
def test_copies_wait_for_the_compute_and_it_for_them() -> None:
    device = torch.device(DEVICE)
    kv = PagedKV(KVGeometry(8, 4, 64, torch.float32), PoolSizes(16, 8, 8), CudaMemory(device), StreamCopies(device))
    assert wrong_blocks(kv) == 0
    kv.copy_engine = Hasty(device)
    assert wrong_blocks(kv) > 0


@needs_cuda
def test_copies_from_host_memory_do_not_hold_the_host_up() -> None:
    """Where it is not pinned, a copy waits for the device: then the compute is done when `move` returns."""
    kv = PagedKV(
        KVGeometry(8, 4, 64, torch.float32),
        PoolSizes(16, 8, 8),
        CudaMemory(torch.device(DEVICE)),
        StreamCopies(torch.device(DEVICE)),
    )
    done = torch.cuda.Event()
    torch.cuda._sleep(100 * BUSY_CYCLES)
    done.record()
    kv.move(BlockCopies(offloads=[(0, 0)], restores=[(1, 1)], copies=[(2, 3)], mirrors=[(4, 4)], prefetches=[(2, 5)]))
    assert not done.query(), "the host waited for the device"
    torch.cuda.synchronize()
    assert kv.move(BlockCopies()).blocks == 4


@needs_cuda
def test_copies_run_while_the_device_computes() -> None:
    """A step that uses none of their slots is under way: they end before it does."""
    device = torch.device(DEVICE)
    kv = PagedKV(KVGeometry(8, 4, 64, torch.float32), PoolSizes(16, 8, 8), CudaMemory(device), StreamCopies(device))
    nobody = Spans(np.zeros((0, 0), np.int32), np.zeros(0, int), np.zeros(0, int))
    kv.move(BlockCopies(), nobody)
    kv.move(BlockCopies(), nobody)
    done = torch.cuda.Event()
    torch.cuda._sleep(1000 * BUSY_CYCLES)
    done.record()
    kv.move(BlockCopies(offloads=[(0, 0)], prefetches=[(2, 5)]), nobody)
    kv.copy_engine.finish()
    assert not done.query(), "a copy waited for compute that uses none of its slots"
    torch.cuda.synchronize()
