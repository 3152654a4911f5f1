"""Starts a service from a configuration: shared by `rollout serve` of an engine, a router and a replica."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.commands import lines
from rollout.commands.interrupt import INTERRUPTED
from rollout.commands.progress import Phases, nothing
from rollout.config import CannotServe, Config, InputError, TrackingConfig
from rollout.engine.forward.shapes import is_random
from rollout.engine.values import Mode
from rollout.metrics.sinks import Sink, open_sinks
from rollout.metrics.tracker import Tracker
from rollout.service.engine_api import live_of
from rollout.transport.sockets import ServiceEnd

if TYPE_CHECKING:
    from rollout.engine.config import EngineConfig
    from rollout.engine.engine import Engine
    from rollout.service.engine_api import EngineLike
    from rollout.service.journal import Journal
    from rollout.service.loop import Service
    from rollout.service.recording import Ledger


Make = Callable[[Config, Phases], Any]
"""makes the engine of a configuration"""


def start(config: Config, progress: Phases, make: Make | None = None) -> tuple[EngineLike, Service]:
    """Make the engine with `make`, by default `load`, and listen. Closes everything again if it raises: InputError,
    CannotServe."""
    with ExitStack() as started:
        try:
            # report a port in use, or unusable keys or journal, before a model is loaded
            ServiceEnd(config.service.endpoint, config.limits, config.service.keys).close()
            journal, ledger = open_journal(config), open_ledger(config)
            for file in (journal, ledger):
                if file is not None:
                    started.callback(file.close)
            sinks = open_sinks(config.tracking, config.engine.model)
            for sink in sinks:
                started.callback(sink.close)
            engine = (make or load)(config, progress)
            tracker = make_tracker(config.tracking, sinks, engine)
            service = listen(config, engine, journal, ledger, tracker, progress)
        except ValueError as error:  # a configuration that this model or machine cannot serve
            raise InputError(str(error)) from error
        started.pop_all()  # the service closes them
    return engine, service


def listen(
    config: Config,
    engine: EngineLike,
    journal: Journal | None,
    ledger: Ledger | None,
    tracker: Tracker,
    progress: Phases,
) -> Service:
    """Make the service of an engine or a fleet; it closes the journal, the ledger and the tracker. Raises ValueError."""
    from rollout.service.build import open_service

    progress.begin("computing the digest of the weights")
    _ = live_of(engine), engine.tokenizer  # computes both digests now, so that no client waits for them
    name = config.service.served_model_name or config.engine.model
    served = msgspec.structs.replace(config.service, served_model_name=name)
    return open_service(engine, served, journal=journal, ledger=ledger, tracker=tracker)


def open_journal(config: Config) -> Journal | None:
    """Open the journal, if one is configured. Raises InputError."""
    from rollout.service.journal import Journal

    return None if config.service.journal is None else Journal(config.service.journal, config.engine.model)


def open_ledger(config: Config) -> Ledger | None:
    """Open the ledger, if one is configured. Raises InputError."""
    from rollout.ledger.writer import LedgerWriter

    service = config.service
    if service.ledger is None:
        return None
    most_bytes = int(service.ledger_gib * 2**30)
    return LedgerWriter(service.ledger, most_bytes, prompts=service.ledger_prompts, tokens=service.ledger_tokens)


def load(config: Config, progress: Phases) -> Engine:
    """Make the engine of `config.engine`; downloads its model if necessary. Raises CannotServe, ValueError."""
    progress.begin("importing torch and transformers")
    from rollout import models

    with models.without_collection():
        import torch

        from rollout.engine.engine import Engine
        from rollout.engine.forward.load import BrokenModel
        from rollout.engine.forward.model import UnsupportedModel

    models.hide_progress_bars()
    name = config.engine.model
    try:
        progress.begin(f"fetching {name} from the Hugging Face Hub" if models.is_on_hub(name) else f"opening {name}")
        folder = models.resolve(name)
        progress.begin(kernels_phase(config.engine))
        engine = Engine(msgspec.structs.replace(config.engine, model=str(folder)), limits=config.limits, report=progress.begin)
    except (models.ModelNotFound, BrokenModel, UnsupportedModel) as error:
        raise CannotServe(str(error)) from error
    loaded = progress.took("loading")
    if is_random(folder):
        size = lines.bytes_of(engine.weights.inventory.nbytes)
        progress.say(
            f"{name}: {size} of random weights as {config.engine.dtype}, drawn in {loaded:.1f} s; prompts are token ids"
        )
    else:
        where = "" if folder == Path(name).absolute() else f" from {folder}"
        size = lines.bytes_of(lines.weights_bytes(folder))
        progress.say(f"{name}: {size}{where} as {config.engine.dtype}, loaded in {loaded:.1f} s")
    threads = torch.get_num_threads() if config.engine.device == "cpu" else None
    for line in lines.engine_lines(engine.status(), threads):
        progress.say(line)
    return engine


def kernels_phase(config: EngineConfig) -> str:
    """Name the phase in which the kernels are opened or compiled. Raises ValueError for an unknown instruction set."""
    from rollout.engine.cpu import build, isa

    if config.device != "cpu":
        return f"opening {config.device}"
    name = isa.best() if config.isa == "auto" else config.isa
    if name == "torch" or build.is_built(name):
        return f"opening the {name} kernels" if name != "torch" else "opening no kernels (isa = torch)"
    return f"compiling the {name} kernels, once for this machine"


def make_tracker(config: TrackingConfig, sinks: list[Sink], engine: Any) -> Tracker:
    """Make the tracker of these sinks, with the audit if enabled."""
    if not config.audit_every:
        return Tracker(config, sinks)
    if engine.worker.config.tp > 1:
        raise ValueError("audit_every with tp > 1: no rank has the whole model for a plain forward; leave one of them out")
    from rollout.metrics.audit import Audit

    ready = lambda: engine.mode not in (Mode.ASLEEP, Mode.WITHOUT_WEIGHTS)  # noqa: E731
    return Tracker(config, sinks, Audit(engine.model.module, config, streamed=engine.model.streamed, ready=ready))


class Stopper:
    """Handles SIGINT and SIGTERM: they stop the service; before it exists, they exit the process.

    write: takes the line that says so, in a signal handler."""

    def __init__(self, write: Callable[[str], None] = nothing) -> None:
        self.service_stop: Callable[[], None] | None = None
        self.stopping: Callable[[], str] = lambda: "stopped before it served"
        """describes what stops"""
        self.asked = False
        self.status = 0
        """exit status of the process when it stops"""
        self._write = write
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def serves(self, stop: Callable[[], None], stopping: Callable[[], str]) -> None:
        """Let signals call `stop` from now on; at once, if one has come."""
        self.service_stop, self.stopping = stop, stopping
        if self.asked:
            stop()

    def ask(self, status: int = 0) -> None:
        """Stop the process as a signal does, with another exit status. For any thread."""
        self.status = status
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self._write(f"rollout serve: {self.stopping()}")
        self.asked = True
        if number == signal.SIGINT:
            self.status = INTERRUPTED
        if self.service_stop is None:
            raise SystemExit(self.status)  # lost if Python runs a finalizer just then
        self.service_stop()
