"""`rollout bench sharing`: one decode step of forked groups, with its prefixes read once for a group and once for each child.

    shared      children have the prefix blocks in common, attention reads them once for the group
    per_child   the same blocks, but each child reads them (`share_prefix` off)
    copies      every child has a copy of the prefix of its own, as in an engine without forks

In process and by hand (`rollout.bench.by_hand`), in turn; medians. What comes out must be the same to the bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.forward.batch import Batch
from engine.forward.model import ModelLike
from rollout.bench.by_hand import (
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
from rollout.bench.errors import BenchFailed
from rollout.bench.inputs import lognormal, long_enough
from rollout.models import hide_progress_bars

NAME = "sharing"
LEAST_TURNS = 5
SPARE = 0.85
"""share of the free memory that a pool may take"""


class PrefixShape(NamedTuple):
    groups: int
    children: int
    prefix: int
    suffix: int
    mixed: bool = False
    """prefixes and suffixes have lognormal lengths, these at most"""

    @property
    def rows(self) -> int:
        return self.groups * self.children

    @property
    def context(self) -> int:
        return self.prefix + self.suffix

    def lengths(self, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return [groups] blocks of each prefix, whole ones, and [rows] tokens of each context."""
        prefixes, suffixes = np.full(self.groups, self.prefix), np.full(self.rows, self.suffix)
        if self.mixed:
            blocks = lognormal(self.groups, max(1, self.prefix // 2), self.prefix) // block_size
            prefixes = np.maximum(1, blocks) * block_size
            suffixes = lognormal(self.rows, max(1, self.suffix // 2), self.suffix, seed=1)
        return prefixes // block_size, prefixes.repeat(self.children) + suffixes

    def scaled(self, factor: float, block_size: int) -> PrefixShape:
        """Scale prefix and suffix by `factor`, to at least a block of each; the prefix in whole blocks."""
        prefix = max(1, round(self.prefix * factor / block_size)) * block_size
        return self._replace(prefix=prefix, suffix=max(block_size, round(self.suffix * factor)))


FANOUT, LONG_PREFIX, MANY_LONG = PrefixShape(8, 16, 512, 128), PrefixShape(1, 32, 4096, 64), PrefixShape(16, 16, 4096, 64)
"""decode of the workloads `fanout` and `shared_prefix`; and for a GPU"""


def shapes(device: str) -> tuple[PrefixShape, ...]:
    return (FANOUT, LONG_PREFIX) if device == "cpu" else (FANOUT, LONG_PREFIX, MANY_LONG)


def measure_model(folder: Path, config: EngineConfig, scale: float, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield for each shape a row a variant and a summary. Raises BenchFailed where variants disagree or memory is short."""
    from engine.devices import device_of
    from engine.forward.model import open_model

    hide_progress_bars()
    scaled = [shape.scaled(scale, config.block_size) for shape in shapes(config.device)]
    with long_enough(folder, max(shape.context for shape in scaled)) as (served, weights):
        model = open_model(msgspec.structs.replace(config, model=str(served)), device_of(config).memory)
        for shape in scaled:
            for row in measure(model, config, shape, repeat):
                yield row | {"model": str(folder), "weights": weights} if "summary" in row else row
            release(model.device)


def measure(model: ModelLike, config: EngineConfig, shape: PrefixShape, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of one shape, each with medians of `repeat` turns, at least LEAST_TURNS, and the summary."""
    size = config.block_size
    prefix_blocks, contexts = shape.lengths(size)
    block_bytes = model.geometry.kept_as(config.kv_dtype).bytes_per_token * size
    room = free_on(model.device) * SPARE
    copied = int((-(-contexts // size)).sum()) * block_bytes
    forked = copied - (shape.children - 1) * int(prefix_blocks.sum()) * block_bytes
    if forked > room:
        raise BenchFailed(f"{text(shape)}: {forked / 2**30:.1f} GiB of KV in {room / 2**30:.1f} GiB; --scale makes it less")
    variants = tables(shape, size, copies=copied <= room)
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
    about = {"left_out": left_out, "graphs": replayed(engine, batches["shared"])}
    yield from figures(shape, engine, steps, attention, about)


def tables(shape: PrefixShape, block_size: int, copies: bool) -> dict[str, np.ndarray]:
    """Make a block table [rows, blocks] for each variant: children have their suffix blocks for themselves in all of them, and
    their prefix blocks where it says `copies`, which is left out if there is no memory for it."""
    prefixes, contexts = shape.lengths(block_size)
    own = own_blocks(shape.rows, contexts, block_size)
    forked = own.copy()
    for row, blocks in enumerate(prefixes.repeat(shape.children).tolist()):
        forked[row, :blocks] = own[row - row % shape.children, :blocks]
    if copies:
        return {"shared": forked, "per_child": forked, "copies": own}
    _, packed = np.unique(forked, return_inverse=True)  # as many blocks as there are, and no more
    forked = packed.reshape(forked.shape).astype(np.int32)
    return {"shared": forked, "per_child": forked}


def copy_prefixes(engine: Engine, shape: PrefixShape, own: np.ndarray) -> None:
    """Fill every child's copy with what the group's first one holds."""
    data, (prefixes, _) = engine.worker.kv.data, shape.lengths(engine.config.block_size)
    for row, blocks in enumerate(prefixes.repeat(shape.children).tolist()):
        first = row - row % shape.children
        if row != first:
            copy, its = (torch.from_numpy(own[each, :blocks].astype(np.int64)).to(data.device) for each in (row, first))
            data[copy] = data[its]


def compare(engine: Engine, batches: dict[str, Batch]) -> None:
    """Raise BenchFailed unless all variants have the same logits, to the bit."""
    want = forward(engine, batches["shared"]).clone()
    for name in batches:
        if not torch.equal(forward(engine, batches[name]), want):
            raise BenchFailed(f"{name} has other logits than shared")


def figures(
    shape: PrefixShape, engine: Engine, steps: dict[str, list[float]], alone: dict[str, list[float]], about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    base = {"workload": NAME, **shape._asdict()}
    step, attention = ({name: statistics.median(each) for name, each in times.items()} for times in (steps, alone))
    for name, each in steps.items():
        yield base | {
            "variant": name,
            "turns": len(each),
            "step_ms": round(step[name], 4),
            "step_ms_min": round(min(each), 4),
            "step_ms_max": round(max(each), 4),
            "attention_ms": round(attention[name], 4),
        }
    summary = base | {"summary": True, "step_ms": round(step["shared"], 4), "attention_ms": round(attention["shared"], 4)}
    for name in ("per_child", "copies"):
        if name in step:
            summary[f"ratio_to_{name}"] = round(step[name] / step["shared"], 4)
            summary[f"attention_ratio_to_{name}"] = round(attention[name] / attention["shared"], 4)
    yield summary | {
        **about,
        "kv_bytes": engine.worker.kv.data.nbytes,
        "attention": engine.worker.backend.name,
        "dtype": engine.config.dtype,
        "device": engine.config.device,
    }


def text(shape: PrefixShape) -> str:
    most = ", lognormal, at most" if shape.mixed else ""
    return f"{shape.groups} x {shape.children} over {shape.prefix} + {shape.suffix} tokens{most}"
