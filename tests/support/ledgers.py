"""Ledgers of services of a hash engine: a run of a trainer, written and read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.client.api import RolloutClient
from rollout.engine.values import Sample, Sampling
from rollout.ledger.writer import LedgerWriter
from tests.support.hash_engine import HashEngine, tensors_of
from tests.support.wire import serving

WAIT = 60.0
ROOM = 1 << 30


@contextmanager
def recorded(path: Path, engine: HashEngine | None = None, most_bytes: int = ROOM, **options: Any) -> Iterator[RolloutClient]:
    """Connect a client to a service that writes a ledger."""
    ledger = LedgerWriter(str(path), most_bytes, **options)
    with serving(engine or HashEngine(), ledger=ledger) as service, RolloutClient(service.endpoint) as client:
        yield client


def asked(i: int, **more: Any) -> tuple[list[int], Sampling]:
    """Return a prompt and its sampling."""
    return [1, 2, 3 + i], Sampling(**{"n": 3, "max_tokens": 20, "seed": 100 + i, **more})


def trained(client: RolloutClient, steps: int, first: int = 0, **more: Any) -> list[list[Sample]]:
    """Train: two groups a step, and a refresh after it."""
    groups = []
    for step in range(first, first + steps):
        groups += [client.submit(*asked(10 * step + i, **more)).result(timeout=WAIT) for i in range(2)]
        client.refresh(tensors_of(step + 1), version=step + 1)
    return groups
