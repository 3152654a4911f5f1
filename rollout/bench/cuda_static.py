"""`rollout bench cuda_static`: what can be known of the CUDA path without a GPU.

balance              mean / largest work of the programs of attention, for mixtures of lengths (an H100's programs)
spills               bytes of stack of a thread, and shared memory, of every kernel as each architecture would launch it
launches_per_layer   kernels of a decode step that one decoder layer launches, counted while a model of that kind runs
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from rich.console import Console

from engine.cuda import tiles
from engine.cuda.launches import KNOWN, choose
from rollout.bench import cuda_compile, cuda_count
from rollout.bench.lengths import lognormal

NAME = "cuda_static"
PROCESSORS = 132
COMPILE_S = 1200.0
"""most that the kernels of one architecture may take"""


MIXTURES = {
    "256 x 640": np.full(256, 640, np.int32),
    "256 x 2,048": np.full(256, 2048, np.int32),
    "200 x 640": np.full(200, 640, np.int32),
    "256 x lognormal, median 1k, max 8k": lognormal(256, 1000, 8192),
    "128 x lognormal, median 2k, max 16k": lognormal(128, 2000, 16384),
    "64 x uniform 1k-16k": np.random.default_rng(0).integers(1024, 16384, 64).astype(np.int32),
    "48 x lognormal, median 4k, max 16k": lognormal(48, 4000, 16384),
}
"""contexts of the rows of a decode step"""


def cut(contexts: np.ndarray) -> tiles.Tiles:
    """Cut the tiles of a decode step with such contexts, for an H100 and Qwen3-8B's heads."""
    heads, rows = cuda_compile.PRODUCTION, len(contexts)
    launches = choose(heads.group, heads.dim, heads.itemsize, KNOWN[90])
    table = np.arange(rows * -(-int(contexts.max()) // 32), dtype=np.int32).reshape(rows, -1)
    small, large = (launch.rows // heads.group for launch in launches)
    groups = PROCESSORS * launches.small.programs // heads.kv_heads, PROCESSORS * launches.large.programs // heads.kv_heads
    return tiles.cut(
        np.arange(rows + 1, dtype=np.int32), contexts, table, False, block_size=32, sizes=(small, large), groups=groups,
        max_parts=1 << 15,
    )  # fmt: skip


def in_turn(contexts: np.ndarray) -> float:
    """Return the balance of whole rows that programs take in turn, the longest first: what `tiles.deal` is compared with."""
    heads, programs = cuda_compile.PRODUCTION.kv_heads, 2 * PROCESSORS
    whole = np.sort(-(-contexts // tiles.STEP_KEYS))[::-1].repeat(heads)
    return tiles.balance([np.array([whole[first::programs].sum() for first in range(programs)])])


def measure(architectures: tuple[int, ...] = cuda_compile.ARCHITECTURES) -> Iterator[dict[str, Any]]:
    """Yield rows, and a summary at the end."""
    balance = {}
    for name, contexts in MIXTURES.items():
        balance[name] = round(tiles.balance(cut(contexts).loads), 3)
        yield {"what": "balance", "mixture": name, "balance": balance[name], "rows_in_turn": round(in_turn(contexts), 3)}
    launches = cuda_count.launches_per_layer()
    yield {"what": "launches", **launches}
    spills: dict[str, dict[str, int]] = {}
    for architecture in architectures:
        for row in cuda_compile.in_a_process(architecture, True, COMPILE_S):
            spills.setdefault(f"sm_{architecture}", {})[title(row)] = row["spill_bytes"]
            yield {"what": "kernel", **row}
    yield {
        "bench": NAME, "summary": True, "torch": torch.__version__, "balance": balance, "spills": spills,
        "launches_per_layer": launches["launches_per_layer"],
    }  # fmt: skip


def title(row: dict[str, Any]) -> str:
    """Name a kernel among those of an architecture."""
    if "tile" in row:
        kind = "fp32" if row["itemsize"] == 4 else "bf16"
        return f"attend {row['tile']} {row['rows']} x {row['keys']}, head {row['dim']} {kind}{' KV fp8' if row['fp8'] else ''}"
    kinds = " cut" * bool(row.get("cut")) + " fp32" * (row.get("itemsize") == 4) + " KV fp8" * bool(row.get("fp8"))
    return str(row["kernel"]) + kinds


def print_row(console: Console, row: dict[str, Any]) -> None:
    if row.get("what") == "balance":
        console.print(f"balance {row['balance']:.3f}   {row['mixture']} (rows in turn {row['rows_in_turn']:.3f})")
    elif row.get("what") == "kernel":
        console.print(
            f"sm_{row['capability']}  {row['spill_bytes']:>4} B spilled  {row['registers']:>3} registers  "
            f"{row['shared_bytes'] >> 10:>3} KiB  {title(row)}"
        )
    elif row.get("what") == "launches":
        console.print(f"launches a layer: {row['launches_per_layer']} ({', '.join(row['kernels'])})")


if __name__ == "__main__":  # as `rollout bench cuda_static`
    sys.argv[1:1] = ["bench", NAME]
    runpy.run_module("rollout", run_name="__main__")
