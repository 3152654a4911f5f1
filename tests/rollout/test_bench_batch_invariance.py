"""`python -m tests.bench batch_invariance` in small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.bench.harness import BenchFailed, Row
from rollout.bench.inputs import RandomText
from rollout.engine.values import Sample, Sampling
from tests.bench import batch_invariance
from tests.bench.batch_invariance import Batches, bits_of, run_batches, summarise
from tests.support.bench import bench_rows

SMALL = Batches(24, 40, 8, RandomText(50))


def test_a_needle_is_the_same_in_every_batch(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_invariance, "SIZES", (1, 5, 16))
    *rows, summary = bench_rows(tmp_path, "batch_invariance", model=tiny_model, repeat=2, in_process=True)
    assert [(row["groups"], row["exact"], row["differs"]) for row in rows] == 2 * [(n, True, False) for n in (1, 5, 16)]
    assert (summary["differences"], summary["batches"], summary["batch_invariant"]) == (0, 6, True)
    assert "ratio" not in summary and summary["tokens_per_second"] > 0, "a CPU has one mode"
    assert "differences 0" in capsys.readouterr().out


class Stand:
    """A target whose samples are their seeds, except that in batches of at least `wrong` groups a log-prob of the needle is off
    by a bit."""

    name = "stand-in"

    def __init__(self, wrong: int = 10**6, cut: int = 0) -> None:
        self.wrong, self.cut = wrong, cut

    def generate(self, prompts: list[np.ndarray], sampling: Sampling | list[Sampling]) -> Iterator[Sample]:
        assert isinstance(sampling, list) and len(sampling) == len(prompts)
        for i, own in enumerate(sampling):
            for index in reversed(range(own.n)):
                logprobs = np.full(own.max_tokens - self.cut, -1, np.float32)
                if own.seed == 0 and index == 1 and len(prompts) >= self.wrong:
                    logprobs[-1] = np.nextafter(np.float32(-1), np.float32(0))
                yield Sample(
                    group_id=str(i), index=index, token_ids=np.full(len(logprobs), own.seed, np.int32), logprobs=logprobs,
                    finish_reason="length", weight_versions=[(0, 0)], prompt_tokens=len(prompts[i]), seed=own.seed,
                )  # fmt: skip

    def status(self) -> dict[str, Any]:
        return {"model": "m", "arithmetic": "a/1", "attention": "x", "dtype": "float32", "batch_invariant": True}

    def peak_rss_bytes(self) -> int:
        return 0


def rows_of(target: Stand) -> list[Row]:
    return list(run_batches(target, SMALL, 2))


def test_a_bit_is_noticed() -> None:
    rows = rows_of(Stand(wrong=8))
    assert [row["groups"] for row in rows if row["differs"]] == 2 * [8, 32, 128]
    status = Stand().status()
    with pytest.raises(BenchFailed, match="differs in 6 of 12 batches with a/1"):
        summarise({False: rows}, {False: status})
    assert summarise({False: rows}, {False: status | {"arithmetic": "torch/2/batch"}})["differences"] == 6, "no promise"


def test_both_modes_of_a_gpu() -> None:
    """With `exact` nothing may differ; without it the differences are reported."""
    good, bad = rows_of(Stand()), rows_of(Stand(wrong=128))
    status = {mode: Stand().status() | {"arithmetic": f"{mode}/1"} for mode in (True, False)}
    summary = summarise({True: good, False: bad}, status)
    assert (summary["differences"], summary["not_exact_differences"]) == (0, 2)
    assert (summary["arithmetic"], summary["not_exact_arithmetic"]) == ("True/1", "False/1")
    assert summary["ratio"] == summary["tokens_per_second"] / summary["not_exact_tokens_per_second"]
    with pytest.raises(BenchFailed, match="2 of 12 batches with True/1"):
        summarise({True: bad, False: good}, status)


def test_missing_tokens_end_the_run() -> None:
    with pytest.raises(BenchFailed, match="tokens arrived"):
        rows_of(Stand(cut=1))


def test_batches_differ_in_all_but_the_needle() -> None:
    one, other = SMALL.prompts(8, 1), SMALL.prompts(8, 2)
    for prompts, samplings in (one, other):
        at = [sampling.seed for sampling in samplings].index(0)
        assert np.array_equal(prompts[at], SMALL.prompts(1, 5)[0][0]) and len({s.seed for s in samplings}) == 8
    assert [len(prompt) for prompt in one[0]] != [len(prompt) for prompt in other[0]]
    assert len(set(bits_of(list(Stand().generate(*one))))) == 1, "a stand-in's children are alike"
