"""`python -m tests.bench fleet` in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.bench.harness import BenchSetup
from rollout.bench.inputs import save_tiny
from rollout.config import InputError
from tests.bench import fleet
from tests.bench.options import DeveloperOptions
from tests.support.bench import run_named


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_row_has_the_figures(tmp_path: Path) -> None:
    """Of a tiny model; what is measured are real processes, one of them killed."""
    model = save_tiny(tmp_path / "model", 32, fleet.TINY_VOCAB, "float32")
    options = DeveloperOptions(("fleet",), model=str(model), scale=0.1, repeat=1, dtype="float32", threads=1)
    (row,) = fleet.measure(BenchSetup(options))
    assert row["ratio_to_one"] > 0 and row["router_core_fraction"] > 0 and 0 < row["takeover_seconds"] < 60
    assert row["takeover_seconds"] <= row["takeover_token_seconds"] < 60 and set(row["router_core_fractions"]) == {
        "8",
        "16",
        "32",
    }
    assert (row["replicas"], row["threads"], row["summary"]) == (2, 1, True)


def test_it_goes_from_process_to_process() -> None:
    with pytest.raises(InputError, match="leave --in-process out"):
        run_named(("fleet",), model="x", in_process=True)
