"""`rollout bench turns` in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.bench import run, turns
from rollout.config import InputError


@pytest.mark.long
def test_turns_prefill_what_is_new(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar: new tokens and a block a turn. The control, without the hint, prefills each history again."""
    monkeypatch.setattr(turns, "TURNS", 3)
    monkeypatch.setattr(turns, "CONVERSATIONS", 2)
    out = tmp_path / "rows.jsonl"
    options = {"in_process": False, "repeat": 1, "dtype": "float32", "threads": 1}
    assert run(("turns",), model=str(tiny_model), scale=0.5, json_file=str(out), **options) == 0  # type: ignore[arg-type]
    *rows, summary = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["turn"] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert summary["new_tokens"] == 2 * (128 + 2 * 24) and summary["turns"] == 6
    assert summary["prefilled_tokens"] == summary["new_tokens"] + 4, "and the last token of each turn but the last ones"
    assert summary["prefilled_tokens"] <= summary["new_tokens"] + summary["turns"] * summary["block_size"]
    assert summary["prefilled_tokens_plain"] == sum(row["history_tokens"] + row["new_tokens"] for row in rows[3:])
    assert summary["seconds"] > 0 and "prefilled_tokens_plain" in capsys.readouterr().out


def test_turns_need_two_processes() -> None:
    with pytest.raises(InputError, match="in-process"):
        run(("turns",), model="x", in_process=True, scale=1, repeat=1, json_file=None, dtype="float32", threads=1)
