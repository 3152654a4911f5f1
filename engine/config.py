"""EngineConfig: all options of an engine. Value types; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

IsaName = Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "plain", "torch"]
KVName = Literal["auto", "fp8_e4m3"]
WeightName = Literal["auto", "int8"]
TpLauncher = Literal["rollout", "torchrun"]


BLOCK_SIZES = {"cpu": 32, "cuda": 64}
"""default tokens of a KV block, by kind of device"""
BOUNDS: dict[str, tuple[float, float]] = {
    "threads": (1, 4096),
    "drafts": (0, 64),
    "block_size": (1, 65_536),
    "kv_tokens": (1, 2**40),
    "kv_gib": (0, 2**20),
    "max_num_seqs": (1, 65_536),
    "max_batch_tokens": (1, 1_048_576),
    "cpu_offload_gib": (0, 2**20),
    "foreground_s": (0, 86_400),
    "tp": (1, 8),
    "tp_timeout_s": (0.1, 86_400),
}
"""smallest and largest value of each number of an EngineConfig on any machine, so that an absurd number is rejected before
memory is allocated"""
ADVANCED_BOUNDS: dict[str, tuple[float, float]] = {
    "lookahead_blocks": (1, 65_536),
    "min_run_tokens": (0, 1_048_576),
    "mirror_blocks_per_step": (1, 65_536),
}
"""the same for AdvancedConfig"""


def _check_bounds(config: msgspec.Struct, bounds: dict[str, tuple[float, float]]) -> None:
    """Raises ValueError naming the field and its bounds."""
    for name, (least, most) in bounds.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{name}={value}: must be {least:,} to {most:,}")


class WeightOffload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keep some decoder layers in host memory and prefetch each before it runs. Samples are the same to the bit. Setting any of
    these fields turns weight offload on (docs/decisions/weight-offload.md)."""

    group_size: int = 4
    """number of consecutive decoder layers in a group"""
    num_in_group: int = 1
    """number of layers of each whole group that are offloaded: its last ones"""
    prefetch_step: int = 1
    """prefetch distance in offloaded layers, and the number of layer slots on the device. Below num_in_group, the layers of a
    group wait for their copies"""
    part: Literal["layer", "mlp"] = "layer"
    """what is offloaded of such a layer: all of it, or its MLP (experts included), whose copies then have the attention of the
    same layer too to hide behind"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and its bounds."""
        for name in ("group_size", "num_in_group", "prefetch_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1; leave weight_offload out to turn it off")
            if getattr(self, name) > 4096:
                raise ValueError(f"{name}={getattr(self, name)}: must be at most 4096, more layers than any model has")
        if self.num_in_group > self.group_size:
            raise ValueError(f"num_in_group={self.num_in_group}: must be at most group_size={self.group_size}")
        if self.part not in ("layer", "mlp"):
            raise ValueError(f"part={self.part!r}: must be layer or mlp")


class AdvancedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tuning, for measurements. The defaults are right for serving: change them only if `rollout bench` shows a gain. Samples
    are the same for every value, except with fused_layers and library_products."""

    lookahead_blocks: int = 4
    """blocks of KV to free for each sequence that keeps running, when sequences are preempted (docs/decisions/pressure.md)"""
    min_run_tokens: int = 64
    """tokens that a restored sequence generates before it may be preempted again, unless nothing else can free KV blocks"""
    mirror_ahead: bool = False
    """on CUDA, copy full KV blocks to host memory while the device computes, before the pool runs out, so that preempting a
    sequence copies only its partial blocks. Not measured there yet. ValueError on the CPU, where it costs more than it saves"""
    mirror_blocks_per_step: int = 16
    """most KV blocks that mirror_ahead copies per step"""
    copy_ahead: bool | None = None
    """on CUDA, restore KV blocks one step before they are read, and free blocks one step before they are written, so that the
    copies overlap with compute. Default: on. ValueError on the CPU, where copies and compute cannot overlap"""
    cpu_offload_safety_threshold: float = 0.8
    """largest fraction of the free host memory that cpu_offload_gib may take"""
    share_prefix: bool = True
    """attention reads a prompt prefix once for all rows that share it, instead of once per row. Samples are the same"""
    fused_layers: bool | None = None
    """on CUDA, run the decoder layers of Llama-like models with about 10 kernel launches each instead of 50, and the RMSNorms
    of other models with 2 instead of 8. Norms are then summed in another order than torch's, so log-probs differ from those of
    a trainer's forward in the last bits, as they do by cuBLAS's products; with exact, `use_exact` gives a trainer the same
    kernels. Default: on, unless routed_experts is"""

    library_products: bool = True
    """with exact on CUDA, multiply by cuBLASLt if a check at load finds that its rows do not depend on their number, for every
    shape of the model; the name of the arithmetic then begins with exact_lt. Off: by our own kernel, which takes longer"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and its bounds."""
        _check_bounds(self, ADVANCED_BOUNDS)
        if not 0 < self.cpu_offload_safety_threshold <= 1:
            raise ValueError(f"cpu_offload_safety_threshold={self.cpu_offload_safety_threshold}: must be in (0, 1]")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model, device, memory and batch sizes of an engine. `Engine.status()` reports the values chosen for defaults."""

    model: str = "smollm2"
    """folder of a transformers model; `rollout serve` also accepts a Hugging Face Hub id or the word smollm2"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the weights, and of KV if kv_dtype is auto"""
    weight_dtype: WeightName = "auto"
    """weights that the products of nn.Linear read, the LM head's included. auto: those in dtype. int8: codes of eight bits, 64
    inputs to a scale, made from the weights at start and at each refresh, so that decode reads half the bytes; both together
    take 1.5 times the memory. `use_exact` gives a trainer the same numbers. On the CPU only (docs/decisions/int8.md)"""
    kv_dtype: KVName = "auto"
    """dtype of KV. auto: same as dtype. fp8_e4m3: one byte per number and one scale per token and head, so the pools hold
    nearly twice the tokens; log-probs then differ from those of a trainer's forward by what `rollout bench fidelity` prints,
    and on the CPU attention uses the slow torch reference (docs/decisions/fp8.md)"""
    latent_kv: bool = False
    """store one latent per token and layer of latent attention (DeepSeek-V2 and its kin), instead of K and V of every head:
    several times less KV. Log-probs then differ from those of transformers' forward by rounding; `use_exact` gives a trainer
    the same numbers. On the CPU only (docs/decisions/latent-kv.md)"""
    device: str = "cpu"
    """cpu, cuda or cuda:N"""
    seed: int = 0
    """seed from which groups without a seed get theirs"""
    threads: int | None = None
    """CPU threads of torch and of the CPU kernels. Default: torch's choice"""
    isa: IsaName = "auto"
    """instruction set of the CPU kernels. auto: the best one that this CPU supports and for which a library is installed or can
    be compiled. torch: no kernels (docs/decisions/arithmetic.md). `rollout status` shows the choice and its reason"""
    attention: Literal["auto", "reference", "native", "triton"] = "auto"
    """attention kernel. auto: triton on CUDA; native on the CPU, or the slow torch reference if native is not available"""
    cuda_graphs: bool = True
    """on CUDA, capture the forward of steps of at most 2,048 tokens once per size and replay it"""
    warm_up: bool = True
    """on CUDA, run one step of every size at start, which compiles the kernels, captures the graphs and fails early if memory
    is too small. Off: the first steps do this"""
    overlap_steps: bool | None = None
    """plan and launch a step while the previous one runs. Samples are the same. Default: on for CUDA, off for the CPU, where
    both would use the same cores (docs/decisions/overlap.md)"""
    drafts: int | None = None
    """most draft tokens per sequence and step. The engine proposes them from sibling samples if few sequences run and drafting
    pays off; steps with drafts do not overlap. Samples are the same. 0: off. Default: 6; on the CPU with overlap_steps, 0
    (docs/decisions/drafts.md)"""

    block_size: int | None = None
    """tokens per KV block. Default: 32; on CUDA 64, so that the keys that attention reads at a time are in one block"""
    kv_gib: float | None = None
    """size of the KV pool on the device in GiB, recurrent states included, allocated at start; or set kv_tokens. Default: a
    quarter of the free memory, used as needed; on CUDA 80 %, allocated at start"""
    kv_tokens: int | None = None
    """size of the KV pool on the device in tokens, rounded up to whole blocks; recurrent states of max_num_seqs sequences
    come on top"""
    max_num_seqs: int | None = None
    """most running sequences. Default: 256, or 1,024 on a CUDA device with 64 GiB or more"""
    max_batch_tokens: int | None = None
    """most tokens per forward; longer prompts are prefilled in chunks. Default: 1,024; on CUDA 2,048, with 64 GiB or more
    8,192; at least max_num_seqs"""
    prefix_cache: bool = True
    """keep full KV blocks of finished samples while there is room, and reuse them for prompts with the same prefix. Off: reuse
    only blocks of unfinished samples"""

    tp: int = 1
    """ranks that run one replica together, each with its part of every layer: 1, 2, 4 or 8. Each is a process of this host, and
    kv_gib, cpu_offload_gib and threads are those of one rank. On CUDA each has a device of its own (docs/devices.md)"""
    tree_sums: bool | None = None
    """sum the products that tensor parallelism cuts in a tree over eight slices of their inputs, so that samples are the same,
    to the bit, for each tp. Set it with tp = 1 to get the samples of an engine with tp > 1. Default: on if tp > 1, but on CUDA
    only with exact"""
    tp_launcher: TpLauncher = "rollout"
    """what starts the ranks: "rollout" = rank 0 does, on its host; "torchrun" = something that sets RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, on one host or several (docs/devices.md)"""
    tp_timeout_s: float = 60.0
    """end the replica if a rank waits so long for another one"""
    exact: bool = False
    """on CUDA, use products (of experts too) and norms whose results do not depend on the batch, so that a seeded sample does
    not either. It takes about 2 % of the steps of Qwen3-8B on an H200. The CPU path always has this property"""
    routed_experts: bool = False
    """keep which experts each cached token chose, so that `Sampling.routed_experts` can return them. Takes layers with experts
    × experts per token bytes a token beside its KV. ValueError at start for a model that is no mixture (docs/mixtures.md)"""
    cpu_offload_gib: float | None = None
    """host memory for offloaded KV in GiB, allocated at start. 0: off. Default: 80 % of the free memory, used as needed; on
    CUDA, where it is pinned, a quarter of the free memory, but at most 16 GiB and at most the size of the pool on the device.
    More can be set there: what exceeds 16 GiB is pinned while steps run. ValueError at start if it exceeds the free memory
    times advanced.cpu_offload_safety_threshold"""
    foreground_s: float = 2.0
    """most seconds for which a client that was idle has priority over clients that keep the engine busy. 0: all clients share
    evenly (docs/decisions/fairness.md)"""
    weight_offload: WeightOffload | None = None
    """keep some decoder layers in host memory. Default: all layers stay on the device"""
    advanced: AdvancedConfig = AdvancedConfig()
    """tuning, for measurements"""

    @property
    def sums_in_tree(self) -> bool:
        """`tree_sums`, or its default."""
        return self.tp > 1 if self.tree_sums is None else self.tree_sums

    @property
    def block_tokens(self) -> int:
        """`block_size`, or its default on the kind of `device`."""
        return BLOCK_SIZES[self.device.partition(":")[0]] if self.block_size is None else self.block_size

    @property
    def most_seqs(self) -> int:
        """`max_num_seqs`, or the CPU's default if the device has not chosen yet (`rollout.engine.build.resolved`)."""
        return 256 if self.max_num_seqs is None else self.max_num_seqs

    @property
    def most_tokens(self) -> int:
        """`max_batch_tokens`, or the CPU's default if the device has not chosen yet."""
        return max(1024, self.most_seqs) if self.max_batch_tokens is None else self.max_batch_tokens

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and its bounds."""

        def need(ok: bool, message: str) -> None:
            if not ok:
                raise ValueError(message)

        need(bool(re.fullmatch(r"cpu|cuda(:\d+)?", self.device)), f"device={self.device!r}: must be cpu, cuda or cuda:N")
        need(0 <= self.seed < 2**63, f"seed={self.seed}: must be 0 to 2**63 - 1")
        _check_bounds(self, BOUNDS)
        need(
            self.kv_gib is None or self.kv_tokens is None,
            f"kv_gib={self.kv_gib} and kv_tokens={self.kv_tokens}: set one of them, not both",
        )
        need(self.kv_gib is None or self.kv_gib > 0, f"kv_gib={self.kv_gib}: must be positive")
        need(
            self.most_tokens >= self.most_seqs,
            f"max_batch_tokens={self.most_tokens}: must be at least max_num_seqs={self.most_seqs}, "
            "so that all running sequences fit into one step",
        )
        need(self.tp in (1, 2, 4, 8), f"tp={self.tp}: must be 1, 2, 4 or 8, so that each rank has as many of the eight slices")
        launchers = get_args(TpLauncher)
        need(self.tp_launcher in launchers, f"tp_launcher={self.tp_launcher!r}: must be one of {', '.join(launchers)}")
        need(
            self.tp > 1 or self.tp_launcher == "rollout",
            f"tp_launcher={self.tp_launcher!r} with tp=1: there is one rank; set tp, or leave tp_launcher out",
        )
        need(
            self.tp == 1 or self.sums_in_tree,
            f"tree_sums=False with tp={self.tp}: the sums of ranks are a tree; leave tree_sums out",
        )
        need(self.kv_dtype in get_args(KVName), f"kv_dtype={self.kv_dtype!r}: must be one of {', '.join(get_args(KVName))}")
        need(
            self.weight_dtype in get_args(WeightName),
            f"weight_dtype={self.weight_dtype!r}: must be one of {', '.join(get_args(WeightName))}",
        )
        if self.weight_dtype == "int8":
            self._check_int8(need)

    def _check_int8(self, need: Callable[[bool, str], None]) -> None:
        """Check what products in eight bits do not support."""
        asked = f"weight_dtype={self.weight_dtype!r}"
        need(self.isa != "torch", f"{asked} with isa='torch': it needs kernels; leave one of them out")
        need(not self.sums_in_tree, f"{asked} with tree_sums or tp: sums over slices are not made in eight bits; leave one out")
        need(not self.latent_kv, f"{asked} with latent_kv: that one reads kv_b_proj as a matrix; leave one of them out")
