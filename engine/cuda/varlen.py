"""Attention of prompts that a step computes from their first token on by torch's `varlen_attn`, which is flash attention: the
option `prefill_attention="varlen"`. Their K and V are stored like all others, and nothing is read back from pages.

    tokens of a step   │ decode │ prompt │ prompt │ the rest of one │ prompt │
    tiles              └────────┘                 └─────────────────┘          as without the option
    varlen_attn                 └─── one call ────┘                 └─ one ──┘

Another kernel has other bits: where a prompt's beginning was found in the prefix index, or it takes several steps, tiles go on
from there, so that one prompt may have two sets of log-probs, apart by rounding. What runs from a graph has no such rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch

from engine.cuda.graphs import MOST_TOKENS
from engine.cuda.tiles import SPLIT_TOKENS
from engine.forward.attention import StepCapacity
from engine.kv.pages import PagedKV

MOST_RUNS = 4
"""calls of a layer; other prompts of the step are left to the tiles"""
ARITHMETIC = "varlen"
LEAST_CAPABILITY, WIDEST_HEAD, HEAD_UNIT = 80, 256, 8
"""what FlashAttention 2 serves, which torch bundles (Dao 2023)"""
WANTED, GROUPS = ("scale", "window_size"), "enable_gqa"
"""parameters of `varlen_attn` that torch 2.10 lacks, and one that 2.11 does without"""
TRIED = (3, 40)
"""tokens of the prompts that it is tried with at the start"""
APART = 2**-6
"""of the largest number of an output: how far it may be from the same in fp32"""


class VarlenUnavailable(ValueError):
    """`varlen_attn` cannot be had here, or does not serve the model; the message names the option and says why."""

    def __init__(self, why: str) -> None:
        super().__init__(f'prefill_attention="varlen": {why}')


class Attend(Protocol):
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, scaling: float, window: int
    ) -> torch.Tensor:
        """Attend within N prompts, causally. q [T, q_heads, head_dim], k and v [T, kv_heads, head_dim] (any strides but the
        last), starts [N + 1] int32 on the device, longest: tokens of a prompt, window 0 = unlimited. Returns [T, q_heads,
        head_dim]."""


class Run(NamedTuple):
    """Prompts that stand side by side in a step."""

    tokens: slice
    starts: np.ndarray
    """[N + 1] int32: where each begins among these tokens, and the last one ends"""
    longest: int
    """tokens"""
    rows: slice


class Varlen(NamedTuple):
    attend: Attend
    more_than: int = MOST_TOKENS
    """tokens of a step in which it is used; smaller ones are replayed from graphs, which know nothing of prompts"""

    def runs(self, query_starts: np.ndarray, context_lens: np.ndarray) -> list[Run]:
        """Find the prompts of a step, query_starts [R + 1] and context_lens [R] as in `Batch`: rows that begin their sequence
        and have more than SPLIT_TOKENS tokens. The largest MOST_RUNS runs of them, in their order."""
        if query_starts[-1] <= self.more_than:
            return []
        counts = np.diff(query_starts)
        fresh = (counts == context_lens) & (counts > SPLIT_TOKENS)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], fresh, [False]]).astype(np.int8)))
        runs = [
            Run(
                slice(int(query_starts[first]), int(query_starts[end])),
                query_starts[first : end + 1] - query_starts[first],
                int(counts[first:end].max()),
                slice(first, end),
            )
            for first, end in edges.reshape(-1, 2).tolist()
        ]
        largest = sorted(runs, key=lambda run: run.starts[-1], reverse=True)[:MOST_RUNS]
        return sorted(largest, key=lambda run: run.tokens.start)

    @staticmethod
    def most_starts(rows: int) -> int:
        """Numbers in `starts` of all runs of a step of so many rows, at most."""
        return rows + MOST_RUNS


Prompts = tuple[tuple[Run, torch.Tensor], ...]
"""of a step: runs, and their `starts` on the device"""


def rows_of(runs: Sequence[Run], rows: int) -> np.ndarray:
    """[R] bool: the row is in a run."""
    found = np.zeros(rows, bool)
    for run in runs:
        found[run.rows] = True
    return found


def starts_of(runs: Sequence[Run]) -> np.ndarray:
    """Of all runs, one behind the other."""
    return np.concatenate([np.zeros(0, np.int32), *(run.starts for run in runs)])


def beside_starts(runs: Sequence[Run], starts: torch.Tensor) -> Prompts:
    """`starts`: what `starts_of` has made, on the device, and more."""
    sizes = [len(run.starts) for run in runs]
    return tuple(zip(runs, starts[: sum(sizes)].split(sizes), strict=True)) if runs else ()


def attend_prompts(
    out: torch.Tensor,
    varlen: Varlen,
    prompts: Prompts,
    query: torch.Tensor,
    keys_and_values: Callable[[slice], Sequence[torch.Tensor]],
    scaling: float,
    window: int,
) -> None:
    """Write the outputs of all runs into out [P, q_heads, head_dim]. keys_and_values: of some tokens of the step."""
    for run, starts in prompts:
        key, value = keys_and_values(run.tokens)
        out[run.tokens] = varlen.attend(query[run.tokens], key, value, starts, run.longest, scaling, window)


def stored(kv: PagedKV, layer: int, slots: torch.Tensor) -> Sequence[torch.Tensor]:
    """Read K and V of tokens from the pool, [T, kv_heads, head_dim] each; slots [T] int32 as in `Batch`."""
    at = slots.long()
    return kv.data[:, layer][at // kv.block_size, :, :, at % kv.block_size].unbind(1)


def open_varlen(device: torch.device, capacity: StepCapacity) -> Varlen:
    """Take torch's `varlen_attn`, after a try in the shapes of a model in bf16. Raises VarlenUnavailable."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise VarlenUnavailable(f"torch {torch.__version__} has no varlen_attn: take 2.11 or later") from error
    if why := refusal(capacity, 10 * major + minor, varlen_attn):
        raise VarlenUnavailable(why)
    attend = by_torch(varlen_attn)
    try_attend(attend, capacity, device, torch.bfloat16)
    return Varlen(attend)


def by_torch(varlen_attn: Callable[..., Any]) -> Attend:
    grouped = {GROUPS: True} if GROUPS in inspect.signature(varlen_attn).parameters else {}

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, scaling: float, window: int
    ) -> torch.Tensor:
        seen = (window - 1 if window else -1, 0)  # tokens to the left and to the right of a query
        made = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=seen, **grouped)
        return cast(torch.Tensor, made)

    return attend


def refusal(capacity: StepCapacity, capability: int, varlen_attn: Any) -> str:
    """Say why `varlen_attn` does not serve heads and steps of these shapes on a device; empty where it does."""
    if missing := [name for name in WANTED if name not in inspect.signature(varlen_attn).parameters]:
        return f"varlen_attn of torch {torch.__version__} has no {', '.join(missing)}: take 2.11 or later"
    if capacity.tokens <= MOST_TOKENS:
        return f"no step has more than {MOST_TOKENS} tokens, so that it would never be used: give max_batch_tokens=8192"
    if capability < LEAST_CAPABILITY:
        return f"flash attention needs compute capability {LEAST_CAPABILITY / 10}, and this device has {capability / 10}"
    if capacity.itemsize != 2:
        return 'flash attention takes numbers of 2 bytes: dtype="bfloat16"'
    if capacity.head_dim > WIDEST_HEAD or capacity.head_dim % HEAD_UNIT:
        return f"flash attention takes heads of a multiple of {HEAD_UNIT} up to {WIDEST_HEAD} numbers, not {capacity.head_dim}"
    return ""


def try_attend(attend: Attend, capacity: StepCapacity, device: torch.device, dtype: torch.dtype) -> None:
    """Attend within two short prompts, with a window and without, and compare with fp32. Raises VarlenUnavailable."""
    generator = torch.Generator().manual_seed(0)
    heads = capacity.q_heads, capacity.kv_heads, capacity.kv_heads
    q, k, v = (torch.randn(sum(TRIED), n, capacity.head_dim, generator=generator).to(device, dtype) for n in heads)
    starts = torch.tensor(np.cumsum([0, *TRIED]), dtype=torch.int32, device=device)
    for window in (0, 5):
        try:
            made = attend(q, k, v, starts, max(TRIED), capacity.head_dim**-0.5, window)
        except Exception as error:
            raise VarlenUnavailable(f"varlen_attn fails with the model's heads: {' '.join(str(error).split())}") from error
        each = zip(*(x.float().split(TRIED) for x in (q, k, v)), strict=True)
        want = torch.cat([plain(its_q, its_k, its_v, window) for its_q, its_k, its_v in each])
        apart = float((made.float() - want).abs().max() / want.abs().max())
        if not apart <= APART:
            raise VarlenUnavailable(f"varlen_attn differs from attention in fp32 by {apart:.1e} of its largest number")


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Attention within one prompt, scaled by the root of head_dim, in the tensors' own precision; shapes as in `Attend`."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    at = torch.arange(len(q), device=q.device)
    seen = (at[None] <= at[:, None]) & ((at[None] > at[:, None] - window) if window else True)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
