"""The floor: the least seconds in which this machine can run a workload.

    compute   multiplications and additions of the model's products and of attention / register peak
    memory    bytes read / rate of reading memory:
                each step    the weights, each group's prefix KV once, each child's suffix KV, the logits, each child's
                             recurrent state, which is read and written
    floor     the larger of the two

The peak is that of the service's instruction set, on registers alone (c/peaks.c); if the service computes with torch, that of
the CPU's best set. The rate depends on the size, because small data stays in a cache. Norms, rotary embeddings, the
exponentials of attention and host work count as zero, and computing and reading overlap fully. So the floor is a bound rather
than a goal, and a run above it is an error (`BoundBroken`).

Peak and rates are the best of several measurements, before and after the runs; the worst one is reported too. On a busy machine
a measurement is too low, never too high. If a run is above the floor, both are measured once more before the error."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from safetensors import safe_open

from rollout.bench.harness import BoundBroken, Row
from rollout.bench.peaks import KINDS, MIB, fastest, reading, register_peak
from rollout.bench.workloads import Workload
from rollout.config import InputError
from rollout.engine.config import EngineConfig
from rollout.engine.cpu.kernels import Kernels, choose
from rollout.engine.forward.model import Model
from rollout.engine.forward.shapes import is_random

LOOKS = 5
"""measurements of the peak and of each rate, each time"""
LARGEST = 1024 * MIB
"""bytes read to measure a rate, more than caches hold"""
EMBEDDINGS = ("embed", "wte", "wpe")
"""parts of the names of embeddings"""


class Shape(NamedTuple):
    """Sizes of a model."""

    layers: int
    """elements of the matrices that every token is multiplied by, without the output layer"""
    head: int
    vocab: int
    attention: int
    """operations of one query with one token's keys and values, in all layers and heads"""
    kv_numbers: int
    """elements of one token's KV"""
    window: int
    """most tokens that a query attends to"""
    states: int = 0
    """bytes of the recurrent state of a sequence"""


def recurrent_sizes(folder: Path) -> tuple[int, int]:
    """Return how many layers of a model have attention, and the bytes of its recurrent state, from a probe without weights."""
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    model = Model(module, str(folder))
    return len(model.asked), 0 if model.states is None else model.states.nbytes


def shape_of(folder: Path) -> Shape:
    """Read the sizes of a model's folder."""
    config = json.loads((folder / "config.json").read_text())
    layers, q_heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // q_heads
    kv_heads = config.get("num_key_value_heads", q_heads)
    matrices, head = matrices_of(folder)
    states = 0
    if not set(config.get("layer_types") or ()) <= {"full_attention", "sliding_attention"}:
        layers, states = recurrent_sizes(folder)
    return Shape(
        layers=sum(count * n * k for (n, k), count in matrices.items()),
        head=math.prod(head),
        vocab=config["vocab_size"],
        attention=4 * q_heads * head_dim * layers,
        kv_numbers=2 * layers * kv_heads * head_dim,
        window=config.get("sliding_window") or 1 << 40,
        states=states,
    )


def matrices_of(folder: Path) -> tuple[dict[tuple[int, int], int], tuple[int, int]]:
    """Count the matrices that every token is multiplied by, by shape. Also return the shape of the output layer, which may be
    the embedding. Experts do not count, because a token uses few of them."""
    shapes: Counter[tuple[int, int]] = Counter()
    head: tuple[int, int] | None = None
    embedding = (0, 0)
    for name, shape in tensors_of(folder):
        if len(shape) != 2 or ".experts." in name:
            continue
        if "lm_head" in name:
            head = shape
        elif any(part in name for part in EMBEDDINGS):
            embedding = max(embedding, shape)
        else:
            shapes[shape] += 1
    return dict(shapes), head or embedding


def tensors_of(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a model's tensors: of its files, or without files of its configuration."""
    if is_random(folder):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        yield from ((name, tuple(tensor.shape)) for name, tensor in model.named_parameters())
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            yield from ((name, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys())


class Looks:
    """The best and the worst measurement of a rate."""

    def __init__(self) -> None:
        self.best, self.worst = 0.0, math.inf

    def add(self, rate: float) -> None:
        self.best, self.worst = max(self.best, rate), min(self.worst, rate)


class MachineRates:
    """Peak and rates of this machine with a service's threads and instruction set, for one model. Raises InputError if the
    kernels cannot be built."""

    def __init__(self, folder: Path, engine: EngineConfig) -> None:
        chosen = choose("auto" if engine.isa == "torch" else engine.isa)
        if chosen.kernels is None:
            raise InputError(f"the floor needs the kernels in C, which are not available ({chosen.why}): leave --floor out")
        self.kernels = Kernels(chosen.isa, engine.threads)
        self.dtype: torch.dtype = getattr(torch, engine.dtype)
        self.shape = shape_of(folder)
        self.peak = Looks()
        self.rates: dict[int, Looks] = {}
        """by the bytes that are read repeatedly"""
        self.look()

    def look(self) -> None:
        """Measure the peak and all rates again."""
        for _ in range(LOOKS):
            self.peak.add(fastest({kind: register_peak(self.kernels, kind) for kind in KINDS}, self.dtype))
        if self.rates:
            data = torch.ones(max(self.rates) // 4, dtype=torch.float32)
            for size, looks in self.rates.items():
                read(self.kernels, data, size, looks)

    def rate(self, size: float) -> Looks:
        """Return the bytes/s at which `size` bytes are read repeatedly."""
        whole = min(max(1, math.ceil(size / MIB)) * MIB, LARGEST)
        if whole not in self.rates:
            self.rates[whole] = Looks()
            read(self.kernels, torch.ones(whole // 4, dtype=torch.float32), whole, self.rates[whole])
        return self.rates[whole]

    def floor(self, workload: Workload, prefilled: float = math.inf, drafted: float = 0.0) -> Row:
        """Return the floor of a workload: the seconds, the bound that sets them, both bounds and their parts in seconds, the
        peak and the rate of the weights. prefilled: computed prompt tokens. drafted: fraction of the new tokens that were
        accepted drafts, which need no step of their own."""
        work = work_of(self.shape, workload, prefilled, 1 - drafted)
        compute = {name: flops / self.peak.best for name, flops in work.flops.items()}
        itemsize = self.dtype.itemsize
        memory = {
            name: times * numbers * itemsize / self.rate(numbers * itemsize).best
            for name, (numbers, times) in work.reads.items()
        }
        if self.shape.states:
            tokens = (workload.total_new_tokens - workload.prompts * workload.n) * (1 - drafted)
            memory["states"] = 2 * self.shape.states * tokens / self.rate(self.shape.states * workload.n).best
        bounds = {"compute": sum(compute.values()), "memory": sum(memory.values())}
        bound = max(bounds, key=lambda name: bounds[name])
        weights = self.rate((self.shape.layers + self.shape.head) * itemsize)
        return {
            "floor_seconds": bounds[bound],
            "floor_tokens_per_second": workload.total_new_tokens / bounds[bound],
            "floor_bound": bound,
            **{f"floor_{name}_seconds": seconds for name, seconds in bounds.items()},
            "floor_parts_seconds": compute | memory,
            "floor_isa": self.kernels.isa,
            "peak_flops_per_second": self.peak.best,
            "peak_flops_per_second_worst": self.peak.worst,
            "bytes_per_second": weights.best,
            "bytes_per_second_worst": weights.worst,
        }

    def bounded(self, workload: Workload, summary: Row) -> Row:
        """Add the floor and the fraction of it that was reached to a summary. Raises BoundBroken if the fastest run is above
        it."""
        drafted = summary["accepted_tokens"] / workload.total_new_tokens
        for _ in range(2):
            self.look()
            floor = self.floor(workload, summary["prefill_tokens"], drafted)
            most = summary["tokens_per_second_max"] / floor["floor_tokens_per_second"]
            if most <= 1:
                share = summary["tokens_per_second"] / floor["floor_tokens_per_second"]
                return summary | floor | {"floor_fraction": share}
        raise BoundBroken(broken(workload.name, most, floor))


def broken(name: str, share: float, floor: Row) -> str:
    """Return the message for a run above the floor."""
    compute = floor["floor_bound"] == "compute"
    what = "peak_flops_per_second" if compute else "bytes_per_second"
    of = f"the register peak of {floor['floor_isa']}" if compute else "reading memory"
    return (
        f"{name}: a run reached {share:.2f} of the floor, and more than 1 is impossible: the {floor['floor_bound']} bound is "
        f"wrong, {of}, {floor[what] / 1e9:.1f} G/s (lowest measurement: {floor[what + '_worst'] / 1e9:.1f}). Measure again on "
        "a quiet machine; if the result is the same, rollout/bench/floor.py counts this model's work wrongly"
    )


def read(kernels: Kernels, data: torch.Tensor, size: int, looks: Looks) -> None:
    """Read the first `size` bytes LOOKS times, after one time that fills the caches."""
    reading(kernels, data.data_ptr(), size)
    for _ in range(LOOKS):
        looks.add(reading(kernels, data.data_ptr(), size))


class WorkloadCost(NamedTuple):
    """Least work of a workload."""

    flops: dict[str, float]
    reads: dict[str, tuple[float, float]]
    """elements that are read, and how often"""


def work_of(shape: Shape, workload: Workload, prefilled: float, steps: float) -> WorkloadCost:
    """Count the work. prefilled: most prompt tokens that count. steps: fraction of the new tokens that needed a step of their
    own.

    A child's first token comes from the last prompt token; each further token needs a forward of its own, after the
    previous. A prompt token attends to itself and to those before it."""
    prompt, new = (each.astype(np.int64) for each in workload.lengths())
    children = workload.prompts * workload.n
    after = [np.arange(1, n) for n in new]  # own tokens that each further token of a child attends to
    prefix = [np.minimum(p, np.maximum(shape.window - each, 0)) for p, each in zip(prompt, after, strict=True)]
    suffix = [np.minimum(each, shape.window) for each in after]
    seen = workload.n * float(sum(each.sum() for each in (*prefix, *suffix)))
    each_prompt = np.minimum(prompt, prefilled / workload.prompts)  # the division that is least work
    early = np.minimum(each_prompt, shape.window)
    among = float((early * (early + 1) / 2 + (each_prompt - early) * early).sum())
    further = workload.total_new_tokens - children
    rows = further + workload.prompts
    passes = steps * float(new.mean())
    kv_read = (
        steps * sum(float(each.sum()) for each in prefix),
        steps**2 * workload.n * sum(float(each.sum()) for each in suffix),
    )
    kv = float(prompt.sum()) * shape.kv_numbers, max(1.0, further / 2) * shape.kv_numbers
    logits = float(children * shape.vocab)
    return WorkloadCost(
        flops={
            "products": 2.0 * shape.layers * (min(float(prompt.sum()), prefilled) + further) + 2.0 * shape.head * rows,
            "attention": shape.attention * (seen + among),
        },
        reads={
            "weights": (shape.layers + shape.head, passes),
            "prefix": (kv[0], kv_read[0] * shape.kv_numbers / kv[0]),
            "suffix": (kv[1], kv_read[1] * shape.kv_numbers / kv[1]),
            "logits": (logits, rows / children),
        },
    )
