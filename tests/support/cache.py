"""Caches in threads of the test, in front of a service of a hash engine, or of none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from rollout.cache.offline import OfflineService, OfflineWeights
from rollout.cache.proxy import CacheProxy, Connect
from rollout.cache.recorder import stored_welcome
from rollout.cache.store import FolderStore
from rollout.cache.upstream import ServiceBehind
from rollout.client.api import RolloutClient
from rollout.engine.types import Limits
from rollout.transport.sockets import ServiceEnd
from tests.support.hash_engine import weights_of

WAIT = 60.0
"""for what comes: a bound for hangs only"""
ROOM = 1 << 30


@contextmanager
def cache_of(folder: Path, address: str | None, room: int = ROOM) -> Iterator[CacheProxy]:
    """Run a cache in front of the service at `address`; None: offline. It ends whatever happens."""
    store = FolderStore(folder, room)
    end = ServiceEnd("tcp://127.0.0.1:*", Limits())
    try:
        if address is None:
            welcome = stored_welcome(store, Limits())
            assert welcome is not None, "nothing was recorded"
            connect: Connect = partial(OfflineService, OfflineWeights(welcome, store))
        else:
            connect = partial(ServiceBehind, address, Limits())
        proxy = CacheProxy(end, store, connect, Limits(), offline=address is None)
        proxy.endpoint = end.endpoint  # type: ignore[attr-defined]
        thread = threading.Thread(target=proxy.run, daemon=True)
        thread.start()
        yield proxy
        proxy.stop()
        thread.join(WAIT)
        assert not thread.is_alive()
    finally:
        end.close(0.5)
        store.close()


@contextmanager
def client_of(folder: Path, address: str | None, room: int = ROOM) -> Iterator[tuple[RolloutClient, CacheProxy]]:
    """Connect a client through a cache."""
    with cache_of(folder, address, room) as proxy, RolloutClient(proxy.endpoint) as client:  # type: ignore[attr-defined]
        yield client, proxy


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version as a trainer sends them."""
    return {name: torch.from_numpy(values) for name, values in weights_of(version).items()}
