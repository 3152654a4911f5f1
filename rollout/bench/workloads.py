"""The workloads, one row of a table each.

Names and lengths of `multi_return_seq`, `few_blocks` and `rollouts_*` come from continuous_batching_overall.py in transformers'
benchmark_v2. Its `few_blocks` has 20 single requests; this one has groups, and a KV pool for one of them.
"""

from __future__ import annotations

import msgspec
import numpy as np

from rollout.bench.inputs import lognormal
from rollout.config import InputError

ROOM = 1.1
ROOM_BLOCKS = 8
"""factor and blocks per child by which a large pool exceeds the need, so that the warm-up's blocks need no eviction and the
engine does not mirror"""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`prompts` groups of `n` children. Every child generates `new_tokens` tokens; stop tokens are ignored."""

    name: str
    prompts: int
    prompt_tokens: int
    n: int
    new_tokens: int
    kv_share: float | None = None
    """size of the KV pool, as a fraction of what all children need at full length; None = large enough"""
    kv_groups: int | None = None
    """size of the KV pool, in whole groups at full length"""
    temperature: float = 1.0
    mixed: bool = False
    """prompts and outputs have lognormal lengths, at most those above; all children of a prompt have the same length"""

    @property
    def tight(self) -> bool:
        """Whether the KV pool is too small for all children at once. Such a workload also runs with a large pool and without
        offload."""
        return self.kv_share is not None or self.kv_groups is not None

    @property
    def tokens(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.prompt_tokens + self.new_tokens

    def scaled(self, factor: float, block_size: int, temperature: float = 1.0) -> Workload:
        """Multiply prompt and new tokens by `factor`, down to one block at least, or to the original length if that is
        shorter."""

        def scale(tokens: int) -> int:
            return max(round(tokens * factor), min(tokens, block_size))

        sizes = {"prompt_tokens": scale(self.prompt_tokens), "new_tokens": scale(self.new_tokens)}
        return msgspec.structs.replace(self, temperature=temperature, **sizes)

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of each prompt [prompts], and the new tokens of each prompt's children [prompts]."""
        most = self.prompt_tokens, self.new_tokens
        if not self.mixed:
            prompt, new = (np.full(self.prompts, each, np.int32) for each in most)
        else:
            prompt, new = (lognormal(self.prompts, max(1, each // 2), each, seed) for seed, each in enumerate(most))
        return prompt, new

    @property
    def total_new_tokens(self) -> int:
        """Return the new tokens of all children."""
        return self.n * int(self.lengths()[1].sum())

    def mixture(self) -> Workload:
        """Return the same workload with lognormal lengths."""
        return msgspec.structs.replace(self, name=f"{self.name}, mixed lengths", mixed=True)

    def needed_kv_tokens(self, block_size: int) -> int:
        """Return the KV tokens of all children at full length, in whole blocks: the full blocks of a prompt count once per
        group, the others once per child."""
        prompt, new = self.lengths()
        shared, whole = prompt // block_size, -(-(prompt + new) // block_size)
        return int((shared + self.n * (whole - shared)).sum()) * block_size

    def kv_tokens(self, block_size: int) -> int:
        """Return the size of the KV pool in tokens."""
        needed = self.needed_kv_tokens(block_size)
        if self.kv_groups is not None:
            return min(self.kv_groups, self.prompts) * needed // self.prompts
        if self.kv_share is not None:
            return int(needed * self.kv_share)
        return int(needed * ROOM) + (64 + ROOM_BLOCKS * self.prompts * self.n) * block_size

    def roomy(self) -> Workload:
        """Return the same workload with a KV pool for all children."""
        return msgspec.structs.replace(self, kv_share=None, kv_groups=None)


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(name="fanout", prompts=8, prompt_tokens=512, n=16, new_tokens=256),
        Workload(name="long", prompts=2, prompt_tokens=1024, n=32, new_tokens=1024),
        Workload(name="pressure", prompts=2, prompt_tokens=1024, n=32, new_tokens=1024, kv_share=1 / 3),
        Workload(name="shared_prefix", prompts=1, prompt_tokens=4096, n=32, new_tokens=128),
        Workload(name="fork_latency", prompts=1, prompt_tokens=2048, n=64, new_tokens=8),
        Workload(name="single_stream", prompts=1, prompt_tokens=64, n=1, new_tokens=256),
        Workload(name="multi_return_seq", prompts=50, prompt_tokens=256, n=8, new_tokens=256),
        Workload(name="few_blocks", prompts=2, prompt_tokens=256, n=128, new_tokens=256, kv_groups=1),
        *(
            Workload(name=f"rollouts_{tokens}", prompts=32, prompt_tokens=256, n=1, new_tokens=tokens)
            for tokens in (1024, 2048, 4096, 8192, 16384)
        ),
    )
}


def find(name: str) -> Workload:
    """Return the workload of this name. Raises InputError listing the names."""
    if name not in WORKLOADS:
        raise InputError(f"no workload {name!r}; there are: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
