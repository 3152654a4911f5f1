"""Logits to tokens and log-probs.

One uniform number for each (seed, sample index, position) from a counter-based generator, turned into a token by the
inverse of the cumulative distribution: what a sample draws depends on its own logits alone, not on who stands beside it, and
there is no generator state to save. Counter-based generators: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011); the mixing function is SplitMix64's finaliser (Steele et al., OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.plan import Drawn, Row


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """How each of D draws is made. A row that forks into n children stands for n draws from one row of logits."""

    logits_row: np.ndarray
    """[D] int64: the row of logits"""
    temperature: np.ndarray
    """[D] float32, 0 = greedy"""
    top_k: np.ndarray
    """[D] int64, 0 = off"""
    top_p: np.ndarray
    """[D] float32"""
    min_p: np.ndarray
    """[D] float32"""
    uniform: np.ndarray
    """[D] float64 in [0, 1)"""
    forbidden: list[tuple[int, list[int]]]
    """(draw, tokens that min_tokens forbids)"""
    raw: bool
    """somebody wants log-probs at temperature 1 without truncation"""

    @staticmethod
    def build(rows: tuple[Row, ...]) -> SamplingBatch:
        drawing = [row for row in rows if row.samples]
        repeats = np.array([row.samples for row in drawing], np.int64)
        samplings = [row.sequence.state.group.sampling for row in drawing]

        def each(values: list[float], dtype: type) -> np.ndarray:
            return np.repeat(np.array(values, dtype), repeats)

        first = np.cumsum(repeats) - repeats
        index = each([row.sequence.index for row in drawing], np.uint64)
        index += (np.arange(len(index)) - np.repeat(first, repeats)).astype(np.uint64)
        forbidden = []
        for row, sampling, at in zip(drawing, samplings, first.tolist(), strict=True):
            if len(row.sequence.output) < sampling.min_tokens and row.sequence.state.eos:
                forbidden += [(at + i, sorted(row.sequence.state.eos)) for i in range(row.samples)]
        return SamplingBatch(
            logits_row=np.repeat(np.arange(len(drawing)), repeats),
            temperature=each([s.temperature for s in samplings], np.float32),
            top_k=each([s.top_k for s in samplings], np.int64),
            top_p=each([s.top_p for s in samplings], np.float32),
            min_p=each([s.min_p for s in samplings], np.float32),
            uniform=uniform(
                each([row.sequence.state.seed for row in drawing], np.uint64),
                index,
                each([len(row.sequence.output) for row in drawing], np.uint64),
            ),
            forbidden=forbidden,
            raw=any(s.raw_logprobs for s in samplings),
        )


def uniform(seed: np.ndarray, index: np.ndarray, position: np.ndarray) -> np.ndarray:
    """[D] float64 in [0, 1) for [D] uint64 seeds, sample indices and positions."""
    with np.errstate(over="ignore"):
        bits = _mix(seed + np.uint64(0x9E3779B97F4A7C15))
        bits = _mix(bits ^ (index * np.uint64(0xD1B54A32D192ED03)))
        bits = _mix(bits ^ (position * np.uint64(0x8CB92BA72F3D8DD7)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Drawn:
    """Draw D tokens from [S, V] logits of any float dtype.

    Each row's arithmetic stands for itself: softmax and cumulative sum run along the vocabulary, row by row.
    """
    device = logits.device
    if not len(batch.logits_row):
        none = np.zeros(0, np.float32)
        return Drawn(none.astype(np.int32), none, none if batch.raw else None, none.astype(bool))
    logits = logits.float()
    finite = torch.isfinite(logits).all(-1)
    rows = torch.from_numpy(batch.logits_row).to(device)
    one_each = len(rows) == len(logits)
    drawn_from = logits if one_each else logits[rows]
    greedy = batch.temperature == 0
    scale = np.where(greedy, np.float32(1), batch.temperature)
    if (scale != 1).any():
        drawn_from = drawn_from / torch.from_numpy(scale).to(device)[:, None]
    if batch.forbidden:
        drawn_from = drawn_from.clone()
        for draw, tokens in batch.forbidden:
            drawn_from[draw, tokens] = -torch.inf
    logprobs = drawn_from.log_softmax(-1)
    cut = np.flatnonzero(~greedy & ((batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)))
    if len(cut):
        at = torch.from_numpy(cut).to(device)
        logprobs[at] = _truncate(logprobs[at], batch, cut)
    tokens = _inverse_cdf(logprobs, torch.from_numpy(batch.uniform).to(device))
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(device), logprobs.argmax(-1), tokens)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    raw = None
    if batch.raw:
        full = logits.log_softmax(-1)
        raw = full[rows, tokens].cpu().numpy()
    return Drawn(tokens.int().cpu().numpy(), chosen.cpu().numpy(), raw, finite[rows].cpu().numpy())


def _inverse_cdf(logprobs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """[D] tokens: the first whose cumulative probability exceeds u times the total. Double precision, as the sum runs over a
    whole vocabulary."""
    total = logprobs.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(total, (u * total[:, -1])[:, None], right=True)[:, 0]
    last = total.shape[-1] - 1 - (logprobs.flip(-1) > -torch.inf).int().argmax(-1)
    return torch.minimum(token, last)


def _truncate(logprobs: torch.Tensor, batch: SamplingBatch, rows: np.ndarray) -> torch.Tensor:
    """[C, V] log-probs of the draws `rows`, each cut as it asks to top_k, then min_p, then top_p, and normalised again. Ties
    with the last token that is kept are kept too. A cut touches only the rows that ask for it: normalising twice would
    change the last bit, and a sample must not depend on what its neighbours ask for."""

    def cut(asking: np.ndarray, least: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], values: np.ndarray) -> None:
        if asking.any():
            at = torch.from_numpy(np.flatnonzero(asking)).to(logprobs.device)
            part = logprobs[at]
            floor = least(part, torch.from_numpy(values[rows][asking]).to(logprobs.device)[:, None])
            logprobs[at] = part.masked_fill(part < floor, -torch.inf).log_softmax(-1)

    top_k = batch.top_k[rows]
    cut((top_k > 0) & (top_k < logprobs.shape[-1]), _kth_best, batch.top_k)
    cut(batch.min_p[rows] > 0, lambda part, p: part.amax(-1, keepdim=True) + p.log(), batch.min_p)
    cut(batch.top_p[rows] < 1, _nucleus_edge, batch.top_p)
    return logprobs


def _kth_best(logprobs: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return logprobs.topk(int(k.max()), -1).values.gather(-1, k - 1)


def _nucleus_edge(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The log-prob of the least likely token of the smallest set that holds at least top_p of the mass."""
    ordered = logprobs.sort(-1, descending=True).values
    before = ordered.exp().cumsum(-1, dtype=torch.float64) - ordered.exp()
    kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, kept - 1)
