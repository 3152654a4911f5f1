"""A device that fails every call ends the engine; one that failed a single call does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rollout.engine.cpu.device import CpuDevice
from rollout.engine.cuda.device import CudaDevice, of_cuda
from rollout.engine.engine import Engine
from rollout.engine.values import DeviceLost
from rollout.engine.worker import Worker
from tests.support.tiny import tiny_engine
from tests.support.toy import group, run

ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return an engine whose device fails the second step."""
    engine, execute, steps = tiny_engine(), Worker.execute, iter(range(100))

    def failing(worker: Worker, plan: Any) -> Any:
        if next(steps) == 1:
            raise RuntimeError(ILLEGAL)
        return execute(worker, plan)

    monkeypatch.setattr(Worker, "execute", failing)
    return engine


def test_a_failed_step_ends_its_groups_and_the_next_ones_run(broken: Engine) -> None:
    ended = run(broken, [group("a", range(5))])
    assert {sample.finish_reason for sample in ended.values()} == {"error"}
    assert {sample.finish_reason for sample in run(broken, [group("b", range(5))]).values()} == {"length"}


def test_a_lost_device_ends_the_engine(broken: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "is_lost", lambda self, error: of_cuda(error))
    with pytest.raises(DeviceLost, match="the device fails every call since RuntimeError: CUDA error: an illegal"):
        run(broken, [group("a", range(5))])


def test_a_lost_device_is_seen_in_copies_and_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(ILLEGAL)

    for name in ("rollout.engine.worker.Worker.move", "rollout.engine.worker.InFlight.read"):
        with monkeypatch.context() as patched:
            engine = tiny_engine()
            patched.setattr(CpuDevice, "is_lost", lambda self, error: of_cuda(error))
            patched.setattr(name, fail)
            with pytest.raises(DeviceLost):
                run(engine, [group("a", range(5))])


def lost(error: BaseException, monkeypatch: pytest.MonkeyPatch, works: bool) -> bool:
    def synchronize(device: Any = None) -> None:
        if not works:
            raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    device: Any = SimpleNamespace(memory=SimpleNamespace(device="cuda:0"))
    device.settle = lambda: CudaDevice.settle(cast(Any, device))
    return CudaDevice.is_lost(cast(Any, device), error)


def test_a_device_is_lost_if_it_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chained = ValueError("a step")
    chained.__cause__ = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    for error in (RuntimeError(ILLEGAL), torch.AcceleratorError("unspecified launch failure"), chained):
        assert lost(error, monkeypatch, works=False)
        assert not lost(error, monkeypatch, works=True)
    for harmless in (torch.OutOfMemoryError("CUDA out of memory"), ValueError("shapes")):
        assert not lost(harmless, monkeypatch, works=False)
