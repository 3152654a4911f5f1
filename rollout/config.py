"""Configuration: one TOML file, the same names as command-line flags, unknown names are errors.

[engine]            --engine.max-num-seqs 128
max_num_seqs = 64   flags win over the file, the file over the defaults
[engine.weight_offload]
group_size = 4      --engine.weight-offload.group-size 4
[service]
endpoint = "tcp://127.0.0.1:5655"
[limits]
max_n = 256
[tracking]
jsonl = "metrics.jsonl"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w

from engine.config import EngineConfig
from engine.types import Limits
from transport.messages import MOST_REPLICAS

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5655"
MIN_GRACE_S = 2.0
"""clients send a heartbeat every second"""


MOST_S = 100_000_000
"""of seconds that a process waits for anything, three years: timers of the system take no more than some hundred years"""


class InputError(ValueError):
    """What the user gave (a file, a flag, a name) cannot be used; the message says where and why."""


class CannotServe(Exception):
    """The model is not there, is broken, or asks for what the engine does not compute; the message says which."""


def _check_seconds(config: msgspec.Struct, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value <= MOST_S:
            raise ValueError(f"{name}={value}: must be at most {MOST_S} seconds")


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the service listens and how long it waits for its clients."""

    endpoint: str = DEFAULT_ENDPOINT
    """without keys loopback or ipc, for clients of this user; port 0 or * takes a free one"""
    keys: str | None = None
    """key file that `rollout keys init` made: clients need a key, on this host as well"""
    journal: str | None = None
    """file in which open groups and samples outlive the process; None: clients are told that a restart has lost them"""
    client_grace_s: float = 10.0
    """a client not heard from for this many seconds has its groups aborted"""
    max_outbox_bytes: int = 268_435_456
    """bytes of finished samples kept for one client that does not take them; past it only that client suffers"""
    lease_s: float = 30.0
    """a refresh that brings nothing for this many seconds is given up, so that another client may refresh"""
    stall_s: float = 30.0
    """a step, or another part of the loop's turn, that lasts longer is told in the log, with the stack of the loop"""
    exit_when_stalled_s: float | None = None
    """one that lasts longer ends the process, so that a supervisor starts another one; unset: never"""
    exit_without_clients_s: float | None = None
    """the process ends when it has had no client for so long, as replicas of a front that does not come back; unset: never"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""
        if not self.client_grace_s >= MIN_GRACE_S:
            raise ValueError(
                f"client_grace_s={self.client_grace_s}: at least {MIN_GRACE_S}, clients send a heartbeat every second"
            )
        if self.max_outbox_bytes < 1:
            raise ValueError(f"max_outbox_bytes={self.max_outbox_bytes}: must be at least 1")
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
    """Many replicas of the model behind one address. docs/fleet.md"""

    replicas: int = 0
    """processes on this host that have the engine, each with its part of the cores or GPUs; 0 = this process has it"""
    replica_grace_s: float = 60.0
    """a group waits so many seconds for a replica that serves, then it ends as "error" """
    front_grace_s: float = 60.0
    """replicas of a front with a journal outlive it for so many seconds, once they take it for dead (client_grace_s); the next
    front on that journal goes on with them"""
    listen_replicas: str | None = None
    """of a front: address at which replicas that others start join it; as for clients, loopback without --service.keys"""
    ray: str | None = None
    """where a front's replicas are placed by Ray: "local" = a Ray of this machine, or a cluster ("auto", HOST:PORT); needs
    rollout[ray]"""
    ray_join: str | None = None
    """connection file by which replicas on a Ray cluster join, the same path on each node; unset: this host's, without keys"""
    ray_cpus: float | None = None
    """CPUs that Ray sets aside for each replica; unset: the cluster's, divided"""
    join: str | None = None
    """this process is a replica of the front that listens for replicas at this address; or a connection file that
    `rollout keys add NAME --role replica --address …` made"""
    name: str | None = None
    """of this replica in its front's status; unset: HOST-PID. One that starts again under its name is the same replica"""

    @property
    def is_front(self) -> bool:
        """Whether this process has replicas in place of an engine."""
        return bool(self.replicas) or self.listen_replicas is not None

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""
        if not 0 <= self.replicas <= MOST_REPLICAS:
            raise ValueError(f"replicas={self.replicas}: must be 0 (no fleet) to {MOST_REPLICAS}")
        if not self.replica_grace_s >= 0:
            raise ValueError(f"replica_grace_s={self.replica_grace_s}: must be 0 or positive")
        if self.ray_cpus is not None and not self.ray_cpus >= 1:
            raise ValueError(f"ray_cpus={self.ray_cpus}: must be at least 1")
        if not self.front_grace_s > 0:
            raise ValueError(f"front_grace_s={self.front_grace_s}: must be positive")
        _check_seconds(self, "replica_grace_s", "front_grace_s")

    def check(self) -> None:
        """Raises ValueError for fields that do not go together."""
        if self.ray is None and (self.ray_join, self.ray_cpus) != (None, None):
            raise ValueError("ray_join or ray_cpus without ray, which has the replicas on a Ray cluster")
        if self.ray is not None and not self.replicas:
            raise ValueError(f"ray={self.ray!r} without replicas: say how many")
        if self.join is not None and (self.replicas or self.listen_replicas is not None):
            raise ValueError("join together with replicas or listen_replicas: a process is a replica or a front, not both")


class TrackingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the service's metrics go. docs/metrics.md lists them; `rollout status` shows the last ones in any case."""

    interval_s: float = 5.0
    """seconds between two rows"""
    window_s: float = 30.0
    """seconds that rates, lengths and lags of a row look back"""
    console: bool = False
    """one line an interval on standard error"""
    jsonl: str | None = None
    """file to append one JSON object an interval to"""
    metrics_port: int | None = None
    """the last row as Prometheus reads it, at http://metrics_host:metrics_port/metrics; 0 = any free port, None = off"""
    metrics_host: str = "127.0.0.1"
    """nobody is asked for a key there"""
    wandb_project: str | None = None
    """turns wandb on"""
    wandb_run_id: str | None = None
    """the trainer's run, to write into; None = a run of the service's own"""
    wandb_mode: Literal["auto", "online", "offline", "shared"] = "auto"
    """auto = offline without WANDB_API_KEY, shared with a run id, else online"""
    wandb_dir: str | None = None
    """folder for wandb's files; None = wandb's choice"""
    audit_every: int = 0
    """score every so many finished samples with a plain forward of the live weights (`mismatch/*`); 0 = off"""
    audit_max_tokens: int = 2048
    """prompt and first tokens of a sample that one audit looks at"""
    audit_max_share: float = 0.02
    """of the service's time that audits may take"""

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
    """All that `rollout serve` can be told."""

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
        raise InputError(f"configuration {path}: {error}") from error


def dump(config: Config) -> str:
    """Write the configuration as TOML that `load` reads back; unset (None) values are left out, TOML has no word for them."""
    return tomli_w.dumps(without_none(msgspec.to_builtins(config)))


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a table, and of the tables inside it, what is None."""
    return {key: without_none(value) if isinstance(value, dict) else value for key, value in table.items() if value is not None}
