"""The benchmarks that are no workload, by name: what each runs, and where it can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from engine.config import EngineConfig
from rollout.bench import (
    delta,
    fidelity,
    fleet,
    host,
    http,
    keys,
    lora,
    products,
    refresh,
    score,
    sharing,
    train_step,
    turns,
)
from rollout.bench.inputs import PromptText
from rollout.bench.target import OpenTarget

Row = dict[str, Any]


class BenchArguments(NamedTuple):
    """What the command was asked for."""

    folder: Path
    """of the model"""
    text: PromptText
    engine: EngineConfig
    open_target: OpenTarget
    scale: float
    repeat: int
    replicas: int


class Benchmark(NamedTuple):
    """A measurement that yields its own rows, and where it can run."""

    rows: Callable[[BenchArguments], Iterable[Row]]
    between_processes: bool = False
    """it cannot be measured in one process"""
    any_kv: bool = False
    """KV may be kept in any dtype"""
    on_a_device: bool = False
    """it can be measured on a GPU"""


WITHOUT_MODEL: dict[str, Callable[[float, int | None], Iterable[Row]]] = {
    host.NAME: lambda scale, threads: (host.measure(each, scale, threads) for each in host.SEQUENCES),
    products.NAME: lambda scale, threads: products.measure(scale, threads),
    keys.NAME: lambda scale, _: keys.measure(scale),
}
"""by the scale and the number of threads"""
WITH_MODEL = {
    refresh.NAME: Benchmark(
        lambda it: refresh.measure(it.folder, it.engine.dtype, it.engine.threads, it.repeat, it.text), between_processes=True
    ),
    lora.NAME: Benchmark(lambda it: [lora.measure(it.folder, it.engine, it.text, it.scale)], between_processes=True),
    delta.NAME: Benchmark(lambda it: [delta.measure(it.folder, it.engine, it.text, it.scale)], between_processes=True),
    fidelity.NAME: Benchmark(
        lambda it: [fidelity.measure(it.text, it.engine, it.folder, it.open_target, it.scale)], any_kv=True
    ),
    score.NAME: Benchmark(lambda it: score.measure(it.text, it.engine, it.folder, it.scale, it.repeat)),
    train_step.NAME: Benchmark(lambda it: train_step.measure(it.folder, it.engine, it.text, it.scale, it.repeat)),
    turns.NAME: Benchmark(lambda it: turns.measure(it.folder, it.engine, it.text, it.scale), between_processes=True),
    sharing.NAME: Benchmark(
        lambda it: sharing.measure_model(it.folder, it.engine, it.scale, it.repeat), any_kv=True, on_a_device=True
    ),
    fleet.NAME: Benchmark(
        lambda it: fleet.measure(it.folder, it.engine, it.scale, it.repeat, it.replicas), between_processes=True
    ),
    http.NAME: Benchmark(lambda it: http.measure(it.folder, it.engine, it.scale, it.repeat, it.text)),
}
SPECIAL = (*WITHOUT_MODEL, *WITH_MODEL)
"""names"""
