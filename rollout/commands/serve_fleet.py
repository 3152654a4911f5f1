"""`rollout serve --replicas N`: a router in this process, and N replicas as child processes. Imports no torch."""

from __future__ import annotations

import gc
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import xxhash

from rollout import models
from rollout.commands.lines import counted
from rollout.commands.progress import Phases
from rollout.commands.starting import listen, open_ledger
from rollout.config import DEFAULT_ENDPOINT, CannotServe, Config, FleetConfig, InputError, TrackingConfig, dump
from rollout.engine.config import EngineConfig
from rollout.engine.processes import run_module
from rollout.engine.values import Limits, Served
from rollout.engine.values.arithmetic import Arithmetic
from rollout.fleet.join_listener import JoinEndpoint, JoinListener
from rollout.fleet.launcher import Host, Launcher, LauncherLike, RouterFolder
from rollout.fleet.owners import Ban, Owners
from rollout.metrics.sinks import open_sinks
from rollout.metrics.tracker import Tracker
from rollout.transport.errors import ServiceLost
from rollout.transport.sockets import ServiceEnd

if TYPE_CHECKING:
    from rollout.service.journal import Journal
    from rollout.service.loop import Service

KV_SHARE = 0.25
"""share of the free memory for the KV of all replicas of a host without GPUs, as for one engine"""
YOUNG_OBJECTS = 10_000
"""new objects between two garbage collections: at Python's 700, the collector examines waiting samples again and again"""
GPUS = Path("/proc/driver/nvidia/gpus")


@contextmanager
def fleet_service(config: Config, journal: Journal | None, progress: Phases) -> Iterator[Service]:
    """Start replicas and the router's service, which closes the journal. Raises InputError, CannotServe if local replicas do
    not start."""
    from rollout.fleet.fleet import Fleet, FleetOptions
    from rollout.fleet.replica_set import Predecessor
    from rollout.fleet.verifier import Verification

    owners = owners_of(config.fleet, journal)
    with ExitStack() as stack:
        try:
            # so that a port in use, or unusable keys, are reported before a model is loaded
            ServiceEnd(config.service.endpoint, config.limits, config.service.keys).close()
            ledger = open_ledger(config)
            if ledger is not None:
                stack.callback(ledger.close)
            joins, launcher = make_replicas(config, owners)
            sinks = open_sinks(config.tracking, config.engine.model)
            progress.begin(f"waiting for {described(config)}")
        except models.ModelNotFound as error:
            raise CannotServe(str(error)) from error
        except ValueError as error:
            raise InputError(str(error)) from error
        before = Served() if journal is None else journal.weights
        survivors = isinstance(launcher, Launcher) and launcher.folder.returning
        fleet = Fleet(
            joins,
            launcher,
            options=FleetOptions(
                config.limits,
                config.fleet.replica_grace_s,
                config.engine.seed,
                Verification(config.fleet.verify, config.fleet.verify_wait_s),
            ),
            predecessor=Predecessor(before, returning=survivors or before.version > 0),
        )
        stack.callback(fleet.close)
        ready = lambda line: progress.say(f"{line}, after {progress.seconds:.1f} s")  # noqa: E731
        try:
            if config.fleet.replicas:
                fleet.open(count=1 if survivors else config.fleet.replicas, patient=survivors, report=ready)
            else:
                fleet.open(math.inf, count=1, patient=True, report=ready)
            check_verifiable(config.fleet, fleet.arithmetic)
            service = listen(config, fleet, journal, ledger, Tracker(config.tracking, sinks), progress)
        except ServiceLost as error:
            raise CannotServe(f"{error.message}; the reason is above") from error
        fleet.inbox.wake = service.wake
        joins.own_addresses.add(service.endpoint)
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        yield service


def owners_of(fleet: FleetConfig, journal: Journal | None) -> Owners:
    """Return whom the router trusts and whom it has banned; new bans are written to the journal. Raises InputError."""
    from rollout.service.journal import BanRow

    if journal is None:
        return Owners(fleet.trust)
    return Owners(fleet.trust, [Ban(*row) for row in journal.bans()], lambda ban: journal.banned(BanRow(*ban)))


def check_verifiable(fleet: FleetConfig, arithmetic: str) -> None:
    """Raises CannotServe if samples are to be verified, and their bits depend on the batch."""
    if fleet.verify and Arithmetic.parse(arithmetic).by_batch:
        raise CannotServe(
            f"--fleet.verify: bits of the arithmetic {arithmetic} depend on the batch, so no sample can be verified: leave "
            "it out, or see docs/decisions/arithmetic.md"
        )


def make_replicas(config: Config, owners: Owners) -> tuple[JoinListener, LauncherLike | None]:
    """Listen for replicas, and start those that the configuration asks for. Raises ModelNotFound, InputError, CannotServe,
    ValueError."""
    with ExitStack() as started:
        endpoints: list[JoinEndpoint] = []
        launcher: LauncherLike | None = None
        address = listening_address(config.fleet)
        if address is not None:
            endpoints.append(JoinEndpoint(ServiceEnd(address, Limits(), config.service.keys)))
            started.callback(endpoints[0].end.close)
        if config.fleet.ray is not None:
            launcher = ray_launcher(config, endpoints[0].end.endpoint)
        elif config.fleet.replicas:
            launcher = local = local_launcher(config)
            started.callback(local.close)
            endpoints.append(JoinEndpoint(ServiceEnd(local.folder.endpoint, Limits()), local.admit))
        joins = JoinListener(*endpoints, owners=owners)
        started.pop_all()  # the fleet closes them
    return joins, launcher


def listening_address(fleet: FleetConfig) -> str | None:
    """Return the address at which replicas that were started elsewhere join; None: there are none. Raises InputError."""
    if fleet.listen_replicas is None and fleet.ray == "local":
        return "tcp://127.0.0.1:*"
    if fleet.listen_replicas is None and fleet.ray is not None:
        raise InputError("--ray with a cluster: give --listen-replicas tcp://*:PORT, where replicas join; see docs/fleet.md")
    return fleet.listen_replicas


def ray_launcher(config: Config, endpoint: str) -> LauncherLike:
    """Start replicas on a Ray cluster, which join at `endpoint`. Raises CannotServe, InputError, ModelNotFound."""
    from rollout.fleet.ray_launcher import RayLauncher, Reservation

    fleet, engine = config.fleet, config.engine
    assert fleet.ray is not None
    if config.service.keys is not None and fleet.ray_join is None:
        raise InputError("--ray with --service.keys: give --fleet.ray-join the connection file of a key with the role replica")
    if fleet.ray == "local":
        engine = msgspec.structs.replace(engine, model=str(models.resolve(engine.model)))

    def toml(name: str, cpus: int) -> str:
        own = engine if engine.threads is not None else msgspec.structs.replace(engine, threads=max(1, cpus // engine.tp))
        if own.tp > 1:  # an actor starts each rank
            own = msgspec.structs.replace(own, tp_launcher="torchrun")
        if fleet.ray == "local":
            own = with_memory_share(own, fleet.replicas)
        replica = replica_config(config, own)
        service = msgspec.structs.replace(replica.service, endpoint=DEFAULT_ENDPOINT, exit_without_clients_s=None)
        joined = FleetConfig(join=fleet.ray_join or endpoint, name=name)
        return dump(msgspec.structs.replace(replica, service=service, fleet=joined))

    gpus = 1.0 if engine.device.startswith("cuda") else 0.0
    try:
        return RayLauncher(endpoint, fleet.replicas, toml, fleet.ray, Reservation(fleet.ray_cpus, gpus, engine.tp))
    except ModuleNotFoundError as error:
        raise CannotServe(f"--ray: {error.name} is not installed: pip install 'rl-rollout[ray]'") from error
    except (RuntimeError, TimeoutError) as error:
        raise CannotServe(str(error) or "Ray does not start") from error


def local_launcher(config: Config) -> Launcher:
    """Start replicas on this host. With a journal they outlive a router that is killed. Raises ModelNotFound, InputError,
    CannotServe."""
    model, journal = models.resolve(config.engine.model), config.service.journal
    places, engine = divided(msgspec.structs.replace(config.engine, model=str(model)), config.fleet.replicas)
    digest = xxhash.xxh3_128_hexdigest(dump(replica_config(config, config.engine)).encode())
    try:
        folder = RouterFolder(None if journal is None else Path(f"{journal}.replicas"), digest)
        toml = folder.path / f"replica-{os.getpid()}.toml"
        toml.write_text(dump(replica_config(config, engine)))
    except OSError as error:
        raise CannotServe(f"replicas cannot be started: {error}") from error
    return Launcher(partial(replica_command, toml, folder), places, folder)


def described(config: Config) -> str:
    """Describe the replicas and where they come from."""
    where = "" if config.fleet.ray is None else f" on Ray ({config.fleet.ray})"
    ways = [f"{counted(config.fleet.replicas, 'replica')} of {config.engine.model}{where}"] if config.fleet.replicas else []
    if config.fleet.listen_replicas is not None:
        ways.append(f"replicas that join at {config.fleet.listen_replicas}")
    return " and ".join(ways)


def replica_command(toml: Path, folder: RouterFolder, name: str) -> list[str]:
    """Return the command line of a replica. It listens at a socket in a folder of this user: local replicas have no keys."""
    serve = run_module("rollout", "serve", "--config", toml)
    serve += [
        "--service.endpoint",
        f"ipc://{folder.path}/{secrets.token_hex(4)}",
        "--join",
        folder.endpoint,
        "--fleet.name",
        name,
        "--quiet",
    ]
    return serve if folder.lasting else [*serve, "--exit-on-stdin-close"]


def replica_config(config: Config, engine: EngineConfig) -> Config:
    """Return the configuration of a replica: clients and metrics are the router's."""
    alone_s = None if config.service.journal is None else config.fleet.router_grace_s
    service = msgspec.structs.replace(
        config.service, keys=None, journal=None, ledger=None, ledger_prompts=False, ledger_tokens=False,
        exit_without_clients_s=alone_s,
    )  # fmt: skip
    return msgspec.structs.replace(config, engine=engine, service=service, tracking=TrackingConfig(), fleet=FleetConfig())


def divided(engine: EngineConfig, replicas: int) -> tuple[list[Host], EngineConfig]:
    """Divide this host among replicas: on CUDA a GPU each, else cores and memory. Raises InputError where it has too few."""
    if engine.device.startswith("cuda"):
        gpus = visible_gpus()
        if len(gpus) < replicas:
            raise InputError(f"{replicas} replicas on {len(gpus)} GPUs: each needs one; set --replicas {max(1, len(gpus))}")
        return [Host(environment={"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:replicas]], engine
    sets = core_sets(sorted(os.sched_getaffinity(0)), replicas)
    places = [Host(cores) for cores in sets]
    if engine.threads is None:
        engine = msgspec.structs.replace(engine, threads=max(1, min(map(len, sets)) // engine.tp))
    return places, with_memory_share(engine, replicas)


def with_memory_share(engine: EngineConfig, replicas: int) -> EngineConfig:
    """Give each rank of each replica of a host its part of the host's memory; replicas on GPUs have their own."""
    replicas *= engine.tp
    if engine.device.startswith("cuda"):
        return engine
    threshold = engine.advanced.cpu_offload_safety_threshold / replicas
    advanced = msgspec.structs.replace(engine.advanced, cpu_offload_safety_threshold=threshold)
    changes: dict[str, object] = {"advanced": advanced}
    if engine.kv_gib is None and engine.kv_tokens is None:
        changes["kv_gib"] = KV_SHARE * psutil.virtual_memory().available / replicas / 2**30
    return msgspec.structs.replace(engine, **changes)


def core_sets(cores: list[int], replicas: int) -> list[frozenset[int]]:
    """Give each replica the same number of neighbouring cores; an empty set, which means any core, if there are too few."""
    each = len(cores) // replicas
    return [frozenset(cores[i * each : (i + 1) * each]) for i in range(replicas)]


def visible_gpus() -> list[str]:
    """List the GPUs of this host as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(i) for i in range(len(list(GPUS.iterdir())))] if GPUS.is_dir() else []
