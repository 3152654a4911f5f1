"""The batch of each step against a plain one, built row by row from what the sequences themselves hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import tests.support.invariants
from rollout.engine import worker
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.sampling import uniform
from rollout.engine.scheduling.plan import Plan
from rollout.engine.scheduling.queue import RunningTable, sampling_of
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequence import Sequence
from rollout.engine.values.sampling import TRUNCATIONS
from tests.support.plans import rows as rows_of
from tests.support.plans import sent
from tests.support.toy import engine as toy_engine
from tests.support.toy import group, run

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"n": 5, "max_tokens": 20, "ignore_eos": True, "raw_logprobs": True},
    {"n": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"n": 1, "max_tokens": 30, "min_tokens": 12, "stop_token_ids": (3, 5)},
]


def plain(scheduler: Scheduler, plan: Plan, size: int, drawn: torch.Tensor | None) -> dict[str, Any]:
    """Fields of `Batch` and `SamplingBatch` by name, without padding. drawn: by the step in flight."""
    made: dict[str, list[Any]] = {}

    def add(**values: Any) -> None:
        for name, value in values.items():
            made.setdefault(name, []).append(value)

    sequences = scheduler.sequences_of(plan)
    width = max(len(seq.blocks) for seq in sequences)
    tokens = rows = 0
    for seq, row in zip(sequences, rows_of(scheduler, plan), strict=True):
        state, sampling = seq.state, seq.state.group.sampling
        output = list(seq.output)
        if seq.pending:
            assert drawn is not None and seq.pending_draw is not None
            output.append(int(drawn[seq.pending_draw]))
        ids = [*state.group.prompt.tolist(), *output]
        add(
            query_starts=tokens,
            context_lens=row.start + row.count,
            block_table=[block.device for block in seq.blocks] + [0] * (width - len(seq.blocks)),
        )
        for at in range(row.start, row.start + row.count):
            block = seq.blocks[at // size].device
            assert block is not None
            add(input_ids=ids[at], position_ids=at, slots=block * size + at % size)
        tokens += row.count
        if row.samples:
            add(logits_at=tokens - 1)
        for child in range(row.samples):
            if len(output) < sampling.min_tokens and state.eos:
                add(forbidden=(len(made.get("logits_row", [])), sorted(state.eos)))
            keys = (np.array([x], np.uint64) for x in (state.seed, seq.index + child, len(output)))
            add(logits_row=rows, uniform=uniform(*keys)[0], raw=sampling.raw_logprobs)
            add(**{name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")})
        rows += bool(row.samples)
    add(query_starts=tokens)
    return {**made, "raw": any(made.get("raw", [])), "num_tokens": tokens, "num_logits": rows, "shared": plan.shared}


def assert_plain(batch: Batch, want: dict[str, Any]) -> None:
    lengths = {"input_ids": batch.num_tokens, "position_ids": batch.num_tokens, "logits_at": batch.num_logits}
    dtypes = {torch.int64: ("input_ids", "position_ids", "slots", "logits_at"), np.int32: ("query_starts", "context_lens")}
    dtypes |= {np.dtype(np.int32): ("block_table", "shared")}
    for dtype, names in dtypes.items():
        for name in names:
            got = getattr(batch, name)
            assert got.dtype == dtype, name
            values = got[0] if name in ("input_ids", "position_ids") else got
            assert [*map(_plain, values[: lengths.get(name, len(values))])] == [*map(_plain, want.get(name, []))], name
    sampling = batch.sampling
    kinds = {"logits_row": np.int64, "top_k": np.int64, "uniform": np.float64}
    for name in ("logits_row", "uniform", "temperature", "top_k", "top_p", "min_p"):
        array = sampling.cuts[name] if name in TRUNCATIONS else getattr(sampling, name)
        dtype = kinds.get(name, np.float32)
        assert array.dtype == dtype and array.flags.c_contiguous, name
        assert array.tobytes() == np.array(want.get(name, []), dtype).tobytes(), name
    assert sampling.forbidden == want.get("forbidden", []) and sampling.raw == want["raw"]
    assert (batch.num_tokens, batch.num_logits) == (want["num_tokens"], want["num_logits"])


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value


def run_checked(seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Random groups through a toy engine with little KV, each batch compared. Returns the number of batches."""
    r = random.Random(seed)
    size, compared = r.choice([2, 4, 8]), 0
    build = Batch.build

    def checked(plan: Plan, block_size: int, *rest: Any) -> Batch:
        nonlocal compared
        compared += 1
        batch = build(sent(plan), block_size, *rest)
        assert_plain(batch, plain(e.scheduler, plan, block_size, rest[-1]))
        return batch

    monkeypatch.setattr(worker.Batch, "build", staticmethod(checked))
    e = toy_engine(
        block_size=size,
        kv_tokens=r.choice([96, 256]),
        max_num_seqs=r.choice([3, 16]),
        cpu_offload_gib=r.choice([0, 0.001]),
        overlap_steps=seed % 2 == 1,
        drafts=0,  # the plain batch knows none
    )
    base = [r.randrange(1, 23) for _ in range(30)]
    for i in range(8):
        prompt = base[: r.randrange(30)] + [r.randrange(1, 23)]
        e.submit(group(f"g{i}", prompt, **{"seed": i, **r.choice(SAMPLINGS)}))
    for kv in ("keep", "recompute"):
        for _ in range(r.randrange(12)):
            e.step()
        e.refresh({}, kv=kv)
    run(e)
    monkeypatch.setattr(worker.Batch, "build", staticmethod(build))
    assert e.counters.failed_steps == 0, "a batch was not the plain one: see the log"
    return compared


def test_batches_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(run_checked(seed, monkeypatch) for seed in range(8)) > 200


def keeps_blocks(self: RunningTable, seq: Sequence, place: int) -> None:
    """who comes finds the block table of who was there before"""
    seq.place, seq.table = place, self.table[place]
    self.sampling[place] = sampling_of(seq)


def keeps_sampling(self: RunningTable, seq: Sequence, place: int) -> None:
    """who comes samples like who was there before"""
    seq.place, seq.table = place, self.table[place]
    seq.table[: len(seq.blocks)] = [block.device for block in seq.blocks]


@pytest.mark.parametrize("wrong", [keeps_blocks, keeps_sampling], ids=lambda wrong: wrong.__doc__)
def test_what_a_place_keeps_is_seen(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control, with the check of the running table off."""
    monkeypatch.setattr(RunningTable, "_fill", wrong)
    monkeypatch.setattr(tests.support.invariants, "check_table", lambda table: None)
    with pytest.raises(AssertionError, match="see the log"):
        for seed in range(10):
            run_checked(seed, monkeypatch)
