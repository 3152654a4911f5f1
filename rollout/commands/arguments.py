"""The command line: a struct for each command, whose docstrings are its help, and `parse`, which tyro does the work of."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import tyro

from engine.config import IsaName, KVName, WeightOffload
from engine.types import Sampling
from rollout import config as configuration
from rollout.config import DEFAULT_ENDPOINT, Config, InputError
from transport.keys.files import DEFAULT_FILE, Role

Settings = Annotated[Config, tyro.conf.arg(name="")]


class ServeArgs(msgspec.Struct, kw_only=True):
    """Serve a model until Ctrl-C or SIGTERM. Flags win over the TOML file, the file over the defaults."""

    settings: Settings = Config()
    config: str | None = None
    """TOML file with tables [engine], [service], [limits], [tracking], [fleet]"""
    model: str | None = None
    """short for --engine.model"""
    journal: str | None = None
    """short for --service.journal"""
    metrics_port: int | None = None
    """short for --tracking.metrics-port"""
    replicas: int | None = None
    """short for --fleet.replicas"""
    listen_replicas: str | None = None
    """short for --fleet.listen-replicas"""
    join: str | None = None
    """short for --fleet.join"""
    ray: str | None = None
    """short for --fleet.ray; without a value: local"""
    ready_file: str | None = None
    """file that appears, holding the endpoint, once the service listens"""
    exit_on_stdin_close: bool = False
    """stop when standard input ends, for parents that may die without a word"""
    restart: bool = False
    """stay as the parent of the service, and start it again, at the same address, when it dies or when its loop stands for
    --service.exit-when-stalled-s, 10 stall_s if unset; with --journal it goes on with what it had"""


class KeysArgs(msgspec.Struct, kw_only=True):
    """Make and revoke keys. A running service reads changes within a second."""

    action: tyro.conf.Positional[Literal["init", "add", "revoke", "show"]]
    """init: make the key file of a service; add: make a key for a client, in a connection file that names the service as well;
    revoke: take a client's key back; show: list the keys"""
    name: tyro.conf.Positional[str] = ""
    """of the client, for add and revoke"""
    file: str = DEFAULT_FILE
    """the service's key file"""
    address: str = ""
    """init: where clients will reach the service, tcp://HOST:PORT; add: where this client does, if elsewhere, as replicas do"""
    role: tuple[Role, ...] = ()
    """add: what the key is for: rollout = groups, weights = refreshes, admin = pause, drain, sleep and abort all, read = status
    and metrics, replica = `rollout serve --join`"""
    out: str | None = None
    """add: the connection file to make; NAME.json beside the key file if left out"""


class StatusArgs(msgspec.Struct, kw_only=True):
    """Print the status of a running service as JSON."""

    address: str = DEFAULT_ENDPOINT
    """of the service, or a connection file"""
    timeout: float = 10.0
    """seconds to wait for the service"""
    wait: float = 0.0
    """seconds to go on asking where nobody listens or the loop stands; which of them it is goes to standard error"""


class FleetArgs(msgspec.Struct, kw_only=True):
    """Change the replicas of a running fleet. Returns when that has begun; `rollout top` shows the rest."""

    action: tyro.conf.Positional[Literal["scale", "drain", "roll"]]
    """scale: have so many replicas; drain: let one finish what it runs, and go; roll: restart all, in turn"""
    what: tyro.conf.Positional[str] = ""
    """of scale: how many replicas; of drain: which one"""
    address: str = DEFAULT_ENDPOINT
    """of the service, or a connection file"""
    timeout: float = 60.0
    """seconds to wait for the service"""


class TopArgs(msgspec.Struct, kw_only=True):
    """Watch a running service; Ctrl-C ends it."""

    address: str = DEFAULT_ENDPOINT
    """of the service, or a connection file"""
    interval: float = 1.0
    """seconds between two looks"""
    once: bool = False
    """print one picture and end, for scripts"""
    timeout: float = 10.0
    """seconds to wait for the service"""


class GenerateArgs(msgspec.Struct, kw_only=True):
    """Sample completions of the prompts in a JSONL file. Writes a JSON object for each sample, as soon as that ends."""

    prompts: str
    """JSONL file; a line is {"messages": [...]}, {"prompt": "text"} or {"token_ids": [...]}, with an "id" if you like"""
    out: str
    """JSONL file to write; - is standard output"""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling()
    address: str | None = None
    """of a running service, or a connection file; without it a service is started for this run"""
    settings: Settings = Config()
    config: str | None = None
    """TOML file for the service that is started"""
    model: str | None = None
    """short for --engine.model; with --address: where the tokenizer is, if not where the service says"""


class DemoArgs(msgspec.Struct, kw_only=True):
    """A small real model answers the groups of a trainer, over ZeroMQ."""

    model: str = "smollm2"
    """smollm2, a folder, or a hub id"""
    n: int = 8
    """samples of each prompt"""
    max_tokens: int = 48
    """longest answer"""


class HttpArgs(msgspec.Struct, kw_only=True):
    """Speak the HTTP dialects of vLLM, OpenAI and SGLang in front of a running service. docs/http.md lists the routes."""

    address: str = DEFAULT_ENDPOINT
    """of the service, or a connection file"""
    host: str = "127.0.0.1"
    """address to listen at; any other than loopback needs --token-file"""
    port: int = 8000
    """0 = a free one"""
    admin_host: str = "127.0.0.1"
    """address of --admin-port"""
    admin_port: int | None = None
    """port of its own for pause, weights and sleep; without it they are on --port"""
    token_file: str | None = None
    """file with the token that requests must bring as Authorization: Bearer; nobody but its owner may read it"""
    allowed_hosts: tuple[str, ...] = ()
    """names by which requests call this process (Host), besides loopback's and those of --host: what a proxy passes on"""
    model_name: tuple[str, ...] = ()
    """names by which requests call the model; without it the service's own"""
    tokenizer: str | None = None
    """folder or hub id, if the tokenizer is not where the service says its model is"""
    overlong: Literal["refuse", "empty"] = "refuse"
    """a prompt that leaves no room for max_tokens: 400, or as many tokens as there is room for"""
    ready_file: str | None = None
    """file that appears, holding the URL and the administrators' URL, once it listens"""


class BenchArgs(msgspec.Struct, kw_only=True):
    """Run named workloads through the whole service and print a table."""

    names: tyro.conf.Positional[tuple[str, ...]]
    """workloads; a wrong name prints the list"""
    model: str = "smollm2"
    """smollm2, a folder, or a hub id"""
    in_process: bool = False
    """drive the engine directly, without sockets and a second process"""
    scale: float = 1.0
    """factor on prompt and new tokens (at least a block of each, unless the workload has less)"""
    repeat: int = 3
    """runs of each workload; the summary is their median"""
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None
    """file that gets one JSON object a run and one a workload; - is standard output"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int | None = None
    """CPU threads of the engine; unset: torch's choice"""
    isa: Annotated[IsaName, tyro.conf.arg(name="engine.isa")] = "auto"
    """instruction set of the service, as in `rollout serve`"""
    kv_dtype: Annotated[KVName, tyro.conf.arg(name="engine.kv-dtype")] = "auto"
    """KV of the service, as in `rollout serve`"""
    device: str = "cpu"
    """of workloads and `sharing`; cuda needs a GPU"""
    compare: bool = True
    """run a workload whose KV pool is too small in turn with a roomy pool and with offload off, and print the ratios"""
    unshared: bool = False
    """run in turn with attention that reads a shared prefix once for each child, and print the ratios"""
    undrafted: bool = False
    """run in turn with drafts off, and print the ratios"""
    temperature: float = 1.0
    """at which workloads draw"""
    against: str = ""
    """other engines that take turns with ours: vllm=PYTHON,transformers_cb,transformers (rollout/bench/peers)"""
    floor: bool = False
    """measure what bounds each workload on this machine and print the share reached; --against does so too"""
    replicas: int = 2
    """of the fleet that `fleet` measures"""


Command = ServeArgs | HttpArgs | GenerateArgs | StatusArgs | TopArgs | FleetArgs | KeysArgs | BenchArgs | DemoArgs


def commands(settings: Config) -> dict[str, Command]:
    """Name the commands of `rollout` and what each is without a flag; `settings`: the configuration flags are laid over."""
    return {
        "serve": ServeArgs(settings=settings),
        "generate": GenerateArgs(prompts=tyro.MISSING, out=tyro.MISSING, settings=settings),
        "status": StatusArgs(),
        "top": TopArgs(),
        "fleet": FleetArgs(action=tyro.MISSING),
        "keys": KeysArgs(action=tyro.MISSING),
        "http": HttpArgs(),
        "bench": BenchArgs(names=tyro.MISSING),
        "demo": DemoArgs(),
    }


DESCRIPTIONS = {
    "serve": "serve a model until Ctrl-C or SIGTERM",
    "generate": "sample completions of the prompts in a JSONL file",
    "status": "print the status of a running service",
    "top": "watch a running service",
    "fleet": "change the replicas of a running fleet",
    "keys": "make and revoke the keys of clients",
    "http": "speak HTTP in front of a running service",
    "bench": "run named workloads and print a table",
    "demo": "watch a small real model answer a trainer's groups",
}


def parse(argv: list[str]) -> Command:
    """Lay the command line over the TOML file that `--config` names, and that over the defaults.

    Raises:
        InputError: the file cannot be read or holds what it may not.
        SystemExit: status 2 and the mistake on standard error, or 0 after `--help`.
    """
    argv = with_ray_address(argv)
    path = config_file(argv)
    base = Config() if path is None else configuration.load(path)
    offload = base.engine.weight_offload
    named = commands(with_offload(base, offload or WeightOffload()))  # --help lists its flags, on or off
    line = tyro.extras.subcommand_type_from_defaults(named, DESCRIPTIONS)
    args: Command = tyro.cli(line, args=argv, prog="rollout", config=(tyro.conf.AvoidSubcommands,))
    asked = any(word.replace("_", "-").startswith("--engine.weight-offload.") for word in argv)
    if isinstance(args, ServeArgs | GenerateArgs) and offload is None and not asked:
        args.settings = with_offload(args.settings, None)
    return args


def with_ray_address(argv: list[str]) -> list[str]:
    """Write "local" behind a `--ray` that has no value: tyro knows no flag whose value may be left out."""
    words: list[str] = []
    for word, following in zip(argv, [*argv[1:], "--"], strict=False):
        words += [word, "local"] if word == "--ray" and following.startswith("--") else [word]
    return words


def config_file(argv: list[str]) -> str | None:
    """Find what `--config` names: it has to be read before tyro is told the defaults."""
    path = None
    for i, word in enumerate(argv):
        if word == "--config" and i + 1 < len(argv):
            path = argv[i + 1]
        elif word.startswith("--config="):
            path = word.removeprefix("--config=")
    return path


def with_offload(config: Config, offload: WeightOffload | None) -> Config:
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, weight_offload=offload))


def with_journal(config: Config, journal: str | None) -> Config:
    if journal is None:
        return config
    return msgspec.structs.replace(config, service=msgspec.structs.replace(config.service, journal=journal))


def with_metrics_port(config: Config, port: int | None) -> Config:
    if port is None:
        return config
    try:
        return msgspec.structs.replace(config, tracking=msgspec.structs.replace(config.tracking, metrics_port=port))
    except ValueError as error:
        raise InputError(str(error)) from None


def with_model(config: Config, model: str | None) -> Config:
    if model is None:
        return config
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, model=model))
