"""`rollout bench host` in small."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rollout.bench import host
from tests.support.bench import bench_rows
from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Moves a microsecond when it is read, and when the test says so."""
    clock = Clock(tick=1e-6)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_bench_host_prints_the_parts(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "SEQUENCES", (16, 32))
    rows = bench_rows(tmp_path, "host")
    assert [(row["workload"], row["sequences"]) for row in rows] == [("host", 16), ("host", 32)]
    for row in rows:
        parts = sum(row[f"{name}_ms"] for name in host.PARTS)
        assert row["steps"] >= 20 and all(row[f"{name}_ms"] > 0 for name in host.PARTS)
        assert parts < row["host_ms"] < parts + 0.05, "and what lies between them"
        assert min(row["step_ms"], row["overlapped_step_ms"]) > 0.9 * host.DEVICE_MS
    assert "host: " in capsys.readouterr().out


def test_what_a_part_takes_shows_in_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part, made slow, is the one that grows."""
    import rollout.engine.cpu.device as device
    import rollout.engine.pipeline as pipeline
    import rollout.engine.worker as worker

    quick = host.measure_sequences(16, 0.1)
    spin = 0.01

    def slow(call):  # type: ignore[no-untyped-def]
        def slowly(*args, **kwargs):  # type: ignore[no-untyped-def]
            clock.now += spin
            return call(*args, **kwargs)

        return slowly

    targets = {
        "plan": (pipeline.Scheduler, "plan"),
        "build": (worker.Batch, "build"),
        "sample": (device, "launch_draws"),
        "commit": (pipeline.Scheduler, "commit"),
    }
    for name, (owner, attribute) in targets.items():
        with monkeypatch.context() as patched:
            call = getattr(owner, attribute)
            patched.setattr(owner, attribute, staticmethod(slow(call)) if name == "build" else slow(call))
            row = host.measure_sequences(16, 0.04)
        grown = [part for part in ("host", *host.PARTS) if row[f"{part}_ms"] > quick[f"{part}_ms"] + 0.9e3 * spin]
        assert grown == ["host", name]
