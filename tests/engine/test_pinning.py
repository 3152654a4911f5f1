"""A host pool that a thread pins piece by piece while it is in use, on a stand-in for CUDA's runtime."""

from __future__ import annotations

import gc
import mmap
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollout.engine.cuda import pinning
from rollout.engine.cuda.memory import CudaMemory
from rollout.engine.cuda.pinning import LONGEST_PAUSE_S, pinned_rows
from rollout.engine.memory import HostMemory, HostRows, anonymous
from tests.support.equivalence import same
from tests.support.fake_runtime import FakeRuntime
from tests.support.invariants import check
from tests.support.naps import groups
from tests.support.tiny import tiny_engine
from tests.support.toy import run

PAGE = mmap.PAGESIZE
NAME = "pin host memory"


class Steps:
    """Pauses of the thread: it goes on when told, and says when it waits."""

    def __init__(self) -> None:
        self.waits: queue.Queue[float] = queue.Queue()
        self._go: queue.Queue[None] = queue.Queue()

    def pause(self, seconds: float) -> None:
        self.waits.put(seconds)
        self._go.get(timeout=60)

    def piece(self) -> float:
        """Wait until the next piece is pinned. Returns the seconds of the pause after it."""
        return self.waits.get(timeout=60)

    def go(self) -> None:
        self._go.put(None)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(pinning, "PIECE_BYTES", 4 * PAGE)
    return Steps()


def opened(runtime: FakeRuntime, steps: Steps, rows: int = 40, row_bytes: int = 3 * PAGE // 2, **options: Any) -> HostRows:
    options = {"free": lambda: 1 << 40, "pause": steps.pause, **options}
    return pinned_rows(rows, row_bytes, 8 * PAGE, lambda: None, runtime, **options)


def ended() -> None:
    """Wait for the thread."""
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(60)
            assert not thread.is_alive()


def test_rows_are_pinned_in_pieces_of_whole_pages_and_rows(steps: Steps, caplog: pytest.LogCaptureFixture) -> None:
    """The first part when it is allocated, and the pool can be used from then on."""
    runtime = FakeRuntime()
    with caplog.at_level("INFO", "rollout.engine"):
        pool = opened(runtime, steps)
        view = torch.frombuffer(pool.memory, dtype=torch.uint8).view(40, -1)
        ready = [6]  # 8 pages hold 5 1/3 rows: two rows are the least that is whole pages
        while ready[-1] < 40:
            assert 0 <= steps.piece() <= LONGEST_PAUSE_S
            ready.append(pool.ready())
            view[: ready[-1]] = 7  # what is in use is not written again
            steps.go()
        ended()
    assert ready == [*range(6, 40, 4), 40] and bool((view == 7).all())
    begin = view.data_ptr()
    assert all((address - begin) % PAGE == 0 == (address - begin) % (3 * PAGE // 2) for address in runtime.registered)
    assert sum(runtime.registered.values()) == view.nbytes
    assert "host pool pinned" in caplog.text
    del pool, view
    gc.collect()
    assert not runtime.registered


def test_a_small_pool_needs_no_thread(steps: Steps) -> None:
    runtime = FakeRuntime()
    pool = opened(runtime, steps, rows=5)
    assert pool.ready() == 5 and not [each for each in threading.enumerate() if each.name == NAME]
    assert list(runtime.registered.values()) == [5 * 3 * PAGE // 2]


def test_a_pool_that_is_dropped_while_it_is_pinned(steps: Steps) -> None:
    runtime = FakeRuntime()
    pool = opened(runtime, steps)
    steps.piece()
    del pool
    gc.collect()
    assert not runtime.registered, "the thread holds the memory while it waits"
    steps.go()
    ended()
    assert not runtime.registered, "the thread went on in memory that is gone"


def test_the_end_of_the_main_thread(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter waits for the thread, which pins nothing more."""
    runtime = FakeRuntime()
    pool = opened(runtime, steps)
    steps.piece()
    over = threading.Thread(target=lambda: None)
    monkeypatch.setattr(pinning.threading, "main_thread", lambda: over)
    steps.go()
    ended()
    assert pool.ready() == 10


@pytest.mark.parametrize(
    ("runtime", "free", "why"),
    [
        (FakeRuntime(status=2, limit=16 * PAGE), 1 << 40, "cudaHostRegister: error 2"),
        (FakeRuntime(), pinning.SPARE_BYTES, "less than 1 GiB would stay free"),
    ],
)
def test_a_pool_that_stays_smaller(
    runtime: FakeRuntime, free: int, why: str, steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    """What is pinned stays in use; the log tells why there is no more."""
    steps.pause = lambda seconds: None  # type: ignore[method-assign]
    with caplog.at_level("WARNING", "rollout.engine"):
        pool = opened(runtime, steps, free=lambda: free)
        ended()
    assert why in caplog.text and 6 <= pool.ready() < 40


def test_a_first_part_that_cannot_be_pinned(steps: Steps) -> None:
    with pytest.raises(OSError, match="cannot pin 0.0 GiB.*error 2"):
        opened(FakeRuntime(status=2), steps)


def test_all_pools_together_pin_so_much_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("rollout.engine.cuda.memory.pinned_rows", lambda rows, row_bytes, at_once, enter: asked.append(at_once))
    memory = CudaMemory(torch.device("cuda:0"))
    for gib in (10, 10, 10):
        memory.host_rows(gib, 1 << 30)
    assert asked == [10 << 30, 6 << 30, 0]


# ── an engine ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def growing(monkeypatch: pytest.MonkeyPatch, ready: Callable[[int], int]) -> None:
    """Let host pools have `ready` of their rows, at most all."""
    monkeypatch.setattr(
        HostMemory,
        "host_rows",
        lambda self, rows, row_bytes: HostRows(anonymous(rows * row_bytes), lambda: min(rows, ready(rows))),
    )


TIGHT = {"kv_tokens": 256, "cpu_offload_gib": 0.001, "drafts": 0}


def test_an_engine_uses_what_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are preempted into a host pool that grows by a block a step. No slot is used before it is ready, and the
    samples are those of an engine with room for all."""
    plain = run(tiny_engine(), groups())
    steps, most = [0], [0]
    growing(monkeypatch, lambda rows: 2 + steps[0])
    engine = tiny_engine(**TIGHT)  # type: ignore[arg-type]
    total, store = len(engine.worker.kv.host), engine.scheduler.state.store
    assert engine.status()["kv"]["host_blocks"] == 2 < total
    for each in groups():
        engine.submit(each)
    samples = {}
    move = engine.worker.move

    def moved(plan: Any) -> Any:
        used = [host for _, host in [*plan.moves.offloads, *plan.moves.mirrors]]
        most[0] = max([most[0], *used])
        assert all(host < 2 + steps[0] for host in used), "a row that is not pinned yet"
        return move(plan)

    monkeypatch.setattr(engine.worker, "move", moved)
    while engine.has_work:
        for sample in engine.step():
            samples[sample.group_id, sample.index] = sample
        check(engine.scheduler)
        steps[0] += 1
    assert same(samples, plain) and most[0] > 2 and store.host.size == min(total, 1 + steps[0])


def test_slots_that_are_not_ready_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: an engine that is told nothing stays with what it had."""
    growing(monkeypatch, lambda rows: 2)
    engine = tiny_engine(**TIGHT)  # type: ignore[arg-type]
    run(engine, groups())
    assert engine.status()["kv"]["host_blocks"] == 2
