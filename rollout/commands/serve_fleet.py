"""`rollout serve --replicas N`: a front in this process, N services with an engine each as its children. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec
import psutil

from engine.config import EngineConfig
from rollout import models
from rollout.config import CannotServe, Config, FleetConfig, InputError, TrackingConfig, dump
from rollout.metrics.sinks import open_sinks
from rollout.metrics.tracker import Tracker
from rollout.service.watchdog import Watch
from transport.errors import ServiceLost
from transport.sockets import ServiceEnd

if TYPE_CHECKING:
    from rollout.fleet.launcher import Place
    from rollout.service.journal import Journal
    from rollout.service.loop import Service

KV_SHARE = 0.25
"""of the free memory, for the KV of all replicas of a host without GPUs, as one engine would take"""
GPUS = Path("/proc/driver/nvidia/gpus")


@contextmanager
def fleet_service(config: Config, journal: Journal | None) -> Iterator[Service]:
    """Run the replicas and make the service in front of them, which closes the journal. Raises InputError,
    CannotServe where they do not start."""
    from rollout.fleet.fleet import Fleet
    from rollout.fleet.launcher import Launcher
    from rollout.service.loop import Service

    try:
        ServiceEnd(
            config.service.endpoint, config.limits, config.service.keys
        ).close()  # a port in use is told before a model is loaded
        folder = models.resolve(config.engine.model)
        places, engine = divided(msgspec.structs.replace(config.engine, model=str(folder)), config.fleet.replicas)
        sinks = open_sinks(config.tracking)
    except models.ModelNotFound as error:
        raise CannotServe(str(error)) from error
    except ValueError as error:
        raise InputError(str(error)) from error
    with TemporaryDirectory(prefix="rollout-front-") as temporary:
        toml = Path(temporary) / "replica.toml"
        toml.write_text(dump(replica_config(config, engine)))
        serve = [sys.executable, "-m", "rollout", "serve", "--config", str(toml), "--exit-on-stdin-close"]

        def command(ready: Path) -> list[str]:  # a socket in a folder of this user's: the replicas have no keys
            return [*serve, "--ready-file", str(ready), "--service.endpoint", f"ipc://{ready}.sock"]

        launcher = Launcher(command, places)
        fleet = Fleet(launcher, config.limits, config.fleet.replica_grace_s, config.engine.seed)
        try:
            fleet.open()
            service = Service(
                fleet,
                config.service.endpoint,
                keys=config.service.keys,
                journal=journal,
                limits=config.limits,
                client_grace_s=config.service.client_grace_s,
                max_outbox_bytes=config.service.max_outbox_bytes,
                lease_s=config.service.lease_s,
                tracker=Tracker(config.tracking, sinks),
                watch=Watch(config.service.stall_s),
            )
            fleet.inbox.wake = service.wake
            yield service
        except ServiceLost as error:
            raise CannotServe(f"{error.message}; the reason is above") from error
        finally:
            fleet.close()


def replica_config(config: Config, engine: EngineConfig) -> Config:
    """Return what a replica is told: the front has the clients, and their metrics."""
    service = msgspec.structs.replace(config.service, keys=None, journal=None)
    return msgspec.structs.replace(config, engine=engine, service=service, tracking=TrackingConfig(), fleet=FleetConfig())


def divided(engine: EngineConfig, replicas: int) -> tuple[list[Place], EngineConfig]:
    """Divide this host among replicas: on CUDA a GPU each, else cores and memory. Raises InputError where it has too few."""
    from rollout.fleet.launcher import Place

    if engine.device.startswith("cuda"):
        gpus = visible_gpus()
        if len(gpus) < replicas:
            raise InputError(f"{replicas} replicas on {len(gpus)} GPUs: each needs one; --replicas {max(1, len(gpus))}")
        return [Place(environment={"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:replicas]], engine
    sets = core_sets(sorted(os.sched_getaffinity(0)), replicas)
    places = [Place(cores) for cores in sets]
    changes: dict[str, object] = {"cpu_offload_safety_threshold": engine.cpu_offload_safety_threshold / replicas}
    if engine.threads is None:
        changes["threads"] = max(1, min(map(len, sets)))
    if engine.kv_gib is None and engine.kv_tokens is None:
        changes["kv_gib"] = KV_SHARE * psutil.virtual_memory().available / replicas / 2**30
    return places, msgspec.structs.replace(engine, **changes)


def core_sets(cores: list[int], replicas: int) -> list[frozenset[int]]:
    """Give each replica as many neighbouring cores as the others; an empty set, which is any core, where there are too few."""
    each = len(cores) // replicas
    return [frozenset(cores[i * each : (i + 1) * each]) for i in range(replicas)]


def visible_gpus() -> list[str]:
    """List the GPUs of this host as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(i) for i in range(len(list(GPUS.iterdir())))] if GPUS.is_dir() else []
