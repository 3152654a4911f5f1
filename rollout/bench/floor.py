"""The floor: how fast this machine could run a workload if it did nothing but what must be done.

    prefill      the model's matrix products over every prompt token once
    a step       max(the model's products for so many rows, reading its weights)
               + reading each child's suffix KV once
               + the products of all queries with their group's prefix
               + reading the logits once

measured here and now: each product of the model with weights out of DRAM (for so many rows, or at the rate for 512 rows where
that is better), and the rate at which memory is read. Attention among the prompt's own tokens, norms, rotary embeddings and all
host work count as nothing, so the floor is a bound, not a goal.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rollout.bench.workloads import Workload

CACHE_BYTES = 300e6
"""weights that a product walks through, so that none is still in a cache"""


FEW_ROWS = 16
"""below, a product is bound by reading its weights, whatever a library makes of it"""


class Machine:
    """Rates of this machine for one model. Threads are torch's."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.matrices = matrices(folder)
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.q_heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads", self.q_heads)
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.q_heads
        self.vocab = config["vocab_size"]
        self.bytes_per_second = bandwidth()
        self._products: dict[int, float] = {}

    def products(self, rows: int) -> float:
        """Return the seconds of all matrix products of a forward of so many rows."""
        if rows not in self._products:
            self._products[rows] = sum(count * product(rows, *shape, self.dtype) for shape, count in self.matrices.items())
        return self._products[rows]

    def flops(self, rows: int) -> float:
        return 2.0 * rows * sum(count * n * k for (n, k), count in self.matrices.items())

    def floor(self, workload: Workload) -> dict[str, Any]:
        """Return the floor of a workload that never waits for KV: floor_seconds, floor_tokens_per_second, floor_step_ms, and
        the rates."""
        rows = workload.prompts * workload.n
        chunk = 512
        prefill = workload.prompts * workload.prompt_tokens / chunk * self.products(chunk)
        kv_token = 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize
        weights = sum(count * n * k for (n, k), count in self.matrices.items()) * self.dtype.itemsize
        suffix = rows * workload.new_tokens / 2 * kv_token / self.bytes_per_second
        rate = self.flops(chunk) / self.products(chunk)
        prefix_flops = 4.0 * rows * workload.prompt_tokens * self.q_heads * self.head_dim * self.layers
        prefix_bytes = workload.prompts * workload.prompt_tokens * kv_token
        prefix = max(prefix_flops / rate, prefix_bytes / self.bytes_per_second)
        logits = rows * self.vocab * self.dtype.itemsize / self.bytes_per_second
        products = min(self.products(rows), self.flops(rows) / rate) if rows >= FEW_ROWS else 0.0
        step = max(products, weights / self.bytes_per_second) + suffix + prefix + logits
        seconds = prefill + workload.new_tokens * step
        return {
            "floor_seconds": seconds,
            "floor_tokens_per_second": rows * workload.new_tokens / seconds,
            "floor_step_ms": {
                "products": 1e3 * products,
                "weights": 1e3 * weights / self.bytes_per_second,
                "suffix": 1e3 * suffix,
                "prefix": 1e3 * prefix,
                "logits": 1e3 * logits,
            },
            "gemm_flops_per_second": rate,
            "bytes_per_second": self.bytes_per_second,
        }


def matrices(folder: Path) -> dict[tuple[int, int], int]:
    """Count (rows, columns) -> how many of the model's matrices are multiplied with every token; the embedding among them where
    it is the output layer as well."""
    shapes: Counter[tuple[int, int]] = Counter()
    names: set[str] = set()
    embedding: tuple[int, int] | None = None
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                shape = tuple(tensors.get_slice(name).get_shape())
                names.add(name)
                if len(shape) == 2 and "embed_tokens" in name:
                    embedding = (shape[0], shape[1])
                elif len(shape) == 2:
                    shapes[shape[0], shape[1]] += 1
    if not any("lm_head" in name for name in names) and embedding is not None:
        shapes[embedding] += 1
    return dict(shapes)


def product(rows: int, n: int, k: int, dtype: torch.dtype) -> float:
    """Return the seconds of [rows, k] · [n, k]ᵀ, the weights out of DRAM."""
    count = max(1, min(64, int(CACHE_BYTES / (n * k * dtype.itemsize))))
    weights = [torch.randn(n, k, dtype=dtype) for _ in range(count)]
    x = torch.randn(max(rows, 2), k, dtype=dtype)  # a lone row runs as two
    turn = iter(range(1 << 30))
    return best(lambda: torch.nn.functional.linear(x, weights[next(turn) % count]), 0.3)


def bandwidth() -> float:
    """Return the bytes a second that all threads read together."""
    data = torch.ones(256 << 20, dtype=torch.float32)
    return data.nbytes / best(data.sum, 1.0)


def best(work: Callable[[], Any], seconds: float) -> float:
    """Return the best of as many turns as fit: a floor is not moved by a neighbour that takes a core for a while."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
