"""`rollout serve --join ROUTER`: a service with an engine that joins a router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rollout.commands.progress import Phases
from rollout.commands.starting import Make, Stopper, start
from rollout.config import DEFAULT_ENDPOINT, Config, InputError
from rollout.fleet.join_client import JoinClient, own_name
from rollout.process import Folder
from rollout.transport.keys import files
from rollout.transport.keys.files import ClientKey, ClientKeys
from rollout.transport.sockets import check_address
from rollout.transport.weights.group import own_address

if TYPE_CHECKING:
    from rollout.service.loop import Service

RESTART = 75
"""exit status of a replica that should be restarted (EX_TEMPFAIL)"""


@contextmanager
def joined_service(config: Config, stop: Stopper, progress: Phases, make: Make | None = None) -> Iterator[Service]:
    """Start the service of the engine that `make` returns, and keep it joined to its router while the block runs. Raises
    InputError, CannotServe."""
    router = config.fleet.join
    assert router is not None
    with ExitStack() as stack:
        try:
            keys = files.read_client(router) if "://" not in router else None
            if keys is None:
                check_address(router, "replica")
            folder = stack.enter_context(Folder("replica"))
            config, own = for_router(config, keys, folder)
        except ValueError as error:
            raise InputError(str(error)) from None
        _, service = start(config, progress, make)
        name = config.fleet.name or own_name()
        address = reachable(service.endpoint, router if keys is None else keys.address)
        progress.begin(f"joining {router}")
        try:
            joiner = JoinClient(router, name, address, own, lambda again: stop.ask(RESTART if again else 0))
        except ValueError as error:
            raise InputError(str(error)) from None
        stack.callback(joiner.close)
        yield service


def for_router(config: Config, keys: ClientKeys | None, folder: Path) -> tuple[Config, str]:
    """Return the configuration of a service that only the router can use, and its public key, "" without keys. `keys`: with
    which it joins. `folder`: for the new keys of the service. Raises InputError."""
    service, router = config.service, config.fleet.join
    if service.keys is not None:
        raise InputError("--service.keys with --join: leave it out; a replica makes its own keys, which admit only the router")
    if service.journal is not None:
        raise InputError("--service.journal with --join: leave it out; the router has the clients and the journal")
    if service.ledger is not None:
        raise InputError("--service.ledger with --join: leave it out; the router has the clients and the ledger")
    assert router is not None
    endpoint = service.endpoint
    if endpoint == DEFAULT_ENDPOINT:
        endpoint = f"tcp://{bracketed(own_address(router if keys is None else keys.address))}:*"
    if keys is None:
        return msgspec.structs.replace(config, service=msgspec.structs.replace(service, endpoint=endpoint)), ""
    client = ClientKey("router", keys.server, ("rollout", "weights", "admin", "read"))
    own = files.create(folder / "service.json", endpoint, (client,))
    service = msgspec.structs.replace(service, endpoint=endpoint, keys=str(folder / "service.json"))
    return msgspec.structs.replace(config, service=service), own.public


def reachable(endpoint: str, router: str) -> str:
    """Return the address at which the router reaches an endpoint; for one on all interfaces, that of the interface to it."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{bracketed(own_address(router))}:{port}" if host in ("0.0.0.0", "*", "[::]") else endpoint


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
