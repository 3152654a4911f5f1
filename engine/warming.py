"""Before the first group is taken: steps of all sizes, so that no later one compiles, captures decode, or finds no memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from engine.config import EngineConfig
from engine.forward.batch import Batch
from engine.in_flight import Steps
from engine.scheduling.plan import plan_by_hand

log = logging.getLogger("rollout.engine")
CUT = 0.9
"""`top_p` of a draw that truncates"""


def warmed_up(steps: Steps, config: EngineConfig) -> Steps:
    """Run a step of each size that is captured, and the largest one of all, on a device that compiles and captures on first
    use. The largest first: what the others need finds room in its memory. They write KV of nobody into the first block. Returns
    the same steps. Raises ValueError where the device's memory does not hold one."""
    if not (config.warm_up and steps.device.warms_up):
        return steps
    made = list(_shapes(steps, config))
    for number, (rows, count) in enumerate(made, 1):
        log.info("warming up step=%d of=%d sequences=%d tokens=%d", number, len(made), rows, rows * count)
        try:
            _run(steps, rows, count)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a step of {rows * count} tokens finds no memory beside the weights and the KV pool: lower kv_gib, "
                f"max_batch_tokens={config.most_tokens} or max_num_seqs={config.most_seqs}"
            ) from error
    return steps


def _shapes(steps: Steps, config: EngineConfig) -> Iterator[tuple[int, int]]:
    """Rows, and tokens of each."""
    count = min(config.most_tokens, steps.model.context)
    yield min(config.most_tokens // count, config.most_seqs), count
    decode = [config.most_seqs] if steps.graphs is None else [*steps.graphs.sizes]
    yield from ((rows, 1) for rows in reversed(decode))


@torch.inference_mode()
def _run(steps: Steps, rows: int, count: int) -> None:
    size, dtype = steps.kv.block_size, steps.model.geometry.dtype
    table = np.zeros((rows, -(-count // size)), np.int32)
    plan = plan_by_hand(np.zeros((rows, count), np.int32), np.zeros(rows, np.int32), table)
    cut = plan._replace(sampling=plan.sampling.copy())
    cut.sampling["top_p"] = CUT
    for each in (plan, cut):
        batch = Batch.build(each, size, steps.device.memory, dtype)
        batch = replace(batch, attention=steps.backend.prepare(batch, steps.kv))
        if steps.graphs is not None and steps.graphs.covers(batch):
            logits = steps.graphs.warm(batch, steps.kv, steps.backend)
        else:
            logits = steps.model.forward(batch, steps.kv, steps.backend)
        steps.device.sample(logits, batch.sampling).read()
