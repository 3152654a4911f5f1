"""Sampling on a GPU: all inputs go to the device in one copy and all results come back in one. The host waits for a step only
when it reads its results. `rollout.engine.cuda.sampling_kernels` describes the algorithm. Import only if Triton is
installed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from rollout.engine.cuda.memory import to_device, to_host
from rollout.engine.cuda.sampling_kernels import draw_kernel
from rollout.engine.scheduling.plan import MaskedTokens, SampledTokens, TopLogprobs

BLOCK, LARGE_BLOCK, WARPS = 2048, 4096, 16
"""logits of a row that are processed together, without truncation and with it, and warps of a program. On an H200, 256 draws
from 151,936 logits in bf16 take 142 µs and 1.23 ms so, 174 µs and 1.44 ms with 8 warps; the larger block spares registers"""


def fits(logits: torch.Tensor) -> bool:
    """Return whether the kernel supports these logits: it supports all."""
    return True


def launch(
    logits: torch.Tensor,
    row: np.ndarray,
    temperature: np.ndarray,
    uniform: np.ndarray,
    raw: bool,
    cuts: MaskedTokens | None = None,
    top: np.ndarray | None = None,
) -> tuple[torch.Tensor, Callable[[], SampledTokens]]:
    """Launch D draws by inverse CDF from [S, V] logits on a device.

    Returns their [D] int32 tokens on the device, and a function that waits for all results of `Kernels.draw`; log-probs are
    those of `log_softmax` up to rounding. Draws with and without truncation are two launches, so that a result does not depend
    on other draws; draws with most probable tokens are launches of their own."""
    draws = len(row)
    cutting = np.zeros(draws, bool) if cuts is None else cuts.any
    wanted = np.zeros(draws, np.int64) if top is None else top
    kinds = [
        (mine, cut, int(wanted[mine].max()))
        for cut in (False, True)
        for some in (False, True)
        if len(mine := np.flatnonzero((cutting == cut) & ((wanted > 0) == some)))
    ]
    asked = []
    for mine, cut, _ in kinds:
        columns = [mine, row[mine], temperature[mine], uniform[mine]]
        if cuts is not None and cut:
            columns += _asked_cuts(cuts, mine)
        asked.append(np.concatenate(columns, dtype=np.float64))
    most = int(wanted.max())
    out = torch.empty((4 + 2 * most, draws), device=logits.device)
    logits = logits.contiguous()
    for (mine, cut, best), sent in zip(kinds, to_device(asked, logits.device), strict=True):
        draw_kernel[(len(mine),)](
            logits, sent, out, len(mine), draws, logits.shape[1], logits.stride(0), best,
            CUT=len(cuts.cuts) if cuts is not None and cut else 0,
            TOP=best > 0,
            N=LARGE_BLOCK if cut else BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    wait = to_host(out)

    def read() -> SampledTokens:
        tokens, logprobs, plain, finite, *best = wait()
        found = None if top is None else _top_of(np.array(best), top)
        return SampledTokens(tokens.view(np.int32), logprobs, plain if raw else None, finite > 0, found)

    return out[0].view(torch.int32), read


def given_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Score given tokens [N] under logits [N, V], both on a device: [N] float32, with the bits that `launch` returns for draws
    without truncation. The host does not wait."""
    number = torch.arange(len(tokens), device=logits.device, dtype=torch.float64)
    asked = torch.cat([number, number, torch.full_like(number, temperature), -1.0 - tokens.to(torch.float64)])
    out = torch.empty((4, len(tokens)), device=logits.device)
    if len(tokens):
        draw_kernel[(len(tokens),)](
            logits.contiguous(), asked, out, len(tokens), len(tokens), logits.shape[1], logits.shape[1], 0, CUT=0,
            TOP=False, N=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out[1]


def _top_of(best: np.ndarray, top: np.ndarray) -> TopLogprobs:
    """Extract the most probable tokens from [2 K, D] float32, in which ids (as bits) and log-probs alternate."""
    ids, logprobs = np.ascontiguousarray(best[0::2].T).view(np.int32), np.ascontiguousarray(best[1::2].T)
    unwanted = np.arange(ids.shape[1]) >= top[:, None]
    ids[unwanted], logprobs[unwanted] = -1, -np.inf
    return TopLogprobs(ids, logprobs)


def _asked_cuts(cuts: MaskedTokens, mine: np.ndarray) -> list[np.ndarray]:
    """Return the truncations of the draws `mine`, the offsets of their forbidden tokens, and these tokens."""
    tokens = dict(cuts.forbidden)
    lists = [tokens.get(draw, []) for draw in mine.tolist()]
    first = np.cumsum([0, *map(len, lists)])
    return [*(values[mine] for values in cuts.cuts.values()), first, np.array([t for each in lists for t in each])]
