"""Other people's clients, as they come from PyPI, in front of a live gateway and a live service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout.client.api import RolloutClient
from rollout.config import Config
from rollout.process import service_process
from tests.support.gateway import gateway

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

PACKAGES = ("openai", "renderers", "verifiers", "trl", "areal", "lm_eval", "transformers", "torch")


def pytest_report_header() -> list[str]:
    """Which versions a green run covers."""
    return [f"clients: {', '.join(f'{name} {installed(name)}' for name in PACKAGES)}"]


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


class Live(msgspec.Struct):
    """A service with a tiny model, a client of it, and a gateway that calls the model "tiny" and by its folder."""

    url: str
    client: RolloutClient
    folder: Path


@pytest.fixture(scope="module")
def live(tiny_config: Config, tiny_model: Path) -> Iterator[Live]:
    with (
        service_process(tiny_config) as service,
        RolloutClient(service.endpoint) as client,
        gateway(client, tiny_model, names=("tiny", str(tiny_model))) as running,
    ):
        yield Live(running.url, client, tiny_model)


@pytest.fixture
def service_logprobs(live: Live) -> Any:
    """What the service itself says of given tokens: [tokens] float32."""
    return lambda prompt, tokens: live.client.score([prompt], [[tokens]])[0][0].logprobs
