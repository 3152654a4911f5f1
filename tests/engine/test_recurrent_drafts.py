"""Drafts over recurrent layers: samples have the bits that they have without, whatever happens to the state."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.config import EngineConfig
from rollout.engine.cpu import isa
from rollout.engine.engine import Engine
from rollout.engine.forward import recurrence
from rollout.engine.forward.model import Model
from rollout.engine.forward.recurrence import Recurrence
from rollout.engine.kv.block import PoolCounts
from rollout.engine.scheduling.build import open_state
from rollout.engine.scheduling.drafts import DraftBudget, Drafts, may_draft
from rollout.engine.scheduling.states import StateSlots
from rollout.engine.scheduling.step_seconds import ENOUGH, StepSeconds
from rollout.engine.values import Group, PartialSample, Sample, Sampling
from rollout.engine.worker import Worker
from tests.support.configs import engine_config
from tests.support.equivalence import assert_same
from tests.support.families import build
from tests.support.nightly import Draw
from tests.support.ranks import ranked_engine, ranks_in_threads, saved
from tests.support.samebits import ROOMY, SAME, asked, engine_of, prompt, samples_of
from tests.support.toy import group, run

pytestmark = pytest.mark.skipif(bool(isa.lacking("avx2")), reason="no kernels for this CPU")
BF16 = torch.bfloat16
FAMILIES = [
    "qwen3_5_text",
    "lfm2",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("falcon_h1", "nemotron_h", "kimi_linear")),
]
"""a delta rule, a convolution alone, Mamba-2 beside attention in every layer, layers with neither, a decay a channel"""
NATIVE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
"""sizes that the native layers take"""
Known = dict[tuple[str, int], list[int]]
Samples = dict[tuple[str, int], Sample]


def tokens_of(samples: Samples) -> Known:
    return {key: sample.token_ids.tolist() for key, sample in samples.items()}


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> Known:
    """Samples that are to come, of which each row drafts some tokens, half of the drafts with a wrong one among them."""
    known: Known = {}
    chance = random.Random(0)

    def draft(self: Drafts, seq: Any) -> tuple[tuple[int, ...], int]:
        most, at = min(self.most, seq.limit - seq.length - 1), len(seq.output)
        guess = known.get((seq.state.group.id, seq.index), [])[at : at + chance.randrange(most + 1)] if most > 0 else []
        if not guess or not may_draft(seq):
            return (), 0
        if chance.random() < 0.5:
            wrong = chance.randrange(len(guess))
            guess[wrong] = 24 + (guess[wrong] - 23) % 75
        return tuple(guess), 1

    def counts(self: Drafts, rows: Any, drafts: list[tuple[tuple[int, ...], int]], budget: int) -> list[int]:
        found = []
        for tokens, _ in drafts:
            found.append(min(len(tokens), max(0, budget)))
            budget -= found[-1]
        return found

    monkeypatch.setattr(DraftBudget, "close", lambda *_: None)  # it would stop drafts that cost time, by the clock
    monkeypatch.setattr(Drafts, "_draft", draft)
    monkeypatch.setattr(Drafts, "_counts", counts)
    return known


def assert_drafted(engine: Engine) -> None:
    """Assert that drafts were accepted, and others rejected."""
    accepted, drafted = engine.counters.accepted_tokens, engine.counters.drafted_tokens
    assert 20 < accepted < drafted - 20


SETTINGS: dict[str, dict[str, Any]] = {"roomy": {}, **SAME}


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_have_the_bits_that_they_have_without_drafts(name: str, guesses: Known) -> None:
    """In chunks, one at a time, offloaded, prefilled again, overlapped."""
    made, groups = build(name, BF16), asked((61, 40, 7, 83), n=2, tokens=24)
    plain, engine = samples_of(made, groups, drafts=0)
    assert not engine.counters.drafted_tokens
    guesses |= tokens_of(plain)
    for each, config in SETTINGS.items():
        try:
            drafted, engine = samples_of(made, groups, **{"drafts": 4, **config})
            assert_same(plain, drafted)
            assert_drafted(engine)
        except AssertionError as error:
            raise AssertionError(f"{each}: {error}") from error


def test_native_layers_leave_steps_with_drafts_to_the_module(guesses: Known) -> None:
    made, groups = build("lfm2", BF16, **NATIVE), asked((61, 7), n=2, tokens=24)
    plain, engine = samples_of(made, groups, drafts=0)
    assert isinstance(engine.model, Model) and engine.model.decoder is not None, engine.status()["computed_by_reason"]
    guesses |= tokens_of(plain)
    drafted, engine = samples_of(made, groups, drafts=4)
    assert_same(plain, drafted)
    assert_drafted(engine)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")
@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "qwen3_5_moe_text"))]
)
def test_ranks_advance_their_states(tmp_path: Path, name: str, guesses: Known) -> None:
    """Two ranks with drafts have the samples of one rank without."""
    folder, groups = saved(tmp_path, "bfloat16", name), asked((61, 7, 40), n=3, tokens=24)
    with ranks_in_threads():
        with closing(ranked_engine(folder, 1, "bfloat16", kv_tokens=1024)) as engine:
            guesses |= tokens_of(plain := run(engine, groups))
        with closing(ranked_engine(folder, 2, "bfloat16", kv_tokens=1024, drafts=4)) as engine:
            assert_same(plain, run(engine, groups))
            assert_drafted(engine)


def whole(samples: Iterable[Sample]) -> Samples:
    return {(sample.group_id, sample.index): sample for sample in samples}


def schedule(made: PreTrainedModel, drafts: int, seed: int) -> tuple[Samples, Engine]:
    """Run groups, then turns of theirs and children that were cut and go on, with a sleep and a refresh to the same weights at
    random times."""
    chance = random.Random(seed)
    tight = chance.choice([{"kv_tokens": 320, "cpu_offload_gib": 0.01}, {"kv_tokens": 320}, {}])
    engine = engine_of(
        made, drafts=drafts, max_batch_tokens=chance.choice([33, 512]), max_num_seqs=chance.choice([3, 16]), **tight
    )
    weights = {key: value.clone() for key, value in made.state_dict().items()}
    samples: Samples = {}
    groups = []
    for number in range(6):
        options = {"n": chance.choice([1, 2, 3]), "max_tokens": chance.randrange(4, 20), "seed": number, "kv_ttl_s": 100.0}
        groups.append(group(f"g{number}", prompt(chance.randrange(3, 60), number), ignore_eos=True, **options))
        engine.submit(groups[-1])
        for _ in range(chance.randrange(6)):
            samples |= whole(engine.step())
    samples |= run(engine)
    for number, each in enumerate(groups):
        sample = samples[each.id, each.sampling.n - 1]
        history = np.concatenate([each.prompt, sample.token_ids, prompt(5, number)]).astype(np.int32)
        sampling = Sampling(n=2, max_tokens=9, seed=number, ignore_eos=True)
        engine.submit(Group(f"t{number}", history, sampling, after=(each.id, sample.index)))
        had = chance.randrange(1, len(sample.token_ids))
        part = PartialSample(
            index=sample.index, token_ids=sample.token_ids[:had], logprobs=sample.logprobs[:had], weight_versions=[(0, 0)]
        )
        engine.submit(Group(f"r{number}", each.prompt, each.sampling, (sample.index,), partials=(part,)))
    for _ in range(chance.randrange(8)):
        samples |= whole(engine.step())
    engine.sleep()
    engine.wake()
    for _ in range(chance.randrange(8)):
        samples |= whole(engine.step())
    engine.refresh(weights, kv=chance.choice(["keep", "recompute"]))  # type: ignore[arg-type]
    return samples | run(engine), engine


@cache
def plain_schedule(name: str, seed: int) -> Samples:
    return schedule(build(name, BF16), 0, seed)[0]


def assert_same_schedule(name: str, seed: int, known: Known) -> Engine:
    """Assert that a random schedule has the same samples with drafts. Returns the engine with drafts."""
    plain = plain_schedule(name, seed)
    known.clear()
    known |= tokens_of(plain)
    drafted, engine = schedule(build(name, BF16), 5, seed)
    assert plain.keys() == drafted.keys()
    for key, sample in plain.items():
        assert np.array_equal(sample.token_ids, drafted[key].token_ids) and sample.finish_reason == drafted[key].finish_reason
        assert sample.logprobs.tobytes() == drafted[key].logprobs.tobytes(), f"{key}: log-probs differ in some bit"
    return engine


@pytest.mark.parametrize("name", FAMILIES)
def test_random_schedules_with_drafts(name: str, guesses: Known) -> None:
    """Forks, turns, children that were cut, sleeps, refreshes, offloads and preemptions by recompute."""
    engines = [assert_same_schedule(name, seed, guesses) for seed in range(2)]
    assert sum(engine.counters.accepted_tokens for engine in engines) > 60
    assert sum(engine.counters.kept_tokens for engine in engines) > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_schedules_with_drafts_long(name: str, guesses: Known, new_seeds: Draw) -> None:
    for seed in new_seeds(200):
        assert_same_schedule(name, seed, guesses)


def patch_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """a rejected token stays in the state"""
    accept = StateSlots.accept
    monkeypatch.setattr(StateSlots, "accept", lambda self, seq, tokens: accept(self, seq, 5 if tokens < 5 else tokens))


def patch_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """a state advances twice"""
    advance = Recurrence.advance

    def twice(self: Recurrence, pages: Any, advances: np.ndarray) -> None:
        advance(self, pages, advances)
        advance(self, pages, np.concatenate([advances[:, :2], advances[:, 3:], advances[:, 3:]], 1))

    monkeypatch.setattr(Recurrence, "advance", twice)


def patch_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """a state advances by the inputs of another row"""
    of = recurrence.rows_of_advances
    monkeypatch.setattr(
        recurrence,
        "rows_of_advances",
        lambda rows, advances: of(rows, np.concatenate([advances[::-1, :1], advances[:, 1:]], 1)),
    )


def patch_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """the inputs of a step are lost"""
    kept = recurrence.kept
    monkeypatch.setattr(recurrence, "kept", lambda value: torch.zeros_like(kept(value)) if torch.is_tensor(value) else value)


def patch_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """a state does not advance"""
    monkeypatch.setattr(Worker, "advance", lambda self, plan: None)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "mutant", [patch_rejected, patch_twice, patch_row, patch_inputs, patch_never], ids=lambda mutant: mutant.__doc__
)
def test_mutants_are_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], guesses: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        assert_same_schedule("qwen3_5_text", 0, guesses)


@pytest.mark.parametrize("copied", [True, False])
def test_a_state_advances_by_the_weights_that_computed_the_tokens(
    copied: bool, guesses: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh with kv="keep" between a step with drafts and the next plan; the control takes the parameters as they are."""
    if not copied:
        monkeypatch.setattr(recurrence, "kept", lambda value: value)
    made, groups = build("falcon_h1", BF16), asked((20,), n=2)
    guesses |= tokens_of(samples_of(made, groups, drafts=0)[0])
    engine = engine_of(made, drafts=4)
    engine.submit(groups[0])
    while not len(advances := engine.scheduler.state.state_advances):
        engine.step()
    assert engine.worker.kv.states is not None
    states, plan = engine.worker.kv.states.data, engine.pipeline.plan()._replace(state_advances=advances)
    before = states.clone()
    engine.worker.advance(plan)
    want = states.clone()
    states.copy_(before)
    engine.refresh({key: value * 1.5 for key, value in made.state_dict().items()}, kv="keep")
    engine.worker.advance(plan)
    assert not torch.equal(want, before) and torch.equal(states, want) == copied


def test_a_state_that_could_not_advance_is_computed_again(guesses: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence is prefilled again; nothing ends in an error."""
    made, groups = build("qwen3_5_text", BF16), asked((20, 30), n=2)
    plain, _ = samples_of(made, groups, drafts=0)
    guesses |= tokens_of(plain)
    advance, calls = Worker.advance, list[int]()

    def sometimes(self: Worker, plan: Any) -> None:
        calls.append(plan.step)
        if len(calls) % 3 == 2:
            assert self.kv.states is not None
            self.kv.states.data[plan.state_advances[:, 3].tolist()] = 255
            raise RuntimeError("no memory")
        advance(self, plan)

    monkeypatch.setattr(Worker, "advance", sometimes)
    drafted, engine = samples_of(made, groups, drafts=4)
    assert_same(plain, drafted)
    assert engine.counters.failed_moves > 1 and engine.counters.recompute_preemptions > 1


def test_steps_without_drafts_do_not_pay_for_those_with() -> None:
    """A plain step that advances states for the step before is timed without that."""
    drafts = Drafts(4, open_state(engine_config(kv_tokens=64), PoolCounts(4, 0, 4), lambda: 0.0))
    for timed, want in (((7, 2, 2, 10.0), 2.0), ((7, 2, 6, 10.0), 5.0)):
        drafts.seconds = StepSeconds()
        for _ in range(ENOUGH):
            drafts._timed = timed
            drafts.advanced(3.0)
            drafts.ended(7, 15.0)
        assert drafts.seconds.table[1] == [want]


def test_without_kernels_drafts_are_refused_by_name() -> None:
    made = build("lfm2")
    with pytest.raises(
        ValueError, match=r"drafts=4: without the kernels of the CPU, rejected drafts cannot be removed from a recurrent state"
    ):
        engine_of(made, drafts=4, isa="torch")
    engine = Engine(EngineConfig(dtype="float32", isa="torch", **ROOMY), Model(made, "lfm2"))
    assert engine.config.drafts == 0
