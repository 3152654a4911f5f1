"""EngineConfig: everything an engine can be told. Value type, no torch."""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

IsaName = Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "plain", "torch"]
KVName = Literal["auto", "fp8_e4m3"]


BOUNDS = {
    "threads": (1, 4096),
    "drafts": (0, 64),
    "block_size": (1, 65_536),
    "kv_tokens": (1, 2**40),
    "kv_gib": (0, 2**20),
    "max_num_seqs": (1, 65_536),
    "max_batch_tokens": (1, 1_048_576),
    "cpu_offload_gib": (0, 2**20),
    "lookahead_blocks": (1, 65_536),
    "min_run_tokens": (0, 1_048_576),
    "foreground_s": (0, 86_400),
    "mirror_blocks_per_step": (1, 65_536),
}
"""what numbers of an EngineConfig may be, whatever the machine: so that none is found too large by whoever allocates"""


class WeightOffload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keep some decoder layers in host memory and copy each to the device ahead of its turn; the numbers are the same. Any of
    these turns it on (docs/decisions/weight-offload.md)."""

    group_size: int = 4
    """the decoder layers are cut into groups of so many"""
    num_in_group: int = 1
    """of each whole group the last so many are offloaded"""
    prefetch_step: int = 1
    """a layer is copied so many offloaded layers ahead, into as many slots on the device; with fewer than num_in_group, the
    layers of a group wait for their copies"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""
        for name in ("group_size", "num_in_group", "prefetch_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1; leave weight_offload out to turn it off")
            if getattr(self, name) > 4096:
                raise ValueError(f"{name}={getattr(self, name)}: must be at most 4096, more layers than any model has")
        if self.num_in_group > self.group_size:
            raise ValueError(f"num_in_group={self.num_in_group}: must be at most group_size={self.group_size}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run and in how much memory. `Engine.status()` reports what was chosen where nothing was said."""

    model: str = "smollm2"
    """folder of a transformers model (`rollout.models` resolves hub ids and the word smollm2 to one)"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """of weights, and of KV unless kv_dtype says otherwise"""
    kv_dtype: KVName = "auto"
    """of KV: auto = that of the weights; fp8_e4m3 = one byte a number and a scale for each token and head, so the pools hold
    nearly twice the tokens in as many bytes. Log-probs are then some way off those of a trainer's forward, as far as
    `rollout bench fidelity` prints; on the CPU attention is the torch reference, which is slow (docs/decisions/fp8.md)"""
    device: str = "cpu"
    seed: int = 0
    """groups without a seed of their own draw theirs from this one"""
    threads: int | None = None
    """CPU threads of torch and of the attention kernel; None = torch's choice"""
    isa: IsaName = "auto"
    """instruction set of the CPU kernels; auto = the best that this CPU has and a library can be had for, torch = none of them
    (docs/decisions/arithmetic.md). `rollout status` says which one runs, and why not a better one"""
    attention: Literal["auto", "reference", "native", "triton"] = "auto"
    """auto = the native kernel on the CPU, Triton's on CUDA; the torch reference where they cannot be had"""
    cuda_graphs: bool = True
    """on CUDA, capture the forward of a step of at most 2,048 tokens once for each size and replay it"""
    warm_up: bool = True
    """on CUDA, run a step of every size before the first group is taken: compile what is compiled on first use, capture decode,
    and refuse what does not fit into the memory; off: the first steps do that"""
    overlap_steps: bool | None = None
    """plan and launch a step while the last one runs, whose tokens are read one step late; the samples are the same. None = on
    CUDA: on the CPU both would run on the same cores (docs/decisions/overlap.md)"""
    drafts: int | None = None
    """most tokens that are drafted for a child in one step, from what its group has said, where few rows run and that pays; the
    samples are the same. 0 = off; None = 6, and 0 where steps overlap, which drafts put an end to (docs/decisions/drafts.md)"""
    share_prefix: bool = True
    """attention reads a prefix that rows share once for all of them; the numbers are the same either way"""

    block_size: int = 32
    """tokens of KV in one block"""
    kv_gib: float | None = None
    """KV pool on the device in GiB, taken at start; or give kv_tokens; neither = a quarter of the free memory, as used, and on
    CUDA 80 %"""
    kv_tokens: int | None = None
    """KV pool on the device in tokens, rounded up to blocks"""
    max_num_seqs: int | None = None
    """sequences that run at the same time; None = 256, and 1,024 on a CUDA device of 64 GiB or more"""
    max_batch_tokens: int | None = None
    """tokens of one forward; longer prompts are prefilled in chunks. None = 1,024, on CUDA 2,048, on a device of 64 GiB or more
    8,192; or as many as max_num_seqs"""
    prefix_cache: bool = True
    """keep full blocks of ended samples while there is room, and find them again by their tokens; off: only those of samples
    that are not finished are found"""

    fused_layers: bool = False
    """on CUDA: decoder layers of Llama's kind run in some ten launches each instead of fifty, RMSNorms of other models in two
    instead of eight. Norms are summed in another order than torch's, so log-probs are not those of a trainer's forward to the
    bit; off: the trainer's own operators run"""
    exact: bool = False
    """on CUDA: products and norms whose numbers do not depend on the batch, so that a seeded sample does not either. What that
    costs against cuBLAS was not measured yet. On the CPU it holds anyway"""
    cpu_offload_gib: float | None = None
    """host memory for offloaded KV in GiB, taken at start; 0 = off; None = the safety threshold of what is free, as used; on
    CUDA, where it is pinned, a quarter of what is free, at most 16 GiB and as much as the pool on the device. ValueError at
    start if more than the threshold is asked for"""
    cpu_offload_safety_threshold: float = 0.8
    """largest share of the free host memory that cpu_offload_gib may take"""
    lookahead_blocks: int = 4
    """under pressure, room is made for this many more blocks of each sequence that stays"""
    min_run_tokens: int = 64
    """a restored sequence makes this many tokens before it may be preempted again, unless nothing else can make room"""
    foreground_s: float = 2.0
    """a client that was idle is computed before those that keep the engine busy, for so many seconds at most until it is idle
    again; 0 = all that have work share alike (docs/decisions/fairness.md)"""
    mirror_ahead: bool | None = None
    """on CUDA, copy full blocks to host memory before the pool runs out, beside the compute, so that preempting copies only
    partial blocks; None = yes. On the CPU it takes more than it saves and cannot be had (docs/decisions/pressure.md)"""
    copy_ahead: bool | None = None
    """on CUDA, blocks go back to the device a step before it reads them, and room is made a step before it is written, so that
    these copies run beside the compute too; None = yes. On the CPU nothing runs beside it, so it cannot be had"""
    mirror_blocks_per_step: int = 16
    """most blocks that mirror_ahead copies in one step"""
    weight_offload: WeightOffload | None = None
    """decoder layers in host memory; None = all stay on the device"""

    @property
    def most_seqs(self) -> int:
        """`max_num_seqs`; None was left to the device (`engine.devices.resolved`)."""
        return 256 if self.max_num_seqs is None else self.max_num_seqs

    @property
    def most_tokens(self) -> int:
        """`max_batch_tokens`, likewise."""
        return max(1024, self.most_seqs) if self.max_batch_tokens is None else self.max_batch_tokens

    @property
    def mirrors(self) -> bool:
        """Whether full blocks are copied ahead of need; None was left to the device (`engine.devices.resolved`)."""
        return bool(self.mirror_ahead)

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""

        def need(ok: bool, message: str) -> None:
            if not ok:
                raise ValueError(message)

        need(bool(re.fullmatch(r"cpu|cuda(:\d+)?", self.device)), f"device={self.device!r}: must be cpu, cuda or cuda:N")
        need(0 <= self.seed < 2**63, f"seed={self.seed}: must be 0 to 2**63 - 1")
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            need(value is None or least <= value <= most, f"{name}={value}: must be {least:,} to {most:,}")
        need(self.kv_gib is None or self.kv_tokens is None, "give kv_gib or kv_tokens, not both")
        need(self.kv_gib is None or self.kv_gib > 0, f"kv_gib={self.kv_gib}: must be positive")
        need(
            self.most_tokens >= self.most_seqs,
            f"max_batch_tokens={self.most_tokens}: must be at least max_num_seqs={self.most_seqs}, "
            "or running sequences could not all take a step",
        )
        need(
            0 < self.cpu_offload_safety_threshold <= 1,
            f"cpu_offload_safety_threshold={self.cpu_offload_safety_threshold}: must be in (0, 1]",
        )
        need(self.kv_dtype in get_args(KVName), f"kv_dtype={self.kv_dtype!r}: must be one of {', '.join(get_args(KVName))}")
