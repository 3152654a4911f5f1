"""What a user's type checker sees of the public names: tests/test_typing.py runs mypy and pyright over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

import numpy as np

from rollout import AsyncRolloutClient, ClientConfig, Group, Handle, Receipt, RolloutClient, Sample, Sampling, Verified
from rollout.engine.engine import Engine


def connects() -> None:
    settings = ClientConfig(name="trainer", budget=1000)
    assert_type(RolloutClient("tcp://127.0.0.1:1", settings, link_timeout_s=9.0), RolloutClient)
    assert_type(AsyncRolloutClient("tcp://127.0.0.1:1", name="trainer"), AsyncRolloutClient)


def submits(client: RolloutClient) -> None:
    handle = client.submit([1, 2, 3], Sampling(n=2, max_tokens=8))
    assert_type(handle, Handle)
    samples = handle.result(timeout=60)
    assert_type(samples, list[Sample])
    for sample in samples:
        assert_type(sample.index, int)
        assert_type(sample.stopped_by, str | None)
    assert_type(client.encode("text"), Sequence[int] | np.ndarray)
    assert_type(client.decode(samples[0]), str)
    assert_type(client.verify(samples, [1, 2, 3], Sampling(seed=1)), list[Verified])
    assert_type(client.receipt(samples[0], [1, 2, 3], Sampling(seed=1)), Receipt)


async def awaits(client: AsyncRolloutClient) -> None:
    handle = client.submit([1, 2, 3])
    assert_type(await handle, list[Sample])


def steps(engine: Engine, group: Group) -> None:
    engine.submit(group)
    assert_type(engine.step(), list[Sample])
    assert_type(engine.has_work, bool)


def wrong(client: RolloutClient) -> None:
    RolloutClient("tcp://127.0.0.1:1", budget="4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    RolloutClient("tcp://127.0.0.1:1", nam="trainer")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Sampling(n="4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    client.no_such_method()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
