"""`rollout serve`: from a configuration to a service that runs until it is told to stop."""

from __future__ import annotations

import gc
import os
import signal
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rollout.commands.arguments import ServeArgs, with_journal, with_metrics_port, with_model
from rollout.commands.starting import Stopper, open_journal, start
from rollout.config import Config, InputError
from rollout.process import Folder, check_writable, write_atomically
from rollout.service.watchdog import Watchdog

if TYPE_CHECKING:
    from rollout.service.loop import Service


def run(args: ServeArgs) -> int:
    """Serve until a signal, or with `exit_on_stdin_close` the end of standard input. Returns the exit status.

    Raises InputError for a configuration that this model or machine cannot serve, CannotServe for the model itself.
    """
    config = configured(args)
    check_writable("--ready-file", args.ready_file)
    stop = Stopper()
    if args.exit_on_stdin_close:
        threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    if args.restart:
        return keep_serving(config, stop, args.ready_file)
    with ExitStack() as stack:
        if config.fleet.is_router:
            from rollout.commands import serve_fleet

            service = stack.enter_context(serve_fleet.fleet_service(config, open_journal(config)))
            told = serve_fleet.described(config)
        elif config.fleet.join is not None:
            from rollout.commands import serve_replica

            service = stack.enter_context(serve_replica.joined_service(config, stop))
            told = f"a replica of {config.fleet.join}"
        else:
            engine, service = start(config)
            told = f"KV {engine.status()['kv']}"
        stop.service_stop = service.stop
        if stop.asked:
            service.stop()
        with suppress(BrokenPipeError):  # whoever started it need not read on
            print(f"rollout: serving {config.engine.model} at {service.endpoint}, {clients_of(config)}, {told}", flush=True)
        if args.ready_file:
            write_atomically(Path(args.ready_file), service.endpoint)
        watchdog = Watchdog(service.watch, config.service.exit_when_stalled_s)
        stack.callback(watchdog.close)
        serve_on(service)
    return stop.status


def clients_of(config: Config) -> str:
    """Tell people who may connect."""
    router = config.fleet.join
    if router is not None and "://" not in router:
        return "for its router alone"  # by the keys that it makes for itself
    return "for this user on this host" if config.service.keys is None else "for those with keys"


def keep_serving(config: Config, stop: Stopper, ready_file: str | None) -> int:
    """Serve in one process after the other until a signal. Returns the exit status."""
    from rollout.commands.supervise import Supervisor, serving

    with Folder("serve") as folder:
        supervisor = Supervisor(serving(config, folder), ready_file)
        stop.service_stop = supervisor.stop
        return supervisor.run()


def serve_on(service: Service) -> None:
    """Run a service, whose process looks for garbage among what it makes from here on: among all of torch that takes a fifth of
    a second, in the middle of a turn."""
    gc.collect()
    gc.freeze()
    try:
        service.run()
    finally:
        gc.unfreeze()  # what is never collected is told as leaked by libraries, on the last screen that a user sees


def configured(args: ServeArgs) -> Config:
    """Lay the short flags over the configuration. Raises InputError."""
    config = with_metrics_port(with_journal(with_model(args.settings, args.model), args.journal), args.metrics_port)
    short = {"replicas": args.replicas, "listen_replicas": args.listen_replicas, "join": args.join, "ray": args.ray}
    try:
        fleet = msgspec.structs.replace(config.fleet, **{name: value for name, value in short.items() if value is not None})
        fleet.check()
    except ValueError as error:
        raise InputError(str(error)) from None
    return msgspec.structs.replace(config, fleet=fleet)


def _stop_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
