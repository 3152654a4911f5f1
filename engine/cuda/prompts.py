"""Attention of long prompts that a step computes from their first token on, by torch's cuDNN kernel: the option
`advanced.prompt_attention = "cudnn"`.

    tokens of a step   │ decode │ prompt │ prompt │ the rest of one │ prompt │
    tiles              └────────┘                 └─────────────────┘
    cuDNN                       └────────┴────────┴─ of one padded length: ──┘ one call

Their K and V are stored as those of all tokens. Another kernel has other bits: if the beginning of a prompt is cached, or a
prompt takes several steps, tiles compute the rest, with other log-probs up to rounding. Steps that a CUDA graph replays have no
such rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rollout.engine.cuda.graphs import MOST_TOKENS
from rollout.engine.forward.attention import StepCapacity

LEAST_TOKENS = 512
"""of a prompt: shorter ones keep their tiles"""
PADDED_TO = 256
"""tokens: cuDNN plans each shape when it first occurs, so lengths are padded; a query does not see what follows it"""
TRIED_TOKENS = 3 * LEAST_TOKENS // 2
APART = 2**-6
"""largest accepted difference from attention in fp32, relative to its largest number"""


class NotTaken(Exception):
    """Prompts keep their tiles; the message says why."""


class PromptsOfLength(NamedTuple):
    """N prompts of one padded length L in a step."""

    at: torch.Tensor
    """[N, L] int64 on the device: tokens of the step, padded by repetition"""
    real: torch.Tensor
    """[T] int64: which of N · L are no padding"""
    tokens: torch.Tensor
    """[T] int64: these tokens of the step"""


class PromptAttention:
    """Computes prompts by torch's `scaled_dot_product_attention` with one of its kernels.

    Args:
        name: added to the name of attention's arithmetic.
        least: tokens of a prompt.
        more_than: tokens of a step that no graph replays.
    """

    def __init__(self, kernel: SDPBackend, name: str, least: int = LEAST_TOKENS, more_than: int = MOST_TOKENS) -> None:
        self.kernel, self.name = kernel, name
        self.least, self.more_than = least, more_than

    def rows(self, query_starts: np.ndarray, context_lens: np.ndarray) -> np.ndarray | None:
        """Return [R] bool: the rows of a step that begin their sequence and are long enough; None: no row is."""
        counts = np.diff(query_starts)
        if query_starts[-1] <= self.more_than:
            return None
        found: np.ndarray = (counts == context_lens) & (counts >= self.least)
        return found if found.any() else None

    def groups(self, query_starts: np.ndarray, rows: np.ndarray | None, device: torch.device) -> tuple[PromptsOfLength, ...]:
        """Return the prompts of these rows by padded length."""
        if rows is None:
            return ()
        by_length: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row in np.flatnonzero(rows).tolist():
            begin, end = query_starts[row : row + 2].tolist()
            by_length[-(-(end - begin) // PADDED_TO) * PADDED_TO].append((begin, end))
        return tuple(_group(spans, length, device) for length, spans in by_length.items())

    def attend(
        self,
        out: torch.Tensor,
        groups: Sequence[PromptsOfLength],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> None:
        """Write the results of prompts into out [P, q_heads, width]. query [P, q_heads, dim], key [P, kv_heads, dim], value [P,
        kv_heads, width]."""
        for group in groups:
            q, k, v = (x[group.at].transpose(1, 2) for x in (query, key, value))
            with sdpa_kernel(self.kernel):
                made = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
            out[group.tokens] = made.transpose(1, 2).flatten(0, 1)[group.real]

    @torch.no_grad()
    def try_out(self, capacity: StepCapacity, dtype: torch.dtype, device: torch.device) -> None:
        """Compare two prompts with attention in fp32. Raises NotTaken if the kernel does not take such heads, or is wrong."""
        generator = torch.Generator(device).manual_seed(0)
        heads = capacity.q_heads, capacity.kv_heads, capacity.kv_heads
        widths = capacity.head_dim, capacity.head_dim, capacity.value_dim
        starts = np.array([0, TRIED_TOKENS, 2 * TRIED_TOKENS - 1])
        query, key, value = (
            torch.randn(int(starts[-1]), n, width, generator=generator, device=device, dtype=dtype)
            for n, width in zip(heads, widths, strict=True)
        )
        groups, scaling = self.groups(starts, np.array([True, True]), device), capacity.head_dim**-0.5
        made, want = (torch.empty_like(query[..., : widths[2]], dtype=each) for each in (dtype, torch.float32))
        try:
            self.attend(made, groups, query, key, value, scaling)
        except RuntimeError as error:
            raise NotTaken(f"torch's kernel does not take them: {str(error).partition(chr(10))[0]}") from error
        PromptAttention(SDPBackend.MATH, "").attend(want, groups, query.float(), key.float(), value.float(), scaling)
        apart = float((made.float() - want).abs().max() / want.abs().max())
        if not apart <= APART:
            raise NotTaken(f"results that differ from attention in fp32 by {apart:.1e}")


def _group(spans: list[tuple[int, int]], length: int, device: torch.device) -> PromptsOfLength:
    """Return a group of prompts, given the first and the end token of each."""
    offsets = np.arange(length)
    at = np.stack([np.minimum(begin + offsets, end - 1) for begin, end in spans])
    real = np.concatenate([i * length + np.arange(end - begin) for i, (begin, end) in enumerate(spans)])
    arrays = (torch.from_numpy(each).to(device) for each in (at, real, at.ravel()[real]))
    return PromptsOfLength(*arrays)


def cudnn_prompts() -> PromptAttention:
    """Return the attention of prompts by cuDNN. Raises NotTaken without it."""
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None:
        raise NotTaken("torch has no cuDNN here")
    return PromptAttention(SDPBackend.CUDNN_ATTENTION, f"cudnn{version}")
