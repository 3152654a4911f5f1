"""What needs a CUDA device: `make test-gpu`. ROLLOUT_GPU_TESTS=cpu tries what can be tried without one, with attention in plain
torch: that the tests themselves work."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from rollout.engine.cuda import tiles
from tests.bench.by_hand import release
from tests.support.on_device import DEVICE


@pytest.fixture(autouse=True, scope="session")
def a_device() -> None:
    if DEVICE == "cpu" and os.environ.get("ROLLOUT_GPU_TESTS") != "cpu":
        pytest.skip(f"no CUDA device: torch {torch.__version__} finds none")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short contexts have many chunks; and the next test has the memory of this one's engines."""
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 16)
    yield
    release(torch.device(DEVICE))
