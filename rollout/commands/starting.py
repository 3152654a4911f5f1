"""Starts a service from a configuration: shared by `rollout serve` of an engine, a router and a replica."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.config import CannotServe, Config, InputError, TrackingConfig
from rollout.engine.types import Mode
from rollout.metrics.sinks import Sink, open_sinks
from rollout.metrics.tracker import Tracker
from rollout.service.engine_api import live_of
from rollout.transport.sockets import ServiceEnd

if TYPE_CHECKING:
    from rollout.engine.engine import Engine
    from rollout.service.engine_api import EngineLike
    from rollout.service.journal import Journal
    from rollout.service.loop import Service


def start(config: Config, make: Callable[[Config], Any] | None = None) -> tuple[EngineLike, Service]:
    """Make the engine with `make`, by default `load`, and listen. Closes everything again if it raises: InputError,
    CannotServe."""
    with ExitStack() as started:
        try:
            # report a port in use, or unusable keys or journal, before a model is loaded
            ServiceEnd(config.service.endpoint, config.limits, config.service.keys).close()
            journal = open_journal(config)
            if journal is not None:
                started.callback(journal.close)
            sinks = open_sinks(config.tracking)
            for sink in sinks:
                started.callback(sink.close)
            engine = (make or load)(config)
            tracker = make_tracker(config.tracking, sinks, engine)
            service = listen(config, engine, journal, tracker)
        except ValueError as error:  # a configuration that this model or machine cannot serve
            raise InputError(str(error)) from error
        started.pop_all()  # the service closes them
    return engine, service


def listen(config: Config, engine: EngineLike, journal: Journal | None, tracker: Tracker) -> Service:
    """Make the service of an engine or a fleet; it closes the journal and the tracker. Raises ValueError."""
    from rollout.service.loop import open_service

    live_of(engine)  # computes the digest of the weights now, so that no client waits for it
    return open_service(engine, config.service, journal=journal, tracker=tracker)


def open_journal(config: Config) -> Journal | None:
    """Open the journal, if one is configured. Raises InputError."""
    from rollout.service.journal import Journal

    return None if config.service.journal is None else Journal(config.service.journal, config.engine.model)


def load(config: Config) -> Engine:
    """Make the engine of `config.engine`; downloads its model if necessary. Raises CannotServe, ValueError."""
    from rollout import models
    from rollout.engine.engine import Engine
    from rollout.engine.forward.model import BrokenModel, UnsupportedModel

    models.hide_progress_bars()
    try:
        folder = models.resolve(config.engine.model)
        return Engine(msgspec.structs.replace(config.engine, model=str(folder)), limits=config.limits)
    except (models.ModelNotFound, BrokenModel, UnsupportedModel) as error:
        raise CannotServe(str(error)) from error


def make_tracker(config: TrackingConfig, sinks: list[Sink], engine: Any) -> Tracker:
    """Make the tracker of these sinks, with the audit if enabled."""
    if not config.audit_every:
        return Tracker(config, sinks)
    from rollout.metrics.audit import Audit

    ready = lambda: engine.mode not in (Mode.ASLEEP, Mode.WITHOUT_WEIGHTS)  # noqa: E731
    return Tracker(config, sinks, Audit(engine.model.module, config, streamed=engine.model.streamed, ready=ready))


class Stopper:
    """Handles SIGINT and SIGTERM: they stop the service; before it exists, they exit the process."""

    def __init__(self) -> None:
        self.service_stop: Callable[[], None] | None = None
        self.asked = False
        self.status = 0
        """exit status of the process when it stops"""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def ask(self, status: int = 0) -> None:
        """Stop the process as a signal does, with another exit status. For any thread."""
        self.status = status
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.service_stop is None:
            raise SystemExit(self.status)  # lost if Python runs a finalizer just then
        self.service_stop()
