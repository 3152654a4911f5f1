"""Changes of logits before temperature and truncation: bias, allowed tokens, penalties.

Rows to change are copied in fp32; all other rows stay as the model returned them. Each value depends only on its own row, token
and counts, so a draw does not depend on the rest of the batch.

Repetition penalty as in transformers (`RepetitionPenaltyLogitsProcessor`; Keskar et al., "CTRL", 2019): a positive logit of a
token of the prompt or the output is divided by it, another one multiplied. Presence and frequency penalty as in OpenAI's API
reference, for tokens of the output: logit - count · frequency - presence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rollout.engine.scheduling.plan import LogitAdjustment

Send = Callable[[Sequence[np.ndarray]], list[torch.Tensor]]
"""moves 1-D arrays of one dtype to a device, without waiting for it (`rollout.engine.memory.DeviceMemory.send`)"""
AT_ONCE = 64
"""rows changed together: each takes half a megabyte or more, for a whole vocabulary"""
NOT_ALLOWED = -1e30
"""logit of a token that is not allowed: finite, with probability 0 at every temperature"""
FAR = -1e20
"""log-probs below this are of tokens that are not allowed"""


def in_place(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """`Send` to host memory: return the arrays as tensors."""
    return [torch.from_numpy(each) for each in arrays]


class Entries(NamedTuple):
    """Values for single logits; no logit occurs twice."""

    rows: np.ndarray
    """[E] int64: changed rows"""
    ids: np.ndarray
    """[E] int64"""
    values: np.ndarray
    """[E] float32"""


class Adjust(NamedTuple):
    """Changes of C rows of logits, and the draws that use them."""

    draws: np.ndarray
    """[A] int64, ascending: draws from a changed row"""
    taken: np.ndarray
    """[A] int64: changed row of each of these draws"""
    source: np.ndarray
    """[C] int64: row of the model's logits that each changed row copies"""
    bias: Entries
    allowed: Entries
    restricted: np.ndarray
    """[..] int64: changed rows in which only `allowed` tokens may be sampled"""
    repetition: Entries
    counted: Entries
    """values to subtract: presence and frequency penalties"""

    @classmethod
    def build(cls, adjustments: Sequence[LogitAdjustment], logits_row: np.ndarray) -> tuple[Adjust, ...]:
        """Build the changes of a plan, at most AT_ONCE rows each. logits_row: [D] int64, the row of each draw."""
        return tuple(cls._of(adjustments[at : at + AT_ONCE], logits_row) for at in range(0, len(adjustments), AT_ONCE))

    @staticmethod
    def _of(each: Sequence[LogitAdjustment], logits_row: np.ndarray) -> Adjust:
        draws = [np.arange(a.first, a.first + a.draws) for a in each]
        of = [a.penalties for a in each]
        return Adjust(
            draws=np.concatenate(draws),
            taken=np.repeat(np.arange(len(each)), [a.draws for a in each]),
            source=logits_row[[a.first for a in each]],
            bias=_entries([(a.bias_ids, a.bias) for a in each]),
            allowed=_entries([(a.allowed, np.zeros(len(a.allowed))) for a in each]),
            restricted=np.array([i for i, a in enumerate(each) if len(a.allowed)], np.int64),
            repetition=_entries(
                [(a.seen, np.full(len(a.seen), 1 if p is None else p.repetition)) for a, p in zip(each, of, strict=True)]
            ),
            counted=_entries([(a.counted, _subtracted(a)) for a in each]),
        )

    def apply(self, logits: torch.Tensor, send: Send) -> torch.Tensor:
        """Return [C, V] float32 changed rows of [S, V] logits of any float dtype. A row with NaN or infinity becomes all NaN.
        send: moves arrays to the device of the logits."""
        kinds = self.bias, self.allowed, self.repetition, self.counted
        source, restricted, *places = send([self.source, self.restricted, *(at for each in kinds for at in each[:2])])
        bias, allowed, repetition, counted = zip(places[::2], places[1::2], strict=True)
        biases, repetitions, subtracted = send([each.values for each in (self.bias, self.repetition, self.counted)])
        rows = logits[source].float()
        finite = torch.isfinite(rows).all(-1, keepdim=True)
        rows[bias] += biases
        kept = rows[allowed]
        rows.index_fill_(0, restricted, NOT_ALLOWED)  # a number that is assigned would be copied to the device
        rows[allowed] = kept
        seen = rows[repetition]
        rows[repetition] = torch.where(seen > 0, seen / repetitions, seen * repetitions)
        rows[counted] -= subtracted
        return rows.where(finite, torch.nan)


def _subtracted(adjustment: LogitAdjustment) -> np.ndarray:
    if adjustment.penalties is None:
        return np.zeros(0, np.float32)
    presence, frequency = np.float32(adjustment.penalties.presence), np.float32(adjustment.penalties.frequency)
    return adjustment.counts.astype(np.float32) * frequency + presence


def _entries(of_rows: list[tuple[np.ndarray, np.ndarray]]) -> Entries:
    """Join the (ids, values) of all rows."""
    lengths = [len(ids) for ids, _ in of_rows]
    ids, values = (np.concatenate(column) for column in zip(*of_rows, strict=True))
    return Entries(np.repeat(np.arange(len(of_rows)), lengths), ids.astype(np.int64), values.astype(np.float32))
