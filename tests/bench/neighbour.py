"""`python -m tests.bench neighbour`: an engine beside another process that computes on the same cores, such as a trainer.

    windows of WINDOW_S in turn     the engine alone │ the neighbour alone │ both
    engine_fraction                 tokens per second beside the neighbour over those alone
    neighbour_fraction              steps of the neighbour per second beside the engine over those alone
    sum_of_fractions                of both: 1 if nothing is lost, less if one waits awake on a core that the other one needs

The neighbour (`tests.bench.neighbour_steps`) trains a small network in torch with as many threads as the engine has. Every
window of the engine decodes ROWS samples of one group with fresh lengths, so all windows do the same work."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import IO

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.engine.engine import Engine
from rollout.engine.processes import run_module
from rollout.engine.values import Group, Sampling

ROWS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 512
"""a tail of few rows, in which threads wait most often"""
WINDOW_S = 4.0
END_S = 60.0
"""seconds after which a neighbour that was told to end is killed"""


class Neighbour:
    """A process that trains when it is told to, for as long as it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._to: IO[str] = process.stdin
        self._of: IO[str] = process.stdout
        self.rate_of(0.1)  # its first steps

    def begin(self, seconds: float) -> None:
        """Let it train for so long."""
        print(seconds, file=self._to, flush=True)

    def rate(self) -> float:
        """Wait for its end and return its steps per second. Raises BenchFailed."""
        line = self._of.readline()
        if not line:
            raise BenchFailed(f"the neighbour exited with status {self._process.wait(END_S)}; standard error has its messages")
        return float(json.loads(line)["steps_per_second"])

    def rate_of(self, seconds: float) -> float:
        """Let it train for so long; return its steps per second."""
        self.begin(seconds)
        return self.rate()


@contextmanager
def neighbour(threads: int) -> Iterator[Neighbour]:
    """Start a neighbour, and end it."""
    command = run_module("tests.bench.neighbour_steps", threads)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Neighbour(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


class Decoding:
    """An engine that decodes ROWS samples in each window."""

    def __init__(self, setup: BenchSetup) -> None:
        self.engine = Engine(setup.config(drafts=0))
        self._prompts = setup.text.slices(0, 1, PROMPT_TOKENS)
        self._windows = 0

    def rate(self, seconds: float) -> float:
        """Decode for so long and return the tokens per second, prefill not counted."""
        engine, self._windows = self.engine, self._windows + 1
        sampling = Sampling(n=ROWS, max_tokens=NEW_TOKENS, seed=self._windows, ignore_eos=True)
        name = f"window {self._windows}"
        engine.submit(Group(name, self._prompts[0], sampling))
        while engine.counters.decode_tokens % ROWS or not engine.scheduler.state.groups[name].forked:
            engine.step()
        began, had, most = perf_counter(), engine.counters.decode_tokens, ROWS * (NEW_TOKENS - 8)
        while perf_counter() < began + seconds and engine.counters.decode_tokens - had < most:
            engine.step()
        rate = (engine.counters.decode_tokens - had) / (perf_counter() - began)
        engine.abort(name)
        while engine.has_work:
            engine.step()
        return rate


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per turn, and the medians of the fractions. `--scale` multiplies the seconds of a window. Raises
    BenchFailed."""
    decoding, seconds = Decoding(setup), WINDOW_S * setup.scale
    threads = decoding.engine.config.threads or 0
    turns: list[Row] = []
    with neighbour(threads) as other:
        decoding.rate(min(seconds, 1.0))  # caches
        for turn in range(setup.repeat):
            alone, training = decoding.rate(seconds), other.rate_of(seconds)
            other.begin(seconds)
            beside = decoding.rate(seconds)
            fractions = beside / alone, other.rate() / training
            turns.append(
                {
                    "turn": turn, "tokens_per_second": alone, "steps_per_second": training, "engine_fraction": fractions[0],
                    "neighbour_fraction": fractions[1], "sum_of_fractions": sum(fractions),
                }
            )  # fmt: skip
            yield turns[-1]
    names = ("engine_fraction", "neighbour_fraction", "sum_of_fractions")
    yield {
        "summary": True, "rows": ROWS, "window_seconds": seconds, "threads": threads,
        **{name: median(turn[name] for turn in turns) for name in names},
    }  # fmt: skip
