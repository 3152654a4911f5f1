"""Copies beside the compute, on a stand-in for torch.cuda whose streams run in any order that their events allow."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.kv.block import Moves
from engine.kv.copies import Beside, InLine
from engine.kv.pages import KVGeometry, PagedKV
from engine.memory import HostMemory
from tests.support.fake_cuda import FakeCuda, FakeEvent, FakeStream

CUDA = torch.device("cuda")


def steps(seed: int, count: int = 12, copies: type[FakeStream] = FakeStream) -> list[tuple[str, int]]:
    """What happened, in order, when the host issued `count` steps and the device ran them at its own pace."""
    r = random.Random(seed)
    cuda, done = FakeCuda(r, copies), []
    lane = Beside(CUDA, cuda)

    def issue(what: str, step: int) -> Callable[[], None]:
        return lambda: cuda.current.issue(lambda: done.append((what, step)))

    for step in range(count):
        blocks = r.choice([0, 3])
        empty = lambda: None  # noqa: E731
        lane.run(issue("first", step) if blocks else empty, issue("beside", step) if blocks else empty, blocks)
        issue("compute", step)()
        cuda.work(r.randrange(8))
    cuda.work(10_000)
    return done


def broken(done: list[tuple[str, int]]) -> list[str]:
    """The rules that this order breaks."""
    at = {event: i for i, event in enumerate(done)}
    found = []
    for (what, step), i in at.items():
        if what == "first" and i > at["compute", step]:
            found.append("a step computes before its copies are there")
        if what == "first" and step and i < at["compute", step - 1]:
            found.append("a copy reads what the step before still writes")
        if what == "beside" and ("compute", step + 1) in at and i > at["compute", step + 1]:
            found.append("a slot is written while its mirror is still read from it")
    return found


def test_order_whatever_the_device_does_first() -> None:
    overlapped = 0
    for seed in range(500):
        done = steps(seed)
        assert not broken(done), seed
        at = {event: i for i, event in enumerate(done)}
        overlapped += sum(i > at["compute", step] for (what, step), i in at.items() if what == "beside")
    assert overlapped > 100, "mirrors never run beside the compute"


class Hasty(FakeStream):
    """The negative control: a copy stream that does not wait for the compute."""

    def wait_stream(self, other: FakeStream) -> None:
        pass


def test_a_copy_that_does_not_wait_is_seen() -> None:
    assert any("still writes" in rule for seed in range(100) for rule in broken(steps(seed, copies=Hasty)))


@pytest.mark.parametrize(("forgotten", "rule"), [("first", "before its copies"), ("beside", "its mirror")])
def test_a_forgotten_wait_is_seen(forgotten: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compute waits for the timed event behind `beside`, and for an event without time behind `first`."""
    wait = FakeStream.wait_event

    def forget(self: FakeStream, event: FakeEvent) -> None:
        if event.timed != (forgotten == "beside"):
            wait(self, event)

    monkeypatch.setattr(FakeStream, "wait_stream", lambda self, other: wait(self, other.record_event()))
    monkeypatch.setattr(FakeStream, "wait_event", forget)
    assert any(rule in found for seed in range(200) for found in broken(steps(seed)))


def test_seconds_come_when_the_device_is_done() -> None:
    cuda = FakeCuda(random.Random(0))
    lane = Beside(CUDA, cuda)
    nothing = lambda: None  # noqa: E731
    assert lane.run(nothing, nothing, 4) == (0, 0.0)
    assert lane.run(nothing, nothing, 2) == (0, 0.0)
    cuda.work(1000)
    assert lane.run(nothing, nothing, 0) == (6, 0.5)
    assert lane.run(nothing, nothing, 0) == (0, 0.0)


def test_both_lanes_move_the_same_bytes() -> None:
    """Offload into a slot, restore over the slot that it gave up, copy what was restored, mirror the copy."""
    moves = Moves(offloads=[(0, 1)], restores=[(0, 0)], copies=[(0, 2)], mirrors=[(2, 2)])
    results = []
    for beside in (False, True):
        kv = PagedKV(KVGeometry(1, 1, 2, torch.float32), 2, 3, 3, HostMemory())
        kv.data.copy_(torch.arange(3.0)[:, None, None, None, None, None].expand_as(kv.data))
        kv.host.copy_(10 + torch.arange(3.0)[:, None, None, None, None, None].expand_as(kv.host))
        if beside:
            kv.lane = Beside(CUDA, FakeCuda(random.Random(0)))
        copied = kv.move(moves)
        assert beside or (copied.blocks == 4 and copied.seconds > 0)
        results.append((kv.data[:, 0, 0, 0, 0, 0].tolist(), kv.host[:, 0, 0, 0, 0, 0].tolist()))
    assert results[0] == results[1] == ([10.0, 1.0, 10.0], [10.0, 0.0, 10.0])
    assert isinstance(PagedKV(KVGeometry(1, 1, 2, torch.float32), 2, 1, 1, HostMemory()).lane, InLine)
