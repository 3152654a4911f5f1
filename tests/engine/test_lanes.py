"""Copies beside the compute, on a stand-in for torch.cuda whose streams run in any order that their events allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from rollout.engine.cuda.copies import StreamCopies
from rollout.engine.kv.block import BlockCopies, Spans
from rollout.engine.kv.copies import ALL_SLOTS, Copy, Pairs, SlotClaims, SyncCopies, step_claims
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import HostMemory
from rollout.engine.scheduling.plan import Plan
from tests.support.fake_cuda import FakeCuda, FakeEvent, FakeStream
from tests.support.harness import Harness

CUDA = torch.device("cuda")
DEVICE_BLOCKS, HOST_BLOCKS, BLOCK = 24, 64, 4


class Work(NamedTuple):
    """Of one step: its copies, and what its compute uses."""

    moves: BlockCopies
    spans: Spans

    @property
    def uses(self) -> SlotClaims:
        return step_claims(DEVICE_BLOCKS, BLOCK, self.spans)

    def waits_for_its_own_copies(self) -> bool:
        """True if the compute uses a slot that copies between device and host of the very same step use, not both reading."""
        uses = self.uses
        restored, given_up = (
            [pair[end] for pair in pairs] for pairs, end in ((self.moves.restores, 1), (self.moves.offloads, 0))
        )
        copied = [target for _, target in self.moves.copies]
        return uses.reads(np.array(restored, int)) or uses.writes(np.array(given_up, int)) or bool({*copied} & {*given_up})


def under_pressure(seed: int, copy_ahead: bool) -> list[Work]:
    """The steps of children that need three times the device's blocks, with prompts that come back."""
    r, steps = random.Random(seed), list[Work]()
    h = Harness(
        DEVICE_BLOCKS, HOST_BLOCKS, block_size=BLOCK, max_num_seqs=8, max_batch_tokens=16, lookahead_blocks=1, min_run_tokens=4,
        copy_ahead=copy_ahead, mirror_ahead=copy_ahead, overlap=True,
    )  # fmt: skip
    compute = h.compute

    def noted(plan: Plan) -> Any:
        steps.append(Work(plan.moves, plan.spans))
        return compute(plan)

    h.compute = noted  # type: ignore[method-assign]
    for number in range(10):
        prompt = [1 + number % 4] * r.randrange(3, 13)
        assert h.submit(f"g{number}", prompt, n=2, max_tokens=r.randrange(8, 25), seed=number)
    h.finish()
    return steps


class Bytes:
    """Pools of tags. A step's compute notes all tags that it reads and writes its own; `issue` runs a piece of work at once, or
    hands it to a stream."""

    def __init__(self, issue: Callable[[Callable[[], None]], None] = lambda work: work()) -> None:
        self.device = [f"device {slot}" for slot in range(DEVICE_BLOCKS)]
        self.host = [f"host {slot}" for slot in range(HOST_BLOCKS)]
        self.seen: list[list[str]] = []
        self._issue = issue
        self.copy = Copy(
            out=partial(self._pairs, self.device, self.host),
            into=partial(self._pairs, self.host, self.device),
            within=partial(self._pairs, self.device, self.device),
        )

    def _pairs(self, source: list[str], target: list[str], pairs: Pairs) -> None:
        def work(pair: tuple[int, int]) -> None:
            target[pair[1]] = source[pair[0]]

        for pair in pairs:
            self._issue(partial(work, pair))

    def compute(self, step: int, work: Work) -> None:
        table, starts, ends = work.spans
        rows = [row[: -(-end // BLOCK)].tolist() for row, end in zip(table, ends.tolist(), strict=True)]

        def read() -> None:
            self.seen.append([self.device[slot] for row in rows for slot in row])

        def write(row: list[int], first: int) -> None:
            for at, slot in enumerate(row[first:], first):
                self.device[slot] = f"{self.device[slot][-30:] if at == first else ''} step {step}"

        self._issue(read)
        for row, start in zip(rows, starts.tolist(), strict=True):
            self._issue(partial(write, row, start // BLOCK))


def in_order(steps: list[Work]) -> list[list[str]]:
    pools, lane = Bytes(), SyncCopies()
    for number, work in enumerate(steps):
        lane.run(work.moves, pools.copy, work.uses)
        pools.compute(number, work)
    return pools.seen


def beside(steps: list[Work], seed: int, copies: type[FakeStream] = FakeStream) -> list[list[str]]:
    """The same on streams, the device at its own pace."""
    r = random.Random(seed)
    cuda = FakeCuda(r, copies)
    lane, pools = StreamCopies(CUDA, cuda), Bytes(lambda work: cuda.current.issue(work))
    for number, work in enumerate(steps):
        lane.run(work.moves, pools.copy, work.uses)
        pools.compute(number, work)
        cuda.work(r.randrange(40))
    cuda.work(1_000_000)
    return pools.seen


def test_steps_read_the_same_bytes_whatever_the_device_does_first() -> None:
    for seed in range(6):
        steps = under_pressure(seed, copy_ahead=seed % 2 == 0)
        want = in_order(steps)
        assert any(work.moves.restores or work.moves.prefetches for work in steps)
        assert all(beside(steps, 10 * seed + again) == want for again in range(10)), seed


class Hasty(FakeStream):
    """The negative control: copy streams that wait for nobody."""

    def wait_event(self, event: FakeEvent) -> None:
        pass


def test_a_copy_that_does_not_wait_is_seen() -> None:
    steps = under_pressure(0, copy_ahead=True)
    assert any(beside(steps, seed, Hasty) != in_order(steps) for seed in range(20))


@pytest.mark.parametrize("way", ["_into", "_out"])
def test_compute_that_does_not_wait_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = StreamCopies._hold

    def forget(self: StreamCopies, compute: Any, claims: Any) -> None:
        kept, getattr(self, way).under_way = getattr(self, way).under_way, []
        hold(self, compute, claims)
        getattr(self, way).under_way = kept

    steps = under_pressure(0, copy_ahead=False)
    want = in_order(steps)
    monkeypatch.setattr(StreamCopies, "_hold", forget)
    assert any(beside(steps, seed) != want for seed in range(50))


def held_up(steps: list[Work]) -> list[int]:
    """The steps whose compute has not ended when all other work is done that needs no copy of the same step: copies end before
    the next step is issued, and not earlier."""
    cuda = FakeCuda(random.Random(0))
    lane, pools = StreamCopies(CUDA, cuda), Bytes(lambda work: cuda.current.issue(work))
    held = []
    for number, work in enumerate(steps):
        lane.run(work.moves, pools.copy, work.uses)
        pools.compute(number, work)
        cuda.work_on(cuda.compute)
        if cuda.compute.queue:
            held.append(number)
        cuda.work(1_000_000)
    return held


def test_no_compute_waits_for_a_copy_that_it_does_not_read() -> None:
    """Streams of copies stand still: a step ends nevertheless, unless it uses a slot that its own copies fill or give up."""
    for copy_ahead in (True, False):
        steps = under_pressure(1, copy_ahead)
        copies = sum(bool(work.moves.blocks - len(work.moves.copies)) for work in steps)
        must = [number for number, work in enumerate(steps) if work.waits_for_its_own_copies()]
        assert held_up(steps) == must
        assert len(must) < copies / 2 if copy_ahead else len(must) > copies / 2, (len(must), copies)


def test_a_slot_that_is_used_later_holds_only_who_uses_it() -> None:
    """A prefetch is read two steps on, an offload's slot written three steps on; nobody else waits for either."""
    cuda = FakeCuda(random.Random(0))
    lane, pools = StreamCopies(CUDA, cuda), Bytes(lambda work: cuda.current.issue(work))

    def step(moves: BlockCopies, *slots: int, start: int = 0) -> bool:
        """Whether a step that uses these ends while copies stand still."""
        work = Work(moves, Spans(np.array([slots]), np.array([start]), np.array([BLOCK * len(slots)])))
        lane.run(work.moves, pools.copy, work.uses)
        pools.compute(0, work)
        cuda.work_on(cuda.compute)
        return not cuda.compute.queue

    assert step(BlockCopies(), 0, 1)
    assert step(BlockCopies(offloads=[(2, 0)], prefetches=[(1, 3)], mirrors=[(0, 2)]), 4, 5)
    assert step(BlockCopies(), 0, 2, 6, start=BLOCK * 2), "what is only copied from may be read"
    assert not step(BlockCopies(), 3, 7, start=BLOCK), "its block comes back"
    cuda.work(1000)
    assert step(BlockCopies(offloads=[(8, 3)]), 9)
    assert not step(BlockCopies(), 8), "its slot is still read"


def test_seconds_come_when_the_device_is_done() -> None:
    cuda = FakeCuda(random.Random(0))
    lane, pools = StreamCopies(CUDA, cuda), Bytes(lambda work: cuda.current.issue(work))
    pairs = [(i, i) for i in range(4)]
    assert lane.run(BlockCopies(offloads=pairs), pools.copy, ALL_SLOTS) == (0, 0.0)
    assert lane.run(BlockCopies(prefetches=pairs[:2]), pools.copy, ALL_SLOTS) == (0, 0.0)
    cuda.work(1000)
    assert lane.run(BlockCopies(), pools.copy, ALL_SLOTS) == (6, 0.5)
    assert lane.run(BlockCopies(), pools.copy, ALL_SLOTS) == (0, 0.0)


class NoTensorByHand(TorchFunctionMode):
    """Refuses tensors that are made of Python's or numpy's numbers: on CUDA the host would wait for all that was launched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), f"{func.__name__} beside Memory.send"
        return func(*args, **(kwargs or {}))


class Sends(HostMemory):
    sent = 0

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        self.sent += 1
        return [torch.frombuffer(array.copy(), dtype=torch.int64) for array in arrays]


def test_copies_on_the_device_make_no_host_wait() -> None:
    """Rows that are read and written by the same copies go through index tensors; these come by `Memory.send`, which pins."""
    memory = Sends()
    kv = PagedKV(KVGeometry(1, 1, 2, torch.float32), PoolSizes(2, 4, 1), memory, StreamCopies(CUDA, FakeCuda(random.Random(0))))
    kv.data.copy_(torch.arange(4.0)[:, None, None, None, None, None].expand_as(kv.data))
    for pairs, sends, want in (([(0, 3)], 0, [0.0, 1.0, 2.0, 0.0]), ([(1, 2), (2, 1), (3, 0)], 1, [0.0, 2.0, 1.0, 0.0])):
        with NoTensorByHand():
            kv.move(BlockCopies(copies=pairs))
        assert memory.sent == sends and kv.data[:, 0, 0, 0, 0, 0].tolist() == want
    with pytest.raises(AssertionError, match="tensor beside"), NoTensorByHand():
        torch.tensor([1, 2])


def test_both_lanes_move_the_same_bytes() -> None:
    """Offload into a slot, restore over the slot that it gave up, copy what was restored, mirror the copy, and fetch what was
    mirrored."""
    moves = BlockCopies(offloads=[(0, 1)], restores=[(0, 0)], copies=[(0, 2)], mirrors=[(2, 2)], prefetches=[(2, 1)])
    results = []
    for aside in (False, True):
        kv = PagedKV(KVGeometry(1, 1, 2, torch.float32), PoolSizes(2, 3, 3), HostMemory())
        kv.data.copy_(torch.arange(3.0)[:, None, None, None, None, None].expand_as(kv.data))
        kv.host.copy_(10 + torch.arange(3.0)[:, None, None, None, None, None].expand_as(kv.host))
        if aside:
            kv.copy_engine = StreamCopies(CUDA, FakeCuda(random.Random(0)))
        copied = kv.move(moves)
        assert aside or (copied.blocks == 5 and copied.seconds > 0)
        results.append((kv.data[:, 0, 0, 0, 0, 0].tolist(), kv.host[:, 0, 0, 0, 0, 0].tolist()))
    assert results[0] == results[1] == ([10.0, 10.0, 10.0], [10.0, 0.0, 10.0])
    assert isinstance(PagedKV(KVGeometry(1, 1, 2, torch.float32), PoolSizes(2, 1, 1), HostMemory()).copy_engine, SyncCopies)
