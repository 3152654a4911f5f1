"""What the parts of `rollout.bench.gpu` share: models of known shapes, sizes, and the machine's rates."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
import transformers

from engine.config import AdvancedConfig, EngineConfig, KVName
from engine.engine import Engine
from engine.forward.model import Model
from rollout.bench.by_hand import median_ms, release
from rollout.bench.inputs import RandomText, lognormal
from rollout.bench.sharing import FANOUT, LONG_PREFIX, MANY_LONG, PrefixShape
from rollout.bench.workloads import Workload, find

Rows = Iterator[dict[str, Any]]
FUSED = AdvancedConfig(fused_layers=True)

COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **COMMON, "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **COMMON, "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "vocab_size": 199, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""shaped like Qwen3-8B and Qwen3-0.6B; and one for trying all of this out on a CPU"""


class GpuBenchSizes(NamedTuple):
    """How much each part does."""

    rows: int = 256
    """sequences of a decode step"""
    contexts: tuple[int, ...] = (640, 2048)
    mixed: tuple[int, int] = (1000, 8192)
    """median and largest of contexts of different lengths"""
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
    """rows and tokens of each in a forward that only prefills, with layers in host memory"""
    prompts: tuple[tuple[int, int], ...] = ((1, 2048), (8, 2048), (1, 16_384))
    """the same with all layers on the device"""
    mixed_prompts: int = 12
    """of `mixed` lengths, in another one"""
    probe_bytes: int = 4 << 30
    """of the buffers that memory and copies are measured with"""


QUICK = GpuBenchSizes(
    rows=16, contexts=(64, 96), mixed=(40, 96), prompt=32, steps=6, turns=2, batch_tokens=128,
    shapes=(PrefixShape(2, 4, 64, 32), PrefixShape(2, 4, 64, 32, mixed=True)),
    workloads=(Workload(name="multi_return_seq", prompts=3, prompt_tokens=32, n=4, new_tokens=16),),
    workload_rows=16, pressure=Workload(name="half_pool", prompts=2, prompt_tokens=64, n=8, new_tokens=96, kv_share=0.5),
    refreshes=1, naps=2, prefill=(2, 64), prompts=((2, 64), (1, 90)), mixed_prompts=3, probe_bytes=1 << 20,
)  # fmt: skip


class Args(msgspec.Struct, kw_only=True):
    """Measure decode, prefix sharing, workloads, KV and weight offload and refresh of one model."""

    model: str = "qwen3-0.6b"
    """qwen3-8b, qwen3-0.6b or tiny: shapes, with random weights"""
    device: str = "cuda"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    kv_dtype: KVName = "auto"
    """of every engine's KV"""
    attention: Literal["auto", "reference", "native", "triton"] | None = None
    """None: triton on CUDA, no other in its place; auto on the CPU"""
    parts: str = ""
    """comma-separated; empty = all"""
    json: str | None = None
    """file that gets one JSON object a line; - is standard output"""
    quick: bool = False
    """sizes for trying it out, not for figures"""
    minutes: float = 8.0
    """no part begins later than this"""
    against: str = "transformers_cb"
    """the engine beside ours, NAME or NAME=PYTHON as for `rollout bench`; empty = none"""


class Bench:
    """What the parts share: one model, made when it is first wanted, the machine's rates, and the clock."""

    def __init__(self, args: Args) -> None:
        self.name = args.model
        self.device = torch.device(args.device)
        self.dtype, self.kv_dtype = args.dtype, args.kv_dtype
        self.attention = args.attention or ("auto" if self.device.type == "cpu" else "triton")
        self.sizes = QUICK if args.quick else GpuBenchSizes()
        self.against = args.against
        self.config = transformers.AutoConfig.for_model("qwen3", **MODELS[args.model])
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
        """Return the model with random weights, made on the device when it is first asked for."""
        if self._module is None:
            torch.manual_seed(0)
            with self.device:
                made = transformers.AutoModelForCausalLM.from_config(self.config, dtype=getattr(torch, self.dtype))
            self._module = made.eval()
        return self._module

    def forget_module(self) -> None:
        """Drop the module: the next part makes another one."""
        self._module = None
        release(self.device)

    def mixed(self, rows: int, seed: int = 0) -> np.ndarray:
        """Return contexts as rollouts have them: [rows] int32."""
        return lognormal(rows, *self.sizes.mixed, seed)

    @property
    def mixture(self) -> str:
        median, longest = self.sizes.mixed
        return f"lognormal, median {median}, at most {longest}"

    @property
    def read_bytes(self) -> int:
        """Return the bytes of the weights that a decode step reads: all but an embedding that is only looked up in."""
        total: int = sum(parameter.nbytes for parameter in self.module.parameters())
        tied = self.config.tie_word_embeddings
        return total - (0 if tied else int(self.module.get_input_embeddings().weight.nbytes))

    def settings(self, **config: Any) -> EngineConfig:
        shared = {"cpu_offload_gib": 0, "advanced": FUSED, "kv_dtype": self.kv_dtype}
        options = {**shared, "max_num_seqs": self.sizes.rows, **config}
        options["max_batch_tokens"] = max(options.get("max_batch_tokens", self.sizes.batch_tokens), options["max_num_seqs"])
        return EngineConfig(model=self.name, dtype=self.dtype, device=str(self.device), attention=self.attention, **options)

    def kv_bytes(self, tokens: int) -> int:
        """Of that many tokens in a pool."""
        return tokens * self.model().geometry.kept_as(self.kv_dtype).bytes_per_token

    def model(self) -> Model:
        return Model(self.module, self.name)

    def engine(self, **config: Any) -> Engine:
        return Engine(self.settings(**config), self.model())

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """Write the model's configuration, without weights, into a temporary folder for another process."""
        folder = tempfile.TemporaryDirectory(prefix="rollout-bench-")
        self.config.save_pretrained(folder.name)
        return folder


def rates(device: torch.device, size: int, dtype: torch.dtype) -> dict[str, float]:
    """Measure the machine: operations a second of a large product in `dtype`; bytes a second read and written in the device's
    memory, by whichever of a copy and a sum is faster; bytes a second copied from pinned host memory to the device, and
    back."""
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
    """Yield the rows. What goes wrong is one with an `error`, and ends nothing that comes after."""
    try:
        yield from rows
    except Exception as error:
        traceback.print_exc()
        yield {"error": f"{type(error).__name__}: {error}"}
