"""What a forward takes at least on a device: for layers' products, the head's and attention each the longer of moving bytes and
operations, one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.bench.gpu_bench import Bench


class ForwardCost(NamedTuple):
    """Of one forward."""

    tokens: int
    """that are computed"""
    logits: int
    """rows of them"""
    read: float
    """tokens of KV that attention reads or writes, each once"""
    met: float
    """pairs of a query and a token that it sees"""

    @staticmethod
    def of(counts: np.ndarray, contexts: np.ndarray) -> ForwardCost:
        """Count the work of rows that compute the last counts [R] of their contexts [R] tokens, want the logits of the last
        one, and have no block in common."""
        counts, contexts = counts.astype(np.int64), contexts.astype(np.int64)
        met = counts * (contexts - counts) + counts * (counts + 1) // 2
        return ForwardCost(int(counts.sum()), len(counts), int(contexts.sum()), int(met.sum()))


def beside_limit(bench: Bench, work: ForwardCost, ms: float) -> dict[str, Any]:
    """Figures of a forward that took `ms`: bytes, operations, and the time that the machine takes for them at least."""
    geometry, q_heads = bench.model().geometry.kept_as(bench.kv_dtype), bench.config.num_attention_heads
    itemsize = getattr(torch, bench.dtype).itemsize
    head = int(bench.module.get_output_embeddings().weight.nbytes)
    layers = bench.read_bytes - head
    parts = (
        (layers, 2 * work.tokens * layers // itemsize),
        (head, 2 * work.logits * head // itemsize),
        (work.read * geometry.bytes_per_token, 4 * work.met * q_heads * geometry.head_dim * geometry.layers),
    )
    rates = bench.rates["bytes_per_second"], bench.rates["flops_per_second"]
    limit = 1e3 * sum(max(moved / rates[0], flops / rates[1]) for moved, flops in parts)
    moved, flops = (sum(each) for each in zip(*parts, strict=True))
    return {"ms": ms, "read_bytes": moved, "flops": flops, "limit_ms": limit, "fraction_of_limit": limit / ms}
