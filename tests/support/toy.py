"""A model without a network. Its "KV" stores token ids, and its logits are a hash of every id that a query sees through the
block table: one wrong block, missed copy or off-by-one length changes what comes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rollout.engine.engine import Engine
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.sampling import _mix
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.values import Group, Sample, Sampling
from tests.support.configs import engine_config
from tests.support.invariants import check

VOCAB = 23


class ToyModel:
    """The KV of a token is its id + 1, so that unwritten memory (0) shows. `version` goes into the hash like weights would."""

    name = "toy"
    vocab_size = VOCAB
    heads: Sequence[tuple[int, int, int, int]] = ((1, 1, 1, 1),)
    device = torch.device("cpu")
    geometry = KVGeometry(1, 1, 1, torch.float32)
    eos_token_ids = frozenset({0})

    def __init__(self, context: int = 256) -> None:
        self.context = context
        self.forwards = 0
        self.fail_at: set[int] = set()

    def forward(self, batch: Batch, kv: PagedKV, backend: object) -> torch.Tensor:
        self.forwards += 1
        if self.forwards in self.fail_at:
            raise RuntimeError("injected failure of the forward")
        size = kv.block_size
        cells = kv.data[:, 0, 0, 0, :, 0]
        ids = batch.input_ids[0, : batch.num_tokens]
        cells[batch.slots // size, batch.slots % size] = ids.float() + 1
        wanted = batch.logits_at[: batch.num_logits].tolist()
        rows = np.searchsorted(batch.query_starts, wanted, side="right") - 1
        logits = np.empty((len(wanted), VOCAB), np.float32)
        for i, (row, query) in enumerate(zip(rows, wanted, strict=True)):
            seen = int(batch.position_ids[0, query]) + 1
            table = torch.from_numpy(batch.block_table[row].astype(np.int64))
            logits[i] = toy_logits(cells[table].flatten()[:seen].numpy())
        return torch.from_numpy(logits)


def toy_logits(stored: np.ndarray) -> np.ndarray:
    """Return the logits [VOCAB] of a context whose ids + 1 are `stored`."""
    with np.errstate(over="ignore"):
        state = np.uint64(len(stored))
        for value in stored.astype(np.uint64):
            state = _mix(state * np.uint64(31) + value)
        bits = _mix(state + np.arange(VOCAB, dtype=np.uint64))
    return (bits >> np.uint64(40)).astype(np.float32) / 2.0**22


def expected(group: Group) -> list[list[int]]:
    """Compute what the children of a seeded group must be, without an engine."""
    from rollout.engine.cpu.kernels import choose
    from rollout.engine.forward.sampling import sample
    from tests.support.toy_batch import one_draw

    native, children = choose().kernels, []
    for index in range(group.sampling.n):
        tokens: list[int] = []
        while True:
            stored = np.concatenate([group.prompt, np.array(tokens, np.int32)]).astype(np.float32) + 1
            drawn = sample(torch.from_numpy(toy_logits(stored))[None], one_draw(group.sampling, index, len(tokens)), native)
            tokens.append(int(drawn.tokens[0]))
            if tokens[-1] == 0 and not group.sampling.ignore_eos or len(tokens) == group.sampling.max_tokens:
                break
        children.append(tokens)
    return children


def engine(model: ToyModel | None = None, **config: object) -> Engine:
    options = {"block_size": 4, "kv_tokens": 256, "max_num_seqs": 16, "max_batch_tokens": 32, "cpu_offload_gib": 0, **config}
    return Engine(engine_config(dtype="float32", **options), model or ToyModel())  # type: ignore[arg-type]


def group(id: str, prompt: Iterable[int], **sampling: object) -> Group:
    options = {"n": 2, "max_tokens": 8, "seed": 1, **sampling}
    return Group(id, np.array(list(prompt), np.int32), Sampling(**options))  # type: ignore[arg-type]


def run(engine: Engine, groups: Iterable[Group] = (), steps: int = 100_000) -> dict[tuple[str, int], Sample]:
    """Submit, step until nothing is left, return the samples by (group, index)."""
    for each in groups:
        engine.submit(each)
    samples = {}
    for _ in range(steps):
        if not engine.has_work:
            break
        for sample in engine.step():
            assert (sample.group_id, sample.index) not in samples
            samples[sample.group_id, sample.index] = sample
        check(engine.scheduler)
    assert not engine.has_work, f"not done after {steps} steps"
    return samples
