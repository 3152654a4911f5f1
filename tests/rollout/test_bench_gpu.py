"""`rollout.bench.gpu` in small, on the CPU: every part runs, and what goes wrong in one is told and ends no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rollout.bench import against, gpu, gpu_parts
from rollout.bench.against import PeerFailed
from rollout.bench.gpu import main, measure
from rollout.bench.gpu_bench import QUICK, Args, Bench, Sizes
from rollout.bench.text import RandomText

STAND_IN = """
import time
from pathlib import Path
from lines import serve

def start(setup):
    assert setup["random_weights"] and not list(Path(setup["model"]).glob("*.safetensors"))
    assert (setup["device"], setup["prompts"], setup["prompt_tokens"], setup["n"]) == ("cpu", 3, 32, 4)
    def generate(prompts, n, new_tokens, seed):
        if seed == 99:
            time.sleep(60)
        return len(prompts) * n * new_tokens, 0.5
    return "1.2.3", generate

serve(start)
"""
OPTIONS = ["--model", "tiny", "--device", "cpu", "--quick", "--dtype", "float32"]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(against.DRIVERS / "lines.py", tmp_path)
    (tmp_path / "transformers_cb_peer.py").write_text(STAND_IN)
    monkeypatch.setattr(against, "DRIVERS", tmp_path)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(Args(model="tiny", device="cpu", dtype="float32", quick=True))


def by_part(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [row for row in rows if row["part"] == name] for name in gpu_parts.PARTS}


@pytest.mark.usefixtures("copies_pay")
def test_every_part_runs(stand_in: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    names = [name for name in gpu_parts.PARTS if name != "ipc"]
    assert main([*OPTIONS, "--parts", ",".join(names), "--json", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert not any("error" in row for row in rows) and {row["model"] for row in rows} == {"tiny"}
    parts = by_part(rows)
    assert not parts.pop("ipc")
    assert all(part[-1].keys() == {"model", "part", "seconds"} for part in parts.values())
    assert parts["machine"][0]["bytes_per_second"] > 0
    assert [row.get("what") for row in parts["decode"][:-1]] == ["forward"] * 3 + ["engine"] * 2
    assert parts["decode"][2]["context"] == "lognormal, median 40, at most 96" and parts["decode"][2]["tokens"] < 16 * 96
    for row in parts["decode"][:-1]:
        assert row["fraction_of_limit"] == pytest.approx(row["limit_ms"] / row["ms"]) and row["read_bytes"] > 0
    engine = parts["decode"][3]
    assert engine["steps"] == QUICK.steps and engine["host_ms"] > 0 and engine["ms"] > 0
    assert parts["sharing"][3]["ratio_to_copies"] > 0
    ours, theirs, summary, _ = parts["workloads"]
    assert ours["generated_tokens"] == theirs["generated_tokens"] == 3 * 4 * 16
    assert theirs["tokens_per_second"] == 384.0 and summary["peer"] == "1.2.3"
    assert summary["ratio_to_transformers_cb"] == pytest.approx(ours["tokens_per_second"] / 384)
    variants = {row["variant"]: row for row in parts["offload"] if "variant" in row}
    assert variants["offload"]["restored_blocks"] > 0 and variants["no_copies"]["restored_blocks"] > 0
    assert variants["no_copies"]["steps"] == variants["offload"]["steps"], "the same schedule"
    assert not variants["roomy"]["offloads"] and not variants["no_offload"]["offloads"]
    assert variants["no_offload"]["steps"] > variants["roomy"]["steps"], "what finds no room waits or is computed again"
    assert parts["offload"][-2]["ratio_to_no_copies"] > 0
    assert parts["refresh"][0]["bytes"] == parts["machine"][0]["weight_bytes"]
    assert len(parts["naps"]) == 3
    assert {row["what"] for row in parts["weights"][:-1]} == {"decode", "prefill"}
    assert all(row["same_logits"] for row in parts["weights"][:-1])
    assert "tiny decode: what forward, context 64, ms" in capfd.readouterr().out


@pytest.mark.long
def test_a_trainer_s_process_refreshes(bench: Bench) -> None:
    rows = list(gpu_parts.ipc(bench))
    assert [row["what"] for row in rows] == ["beside steps", "beside steps", "into place"]
    assert all(row["bytes"] == sum(each.nbytes for each in bench.module.parameters()) for row in rows)


def test_a_part_that_fails_ends_no_other(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(bench: Bench) -> Iterator[dict[str, Any]]:
        yield {"first": 1}
        raise MemoryError("injected")

    rows = list(measure(bench, {"broken": broken, "machine": gpu_parts.machine}))
    assert rows[1] == {"model": "tiny", "part": "broken", "error": "MemoryError: injected"}
    assert "device" in rows[3] and "MemoryError: injected" in capsys.readouterr().err


def test_an_item_that_fails_ends_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(bench: Bench, workload: Any, **config: Any) -> dict[str, Any]:
        if config.get("mirror_ahead") is False:
            raise MemoryError("injected")
        return {"tokens_per_second": 2.0}

    def dead(*_: Any) -> Any:
        raise BrokenPipeError("the peer's process is gone")

    monkeypatch.setattr(gpu_parts, "run_workload", run)
    monkeypatch.setattr(gpu_parts, "other_engine", dead)
    *variants, summary = gpu_parts.offload(bench)
    assert [row.get("variant", row.get("error")) for row in variants] == [
        "offload", "no_copies", "roomy", "MemoryError: injected", "no_offload",
    ]  # fmt: skip
    assert summary == {"summary": True, "ratio_to_no_copies": 1, "ratio_to_roomy": 1, "ratio_to_no_offload": 1}
    ours, theirs = gpu_parts.workloads(bench)
    assert ours == {"tokens_per_second": 2.0} and theirs["error"] == "transformers_cb: the peer's process is gone"


def test_parts_that_begin_too_late_are_left_out(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, "--json", str(out), "--minutes", "0", "--parts", "decode,weights"]) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["part"], row["error"]) for row in rows] == [
        ("decode", "left out: the minutes are over"),
        ("weights", "left out: the minutes are over"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "huge"], "--model 'huge': must be one of qwen3-8b, qwen3-0.6b, tiny"),
        (["--parts", "decode,dance"], "no part 'dance'; there are: machine, decode"),
        (["--device", "cuda"], "finds no CUDA device here"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*OPTIONS, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_takes_too_long(stand_in: None, bench: Bench) -> None:
    setup = {"model": "/", "random_weights": True, "device": "cpu", "prompts": 3, "prompt_tokens": 32, "n": 4}
    with (
        pytest.raises(PeerFailed, match="transformers_cb did not answer within 1 s"),
        against.peer("transformers_cb", gpu.sys.executable, setup, 110) as one,
    ):
        one.run(RandomText(50).slices(0, 1, 4), 1, 4, 99, limit_s=1)


@pytest.mark.parametrize(("name", "billions"), [("qwen3-8b", 8.19), ("qwen3-0.6b", 0.596)])
def test_the_shapes(name: str, billions: float) -> None:
    config = transformers.AutoConfig.for_model("qwen3", **gpu.MODELS[name])
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in module.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)
    longest = max(shape.context for shape in Sizes().shapes)
    assert config.max_position_embeddings > max(longest, *(workload.tokens for workload in Sizes().workloads))


def test_what_a_decode_step_reads(bench: Bench) -> None:
    """An embedding that is only looked up in is not read."""
    module = bench.module
    assert bench.read_bytes == sum(parameter.nbytes for parameter in module.parameters()), "tied: it is the output layer"
    untied = Bench(Args(model="tiny", device="cpu", dtype="float32", quick=True))
    untied.config.tie_word_embeddings = False
    embedding = untied.module.get_input_embeddings().weight
    assert untied.read_bytes == sum(parameter.nbytes for parameter in untied.module.parameters()) - embedding.nbytes
    assert untied.read_bytes == bench.read_bytes
