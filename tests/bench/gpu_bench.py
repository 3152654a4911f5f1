"""Shared by the parts of `tests.bench.gpu`: model shapes, sizes, the device's rates, and the limits that follow from them."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from rollout.bench.inputs import RandomText, lognormal
from rollout.bench.workloads import Workload, find
from rollout.engine.config import AdvancedConfig, EngineConfig, KVName
from rollout.engine.engine import Engine
from rollout.engine.forward.model import Model
from rollout.engine.forward.random_weights import draw
from rollout.engine.forward.shapes import configuration, write_configuration
from tests.bench.by_hand import median_ms, release
from tests.bench.sharing import FANOUT, LONG_PREFIX, MANY_LONG, PrefixShape

Rows = Iterator[dict[str, Any]]
FUSED = AdvancedConfig(fused_layers=True)

SETTLE = 8
"""first decode steps, which do not count"""


class GpuBenchSizes(NamedTuple):
    """Sizes of each part."""

    rows: int = 256
    """sequences of a decode step"""
    contexts: tuple[int, ...] = (640, 2048)
    mixed: tuple[int, int] = (1000, 8192)
    """median and maximum of lognormal contexts"""
    prompt: int = 512
    steps: int = 64
    turns: int = 9
    batch_tokens: int = 8192
    shapes: tuple[PrefixShape, ...] = (MANY_LONG, FANOUT, LONG_PREFIX, PrefixShape(16, 16, 8192, 2048, mixed=True))
    workloads: tuple[Workload, ...] = (find("multi_return_seq"), find("rollouts_2048"))
    workload_rows: int = 512
    pressure: Workload = Workload(name="half_pool", prompts=8, prompt_tokens=512, n=16, new_tokens=384, kv_share=0.5)
    refreshes: int = 2
    naps: int = 20
    prefill: tuple[int, int] = (8, 1024)
    """rows and tokens per row of a prefill with layers in host memory"""
    prompts: tuple[tuple[int, int], ...] = ((1, 2048), (8, 2048), (1, 16_384))
    """rows and tokens per row of a prefill with all layers on the device"""
    mixed_prompts: int = 12
    """rows of a prefill of lognormal lengths"""
    probe_bytes: int = 4 << 30
    """size of the buffers that measure memory and copies"""


QUICK = GpuBenchSizes(
    rows=16, contexts=(64, 96), mixed=(40, 96), prompt=32, steps=6, turns=2, batch_tokens=128,
    shapes=(PrefixShape(2, 4, 64, 32), PrefixShape(2, 4, 64, 32, mixed=True)),
    workloads=(Workload(name="multi_return_seq", prompts=3, prompt_tokens=32, n=4, new_tokens=16),),
    workload_rows=16, pressure=Workload(name="half_pool", prompts=2, prompt_tokens=64, n=8, new_tokens=96, kv_share=0.5),
    refreshes=1, naps=2, prefill=(2, 64), prompts=((2, 64), (1, 90)), mixed_prompts=3, probe_bytes=1 << 20,
)  # fmt: skip


class Args(msgspec.Struct, kw_only=True):
    """Measure decode, prefill, prefix sharing, KV and weight offload, refreshes and workloads of one model."""

    model: str = "qwen3-0.6b"
    """shape of `rollout.engine.forward.shapes`, without the prefix; the weights are random"""
    device: str = "cuda"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    kv_dtype: KVName = "auto"
    """dtype of the KV, as in `rollout serve`"""
    attention: Literal["auto", "reference", "native", "triton"] | None = None
    """default: triton on CUDA, without fallback; auto on the CPU"""
    parts: str = ""
    """comma-separated parts; empty = all"""
    json: str | None = None
    """write one JSON object per line to this file; - = standard output"""
    quick: bool = False
    """small sizes, to try the benchmark; the figures mean nothing"""
    minutes: float = 8.0
    """start no part later than this"""
    against: str = "transformers_cb"
    """engine to compare with, NAME or NAME=PYTHON as for `rollout bench`; empty = none"""


class Bench:
    """One model, created on first use, the device's rates, and the time left."""

    def __init__(self, args: Args) -> None:
        self.name = args.model
        self.device = torch.device(args.device)
        self.dtype, self.kv_dtype = args.dtype, args.kv_dtype
        self.attention = args.attention or ("auto" if self.device.type == "cpu" else "triton")
        self.sizes = QUICK if args.quick else GpuBenchSizes()
        self.against = args.against
        self.config = configuration(args.model)
        self.text = RandomText(self.config.vocab_size)
        self.rates = rates(self.device, self.sizes.probe_bytes, getattr(torch, args.dtype))
        release(self.device)
        self._ends = time.perf_counter() + 60 * args.minutes
        self._module: Any = None

    @property
    def seconds_left(self) -> float:
        return self._ends - time.perf_counter()

    @property
    def module(self) -> Any:
        """Return the model with random weights; created on the device on first use."""
        if self._module is None:
            self._module = draw(self.config, getattr(torch, self.dtype)).to(self.device)
        return self._module

    def forget_module(self) -> None:
        """Drop the module. The next part creates a new one."""
        self._module = None
        release(self.device)

    def mixed(self, rows: int, seed: int = 0) -> np.ndarray:
        """Return lognormal contexts, as rollouts have: [rows] int32."""
        return lognormal(rows, *self.sizes.mixed, seed)

    @property
    def mixture(self) -> str:
        median, longest = self.sizes.mixed
        return f"lognormal, median {median}, at most {longest}"

    @property
    def read_bytes(self) -> int:
        """Return the bytes of weights that a decode step reads: all but an embedding that is not the output layer."""
        total: int = sum(parameter.nbytes for parameter in self.module.parameters())
        tied = self.config.tie_word_embeddings
        return total - (0 if tied else int(self.module.get_input_embeddings().weight.nbytes))

    def settings(self, **config: Any) -> EngineConfig:
        shared = {"cpu_offload_gib": 0, "advanced": FUSED, "kv_dtype": self.kv_dtype}
        options = {**shared, "max_num_seqs": self.sizes.rows, **config}
        options["max_batch_tokens"] = max(options.get("max_batch_tokens", self.sizes.batch_tokens), options["max_num_seqs"])
        return EngineConfig(model=self.name, dtype=self.dtype, device=str(self.device), attention=self.attention, **options)

    @property
    def block(self) -> int:
        """Return the tokens of a KV block."""
        return self.settings().block_tokens

    def tokens_in_blocks(self, mixtures: Iterable[np.ndarray]) -> int:
        """Return the size of a KV pool for the contexts of any of these mixtures."""
        return max(int((-(-contexts // self.block)).sum()) for contexts in mixtures) * self.block

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of this many tokens in a pool."""
        return tokens * self.model().geometry.kept_as(self.kv_dtype).bytes_per_token

    def model(self) -> Model:
        return Model(self.module, self.name)

    def engine(self, **config: Any) -> Engine:
        return Engine(self.settings(**config), self.model())

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """Write the model's configuration, without weights, to a temporary folder for another process."""
        folder = tempfile.TemporaryDirectory(prefix="rollout-bench-")
        write_configuration(self.config, Path(folder.name))
        return folder


def rates(device: torch.device, size: int, dtype: torch.dtype) -> dict[str, float]:
    """Measure the device: operations/s of a large product in `dtype`; bytes/s of its memory, by a copy or a sum, whichever is
    faster; bytes/s of copies from pinned host memory to the device, and back."""
    on_device, other = (torch.zeros(size // 4, device=device) for _ in range(2))
    on_host = torch.zeros(size // 4, pin_memory=device.type == "cuda")
    side = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def rate(work: Callable[[], object], moved: int) -> float:
        return 1e3 * moved / median_ms(device, work, 7)

    return {
        "bytes_per_second": max(
            rate(lambda: other.copy_(on_device), 2 * on_device.nbytes), rate(on_device.sum, on_device.nbytes)
        ),
        "flops_per_second": rate(lambda: torch.mm(left, right), 2 * side**3),
        "to_device_per_second": rate(lambda: on_device.copy_(on_host, non_blocking=True), on_host.nbytes),
        "to_host_per_second": rate(lambda: on_host.copy_(on_device, non_blocking=True), on_host.nbytes),
    }


def kept(rows: Rows) -> Rows:
    """Yield the rows. An exception becomes a row with `error`."""
    try:
        yield from rows
    except Exception as error:
        traceback.print_exc()
        yield {"error": f"{type(error).__name__}: {error}"}


class ForwardCost(NamedTuple):
    """Work of one forward."""

    tokens: int
    """computed tokens"""
    logits: int
    """rows of logits"""
    read: float
    """tokens of KV that attention reads or writes, each counted once"""
    met: float
    """pairs of a query and a token that it attends to"""

    @staticmethod
    def of(counts: np.ndarray, contexts: np.ndarray) -> ForwardCost:
        """Count the work of rows that compute the last counts [R] of their contexts [R] tokens, need the logits of the last
        one, and share no blocks."""
        counts, contexts = counts.astype(np.int64), contexts.astype(np.int64)
        met = counts * (contexts - counts) + counts * (counts + 1) // 2
        return ForwardCost(int(counts.sum()), len(counts), int(contexts.sum()), int(met.sum()))


def beside_limit(bench: Bench, work: ForwardCost, ms: float) -> dict[str, Any]:
    """Return the figures of a forward that took `ms`: bytes, operations, and the least time that the device needs. For the
    layers' products, the output layer and attention each, that is the longer of moving the bytes and doing the operations."""
    geometry, q_heads = bench.model().geometry.kept_as(bench.kv_dtype), bench.config.num_attention_heads
    itemsize = getattr(torch, bench.dtype).itemsize
    head = int(bench.module.get_output_embeddings().weight.nbytes)
    layers = bench.read_bytes - head
    parts = (
        (layers, 2 * work.tokens * layers // itemsize),
        (head, 2 * work.logits * head // itemsize),
        (work.read * geometry.bytes_per_token, 4 * work.met * q_heads * sum(each.head_dim for each in geometry.shapes)),
    )
    rates = bench.rates["bytes_per_second"], bench.rates["flops_per_second"]
    limit = 1e3 * sum(max(moved / rates[0], flops / rates[1]) for moved, flops in parts)
    moved, flops = (sum(each) for each in zip(*parts, strict=True))
    return {"ms": ms, "read_bytes": moved, "flops": flops, "limit_ms": limit, "fraction_of_limit": limit / ms}
