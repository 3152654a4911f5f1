"""Memory of a service that is refreshed again and again: what has ended stays in it as numbers only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
import torch

from rollout.client.api import RolloutClient
from rollout.engine.weights.lora import AdapterBase
from rollout.service.refresh import REMEMBERED
from rollout.transport.loopback import LoopbackService
from tests.support.adapters import PREFIX, Q, write
from tests.support.endurance.leaks import held, slope
from tests.support.tiny import tiny, tiny_engine
from tests.support.wire import serving

WAIT = 60.0
WIDTH, RANK, PUSHES, WARM = 512, 256, 200, 10
FACTORS_MIB = 2 * WIDTH * RANK * 4 / 2**20
"""of A and B: what each push of an adapter left behind, for as long as it was remembered"""


@pytest.fixture(scope="module")
def trained() -> torch.nn.Module:
    return tiny("llama", hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1)


@pytest.fixture
def client(trained: torch.nn.Module) -> Iterator[RolloutClient]:
    end = LoopbackService()
    engine = tiny_engine(model=tiny("llama", hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1))
    with serving(engine, end), RolloutClient(transport=end.connect(), connect_timeout_s=WAIT) as client:
        yield client


def grown(push: Callable[[int], object]) -> float:
    """Push PUSHES times. Returns MiB by which the process has grown from the WARM-th on for each push, by the slope while the
    service fills its memory of refreshes and over all of them, whichever is more."""
    ctypes.CDLL(None).malloc_trim(0)  # what tests before this have freed would hide it
    points = []
    for number in range(PUSHES):
        push(number)
        points.append((float(number), seen_mib()))
    first = slope(points[WARM:REMEMBERED])
    last, before = (median(mib for _, mib in some) for some in (points[-20:], points[WARM : WARM + 20]))
    return max(first, (last - before) / REMEMBERED)


def seen_mib() -> float:
    seen = held(os.getpid())
    assert seen is not None
    return seen.rss_mib


def adapter(folder: Path) -> Path:
    tensors = {
        f"{PREFIX}{Q}.lora_A.weight": torch.randn(RANK, WIDTH) * 0.01,
        f"{PREFIX}{Q}.lora_B.weight": torch.randn(WIDTH, RANK) * 0.01,
    }
    return write(folder, tensors, r=RANK)


@pytest.mark.some(1)
@pytest.mark.parametrize("how", ["lora", "whole", "both"])
def test_nothing_grows_with_refreshes(client: RolloutClient, trained: torch.nn.Module, tmp_path: Path, how: str) -> None:
    folder = adapter(tmp_path / "adapter")

    def push(number: int) -> None:
        if how == "lora" or (how == "both" and number % 2):
            client.refresh_lora(folder, timeout=WAIT)
        else:
            client.refresh(trained, timeout=WAIT)

    assert grown(push) < 0.1 * FACTORS_MIB


def test_what_is_kept_of_a_refresh_shows(client: RolloutClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a service that keeps one copy of A and B for each push."""
    kept, read, folder = [], AdapterBase.read, adapter(tmp_path / "adapter")

    def reads(self: AdapterBase, name: str) -> torch.Tensor:
        kept.append(torch.full((2, WIDTH, RANK), 1.0))
        return read(self, name)

    monkeypatch.setattr(AdapterBase, "read", reads)
    assert grown(lambda number: client.refresh_lora(folder, timeout=WAIT)) > 0.5 * FACTORS_MIB
