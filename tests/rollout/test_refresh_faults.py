"""Pushes that break at random points, over real processes and under 16 running samples: never a partly applied model, never
a mislabelled token."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.engine.values import Sample, Sampling
from rollout.transport.weights.shm import host_key
from tests.support.described import digest_of
from tests.support.watermark import check_marks, token_of

ROOT = Path(__file__).parents[2]
WAIT = 60.0
"""for what comes: a bound for hangs only"""
SAMPLING = Sampling(n=16, max_tokens=4000, ignore_eos=True)


pytestmark = pytest.mark.timeout(600)


@contextmanager
def running(module: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=WAIT)


class Field:
    """A service process, a process that makes pushers, and a client whose 16 samples always run. Of all tests here: versions
    grow from one to the next."""

    def __init__(
        self, folder: Path, service: subprocess.Popen[str], pushers: subprocess.Popen[str], client: RolloutClient
    ) -> None:
        self.fault_file = folder / "fault"
        self.client = client
        self._service = service
        self.live = 0
        self.samples: list[Sample] = []
        self._pushers = pushers
        self._handle: Handle | None = None

    def keep_running(self) -> None:
        if self._handle is None or self._handle.done:
            self.samples += self._handle.result(0) if self._handle else []
            self._handle = self.client.submit([1, 2, 3], SAMPLING)

    def push(self, **job: Any) -> dict[str, Any]:
        assert self._pushers.stdin is not None and self._pushers.stdout is not None
        print(json.dumps(job), file=self._pushers.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._pushers.stdout.readline())
        return answer

    def assert_whole(self, *versions: int) -> None:
        """When nothing is staged any more, which may take the time of a lease, one of `versions` is live, byte for byte, and
        tokens are its. Nobody may be pushing."""
        end = time.monotonic() + WAIT
        self.client.status()  # what a dead pusher sent last is taken up with this, if not before
        while (status := self.client.weights_status(verify=True))["staged"] is not None:
            assert time.monotonic() < end, "the staging of a dead pusher is never given free"
            self._service.send_signal(signal.SIGUSR1)
            time.sleep(0.02)
        self.live = status["version"]
        assert self.live in versions
        assert status["live_digest"] == status["digest"] == digest_of(self.live)
        (sample,) = self.client.submit([9], Sampling(max_tokens=2, ignore_eos=True)).result(WAIT)
        assert sample.token_ids.tolist() == [token_of(self.live)] * 2 and sample.weight_versions == [(0, self.live)]

    def finish(self) -> int:
        assert self._handle is not None
        self._handle.cancel()
        samples, self.samples, self._handle = [*self.samples, *self._handle.result(WAIT)], [], None
        assert len(samples) % 16 == 0
        return check_marks(samples)


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    folder = tmp_path_factory.mktemp("field")
    with running("tests.support.watermark_service", folder / "ready", folder / "fault") as service:
        end = time.monotonic() + 2 * WAIT
        while not (folder / "ready").exists():
            assert service.poll() is None and time.monotonic() < end, "the service did not start"
            time.sleep(0.02)
        address = (folder / "ready").read_text()
        with (
            running("tests.support.watermark_pusher", address) as pushers,
            RolloutClient(address, connect_timeout_s=WAIT, link_timeout_s=WAIT) as client,
        ):
            yield Field(folder, service, pushers, client)


WAYS = ["inline", "gloo", "shm"] if host_key() else ["inline", "gloo"]
FAULTS = ["die", "die", "die", "flip", "missing", "apply", "none"]


def break_pushes(field: Field, pushes: int, seed: int) -> Counter[str]:
    r, seen, first = random.Random(seed), Counter[str](), field.live + 1
    for attempt in range(first, first + pushes):
        field.keep_running()
        fault, via = FAULTS[attempt % len(FAULTS)], r.choice(WAYS)
        if fault == "apply":
            field.fault_file.write_text(str(r.randrange(12)))
        job = {"version": attempt, "via": via, "fault": "none" if fault == "apply" else fault, "where": r.random()}
        answer = field.push(**job)
        field.fault_file.unlink(missing_ok=True)
        error = answer.get("error", "")
        if fault == "none":
            assert answer["ok"]["version"] == attempt and answer["ok"]["via"] == via, answer
        elif fault == "die":
            # it may have died after its Commit had left, or, with the last message, after all was done
            assert answer == {"killed": 9} or "ok" in answer, answer
        elif fault == "apply":
            assert "MemoryError: injected" in error, answer
        else:
            assert error.startswith("WeightsRefused") and ("digest" if fault == "flip" else "missing") in error, answer
        field.assert_whole(*([field.live] if fault in ("flip", "missing", "apply") else [attempt] if fault == "none" else
                             [field.live, attempt]))  # fmt: skip
        seen[fault if "ok" not in answer or fault == "none" else "survived"] += 1
    return seen


def test_pushes_that_break_leave_no_trace(field: Field) -> None:
    seen = break_pushes(field, len(FAULTS), seed=0)
    tokens = field.finish()
    print(f"{dict(seen)}, {tokens} tokens, 0 mixed")
    assert min(seen[fault] for fault in FAULTS) >= 1 and tokens > 250


@pytest.mark.long
@pytest.mark.timeout(900)
def test_pushes_that_break_leave_no_trace_long(field: Field) -> None:
    seen = break_pushes(field, 140, seed=1)
    tokens = field.finish()
    print(f"{dict(seen)}, {tokens} tokens, 0 mixed")
    assert sum(seen[fault] for fault in FAULTS[:-1]) >= 100


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_good_refreshes_in_a_row(field: Field, count: int) -> None:
    """Every token of the running samples is the one of the version that its span names."""
    before, begun = field.live, field.client.status()["generated_tokens"]
    for version in range(before + 1, before + count + 1):
        field.keep_running()
        answer = field.push(version=version, via=WAYS[version % len(WAYS)], fault="none", where=0)
        assert answer["ok"]["version"] == version, answer
        enough = begun + 500 * (version - before)
        while field.client.status()["generated_tokens"] < enough:
            field.keep_running()
            time.sleep(0.01)
    field.assert_whole(before + count)
    tokens = field.finish()
    print(f"{count} refreshes, {tokens} tokens, spans = watermark for every one")
    assert tokens >= 450 * count
