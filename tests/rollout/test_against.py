"""Other engines beside ours, and the fidelity report: with stand-ins, since the real ones take minutes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout import models
from rollout.bench import BenchOptions, against, checkouts, run
from rollout.bench.harness import BenchFailed, PeerFailed
from rollout.bench.inputs import PromptText
from rollout.bench.runner import measure, peer_run
from rollout.bench.target import open_engine
from rollout.bench.workloads import Workload
from rollout.config import InputError
from rollout.engine.config import EngineConfig
from tests.support.bench import bench_rows

TINY = Workload(name="tiny", prompts=2, prompt_tokens=32, n=2, new_tokens=8)

STAND_IN = """
from lines import serve

def start(setup):
    print("chatter on standard output")
    assert setup["dtype"] == "float32" and setup["context"] >= 40
    def generate(prompts, n, new_tokens, seed):
        if seed == 7:
            return 1
        if seed == 8:
            raise SystemExit(3)
        return len(prompts) * n * new_tokens
    return "1.2.3", generate

serve(start)
"""


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(against.DRIVERS / "lines.py", tmp_path)
    (tmp_path / "vllm_peer.py").write_text(STAND_IN)
    monkeypatch.setattr(against, "DRIVERS", tmp_path)
    return tmp_path


def test_the_drivers_exist() -> None:
    peers = {"vllm": "/x/python", "transformers_cb": sys.executable, "transformers": sys.executable}
    assert against.parse("vllm=/x/python,transformers_cb,transformers") == (peers, None)
    assert against.parse("") == ({}, None)


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(InputError, match="vllm, transformers_cb, transformers"):
        against.parse("llama")


def test_a_peer_takes_its_turn(drivers: Path, tiny_model: Path) -> None:
    text = PromptText(models.load_tokenizer(tiny_model))
    engine = EngineConfig(model=str(tiny_model), dtype="float32", cpu_offload_gib=0, threads=1)
    rows = list(measure(TINY, text, engine, open_engine, 2, against={"vllm": sys.executable}, unshared=True))
    assert [(row["workload"], row["engine"]) for row in rows[:-1]] == [
        ("tiny", "rollout-in-process"),
        ("tiny/unshared", "rollout-in-process"),
        ("tiny", "vllm"),
    ] * 2
    summary = rows[-1]
    assert summary["peers"] == {"vllm": "1.2.3"} and summary["ratios"]["vllm"] > 0 and summary["ratio_to_unshared"] > 0


def test_a_peer_that_does_less_or_dies_is_no_result(drivers: Path, tiny_model: Path) -> None:
    text = PromptText(models.load_tokenizer(tiny_model))
    setup = {"dtype": "float32", "context": 64}
    with against.peer("vllm", sys.executable, setup) as one:
        assert peer_run(TINY, text, one, 0)["generated_tokens"] == 32
        with pytest.raises(BenchFailed, match="made 1 tokens"):
            peer_run(TINY, text, one, 7)
        with pytest.raises(PeerFailed):
            one.run([np.arange(4)], 1, 1, 8)


def test_an_interpreter_that_is_not_there_is_told(drivers: Path) -> None:
    with pytest.raises(BenchFailed, match="vllm: /nowhere/python does not start .No such file or directory."):
        with against.peer("vllm", "/nowhere/python", {}):
            raise AssertionError("it has started")


def test_fidelity_is_exact_with_the_service_s_arithmetic(tiny_model: Path, tmp_path: Path) -> None:
    (row,) = bench_rows(tmp_path, "fidelity", model=tiny_model, in_process=True)
    assert row["max_abs_exact"] == 0 and 0 < row["mean_abs_plain"] <= 1e-5
    assert row["summary"] is True and row["arithmetic"] and row["outside_plain"] == 0
    assert row["mean_abs_plain_self"] <= 1e-5
    assert row["tokens"] == 8 * 4 * 32
    assert row["kv_dtype"] == "float32" and "mean_abs_plain_kv16" not in row


def test_fidelity_of_kv_in_fp8_is_told_beside_that_without(tiny_model: Path, tmp_path: Path) -> None:
    (row,) = bench_rows(tmp_path, "fidelity", model=tiny_model, in_process=True, kv_dtype="fp8_e4m3")
    assert row["kv_dtype"] == "fp8_e4m3" and row["arithmetic"].endswith("+fp8_e4m3/1")
    assert 0 < row["mean_abs_plain_kv16"] <= 1e-5 < row["mean_abs_exact"] < 0.1
    assert row["mean_abs_plain"] == pytest.approx(row["mean_abs_exact"], rel=0.1)


OTHER = """
import json, sys

assert sys.argv[1:4] == ["bench", "fanout", "long"] and "--repeat" in sys.argv and "--no-compare" in sys.argv
assert not any(word.startswith("--against") for word in sys.argv)
for name, speed in (("fanout", 50.0), ("long", 200.0)):
    print(json.dumps({"workload": name, "run": 0, "tokens_per_second": speed}))
    print(json.dumps({"workload": name, "summary": True, "tokens_per_second": 0.0}))
"""


def checkout(folder: Path, program: str) -> Path:
    (folder / "rollout").mkdir(parents=True)
    (folder / "rollout/__init__.py").write_text("")
    (folder / "rollout/__main__.py").write_text(program)
    return folder


def test_a_checkout_runs_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own command line; the median of the turns' ratios, not the ratio of the medians."""
    other = checkout(tmp_path / "other", OTHER)
    mine, order = {"fanout": [100.0, 55.0, 50.0], "long": [100.0, 300.0, 190.0]}, []
    theirs = checkouts.speeds_of

    def speeds_of(root: Path, options: BenchOptions) -> dict[str, float]:
        order.append(root == other)
        return theirs(root, options) if root == other else {name: each.pop(0) for name, each in mine.items()}

    monkeypatch.setattr(checkouts, "speeds_of", speeds_of)
    rows = bench_rows(tmp_path, "fanout", "long", against=str(other), repeat=3)
    assert order == [False, True, True, False, False, True]
    summaries = {row["workload"]: row for row in rows if "summary" in row}
    assert [row["ratio"] for row in rows[:6]] == [2.0, 0.5, 1.1, 1.5, 1.0, 0.95]
    assert (summaries["fanout"]["ratio"], summaries["long"]["ratio"]) == (1.1, 0.95)
    assert summaries["long"]["ratio_min"] == 0.5 and summaries["long"]["other"] == str(other)
    assert summaries["fanout"].keys() >= {"commit", "machine", "command", "other_commit"}


@pytest.mark.parametrize("program", ["raise SystemExit(1)", ""])
def test_a_checkout_that_measures_nothing_is_no_result(program: str, tmp_path: Path) -> None:
    other = checkout(tmp_path / "other", program)
    with pytest.raises(BenchFailed, match="exited with status 1|no tokens/s of fanout"):
        checkouts.speeds_of(other, BenchOptions(("fanout",)))


def test_what_no_checkout_can_be_compared_in_is_refused(tmp_path: Path) -> None:
    other = checkout(tmp_path / "other", "")
    with pytest.raises(InputError, match="no checkout of this project"):
        against.parse(str(tmp_path))
    for names, more in (("host",), {}), (("fanout",), {"floor": True}), (("fanout",), {"unshared": True}):
        with pytest.raises(InputError, match="compares workloads: leave"):
            run(BenchOptions(names, against=str(other), **more))
