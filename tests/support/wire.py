"""The other side of the service without `rollout.client`: messages by hand, over loopback, one turn of the loop at a time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np

from rollout.config import ServiceConfig
from rollout.engine.values import Limits, Sample, Sampling
from rollout.service.build import open_service
from rollout.service.loop import Service, ServiceTiming
from rollout.transport import messages as m
from rollout.transport.columns import unpack_samples
from rollout.transport.frames import Decoder, Frame, pack
from rollout.transport.loopback import LoopbackService
from tests.support.fake_engine import FakeEngine

T = TypeVar("T")
SERVICE_OPTIONS = {*ServiceConfig.__struct_fields__} - {"journal", "ledger"}
JOIN_S = 60.0
"""for a service's thread to end: a bound for hangs only"""


class Peer:
    """One connection. Everything it gets is in `got`, until taken."""

    def __init__(self, bench: Bench, session: str) -> None:
        self.end = bench.transport.connect()
        self.session = session
        self.got: list[Any] = []
        self._bench = bench
        self._decoder: Decoder[m.ServiceMessage] = Decoder(m.ServiceMessage, Limits())

    def send(self, *messages: msgspec.Struct) -> Peer:
        for message in messages:
            self.send_frames(pack(message))
        return self

    def send_frames(self, frames: list[Frame]) -> None:
        assert self.end.send(frames)

    def hello(self, groups: list[m.Submit] | None = None, number: int = 1, capabilities: tuple[str, ...] = ()) -> m.Welcome:
        digests = np.frombuffer(b"".join(map(m.digest, groups or [])), np.uint8).reshape(-1, m.DIGEST_BYTES)
        self.send(m.Hello(m.PROTOCOL, self.session, number, "tester", capabilities, digests))
        self._bench.turn()
        (welcome,) = self.take(m.Welcome)
        return welcome

    def read(self) -> list[Any]:
        while frames := self.end.receive(0):
            self.got += map(self._decoder.unpack, frames)
        return self.got

    def take(self, kind: type[T]) -> list[T]:
        """Remove the messages of a kind from `got`, and return them."""
        found = [message for message in self.read() if isinstance(message, kind)]
        self.got = [message for message in self.got if not isinstance(message, kind)]
        return found

    def samples(self) -> list[Sample]:
        return [sample for message in self.take(m.SamplesDone) for sample in unpack_samples(message)]

    def refused(self) -> m.Refused:
        (refused,) = self.take(m.Refused)
        return refused


class Bench:
    """A service on a loopback that turns when it is told to."""

    def __init__(self, engine: FakeEngine | None = None, **options: Any) -> None:
        self.engine = engine or FakeEngine()
        self.transport = LoopbackService()
        options.setdefault("client_grace_s", 1000.0)  # nobody is forgotten because the machine is slow
        options.setdefault("timing", ServiceTiming(idle_poll_s=0.0))
        self.service = service_of(self.engine, transport=self.transport, **options)
        self._peers = 0

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.service.run_once()

    def settle(self) -> None:
        """Run until the engine has nothing to do and everything is sent that can be."""
        for _ in range(10_000):
            self.turn()
            if not self.engine.has_work:
                return
        raise AssertionError("the engine never ran dry")

    def connect(self, session: str | None = None) -> Peer:
        """Open a new connection that has not said Hello; of a new session unless given."""
        self._peers += 1
        return Peer(self, session or f"{self._peers:032x}")

    def client(self, *capabilities: str) -> Peer:
        peer = self.connect()
        peer.hello(capabilities=capabilities)
        return peer


def service_of(engine: Any, endpoint: str | None = None, **options: Any) -> Service:
    """Open a service. options: of `open_service`, and fields of `ServiceConfig` and `ServiceTiming`."""
    config = {name: options.pop(name) for name in {*options} & SERVICE_OPTIONS}
    timing = {name: options.pop(name) for name in {*options} & {"linger_s", "clock"}}
    options["timing"] = dataclasses.replace(options.get("timing", ServiceTiming()), **timing)
    return open_service(engine, ServiceConfig(**config | ({"endpoint": endpoint} if endpoint else {})), **options)


@contextmanager
def serving(engine: Any, end: LoopbackService | None = None, **options: Any) -> Iterator[Service]:
    """Run a service in a thread, at `end` or at a socket, and end it whatever happens."""
    with serving_at(engine, None if end else "tcp://127.0.0.1:*", transport=end, **options) as service:
        yield service


@contextmanager
def serving_at(engine: Any, endpoint: str | None, **options: Any) -> Iterator[Service]:
    """Run a service as `serving` does, at an endpoint."""
    service = service_of(engine, endpoint, **options)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join(JOIN_S)
    assert not thread.is_alive()


def submit(group_id: str = "g", prompt: list[int] | np.ndarray = [1, 2, 3], serial: int = 0, **sampling: Any) -> m.Submit:  # noqa: B006
    array = prompt if isinstance(prompt, np.ndarray) else np.array(prompt, np.int32)
    return m.Submit(group_id, array, Sampling(**{"max_tokens": 4, **sampling}), serial)
