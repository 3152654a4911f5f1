"""Configuration: one TOML file, the same names as command-line flags, unknown names are errors.

[engine]            --engine.max-num-seqs 128
max_num_seqs = 64   flags win over the file, the file over the defaults
[service]
endpoint = "tcp://127.0.0.1:5655"
[limits]
max_n = 256
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.request import Limits

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5655"


class InputError(ValueError):
    """What the user gave (a file, a flag, a name) cannot be used; the message says where and why."""


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the service listens and how long it waits for its clients."""

    endpoint: str = DEFAULT_ENDPOINT
    """loopback or ipc only; port 0 or * takes a free one"""
    client_grace_s: float = 10.0
    """a client not heard from for this many seconds has its groups aborted"""
    max_outbox_bytes: int = 268_435_456
    """bytes of finished samples kept for one client that does not take them; past it only that client suffers"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""
        if not self.client_grace_s > 0:
            raise ValueError(f"client_grace_s={self.client_grace_s}: must be positive")
        if self.max_outbox_bytes < 1:
            raise ValueError(f"max_outbox_bytes={self.max_outbox_bytes}: must be at least 1")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that `rollout serve` can be told."""

    engine: EngineConfig = EngineConfig()
    service: ServiceConfig = ServiceConfig()
    limits: Limits = Limits()


def load(path: str | Path) -> Config:
    """Reads a TOML file. Raises InputError naming the file and the key that is unknown or has a wrong value."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"configuration {path}: {error.strerror}") from error
    try:
        return msgspec.toml.decode(data, type=Config)
    except (ValueError, msgspec.MsgspecError) as error:  # TOML syntax, unknown keys, wrong types, values out of range
        raise InputError(f"configuration {path}: {error}") from error


def dump(config: Config) -> str:
    """The configuration as TOML that `load` reads back; unset (None) values are left out, TOML has no word for them."""
    tables: dict[str, dict[str, object]] = msgspec.to_builtins(config)
    lines = []
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"
