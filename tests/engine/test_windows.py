"""Layers with a sliding window hold the KV of their window alone: samples against the plain forward, and to the bit."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.forward import self_check
from rollout.engine.forward.model import Model, UnsupportedModel, windows_in
from rollout.engine.forward.self_check import check_model
from rollout.engine.kv import windows as pools_of_windows
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.kv.windows import BlockBytes, window_sizes
from rollout.engine.memory import HostMemory
from rollout.engine.scheduling.windows import WindowBlocks
from rollout.engine.values import Group, PartialSample, Sample, Sampling
from tests.support.equivalence import Samples, assert_same, same
from tests.support.families import Asked, build, judged
from tests.support.samebits import (
    ROOMY,
    asked,
    assert_same_everywhere,
    assert_same_in_a_trainer,
    engine_of,
    prompt,
    samples_of,
    torchs_log_softmax,
)
from tests.support.tiny import plain_logprobs
from tests.support.toy import group, run

WIDTH = 12
"""tokens of a window in the tiny models"""
SOME, ALL = ["gemma3_text", "gemma4_text", "gpt_oss", "lara_mini", "lfm3"], ["mistral"]
"""families with windows in some of their layers, of which the last two are recurrent too, and in all"""
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_batch_tokens": 17},
    "few": {"max_num_seqs": 2},
    "offloaded": {"kv_tokens": 320, "cpu_offload_gib": 0.01},
    "recomputed": {"kv_tokens": 160, "drafts": 0},
    "drafts": {"drafts": 4},
    "overlapped": {"overlap_steps": True, "max_batch_tokens": 64, "kv_tokens": 320, "cpu_offload_gib": 0.01},
}
BOUND = 2e-5
"""of log-probs in fp32, of a model without scaled embeddings"""


@cache
def built(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return build(name, dtype)


def in_fp32(name: str, **config: Any) -> Engine:
    return Engine(EngineConfig(dtype="float32", threads=1, **{**ROOMY, **config}), Model(copy.deepcopy(built(name)), name))


def in_bf16(name: str, **config: Any) -> Engine:
    return engine_of(built(name, torch.bfloat16), **config)


def check(name: str, each: Group, samples: Samples) -> None:
    """Assert that log-probs are those of the plain forward: to 1e-5, or as near to those in fp64 as its own are."""
    ended = [samples[each.id, index] for index in each.wanted]
    assert {sample.finish_reason for sample in ended} <= {"length", "scored"}, {sample.error for sample in ended}
    found = judged(built(name), [Asked(each.prompt, sample) for sample in ended])
    assert found.kind == "right", found


def some_groups() -> list[Group]:
    return asked((70, 41, 5, 90), tokens=24)


def cases() -> list[Any]:
    """Each family in each setting; most of the second and third family are nightly."""
    return [
        pytest.param(name, setting, marks=[pytest.mark.long] if name in SOME[1:] and setting != "recomputed" else [])
        for name in (*SOME, *ALL)
        for setting in SETTINGS
    ]


@pytest.mark.some(5)
@pytest.mark.parametrize(("name", "setting"), cases())
def test_samples_are_those_of_the_plain_forward(name: str, setting: str) -> None:
    engine, groups = in_fp32(name, **SETTINGS[setting]), some_groups()
    samples = run(engine, groups)
    for each in groups:
        check(name, each, samples)
    status = engine.status()
    assert status["windows"]["window_tokens"] == WIDTH and status["windows"]["device_used"] == status["kv"]["held_bytes"] == 0
    moved = {"offloaded": status["offloaded_blocks"], "recomputed": status["recompute_preemptions"]}
    assert moved.get(setting, 1) > 0


@pytest.mark.parametrize("name", ["gemma3_text", *(pytest.param(each, marks=pytest.mark.long) for each in (*SOME[1:], *ALL))])
def test_the_same_bits_in_every_setting(name: str) -> None:
    assert_same_everywhere(built(name, torch.bfloat16), some_groups())


@torchs_log_softmax
def test_the_same_bits_in_an_exact_trainer() -> None:
    assert_same_in_a_trainer(built("gemma3_text", torch.bfloat16), asked((70, 5), tokens=8))


def test_the_same_bits_with_pools_that_windows_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as an engine whose layers all hold all tokens; with pools so small that windows run out before anything else."""
    made, groups = built("gemma3_text", torch.bfloat16), some_groups()
    freed, roomy = samples_of(made, groups)

    def smaller(*args: Any) -> Any:
        counts, sizes = window_sizes(*args)
        return counts._replace(device=12, host=min(counts.host, 40)), sizes

    monkeypatch.setattr("rollout.engine.kv.windows.window_sizes", smaller)
    for config in ({"max_batch_tokens": 40}, {"cpu_offload_gib": 0.01}):
        few, engine = samples_of(made, groups, **config)
        assert_same(freed, few)
        assert engine.status()["windows"]["device_blocks"] == 12 and engine.counters.steps > roomy.counters.steps
    monkeypatch.setattr(Model, "windows", property(lambda self: (), lambda self, value: None), raising=False)
    held, engine = samples_of(made, groups)
    assert_same(freed, held)
    assert not engine.status()["windows"]["device_blocks"]


@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
def test_children_are_cut_resumed_elsewhere_and_scored(name: str) -> None:
    groups, elsewhere = some_groups(), in_bf16(name, kv_tokens=240, max_batch_tokens=33)
    whole, _ = samples_of(built(name, torch.bfloat16), groups)

    def part(sample: Sample, tokens: int) -> PartialSample:
        spans = [(0, 0)]
        return PartialSample(
            index=sample.index, token_ids=sample.token_ids[:tokens], logprobs=sample.logprobs[:tokens], weight_versions=spans
        )

    for each in groups:
        mine = {(each.id, index): whole[each.id, index] for index in each.wanted}
        cut = tuple(part(sample, 3 + 7 * index) for (_, index), sample in mine.items())
        assert_same(mine, run(elsewhere, [Group(each.id, each.prompt, each.sampling, partials=cut)]))
        given = tuple(part(sample, len(sample.token_ids)) for sample in mine.values())
        scored = run(elsewhere, [Group(each.id, each.prompt, each.sampling, partials=given, score=True)])
        assert all(scored[key].logprobs.tobytes() == sample.logprobs.tobytes() for key, sample in mine.items())


@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
def test_a_turn_continues_with_the_window_of_the_one_before(name: str) -> None:
    engine = in_fp32(name)
    first = group("a", prompt(50), n=2, max_tokens=9, seed=1, ignore_eos=True, kv_ttl_s=100.0)
    samples = run(engine, [first])
    kept = engine.status()["windows"]["device_used"]
    assert kept == sum(len(seq.window) for seq in engine.scheduler.state.pinned) - 1, "all but a block that both share"
    history = np.concatenate([first.prompt, samples["a", 1].token_ids, prompt(7, 3)]).astype(np.int32)
    second = Group("b", history, Sampling(n=2, max_tokens=8, seed=2, ignore_eos=True), after=("a", 1))
    check(name, second, run(engine, [second]))
    assert engine.counters.kept_tokens == 50 + 9 - 1


def test_a_prefix_is_found_as_far_as_its_window_is() -> None:
    """The end of a prompt is found; a place behind which the window was needed for others is not."""
    engine, shared = in_fp32("gemma3_text"), prompt(48)
    for i, found in enumerate((0, 48)):
        each = group(f"g{i}", np.concatenate([shared, prompt(5 + i, 1 + i)]), n=2, max_tokens=6, seed=i, ignore_eos=True)
        check("gemma3_text", each, run(engine, [each]))
        assert engine.counters.prefix_hit_tokens == found
    windows = engine.scheduler.state.windows
    assert windows is not None
    windows.store.forget_all()
    each = group("g2", np.concatenate([shared, prompt(9, 9)]), n=2, max_tokens=6, seed=5, ignore_eos=True)
    check("gemma3_text", each, run(engine, [each]))
    assert engine.counters.prefix_hit_tokens == 48


@pytest.mark.parametrize("kv", ["keep", "recompute", "abort"])
def test_weights_are_refreshed_meanwhile(kv: Any) -> None:
    """Where the KV is computed again, later tokens are those of the new weights over all of the text."""
    name, tokens = "gemma3_text", 20
    engine = in_fp32(name, kv_tokens=400, cpu_offload_gib=0.01)
    groups = [group(f"g{i}", prompt(40 + 9 * i, i), n=3, max_tokens=tokens, seed=i, ignore_eos=True) for i in range(4)]
    for each in groups:
        engine.submit(each)
    samples = {}
    for _ in range(6):
        samples |= {(each.group_id, each.index): each for each in engine.step()}
    engine.refresh({key: value * 1.05 for key, value in built(name).named_parameters()}, kv=kv)
    samples |= run(engine)
    assert len(samples) == 12 and all(
        len(each.token_ids) == tokens for each in samples.values() if each.finish_reason == "length"
    )
    if kv == "recompute":
        newer = copy.deepcopy(built(name))
        with torch.no_grad():
            for parameter in newer.parameters():
                parameter.mul_(1.05)
        for each in groups:
            for index in range(3):
                sample = samples[each.id, index]
                first = sample.weight_versions[-1][0]
                want = plain_logprobs(newer, each.prompt, sample)
                np.testing.assert_allclose(sample.logprobs[first:], want[first:], atol=BOUND, rtol=0)


@pytest.mark.parametrize("host", [0.01, 0])
def test_sleep_between_steps(host: float) -> None:
    groups = some_groups()
    whole, _ = samples_of(built("gemma3_text", torch.bfloat16), groups)
    engine = in_bf16("gemma3_text", cpu_offload_gib=host)
    for each in groups:
        engine.submit(each)
    samples = {}
    for _ in range(5):
        samples |= {(each.group_id, each.index): each for each in engine.step()}
    engine.sleep()
    engine.wake()
    assert_same(whole, samples | run(engine))


def test_tokens_are_streamed_meanwhile() -> None:
    engine, each = in_bf16("gemma3_text", kv_tokens=240), asked((40,), tokens=24)[0]
    engine.submit(each)
    seen: dict[int, list[int]] = {index: [] for index in each.wanted}
    samples = {}
    while engine.has_work:
        samples |= {(sample.group_id, sample.index): sample for sample in engine.step()}
        for chunk in engine.chunks(each.id, {index: len(tokens) for index, tokens in seen.items()}, 1, 1000):
            seen[chunk.index] += chunk.token_ids.tolist()
    assert all(samples[each.id, index].token_ids.tolist()[: len(tokens)] == tokens for index, tokens in seen.items())
    assert same(samples, samples_of(built("gemma3_text", torch.bfloat16), [each])[0])


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def long_engine(**config: Any) -> Engine:
    """A model with the KV of Gemma 3 270M, narrow otherwise: 18 layers of one head of 256, a window of 512 in five of six."""
    layers = (["sliding_attention"] * 5 + ["full_attention"]) * 3
    made = build(
        "gemma3_text", torch.bfloat16, num_hidden_layers=18, layer_types=layers, head_dim=256, num_key_value_heads=1,
        num_attention_heads=1, hidden_size=32, intermediate_size=32, sliding_window=512, max_position_embeddings=8192,
    )  # fmt: skip
    options = {"block_size": 32, "kv_tokens": 8192, "max_num_seqs": 4, "max_batch_tokens": 1024, "cpu_offload_gib": 0, **config}
    return Engine(EngineConfig(dtype="bfloat16", threads=1, **options), Model(made, "gemma3"))


def test_a_child_of_a_long_prompt_holds_its_windows() -> None:
    """4,096 tokens: 0.28 of the bytes of 18 layers that hold all of them."""
    engine = long_engine()
    engine.submit(group("g", prompt(4096), n=1, max_tokens=8, seed=1, ignore_eos=True))
    held = []
    for _ in range(16):
        engine.step()
        status = engine.status()
        held.append(status["kv"]["held_bytes"])
    blocks, block = 4096 // 32 + 1, 32 * 2 * 256 * 2  # bytes of a layer
    assert status["windows"]["window_layers"] == 15 and status["windows"]["block_bytes"] == 15 * block
    last = [each for each in held if each][-1]
    print(f"KV held per child: {last / (18 * blocks * block):.3f} of what 18 full layers hold")
    assert last == (3 * blocks + 15 * 17) * block and held[-1] == 0
    assert last / (18 * blocks * block) <= 0.30
    assert max(held) <= (3 * blocks + 15 * (17 + 1024 // 32)) * block, "a chunk of the prompt beside it"


def test_a_fork_copies_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = in_fp32("gemma3_text")
    engine.submit(group("g", prompt(64), n=16, max_tokens=40, seed=1, ignore_eos=True))
    engine.step()
    assert engine.counters.forks == 15
    engine.step()
    assert engine.status()["windows"]["device_used"] == 2 + 16, "the end of the prompt, and a block of each child"
    for _ in range(24):
        engine.step()
    most = -(-WIDTH // 8) + 1
    assert all(len(seq.window) <= most for seq in engine.scheduler.state.running)
    assert engine.status()["windows"]["device_used"] <= 16 * most
    run(engine)


def test_windows_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the bytes that a child holds."""
    monkeypatch.setattr(WindowBlocks, "trim", lambda self, seq: None)
    with pytest.raises(AssertionError):
        test_a_child_of_a_long_prompt_holds_its_windows()


def test_memory_is_divided_between_the_kinds_of_layers() -> None:
    config = EngineConfig(block_size=16, max_num_seqs=8, max_batch_tokens=64)
    each, held = BlockBytes(full=100, window=500), 8 * (512 // 16 + 2)
    wanted = held + held // 8 + 4
    few, many = PoolSizes(16, 200, 300), PoolSizes(16, 2000, 5000)
    counts, sizes = window_sizes(config, few, each, 512, 512)
    assert (counts.device, sizes.device, counts.host, sizes.host) == (200, 200, 300, 300), "as if all layers were alike"
    counts, sizes = window_sizes(config, many, each, 512, 512)
    assert (counts.device, counts.host) == (wanted, 2 * wanted)
    for blocks, window, before in ((sizes.device, counts.device, 2000), (sizes.host, counts.host, 5000)):
        assert before * 600 - 100 < blocks * 100 + window * 500 <= before * 600
    counts, sizes = window_sizes(config, many, BlockBytes(0, 600), 512, 512)
    assert (counts.device, sizes.device) == (wanted, 8 * 512), "blocks without bytes are as many as sequences may need"
    asked_for = EngineConfig(block_size=16, max_num_seqs=8, max_batch_tokens=64, kv_tokens=32_000)
    counts, sizes = window_sizes(asked_for, many, each, 512, 512)
    assert (counts.device, sizes.device) == (wanted, 2000)
    assert pools_of_windows.MOST_LOGICAL >= 1 << 20


def test_only_layers_whose_readers_have_windows_free_memory() -> None:
    def layers(*windows: int, stored_by: tuple[int, ...] = ()) -> dict[int, dict[str, Any]]:
        stores = stored_by or tuple(range(len(windows)))
        return {
            i: {"window": window, "stored_by": store} for i, (window, store) in enumerate(zip(windows, stores, strict=True))
        }

    assert windows_in(layers(0, 8, 0), 100) == (0, 8, 0)
    assert windows_in(layers(8, 100, 200), 100) == (8, 0, 0), "a window as wide as the context frees nothing"
    assert windows_in(layers(8, 0, 16, stored_by=(0, 0, 2)), 100) == (0, 16), "another layer reads all of its tokens"
    assert windows_in(layers(8, 16, stored_by=(0, 0)), 100) == (16,)


# ── the self-check ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("attention", ["native", "reference"])
def test_attention_does_not_read_what_has_left_the_window(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load has NaN there; the negative control has it in the window."""
    engine = in_fp32("gemma3_text", attention=attention)
    model: Any = engine.model
    loaded = self_check.LoadedModel(model, engine.worker.backend, 8, 128, HostMemory(), model.geometry)
    check_model(loaded)
    monkeypatch.setattr(self_check, "windows_of", lambda model: tuple(min(8, window) for window in model.windows))
    with pytest.raises(UnsupportedModel, match="log-probs differ"):
        check_model(loaded)


def test_a_hybrid_with_sliding_layers_frees_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with recurrent state, with a window of 64 tokens (three of them) and with full attention in one model, at 4,096
    tokens: it holds at most 0.35 of the KV that it holds without windows, and generates the same bits."""
    layers = ["linear_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    sizes = {"layer_types": layers, "num_hidden_layers": 5, "sliding_window": 64, "max_position_embeddings": 5000}
    module = build("lara_mini", **sizes)
    held, found = [], []
    for windows in (True, False):
        if not windows:
            monkeypatch.setattr("rollout.engine.forward.model.windows_in", lambda asked, context: ())
        config = EngineConfig(dtype="float32", threads=1, kv_tokens=6000, cpu_offload_gib=0, max_num_seqs=4, drafts=0)
        engine = Engine(config, Model(copy.deepcopy(module), "hybrid"))
        engine.submit(group("g", prompt(4096), n=2, max_tokens=6, seed=5, ignore_eos=True))
        while not engine.status()["generated_tokens"]:
            engine.step()
        held.append(engine.status()["kv"]["held_bytes"])
        found.append(run(engine, []))
    print(f"{held[0] / held[1]:.3f} of {held[1]} bytes")
    assert held[0] <= 0.35 * held[1], held
    assert_same(*found)
