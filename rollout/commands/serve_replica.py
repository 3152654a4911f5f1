"""`rollout serve --join FRONT`: a service with an engine, started by whoever likes, that joins a front."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rollout.commands.starting import Stopper, start
from rollout.config import DEFAULT_ENDPOINT, Config, InputError
from rollout.fleet.join_client import JoinClient, own_name
from rollout.process import Folder
from transport.keys import files
from transport.keys.files import ClientKey, ClientKeys
from transport.sockets import check_address
from transport.weights.group import own_address

if TYPE_CHECKING:
    from rollout.service.engine_api import EngineLike
    from rollout.service.loop import Service

AGAIN = 75
"""exit status of a replica whose front wants another process in its place (EX_TEMPFAIL)"""


@contextmanager
def joined_service(config: Config, stop: Stopper, make: Callable[[Config], EngineLike] | None = None) -> Iterator[Service]:
    """Make the service, of the engine that `make` makes, and keep it joined to its front while the block runs. Raises
    InputError, CannotServe."""
    front = config.fleet.join
    assert front is not None
    with ExitStack() as stack:
        try:
            keys = files.read_client(front) if "://" not in front else None
            if keys is None:
                check_address(front, "replica")
            folder = stack.enter_context(Folder("replica"))
            config, own = for_front(config, keys, folder)
        except ValueError as error:
            raise InputError(str(error)) from None
        _, service = start(config, make)
        name = config.fleet.name or own_name()
        address = reachable(service.endpoint, front if keys is None else keys.address)
        try:
            joiner = JoinClient(front, name, address, own, lambda again: stop.ask(AGAIN if again else 0))
        except ValueError as error:
            raise InputError(str(error)) from None
        stack.callback(joiner.close)
        yield service


def for_front(config: Config, keys: ClientKeys | None, folder: Path) -> tuple[Config, str]:
    """Return the configuration of a service for a front alone, and the service's public key; "" without keys. `keys`: by which
    it joins. `folder`: for the service's own, made for this process. Raises InputError."""
    service, front = config.service, config.fleet.join
    if service.keys is not None:
        raise InputError("--service.keys with --join: a replica makes its own keys, which let nobody in but the front")
    if service.journal is not None:
        raise InputError("--service.journal with --join: the front has the clients, and the journal")
    assert front is not None
    endpoint = service.endpoint
    if endpoint == DEFAULT_ENDPOINT:
        endpoint = f"tcp://{bracketed(own_address(front if keys is None else keys.address))}:*"
    if keys is None:
        return msgspec.structs.replace(config, service=msgspec.structs.replace(service, endpoint=endpoint)), ""
    the_front = ClientKey("front", keys.server, ("rollout", "weights", "admin", "read"))
    own = files.create(folder / "service.json", endpoint, (the_front,))
    service = msgspec.structs.replace(service, endpoint=endpoint, keys=str(folder / "service.json"))
    return msgspec.structs.replace(config, service=service), own.public


def reachable(endpoint: str, front: str) -> str:
    """Return the address by which the front reaches an endpoint that listens everywhere: the one by which it is reached."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{bracketed(own_address(front))}:{port}" if host in ("0.0.0.0", "*", "[::]") else endpoint


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
