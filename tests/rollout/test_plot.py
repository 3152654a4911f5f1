"""`rollout bench --plot`: what is recorded along a run, and that a picture of it comes out."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout import bench
from rollout.bench import record
from rollout.bench.plot import check, draw, grown, speeds
from rollout.bench.record import Point, Recording, watching
from rollout.config import InputError

KV = {
    "block_bytes": 2**20,
    "device_blocks": 100,
    "device_used": 50,
    "device_cached": 10,
    "host_blocks": 200,
    "host_used": 20,
    "host_cached": 0,
}


def status(tokens: int = 0, **fields: Any) -> dict[str, Any]:
    counters = {"running": 4, "offloads": 0, "restored_blocks": 0, "soft_resets": 0, "version": 0}
    return {"generated_tokens": tokens, **counters, "kv": KV, **fields}


def points(seconds: list[float], tokens: list[int], **counters: list[int]) -> list[Point]:
    recording = Recording("made")
    for i, made in enumerate(tokens):
        recording.add(status(made, **{name: values[i] for name, values in counters.items()}))
    return [msgspec.structs.replace(point, seconds=at) for point, at in zip(recording.points, seconds, strict=True)]


def test_a_point_holds_what_the_status_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(record, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    recording = Recording("run", began=100.0)
    assert recording.due
    now[0] += 3
    recording.add(status(12, offloads=3))
    (point,) = recording.points
    assert (point.generated_tokens, point.offloads, point.device_used, point.host_blocks) == (12, 3, 50, 200)
    now[0] += 0.9 * record.INTERVAL_S
    assert not recording.due and point.seconds == 3
    now[0] += 0.2 * record.INTERVAL_S
    assert recording.due


def test_speeds_are_over_a_second_not_between_two_looks() -> None:
    at, speed = speeds(points([0.0, 0.5, 1.0, 1.5, 2.0], [0, 0, 100, 100, 200]))
    np.testing.assert_allclose(at, [0.5, 1.0, 1.5, 2.0])
    np.testing.assert_allclose(speed, [0, 100, 100, 100])  # a step that lasts a second is no spike and no gap
    _, speed = speeds(points([0.0, 2.0, 4.0, 4.01], [0, 100, 200, 300]))
    assert speed[-1] == pytest.approx(200 / 2.01)  # nor is a last look just after the one before


def test_marks_are_where_a_counter_grew() -> None:
    seconds, count = grown(points([0, 1, 2, 3], [0] * 4, offloads=[0, 2, 2, 5]), "offloads")
    assert seconds.tolist() == [1, 3] and count.tolist() == [2, 3]


def test_watching_takes_points_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.bench.record.INTERVAL_S", 0.001)
    seen, enough = [], threading.Event()

    def look() -> dict[str, Any]:
        seen.append(1)
        if len(seen) >= 5:
            enough.set()
        return status(len(seen))

    recording = Recording("run")
    with watching(recording, look):
        assert enough.wait(60)
    assert len(recording.points) == len(seen) and recording.points[-1].generated_tokens == len(seen)
    assert not _watchers()


def test_an_error_while_watching_is_not_lost() -> None:
    def look() -> dict[str, Any]:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        with watching(Recording("run"), look):
            for thread in _watchers():
                thread.join(60)


def _watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bench-watch"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_comes_out(tmp_path: Path, suffix: str) -> None:
    marks = {"offloads": [0, 0, 3, 3], "soft_resets": [0, 1, 1, 1], "version": [0, 0, 0, 1]}
    recordings = [
        Recording("first", points([0, 1, 2, 3], [0, 90, 180, 300], **marks)),
        Recording("idle", points([0, 1], [0, 0])),
    ]
    path = tmp_path / f"run.{suffix}"
    draw(recordings, path)
    if suffix == "svg":
        text = path.read_text()
        labels = ["sequences offloaded (3)", "soft resets (1)", "refresh", "device: prefix cache"]
        for words in ["first", "100 tokens/s in the mean", *labels]:
            assert f"<!-- {words} -->" in text, words
    else:
        from matplotlib.image import imread

        pixels = imread(path)
        assert pixels.shape[0] > 800 and pixels.shape[1] > 1200 and len(np.unique(pixels[..., :3].reshape(-1, 3), axis=0)) > 20


def test_what_cannot_be_drawn_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="its folder does not exist"):
        check(tmp_path / "nowhere" / "run.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install -e '.\[plot\]'"):
        check(tmp_path / "run.png")


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.long)])
def test_bench_runs_and_draws(tiny_model: Path, tmp_path: Path, in_process: bool) -> None:
    picture, out = tmp_path / "run.png", tmp_path / "out.jsonl"
    options = {"in_process": in_process, "scale": 0.1, "repeat": 1, "dtype": "float32", "threads": 1}
    assert bench.run(("fork_latency",), model=str(tiny_model), json_file=str(out), plot=str(picture), **options) == 0
    assert picture.stat().st_size > 20_000
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[-1]["summary"] is True and rows[0]["generated_tokens"] == 64 * 8
    if not in_process:
        assert rows[0]["engine"] == "rollout" and rows[1]["peak_rss_bytes"] > 50e6
