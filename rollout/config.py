"""Configuration: one TOML file, the same names as command-line flags, unknown names are errors.

[engine]            --engine.max-num-seqs 128
max_num_seqs = 64   flags win over the file, the file over the defaults
[engine.weight_offload]
group_size = 4      --engine.weight-offload.group-size 4
[engine.advanced]
lookahead_blocks = 4
[service]
endpoint = "tcp://127.0.0.1:5655"
[limits]
max_n = 256
[tracking]
jsonl = "metrics.jsonl"
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec
import tomli_w

from rollout.engine.config import AdvancedConfig, EngineConfig
from rollout.engine.values import Limits
from rollout.transport.messages import MOST_REPLICAS

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5655"
MIN_GRACE_S = 2.0
"""clients send a heartbeat every second"""


MOST_S = 100_000_000
"""longest wait in seconds, about three years; system timers overflow beyond some hundred years"""


class InputError(ValueError):
    """A file, flag or name from the user cannot be used; the message says which and why."""


class CannotServe(Exception):
    """The model is missing, broken or not supported; the message says which."""


def _check_seconds(config: msgspec.Struct, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value <= MOST_S:
            raise ValueError(f"{name}={value}: must be at most {MOST_S} seconds")


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address, keys, journal, ledger and time-outs of the service."""

    endpoint: str = DEFAULT_ENDPOINT
    """bind address. Without keys: loopback or ipc, for clients of the same user. Port 0 or *: any free port"""
    keys: str | None = None
    """key file from `rollout keys init`; every client then needs a key, on this host too"""
    journal: str | None = None
    """file that stores open groups and samples, so that they survive a restart; None: a restart loses them, and clients get
    ServiceRestarted"""
    ledger: str | None = None
    """append what made each sample, and a digest of it, to this file; None: nothing is recorded"""
    ledger_gib: float = 1.0
    """size at which the ledger is renamed to FILE.1, which is replaced, and a new one begins"""
    ledger_prompts: bool = False
    """also store the token ids of prompts in the ledger, each once; otherwise only digests"""
    ledger_tokens: bool = False
    """also store the token ids and log-probs of samples in the ledger; otherwise only digests"""
    client_grace_s: float = 10.0
    """abort the groups of a client that is silent for this many seconds"""
    max_outbox_bytes: int = 268_435_456
    """most bytes of finished samples that wait for one client; when exceeded, that client's groups fail with an error"""
    lease_s: float = 30.0
    """abandon a refresh that makes no progress for this many seconds, so that another client may refresh"""
    stall_s: float = 30.0
    """log a warning with the stack if a step, or another phase of a loop iteration, exceeds this many seconds"""
    exit_when_stalled_s: float | None = None
    """exit if a loop iteration exceeds this many seconds (for supervisors); default: never"""
    served_model_name: str = ""
    """name of the model for HTTP clients; default: the model as given, for example smollm2 or ./policy"""
    exit_without_clients_s: float | None = None
    """exit after this many seconds without a client (for replicas whose router does not return); default: never"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""
        if not self.client_grace_s >= MIN_GRACE_S:
            raise ValueError(
                f"client_grace_s={self.client_grace_s}: must be at least {MIN_GRACE_S}; clients send a heartbeat every second"
            )
        if self.max_outbox_bytes < 1:
            raise ValueError(f"max_outbox_bytes={self.max_outbox_bytes}: must be at least 1")
        if not self.ledger_gib > 0:
            raise ValueError(f"ledger_gib={self.ledger_gib}: must be positive")
        if self.ledger is None and (self.ledger_prompts or self.ledger_tokens):
            raise ValueError("ledger_prompts or ledger_tokens without ledger: name the file")
        if not self.lease_s > 0:
            raise ValueError(f"lease_s={self.lease_s}: must be positive")
        if not self.stall_s > 0:
            raise ValueError(f"stall_s={self.stall_s}: must be positive")
        if self.exit_when_stalled_s is not None and not self.exit_when_stalled_s > 0:
            raise ValueError(f"exit_when_stalled_s={self.exit_when_stalled_s}: must be positive; leave it out for never")
        if self.exit_without_clients_s is not None and not self.exit_without_clients_s > 0:
            raise ValueError(f"exit_without_clients_s={self.exit_without_clients_s}: must be positive; leave it out for never")
        _check_seconds(self, "client_grace_s", "lease_s", "stall_s", "exit_when_stalled_s", "exit_without_clients_s")


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several replicas of the model behind one address. docs/fleet.md"""

    replicas: int = 0
    """replica processes on this host, which share its cores or GPUs; 0 = no fleet, this process runs the engine"""
    replica_grace_s: float = 60.0
    """seconds that a group waits while no replica is serving; then it ends as "error" """
    router_grace_s: float = 60.0
    """with a journal: seconds that replicas keep running after they declare the router dead (client_grace_s); a new router with
    the same journal takes them over"""
    listen_replicas: str | None = None
    """address at which the router accepts replicas that were started elsewhere; without --service.keys loopback only"""
    ray: str | None = None
    """place replicas with Ray: "local" = Ray on this machine, or a cluster ("auto", HOST:PORT); needs the extra ray"""
    ray_join: str | None = None
    """connection file that replicas on a Ray cluster use to join, at the same path on every node; default: join on this host
    without keys"""
    ray_cpus: float | None = None
    """CPUs that Ray reserves per replica; default: the cluster's CPUs divided by the number of replicas"""
    join: str | None = None
    """run as a replica: join the router at this address, or use a connection file from
    `rollout keys add NAME --role replica --address …`"""
    name: str | None = None
    """name of this replica in the router's status; default: HOST-PID. A process that restarts under the same name is the same
    replica"""

    verify: float = 0.0
    """share of the finished children of untrusted replicas, 0 to 1, that a trusted replica computes again before they are
    delivered; the first lie bans the replica's key; 0 = none"""
    trust: tuple[str, ...] = ()
    """replicas that verify others and are not verified: names of their keys, or of replicas that join without a key; "local" =
    all that this router starts"""
    verify_wait_s: float = 60.0
    """longest time in seconds that a sample waits for its verdict; then it is delivered unverified, and counted as skipped"""

    @property
    def is_router(self) -> bool:
        """Whether this process is a router: it has replicas instead of an engine."""
        return bool(self.replicas) or self.listen_replicas is not None

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""
        if not 0 <= self.replicas <= MOST_REPLICAS:
            raise ValueError(f"replicas={self.replicas}: must be 0 (no fleet) to {MOST_REPLICAS}")
        if not self.replica_grace_s >= 0:
            raise ValueError(f"replica_grace_s={self.replica_grace_s}: must be 0 or positive")
        if self.ray_cpus is not None and not self.ray_cpus >= 1:
            raise ValueError(f"ray_cpus={self.ray_cpus}: must be at least 1")
        if not self.router_grace_s > 0:
            raise ValueError(f"router_grace_s={self.router_grace_s}: must be positive")
        if not 0 <= self.verify <= 1:
            raise ValueError(f"verify={self.verify}: must be 0 (none) to 1 (all)")
        if not self.verify_wait_s > 0:
            raise ValueError(f"verify_wait_s={self.verify_wait_s}: must be positive")
        _check_seconds(self, "replica_grace_s", "router_grace_s", "verify_wait_s")

    def check(self) -> None:
        """Raises ValueError for fields that exclude or require each other."""
        if self.ray is None and (self.ray_join, self.ray_cpus) != (None, None):
            raise ValueError("ray_join or ray_cpus without ray, which has the replicas on a Ray cluster")
        if self.ray is not None and not self.replicas:
            raise ValueError(f"ray={self.ray!r} without replicas: say how many")
        if bool(self.verify) != bool(self.trust):
            given, missing = ("verify", "trust, who verifies") if self.verify else ("trust", "verify, the share of children")
            raise ValueError(f"{given} without {missing}: give both")
        if self.verify and not self.is_router:
            raise ValueError("verify without replicas or listen_replicas: a router verifies")
        if self.join is not None and (self.replicas or self.listen_replicas is not None):
            raise ValueError("join together with replicas or listen_replicas: a process is a replica or a router, not both")


class TrackingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Destinations of the service's metrics. docs/metrics.md lists them; `rollout status` always shows the latest."""

    interval_s: float = 5.0
    """seconds between two rows"""
    window_s: float = 30.0
    """seconds over which rates, lengths and lags are averaged"""
    console: bool = False
    """print one line per interval to standard error"""
    jsonl: str | None = None
    """append one JSON object per interval to this file"""
    metrics_port: int | None = None
    """serve the latest row to Prometheus at http://metrics_host:metrics_port/metrics; 0 = any free port, None = off"""
    metrics_host: str = "127.0.0.1"
    """bind address of the metrics endpoint (unauthenticated)"""
    wandb_project: str | None = None
    """log to this wandb project"""
    wandb_run_id: str | None = None
    """write into this run, for example the trainer's; None = a new run"""
    wandb_mode: Literal["auto", "online", "offline", "shared"] = "auto"
    """auto = offline without WANDB_API_KEY, shared with a run id, else online"""
    wandb_dir: str | None = None
    """folder for wandb's files; None = wandb's choice"""
    audit_every: int = 0
    """score every so many finished samples with a plain forward of the live weights (`mismatch/*`); 0 = off"""
    audit_max_tokens: int = 2048
    """most tokens of prompt and sample that one audit scores"""
    audit_max_share: float = 0.02
    """largest fraction of the service's time that audits may take"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""
        for name in ("interval_s", "window_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"metrics_port={self.metrics_port}: must be 0 to 65535, or None")
        if self.audit_every < 0:
            raise ValueError(f"audit_every={self.audit_every}: must be 0 (off) or positive")
        if self.audit_max_tokens < 2:
            raise ValueError(f"audit_max_tokens={self.audit_max_tokens}: must be at least 2")
        if not 0 < self.audit_max_share <= 1:
            raise ValueError(f"audit_max_share={self.audit_max_share}: must be in (0, 1]")
        if self.wandb_project is None and (self.wandb_run_id, self.wandb_mode, self.wandb_dir) != (None, "auto", None):
            raise ValueError("wandb_run_id, wandb_mode or wandb_dir without wandb_project, which turns wandb on")
        _check_seconds(self, "interval_s", "window_s")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of `rollout serve`."""

    engine: EngineConfig = EngineConfig()
    service: ServiceConfig = ServiceConfig()
    limits: Limits = Limits()
    tracking: TrackingConfig = TrackingConfig()
    fleet: FleetConfig = FleetConfig()


def load(path: str | Path) -> Config:
    """Read a TOML file. Raises InputError naming the file and the key that is unknown or has a wrong value."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"configuration {path}: {error.strerror}") from error
    try:
        return msgspec.toml.decode(data, type=Config)
    except (ValueError, msgspec.MsgspecError) as error:  # TOML syntax, unknown keys, wrong types, values out of range
        raise InputError(f"configuration {path}: {error}{_advice(str(error))}") from error


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the one of `words` that was probably meant, as "; did you mean X?"; "" if none is alike."""
    last = word.split(".")[-1]
    by_last = {each.split(".")[-1].lstrip("-"): each for each in sorted(words, key=len, reverse=True)}  # the shortest stays
    alike = difflib.get_close_matches(last.lstrip("-"), by_last, 1)
    return f"; did you mean {by_last[alike[0]]}?" if alike else ""


UNKNOWN = re.compile(r"unknown field `(\w+)`(?: - at `\$\.?([\w.]*)`)?")
NOT_A_CHOICE = re.compile(r"Invalid enum value '(.*)' - at `\$\.([\w.]+)`")


def _advice(error: str) -> str:
    """Name the key or the value that was probably meant, or the table of a field that is in [engine] instead of
    [engine.advanced]."""
    if (unknown := UNKNOWN.search(error)) is not None:
        name, place = unknown[1], unknown[2] or ""
        if place == "engine" and name in AdvancedConfig.__struct_fields__:
            return f"; {name} belongs in the table [engine.advanced]"
        return nearest(name, _type_at(place).__struct_fields__)
    if (wrong := NOT_A_CHOICE.search(error)) is not None:
        table, _, name = wrong[2].rpartition(".")
        choices = [str(each) for each in get_args(get_type_hints(_type_at(table))[name])]
        return f"; one of {', '.join(choices)}{nearest(wrong[1], choices)}"
    return ""


def _type_at(place: str) -> type[msgspec.Struct]:
    """Return the struct of a table, e.g. engine.advanced; "" = the whole file."""
    found: type[msgspec.Struct] = Config
    for name in filter(None, place.split(".")):
        kind = get_type_hints(found)[name]
        found = next(each for each in (kind, *get_args(kind)) if isinstance(each, type) and issubclass(each, msgspec.Struct))
    return found


def dump(config: Config) -> str:
    """Write the configuration as TOML for `load`; None values are left out, since TOML cannot express them."""
    return tomli_w.dumps(without_none(msgspec.to_builtins(config)))


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    """Copy a table without None values, at every level."""
    return {key: without_none(value) if isinstance(value, dict) else value for key, value in table.items() if value is not None}
