"""Draws on a GPU: all their inputs go to the device in one copy, all that they give comes back in one. The host waits for the
step where it reads that. `engine.cuda.sampling_kernels` says how they are drawn. Imported only where Triton is there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.cuda.memory import to_device, to_host
from engine.cuda.sampling_kernels import draw_kernel
from engine.forward.sampling import Read
from engine.scheduling.plan import Cuts

BLOCK = 2048
"""logits of a row that are looked at together"""


def fits(logits: torch.Tensor) -> bool:
    """Tell whether the kernel takes these logits: it takes all."""
    return True


def launch(
    logits: torch.Tensor,
    row: np.ndarray,
    temperature: np.ndarray,
    uniform: np.ndarray,
    raw: bool,
    cuts: Cuts | None = None,
) -> tuple[torch.Tensor, Callable[[], Read]]:
    """D draws by inverse CDF from [S, V] logits on a device, not waited for: their [D] int32 tokens there, and what reads all
    that `Kernels.draw` returns; log-probs are those of `log_softmax` up to rounding. Draws that cut and those that do not are
    two launches, so that what one computes does not depend on the others."""
    draws = len(row)
    cutting = np.zeros(draws, bool) if cuts is None else cuts.any
    kinds = [(mine, cut) for cut in (False, True) if len(mine := np.flatnonzero(cutting == cut))]
    asked = []
    for mine, cut in kinds:
        columns = [mine, row[mine], temperature[mine], uniform[mine]]
        if cuts is not None and cut:
            columns += _asked_cuts(cuts, mine)
        asked.append(np.concatenate(columns, dtype=np.float64))
    out = torch.empty((4, draws), device=logits.device)
    logits = logits.contiguous()
    for (mine, cut), sent in zip(kinds, to_device(asked, logits.device), strict=True):
        draw_kernel[(len(mine),)](
            logits, sent, out, len(mine), draws, logits.shape[1], logits.stride(0), CUT=cut, N=BLOCK, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    wait = to_host(out)

    def read() -> Read:
        tokens, logprobs, plain, finite = wait()
        return tokens.view(np.int32), logprobs, plain if raw else None, finite > 0

    return out[0].view(torch.int32), read


def _asked_cuts(cuts: Cuts, mine: np.ndarray) -> list[np.ndarray]:
    """Of the draws `mine`: top_k, top_p and min_p, where their forbidden tokens begin, and these."""
    tokens = dict(cuts.forbidden)
    lists = [tokens.get(draw, []) for draw in mine.tolist()]
    first = np.cumsum([0, *map(len, lists)])
    return [cuts.top_k[mine], cuts.top_p[mine], cuts.min_p[mine], first, np.array([t for each in lists for t in each])]
