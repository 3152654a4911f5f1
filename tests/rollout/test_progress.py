"""What a start prints while it lasts: order, presence, and no silence of more than 5 s."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollout.commands import progress as module
from rollout.commands.progress import Phases, nothing
from tests.support.clock import Clock
from tests.support.waiting import until

MOST_SILENT_S = 5.0
STEP_S = 0.5
"""longest delay of the thread that looks, in the time of these tests"""
PHASES = (("importing torch", 11.0), ("compiling the kernels", 2.0), ("loading the weights", 47.0), ("taking memory", 0.1))


class Printed:
    """Takes lines, with the time of each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lines: list[tuple[float, str]] = []

    def __call__(self, line: str) -> None:
        self.lines.append((self.clock.now, line))

    @property
    def text(self) -> list[str]:
        return [line for _, line in self.lines]

    def longest_silence(self) -> float:
        times = [0.0, *(at for at, _ in self.lines), self.clock.now]
        return max(after - before for before, after in zip(times, times[1:], strict=False))


def slow_start(look: Callable[[Phases], object]) -> Printed:
    """Load as slowly as `PHASES` says, in time that moves only here. look: is called as the thread does it."""
    clock = Clock()
    printed = Printed(clock)
    with Phases("serve", printed, clock.monotonic) as progress:
        for phase, seconds in PHASES:
            progress.begin(phase)
            ends = clock.now + seconds
            while clock.now < ends:
                clock.now = min(ends, clock.now + STEP_S)
                look(progress)
        progress.say("ready")
    return printed


def test_no_silence_is_longer_than_five_seconds() -> None:
    printed = slow_start(Phases.look)
    assert printed.longest_silence() <= MOST_SILENT_S
    began = [line for line in printed.text if "still" not in line]
    assert began == [*(f"serve: {phase}" for phase, _ in PHASES), "serve: ready"]
    still = [line for line in printed.text if "still" in line]
    assert still[:2] == ["serve: still importing torch, 3 s", "serve: still importing torch, 6 s"]
    assert sum("loading the weights" in line for line in still) == 15
    assert not any("compiling" in line for line in still), "it took less"


def test_a_start_that_only_names_its_phases_is_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls: nobody looks; and the interval is too long."""
    monkeypatch.setattr(Phases, "look", lambda self: 3600.0)
    assert slow_start(lambda progress: None).longest_silence() > MOST_SILENT_S
    monkeypatch.undo()
    monkeypatch.setattr(module, "STILL_S", 6.0)
    assert slow_start(Phases.look).longest_silence() > MOST_SILENT_S


def test_a_thread_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STILL_S", 0.01)
    lines: list[str] = []
    progress = Phases("serve", lines.append)
    progress.begin("loading")
    until(lambda: len(lines) > 2, "two lines say that it is still loading")
    progress.close()
    count = len(lines)
    assert lines[0] == "serve: loading" and lines[1] == "serve: still loading, 0 s"
    assert progress.look() > 0 and len(lines) == count, "nothing lasts any more"


def test_durations_of_phases() -> None:
    clock = Clock()
    progress = Phases("serve", nothing, clock.monotonic)
    for phase, seconds in (("loading a", 2.0), ("checking", 1.0), ("loading b", 3.0)):
        progress.begin(phase)
        clock.now += seconds
    progress.close()
    assert (progress.took("loading"), progress.took("checking"), progress.seconds) == (5.0, 1.0, 6.0)
