"""Lengths as rollouts have them, for benchmarks: the same ones at every call."""

from __future__ import annotations

import numpy as np


def lognormal(rows: int, median: int, longest: int, seed: int = 0) -> np.ndarray:
    """Draw lognormal lengths with sigma 1, at least 1 and at most `longest`: [rows] int32."""
    drawn = np.random.default_rng(seed).normal(np.log(median), 1, rows)
    return np.clip(np.exp(drawn), 1, longest).astype(np.int32)
