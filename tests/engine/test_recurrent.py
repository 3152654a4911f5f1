"""Models with recurrent layers: samples of an engine against the module's plain forward, whatever happens to the state."""

from __future__ import annotations

import copy
import io
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.cpu import isa
from rollout.engine.engine import Engine
from rollout.engine.forward import recurrence
from rollout.engine.forward.model import Model, UnsupportedModel
from rollout.engine.kv import pools, sizing
from rollout.engine.kv.sizing import pool_sizes
from rollout.engine.kv.states import StatePages, state_sizes
from rollout.engine.memory import HostMemory
from rollout.engine.values import Group, PartialSample, Sample, Sampling
from rollout.exact import use_exact
from tests.support.families import build, outcome
from tests.support.samebits import (
    ROOMY,
    asked,
    assert_same_everywhere,
    assert_same_gradients,
    assert_same_in_a_trainer,
    gradients,
    prompt,
)
from tests.support.tiny import plain_logprobs
from tests.support.toy import group, run

FAMILIES = (
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear", "lfm2", "lfm2_moe", "granitemoehybrid",
    "nemotron_h", "falcon_h1", "bamba",
)  # fmt: skip
STATEFUL = ["qwen3_5_text", "lfm2", "nemotron_h", pytest.param("falcon_h1", marks=pytest.mark.long)]
"""a delta rule, a convolution alone, layers with neither, and a scan with attention in every layer"""
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_batch_tokens": 17},
    "few": {"max_num_seqs": 2},
    "offloaded": {"kv_tokens": 400, "cpu_offload_gib": 0.01},
    "recomputed": {"kv_tokens": 200},
    "overlapped": {"overlap_steps": True, "max_batch_tokens": 64},
}
MIB = 1 << 20
BOUND = 5e-5
"""of log-probs in fp32: the plain forward scans in chunks, the engine token by token; a lost state changes them by 1e-2"""


@cache
def built(name: str) -> Any:
    return build(name)


def engine_of(name: str, **config: Any) -> Engine:
    model = copy.deepcopy(built(name))
    return Engine(EngineConfig(dtype="float32", threads=1, **{**ROOMY, **config}), Model(model, name))


def check(name: str, each: Group, samples: dict[tuple[str, int], Sample]) -> None:
    """Assert that log-probs are those of the plain forward."""
    for index in each.wanted:
        sample = samples[each.id, index]
        assert sample.finish_reason in ("length", "scored"), sample.error
        want = plain_logprobs(built(name), each.prompt, sample)
        np.testing.assert_allclose(sample.logprobs, want, atol=BOUND, rtol=0)


@pytest.mark.some(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_their_published_patterns(name: str) -> None:
    found = outcome(build(name), name, ["in a large pool"])
    assert found.kind == "right", found


@pytest.mark.some(5)
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("setting", SETTINGS)
def test_samples_are_those_of_the_plain_forward(setting: str, name: str) -> None:
    engine = engine_of(name, **SETTINGS[setting])
    groups = [group(f"g{i}", prompt(n, i), n=3, max_tokens=24, seed=i, ignore_eos=True) for i, n in enumerate((70, 41, 5, 90))]
    samples = run(engine, groups)
    for each in groups:
        check(name, each, samples)
    status = engine.status()
    assert status["states"]["copied_bytes"] == 0 and status["states"]["used"] == 0
    moved = {"offloaded": status["offloaded_blocks"], "recomputed": status["recompute_preemptions"]}
    assert moved.get(setting, 1) > 0


@pytest.mark.usefixtures("loads_in_full")
@pytest.mark.parametrize("name", STATEFUL)
def test_a_forgotten_state_is_noticed_at_load(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the self-check."""
    rows = recurrence.rows_of
    monkeypatch.setattr(recurrence, "rows_of", lambda call: rows(call)._replace(writes=np.full_like(rows(call).writes, -1)))
    with pytest.raises(UnsupportedModel, match="log-probs differ"):
        engine_of(name)


def test_a_fork_shares_the_state_and_copies_nothing() -> None:
    """16 children have the KV of one prompt and 16 states."""
    engine = engine_of("qwen3_5_text")
    engine.submit(group("g", prompt(64), n=16, max_tokens=8, seed=1, ignore_eos=True))
    engine.step()
    states = engine.scheduler.state.states
    assert states is not None and engine.counters.forks == 15
    engine.step()
    engine.step()
    status = engine.status()
    assert status["states"]["used"] == 16 and status["states"]["copied_bytes"] == 0
    assert status["kv"]["device_used"] == 64 // 8 + 16
    run(engine)


@pytest.mark.parametrize("name", STATEFUL)
def test_the_third_prompt_with_a_prefix_continues_from_a_snapshot(name: str) -> None:
    engine, shared = engine_of(name), prompt(48)
    found = []
    for i in range(3):
        each = group(f"g{i}", np.concatenate([shared, prompt(13 + i, 1 + i)]), n=2, max_tokens=6, seed=i, ignore_eos=True)
        check(name, each, run(engine, [each]))
        found.append(engine.counters.prefix_hit_tokens)
    assert found == [0, 0, 48] and engine.status()["states"]["snapshots"] == 1


@pytest.mark.parametrize("name", STATEFUL)
def test_a_turn_continues_from_the_state_of_the_one_before(name: str) -> None:
    engine = engine_of(name)
    first = group("a", prompt(30), n=2, max_tokens=9, seed=1, ignore_eos=True, kv_ttl_s=100.0)
    samples = run(engine, [first])
    history = np.concatenate([first.prompt, samples["a", 1].token_ids, prompt(7, 3)]).astype(np.int32)
    second = Group("b", history, Sampling(n=2, max_tokens=8, seed=2, ignore_eos=True), after=("a", 1))
    check(name, second, run(engine, [second]))
    assert engine.counters.kept_tokens == 30 + 9 - 1


@pytest.mark.parametrize("name", STATEFUL)
def test_given_tokens_are_scored_and_cut_children_resumed(name: str) -> None:
    engine = engine_of(name)
    whole = group("w", prompt(33), n=2, max_tokens=20, seed=4, ignore_eos=True)
    sample = run(engine, [whole])["w", 0]
    given = PartialSample(index=0, token_ids=sample.token_ids, logprobs=np.zeros(20, np.float32), weight_versions=[(0, 0)])
    score = Group("s", whole.prompt, Sampling(n=1, max_tokens=20), partials=(given,), score=True)
    np.testing.assert_allclose(run(engine, [score])["s", 0].logprobs, sample.logprobs, atol=BOUND, rtol=0)
    wrong = given.token_ids.copy()
    wrong[9] = (wrong[9] + 1) % 199
    for tokens, count in ((given.token_ids, 20), (wrong, 10)):
        partials = (msgspec.structs.replace(given, token_ids=tokens),)
        again = Group(f"a{count}", whole.prompt, whole.sampling, (0,), partials, score=True, redraw=True)
        assert run(engine, [again])[again.id, 0].token_ids.tolist() == sample.token_ids[:count].tolist()
    part = PartialSample(index=0, token_ids=sample.token_ids[:7], logprobs=sample.logprobs[:7], weight_versions=[(0, 0)])
    rest = Group("r", whole.prompt, whole.sampling, partials=(part,))
    resumed = run(engine_of(name), [rest])
    assert np.array_equal(resumed["r", 0].token_ids, sample.token_ids)
    check(name, rest, resumed)


def change_weights(name: str) -> dict[str, torch.Tensor]:
    return {key: value * 1.05 if value.ndim > 1 else value.clone() for key, value in built(name).state_dict().items()}


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_refresh_while_children_run(kv: str, name: str) -> None:
    """With "recompute", the tokens after it have the log-probs of the new weights alone; with "keep" they have not."""
    engine, changed = engine_of(name), change_weights(name)
    each = group("g", prompt(40), n=2, max_tokens=30, seed=1, ignore_eos=True)
    engine.submit(each)
    for _ in range(12):
        engine.step()
    engine.refresh(changed, kv=kv)  # type: ignore[arg-type]
    sample = run(engine)["g", 0]
    (_, _), (since, version) = sample.weight_versions
    assert version == 1 and 5 < since < 20
    trainer = copy.deepcopy(built(name))
    trainer.load_state_dict(changed, strict=False)
    apart = np.abs(plain_logprobs(trainer, each.prompt, sample) - sample.logprobs)[since:].max()
    assert (apart < BOUND) == (kv == "recompute")


@pytest.mark.parametrize("host", [0.01, 0])
@pytest.mark.parametrize("name", STATEFUL)
def test_children_continue_after_a_sleep(name: str, host: float) -> None:
    engine = engine_of(name, cpu_offload_gib=host)
    each = group("g", prompt(40), n=3, max_tokens=30, seed=1, ignore_eos=True)
    engine.submit(each)
    for _ in range(9):
        engine.step()
    engine.sleep()
    engine.wake()
    check(name, each, run(engine))
    assert (engine.counters.offloaded_states > 0) == bool(host)


def test_fewer_sequences_run_where_their_states_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(copy.deepcopy(built("qwen3_5_text")), "m")
    assert model.states is not None
    gib = 40 * model.states.nbytes / 2**30
    engine = Engine(EngineConfig(dtype="float32", threads=1, **{**ROOMY, "kv_tokens": None, "kv_gib": gib}), model)
    assert 8 <= engine.config.most_seqs < 16 and "fewer sequences run" in caplog.text
    each = group("g", prompt(20), n=16, max_tokens=8, seed=1, ignore_eos=True)
    check("qwen3_5_text", each, run(engine, [each]))


class SmallMemory(HostMemory):
    def free(self) -> int:
        return 100 << 20


def test_states_on_top_of_kv_tokens_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MiB: slots of 1 MiB beside 64 KV blocks of 1 MiB."""
    monkeypatch.setattr(sizing, "free_memory", SmallMemory().free)
    few, many = (EngineConfig(model="m", kv_tokens=64 * 32, max_num_seqs=seqs) for seqs in (16, 64))
    slots, sizes = state_sizes(few, MIB, pool_sizes(few, MIB, SmallMemory()), MIB, SmallMemory())
    assert (slots.device, sizes.device) == (20, 64) and slots.host + sizes.host <= 100 - 64 - 20
    with pytest.raises(ValueError, match=r"74 recurrent states of 1.0 MiB and the KV pool take 0.1 GiB.*lower max_num_seqs=64"):
        state_sizes(many, MIB, pool_sizes(many, MIB, SmallMemory()), MIB, SmallMemory())


@pytest.mark.parametrize(("config", "committed"), [({"kv_gib": 0.01}, True), ({"kv_tokens": 4096}, False)])
def test_states_are_committed_where_their_size_was_set(
    config: dict[str, Any], committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kv_gib includes them; with kv_tokens they come on top, for max_num_seqs sequences that may never come."""
    pages, populated = [], list[Any]()
    monkeypatch.setattr(pools, "_populate", populated.append)
    monkeypatch.setattr("rollout.engine.kv.states.StatePages", lambda *given: pages.append(StatePages(*given)) or pages[-1])
    engine_of("qwen3_5_text", **{**dict.fromkeys(("kv_tokens", "kv_gib")), **config})
    assert (pages[0]._map in populated) == committed


def test_a_convolution_over_one_token_has_no_state() -> None:
    found = outcome(build("lfm2", conv_L_cache=1), "lfm2", ["in a large pool", "offloaded"])
    assert found.kind == "right", found


NATIVE = ["qwen3_5_text", *(pytest.param(name, marks=pytest.mark.long) for name in ("falcon_h1", "lfm2", "olmo_hybrid"))]
"""mixers, products and attention by our kernels"""
needs_kernels = pytest.mark.skipif(bool(isa.lacking("avx2")), reason="no kernels for this CPU")


@needs_kernels
@pytest.mark.parametrize("name", NATIVE)
def test_bits_do_not_depend_on_what_else_runs(name: str) -> None:
    """In bf16: alone, in a crowd, in chunks, offloaded, reset and overlapped."""
    assert_same_everywhere(build(name, torch.bfloat16), asked((61, 40, 7, 83)))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NATIVE)
def test_a_trainer_has_the_bits_of_the_samples(name: str, dtype: torch.dtype) -> None:
    assert_same_in_a_trainer(build(name, dtype), asked((50, 9), n=2))


@needs_kernels
@pytest.mark.parametrize("name", NATIVE)
def test_gradients_of_an_exact_model_are_those_of_the_plain_one(name: str) -> None:
    """In fp32, of rows of different lengths; each parameter has one."""
    rows = [(prompt(30, 1), prompt(12, 2)), (prompt(11, 3), prompt(20, 4))]
    assert_same_gradients(*(gradients(build(name), exact, rows) for exact in (False, True)))


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_an_exact_trainer_with_a_cache_is_refused(name: str) -> None:
    """transformers asks for the last state unless use_cache=False."""
    made = build(name)
    use = use_exact(made, block_size=8)
    with pytest.raises(ValueError, match="call the model with use_cache=False"):
        made(input_ids=torch.arange(24, 44)[None])
    use.remove()


@needs_kernels
def test_an_exact_model_is_copied_but_not_pickled() -> None:
    """What is read back would compute with the mixers of transformers."""
    made = build("qwen3_5_moe_text")
    use, ids = use_exact(made, block_size=8), torch.arange(24, 44)[None]
    with torch.no_grad():
        want = made(input_ids=ids, use_cache=False).logits
        other = copy.deepcopy(made)
        other.get_input_embeddings().weight.mul_(2.0)
        assert not torch.equal(other(input_ids=ids, use_cache=False).logits, want)
        other.get_input_embeddings().weight.mul_(0.5)
        assert torch.equal(other(input_ids=ids, use_cache=False).logits, want)
    with pytest.raises(TypeError, match=r"save its state_dict\(\), or call remove\(\).*copy.deepcopy works"):
        torch.save(made, io.BytesIO())
    use.remove()
    torch.save(made, io.BytesIO())


@needs_kernels
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_an_exact_trainer_with_adapters_of_peft_has_the_same_bits(task: str | None) -> None:
    """Also in a packed row. A PeftModel without a task calls the model that it adapts directly."""
    peft = pytest.importorskip("peft")
    base = build("qwen3_5_text")
    adapted = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules="all-linear", task_type=task))
    rows = [torch.from_numpy(prompt(n, n).astype(np.int64)) for n in (30, 17)]
    packed, positions = torch.cat(rows)[None], torch.cat([torch.arange(len(row)) for row in rows])[None]
    use_exact(base, block_size=8)
    use_exact(adapted, block_size=8)
    with torch.no_grad():
        want = torch.cat([base(input_ids=row[None], use_cache=False).logits[0] for row in rows])
        got = adapted(input_ids=packed, position_ids=positions, use_cache=False).logits[0]
    assert torch.equal(got, want)


@needs_kernels
def test_recurrent_layers_use_kernels_beside_kv_in_fp8() -> None:
    """The kernel of attention reads no fp8; those of recurrent layers read no KV."""
    engine = engine_of("qwen3_5_text", kv_dtype="fp8_e4m3", block_size=32)
    assert "/batch" not in engine.arithmetic and "fp8" in engine.arithmetic


def test_without_kernels_the_name_says_that_bits_depend_on_cuts() -> None:
    engine = engine_of("qwen3_5_text", isa="torch")
    assert engine.arithmetic.startswith("torch/") and "/batch" in engine.arithmetic
    each = group("g", prompt(20), n=2, max_tokens=8, seed=1, ignore_eos=True)
    check("qwen3_5_text", each, run(engine, [each]))
