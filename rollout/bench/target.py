"""What workloads run on: a service in a process of its own, or an engine in this process."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from rollout.client.api import RolloutClient
from rollout.config import Config
from rollout.engine.values import Group, Sample, Sampling
from rollout.models import hide_progress_bars
from rollout.process import RunningService, service_process


class Target(Protocol):
    """Takes prompts and yields samples as they finish."""

    name: str

    def generate(self, prompts: list[np.ndarray], sampling: Sampling | list[Sampling]) -> Iterator[Sample]:
        """sampling: for all prompts, or one for each."""
        ...

    def status(self) -> dict[str, Any]:
        """Return `Engine.status()`. Its counters run from the start of the target."""
        ...

    def peak_rss_bytes(self) -> int: ...


OpenTarget = Callable[[Config], AbstractContextManager[Target]]


class ServiceTarget:
    """A client, ZeroMQ and a service in another process."""

    name = "rollout"

    def __init__(self, client: RolloutClient, service: RunningService) -> None:
        self.client, self.service = client, service

    def generate(self, prompts: list[np.ndarray], sampling: Sampling | list[Sampling]) -> Iterator[Sample]:
        return self.client.generate(prompts, sampling)

    def status(self) -> dict[str, Any]:
        return self.client.status()

    def peak_rss_bytes(self) -> int:
        return self.service.peak_rss_bytes()


class EngineTarget:
    """The engine in this process, without sockets."""

    name = "rollout-in-process"

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.submitted = 0

    def generate(self, prompts: list[np.ndarray], sampling: Sampling | list[Sampling]) -> Iterator[Sample]:
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        for prompt, own in zip(prompts, samplings, strict=True):
            self.engine.submit(Group(str(self.submitted), prompt, own))
            self.submitted += 1
        while self.engine.has_work:
            yield from self.engine.step()

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.engine.status()
        return status

    def peak_rss_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


@contextmanager
def connected(config: Config) -> Iterator[tuple[RunningService, RolloutClient]]:
    """Run a service as a process and connect to it."""
    with (
        service_process(config) as service,
        RolloutClient(service.endpoint, name="rollout bench", connect_timeout_s=60.0) as client,
    ):
        yield service, client


@contextmanager
def open_service(config: Config) -> Iterator[Target]:
    with connected(config) as (service, client):
        yield ServiceTarget(client, service)


@contextmanager
def open_engine(config: Config) -> Iterator[Target]:
    from rollout.engine.engine import Engine

    hide_progress_bars()
    yield EngineTarget(Engine(config.engine, limits=config.limits))
