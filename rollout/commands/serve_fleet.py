"""`rollout serve --replicas N`: a front in this process, N services with an engine each as its children. Imports no torch."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import xxhash

from engine.config import EngineConfig
from engine.types import Limits, Served
from rollout import models
from rollout.commands.starting import listen
from rollout.config import DEFAULT_ENDPOINT, CannotServe, Config, FleetConfig, InputError, TrackingConfig, dump
from rollout.fleet.join_listener import JoinListener, MixedLauncher
from rollout.fleet.launcher import Host, Launcher, LauncherLike
from rollout.fleet.state_file import ReplicaStateFile
from rollout.metrics.sinks import open_sinks
from rollout.metrics.tracker import Tracker
from transport.errors import ServiceLost
from transport.sockets import ServiceEnd

if TYPE_CHECKING:
    from rollout.service.journal import Journal
    from rollout.service.loop import Service

KV_SHARE = 0.25
"""of the free memory, for the KV of all replicas of a host without GPUs, as one engine would take"""
YOUNG_OBJECTS = 10_000
"""before Python looks for garbage among them: at its own 700, samples that wait for a moment, none of which is garbage, are
looked at again and again"""
GPUS = Path("/proc/driver/nvidia/gpus")


@contextmanager
def fleet_service(config: Config, journal: Journal | None) -> Iterator[Service]:
    """Have replicas and make the service in front of them, which closes the journal. Raises InputError, CannotServe where
    those that are started here do not start."""
    from rollout.fleet.fleet import Fleet

    with ExitStack() as stack:
        try:
            # a port in use, or keys that cannot be used, are told before a model is loaded
            ServiceEnd(config.service.endpoint, config.limits, config.service.keys).close()
            launcher = make_launcher(config)
            sinks = open_sinks(config.tracking)
        except models.ModelNotFound as error:
            raise CannotServe(str(error)) from error
        except ValueError as error:
            raise InputError(str(error)) from error
        fleet = Fleet(
            launcher,
            config.limits,
            config.fleet.replica_grace_s,
            config.engine.seed,
            before=Served() if journal is None else journal.weights,
        )
        stack.callback(fleet.close)
        try:
            if config.fleet.replicas:
                fleet.open(count=1 if launcher.outlived else config.fleet.replicas, patient=bool(launcher.outlived))
            else:
                fleet.open(math.inf, count=1, patient=True)
            service = listen(config, fleet, journal, Tracker(config.tracking, sinks))
        except ServiceLost as error:
            raise CannotServe(f"{error.message}; the reason is above") from error
        fleet.inbox.wake = service.wake
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        yield service


def make_launcher(config: Config) -> LauncherLike:
    """Make what starts replicas, lets them join, or both. Raises ModelNotFound, InputError, CannotServe, ValueError."""
    joins = make_joins(config)
    if not config.fleet.replicas:
        assert joins is not None
        return joins
    try:
        if config.fleet.ray is not None:
            assert joins is not None
            return ray_launcher(config, joins)
        launcher = local_launcher(config)
    except BaseException:
        if joins is not None:
            joins.close()
        raise
    return launcher if joins is None else MixedLauncher(launcher, joins)


def make_joins(config: Config) -> JoinListener | None:
    """Listen for replicas, if the front is to. Raises ValueError."""
    endpoint = config.fleet.listen_replicas
    if endpoint is None and config.fleet.ray == "local":
        endpoint = "tcp://127.0.0.1:*"
    if endpoint is None and config.fleet.ray is not None:
        raise InputError("--ray with a cluster: --listen-replicas tcp://*:PORT is where its replicas join; see docs/fleet.md")
    return None if endpoint is None else JoinListener(ServiceEnd(endpoint, Limits(), config.service.keys))


def ray_launcher(config: Config, joins: JoinListener) -> LauncherLike:
    """Make what has replicas on a Ray cluster. Raises CannotServe, InputError, ModelNotFound."""
    from rollout.fleet.ray_launcher import RayLauncher

    fleet, engine = config.fleet, config.engine
    assert fleet.ray is not None
    if config.service.keys is not None and fleet.ray_join is None:
        raise InputError("--ray with --service.keys: --fleet.ray-join names the connection file of a key with the role replica")
    if fleet.ray == "local":
        engine = msgspec.structs.replace(engine, model=str(models.resolve(engine.model)))

    def toml(name: str, cpus: int) -> str:
        own = engine if engine.threads is not None else msgspec.structs.replace(engine, threads=max(1, cpus))
        if fleet.ray == "local":
            own = with_memory_share(own, fleet.replicas)
        replica = replica_config(config, own)
        service = msgspec.structs.replace(replica.service, endpoint=DEFAULT_ENDPOINT, exit_without_clients_s=None)
        joined = FleetConfig(join=fleet.ray_join or joins.endpoint, name=name)
        return dump(msgspec.structs.replace(replica, service=service, fleet=joined))

    gpus = 1.0 if engine.device.startswith("cuda") else 0.0
    try:
        return RayLauncher(joins, fleet.replicas, toml, fleet.ray, fleet.ray_cpus, gpus)
    except ModuleNotFoundError as error:
        raise CannotServe(f"--ray: {error}; pip install -e '.[ray]'") from error
    except (RuntimeError, TimeoutError) as error:
        raise CannotServe(str(error) or "Ray does not start") from error


def local_launcher(config: Config) -> Launcher:
    """Make what starts replicas on this host. With a journal a front may be killed and go on: they outlive it. Raises
    ModelNotFound, InputError."""
    model, journal = models.resolve(config.engine.model), config.service.journal
    places, engine = divided(msgspec.structs.replace(config.engine, model=str(model)), config.fleet.replicas)
    told = xxhash.xxh3_128_hexdigest(dump(replica_config(config, config.engine)).encode())
    kept = ReplicaStateFile(None if journal is None else Path(f"{journal}.replicas"), told)
    command = partial(replica_command, dump(replica_config(config, engine)), journal is None)
    return Launcher(command, places, kept=kept)


def described(config: Config) -> str:
    """Tell people where the replicas come from."""
    where = "" if config.fleet.ray is None else f" on Ray ({config.fleet.ray})"
    ways = [f"{config.fleet.replicas} replicas{where}"] if config.fleet.replicas else []
    if config.fleet.listen_replicas is not None:
        ways.append(f"replicas join at {config.fleet.listen_replicas}")
    return ", ".join(ways)


def replica_command(toml: str, ends_with_front: bool, ready: Path) -> list[str]:
    """Return the words of a replica's process that writes where it listens into `ready`. A socket in a folder of this user's:
    replicas have no keys."""
    config = ready.with_suffix(".toml")
    config.write_text(toml)
    serve = [sys.executable, "-m", "rollout", "serve", "--config", str(config), "--ready-file", str(ready)]
    serve += ["--service.endpoint", f"ipc://{ready}.sock"]
    return [*serve, "--exit-on-stdin-close"] if ends_with_front else serve


def replica_config(config: Config, engine: EngineConfig) -> Config:
    """Return what a replica is told: the front has the clients, and their metrics."""
    alone_s = None if config.service.journal is None else config.fleet.front_grace_s
    service = msgspec.structs.replace(config.service, keys=None, journal=None, exit_without_clients_s=alone_s)
    return msgspec.structs.replace(config, engine=engine, service=service, tracking=TrackingConfig(), fleet=FleetConfig())


def divided(engine: EngineConfig, replicas: int) -> tuple[list[Host], EngineConfig]:
    """Divide this host among replicas: on CUDA a GPU each, else cores and memory. Raises InputError where it has too few."""
    if engine.device.startswith("cuda"):
        gpus = visible_gpus()
        if len(gpus) < replicas:
            raise InputError(f"{replicas} replicas on {len(gpus)} GPUs: each needs one; --replicas {max(1, len(gpus))}")
        return [Host(environment={"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:replicas]], engine
    sets = core_sets(sorted(os.sched_getaffinity(0)), replicas)
    places = [Host(cores) for cores in sets]
    if engine.threads is None:
        engine = msgspec.structs.replace(engine, threads=max(1, min(map(len, sets))))
    return places, with_memory_share(engine, replicas)


def with_memory_share(engine: EngineConfig, replicas: int) -> EngineConfig:
    """Give each of the replicas that share a host its part of the memory; those on GPUs have their own."""
    if engine.device.startswith("cuda"):
        return engine
    threshold = engine.advanced.cpu_offload_safety_threshold / replicas
    advanced = msgspec.structs.replace(engine.advanced, cpu_offload_safety_threshold=threshold)
    changes: dict[str, object] = {"advanced": advanced}
    if engine.kv_gib is None and engine.kv_tokens is None:
        changes["kv_gib"] = KV_SHARE * psutil.virtual_memory().available / replicas / 2**30
    return msgspec.structs.replace(engine, **changes)


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
