"""`rollout serve`: from a configuration to a service that runs until a signal stops it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rollout.commands import lines
from rollout.commands.arguments import ServeArgs, with_address, with_journal, with_ledger, with_metrics_port, with_model
from rollout.commands.progress import Phases, nothing, write_line
from rollout.commands.starting import Stopper, open_journal, start
from rollout.config import Config, InputError
from rollout.process import Folder, check_ready_file, write_atomically
from rollout.service.watchdog import Watchdog

if TYPE_CHECKING:
    from rollout.service.loop import Service


def run(args: ServeArgs) -> int:
    """Serve until a signal, or with `exit_on_stdin_close` the end of standard input. Returns the exit status.

    Raises InputError for a configuration that this model or machine cannot serve, CannotServe for the model itself.
    """
    write = nothing if args.quiet else write_line
    config = configured(args)
    check_ready_file(args.ready_file)
    if config.engine.tp_launcher == "torchrun":
        from rollout.commands import serve_rank

        place = serve_rank.position(config, args)
        if place.rank:
            return serve_rank.follow(config, place)
    stop = Stopper(write)
    if args.exit_on_stdin_close:
        threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    if args.restart:
        return keep_serving(config, stop, args)
    with ExitStack() as stack:
        progress = stack.enter_context(Phases("rollout serve", write))
        service = stack.enter_context(opened(config, stop, progress))
        stop.serves(service.stop, lambda: lines.stopping_line(service.unfinished))
        progress.close()
        with suppress(BrokenPipeError):  # the parent may have closed the pipe
            print(f"rollout: serving {config.engine.model} at {service.endpoint}, {lines.clients_of(config)}", flush=True)
        progress.say(f"ready in {progress.seconds:.1f} s; Ctrl-C stops it")
        for line in lines.next_lines(service.endpoint, config):
            progress.say(line)
        if args.ready_file:
            write_atomically(Path(args.ready_file), service.endpoint)
        watchdog = Watchdog(service.watch, config.service.exit_when_stalled_s)
        stack.callback(watchdog.close)
        serve_on(service)
        progress.say(lines.stopped_line(service.status()))
    return stop.status


@contextmanager
def opened(config: Config, stop: Stopper, progress: Phases) -> Iterator[Service]:
    """Start the service of a router, of a replica or of an engine."""
    if config.fleet.is_router:
        from rollout.commands import serve_fleet

        with serve_fleet.fleet_service(config, open_journal(config), progress) as service:
            yield service
    elif config.fleet.join is not None:
        from rollout.commands import serve_replica

        with serve_replica.joined_service(config, stop, progress) as service:
            yield service
    else:
        _, service = start(config, progress)
        yield service


def keep_serving(config: Config, stop: Stopper, args: ServeArgs) -> int:
    """Serve in one process after the other until a signal. Returns the exit status."""
    from rollout.commands.supervise import Supervisor, serving

    with Folder("serve") as folder:
        supervisor = Supervisor(serving(config, folder, quiet=args.quiet), args.ready_file)
        stop.serves(supervisor.stop, lambda: "stopping the service")
        return supervisor.run() or stop.status


def serve_on(service: Service) -> None:
    """Run a service, whose process looks for garbage among what it makes from here on: among all of torch that takes a fifth of
    a second, in the middle of a turn."""
    gc.collect()
    gc.freeze()
    try:
        service.run()
    finally:
        gc.unfreeze()  # libraries report what is never collected as leaked, on the last screen that a user sees


def configured(args: ServeArgs) -> Config:
    """Lay the short flags over the configuration. Raises InputError."""
    if args.positional and args.model is not None:
        raise InputError(f"{args.positional} and --model {args.model}: give the model once")
    config = with_address(with_model(args.settings, args.positional or args.model), args.host, args.port)
    config = with_metrics_port(with_ledger(with_journal(config, args.journal), args), args.metrics_port)
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
