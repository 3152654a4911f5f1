"""`python -m tests.bench experts` in small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rollout.engine.cpu.isa import best
from rollout.engine.forward.shapes import SHAPES, PublishedShape
from rollout.engine.values import Sample
from tests.bench import experts, routes
from tests.support.bench import bench_rows

TINY = {
    "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 99,
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny_moe", PublishedShape("qwen3_moe", 0.0, TINY))
    monkeypatch.setattr(experts, "MODELS", ("tiny_moe",))
    monkeypatch.setattr(experts, "WEIGHT_BYTES", 64 << 20)
    monkeypatch.setattr(routes, "FAMILIES", ("deepseek_v3",))
    monkeypatch.setattr(routes, "POSITIONS", 200_000)  # scaled down


def test_bench_experts_prints_the_ratio_and_the_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts, "DECODE", (1, 4))
    monkeypatch.setattr(experts, "PREFILL", (33,))
    *rows, summary, family = bench_rows(tmp_path, "experts", scale=0.001)
    assert [row["rows"] for row in rows] == [1, 4, 33] and rows[0]["experts_hit"] == 2
    for row in rows:
        milliseconds = row["grouped_mm_milliseconds"] / row["milliseconds"]
        assert row["ratio_to_grouped_mm"] == pytest.approx(milliseconds, rel=1e-3)
        allowed = min(row["peak_gflops"], row["peak_gbytes"] * row["gflops"] / row["gbytes"])
        assert row["of_floor"] == pytest.approx(row["gflops"] / allowed, rel=1e-3)
    product = rows[0]["ratio_to_grouped_mm"] * rows[1]["ratio_to_grouped_mm"] * rows[2]["ratio_to_grouped_mm"]
    assert summary["ratio_to_grouped_mm"] == pytest.approx(product ** (1 / 3), rel=1e-3)
    assert summary["of_floor"] == min(row["of_floor"] for row in rows[:2]) and summary["max_abs_alone"] == 0
    assert "ratio_to_grouped_mm" in capsys.readouterr().out
    assert family["family"] == "deepseek_v3" and family["positions"] >= 200 and family["bytes_per_token"] == 12
    assert family["max_abs_exact"] == 0 and family["routes_equal"] == family["replay_equal"] == 1


def test_other_routes_and_logprobs_are_seen() -> None:
    """The negative control: routes of another position, in other experts' names, and another log-prob."""
    generator = np.random.default_rng(0)
    made = generator.integers(0, 32, (9, 3, 4)).astype(np.uint8)
    sample = Sample(
        group_id="g", index=0, token_ids=np.zeros(5, np.int32), logprobs=np.zeros(5, np.float32), weight_versions=[(0, 0)],
        finish_reason="length", prompt_tokens=5, routed_experts=made[4:], prompt_routed_experts=made[:4],
    )  # fmt: skip
    assert routes.equal_share(routes.Forward([], [made]), [sample]) == 1
    assert routes.equal_share(routes.Forward([], [made[:, :, ::-1]]), [sample]) == 1, "their order is nobody's"
    assert routes.equal_share(routes.Forward([], [np.roll(made, 1, 0)]), [sample]) < 0.5
    other = made.copy()
    other[3, 2, 1] += 1
    assert routes.equal_share(routes.Forward([], [other]), [sample]) == 8 / 9
    assert routes.largest_gap(routes.Forward([np.float32([0, 0, 0.25, 0, 0])], []), [sample]) == 0.25


def test_a_row_that_depends_on_the_crowd_is_seen() -> None:
    """The negative control."""

    class Leaking(nn.Module):
        def forward(self, hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return hidden + len(hidden) / 8

    made = experts.build("tiny_moe", torch.bfloat16, best())
    inputs = torch.ones(9, 64), torch.zeros(9, 2, dtype=torch.int64), torch.ones(9, 2)
    assert experts.largest_difference(Leaking(), *inputs) == 1
    pairs = zip(made.ours.parameters(), made.grouped_mm.parameters(), strict=True)
    assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)
