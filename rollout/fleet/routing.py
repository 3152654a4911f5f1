"""Chooses the replica of a group: the one that may have its prefix, unless that is overloaded.

Rendezvous hashing (Thaler, Ravishankar 1998): each replica has a score for each prefix, and the highest score gets it; removing
a replica moves its own prefixes and no others. Bounded loads: Mirrokni, Thorup, Zadimoghaddam (arXiv 1608.01350).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

PREFIX_TOKENS = 256
"""first tokens of a prompt that are hashed: prompts that share them find each other's KV"""
BOUND = 1.25
"""a replica gets a group if it has at most this times the mean of outstanding tokens"""
LEAST_CHILDREN = 16
"""in a part of a group: each part prefills the prompt once more"""


def ranked(prompt: np.ndarray, names: Sequence[str]) -> list[str]:
    """Order replicas by their score for a prompt ([tokens] int32), best first."""
    prefix = prompt[:PREFIX_TOKENS].tobytes()
    return sorted(names, key=lambda name: (xxhash.xxh3_64_intdigest(prefix, seed=xxhash.xxh32_intdigest(name.encode())), name))


def choose(ranking: Sequence[str], loads: Mapping[str, int]) -> str:
    """Choose the best replica that is not overloaded, else the least loaded. loads: outstanding tokens."""
    most = BOUND * sum(loads[name] for name in ranking) / len(ranking)
    return next((name for name in ranking if loads[name] <= most), min(ranking, key=lambda name: loads[name]))


def parts(wanted: Sequence[int], child_tokens: int, loads: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Split the children of a group over several replicas, if all of them would overload one.

    Args:
        wanted: indices of the children, ascending.
        child_tokens: that a child may generate.
        loads: outstanding tokens of each replica.

    Returns contiguous runs of at least LEAST_CHILDREN indices, at most one for each replica."""
    tokens = len(wanted) * child_tokens
    share = BOUND * (sum(loads.values()) + tokens) / len(loads)
    count = max(1, min(math.ceil(tokens / share), len(wanted) // LEAST_CHILDREN, len(loads)))
    ends = [len(wanted) * (i + 1) // count for i in range(count)]
    return [tuple(wanted[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
