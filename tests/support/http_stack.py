"""A gateway in front of a scripted engine, for tests of its access, limits and connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rollout.client.api import RolloutClient
from rollout.engine.values import Routing
from rollout.transport.loopback import LoopbackService
from tests.support.fake_engine import FakeEngine
from tests.support.gateway import Gateway, gateway
from tests.support.wire import serving

TOKEN = "a token of more than sixteen"
BODY = {"token_ids": [5], "sampling_params": {"max_tokens": 3, "logprobs": 0, "seed": 1}}
"""with a seed it is a group of its own"""
POST = b"POST /inference/v1/generate HTTP/1.1\r\nhost: localhost\r\n"


class Stack(msgspec.Struct):
    engine: FakeEngine
    client: RolloutClient
    gateway: Gateway

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def generate(self, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/inference/v1/generate", json=BODY, timeout=60, **options)


@contextmanager
def stack_of(tiny_model: Path, routing: Routing | None = None, **settings: Any) -> Iterator[Stack]:
    engine, end = FakeEngine(), LoopbackService()
    engine.routing = routing
    with (
        serving(engine, end),
        RolloutClient(transport=end.connect()) as client,
        gateway(client, tiny_model, **settings) as running,
    ):
        yield Stack(engine, client, running)


def limits(**some: Any) -> Any:
    from rollout.http.settings import RequestLimits

    return RequestLimits(**some)


def raw(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)
