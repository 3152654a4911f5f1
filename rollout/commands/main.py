"""The command `rollout`. Exit status: 0 = success; 1 = error, with its reason on standard error; 2 = wrong usage, or a model
that cannot be served; 3 = the device, or a rank of the replica, is lost; 130 = stopped by Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

import msgspec

from rollout.commands import arguments, extras
from rollout.commands.arguments import (
    BenchArgs,
    BisectArgs,
    Command,
    ControlArgs,
    DemoArgs,
    FleetArgs,
    GenerateArgs,
    HttpArgs,
    KeysArgs,
    LedgerArgs,
    ReplayArgs,
    ServeArgs,
    StatusArgs,
    TopArgs,
    UsageError,
)
from rollout.commands.connecting import connected
from rollout.commands.interrupt import INTERRUPTED, imports_end
from rollout.config import CannotServe, Config, InputError
from rollout.engine.values import DeviceLost
from rollout.models import ModelNotFound
from rollout.process import ServiceFailed
from rollout.transport.errors import RolloutError
from rollout.transport.keys.files import BadKeys

LOST = 3
MODULES: dict[type, str] = {
    ServeArgs: "serve",
    HttpArgs: "http",
    StatusArgs: "status",
    KeysArgs: "keys",
    LedgerArgs: "ledger",
    BisectArgs: "bisect",
    ReplayArgs: "replay",
}
"""modules whose `run` takes the arguments of a command as they are"""


def main(argv: list[str] | None = None) -> int:
    """Run one command. argv: its arguments; None = those of this process. Returns the exit status."""
    # Spinning threads waste a time slice each if another process needs the core. libgomp reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    words = sys.argv[1:] if argv is None else argv
    name = " ".join(["rollout", *words[:1]])
    if words[:1] == ["--version"]:
        from rollout.commands import version

        print("\n".join(version.lines()))
        return 0
    try:
        command = command_of(arguments.parse(words))
        imports_end()
        status = command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return INTERRUPTED
    except UsageError as error:
        print(f"rollout: {error}", file=sys.stderr)
        return 2
    except (BadKeys, CannotServe, InputError, ModelNotFound, RolloutError, ServiceFailed) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, CannotServe) else 1
    except DeviceLost as error:
        print(f"{name}: {error}; start it again, or let --restart, or torchrun's --max-restarts, do so", file=sys.stderr)
        return LOST
    except ModuleNotFoundError as error:
        advice = extras.missing(error, words[0] if words else "")
        if advice is None:
            raise
        print(f"{name}: {advice}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader closed standard output, for example `head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  otherwise Python reports another error at exit
        return 1


def command_of(args: Command) -> Callable[[], int]:
    """Import only the modules of this command. Returns a function that runs it and returns the exit status."""
    if (module := MODULES.get(type(args))) is not None:
        return partial(import_module(f"rollout.commands.{module}").run, args)
    match args:
        case GenerateArgs():
            from rollout.commands import generate

            if args.address is not None and args.settings != Config():
                raise InputError(
                    "--address uses a running service, so settings of a service have no effect: leave one of them out"
                )
            config = arguments.with_model(args.settings, args.model)
            tokenizer = args.model if args.address else None
            files = generate.RunFiles(args.prompts, args.out, args.resume)
            return partial(generate.run, files, args.sampling, args.address, config, tokenizer=tokenizer)
        case ControlArgs():
            from rollout.commands import control

            return partial(control.run, args)
        case FleetArgs():
            return partial(fleet, args)
        case TopArgs():
            from rollout.commands import top

            return partial(top.run, args.address, interval_s=args.interval, timeout_s=args.timeout, once=args.once)
        case BenchArgs():
            return bench(args)
        case DemoArgs():
            from rollout.commands import demo

            return partial(demo.run, args.model, args.n, args.max_tokens)
    raise AssertionError(f"no command takes {type(args).__name__}")


def fleet(args: FleetArgs) -> int:
    """Change the replicas of a running fleet. Raises InputError, InvalidRequest, ServiceLost, RequestTimeout."""
    if args.action == "scale" and not args.what.isdecimal():
        raise InputError(f"scale {args.what!r}: say how many replicas, as in `rollout fleet scale 4`")
    if args.action == "drain" and not args.what:
        raise InputError("drain: say which replica, as in `rollout fleet drain 2`; `rollout top` shows their names")
    if args.action == "roll" and args.what:
        raise InputError(f"roll {args.what!r}: restarts all replicas, so leave {args.what!r} out")
    with connected(args.address, "rollout fleet", args.timeout) as client:
        count = int(args.what) if args.action == "scale" else 0
        client.change_replicas(args.action, count=count, name=args.what, timeout=args.timeout)
    return 0


def bench(args: BenchArgs) -> Callable[[], int]:
    """Import the benchmarks, which only a checkout has. Returns a function that runs them and returns the exit status. Raises
    InputError for an installed wheel."""
    try:
        from rollout.bench import BenchFailed, BenchOptions, run
    except ModuleNotFoundError as error:
        if error.name != "rollout.bench":
            raise
        raise InputError("the benchmarks are not installed with the package: run them in a checkout of its sources") from error

    def measure() -> int:
        try:
            return run(BenchOptions(**msgspec.structs.asdict(args)))
        except BenchFailed as error:
            print(f"rollout bench: {error}", file=sys.stderr)
            return 1

    return measure
