"""A loop that stands is told while it stands, counted afterwards, and ends its process where that was asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollout.engine.values import Sample
from rollout.service.phases import LoopPhase
from rollout.service.watchdog import Watchdog
from tests.support.clock import Clock
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import until
from tests.support.wire import Bench, submit

WAIT_S = 60.0
ROOT = Path(__file__).parents[2]


def watch_at(clock: Clock, stall_s: float = 30.0) -> LoopPhase:
    return LoopPhase(stall_s, clock)


@pytest.mark.parametrize(("seconds", "stalls"), [(29.0, 0), (31.0, 1)])
def test_a_part_counts_as_a_stall_past_the_bound_only(seconds: float, stalls: int) -> None:
    clock = Clock()
    watch = watch_at(clock)
    watch.at("step")
    clock.now += seconds
    watch.at("send")
    assert (watch.stalls, watch.stalled_s) == (stalls, seconds * stalls)


def test_waiting_for_messages_is_no_stall_and_no_part_of_a_turn() -> None:
    clock = Clock()
    watch = watch_at(clock)
    watch.at("wait")
    clock.now += 1000.0
    watch.at("receive")
    watch.at("wait")
    assert (watch.stalls, watch.longest_turn_s) == (0, 0.0)


def test_the_longest_turn_leaves_the_step_out() -> None:
    clock, cpu = Clock(), Clock()
    watch = LoopPhase(30.0, clock, cpu)
    for take, step, send in ((0.1, 20.0, 0.2), (0.05, 25.0, 0.0)):
        for part, seconds in (("wait", 0.0), ("receive", take), ("step", step), ("send", send)):
            watch.at(part)  # type: ignore[arg-type]
            clock.now += seconds
            cpu.now += seconds / 2
    watch.at("wait")
    assert watch.longest_turn_s == pytest.approx(0.3) and watch.longest_turn_in == "send"
    assert watch.longest_turn_cpu_s == pytest.approx(0.15)


class Standing(FakeEngine):
    """Its step does not return before `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def step(self) -> list[Sample]:
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        return super().step()


def test_a_standing_step_is_told_with_its_stack_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    engine, told = Standing(), threading.Event()
    bench = Bench(engine, stall_s=0.05)

    class Told(Watchdog):
        def _check(self) -> None:
            super()._check()
            if any("event loop stalled" in record.getMessage() for record in caplog.records):
                told.set()

    bench.client().send(submit())

    def turn_under_watch() -> None:
        watchdog = Told(bench.service.watch)
        bench.turn()
        watchdog.close()

    thread = threading.Thread(target=turn_under_watch)
    thread.start()
    assert engine.entered.wait(WAIT_S)
    assert told.wait(WAIT_S)
    engine.go_on.set()
    thread.join(WAIT_S)
    (line,) = {record.getMessage() for record in caplog.records if "event loop stalled" in record.getMessage()} or {""}
    assert "phase=step" in line and "test_watchdog.py" in line and "go_on.wait" in line
    status = bench.service.status()["loop"]
    assert status["stalls"] == 1 and status["stalled_s"] > 0.05
    assert any("event loop recovered phase=step" in record.getMessage() for record in caplog.records)


def test_a_quick_loop_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.client().send(submit())
    watchdog = Watchdog(bench.service.watch)
    bench.settle()
    watchdog.close()
    assert bench.service.watch.stalls == 0 and not caplog.records
    assert 0 < bench.service.status()["loop"]["longest_turn_s"] < 30.0


@pytest.mark.parametrize("holds_the_lock", [False, True], ids=["waits", "holds the interpreter's lock"])
def test_a_process_whose_loop_stands_ends_with_all_stacks(holds_the_lock: bool) -> None:
    stand = "ctypes.PyDLL(None).sleep(600)" if holds_the_lock else "threading.Event().wait(600)"
    program = f"""
import ctypes, threading
from rollout.service.phases import LoopPhase
from rollout.service.watchdog import Watchdog
watch = LoopPhase(stall_s=0.4)
watchdog = Watchdog(watch, exit_s=0.5)
watch.at("step")
def the_step_that_stands():
    {stand}
the_step_that_stands()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1 and "the_step_that_stands" in done.stderr


def test_a_loop_that_waits_for_work_is_not_ended() -> None:
    watch = LoopPhase(stall_s=0.01)
    watch.at("wait")
    looked = threading.Event()

    class Counted(Watchdog):
        looks = 0

        def _check(self) -> None:
            super()._check()
            self.looks += 1
            if self.looks == 20:
                looked.set()

    watchdog = Counted(watch, exit_s=1.0)
    assert looked.wait(WAIT_S)
    watchdog.close()
    assert watch.stalls == 0


def run_status(address: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rollout", "status", "--json", "--address", address, *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_status_waits_for_a_process_that_stands_and_says_so(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = subprocess.Popen([sys.executable, "-m", "tests.support.fake_engine", "tcp://127.0.0.1:*", str(ready)], cwd=ROOT)
    try:
        until(ready.exists, "the service listens")
        address = ready.read_text()
        os.kill(server.pid, signal.SIGSTOP)
        asking = run_status(address, "--json", "--timeout", "0.5", "--wait", str(WAIT_S))
        assert asking.stderr is not None
        said = asking.stderr.readline()
        os.kill(server.pid, signal.SIGCONT)
        out, _ = asking.communicate(timeout=2 * WAIT_S)
        answer: dict[str, Any] = json.loads(out)
        assert "asking again" in said and asking.returncode == 0 and "loop" in answer
    finally:
        server.kill()
        server.wait(WAIT_S)


def test_status_does_not_wait_unless_told_to() -> None:
    asking = run_status("tcp://127.0.0.1:1", "--timeout", "0.2")
    _, said = asking.communicate(timeout=WAIT_S)
    assert asking.returncode == 1 and "asking again" not in said
