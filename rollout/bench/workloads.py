"""The workloads by name. One is a row of this table; nothing else knows a name.

`multi_return_seq`, `few_blocks` and `rollouts_*` have names and lengths from transformers' benchmark_v2, script
continuous_batching_overall.py. There, `few_blocks` is 20 single requests; here the pool holds one group, so it has groups.
"""

from __future__ import annotations

import msgspec
import numpy as np

from rollout.bench.inputs import lognormal
from rollout.config import InputError

ROOM = 1.1
ROOM_BLOCKS = 8
"""a roomy pool is by that factor and by so many blocks a child larger than the need: the warm-up's blocks are in nobody's way,
and the engine does not prepare for pressure by mirroring"""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`prompts` groups of `n` children; every child makes `new_tokens` tokens (end tokens are ignored)."""

    name: str
    prompts: int
    prompt_tokens: int
    n: int
    new_tokens: int
    kv_share: float | None = None
    """KV pool as a share of what all children need at their longest; None = roomy"""
    kv_groups: int | None = None
    """or as so many whole groups at their longest"""
    temperature: float = 1.0
    mixed: bool = False
    """prompts and new tokens have lognormal lengths, these at most; the children of a prompt are as long as each other"""

    @property
    def tight(self) -> bool:
        """Whether the KV pool is too small for all children at once; the workload is compared then with a roomy pool and with
        offload off."""
        return self.kv_share is not None or self.kv_groups is not None

    @property
    def tokens(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.prompt_tokens + self.new_tokens

    def scaled(self, factor: float, block_size: int, temperature: float = 1.0) -> Workload:
        """Scale prompt and new tokens by `factor`, but not below one block, unless the workload itself is; drawn at
        `temperature`."""

        def scale(tokens: int) -> int:
            return max(round(tokens * factor), min(tokens, block_size))

        sizes = {"prompt_tokens": scale(self.prompt_tokens), "new_tokens": scale(self.new_tokens)}
        return msgspec.structs.replace(self, temperature=temperature, **sizes)

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return [prompts] tokens of each prompt, and [prompts] new tokens of each of its children."""
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
        """Return the KV of all children at full length, in tokens of whole blocks: a prompt's full blocks once a group, the
        rest once a child."""
        prompt, new = self.lengths()
        shared, whole = prompt // block_size, -(-(prompt + new) // block_size)
        return int((shared + self.n * (whole - shared)).sum()) * block_size

    def kv_tokens(self, block_size: int) -> int:
        """Return the tokens of the KV pool to run the workload in."""
        needed = self.needed_kv_tokens(block_size)
        if self.kv_groups is not None:
            return min(self.kv_groups, self.prompts) * needed // self.prompts
        if self.kv_share is not None:
            return int(needed * self.kv_share)
        return int(needed * ROOM) + (64 + ROOM_BLOCKS * self.prompts * self.n) * block_size

    def roomy(self) -> Workload:
        """Return the same work with KV for all."""
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
