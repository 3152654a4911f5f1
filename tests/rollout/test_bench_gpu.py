"""`tests.bench.gpu` in small, on the CPU: every part runs, and what goes wrong in one is told and ends no other."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rollout.bench import against, runner
from rollout.bench.harness import PeerFailed
from rollout.bench.inputs import RandomText
from rollout.bench.workloads import Workload
from rollout.engine.forward.shapes import configuration
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import HostMemory
from tests.bench import by_hand, gpu, gpu_kernels, gpu_runs
from tests.bench.gpu import main, measure
from tests.bench.gpu_bench import QUICK, Args, Bench, ForwardCost, GpuBenchSizes, beside_limit

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
        return n * (sum(new_tokens) if isinstance(new_tokens, list) else len(prompts) * new_tokens), 0.5
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
    return {name: [row for row in rows if row["part"] == name] for name in gpu.PARTS}


@pytest.mark.usefixtures("copies_pay")
def test_every_part_runs(stand_in: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    names = [name for name in gpu.PARTS if name != "ipc"]
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
    assert (
        parts["sharing"][3]["ratio_to_copies"] > 0
        and [row["mixed"] for row in parts["sharing"][:-1]] == [False] * 4 + [True] * 4
    )
    for row in (row for row in parts["sharing"] if "variant" in row):
        assert row["fraction_of_limit"] == pytest.approx(row["limit_ms"] / row["step_ms"]) and row["flops"] > 0
    shared, per_child = (row["read_bytes"] for row in parts["sharing"][:2])
    assert per_child - shared == 2 * 3 * 64 * parts["machine"][0]["kv_bytes_per_token"], "a prefix is read once for a group"
    assert {row["variant"] for row in parts["prefill"] if "variant" in row} == {"paged", "without_graphs"}
    assert [row["prompts"] for row in parts["prefill"][:3]] == ["2 x 64", "1 x 90", "3 x lognormal, median 40, at most 96"]
    assert all(row["tokens_per_second"] > 0 and row["limit_ms"] > 0 for row in parts["prefill"][:3])
    assert parts["prefill"][-2].keys() >= {"without_graphs_ratio_to_paged"}
    ours, mixed, theirs, summary, mixed_theirs, mixed_summary, _ = parts["workloads"]
    assert mixed["generated_tokens"] == mixed_theirs["generated_tokens"] < 3 * 4 * 16, "lengths of each prompt's children"
    assert mixed_summary["workload"] == mixed["workload"] == "multi_return_seq, mixed lengths"
    assert ours["generated_tokens"] == theirs["generated_tokens"] == 3 * 4 * 16
    assert theirs["tokens_per_second"] == 384.0 and summary["peer"] == "1.2.3"
    assert summary["ratio_to_transformers_cb"] == pytest.approx(ours["tokens_per_second"] / 384)
    assert [row["variant"] for row in parts["offload"][6:8]] == ["offload", "no_copies"]
    assert parts["offload"][6]["workload"] == "half_pool, mixed lengths" and parts["offload"][6]["restored_blocks"] > 0
    variants = {row["variant"]: row for row in parts["offload"][:5]}
    assert variants["offload"]["restored_blocks"] > 0 and variants["no_copies"]["restored_blocks"] > 0
    assert variants["no_copies"]["steps"] == variants["offload"]["steps"], "the same schedule"
    assert not variants["roomy"]["offloads"] and not variants["no_offload"]["offloads"]
    assert variants["no_offload"]["steps"] > variants["roomy"]["steps"], "what finds no room waits or is computed again"
    assert parts["offload"][-2]["ratio_to_no_copies"] > 0
    assert parts["refresh"][0]["bytes"] == parts["machine"][0]["weight_bytes"]
    assert len(parts["naps"]) == 3
    kinds = ("decode", "decode, mixed lengths", "prefill", "prefill, mixed lengths")
    fetched = [row for row in parts["weights"][:-1] if "what" in row]
    ways = list(dict.fromkeys((row["offload_part"], row["prefetch_step"]) for row in fetched))
    assert [row["what"] for row in fetched] == [*kinds] * len(ways) and "left_out" in parts["weights"][4]
    assert ways == [("layer", 1), ("mlp", 1)], "two ahead if there are layers"
    assert all(row["same_logits"] and 0 < row["resident_limit_ms"] for row in fetched)
    assert "tiny decode: what forward, context 64, ms" in capfd.readouterr().out


@pytest.mark.long
def test_a_trainer_s_process_refreshes(bench: Bench) -> None:
    rows = list(gpu_runs.ipc(bench))
    assert [row["what"] for row in rows] == ["beside steps", "beside steps", "into place"]
    assert all(row["bytes"] == sum(each.nbytes for each in bench.module.parameters()) for row in rows)


def test_a_part_that_fails_ends_no_other(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(bench: Bench) -> Iterator[dict[str, Any]]:
        yield {"first": 1}
        raise MemoryError("injected")

    rows = list(measure(bench, {"broken": broken, "machine": gpu_runs.machine}))
    assert rows[1] == {"model": "tiny", "part": "broken", "error": "MemoryError: injected"}
    assert "device" in rows[3] and "MemoryError: injected" in capsys.readouterr().err


def test_an_item_that_fails_ends_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(bench: Bench, workload: Any, **config: Any) -> dict[str, Any]:
        if "advanced" in config:
            raise MemoryError("injected")
        return {"tokens_per_second": 2.0}

    def dead(*_: Any) -> Any:
        raise BrokenPipeError("the peer's process is gone")

    monkeypatch.setattr(gpu_runs, "run_workload", run)
    monkeypatch.setattr(gpu_runs, "other_engine", dead)
    *variants, summary, _, _, mixed = gpu_runs.offload(bench)
    assert [row.get("variant", row.get("error")) for row in variants] == [
        "offload", "no_copies", "roomy", "MemoryError: injected", "no_offload",
    ]  # fmt: skip
    one = {"summary": True, "ratio_to_no_copies": 1}
    assert summary == {**one, "workload": "half_pool", "ratio_to_roomy": 1, "ratio_to_no_offload": 1}
    assert mixed == {**one, "workload": "half_pool, mixed lengths"}
    *ours, theirs, mixed = gpu_runs.workloads(bench)
    assert ours == [{"tokens_per_second": 2.0}] * 2 and theirs["workload"] == "multi_return_seq"
    assert theirs["error"] == mixed["error"] == "transformers_cb: the peer's process is gone"


def test_parts_that_begin_too_late_are_left_out(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, "--json", str(out), "--minutes", "0", "--parts", "decode,weights"]) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["part"], row["error"]) for row in rows] == [
        ("decode", "skipped: --minutes are over"),
        ("weights", "skipped: --minutes are over"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "huge"], "--model 'huge': must be one of tiny, tiny-moe, qwen3-0.6b, qwen3-8b"),
        (["--parts", "decode,dance"], "no part 'dance'; there are: machine, attention"),
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


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-0.6b"])
def test_the_shapes_are_long_enough(name: str) -> None:
    config = configuration(name)
    longest = max(shape.context for shape in GpuBenchSizes().shapes)
    assert config.max_position_embeddings > max(longest, *(workload.tokens for workload in GpuBenchSizes().workloads))


def test_what_a_forward_takes_at_least(bench: Bench) -> None:
    """Bytes where few rows decode, operations where long prompts are computed, each of three parts for itself."""
    geometry = bench.model().geometry
    bench_at = SimpleNamespace(
        **{name: getattr(bench, name) for name in ("config", "dtype", "kv_dtype", "module", "model", "read_bytes")}
    )

    def limit(work: ForwardCost, bytes_per_second: float, flops_per_second: float) -> float:
        bench_at.rates = {"bytes_per_second": bytes_per_second, "flops_per_second": flops_per_second}
        return float(beside_limit(bench_at, work, 1.0)["limit_ms"])  # type: ignore[arg-type]

    one = ForwardCost.of(np.array([1]), np.array([100]))
    assert one == (1, 1, 100, 100)
    assert limit(one, 1.0, 1e30) == pytest.approx(1e3 * (bench.read_bytes + 100 * geometry.bytes_per_token))
    prompts = ForwardCost.of(np.array([5, 3]), np.array([5, 9]))
    assert prompts == (8, 2, 14, 15 + 3 * 6 + 6), "each query sees itself and what stands before it"
    head = bench.config.vocab_size * bench.config.hidden_size
    layers = bench.read_bytes // 4 - head
    wanted = 2 * 8 * layers + 2 * 2 * head + 4 * 39 * 4 * geometry.head_dim * geometry.layers
    assert limit(prompts, 1e30, 1.0) == pytest.approx(1e3 * wanted)
    assert limit(prompts, 1.0, 1.0) >= max(limit(prompts, 1e30, 1.0), limit(prompts, 1.0, 1e30))


def test_a_workload_of_mixed_lengths() -> None:
    equal = Workload(name="w", prompts=40, prompt_tokens=64, n=3, new_tokens=100)
    mixed = equal.mixture()
    prompt, new = mixed.lengths()
    assert prompt.max() <= 64 and 1 <= new.min() and new.max() == 100 and len(set(new.tolist())) > 20
    assert not np.array_equal(np.argsort(prompt), np.argsort(new)), "one is not the other's"
    assert mixed.total_new_tokens == 3 * new.sum() < equal.total_new_tokens == 3 * 40 * 100
    assert mixed.needed_kv_tokens(1) == int((prompt + 3 * new).sum()) < equal.needed_kv_tokens(1) == 40 * (64 + 300)
    one = runner.sampling_of(mixed, 7)
    assert isinstance(one, list) and [each.max_tokens for each in one] == new.tolist()
    assert [len(ids) for ids in runner.prompts_of(mixed, RandomText(50), 0)] == prompt.tolist()


def test_what_a_decode_step_reads(bench: Bench) -> None:
    """An embedding that is only looked up in is not read."""
    module = bench.module
    assert bench.read_bytes == sum(parameter.nbytes for parameter in module.parameters()), "tied: it is the output layer"
    untied = Bench(Args(model="tiny", device="cpu", dtype="float32", quick=True))
    untied.config.tie_word_embeddings = False
    embedding = untied.module.get_input_embeddings().weight
    assert untied.read_bytes == sum(parameter.nbytes for parameter in untied.module.parameters()) - embedding.nbytes
    assert untied.read_bytes == bench.read_bytes


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_launches_of_attention_are_compared(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, without its graphs: other launches give the same numbers."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(gpu_kernels, "timed", lambda bench, run: (1.0, run().float()))
    monkeypatch.setattr(gpu_kernels, "changes", lambda block: [{"keys": 32, "warps": 8, "stages": 4}])
    config = SimpleNamespace(num_key_value_heads=1, num_attention_heads=2, head_dim=16, hidden_size=32)
    bench: Any = SimpleNamespace(
        config=config, dtype="float32", kv_dtype=kv_dtype, device=torch.device("cpu"), rates={"bytes_per_second": 1e9}
    )
    rows = list(gpu_kernels.one_pool(bench, np.array([70, 33], np.int32), 64))
    assert [row["launch"] for row in rows] == ["default", {"keys": 32, "warps": 8, "stages": 4}, "flashinfer"]
    assert all(row["off"] < 1e-5 and row["bytes_per_second"] > 0 for row in rows[:2]) and "left_out" in rows[2]


class FakeFlashInfer:
    """`BatchDecodeWithPagedKVCacheWrapper` of FlashInfer 0.7, with its arguments, by one softmax a row."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, *, use_tensor_cores: bool) -> None:
        assert kv_layout == "HND" and not workspace.any()

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **dtypes: torch.dtype,
    ) -> None:
        assert {each.dtype for each in (indptr, indices, last_page_len)} == {torch.int32}
        self.pages = [indices[begin:end].long() for begin, end in zip(indptr[:-1], indptr[1:], strict=True)]
        self.last, self.size, self.group = last_page_len.tolist(), page_size, num_qo_heads // num_kv_heads

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """cache: K and V, [pages, heads, page_size, dim]; their strides must be equal."""
        assert cache[0].stride() == cache[1].stride() and cache[0].shape[2] == self.size
        rows = []
        for row, pages, last in zip(query, self.pages, self.last, strict=True):
            length = (len(pages) - 1) * self.size + last
            k, v = (each[pages].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(self.group, 0) for each in cache)
            weights = ((k @ row[:, :, None]).squeeze(2) * row.shape[1] ** -0.5).softmax(1)
            rows.append((weights[:, None] @ v).squeeze(1))
        return torch.stack(rows)


@pytest.mark.parametrize("short", [0, 1])
def test_another_attention_reads_the_same_pool(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's arguments describe our pool, of several layers. The negative control: rows that are told to be a token
    shorter have other numbers."""
    monkeypatch.setattr(gpu_kernels, "WORKSPACE_BYTES", 16)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeFlashInfer))
    contexts, geometry = np.array([70, 64, 5], np.int32), KVGeometry(3, 2, 16, torch.float32)
    table = by_hand.own_blocks(3, contexts, 32)
    kv = PagedKV(geometry, PoolSizes(32, int(table.max()) + 1, 0), HostMemory())
    by_hand.fill(kv)
    query = torch.randn(3, 6, 16)
    made = gpu_kernels.flashinfer(kv, contexts - short, table, query, tensor_cores=True)()
    for row, blocks, length, one in zip(query, table, contexts, made, strict=True):
        k, v = kv.data[blocks, 0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        want = scaled_dot_product_attention(row[:, None], k, v, enable_gqa=True)[:, 0]
        assert (float((one - want).abs().max()) < 1e-5) == (not short)
