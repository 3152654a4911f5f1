"""What a GPU makes of the engine, beside what its memory would allow; models of known shapes with random weights, no hub.

    python -m rollout.bench.gpu --model qwen3-8b --json results.jsonl        # make bench-gpu runs both models
    python -m rollout.bench.gpu --model qwen3-0.6b --parts decode,sharing

Every part (`rollout.bench.gpu_parts`) writes its JSON lines as soon as it has them. One that fails is reported and does not end
the others; one that would begin after `--minutes` is left out, and that is reported too.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import msgspec
import torch
import transformers
import tyro

from engine.config import EngineConfig
from engine.engine import Engine
from engine.forward.model import Model, model_of
from rollout.bench.by_hand import median_ms, release
from rollout.bench.gpu_parts import PARTS, kept
from rollout.bench.sharing import FANOUT, LONG_PREFIX, MANY_LONG, Shape
from rollout.bench.text import RandomText
from rollout.bench.workloads import Workload, find
from rollout.config import InputError

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


class Sizes(NamedTuple):
    """How much each part does."""

    rows: int = 256
    """sequences of a decode step"""
    contexts: tuple[int, ...] = (640, 2048)
    prompt: int = 512
    steps: int = 64
    turns: int = 9
    batch_tokens: int = 8192
    shapes: tuple[Shape, ...] = (MANY_LONG, FANOUT, LONG_PREFIX)
    workloads: tuple[Workload, ...] = (find("multi_return_seq"), find("rollouts_2048"))
    workload_rows: int = 512
    pressure: Workload = Workload(name="half_pool", prompts=8, prompt_tokens=512, n=16, new_tokens=384, kv_share=0.5)
    refreshes: int = 2
    prefill: tuple[int, int] = (8, 1024)
    """rows and tokens of each in a forward that only prefills"""
    probe_bytes: int = 4 << 30
    """of the buffers that memory and copies are measured with"""


QUICK = Sizes(
    rows=16, contexts=(64, 96), prompt=32, steps=6, turns=2, batch_tokens=128, shapes=(Shape(2, 4, 64, 32),),
    workloads=(Workload(name="multi_return_seq", prompts=3, prompt_tokens=32, n=4, new_tokens=16),),
    workload_rows=16, pressure=Workload(name="half_pool", prompts=2, prompt_tokens=64, n=8, new_tokens=96, kv_share=0.5),
    refreshes=1, prefill=(2, 64), probe_bytes=1 << 20,
)  # fmt: skip


class Args(msgspec.Struct, kw_only=True):
    """Measure decode, prefix sharing, workloads, KV and weight offload, refresh and compiled layers of one model."""

    model: str = "qwen3-0.6b"
    """qwen3-8b, qwen3-0.6b or tiny: shapes, with random weights"""
    device: str = "cuda"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
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
        self.dtype = args.dtype
        self.attention = args.attention or ("auto" if self.device.type == "cpu" else "triton")
        self.sizes = QUICK if args.quick else Sizes()
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
        """Random weights, made on the device."""
        if self._module is None:
            torch.manual_seed(0)
            with self.device:
                made = transformers.AutoModelForCausalLM.from_config(self.config, dtype=getattr(torch, self.dtype))
            self._module = made.eval()
        return self._module

    def forget_module(self) -> None:
        """The next part makes another one."""
        self._module = None
        release(self.device)

    @property
    def read_bytes(self) -> int:
        """Of the weights that a decode step reads: all but an embedding that is only looked up in."""
        total: int = sum(parameter.nbytes for parameter in self.module.parameters())
        tied = self.config.tie_word_embeddings
        return total - (0 if tied else int(self.module.get_input_embeddings().weight.nbytes))

    def settings(self, **config: Any) -> EngineConfig:
        options = {"cpu_offload_gib": 0, "max_num_seqs": self.sizes.rows, **config}
        options["max_batch_tokens"] = max(self.sizes.batch_tokens, options["max_num_seqs"])
        return EngineConfig(model=self.name, dtype=self.dtype, device=str(self.device), attention=self.attention, **options)

    def model(self) -> Model:
        return model_of(self.settings(), self.module, self.name)

    def engine(self, **config: Any) -> Engine:
        return Engine(self.settings(**config), self.model())

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """The model's configuration, without weights, for another process."""
        folder = tempfile.TemporaryDirectory(prefix="rollout-bench-")
        self.config.save_pretrained(folder.name)
        return folder


def rates(device: torch.device, size: int, dtype: torch.dtype) -> dict[str, float]:
    """Operations a second of a large product in `dtype`. Bytes a second: read and written in the device's memory, by whichever
    of a copy and a sum is faster; copied from pinned host memory to the device, and back."""
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


def measure(bench: Bench, parts: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]]) -> Iterator[dict[str, Any]]:
    """The rows of all parts. What goes wrong in one is a row with an `error`."""
    for name, part in parts.items():
        base = {"model": bench.name, "part": name}
        if bench.seconds_left < 0:
            yield base | {"error": "left out: the minutes are over"}
            continue
        began = time.perf_counter()
        for row in kept(part(bench)):
            yield base | row
        yield base | {"seconds": round(time.perf_counter() - began, 2)}
        release(bench.device)


def check(args: Args, known: dict[str, Any]) -> list[str]:
    """Names of the parts. Raises InputError."""
    if args.model not in MODELS:
        raise InputError(f"--model {args.model!r}: must be one of {', '.join(MODELS)}")
    names = [name for name in args.parts.split(",") if name] or list(known)
    for name in names:
        if name not in known:
            raise InputError(f"--parts: no part {name!r}; there are: {', '.join(known)}")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"--device {args.device}: torch {torch.__version__} finds no CUDA device here; --device cpu --quick tries"
        )
    return names


def run(args: Args, out: TextIO) -> int:
    """Returns the exit status: 1 if a part failed or was left out."""
    names = check(args, PARTS)
    failed = False
    for row in measure(Bench(args), {name: PARTS[name] for name in names}):
        failed |= "error" in row
        out.write(json.dumps(row) + "\n")
        out.flush()
        if out is not sys.stdout:
            print(text(row), flush=True)
    return int(failed)


def text(row: dict[str, Any]) -> str:
    values = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
    return f"{values.pop('model')} {values.pop('part')}: {', '.join(f'{name} {value}' for name, value in values.items())}"


def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Args, args=argv, prog="python -m rollout.bench.gpu")
    logging.basicConfig(level=logging.WARNING)
    try:
        if args.json in (None, "-"):
            return run(args, sys.stdout)
        with Path(args.json).open("w", encoding="utf-8") as out:
            return run(args, out)
    except InputError as error:
        print(f"rollout.bench.gpu: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
