"""A second worker that is sent the plans of the first as bytes, as several devices would be: the same bits come out."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.build import open_worker
from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.forward.model import Model
from rollout.engine.kv.block import BlockCopies, Copied
from rollout.engine.scheduling.plan import Plan, SampledTokens, copies_only
from rollout.engine.values import Tag, WeightUpdate
from rollout.engine.weights.staging import source_of
from rollout.engine.weights.tensors import describe, named_pairs, with_digest
from rollout.engine.worker import InFlight, Worker
from tests.support.plans import sent
from tests.support.tiny import tiny
from tests.support.toy import group

SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "num_hidden_layers": 2}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"n": 4, "max_tokens": 20, "ignore_eos": True, "raw_logprobs": True},
    {"n": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "min_tokens": 4},
    {"n": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {4: 1.0}, "max_tokens": 20},
    {"n": 2, "allowed_token_ids": tuple(range(3, 30)), "top_logprobs": 3, "max_tokens": 12},
]


@cache
def module(seed: int) -> PreTrainedModel:
    """Make the weights of a refresh."""
    return tiny("llama", torch.float32, seed, **SMALL)


def model() -> Model:
    """Make a model; each has tensors of its own, with the same values."""
    return Model(tiny("llama", torch.float32, 0, **SMALL), "llama")


def config(overlap: bool) -> EngineConfig:
    """Pools so small that sequences are preempted and offloaded."""
    return EngineConfig(
        dtype="float32",
        block_size=8,
        kv_tokens=160,
        max_num_seqs=8,
        max_batch_tokens=48,
        cpu_offload_gib=0.0005,
        overlap_steps=overlap,
    )


def refresh(worker: Worker, tensors: torch.nn.Module) -> None:
    described = [describe(name, tensor) for name, tensor in named_pairs(tensors)]
    staging = worker.stage(WeightUpdate([with_digest(*each) for each in described]))
    staging.feed_all(source_of(data for _, data in described))
    worker.commit(staging)


class Pair:
    """An engine whose worker has a replica. The replica knows nothing of the scheduler: it gets the bytes of each plan, in the
    order in which the worker got the plans. `spoil`: changes what is sent."""

    def __init__(self, overlap: bool, spoil: Callable[[Plan], Plan] = lambda plan: plan) -> None:
        self.engine = Engine(config(overlap), model())
        self.replica = open_worker(config(overlap), model())
        self.steps: list[tuple[InFlight, InFlight]] = []
        self.copied = 0
        worker = self.engine.worker
        move, execute, sleep, wake = worker.move, worker.execute, worker.sleep, worker.wake

        def both_move(plan: Plan) -> Copied:
            self.replica.move(spoil(sent(plan)))
            self.copied += plan.moves.blocks
            return move(plan)

        def both_execute(plan: Plan) -> InFlight:
            self.steps.append((execute(plan), self.replica.execute(spoil(sent(plan)))))
            return self.steps[-1][0]

        def both_sleep(level: int) -> None:
            sleep(level)
            self.replica.sleep(level)

        def both_wake(tags: Collection[Tag] | None = None) -> None:
            wake(tags)
            self.replica.wake(tags)

        vars(worker).update(move=both_move, execute=both_execute, sleep=both_sleep, wake=both_wake)

    def refresh(self, seed: int) -> None:
        self.engine.refresh(module(seed))
        refresh(self.replica, module(seed))

    @property
    def same(self) -> bool:
        """Whether all draws and both pools of KV are the same, to the bit."""
        drawn = all(raw(one.read()) == raw(other.read()) for one, other in self.steps)
        first, second = self.engine.worker.kv, self.replica.kv
        return drawn and torch.equal(first.data, second.data) and torch.equal(first.host, second.host)


def raw(drawn: SampledTokens) -> bytes:
    return msgspec.msgpack.encode(drawn, enc_hook=lambda array: (array.dtype.str, array.shape, array.tobytes()))


def random_schedule(pair: Pair, seed: int) -> None:
    """Submit groups, step, abort, refresh and sleep in random order, then finish."""
    r, engine = random.Random(seed), pair.engine
    base = [r.randrange(3, 199) for _ in range(60)]
    for number in range(8):
        prompt = [*base[: r.randrange(50)], r.randrange(3, 199)]
        engine.submit(group(f"g{number}", prompt, **{"seed": number, "max_tokens": 16, **SAMPLINGS[number % len(SAMPLINGS)]}))
        for _ in range(r.randrange(6)):
            engine.step()
        if number == 2:
            engine.abort("g1", 0)
        elif number == 4:
            pair.refresh(1)
        elif number == 6:
            engine.sleep(1)
            engine.wake()
    while engine.has_work:
        engine.step()
    assert engine.counters.failed_steps == 0 == engine.counters.failed_moves, "see the log"


@pytest.mark.some(2)
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_replica_that_is_sent_every_plan_has_the_same_bits(seed: int, overlap: bool) -> None:
    pair = Pair(overlap)
    random_schedule(pair, seed)
    counters = pair.engine.counters
    assert len(pair.steps) > 40 and pair.copied > 40 and counters.restored_blocks and counters.offloaded_blocks
    assert pair.same


def without_copies(plan: Plan) -> Plan:
    return plan._replace(moves=BlockCopies())


def without_adjustments(plan: Plan) -> Plan:
    return plan._replace(adjustments=())


def without_pending(plan: Plan) -> Plan:
    none = np.zeros(0, np.int64)
    return plan._replace(pending_tokens=none, pending_draws=none)


def with_another_seed(plan: Plan) -> Plan:
    plan.sampling["seed"] += np.uint64(1)
    return plan


@pytest.mark.parametrize("spoil", [without_copies, without_adjustments, without_pending, with_another_seed])
def test_a_plan_that_loses_something_on_the_way_is_seen(spoil: Callable[[Plan], Plan]) -> None:
    """The negative control of the test above."""
    pair = Pair(True, spoil)
    random_schedule(pair, 0)
    assert not pair.same


class StalePair(Pair):
    def refresh(self, seed: int) -> None:
        self.engine.refresh(module(seed))


def test_a_replica_that_misses_a_refresh_is_seen() -> None:
    """The negative control for weights."""
    pair = StalePair(True)
    random_schedule(pair, 0)
    assert not pair.same


# ── the codec ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_decoded_plan_has_arrays_of_its_own() -> None:
    plan = sent(copies_only(7, BlockCopies(copies=[(1, 2)]), np.ones((2, 4), np.int32), BlockCopies(offloads=[(3, 0)])))
    assert plan.step == 7 and plan.moves.copies == [(1, 2)] and plan.block_table.shape == (0, 0)
    arrays = [value for value in plan if isinstance(value, np.ndarray)]
    assert (
        plan.state_advances.shape == (2, 4)
        and len(arrays) == 15
        and all(array.flags.owndata and array.flags.writeable for array in arrays)
    )


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("starts", np.zeros(1, np.float64), "an array of float64"),
        ("starts", np.zeros(1, object), "an array of object"),
        ("starts", torch.zeros(1), "holds a Tensor"),
        ("shared", (object(),), "holds a object"),
    ],
)
def test_what_is_no_plain_value_is_not_sent(field: str, value: Any, reason: str) -> None:
    plan = copies_only(1, BlockCopies(), np.zeros((0, 4), np.int32), BlockCopies())
    with pytest.raises(TypeError, match=reason):
        plan._replace(**{field: value}).encode()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (("object", (1,), b"12345678"), "an array of 'object'"),
        (("int32", (2,), b"1234"), "cannot reshape"),
        (("int32", (1,), b"123"), "buffer size"),
        (("int32", (1,)), "length 3"),
        (5, "array"),
    ],
)
def test_bytes_that_are_no_plan_are_refused(fields: Any, reason: str) -> None:
    data = msgspec.msgpack.decode(copies_only(1, BlockCopies(), np.zeros((0, 4), np.int32), BlockCopies()).encode())
    data[1] = fields
    with pytest.raises(msgspec.ValidationError, match=reason):
        Plan.decode(msgspec.msgpack.encode(data))
