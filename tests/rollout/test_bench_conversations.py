"""`python -m tests.bench conversations` in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.bench.harness import BenchFailed
from rollout.config import InputError
from tests.bench import conversations
from tests.support.bench import bench_rows, run_named


def test_all_conversations_end_in_one_loop(tmp_path: Path) -> None:
    """The bar: at most 40 threads in the process. The control: a thread per conversation."""
    row, summary = bench_rows(tmp_path, "conversations", scale=0.1)
    assert (summary["conversations"], summary["turns"], summary["runs"]) == (100, 3, 1)
    assert summary["asyncio_threads"] <= 40 and summary["stream_threads"] <= 40 < 100 < summary["pool_threads"]
    assert row["asyncio_per_second"] > 0 and summary["ratio"] == row["ratio"] > 0


def test_missing_tokens_are_a_failure() -> None:
    with pytest.raises(BenchFailed, match="asyncio: 9 of 24 tokens arrived"):
        conversations.checked("asyncio", conversations.Outcome(1.0, 9, 1), 1)


def test_conversations_need_two_processes() -> None:
    with pytest.raises(InputError, match="in-process"):
        run_named(("conversations",), in_process=True)
