"""`python -m tests.bench turns --trace` in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.bench.report import ROOT
from rollout.config import InputError
from tests.bench.trace import read_trace
from tests.support.bench import bench_rows, run_named

SHIPPED = ROOT / "tests/bench/trace.jsonl"


def written(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_a_trace_is_replayed(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two streams share a prompt of three blocks; each continued turn prefills its observation and the token before it."""
    first: dict[str, Any] = {"group": 7, "prompt_len": 100}
    path = written(
        tmp_path,
        first | {"stream": 0, "out_lens": [9, 5, 4], "obs_lens": [3, 2], "tool_times": [0.0, 0.001]},
        first | {"stream": 1, "out_lens": [6, 8], "obs_lens": [4, 0]},
        {"group": 8, "prompt_len": 40, "out_lens": [7]},
    )
    *rows, summary = bench_rows(tmp_path, "turns", model=tiny_model, scale=1.0, repeat=2, trace=str(path))
    assert [row["run"] for row in rows] == [0, 1]
    for row in [*rows, summary]:
        assert row["generated_tokens"] == 9 + 5 + 4 + 6 + 8 + 7
        assert row["prompt_tokens"] == (100 + 112 + 119) + (100 + 110) + 40, "of each turn, with its history"
        prompts = 100 + 40 + (100 - 96)  # the second stream finds the full blocks of the first one
        assert row["prefilled_tokens"] == prompts + (3 + 1) + (2 + 1) + (4 + 1)
        assert row["cached_share"] == pytest.approx(1 - row["prefilled_tokens"] / row["prompt_tokens"], rel=1e-4)
        assert 0 < row["latency_p50_seconds"] <= row["latency_p95_seconds"] <= row["seconds"]
    assert (summary["groups"], summary["streams"], summary["requests"], summary["runs"]) == (2, 3, 6, 2)
    assert "cached_share" in capsys.readouterr().out


def test_the_example_is_a_trace() -> None:
    streams = read_trace(str(SHIPPED))
    assert (len({stream.group for stream in streams}), len(streams)) == (4, 16)
    assert max(stream.tokens for stream in streams) < 2048, "SmolLM2 has room for them"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ({"group": 0, "prompt_len": 4}, "out_lens"),
        ({"group": 0, "prompt_len": 4, "out_lens": []}, "there must be a turn"),
        ({"group": 0, "prompt_len": 4, "out_lens": [3, 0], "obs_lens": [1]}, "at least 1"),
        ({"group": 0, "prompt_len": 4, "out_lens": [3, 3, 3], "obs_lens": [1]}, "obs_lens: need 2 numbers"),
        ({"group": 0, "prompt_len": 4, "out_lens": [3, 3], "obs_lens": [0]}, "obs_lens: need 1 numbers"),
        ({"group": 0, "prompt_len": 4, "out_lens": [3, 3], "obs_lens": [1], "tool_times": [-1]}, "tool_times"),
        ({"group": 0, "prompt_len": 5, "out_lens": [3]}, "another stream of group 0 has 4"),
    ],
)
def test_wrong_lines_are_named(line: Any, message: str, tmp_path: Path) -> None:
    good = {"group": 0, "prompt_len": 4, "out_lens": [3, 3], "obs_lens": [1], "tool_times": [0.5]}
    assert len(read_trace(str(written(tmp_path, good, "", good | {"stream": 1})))) == 2
    with pytest.raises(InputError, match=message):
        read_trace(str(written(tmp_path, good, line)))


def test_traces_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file|No such file"):
        read_trace(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="no streams"):
        read_trace(str(written(tmp_path, "")))
    with pytest.raises(InputError, match="only `turns` replays a trace"):
        run_named(("score",), model="x", trace="t.jsonl")
