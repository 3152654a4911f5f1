"""Parts of `tests.bench.gpu` that measure single kernels: attention with other launches and blocks, and beside FlashInfer;
torch's products, and whether they depend on the number of rows; the time of each kernel of a decode step."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from rollout.engine.cuda.attention import TritonAttention
from rollout.engine.cuda.exact import Tile, exact_linear, product
from rollout.engine.cuda.graphs import cuda_capture
from rollout.engine.cuda.launches import Launches
from rollout.engine.cuda.library_products import library_products
from rollout.engine.cuda.proofs import Unproven
from rollout.engine.forward.attention import Scores, StepCapacity
from rollout.engine.kv.pages import KVGeometry
from tests.bench.by_hand import batch_of, fill, forward_of, median_ms, own_blocks, prepared, release
from tests.bench.gpu_bench import Bench, Rows, kept

CALLS = 10
"""attentions that are launched in one graph"""
WORKSPACE_BYTES = 256 << 20
"""of FlashInfer, which asks for at least half of it"""
SWEPT: dict[str, tuple[int, ...]] = {"keys": (32, 64), "warps": (4, 8), "stages": (4, 5, 6)}
"""launch parameters to try"""
ROWS = (1, 2, 3, 8, 16, 17, 32, 64, 65, 96, 128, 160, 224, 256, 512, 1000, 1024, 2048, 4096)
"""numbers of rows whose products are compared with the first rows of the largest one's"""
TIMED = (16, 64, 256, 2048)
MOST_ROWS = 8192
OTHER_TILES = Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3), Tile(64, 32, 64, 4, 4), Tile(64, 64, 64, 4, 4)
"""tiles of the product of `exact`, of the same inputs at a time: they are to have the same bits"""
WITHOUT_SPLITS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""set before a process starts, they leave cuBLASLt no memory to split sums along K"""


def attention(bench: Bench) -> Rows:
    """Measure decode attention of one layer, from a graph: blocks of 32 and 64 tokens, other launches, FlashInfer if it is
    installed. `bytes_per_second` counts the K and V that a step reads."""
    if bench.device.type == "cpu":
        yield {"left_out": "launches and graphs are of CUDA"}
        return
    mixtures = {f"equal {bench.sizes.contexts[0]}": np.full(bench.sizes.rows, bench.sizes.contexts[0], np.int32)}
    mixtures[bench.mixture] = bench.mixed(bench.sizes.rows)
    for (name, contexts), block in itertools.product(mixtures.items(), (32, 64)):
        for row in kept(one_pool(bench, contexts, block)):
            yield {"contexts": name, "block_size": block, **row}
        release(bench.device)


@torch.inference_mode()
def one_pool(bench: Bench, contexts: np.ndarray, block: int) -> Rows:
    """Measure the attention of one mixture of contexts over one pool."""
    config, dtype = bench.config, getattr(torch, bench.dtype)
    heads, q_heads = config.num_key_value_heads, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // q_heads
    geometry = KVGeometry(1, heads, dim, dtype).kept_as(bench.kv_dtype)
    table = own_blocks(len(contexts), contexts, block)
    data = torch.empty((int(table.max()) + 1, *geometry.block_shape(block)), dtype=geometry.stored, device=bench.device)
    kv: Any = SimpleNamespace(data=data, block_size=block, geometry=geometry, window=None)
    fill(kv)
    batch: Any = SimpleNamespace(
        query_starts=np.arange(len(contexts) + 1, dtype=np.int32), context_lens=contexts, block_table=table,
        shared=np.zeros((0, 3), np.int32), num_tokens=len(contexts), slots=torch.zeros(len(contexts), dtype=torch.int64),
    )  # fmt: skip
    capacity = StepCapacity(len(contexts), len(contexts), table.shape[1], q_heads, heads, dim, dtype.itemsize)
    query = torch.randn(len(contexts), q_heads, dim, device=bench.device, dtype=dtype)
    read, first = geometry.bytes_per_token * int(contexts.sum()), torch.empty(0)
    for change in ({}, *changes(block)):
        made = TritonAttention(bench.device, capacity)
        for name in ("launches", "launches_in_fp8"):
            small, large = getattr(made, name)
            setattr(made, name, Launches(small._replace(**change), large))
        batch.attention = made.prepare(batch, kv)
        run = partial(made.attend_stored, 0, query, batch, kv, Scores(dim**-0.5))
        try:
            ms, out = timed(bench, run)
        except Exception as error:  # launches that do not fit
            yield {"launch": change, "left_out": f"{type(error).__name__}: {error}"[:200]}
            continue
        first = first if len(first) else out
        yield {
            "launch": change or "default",
            "ms": ms,
            "bytes_per_second": 1e3 * read / ms,
            "fraction_of_copy": 1e3 * read / ms / bench.rates["bytes_per_second"],
            "off": float((out - first).abs().max()),
        }
    if find_spec("flashinfer") is None or geometry.fp8:
        yield {"launch": "flashinfer", "left_out": "it is not installed" if not geometry.fp8 else "it has no scales per token"}
        return
    for tensor_cores in (False, True):
        ms, out = timed(bench, flashinfer(kv, contexts, table, query, tensor_cores))
        yield {
            "launch": "flashinfer",
            "version": version("flashinfer-python"),
            "tensor_cores": tensor_cores,
            "ms": ms,
            "bytes_per_second": 1e3 * read / ms,
            "fraction_of_copy": 1e3 * read / ms / bench.rates["bytes_per_second"],
            "off": float((out - first).abs().max()),
        }


def changes(block: int) -> list[dict[str, int]]:
    """List the launches to try, in blocks of the default size only."""
    if block != 64:
        return []
    return [dict(zip(SWEPT, values, strict=True)) for values in itertools.product(*SWEPT.values())]


def timed(bench: Bench, run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Return the milliseconds of one call, from a graph of CALLS of them, and its result in fp32."""
    out = run().float()

    def calls() -> torch.Tensor:
        for _ in range(CALLS):
            made = run()
        return made

    return median_ms(bench.device, cuda_capture(torch.cuda.Stream())(calls), bench.sizes.turns) / CALLS, out


def flashinfer(
    kv: Any, contexts: np.ndarray, table: np.ndarray, query: torch.Tensor, tensor_cores: bool
) -> Callable[[], torch.Tensor]:
    """Return FlashInfer's decode attention over the same pool, which it reads where it is. tensor_cores: use the kernels for
    groups of query heads. It compiles at first use, which needs nvcc."""
    import flashinfer as other  # the extra of this name

    device, heads, dim = query.device, kv.geometry.kv_heads, query.shape[2]
    blocks = -(-contexts // kv.block_size)
    own = table[np.arange(table.shape[1]) < blocks[:, None]]
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = other.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
    wrapper.plan(
        torch.from_numpy(np.concatenate([[0], np.cumsum(blocks)]).astype(np.int32)).to(device),
        torch.from_numpy(own.astype(np.int32)).to(device),
        torch.from_numpy((contexts - (blocks - 1) * kv.block_size).astype(np.int32)).to(device),
        query.shape[1], heads, dim, kv.block_size, q_data_type=query.dtype, kv_data_type=kv.data.dtype,
    )  # fmt: skip
    pages = kv.data[:, 0, 0], kv.data[:, 0, 1]

    def run() -> torch.Tensor:
        made: torch.Tensor = wrapper.run(query, pages)
        return made

    return run


@torch.inference_mode()
def products(bench: Bench) -> Rows:
    """Say whether cuBLASLt's products are proven for `exact`, and in how many seconds. Compare torch's products of some rows
    with those of all rows, for the shapes of the model's layers, and time them beside the kernel of `exact`. Run it once more
    with WITHOUT_SPLITS in the environment."""
    if bench.device.type == "cpu":
        yield {"left_out": "cuBLAS chooses by the number of rows"}
        return
    started = time.perf_counter()
    yield {"exact_products": proven_or_why(bench.module), "seconds": time.perf_counter() - started}
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    without_splits = all(os.environ.get(name) == value for name, value in WITHOUT_SPLITS.items())
    if without_splits:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    for name, (outs, inputs) in shapes_of(bench.config).items():
        most = 2048 if outs > 100_000 else MOST_ROWS
        x, weight = (torch.randn(n, inputs, device=bench.device, dtype=getattr(torch, bench.dtype)) for n in (most, outs))
        whole, times = linear(x, weight), {}
        for rows in TIMED:
            for way, multiply in (("torch", linear), ("exact", exact_linear)):
                times[f"{way}_{rows}_ms"] = median_ms(bench.device, partial(multiply, x[:rows], weight), bench.sizes.turns)
        of_exact = exact_linear(x[:1024], weight)
        yield {
            "product": name, "outs": outs, "inputs": inputs, "without_splits": without_splits,
            "rows_that_differ": [m for m in ROWS if m < most and not torch.equal(linear(x[:m], weight), whole[:m])],
            "exact_rows_that_differ": [m for m in (1, 17, 256) if not torch.equal(exact_linear(x[:m], weight), of_exact[:m])],
            **times,
        }  # fmt: skip
        for tile in OTHER_TILES:
            yield from kept(one_tile(bench, name, tile, x[:1024], weight, of_exact))
        del x, weight, whole


def proven_or_why(module: torch.nn.Module) -> str:
    """Return the name of the library's products for `exact`, or why they are not taken."""
    try:
        return library_products(module).name
    except Unproven as error:
        return str(error)


def one_tile(bench: Bench, name: str, tile: Tile, x: torch.Tensor, weight: torch.Tensor, want: torch.Tensor) -> Rows:
    """Compare the product of `exact` with another tile with the usual one, and time it."""
    times = {
        f"exact_{rows}_ms": median_ms(bench.device, partial(product, x[:rows], weight, None, tile), bench.sizes.turns)
        for rows in TIMED
        if rows <= len(x)
    }
    yield {"product": name, "tile": list(tile), "same_bits": torch.equal(product(x, weight, None, tile), want), **times}


def shapes_of(config: Any) -> dict[str, tuple[int, int]]:
    """Return the shapes [outs, inputs] of the products of a Llama-like model, by name."""
    hidden, inner, q_heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or hidden // q_heads
    queries, keys = q_heads * dim, config.num_key_value_heads * dim
    return {
        "q, k, v": (queries + 2 * keys, hidden), "k": (keys, hidden), "o": (hidden, queries), "gate": (inner, hidden),
        "gate, up": (2 * inner, hidden), "down": (hidden, inner), "head": (config.vocab_size, hidden),
    }  # fmt: skip


def profile(bench: Bench) -> Rows:
    """Sum the device's time of each kernel over a decode step."""
    if bench.device.type == "cpu":
        yield {"left_out": "the profiler's times are of CUDA's kernels"}
        return
    mixtures = {f"equal {bench.sizes.contexts[0]}": np.full(bench.sizes.rows, bench.sizes.contexts[0], np.int32)}
    mixtures[bench.mixture] = bench.mixed(bench.sizes.rows)
    engine = bench.engine(kv_tokens=bench.tokens_in_blocks(mixtures.values()))
    fill(engine.worker.kv)
    for name, contexts in mixtures.items():
        table = own_blocks(len(contexts), contexts, engine.config.block_tokens)
        batch = prepared(engine, batch_of(engine, table, contexts))
        forward_of(engine, batch)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                forward_of(engine, batch)
            torch.cuda.synchronize()
        of_kernels = sorted(seen.key_averages(), key=lambda each: -each.device_time_total)
        for each in of_kernels[:20]:
            yield {"contexts": name, "kernel": each.key[:100], "calls": each.count / 3, "ms": each.device_time_total / 3000}
