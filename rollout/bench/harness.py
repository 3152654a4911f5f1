"""What all benchmarks share: the options, the model and engine that they run on, and the errors."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from rollout import models
from rollout.bench.inputs import PromptSource, PromptText, RandomText
from rollout.bench.target import OpenTarget, open_engine, open_service
from rollout.engine.config import EngineConfig, IsaName, KVName
from rollout.engine.forward.shapes import is_random

Row = dict[str, Any]
"""an object of the JSON output; `summary` is true in the last one of a measurement"""


class BenchFailed(RuntimeError):
    """A run did not do the work that it was given, so its speed means nothing."""


class PeerFailed(BenchFailed):
    """Another engine did not start, exited, or sent an invalid result. Standard error has its messages."""


class BoundBroken(BenchFailed):
    """A run was faster than the measured bound of this machine, so one of the two measurements is wrong."""


class BenchOptions(msgspec.Struct, frozen=True):
    """Options of `rollout bench`. `rollout.commands.arguments.BenchArgs` describes them."""

    program: ClassVar[str] = "rollout bench"
    """what takes these options"""
    names: tuple[str, ...]
    model: str = "smollm2"
    in_process: bool = False
    scale: float = 1.0
    repeat: int = 3
    json_file: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int | None = None
    isa: IsaName = "auto"
    kv_dtype: KVName = "auto"
    device: str = "cpu"
    compare: bool = True
    unshared: bool = False
    undrafted: bool = False
    temperature: float = 1.0
    against: str = ""
    floor: bool = False
    tp: int = 1

    def words(self) -> list[str]:
        """Return the arguments that give these options."""
        spelled = {"json_file": "json", "isa": "engine.isa", "kv_dtype": "engine.kv-dtype"}
        words = list(self.names)
        for field in msgspec.structs.fields(self)[1:]:
            value, flag = getattr(self, field.name), spelled.get(field.name, field.name).replace("_", "-")
            if value == field.default:
                continue
            words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
        return words

    @property
    def command(self) -> str:
        return f"{self.program} {shlex.join(self.words())}"


class BenchSetup:
    """What a benchmark runs on. The model is resolved on first use, because some benchmarks need none."""

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.scale, self.repeat, self.threads = options.scale, options.repeat, options.threads

    @cached_property
    def folder(self) -> Path:
        """Return the model's folder. Raises ModelNotFound."""
        return models.resolve(self.options.model)

    @cached_property
    def text(self) -> PromptSource:
        """Return a text for prompts; of a shape, which has no tokenizer, random ids."""
        if is_random(self.folder):
            config = json.loads((self.folder / "config.json").read_text())
            return RandomText(config["vocab_size"])
        return PromptText(models.load_tokenizer(self.folder))

    @property
    def open_target(self) -> OpenTarget:
        return open_engine if self.options.in_process else open_service

    def config(self, **changes: Any) -> EngineConfig:
        """Return the engine's configuration for the options, with some fields changed."""
        fields: dict[str, Any] = {
            name: getattr(self.options, name) for name in ("dtype", "threads", "isa", "kv_dtype", "device")
        }
        if self.options.tp > 1:
            threads = self.threads or len(os.sched_getaffinity(0))
            fields |= {"tp": self.options.tp, "threads": max(1, threads // self.options.tp)}
        fields["model"] = changes["model"] if "model" in changes else str(self.folder)
        return EngineConfig(**(fields | changes))

    def scaled(self, tokens: int, at_least: int) -> int:
        """Multiply a number of tokens by `--scale`."""
        return max(at_least, round(tokens * self.scale))


class Benchmark(NamedTuple):
    """A measurement, and what it supports."""

    measure: Callable[[BenchSetup], Iterable[Row]]
    in_process: bool = True
    """False: it needs several processes"""
    any_kv: bool = False
    """KV may have another dtype than the model"""
    on_device: bool = False
    """it can run on a GPU"""
