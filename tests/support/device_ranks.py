"""Ranks as threads whose layers run CUDA's kernels, in Triton's interpreter, and exchange as devices do, with gloo in NCCL's
place."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from rollout.engine import memory as engine_memory
from rollout.engine.config import EngineConfig
from rollout.engine.cpu.device import CpuDevice
from rollout.engine.cpu.kernels import choose
from rollout.engine.cpu.sums import Exchange, SumKernels
from rollout.engine.cuda.device import equip_exact, fuse, use_triton_mixers
from rollout.engine.cuda.reduce import DeviceExchange, process_group, sum_over_ranks
from rollout.engine.forward.attention import Backend
from rollout.engine.forward.interface import ExecutionPath
from rollout.engine.forward.model import Model
from rollout.engine.forward.summed import RankExchange, mark_sums
from rollout.engine.memory import DeviceMemory
from rollout.engine.parallel.ranks import shared_exchange
from rollout.engine.parallel.weights import DividedWeights, divided_weights
from rollout.engine.weights.live import Weights
from tests.support.configs import engine_config
from tests.support.fake_device import eager_memory
from tests.support.ranks import ranks_in_threads

HOST = torch.device("cpu")
WIDTH = 64


def in_turn(patch: pytest.MonkeyPatch) -> None:
    """Let threads launch kernels one after the other: the interpreter has one place of a program for the process."""
    from triton.runtime import interpreter

    launch, one = interpreter.GridExecutor.__call__, threading.RLock()

    def alone(self: Any, *args: Any, **options: Any) -> Any:
        with one:
            return launch(self, *args, **options)

    patch.setattr(interpreter.GridExecutor, "__call__", alone)


def over_gloo(device: torch.device, host: Exchange, store: Callable[[], Any]) -> RankExchange:
    """Stand in for `rollout.engine.parallel.devices.exchange_on` on CUDA."""
    return DeviceExchange(host, process_group(store(), host.rank, host.ranks, device))


def as_on_cuda(self: CpuDevice, model: Model, config: EngineConfig, backend: Backend) -> ExecutionPath:
    """Stand in for `CpuDevice.equip` with what `CudaDevice.equip` does; layers are fused if `fused_layers` says so."""
    mark_sums(model.module, config)
    if model.states is not None:
        use_triton_mixers(model)
    fused = bool(config.advanced.fused_layers)
    if config.exact:
        return equip_exact(model, backend, fused, library=False)
    sum_over_ranks(model.module)
    return fuse(model, backend)


@contextmanager
def device_ranks() -> Iterator[pytest.MonkeyPatch]:
    """Let engines that are made in the block run so, on one rank too."""
    with ranks_in_threads(), pytest.MonkeyPatch.context() as patch:
        in_turn(patch)
        patch.setattr("rollout.engine.parallel.ranks.exchange_on", over_gloo)
        patch.setattr("rollout.engine.parallel.followers.exchanges_itself", lambda config: True)
        patch.setattr(CpuDevice, "equip", as_on_cuda)
        patch.setattr("rollout.engine.cuda.fused.CHECKED_ROWS", (2,))
        patch.setattr("rollout.engine.forward.self_check.check_model", lambda served: None)  # it has tests of its own
        yield patch


def exchanges(ranks: int, patience_s: float = 20.0) -> list[DeviceExchange]:
    """Make the exchanges of all ranks, which are threads of this process."""
    kernels = choose("auto").kernels
    assert kernels is not None
    store, config = HashStore(), engine_config(tp=ranks)
    fd = os.memfd_create("tests-exchange")
    os.ftruncate(fd, 1 << 21)

    def made(rank: int) -> DeviceExchange:
        host = shared_exchange(fd, config, rank, WIDTH, SumKernels(kernels))
        exchange = DeviceExchange(host, process_group(store, rank, ranks, HOST))
        exchange.patience(patience_s)
        return exchange

    found = on_all(ranks, made)
    os.close(fd)
    return found


def on_all(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work` with each rank, in a thread each."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))


def weights_as_on_a_device(patch: pytest.MonkeyPatch) -> None:
    """Let ranks that are made from now on refresh, and sleep, with their weights in memory that plays a device's."""
    patch.setattr(engine_memory, "pinned", engine_memory.anonymous)

    def of_leader(*given: Any) -> DividedWeights:
        return divided_weights(*given[:-1], eager_memory())

    def of_follower(module: torch.nn.Module, lay_out: Callable[[], None], memory: DeviceMemory) -> Weights:
        return Weights(module, lay_out=lay_out, memory=eager_memory())

    patch.setattr("rollout.engine.parallel.leader.divided_weights", of_leader)
    patch.setattr("rollout.engine.parallel.follower.Weights", of_follower)
