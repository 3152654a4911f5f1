"""A service with keys on loopback, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rollout.client.api import RolloutClient
from rollout.engine.values import Limits
from rollout.service.loop import Service
from rollout.transport.frames import Decoder, pack
from rollout.transport.keys import files
from rollout.transport.keys.cookie import ClientCookie, cookie_file
from rollout.transport.keys.curve import introduce
from rollout.transport.keys.files import ClientKeys, Role
from rollout.transport.messages import Alive, ServiceMessage, answer_limits
from tests.support.wire import serving_at

WAIT = 60.0


class Keyed:
    """Key files in a folder, and a service that uses them while `serving`."""

    def __init__(self, folder: Path, engine: Any) -> None:
        self.file = folder / "service.json"
        self.folder = folder
        self.engine = engine
        self.service: Service
        files.create(self.file, "tcp://127.0.0.1:1")

    @contextmanager
    def serving(self, **options: Any) -> Iterator[Keyed]:
        options.setdefault("linger_s", 0.1)  # the dealers here do not say goodbye
        with serving_at(self.engine, "tcp://127.0.0.1:*", keys=str(self.file), **options) as self.service:
            yield self

    def add(self, name: str, *roles: Role, at: str | None = None) -> Path:
        """Make a connection file; `at`: another address than the service's, e.g. a relay's."""
        path = self.folder / f"{name}.json"
        keys = files.add(self.file, name, roles, path)
        files._write(path, msgspec.structs.replace(keys, address=at or self.service.endpoint), replace=True)
        return path

    def client(self, name: str, *roles: Role, at: str | None = None, **options: Any) -> RolloutClient:
        return RolloutClient(str(self.add(name, *roles, at=at)), name=name, **options)


class RawDealer:
    """A client of somebody's own making."""

    def __init__(self, address: str, keys: ClientKeys | None, routing_id: bytes | None = None, **keypair: bytes) -> None:
        self._context: Any = zmq.Context()
        self.sock: Any = self._context.socket(zmq.DEALER)
        self.sock.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            introduce(self.sock, keys)
        elif cookie_file(address).exists():  # it is this user's
            ClientCookie(address).show(self.sock)
        for option, value in keypair.items():
            self.sock.setsockopt(getattr(zmq, option), value)
        if routing_id is not None:
            self.sock.setsockopt(zmq.ROUTING_ID, routing_id)
        self.sock.connect(address)
        self._decoder: Decoder[ServiceMessage] = Decoder(ServiceMessage, answer_limits(Limits()))

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self.sock.send_multipart(pack(message), copy=True)

    def receive(self, seconds: float, wanted: int = 1000) -> list[Any]:
        """Return what comes, heartbeats left out: so many messages, or until so many seconds were silent."""
        got: list[Any] = []
        while len(got) < wanted and self.sock.poll(int(seconds * 1000)):
            message = self._decoder.unpack(self.sock.recv_multipart(copy=True))
            got += [message] if not isinstance(message, Alive) else []
        return got

    def close(self) -> None:
        self._context.destroy(linger=0)
