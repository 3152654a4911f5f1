"""The command `rollout`. Each command is a function of its arguments that returns an exit status.

0 = done, 1 = an error with its reason on standard error, 2 = wrong usage, or a model that cannot be served, 130 = stopped by
Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import tyro

from engine.config import IsaName, WeightOffload
from engine.types import Sampling
from rollout import config as configuration
from rollout.config import DEFAULT_ENDPOINT, Config, InputError, TrackingConfig
from rollout.metrics.sinks import Sink, open_sinks
from rollout.metrics.tracker import Tracker
from rollout.models import ModelNotFound
from rollout.process import ServiceFailed, write_atomically
from transport.errors import RolloutError
from transport.sockets import ServiceEnd

Settings = Annotated[Config, tyro.conf.arg(name="")]


class ServeArgs(msgspec.Struct, kw_only=True):
    """Serve a model until Ctrl-C or SIGTERM. Flags win over the TOML file, the file over the defaults."""

    settings: Settings = Config()
    config: str | None = None
    """TOML file with tables [engine], [service], [limits], [tracking]"""
    model: str | None = None
    """short for --engine.model"""
    ready_file: str | None = None
    """file that appears, holding the endpoint, once the service listens"""
    exit_on_stdin_close: bool = False
    """stop when standard input ends, for parents that may die without a word"""


class CannotServe(Exception):
    """The model is not there, is broken, or asks for what the engine does not compute; the message says which."""


class StatusArgs(msgspec.Struct, kw_only=True):
    """Print the status of a running service as JSON."""

    address: str = DEFAULT_ENDPOINT
    timeout: float = 10.0
    """seconds to wait for the service"""


class TopArgs(msgspec.Struct, kw_only=True):
    """Watch a running service; Ctrl-C ends it."""

    address: str = DEFAULT_ENDPOINT
    interval: float = 1.0
    """seconds between two looks"""
    once: bool = False
    """print one picture and end, for scripts"""
    timeout: float = 10.0
    """seconds to wait for the service"""


class GenerateArgs(msgspec.Struct, kw_only=True):
    """Sample completions of prompts in a JSONL file; one JSON object a sample comes out, in the order they finish."""

    prompts: str
    """JSONL file; a line is {"messages": [...]}, {"prompt": "text"} or {"token_ids": [...]}, with an "id" if you like"""
    out: str
    """JSONL file to write; - is standard output"""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling()
    address: str | None = None
    """a running service; without it one is started for this run"""
    settings: Settings = Config()
    config: str | None = None
    """TOML file for the service that is started"""
    model: str | None = None
    """short for --engine.model; with --address: where the tokenizer is, if not where the service says"""


class DemoArgs(msgspec.Struct, kw_only=True):
    """A small real model answers the groups of a trainer, over ZeroMQ."""

    model: str = "smollm2"
    n: int = 8
    """samples of each prompt"""
    max_tokens: int = 48
    """longest answer"""


class BenchArgs(msgspec.Struct, kw_only=True):
    """Run named workloads through the whole service and print a table."""

    names: tyro.conf.Positional[tuple[str, ...]]
    """workloads; a wrong name prints the list"""
    model: str = "smollm2"
    in_process: bool = False
    """drive the engine directly, without sockets and a second process"""
    scale: float = 1.0
    """factor on prompt and new tokens (at least a block of each, unless the workload has less)"""
    repeat: int = 3
    """runs of each workload; the summary is their median"""
    json: str | None = None
    """file that gets one JSON object a run and one a workload; - is standard output"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int | None = None
    isa: Annotated[IsaName, tyro.conf.arg(name="engine.isa")] = "auto"
    """instruction set of the service, as in `rollout serve`"""
    device: str = "cpu"
    """of workloads and `sharing`; cuda needs a GPU"""
    compare: bool = True
    """run a workload whose KV pool is too small in turn with a roomy pool and with offload off, and print the ratios"""
    unshared: bool = False
    """run in turn with attention that reads a shared prefix once for each child, and print the ratios"""
    against: str = ""
    """other engines that take turns with ours: vllm=PYTHON,transformers_cb,transformers (rollout/bench/peers)"""
    floor: bool = False
    """measure what bounds each workload on this machine and print the share reached; --against does so too"""
    plot: str | None = None
    """picture (.png, .svg) of tokens/s and KV over time, of the last run of each workload"""


def serve(argv: list[str]) -> int:
    args = parse(lambda base: ServeArgs(settings=base), argv, "rollout serve")
    config = with_model(args.settings, args.model)
    stop = Stopper()
    with ExitStack() as started:
        try:
            ServiceEnd(config.service.endpoint, config.limits).close()  # a port in use is told before a model is loaded
            sinks = open_sinks(config.tracking)
            for sink in sinks:
                started.callback(sink.close)
            from engine.engine import Engine
            from engine.forward.model import BrokenModel, UnsupportedModel
            from rollout import models
            from rollout.service.loop import Service

            models.hide_progress_bars()
            try:
                folder = models.resolve(config.engine.model)
                engine = Engine(msgspec.structs.replace(config.engine, model=str(folder)), limits=config.limits)
            except (ModelNotFound, BrokenModel, UnsupportedModel) as error:
                raise CannotServe(str(error)) from error
            service = Service(
                engine,
                config.service.endpoint,
                limits=config.limits,
                client_grace_s=config.service.client_grace_s,
                max_outbox_bytes=config.service.max_outbox_bytes,
                lease_s=config.service.lease_s,
                tracker=make_tracker(config.tracking, sinks, engine),
            )
        except ValueError as error:  # a configuration that this model or machine cannot serve
            raise InputError(str(error)) from error
        started.pop_all()  # the service closes them
    stop.service_stop = service.stop
    if stop.asked:
        service.stop()
    if args.exit_on_stdin_close:
        threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    kv = engine.status()["kv"]
    with suppress(BrokenPipeError):  # whoever started it need not read on
        print(f"rollout: serving {config.engine.model} at {service.endpoint}, KV {kv}", flush=True)
    if args.ready_file:
        write_atomically(Path(args.ready_file), service.endpoint)
    service.run()
    return 0


def make_tracker(config: TrackingConfig, sinks: list[Sink], engine: Any) -> Tracker:
    """With the audit, if it is on."""
    if not config.audit_every:
        return Tracker(config, sinks)
    from rollout.metrics.audit import Audit

    ready = lambda: not (engine.asleep or engine.weights.dropped)  # noqa: E731
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


def status(argv: list[str]) -> int:
    args = tyro.cli(StatusArgs, args=argv, prog="rollout status")
    from rollout.client.api import RolloutClient

    with RolloutClient(args.address, name="rollout status", connect_timeout_s=args.timeout) as client:
        print(json.dumps(client.status(timeout=args.timeout), indent=2))
    return 0


def top(argv: list[str]) -> int:
    args = tyro.cli(TopArgs, args=argv, prog="rollout top")
    if not args.interval > 0:
        raise InputError(f"--interval {args.interval}: must be positive")
    from rollout.commands.top import run

    return run(args.address, interval_s=args.interval, timeout_s=args.timeout, once=args.once)


def generate(argv: list[str]) -> int:
    args = parse(lambda base: GenerateArgs(prompts=tyro.MISSING, out=tyro.MISSING, settings=base), argv, "rollout generate")
    from rollout.commands.generate import run

    config = with_model(args.settings, args.model)
    return run(args.prompts, args.out, args.sampling, args.address, config, tokenizer=args.model if args.address else None)


def bench(argv: list[str]) -> int:
    args = tyro.cli(BenchArgs, args=argv, prog="rollout bench")
    try:
        from rollout.bench import BenchFailed, run
    except ModuleNotFoundError as error:
        raise InputError("the benchmarks are not installed with the package: run them in a checkout of its sources") from error

    try:
        return run(
            args.names,
            model=args.model,
            in_process=args.in_process,
            scale=args.scale,
            repeat=args.repeat,
            json_file=args.json,
            dtype=args.dtype,
            threads=args.threads,
            isa=args.isa,
            device=args.device,
            compare=args.compare,
            unshared=args.unshared,
            against=args.against,
            floor=args.floor,
            plot=args.plot,
        )
    except BenchFailed as error:
        print(f"rollout bench: {error}", file=sys.stderr)
        return 1


def demo(argv: list[str]) -> int:
    args = tyro.cli(DemoArgs, args=argv, prog="rollout demo")
    from rollout.commands.demo import run

    return run(args.model, args.n, args.max_tokens)


Args = TypeVar("Args", ServeArgs, GenerateArgs)


def parse(defaults: Callable[[Config], Args], argv: list[str], prog: str) -> Args:
    """Command line over TOML file over defaults. Raises InputError for the file; exits with status 2 for the line."""
    path = None
    for i, word in enumerate(argv):
        if word == "--config" and i + 1 < len(argv):
            path = argv[i + 1]
        elif word.startswith("--config="):
            path = word.removeprefix("--config=")
    base = configuration.load(path) if path is not None else Config()
    offload = base.engine.weight_offload
    default = defaults(with_offload(base, offload or WeightOffload()))  # --help lists its flags, on or off
    args = tyro.cli(type(default), args=argv, prog=prog, default=default, config=(tyro.conf.AvoidSubcommands,))
    if offload is None and not any(word.replace("_", "-").startswith("--engine.weight-offload.") for word in argv):
        args.settings = with_offload(args.settings, None)
    return args


def with_offload(config: Config, offload: WeightOffload | None) -> Config:
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, weight_offload=offload))


def with_model(config: Config, model: str | None) -> Config:
    if model is None:
        return config
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, model=model))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": serve,
    "generate": generate,
    "status": status,
    "top": top,
    "bench": bench,
    "demo": demo,
}

USAGE = """usage: rollout COMMAND [OPTIONS]      (rollout COMMAND --help lists the options)

  serve      serve a model until Ctrl-C or SIGTERM
  generate   sample completions of the prompts in a JSONL file
  status     print the status of a running service
  top        watch a running service
  bench      run named workloads and print a table
  demo       watch a small real model answer a trainer's groups"""


def main(argv: list[str] | None = None) -> int:
    # Threads that spin at every barrier cost a scheduler's quantum each when something else has a core. Read by libgomp when
    # torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"rollout: no command {name!r}\n{USAGE}", file=sys.stderr)
        return 2
    try:
        status = COMMANDS[name](rest)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"rollout {name}: stopped", file=sys.stderr)
        return 130
    except (CannotServe, InputError, ModelNotFound, RolloutError, ServiceFailed) as error:
        print(f"rollout {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, CannotServe) else 1
    except BrokenPipeError:  # whoever read standard output wants no more, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  or Python complains once more at its end
        return 1
