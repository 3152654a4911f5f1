"""`python -m tests.bench sharing` in small, and that it notices what it must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.bench import BenchOptions, run
from rollout.bench.harness import BenchFailed
from rollout.config import InputError
from rollout.engine.config import EngineConfig, KVName
from rollout.engine.forward.model import Model, open_model
from rollout.engine.kv.cells import keys_and_values
from rollout.engine.memory import HostMemory
from tests.bench import by_hand, sharing
from tests.bench.sharing import PrefixShape, measure, tables
from tests.support.bench import bench_rows, run_named

SMALL = PrefixShape(groups=2, children=3, prefix=96, suffix=40)
CONFIG = EngineConfig(dtype="float32", threads=1)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Model:
    return open_model(EngineConfig(model=str(tiny_model), dtype="float32"), HostMemory())


def test_bench_sharing_prints_the_ratios(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench_rows(tmp_path, "sharing", model=tiny_model)
    summaries = [row for row in rows if "summary" in row]
    shapes = [tuple(row[name] for name in PrefixShape._fields) for row in summaries]
    assert shapes == [(8, 16, 64, 32, False), (1, 32, 416, 32, False)]
    assert [row["variant"] for row in rows if "variant" in row] == ["shared", "per_child", "copies"] * 2
    for row in rows:
        assert row["workload"] == "sharing" and row["step_ms"] > 0 and row["attention_ms"] > 0
    for row in summaries:
        assert row["ratio_to_per_child"] > 0 and row["attention_ratio_to_copies"] > 0 and row["left_out"] is None
        rows_of = 1 + (row["prefix"] + row["suffix"] - 1) // 32
        assert row["kv_bytes"] == row["groups"] * row["children"] * rows_of * 32 * 2 * 2 * 32 * 4 // 2
    assert "sharing summary: " in capsys.readouterr().out


def test_three_tables_of_the_same_tokens() -> None:
    made = tables(SMALL, 32, copies=True)
    shared, own = made["shared"], made["copies"]
    assert shared is made["per_child"] and shared.shape == own.shape == (6, 5)
    assert (shared[:3, :3] == shared[0, :3]).all() and (shared[3:, :3] == shared[3, :3]).all()
    assert len(np.unique(shared)) == 2 * 3 + 6 * 2 and len(np.unique(own)) == 6 * 5
    np.testing.assert_array_equal(shared[:, 3:], own[:, 3:])
    packed = tables(SMALL, 32, copies=False)
    assert packed.keys() == {"shared", "per_child"} and packed["shared"].max() == 17


def test_tables_of_mixed_lengths() -> None:
    shape = SMALL._replace(prefix=320, suffix=300, mixed=True)
    prefixes, contexts = shape.lengths(32)
    assert len(set(contexts.tolist())) > 3 and (prefixes >= 1).all() and (contexts > 32 * prefixes.repeat(3)).all()
    made = tables(shape, 32, copies=True)
    for row, (blocks, context) in enumerate(zip(prefixes.repeat(3), contexts, strict=True)):
        used = -(-context // 32)
        shared, own = made["shared"][row], made["copies"][row]
        first = made["shared"][row - row % 3]
        assert (shared[:blocks] == first[:blocks]).all() and (shared[blocks:used] == own[blocks:used]).all()
        assert not own[used:].any() and len(set(own[:used].tolist())) == used


@pytest.mark.parametrize("attention", ["native", "reference"])
def test_every_variant_computes_the_same(model: Model, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls: one wrong block in a table, and copies that are none."""
    config = EngineConfig(dtype="float32", threads=1, attention=attention)  # type: ignore[arg-type]
    assert len(list(measure(model, config, SMALL._replace(prefix=160, mixed=True), 1))) == 4
    assert len(list(measure(model, config, SMALL, 1))) == 4

    def spoiled(*args: Any, **more: Any) -> dict[str, np.ndarray]:
        made = tables(*args, **more)
        made["per_child"] = made["per_child"].copy()
        made["per_child"][4, 1] = made["per_child"][0, 2]
        return made

    for wrong, name, stand_in in (("per_child", "tables", spoiled), ("copies", "copy_prefixes", lambda *args: None)):
        with monkeypatch.context() as patched:
            patched.setattr(sharing, name, stand_in)
            with pytest.raises(BenchFailed, match=f"{wrong} has other logits than shared"):
                list(measure(model, config, SMALL, 1))


def test_memory_is_looked_at_first(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    block = 32 * model.geometry.bytes_per_token
    for blocks, variants in ((31, 3), (25, 2), (17, 0)):
        monkeypatch.setattr(sharing, "free_on", lambda device, blocks=blocks: int((blocks + 0.5) * block / sharing.SPARE))
        if not variants:
            with pytest.raises(BenchFailed, match="2 x 3 over 96 .* GiB of KV in"):
                list(measure(model, CONFIG, SMALL, 1))
            continue
        *rows, summary = measure(model, CONFIG, SMALL, 1)
        assert len(rows) == variants and (summary["left_out"] is None) == (variants == 3)
        assert summary["kv_bytes"] == (30 if variants == 3 else 18) * block


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_the_pool_is_filled_to_the_end(model: Model, kv_dtype: KVName) -> None:
    engine = sharing.Engine(
        EngineConfig(dtype="float32", threads=1, kv_dtype=kv_dtype, kv_tokens=32 * 70, cpu_offload_gib=0), model
    )
    by_hand.fill(engine.worker.kv)
    every = torch.arange(70)
    for cells in (each for layer in range(2) for each in keys_and_values(engine.worker.kv, layer)):
        assert (cells.read(every).abs().flatten(1).sum(1) > 0).all() and cells.read(every).std() == pytest.approx(1, abs=0.02)
    assert torch.equal(engine.worker.kv.data[0], engine.worker.kv.data[by_hand.PATTERN])
    assert not torch.equal(engine.worker.kv.data[0], engine.worker.kv.data[1])


def test_a_step_by_hand_is_a_step_of_the_engine(model: Model) -> None:
    """A whole prompt by hand has the logits of transformers' own forward."""
    engine = sharing.Engine(EngineConfig(dtype="float32", threads=1, kv_tokens=32 * 8, cpu_offload_gib=0), model)
    batch = by_hand.batch_of(engine, by_hand.own_blocks(2, 50, 32), 50, count=50, seed=3)
    logits = by_hand.forward(engine, batch)
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(model.module.config, attn_implementation="sdpa").eval()
    plain.load_state_dict(model.module.state_dict())
    with torch.inference_mode():
        want = plain(input_ids=batch.input_ids.view(2, 50), use_cache=False).logits[:, -1]
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="--device cuda: torch .* finds no CUDA device"):
        run_named(("sharing",), model="x", device="cuda")


def test_what_measures_the_cpu_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    more: dict[str, Any]
    for names, more, what in (
        (("refresh",), {}, "refresh"),
        (("fanout",), {"against": "transformers"}, "--against transformers"),
        (("fanout",), {"floor": True}, "--floor"),
    ):
        with pytest.raises(InputError, match=f"{what} measures the CPU"):
            run(BenchOptions(names, model="x", device="cuda", **more))
