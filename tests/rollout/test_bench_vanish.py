"""`python -m tests.bench vanish` and `python -m tests.bench trust` in small, and what their rows say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.bench.harness import BenchFailed, BenchSetup
from rollout.bench.inputs import save_tiny
from rollout.engine.values import Sample
from tests.bench import trust, vanish
from tests.bench.options import DeveloperOptions


def sample(index: int, reason: str = "length") -> Sample:
    ids, logprobs = np.array([1, 2, index], np.int32), np.zeros(3, np.float32)
    own: dict[str, Any] = {"finish_reason": reason, "weight_versions": [(0, 0)], "prompt_tokens": 1, "seed": 0}
    return Sample(group_id="g", index=index, token_ids=ids, logprobs=logprobs, **own)


def test_what_was_lost_and_what_differs_is_counted() -> None:
    calm = vanish.Run({(0, i): sample(i) for i in range(4)}, 1000, 10.0, 0)
    bit = sample(1).logprobs
    bit.view(np.uint32)[0] ^= 1
    there = {(0, 0): sample(0), (0, 1): msgspec.structs.replace(sample(1), logprobs=bit), (0, 2): sample(2, "error")}
    row = vanish.compared(calm, vanish.Run(there, 1100, 36.0, 2))
    assert (row["lost"], row["different"], row["kills"], row["kills_per_hour"]) == (2, 1, 2, 200.0)
    assert (row["more_tokens"], row["tokens_per_kill"]) == (0.1, 50.0)
    with pytest.raises(BenchFailed, match="larger --scale"):
        vanish.compared(calm, vanish.Run(there, 1100, 36.0, 0))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_sample_is_lost_with_its_machine(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", 256, 259, "float32")
    options = DeveloperOptions(("vanish",), model=str(model), scale=4.0, dtype="float32", threads=1)
    *rows, summary = vanish.measure(BenchSetup(options))
    assert summary["kills"] >= 2 and (summary["lost"], summary["different"]) == (0, 0)
    assert [row["run"] for row in rows] == ["calm", "begin_again", "continue"]


def test_a_lie_of_an_honest_replica_ends_the_benchmark() -> None:
    fleet = {"verified": 3, "unverifiable": 0, "verify_skipped": 0, "bans": [{"why": "first_bad=7"}]}
    assert trust.counted({**fleet, "lies": 0}) == {"verified": 3, "unverifiable": 0, "verify_skipped": 0}
    with pytest.raises(BenchFailed, match="first_bad=7"):
        trust.counted({**fleet, "lies": 1})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_verification_costs(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", 64, 259, "float32")
    options = DeveloperOptions(("trust",), model=str(model), scale=0.25, repeat=1, dtype="float32", threads=1)
    *rows, summary = trust.measure(BenchSetup(options))
    assert [row["share"] for row in rows] == list(trust.SHARES) and summary["verified"]["1.0"] > 0
    assert summary["skipped"] == {"0.05": 0, "1.0": 0} and all(ratio > 0 for ratio in summary["cpu_ratio"].values())
