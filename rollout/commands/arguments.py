"""Command-line arguments: one struct per command, whose docstrings are its help; `parse` uses tyro."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_type_hints

import msgspec
import tyro

from rollout import config as configuration
from rollout.config import DEFAULT_ENDPOINT, Config, InputError, nearest
from rollout.engine.config import IsaName, KVName, WeightOffload
from rollout.engine.values import KVPolicy, Sampling, Tag
from rollout.transport.keys.files import DEFAULT_FILE, Role

LogLevel = Literal["debug", "info", "warning", "error"]
Settings = Annotated[Config, tyro.conf.arg(name="")]


class ServeArgs(msgspec.Struct, kw_only=True):
    """Serve a model until Ctrl-C or SIGTERM. Flags override the TOML file, and the file overrides the defaults."""

    positional: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = ""
    """smollm2, a folder, a Hugging Face Hub id, or shape:NAME"""
    settings: Settings = Config()
    config: str | None = None
    """TOML file with tables [engine], [service], [limits], [tracking], [fleet]"""
    model: str | None = None
    """short for --engine.model"""
    port: int | None = None
    """port of --service.endpoint; 0 = any free port"""
    host: str | None = None
    """bind address of --service.endpoint; any other than loopback needs --service.keys"""
    journal: str | None = None
    """short for --service.journal"""
    ledger: str | None = None
    """short for --service.ledger"""
    ledger_prompts: bool = False
    """short for --service.ledger-prompts"""
    ledger_tokens: bool = False
    """short for --service.ledger-tokens"""
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
    """write the endpoint to this file once the service listens"""
    exit_on_stdin_close: bool = False
    """stop when standard input is closed, that is, when the parent process exits"""
    quiet: bool = False
    """do not describe the start and the end; print the address, warnings and errors"""
    restart: bool = False
    """run the service as a child process and restart it at the same address when it dies or its loop stalls for
    --service.exit-when-stalled-s (default: 10 x stall_s); with --journal it resumes its groups"""


class KeysArgs(msgspec.Struct, kw_only=True):
    """Create and revoke keys. A running service applies changes within a second."""

    action: tyro.conf.Positional[Literal["init", "add", "revoke", "show"]]
    """init: create the key file of a service; add: create a connection file for a client, with its key and the service's
    address; revoke: revoke a client's key; show: list the keys"""
    name: tyro.conf.Positional[str] = ""
    """name of the client, for add and revoke"""
    file: str = DEFAULT_FILE
    """the service's key file"""
    address: str = ""
    """init: address at which clients reach the service, tcp://HOST:PORT; add: address for this client if it differs, as for
    replicas"""
    role: tuple[Role, ...] = ()
    """add: roles of the key: rollout = groups, weights = refreshes, admin = pause, drain, sleep and abort all, read = status
    and metrics, replica = `rollout serve --join`"""
    out: str | None = None
    """add: path of the connection file; default: NAME.json beside the key file"""


class StatusArgs(msgspec.Struct, kw_only=True):
    """Print the status of a running service: model, weights, groups, rates, KV and clients."""

    address: str = DEFAULT_ENDPOINT
    """address of the service, or a connection file"""
    timeout: float = 10.0
    """seconds to wait for the service"""
    wait: float = 0.0
    """seconds to retry if no service answers or its loop is stalled; the reason is printed to standard error"""
    json: bool = False
    """print the whole status as JSON"""


class ControlArgs(msgspec.Struct, kw_only=True):
    """Ask a running service for something."""

    verb: ClassVar[str] = ""
    """name of the command"""
    address: str = DEFAULT_ENDPOINT
    """address of the service, or a connection file"""
    timeout: float = 60.0
    """seconds to wait for the service"""


class PauseArgs(ControlArgs, kw_only=True):
    """Stop generation for all clients between two steps, until Ctrl-C or `rollout resume`."""

    verb: ClassVar[str] = "pause"


class ResumeArgs(ControlArgs, kw_only=True):
    """End every pause and drain, of any client."""

    verb: ClassVar[str] = "resume"


class DrainArgs(ControlArgs, kw_only=True):
    """Finish the started groups and start no others, until Ctrl-C or `rollout resume`. With --timeout exceeded, the service
    resumes."""

    verb: ClassVar[str] = "drain"
    timeout: float = 3600.0
    """seconds to wait for the groups that have started"""


class SleepArgs(ControlArgs, kw_only=True):
    """Release the service's device memory, until Ctrl-C or `rollout wake`. Running samples continue then."""

    verb: ClassVar[str] = "sleep"
    timeout: float = 300.0
    """seconds to wait for the service"""
    level: Literal[1, 2] = 1
    """1: move the weights to host memory; 2: drop them, so that a refresh must follow `rollout wake`"""


class WakeArgs(ControlArgs, kw_only=True):
    """Undo `rollout sleep`, of any client."""

    verb: ClassVar[str] = "wake"
    timeout: float = 300.0
    """seconds to wait for the service"""
    tags: tuple[Tag, ...] = ()
    """what to wake; default: all that is asleep"""


class AbortArgs(ControlArgs, kw_only=True):
    """Abort all groups of all clients. Their samples return as "aborted" with their tokens so far."""

    verb: ClassVar[str] = "abort"


class RefreshArgs(ControlArgs, kw_only=True):
    """Replace the weights by those of a folder of safetensors, in place, while generation continues."""

    folder: tyro.conf.Positional[str]
    """folder that the service can read too"""
    verb: ClassVar[str] = "refresh"
    timeout: float = 600.0
    """seconds to wait until the weights are live"""
    version: int | None = None
    """version of the new weights, above the live one; default: the next"""
    kv: KVPolicy = "keep"
    """KV of running samples: keep it, recompute it under the new weights, or abort the samples"""
    partial: bool = False
    """tensors that the folder lacks keep their values"""


class FleetArgs(msgspec.Struct, kw_only=True):
    """Change the replicas of a running fleet. Returns when the change has started; `rollout top` shows its progress."""

    action: tyro.conf.Positional[Literal["scale", "drain", "roll"]]
    """scale: set the number of replicas; drain: stop a replica once its groups have finished; roll: restart all in turn"""
    what: tyro.conf.Positional[str] = ""
    """scale: number of replicas; drain: name of the replica"""
    address: str = DEFAULT_ENDPOINT
    """address of the service, or a connection file"""
    timeout: float = 60.0
    """seconds to wait for the service"""


class TopArgs(msgspec.Struct, kw_only=True):
    """Watch a running service; Ctrl-C ends it."""

    address: str = DEFAULT_ENDPOINT
    """address of the service, or a connection file"""
    interval: float = 1.0
    """seconds between two updates"""
    once: bool = False
    """print one screen and exit, for scripts"""
    timeout: float = 10.0
    """seconds to wait for the service"""


class GenerateArgs(msgspec.Struct, kw_only=True):
    """Generate samples for the prompts of a JSONL file. Writes one JSON object per sample as soon as it finishes."""

    prompts: str
    """JSONL file; a line is {"messages": [...]}, {"prompt": "text"} or {"token_ids": [...]}, optionally with an "id" field;
    other fields are copied to the samples"""
    out: str
    """JSONL file to write; - = standard output"""
    resume: bool = False
    """keep the samples that --out has from an interrupted run of the same prompts, and generate the others"""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling()
    address: str | None = None
    """address of a running service, or a connection file; default: start a service for this run"""
    settings: Settings = Config()
    config: str | None = None
    """TOML file for the started service"""
    model: str | None = None
    """short for --engine.model; with --address: where to find the tokenizer, if not at the path that the service reports"""


class LedgerArgs(msgspec.Struct, kw_only=True):
    """Show what a ledger of `rollout serve --ledger` says."""

    action: tyro.conf.Positional[Literal["show"]]
    """show: print a summary, or a table"""
    file: tyro.conf.Positional[str]
    """the ledger"""
    table: Literal["services", "refreshes", "groups", "samples"] | None = None
    """print the rows of this table"""
    step: int | None = None
    """only rows of this version of the weights"""
    json: bool = False
    """print all rows as JSON lines; default: of samples"""


class BisectArgs(msgspec.Struct, kw_only=True):
    """Find the first difference of two runs, and its kind. Exit status: 0 = equal, 1 = different, 2 = trouble."""

    a: tyro.conf.Positional[str]
    """ledger of one run"""
    b: tyro.conf.Positional[str]
    """ledger of the other run"""
    weights_a: str | None = None
    """weights of the first run, as for `rollout replay`: the first sample that differs is computed again"""
    weights_b: str | None = None
    """weights of the second run; default: those of the first"""
    prompts: str | None = None
    """JSONL file with the prompts, if the ledgers have only their digests"""
    model: str | None = None
    """model of the services that compute; default: found in the weights, or as in the ledgers"""
    json: bool = False
    """print one JSON object"""
    settings: Settings = Config()
    config: str | None = None
    """TOML file for these services"""


class ReplayArgs(msgspec.Struct, kw_only=True):
    """Make the samples of a step again from a ledger, and compare them to the bit. Exit status: 0 = all are equal."""

    file: tyro.conf.Positional[str]
    """the ledger"""
    weights: str
    """folder of safetensors; or one with a folder for each version that the samples span, such as ckpt/412"""
    out: str
    """JSONL file to write; - = standard output"""
    step: int | None = None
    """groups that were accepted under this version of the weights; default: all"""
    group: str | None = None
    """only this group"""
    index: int | None = None
    """only this child of each group"""
    prompts: str | None = None
    """JSONL file with the prompts, as for `rollout generate`, if the ledger has only their digests"""
    model: str | None = None
    """model of the service that computes; default: found in --weights, or as in the ledger"""
    at: int | None = None
    """continue otherwise from this token on, with the following options"""
    seed: int | None = None
    """another seed"""
    temperature: float | None = None
    """another temperature"""
    max_tokens: int | None = None
    """another maximum of tokens"""
    append: str | None = None
    """token ids that follow, as in [5, 17]: another answer of a tool, which begins the next turn"""
    settings: Settings = Config()
    config: str | None = None
    """TOML file for this service"""


class DemoArgs(msgspec.Struct, kw_only=True):
    """Start a small real model and print its answers to a trainer's groups."""

    model: str = "smollm2"
    """smollm2, a folder, a Hugging Face Hub id, or shape:NAME"""
    n: int = 8
    """samples per prompt"""
    max_tokens: int = 48
    """most tokens per sample"""


class HttpArgs(msgspec.Struct, kw_only=True):
    """Serve the HTTP APIs of vLLM, OpenAI and SGLang in front of a running service. docs/http.md lists the routes."""

    address: str = DEFAULT_ENDPOINT
    """address of the service, or a connection file"""
    host: str = "127.0.0.1"
    """bind address; any other than loopback needs --token-file"""
    port: int = 8000
    """0 = any free port"""
    admin_host: str = "127.0.0.1"
    """bind address of --admin-port"""
    admin_port: int | None = None
    """separate port for pause, weights and sleep; default: the same port"""
    token_file: str | None = None
    """file with the token that requests must send as Authorization: Bearer; only its owner may have read access"""
    allowed_hosts: tuple[str, ...] = ()
    """additional host names accepted in the Host header, for example the name that a proxy forwards"""
    served_model_name: tuple[str, ...] = ()
    """model names accepted in requests; default: the service's own"""
    tokenizer: str | None = None
    """folder or Hugging Face Hub id of the tokenizer, if not at the model path that the service reports"""
    overlong: Literal["refuse", "empty"] = "refuse"
    """if a prompt leaves no room for max_tokens: refuse = status 400, empty = return as many tokens as fit"""
    ready_file: str | None = None
    """write the URL and the admin URL to this file once the process listens"""
    wait: float = 0.0
    """seconds to wait for a service that is still starting"""
    access_log: bool = True
    """log a line per request: client, method, path, status, duration, tokens"""
    log_level: LogLevel = "info"
    """lowest level of what is logged to standard error"""


class MeasureArgs(msgspec.Struct, kw_only=True):
    """What every benchmark has options for."""

    model: str = "smollm2"
    """smollm2, a folder, a Hugging Face Hub id, or shape:NAME"""
    in_process: bool = False
    """run the engine in this process, without sockets"""
    scale: float = 1.0
    """factor on prompt and output lengths (at least one block each, unless the workload has less)"""
    repeat: int = 3
    """runs of each; the summary has their median"""
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None
    """write one JSON object per run and per workload to this file; - = standard output"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int | None = None
    """CPU threads of the engine; default: torch's choice"""
    isa: Annotated[IsaName, tyro.conf.arg(name="engine.isa")] = "auto"
    """instruction set of the service, as in `rollout serve`"""
    kv_dtype: Annotated[KVName, tyro.conf.arg(name="engine.kv-dtype")] = "auto"
    """KV dtype of the service, as in `rollout serve`"""
    device: str = "cpu"
    """device of what can run on several; cuda needs a GPU"""


DEVELOPERS = (
    "batch_invariance", "conversations", "delta", "experts", "fleet", "int8", "keys", "lora", "neighbour", "products", "replay",
    "score", "sharing", "train_step", "trust", "turns", "vanish", "verify",
)  # fmt: skip
"""benchmarks that `python -m tests.bench` runs"""


class BenchArgs(MeasureArgs, kw_only=True):
    """Measure this machine: named workloads through the whole service, or fidelity, host, http or refresh."""

    names: tyro.conf.Positional[tuple[str, ...]]
    """workloads and measurements; an unknown name prints the list"""
    compare: bool = True
    """for workloads with a small KV pool: also run with a large pool and without offload, and print the ratios"""
    unshared: bool = False
    """also run with attention that reads a shared prefix once per child, and print the ratios"""
    undrafted: bool = False
    """also run without drafts, and print the ratios"""
    temperature: float = 1.0
    """sampling temperature of the workloads"""
    against: str = ""
    """run in turn with other engines, vllm=PYTHON,transformers_cb,transformers (rollout/bench/peers), or with another checkout:
    the path of its folder, with a slash"""
    floor: bool = False
    """measure the hardware bound of each workload and print the fraction reached; --against does so too"""
    tp: int = 1
    """ranks that run the engine of workloads, which share its threads; then one rank with all threads runs in turn"""


Command = (
    ServeArgs
    | HttpArgs
    | GenerateArgs
    | StatusArgs
    | TopArgs
    | ControlArgs
    | FleetArgs
    | KeysArgs
    | BenchArgs
    | DemoArgs
    | LedgerArgs
    | BisectArgs
    | ReplayArgs
)


def commands(settings: Config) -> dict[str, Command]:
    """Return the commands by name with their defaults. settings: the configuration that flags override."""
    return {
        "serve": ServeArgs(settings=settings),
        "generate": GenerateArgs(prompts=tyro.MISSING, out=tyro.MISSING, settings=settings),
        "status": StatusArgs(),
        "top": TopArgs(),
        "pause": PauseArgs(),
        "resume": ResumeArgs(),
        "drain": DrainArgs(),
        "sleep": SleepArgs(),
        "wake": WakeArgs(),
        "abort": AbortArgs(),
        "refresh": RefreshArgs(folder=tyro.MISSING),
        "fleet": FleetArgs(action=tyro.MISSING),
        "keys": KeysArgs(action=tyro.MISSING),
        "http": HttpArgs(),
        "ledger": LedgerArgs(action=tyro.MISSING, file=tyro.MISSING),
        "bisect": BisectArgs(a=tyro.MISSING, b=tyro.MISSING, settings=settings),
        "replay": ReplayArgs(file=tyro.MISSING, weights=tyro.MISSING, out=tyro.MISSING, settings=settings),
        "bench": BenchArgs(names=tyro.MISSING),
        "demo": DemoArgs(),
    }


DESCRIPTIONS = {
    "serve": "serve a model until Ctrl-C or SIGTERM",
    "generate": "generate samples for the prompts of a JSONL file",
    "status": "print the status of a running service",
    "top": "watch a running service",
    "pause": "stop generation until Ctrl-C or `rollout resume`",
    "resume": "end every pause and drain",
    "drain": "finish the started groups and start no others",
    "sleep": "release the device memory until Ctrl-C or `rollout wake`",
    "wake": "undo a sleep",
    "abort": "abort all groups of all clients",
    "refresh": "replace the weights by those of a folder",
    "fleet": "change the replicas of a running fleet",
    "keys": "create and revoke keys",
    "http": "serve HTTP APIs in front of a running service",
    "ledger": "show what a run has recorded",
    "bisect": "find the first difference of two runs",
    "replay": "make the samples of a step again from a ledger",
    "bench": "measure this machine: workloads, fidelity, http, refresh",
    "demo": "start a small model and print its answers",
}


ABOUT = """Generate samples for reinforcement learning of language models. `rollout --version` prints versions,
`rollout --tyro-print-completion bash` (or zsh, fish) a completion script."""


def parse(argv: list[str]) -> Command:
    """Parse the command line: flags override the TOML file of `--config`, and the file overrides the defaults.

    Raises:
        InputError: the file cannot be read or is invalid, a flag has a value that is not accepted, or a benchmark is for
            developers.
        UsageError: an unknown command, flag or word.
        SystemExit: status 2 after printing another usage error, or 0 after `--help`.
    """
    argv = with_ray_address(argv)
    path = config_file(argv)
    base = Config() if path is None else configuration.load(path)
    offload = base.engine.weight_offload
    named = commands(with_offload(base, offload or WeightOffload()))  # --help lists its flags, on or off
    if argv and not argv[0].startswith("-") and argv[0] not in named:
        raise UsageError(f"unknown command {argv[0]!r}{nearest(argv[0], named)} (commands: {', '.join(named)})")
    line = tyro.extras.subcommand_type_from_defaults(named, DESCRIPTIONS)
    try:
        args, unknown = tyro.cli(
            line,
            args=argv,
            prog="rollout",
            description=ABOUT,
            config=(tyro.conf.AvoidSubcommands,),
            return_unknown_args=True,
        )
    except ValueError as error:  # of a struct that checks itself, such as `Sampling`
        raise InputError(str(error)) from None
    if isinstance(args, BenchArgs) and (moved := next((name for name in args.names if name in DEVELOPERS), None)):
        raise InputError(f"{moved} is for developers: in a checkout, `python -m tests.bench {moved}` measures it")
    if unknown:
        raise UsageError(unknown_words(argv[0], unknown, flags_of(named[argv[0]])))
    asked = any(word.replace("_", "-").startswith("--engine.weight-offload.") for word in argv)
    if isinstance(args, ServeArgs | GenerateArgs | BisectArgs | ReplayArgs) and offload is None and not asked:
        args.settings = with_offload(args.settings, None)
    return args


class UsageError(Exception):
    """The command line has a word that means nothing; the message names the word and the nearest one that exists."""


def unknown_words(command: str, unknown: list[str], flags: list[str]) -> str:
    """Describe what is wrong with the first of the unknown words."""
    word = unknown[0].partition("=")[0]
    if word.startswith("-"):
        address = "; did you mean --address?" if word in ("--host", "--port") and "--address" in flags else ""
        return f"unknown flag {word}{address or nearest(word, flags)} (all flags: rollout {command} --help)"
    if "--address" in flags:
        return f"unexpected argument {word!r} (the service is given as --address ADDRESS; usage: rollout {command} --help)"
    return f"unexpected argument {word!r} (usage: rollout {command} --help)"


def flags_of(args: msgspec.Struct, prefix: str = "--") -> list[str]:
    """List the flags of a command, or of the table `prefix`."""
    flags = []
    hints = get_type_hints(type(args), include_extras=True)
    for name, hint in ((name, hints[name]) for name in args.__struct_fields__):
        names = [each.name for each in getattr(hint, "__metadata__", ()) if getattr(each, "name", None) is not None]
        flag = prefix + (names[0] if names else name).replace("_", "-")
        value = getattr(args, name)
        flags += flags_of(value, f"{flag}." if flag != "--" else flag) if isinstance(value, msgspec.Struct) else [flag]
    return flags


def with_ray_address(argv: list[str]) -> list[str]:
    """Insert "local" after a `--ray` without a value: tyro has no flags with optional values."""
    words: list[str] = []
    for word, following in zip(argv, [*argv[1:], "--"], strict=False):
        words += [word, "local"] if word == "--ray" and following.startswith("--") else [word]
    return words


def config_file(argv: list[str]) -> str | None:
    """Return the value of `--config`, which must be read before tyro gets the defaults."""
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


def with_ledger(config: Config, args: ServeArgs) -> Config:
    """Lay the short flags of the ledger over the configuration. Raises InputError."""
    short = {
        "ledger": args.ledger or config.service.ledger,
        "ledger_prompts": args.ledger_prompts or config.service.ledger_prompts,
        "ledger_tokens": args.ledger_tokens or config.service.ledger_tokens,
    }
    try:
        return msgspec.structs.replace(config, service=msgspec.structs.replace(config.service, **short))
    except ValueError as error:
        raise InputError(str(error)) from None


def with_metrics_port(config: Config, port: int | None) -> Config:
    if port is None:
        return config
    try:
        return msgspec.structs.replace(config, tracking=msgspec.structs.replace(config.tracking, metrics_port=port))
    except ValueError as error:
        raise InputError(str(error)) from None


def with_address(config: Config, host: str | None, port: int | None) -> Config:
    """Replace the host and the port of the endpoint. Raises InputError for an endpoint that has none, or an invalid port."""
    if host is None and port is None:
        return config
    endpoint = config.service.endpoint
    if not endpoint.startswith("tcp://"):
        raise InputError(f"--host and --port with --service.endpoint {endpoint}, which is no tcp://HOST:PORT: leave one out")
    if port is not None and not 0 <= port <= 65535:
        raise InputError(f"--port {port}: must be 0 (any free port) to 65535")
    old_host, _, old_port = endpoint.removeprefix("tcp://").rpartition(":")
    if host is not None and ":" in host and not host.startswith("["):
        host = f"[{host}]"
    endpoint = f"tcp://{old_host if host is None else host}:{old_port if port is None else port}"
    return msgspec.structs.replace(config, service=msgspec.structs.replace(config.service, endpoint=endpoint))


def with_model(config: Config, model: str | None) -> Config:
    if model is None:
        return config
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, model=model))
