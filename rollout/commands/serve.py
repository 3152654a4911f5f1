"""`rollout serve`: from a configuration to a service that runs until it is told to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from engine.types import Mode
from rollout.commands.arguments import ServeArgs, with_journal, with_metrics_port, with_model
from rollout.config import CannotServe, Config, InputError, TrackingConfig
from rollout.metrics.sinks import Sink, open_sinks
from rollout.metrics.tracker import Tracker
from rollout.process import write_atomically
from rollout.service.watchdog import Watch, Watchdog
from transport.sockets import ServiceEnd

if TYPE_CHECKING:
    from engine.engine import Engine
    from rollout.service.journal import Journal
    from rollout.service.loop import Service


def run(args: ServeArgs) -> int:
    """Serve until a signal, or with `exit_on_stdin_close` the end of standard input. Returns the exit status.

    Raises InputError for a configuration that this model or machine cannot serve, CannotServe for the model itself.
    """
    config = with_metrics_port(with_journal(with_model(args.settings, args.model), args.journal), args.metrics_port)
    if args.replicas is not None:
        config = msgspec.structs.replace(config, fleet=msgspec.structs.replace(config.fleet, replicas=args.replicas))
    stop = Stopper()
    if args.exit_on_stdin_close:
        threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    with ExitStack() as stack:
        if config.fleet.replicas:
            from rollout.commands import serve_fleet

            service = stack.enter_context(serve_fleet.fleet_service(config, open_journal(config)))
            told = f"{config.fleet.replicas} replicas"
        else:
            engine, service = start(config)
            told = f"KV {engine.status()['kv']}"
        stop.service_stop = service.stop
        if stop.asked:
            service.stop()
        with suppress(BrokenPipeError):  # whoever started it need not read on
            who = "whoever can connect on this host may do everything" if config.service.keys is None else "for those with keys"
            print(f"rollout: serving {config.engine.model} at {service.endpoint}, {who}, {told}", flush=True)
        if args.ready_file:
            write_atomically(Path(args.ready_file), service.endpoint)
        watchdog = Watchdog(service.watch, config.service.exit_when_stalled_s)
        stack.callback(watchdog.close)
        service.run()
    return 0


def start(config: Config) -> tuple[Engine, Service]:
    """Load the model and listen. What it opened is closed again if it raises: InputError, CannotServe."""
    with ExitStack() as started:
        try:
            # a port in use, keys and a journal that cannot be used are told before a model is loaded
            ServiceEnd(config.service.endpoint, config.limits, config.service.keys).close()
            journal = open_journal(config)
            if journal is not None:
                started.callback(journal.close)
            sinks = open_sinks(config.tracking)
            for sink in sinks:
                started.callback(sink.close)
            engine = load(config)
            from rollout.service.loop import Service

            service = Service(
                engine,
                config.service.endpoint,
                keys=config.service.keys,
                journal=journal,
                limits=config.limits,
                client_grace_s=config.service.client_grace_s,
                max_outbox_bytes=config.service.max_outbox_bytes,
                lease_s=config.service.lease_s,
                tracker=make_tracker(config.tracking, sinks, engine),
                watch=Watch(config.service.stall_s),
            )
        except ValueError as error:  # a configuration that this model or machine cannot serve
            raise InputError(str(error)) from error
        started.pop_all()  # the service closes them
    return engine, service


def open_journal(config: Config) -> Journal | None:
    """Open the journal, if there is to be one. Raises InputError."""
    from rollout.service.journal import Journal

    return None if config.service.journal is None else Journal(config.service.journal, config.engine.model)


def load(config: Config) -> Engine:
    """Make the engine of `config.engine`, its model fetched if need be. Raises CannotServe, ValueError."""
    from engine.engine import Engine
    from engine.forward.model import BrokenModel, UnsupportedModel
    from rollout import models

    models.hide_progress_bars()
    try:
        folder = models.resolve(config.engine.model)
        return Engine(msgspec.structs.replace(config.engine, model=str(folder)), limits=config.limits)
    except (models.ModelNotFound, BrokenModel, UnsupportedModel) as error:
        raise CannotServe(str(error)) from error


def make_tracker(config: TrackingConfig, sinks: list[Sink], engine: Any) -> Tracker:
    """Make the tracker of these sinks, with the audit if it is on."""
    if not config.audit_every:
        return Tracker(config, sinks)
    from rollout.metrics.audit import Audit

    ready = lambda: engine.mode not in (Mode.ASLEEP, Mode.WITHOUT_WEIGHTS)  # noqa: E731
    return Tracker(config, sinks, Audit(engine.model.module, config, streamed=engine.model.streamed, ready=ready))


class Stopper:
    """SIGINT and SIGTERM: before the service exists they end the process, from then on they ask the service to stop."""

    def __init__(self) -> None:
        self.service_stop: Callable[[], None] | None = None
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.service_stop is None:
            raise SystemExit(0)  # which gets lost where Python is in a finalizer just then
        self.service_stop()


def _stop_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
