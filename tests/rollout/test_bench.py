"""`rollout bench`: the table of workloads, the prompts, the figures, and that a run which did not do the work is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout import models
from rollout.bench.harness import BenchFailed
from rollout.bench.inputs import PromptText
from rollout.bench.runner import COUNTERS, measure
from rollout.bench.target import open_engine
from rollout.bench.workloads import WORKLOADS, Workload, find
from rollout.config import Config, InputError
from rollout.engine.config import EngineConfig
from rollout.engine.values import Sample, Sampling
from tests.support.bench import bench_rows

TOY = Workload(name="toy", prompts=2, prompt_tokens=48, n=3, new_tokens=40)


def test_the_table() -> None:
    assert {w.name: (w.prompts, w.prompt_tokens, w.n, w.new_tokens) for w in WORKLOADS.values()} == {
        "fanout": (8, 512, 16, 256),
        "long": (2, 1024, 32, 1024),
        "pressure": (2, 1024, 32, 1024),
        "shared_prefix": (1, 4096, 32, 128),
        "fork_latency": (1, 2048, 64, 8),
        "single_stream": (1, 64, 1, 256),
        "multi_return_seq": (50, 256, 8, 256),
        "few_blocks": (2, 256, 128, 256),
        "rollouts_1024": (32, 256, 1, 1024),
        "rollouts_2048": (32, 256, 1, 2048),
        "rollouts_4096": (32, 256, 1, 4096),
        "rollouts_8192": (32, 256, 1, 8192),
        "rollouts_16384": (32, 256, 1, 16384),
    }
    assert [w.name for w in WORKLOADS.values() if w.tight] == ["pressure", "few_blocks"]


def test_an_unknown_workload_lists_the_names() -> None:
    with pytest.raises(InputError, match="no workload 'fan'; there are: fanout, long, pressure"):
        find("fan")


def test_kv_needed() -> None:
    assert TOY.needed_kv_tokens(32) == 2 * (1 + 3 * 2) * 32  # 88 tokens are 3 blocks, one of them shared
    assert TOY.needed_kv_tokens(16) == 2 * (3 + 3 * 3) * 16  # 48 tokens are 3 full blocks, all shared
    assert find("pressure").kv_tokens(32) == find("long").needed_kv_tokens(32) // 3 == 22_528
    assert find("long").kv_tokens(32) > find("long").needed_kv_tokens(32)
    few = find("few_blocks")
    assert few.kv_tokens(32) == (8 + 128 * 8) * 32 == few.needed_kv_tokens(32) // 2  # one whole group
    assert few.roomy().kv_tokens(32) > few.needed_kv_tokens(32)


@pytest.mark.parametrize(
    ("name", "factor", "scaled"),
    [("fanout", 0.25, (128, 64)), ("fanout", 0.01, (32, 32)), ("fork_latency", 0.1, (205, 8)), ("long", 2.0, (2048, 2048))],
)
def test_scale(name: str, factor: float, scaled: tuple[int, int]) -> None:
    workload = find(name).scaled(factor, block_size=32)
    assert (workload.prompt_tokens, workload.new_tokens) == scaled


def test_prompts_follow_each_other(tiny_model: Path) -> None:
    text = PromptText(models.load_tokenizer(tiny_model))
    first, second = text.slices(0, 2, 5)
    np.testing.assert_array_equal(np.concatenate([first, second]), text.ids[:10])
    assert first.dtype == np.int32
    around = text.slices(len(text.ids) - 3, 1, 5)[0]
    np.testing.assert_array_equal(around, np.concatenate([text.ids[-3:], text.ids[:2]]))


def test_the_text_is_long_enough_for_smollm2(smollm2: Path) -> None:
    assert len(PromptText(models.load_tokenizer(smollm2)).ids) >= 25_000


class FakeTarget:
    """Returns at once what it was asked for; `spoil` lets a test damage the samples."""

    name = "fake"

    def __init__(self, spoil: Any = None) -> None:
        others = ("decode_seconds", "decode_tokens")
        self.counters = dict.fromkeys((*COUNTERS, *others), 0)
        self.spoil = spoil
        self.calls: list[tuple[list[np.ndarray], Sampling]] = []

    def generate(self, prompts: list[np.ndarray], sampling: Sampling) -> Iterator[Sample]:
        self.calls.append((prompts, sampling))
        self.counters["prefill_tokens"] += sum(len(prompt) for prompt in prompts)
        samples = [
            Sample(
                group_id=str(g),
                index=i,
                token_ids=np.zeros(sampling.max_tokens, np.int32),
                logprobs=np.zeros(sampling.max_tokens, np.float32),
                finish_reason="length",
                weight_versions=[(0, 0)],
                prompt_tokens=len(prompt),
            )
            for g, prompt in enumerate(prompts)
            for i in range(sampling.n)
        ]
        return iter(self.spoil(samples) if self.spoil and len(self.calls) > 1 else samples)

    def status(self) -> dict[str, Any]:
        return {**self.counters, "attention": "none", "arithmetic": "fake/1", "isa": "none", "ranks": []}

    def peak_rss_bytes(self) -> int:
        return 1000


def run_fake(target: FakeTarget, model: Path, repeat: int = 3) -> tuple[list[dict[str, Any]], EngineConfig]:
    configs: list[Config] = []

    @contextmanager
    def open_target(config: Config) -> Iterator[FakeTarget]:
        configs.append(config)
        yield target

    text = PromptText(models.load_tokenizer(model))
    rows = list(measure(TOY, text, EngineConfig(model="m"), open_target, repeat))
    assert len(configs) == 1  # one target a workload
    return rows, configs[0].engine


def test_figures_of_a_run_and_the_summary(tiny_model: Path) -> None:
    target = FakeTarget()
    rows, engine = run_fake(target, tiny_model)
    *runs, summary = rows
    assert engine.kv_tokens == TOY.kv_tokens(32)
    assert [row["run"] for row in runs] == [0, 1, 2]
    for row in runs:
        assert (row["workload"], row["engine"], row["generated_tokens"]) == ("toy", "fake", 2 * 3 * 40)
        assert row["prefill_tokens"] == 2 * 48  # the difference, not the total
        assert row["tokens_per_second"] > 0 and row["peak_rss_bytes"] == 1000
        assert row.keys() >= {"seconds", "recomputed_tokens", "offloaded_blocks", "restored_blocks", "recompute_preemptions"}
    assert summary["summary"] is True and summary["runs"] == 3
    assert summary["tokens_per_second"] == sorted(row["tokens_per_second"] for row in runs)[1]
    json.dumps(rows)


def test_every_run_has_prompts_of_its_own(tiny_model: Path) -> None:
    target = FakeTarget()
    run_fake(target, tiny_model)
    prompts = [prompt.tobytes() for call, _ in target.calls for prompt in call]
    assert len(set(prompts)) == len(prompts) == 1 + 3 * 2
    for _, sampling in target.calls[1:]:
        assert (sampling.temperature, sampling.ignore_eos, sampling.top_p, sampling.n) == (1.0, True, 1.0, 3)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda samples: samples[:-1], "5 different samples of 6"),
        (lambda samples: [*samples[:-1], samples[0]], "5 different samples of 6"),
    ],
)
def test_a_run_that_lost_samples_is_refused(tiny_model: Path, spoil: Any, named: str) -> None:
    with pytest.raises(BenchFailed, match=named):
        run_fake(FakeTarget(spoil), tiny_model)


def test_a_run_with_short_or_failed_samples_is_refused(tiny_model: Path) -> None:
    import msgspec

    def change(**fields: Any) -> Any:
        return lambda samples: [msgspec.structs.replace(samples[0], **fields), *samples[1:]]

    for fields, named in (
        ({"token_ids": np.zeros(3, np.int32)}, "3 tokens instead of 40"),
        ({"logprobs": np.zeros(3, np.float32)}, "lacks log-probs"),
        ({"finish_reason": "error", "error": "boom"}, "boom"),
    ):
        with pytest.raises(BenchFailed, match=named):
            run_fake(FakeTarget(change(**fields)), tiny_model)


def run_command(tiny_model: Path, folder: Path, *names: str, **options: Any) -> list[dict[str, Any]]:
    return bench_rows(folder, *names, model=tiny_model, **({"in_process": True, "scale": 0.02} | options))


def test_in_process(tiny_model: Path, tmp_path: Path) -> None:
    rows = run_command(tiny_model, tmp_path, "fanout", "fork_latency")
    assert [(row["workload"], "summary" in row) for row in rows] == [
        ("fanout", False),
        ("fanout", True),
        ("fork_latency", False),
        ("fork_latency", True),
    ]
    assert rows[0]["engine"] == "rollout-in-process"
    assert rows[0]["generated_tokens"] == 8 * 16 * 32
    assert rows[0]["prefill_tokens"] <= 8 * 32 + 8 * 16  # each prompt once, not once a child


@pytest.mark.parametrize(("options", "named"), [({"scale": 0.0}, "--scale"), ({"repeat": 0}, "--repeat")])
def test_bad_numbers_are_named(tiny_model: Path, tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        run_command(tiny_model, tmp_path, "fanout", **options)


class SlowTarget(FakeTarget):
    """A fake whose runs take `seconds` each, by a clock that the test moves."""

    def __init__(self, clock: list[float], seconds: list[float]) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def generate(self, prompts: list[np.ndarray], sampling: Sampling) -> Iterator[Sample]:
        if sampling.max_tokens != 8:  # not the warm-up
            self.clock[0] += self.seconds.pop(0)
        return super().generate(prompts, sampling)


def test_a_tight_pool_is_compared_in_turn(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []
    took = {"": [2.0, 2.0, 9.0], "/roomy": [1.0, 1.8, 9.9], "/no_offload": [4.0, 2.2, 18.0]}
    configs: list[EngineConfig] = []

    @contextmanager
    def open_target(config: Config) -> Iterator[FakeTarget]:
        configs.append(config.engine)
        yield SlowTarget(clock, took[list(took)[len(configs) - 1]])

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    tight = Workload(name="tight", prompts=2, prompt_tokens=48, n=3, new_tokens=40, kv_share=0.5)
    text = PromptText(models.load_tokenizer(tiny_model))
    *runs, summary = measure(tight, text, EngineConfig(model="m"), open_target, 3, compare=True)
    order = [(row["workload"], row["run"]) for row in runs]
    assert order == [(f"tight{variant}", run) for run in range(3) for variant in took]
    assert [config.kv_tokens for config in configs] == [tight.kv_tokens(32), tight.roomy().kv_tokens(32), tight.kv_tokens(32)]
    assert [config.cpu_offload_gib for config in configs] == [None, None, 0]
    assert summary["workload"] == "tight"
    assert summary["ratio_to_roomy"] == pytest.approx(
        0.9
    )  # the median of 0.5, 0.9 and 1.1: of the turns, not of the medians (1.0 / 1.1)
    assert summary["ratio_to_no_offload"] == pytest.approx(2.0)


def test_only_a_tight_pool_is_compared(tiny_model: Path) -> None:
    rows, _ = run_fake(FakeTarget(), tiny_model)
    assert not [name for name in rows[-1] if name.startswith("ratio")]


@pytest.mark.usefixtures("copies_pay")
def test_pressure_offloads_and_recomputes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    rows = run_command(tiny_model, tmp_path, "pressure", scale=0.1)
    summary = rows[-1]
    assert [row["workload"] for row in rows] == ["pressure", "pressure/roomy", "pressure/no_offload", "pressure"]
    assert summary["offloaded_blocks"] > 0 and summary["recomputed_tokens"] == 0
    assert rows[1]["offloaded_blocks"] == 0 and rows[2]["recomputed_tokens"] > 0  # what the comparison is with
    assert summary["ratio_to_roomy"] > 0 and summary["ratio_to_no_offload"] > 0


def test_sequences_beyond_the_context_run_on_random_weights(tiny_model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(tiny_model, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    rows = run_command(short, tmp_path, "rollouts_1024", scale=0.05)
    assert rows[-1]["weights"] == "random" and rows[-1]["model"] == str(short.resolve())
    assert rows[0]["generated_tokens"] == 32 * 51
    rows = run_command(tiny_model, tmp_path, "rollouts_1024", scale=0.05)
    assert rows[-1]["weights"] == "its own"


def test_bench_score_compares_with_prefill_and_with_generation(tiny_model: Path, tmp_path: Path) -> None:
    turn, like_8b, summary = bench_rows(tmp_path, "score", model=tiny_model, in_process=True, scale=0.01)
    assert turn["score_seconds"] > 0 and summary["ratio_to_prefill"] == turn["ratio_to_prefill"] > 0
    assert like_8b["workload"] == "score_8b" and summary["ratio_to_prefill_8b"] == like_8b["ratio_to_prefill"] > 0
    assert abs(summary["vocabulary_share_8b"] - 0.07) < 0.005 < summary["vocabulary_share"] - 0.07
    assert summary["max_abs_delta"] == 0 and (summary["completions"], summary["tokens"]) == (64, 32)


def test_bench_without_drafts_in_turn_at_another_temperature(tiny_model: Path) -> None:
    workload = find("single_stream").scaled(0.01, 32, 0.7)
    engine = EngineConfig(model=str(tiny_model), dtype="float32", threads=1)
    text = PromptText(models.load_tokenizer(tiny_model))
    rows = list(measure(workload, engine=engine, text=text, open_target=open_engine, repeat=1, undrafted=True))
    assert [row["workload"] for row in rows] == ["single_stream", "single_stream/undrafted", "single_stream"]
    assert rows[1]["drafted_tokens"] == 0 and rows[2]["ratio_to_undrafted"] > 0
