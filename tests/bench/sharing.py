"""`python -m tests.bench sharing`: one decode step of forked groups in three variants.

    shared      children share the prefix blocks, and attention reads them once per group
    per_child   the same blocks, read once per child (`share_prefix` off)
    copies      every child has its own copy of the prefix, as in an engine without forks

The steps are built by hand (`tests.bench.by_hand`) and run in turn; figures are medians. The logits must be equal to the bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import lognormal, long_enough
from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.interface import ModelLike, windows_of
from rollout.models import hide_progress_bars
from tests.bench.by_hand import (
    attention_alone,
    batch_of,
    fill,
    forward,
    forward_of,
    free_on,
    in_turn,
    own_blocks,
    release,
    replayed,
)

NAME = "sharing"
LEAST_TURNS = 5
SPARE = 0.85
"""fraction of the free memory that a pool may take"""


class PrefixShape(NamedTuple):
    groups: int
    children: int
    prefix: int
    suffix: int
    mixed: bool = False
    """prefixes and suffixes have lognormal lengths, at most those above"""

    @property
    def rows(self) -> int:
        return self.groups * self.children

    @property
    def context(self) -> int:
        return self.prefix + self.suffix

    def lengths(self, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole blocks of each prefix [groups], and the tokens of each context [rows]."""
        prefixes, suffixes = np.full(self.groups, self.prefix), np.full(self.rows, self.suffix)
        if self.mixed:
            blocks = lognormal(self.groups, max(1, self.prefix // 2), self.prefix) // block_size
            prefixes = np.maximum(1, blocks) * block_size
            suffixes = lognormal(self.rows, max(1, self.suffix // 2), self.suffix, seed=1)
        return prefixes // block_size, prefixes.repeat(self.children) + suffixes

    def scaled(self, factor: float, block_size: int) -> PrefixShape:
        """Multiply prefix and suffix by `factor`, to at least one block each; the prefix to whole blocks."""
        prefix = max(1, round(self.prefix * factor / block_size)) * block_size
        return self._replace(prefix=prefix, suffix=max(block_size, round(self.suffix * factor)))


FANOUT, LONG_PREFIX, MANY_LONG = PrefixShape(8, 16, 512, 128), PrefixShape(1, 32, 4096, 64), PrefixShape(16, 16, 4096, 64)
"""decode steps of the workloads `fanout` and `shared_prefix`, and one for GPUs"""


def shapes(device: str) -> tuple[PrefixShape, ...]:
    return (FANOUT, LONG_PREFIX) if device == "cpu" else (FANOUT, LONG_PREFIX, MANY_LONG)


def measure_model(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per variant and a summary for each shape. Raises BenchFailed if variants differ or memory does not
    suffice."""
    from rollout.engine.build import device_of
    from rollout.engine.forward.model import open_model

    hide_progress_bars()
    config = setup.config()
    scaled = [shape.scaled(setup.scale, config.block_tokens) for shape in shapes(config.device)]
    with long_enough(setup.folder, max(shape.context for shape in scaled)) as (served, weights):
        model = open_model(msgspec.structs.replace(config, model=str(served)), device_of(config).memory)
        for shape in scaled:
            for row in measure(model, config, shape, setup.repeat):
                yield row | {"model": str(setup.folder), "weights": weights} if "summary" in row else row
            release(model.device)


def measure(model: ModelLike, config: EngineConfig, shape: PrefixShape, repeat: int) -> Iterator[Row]:
    """Yield the rows of one shape and its summary: medians of `repeat` turns, at least LEAST_TURNS."""
    size = config.block_tokens
    prefix_blocks, contexts = shape.lengths(size)
    block_bytes = model.geometry.kept_as(config.kv_dtype).bytes_per_token * size
    room = free_on(model.device) * SPARE
    copied = int((-(-contexts // size)).sum()) * block_bytes
    forked = copied - (shape.children - 1) * int(prefix_blocks.sum()) * block_bytes
    if forked > room:
        raise BenchFailed(
            f"{text(shape)}: {forked / 2**30:.1f} GiB of KV in {room / 2**30:.1f} GiB of memory; use a smaller --scale"
        )
    windowed = any(windows_of(model))
    variants = tables(shape, size, copies=copied <= room and not windowed)
    pool = (1 + max(int(table.max()) for table in variants.values())) * size
    engine = Engine(
        msgspec.structs.replace(
            config, kv_tokens=pool, cpu_offload_gib=0, max_num_seqs=shape.rows, max_batch_tokens=max(shape.rows, 16)
        ),
        model,
    )
    fill(engine.worker.kv)
    if "copies" in variants:
        copy_prefixes(engine, shape, variants["copies"])
    groups = [(group * shape.children, shape.children, blocks) for group, blocks in enumerate(prefix_blocks.tolist())]
    batches = {
        name: batch_of(engine, table, contexts, shared=np.array(groups, np.int32) if name == "shared" else None)
        for name, table in variants.items()
    }
    compare(engine, batches)
    turns = max(repeat, LEAST_TURNS)
    alone = attention_alone(engine, batches["shared"])
    steps = in_turn(engine, batches, partial(forward_of, engine), turns)
    attention = in_turn(engine, batches, alone, turns)
    left_out = None if copied <= room else f"copies: {copied / 2**30:.0f} GiB of KV"
    left_out = "copies: windows have blocks of their own" if windowed else left_out
    about = {"left_out": left_out, "graphs": replayed(engine, batches["shared"])}
    yield from figures(shape, engine, steps, attention, about)


def tables(shape: PrefixShape, block_size: int, copies: bool) -> dict[str, np.ndarray]:
    """Make a block table [rows, blocks] for each variant. Suffix blocks belong to one child in all of them, prefix blocks only
    in `copies`, which is left out without memory for it."""
    prefixes, contexts = shape.lengths(block_size)
    own = own_blocks(shape.rows, contexts, block_size)
    forked = own.copy()
    for row, blocks in enumerate(prefixes.repeat(shape.children).tolist()):
        forked[row, :blocks] = own[row - row % shape.children, :blocks]
    if copies:
        return {"shared": forked, "per_child": forked, "copies": own}
    _, packed = np.unique(forked, return_inverse=True)  # numbers without gaps, for a smaller pool
    forked = packed.reshape(forked.shape).astype(np.int32)
    return {"shared": forked, "per_child": forked}


def copy_prefixes(engine: Engine, shape: PrefixShape, own: np.ndarray) -> None:
    """Copy the KV of each group's first prefix to the other children's."""
    data, (prefixes, _) = engine.worker.kv.data, shape.lengths(engine.config.block_tokens)
    for row, blocks in enumerate(prefixes.repeat(shape.children).tolist()):
        first = row - row % shape.children
        if row != first:
            copy, its = (torch.from_numpy(own[each, :blocks].astype(np.int64)).to(data.device) for each in (row, first))
            data[copy] = data[its]


def compare(engine: Engine, batches: dict[str, Batch]) -> None:
    """Raise BenchFailed if a variant has other logits."""
    want = forward(engine, batches["shared"]).clone()
    for name in batches:
        if not torch.equal(forward(engine, batches[name]), want):
            raise BenchFailed(f"{name} has other logits than shared")


def figures(
    shape: PrefixShape, engine: Engine, steps: dict[str, list[float]], alone: dict[str, list[float]], about: dict[str, Any]
) -> Iterator[Row]:
    base = {"workload": NAME, **shape._asdict()}
    step, attention = ({name: statistics.median(each) for name, each in times.items()} for times in (steps, alone))
    for name, each in steps.items():
        yield base | {
            "variant": name,
            "turns": len(each),
            "step_ms": step[name],
            "step_ms_min": min(each),
            "step_ms_max": max(each),
            "attention_ms": attention[name],
        }
    summary = base | {"summary": True, "step_ms": step["shared"], "attention_ms": attention["shared"]}
    for name in ("per_child", "copies"):
        if name in step:
            summary[f"ratio_to_{name}"] = step[name] / step["shared"]
            summary[f"attention_ratio_to_{name}"] = attention[name] / attention["shared"]
    yield summary | {
        **about,
        "kv_bytes": sum(pages.data.nbytes for pages in (engine.worker.kv, engine.worker.kv.window) if pages is not None),
        **bytes_per_child(engine, shape.context),
        "attention": engine.worker.backend.name,
        "dtype": engine.config.dtype,
        "device": engine.config.device,
    }


def bytes_per_child(engine: Engine, context: int) -> dict[str, float]:
    """Return the bytes of the KV blocks that a child of so many tokens holds, shared ones included, and the fraction of those
    that it would hold if windows freed none."""
    kv, windows, size = engine.worker.kv, engine.worker.pools.windows, engine.config.block_tokens
    blocks, window, behind = -(-context // size), 0, 0
    if kv.window is not None and windows is not None:
        window, behind = kv.window.block_bytes, max(0, context - windows.tokens) // size
    whole = blocks * (kv.block_bytes + window)
    held = whole - behind * window
    return {"kv_bytes_per_child": held, "kv_bytes_per_child_ratio": held / whole}


def text(shape: PrefixShape) -> str:
    most = ", lognormal, at most" if shape.mixed else ""
    return f"{shape.groups} x {shape.children} over {shape.prefix} + {shape.suffix} tokens{most}"
