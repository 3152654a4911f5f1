"""Routes of experts: the engine returns the choices that forward hooks on the model see, wherever the KV came from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.cpu import isa
from rollout.engine.engine import Engine
from rollout.engine.forward import routes
from rollout.engine.forward.experts import NoRoutes, experts_in
from rollout.engine.forward.latent import use_latent_kv
from rollout.engine.forward.model import Model
from rollout.engine.forward.routes import RouteRecorder
from rollout.engine.kv.routes import RoutePages
from rollout.engine.scheduling.plan import Plan
from rollout.engine.values import Group, PartialSample, Routing, Sample
from rollout.exact import use_exact
from tests.support.families import build
from tests.support.routes import assert_routes, prompt_routes, seen_routes
from tests.support.samebits import SAME, engine_of, prompt
from tests.support.toy import engine as toy_engine
from tests.support.toy import group, run

MORE = ("olmoe", "mixtral", "glm4_moe", "minimax_m2", "nemotron_h", "qwen3_5_moe_text")
MIXTURES = ["qwen3_moe", "deepseek_v3", "gpt_oss", *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
SETTINGS: dict[str, dict[str, Any]] = {
    **SAME,
    "offloaded": {"kv_tokens": 128, "cpu_offload_gib": 0.01},
    "recomputed": {"kv_tokens": 112, "drafts": 0},
    "drafted": {"drafts": 4},
}
pytestmark = pytest.mark.skipif(bool(isa.lacking("avx2")), reason="no kernels for this CPU")


def asked(id: str, tokens: int, seed: int = 0, **options: Any) -> Group:
    return group(
        id,
        prompt(tokens, seed),
        **{"n": 3, "max_tokens": 20, "seed": seed, "ignore_eos": True, "routed_experts": True, **options},
    )


def opened(name: str, **config: Any) -> tuple[Engine, Any]:
    """Return an engine that keeps routes, and its model as an exact trainer has it."""
    made = build(name, torch.bfloat16)
    engine = engine_of(made, **{"routed_experts": True, **config})
    use_exact(made, engine.arithmetic, block_size=8)
    return engine, made


def check_all(name: str, groups: list[Group], **config: Any) -> Engine:
    engine, made = opened(name, **config)
    samples = run(engine, groups)
    for each in groups:
        assert_routes(made, each, samples)
    return engine


@pytest.mark.parametrize("name", MIXTURES)
def test_routes_are_those_that_hooks_see(name: str) -> None:
    """Through forks and chunks, of prompts of one token, of a block and of more."""
    engine = check_all(name, [asked("a", 61), asked("b", 40, 1), asked("c", 1, 2), asked("d", 9, 3)], max_batch_tokens=33)
    assert engine.routing is not None and engine.routing.dtype == np.uint8
    model = engine.model
    assert isinstance(model, Model) and engine.routing.layers == tuple(each.layer for each in experts_in(model.module))


@pytest.mark.some(3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_routes_follow_kv_that_moves(setting: str) -> None:
    groups = [asked(f"g{i}", each, i, temperature=0.1) for i, each in enumerate((61, 40, 7))]
    engine = check_all("qwen3_moe", groups, **SETTINGS[setting])
    counters = engine.counters
    if setting == "offloaded":
        assert counters.offloaded_blocks
    if setting == "recomputed":
        assert counters.recompute_preemptions
    if setting == "drafted":
        assert counters.accepted_tokens


def test_routes_over_latent_kv() -> None:
    made = build("deepseek_v3", torch.bfloat16)
    use_latent_kv(made)
    engine = engine_of(made, latent_kv=True, routed_experts=True)
    samples = run(engine, [each := asked("a", 40)])
    use_exact(made, engine.arithmetic, block_size=8)
    assert_routes(made, each, samples)


def test_a_prefix_hit_has_the_routes_of_its_prompt() -> None:
    """Also for a group that did not ask when the prefix was computed."""
    engine, made = opened("qwen3_moe")
    run(engine, [asked("a", 61, routed_experts=False)])
    samples = run(engine, [more := Group("b", np.concatenate([prompt(61), prompt(5, 9)]), asked("b", 1).sampling)])
    assert engine.counters.prefix_hit_tokens >= 56
    assert_routes(made, more, samples)


@pytest.mark.parametrize("offload", [False, True])
def test_a_turn_has_the_routes_of_the_turn_before(offload: bool) -> None:
    """In the copy of a block that the children of a fork shared, and after a sleep through host memory."""
    engine, made = opened("qwen3_moe", cpu_offload_gib=0.01)
    first = asked("a", 61, kv_ttl_s=60.0)
    samples = run(engine, [first])
    for index in range(3):
        if offload:
            engine.sleep()
            engine.wake()
        before = engine.counters.kept_tokens
        history = np.concatenate([first.prompt, samples["a", index].token_ids, prompt(6, 7)])
        turn = Group(f"b{index}", history, asked("b", 1).sampling, after=("a", index))
        assert_routes(made, turn, run(engine, [turn]))
        assert engine.counters.kept_tokens > before


@pytest.mark.parametrize("elsewhere", [False, True])
def test_cut_and_resumed_children_keep_their_routes(elsewhere: bool) -> None:
    engine, made = opened("qwen3_moe")
    cut = asked(
        "a", 40, n=4, max_tokens=30, finish_after=1, min_len_to_cut=3, ignore_eos=False, stop_token_ids=tuple(range(24, 40))
    )
    samples = run(engine, [cut])
    unfinished = [each for each in samples.values() if each.finish_reason == "cut"]
    assert unfinished
    partials = tuple(PartialSample.of(each) for each in unfinished)
    again = Group("b", cut.prompt, asked("b", 1, n=4, max_tokens=30, seed=cut.sampling.seed).sampling,
                  tuple(each.index for each in partials), partials)  # fmt: skip
    other = opened("qwen3_moe")[0] if elsewhere else engine
    assert_routes(made, again, run(other, [again]))


def test_scored_tokens_have_routes() -> None:
    engine, made = opened("deepseek_v3")
    samples = run(engine, [asked("a", 30)])
    given = tuple(PartialSample.of(samples["a", index]) for index in range(3))
    scored = Group("b", prompt(30), asked("b", 1).sampling, partials=given, score=True)
    assert_routes(made, scored, run(engine, [scored]))


def reset(engine: Engine, kv: str) -> tuple[dict[tuple[str, int], Sample], Group, Any]:
    """Refresh the weights in the middle of a group. Returns its samples, and the new model."""
    new = build("qwen3_moe", torch.bfloat16)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.25)
    each, samples = asked("a", 45), {}
    engine.submit(each)
    for _ in range(12):
        for sample in engine.step():
            samples[sample.group_id, sample.index] = sample
    engine.refresh(copy.deepcopy(new).named_parameters(), kv=kv)  # type: ignore[arg-type]
    use_exact(new, engine.arithmetic, block_size=8)
    return samples | run(engine), each, new


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_routes_are_those_of_the_weights_that_drew(kv: str) -> None:
    """After a soft reset the tokens before keep the routes that they were drawn with; later ones have those of the new
    weights, over recomputed KV those of a forward of the new model."""
    engine, old = opened("qwen3_moe")
    samples, each, new = reset(engine, kv)
    for index in range(3):
        sample = samples["a", index]
        (_, _), (first, _) = sample.weight_versions
        assert sample.routed_experts is not None and 0 < first < len(sample.token_ids) == len(sample.routed_experts)
        tokens = np.concatenate([each.prompt, sample.token_ids])[:-1]
        got = np.concatenate([prompt_routes(samples.values()), sample.routed_experts])
        there = len(each.prompt) - 1 + first
        np.testing.assert_array_equal(got[:there], seen_routes(old, tokens)[:there])
        assert not np.array_equal(got[there:], seen_routes(old, tokens)[there:])
        if kv == "recompute":
            np.testing.assert_array_equal(got[there:], seen_routes(new, tokens)[there:])


def test_chunks_have_the_routes_of_the_sample() -> None:
    engine, _ = opened("qwen3_moe")
    engine.submit(asked("a", 9, n=1))
    parts, samples = [], []
    while engine.has_work:
        samples += engine.step()
        parts += engine.chunks("a", {0: sum(len(part.token_ids) for part in parts)}, 3, 100)
    got = np.concatenate([part.routed_experts for part in parts if part.routed_experts is not None])
    assert len(parts) > 3 and samples[0].routed_experts is not None
    np.testing.assert_array_equal(got, samples[0].routed_experts[: len(got)])


# ── negative controls ─────────────────────────────────────────────────────────────────────────────────────────────────
def wrong_block(plan: Plan, row: int, tokens: int, block_size: int) -> np.ndarray:
    at = np.arange(tokens)
    return plan.block_table[row, at // block_size - 1].astype(np.int64) * block_size + at % block_size  # type: ignore[no-any-return]


def shifted(slots: Callable[[Plan, int, int, int], np.ndarray]) -> Callable[[Plan, int, int, int], np.ndarray]:
    return lambda plan, row, tokens, block_size: slots(plan, row, tokens + 1, block_size)[1:]


def test_routes_of_a_wrong_block_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_slots", wrong_block)
    with pytest.raises(AssertionError):
        check_all("qwen3_moe", [asked("a", 61)])


def test_routes_shifted_by_one_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_slots", shifted(routes._slots))
    with pytest.raises(AssertionError):
        check_all("qwen3_moe", [asked("a", 61)])


def test_routes_of_another_draw_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = RouteRecorder.keep

    def other(self: RouteRecorder, batch: Any, plan: Plan, pages: RoutePages) -> Any:
        read = keep(self, batch, plan, pages)
        return read and (lambda: (found := read())._replace(draws=np.roll(found.draws, 1, 0)))

    monkeypatch.setattr(RouteRecorder, "keep", other)
    with pytest.raises(AssertionError):
        check_all("qwen3_moe", [asked("a", 61), asked("b", 40, 1)])


@pytest.mark.parametrize("offload", [False, True])
def test_routes_that_a_copy_of_kv_leaves_behind_are_seen(monkeypatch: pytest.MonkeyPatch, offload: bool) -> None:
    """At a fork, and through host memory."""
    monkeypatch.setattr(RoutePages, "move", lambda self, moves: None)
    with pytest.raises(AssertionError):
        test_a_turn_has_the_routes_of_the_turn_before(offload)


def test_routes_under_other_weights_are_seen() -> None:
    """The routes of the weights before a refresh are not those after it: the test of a soft reset compares something."""
    engine, old = opened("qwen3_moe")
    samples, each, new = reset(engine, "recompute")
    tokens = np.concatenate([each.prompt, samples["a", 0].token_ids])[:-1]
    assert not np.array_equal(seen_routes(old, tokens), seen_routes(new, tokens))


# ── refused ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_routes_that_are_not_kept_are_refused() -> None:
    engine, _ = opened("qwen3_moe", routed_experts=False)
    with pytest.raises(ValueError, match="no routes are kept; start the service .* with routed_experts = true, or leave"):
        engine.submit(asked("a", 9))
    assert engine.routing is None and engine.worker.kv.routes is None


def test_models_without_routes_are_refused_by_name() -> None:
    with pytest.raises(NoRoutes, match=r"routed_experts: Qwen3ForCausalLM is no mixture of experts.*leave it out"):
        opened("qwen3")
    with pytest.raises(NoRoutes, match="LongcatFlashForCausalLM is no mixture of experts that transformers' use_experts"):
        experts_in(build("longcat_flash"))
    with pytest.raises(NoRoutes, match="toy has no module"):
        toy_engine(routed_experts=True)


def test_other_routes_of_a_partial_sample_are_refused() -> None:
    engine, _ = opened("qwen3_moe")
    sample = next(iter(run(engine, [asked("a", 9, n=1, max_tokens=5)]).values()))
    had = PartialSample.of(sample)
    columns = had.columns()
    for routes_of, why in (
        (None, r"has routed_experts none: must be \[5, layers, chosen\]"),
        (had.routed_experts[:3], "has routed_experts of 3 tokens"),
        (had.routed_experts.astype(np.uint16), r"uint16 \(5, 4, 2\): must be uint8 \[5, 4, 2\]"),
        (had.routed_experts[:, :1], r"\(5, 1, 2\): must be uint8 \[5, 4, 2\]"),
        (had.routed_experts + np.uint8(4), r"holds expert \d: must be 0 to 3"),
    ):  # type: ignore[index, operator]
        other = PartialSample(index=0, **{**columns, "routed_experts": routes_of})
        with pytest.raises(ValueError, match=why):
            engine.submit(Group("b", prompt(9), asked("b", 1, n=1, max_tokens=9).sampling, partials=(other,)))


def test_memory_of_routes_is_counted() -> None:
    """Pools of one size hold fewer tokens: 4 layers × 2 experts are 8 bytes a token."""
    made = build("qwen3_moe", torch.bfloat16)
    plain, kept = (engine_of(made, kv_tokens=None, kv_gib=0.001, routed_experts=each) for each in (False, True))
    size = plain.worker.kv.block_bytes
    assert kept.worker.kv.block_bytes == size and len(plain.worker.kv.data) == int(0.001 * 2**30 // size)
    assert len(kept.worker.kv.data) == int(0.001 * 2**30 // (size + 8 * 8)) < len(plain.worker.kv.data)
    assert kept.worker.kv.routes is not None and len(kept.worker.kv.routes.data) == len(kept.worker.kv.data)


def test_more_than_256_experts_take_two_bytes() -> None:
    routing = Routing(layers=(1, 2), chosen=8, experts=512, decoder_layers=100)
    assert (routing.dtype, routing.bytes_per_token) == (np.uint16, 32)
    assert Routing(layers=(0,), chosen=2, experts=256, decoder_layers=100).dtype == np.uint8


@pytest.mark.long
def test_routes_of_more_than_256_experts() -> None:
    made = build("qwen3_moe", torch.bfloat16, num_experts=300, num_local_experts=300)
    engine = Engine(EngineConfig(block_size=8, kv_tokens=512, routed_experts=True, threads=1), Model(copy.deepcopy(made), "m"))
    use_exact(made, engine.arithmetic, block_size=8)
    assert_routes(made, each := asked("a", 30), samples := run(engine, [each]))
    assert prompt_routes(samples.values()).max() > 255
