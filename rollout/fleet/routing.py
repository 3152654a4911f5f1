"""Which replica a group runs on: the one that may have its prefix, unless that has more than its share.

Rendezvous hashing (Thaler, Ravishankar 1998): each replica scores each prefix, the best one has it; a replica that goes takes
its own prefixes away and no others. Bounded loads: Mirrokni, Thorup, Zadimoghaddam (arXiv 1608.01350). Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

PREFIX_TOKENS = 256
"""of a prompt that decide where it goes: prompts that share them find each other's KV"""
BOUND = 1.25
"""times the mean of outstanding tokens that a replica may have and still be given more"""
LEAST_CHILDREN = 16
"""of a part of a group: each part prefills the prompt once more"""


def ranked(prompt: np.ndarray, names: Sequence[str]) -> list[str]:
    """Order replicas by how well they suit a prompt ([tokens] int32), best first."""
    prefix = prompt[:PREFIX_TOKENS].tobytes()
    return sorted(names, key=lambda name: (xxhash.xxh3_64_intdigest(prefix, seed=xxhash.xxh32_intdigest(name.encode())), name))


def choose(ranking: Sequence[str], loads: Mapping[str, int]) -> str:
    """Take the best one that has no more than its share of the load, else the least loaded. loads: outstanding tokens."""
    most = BOUND * sum(loads[name] for name in ranking) / len(ranking)
    return next((name for name in ranking if loads[name] <= most), min(ranking, key=lambda name: loads[name]))


def parts(wanted: Sequence[int], child_tokens: int, loads: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Cut the children of a group for several replicas, where all of them would be more than one replica's share.

    Args:
        wanted: indices of the children, ascending.
        child_tokens: that a child may make.
        loads: outstanding tokens of each replica.

    Returns contiguous runs of at least LEAST_CHILDREN indices, at most one for each replica."""
    tokens = len(wanted) * child_tokens
    share = BOUND * (sum(loads.values()) + tokens) / len(loads)
    count = max(1, min(math.ceil(tokens / share), len(wanted) // LEAST_CHILDREN, len(loads)))
    ends = [len(wanted) * (i + 1) // count for i in range(count)]
    return [tuple(wanted[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
