"""`python -m tests.bench turns` in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.config import InputError
from tests.bench import turns
from tests.support.bench import bench_rows, run_named


@pytest.mark.long
def test_turns_prefill_what_is_new(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar: new tokens and a block a turn. The control, without the hint, prefills each history again."""
    monkeypatch.setattr(turns, "TURNS", 3)
    monkeypatch.setattr(turns, "CONVERSATIONS", 2)
    *rows, summary = bench_rows(tmp_path, "turns", model=tiny_model, scale=0.5)
    assert [row["turn"] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert summary["new_tokens"] == 2 * (128 + 2 * 24) and summary["turns"] == 6
    assert summary["prefilled_tokens"] == summary["new_tokens"] + 4, "and the last token of each turn but the last ones"
    assert summary["prefilled_tokens"] <= summary["new_tokens"] + summary["turns"] * summary["block_size"]
    assert summary["prefilled_tokens_plain"] == sum(row["history_tokens"] + row["new_tokens"] for row in rows[3:])
    assert summary["seconds"] > 0 and "prefilled_tokens_plain" in capsys.readouterr().out


def test_turns_need_two_processes() -> None:
    with pytest.raises(InputError, match="in-process"):
        run_named(("turns",), model="x", in_process=True)
