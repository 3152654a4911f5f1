"""What every rank of a replica does: it has its part of the model, executes each plan, and exchanges sums and logits with the
others.

RankExchange  sums, embeddings, logits: through memory that all ranks map, or between their devices
RankWorker    a `Worker` that compares what the ranks have drawn, every CHECK_STEPS steps"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from rollout.engine.build import WorkerParts, open_worker
from rollout.engine.config import EngineConfig
from rollout.engine.cpu.kernels import choose
from rollout.engine.cpu.sums import Exchange, SumKernels, shared_bytes
from rollout.engine.forward.interface import weights_moved
from rollout.engine.forward.load import BrokenModel, in_one_line
from rollout.engine.forward.model import Model
from rollout.engine.forward.shards import LoadedPart, RankPlace, load_part
from rollout.engine.forward.summed import SLICES, RankExchange, Summed, sum_slices
from rollout.engine.kv.block import SlotCounts
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import DeviceMemory
from rollout.engine.parallel.devices import device_of_rank, exchange_on
from rollout.engine.parallel.placement import START_S, RankPosition
from rollout.engine.scheduling.plan import Plan
from rollout.engine.values import RankLost
from rollout.engine.weights.cuts import NotCut
from rollout.engine.weights.layer_cuts import summed_products_of
from rollout.engine.worker import InFlight, Report, Worker, no_report

CHECK_STEPS = 256
"""steps between two comparisons of what the ranks have drawn"""


class Met(NamedTuple):
    """What a rank has when it has met the others."""

    exchange: Exchange
    store: Callable[[], Any]
    """returns torch's, by which devices meet"""


class Ranks(NamedTuple):
    """A rank, and how it reaches the others."""

    exchange: RankExchange
    local_ranks: int
    """ranks that share the memory of this host"""

    @property
    def place(self) -> RankPlace:
        return RankPlace(self.exchange.rank, self.exchange.ranks, self.exchange.gather)


def open_ranks(config: EngineConfig, meet: Callable[[SumKernels], Met], position: RankPosition | None) -> Ranks:
    """Join the exchange of a replica, on the device of this rank. meet: opens the one in host memory. position: None: all ranks
    are on this host. Raises ValueError where there are no kernels for it, or two ranks have one device; RankLost."""
    chosen = choose(config.isa)
    if chosen.kernels is None:
        raise ValueError(f"tp={config.tp}: several ranks need the kernels of the CPU: {chosen.why}")
    met = meet(SumKernels(chosen.kernels))
    met.exchange.patience(START_S)
    exchange = exchange_on(torch.device(config.device), met.exchange, met.store)
    exchange.patience(START_S)
    return Ranks(exchange, config.tp if position is None else position.local_ranks)


def with_device_of(config: EngineConfig, rank: int, position: RankPosition | None) -> EngineConfig:
    """Return the configuration of a rank, with the device that it has. Raises ValueError."""
    local_rank, local_ranks = (rank, config.tp) if position is None else (position.number_here, position.local_ranks)
    device = device_of_rank(config, local_rank, local_ranks, position is not None)
    return msgspec.structs.replace(config, device=device)


def shared_exchange(fd: int, config: EngineConfig, rank: int, width: int, kernels: SumKernels) -> Exchange:
    """Map the exchange of the ranks of a host."""
    return Exchange(width, rank, config.tp, mmap.mmap(fd, shared_bytes(config.tp, width)), library=kernels.library)


def shared_store(path: str, ranks: int) -> Any:
    """Open torch's store of the ranks of a host, a file. No other file may have this path later: the store looks for it when it
    ends."""
    from torch._C._distributed_c10d import FileStore

    return FileStore(path, ranks)


class RankWorker(Worker):
    """The worker of one rank. Raises RankLost where another one has ended, or differs."""

    ranks_of: Ranks

    def join(self, ranks: Ranks, timeout_s: float) -> None:
        """Begin, when all ranks have loaded. timeout_s: how long a rank waits for another one from now on."""
        self.ranks_of = ranks
        self._drawn_digest, self._steps = xxhash.xxh3_64(), 0
        ranks.exchange.patience(timeout_s)

    @property
    def lost(self) -> bool:
        return self.ranks_of.exchange.lost is not None

    def check(self) -> None:
        if (rank := self.ranks_of.exchange.lost) is not None:
            raise RankLost(f"rank {rank} of {self.ranks_of.exchange.ranks} has ended")

    def warm_up(self, report: Report = no_report) -> None:
        """Run `Worker.warm_up`, in which ranks may wait for each other's compilers."""
        self.ranks_of.exchange.patience(START_S)
        super().warm_up(report)
        self.ranks_of.exchange.patience(self.config.tp_timeout_s)

    def execute(self, plan: Plan) -> InFlight:
        launched = super().execute(plan)
        self.ranks_of.exchange.wait(partial(self.device.reached, self.device.mark()))
        self._drawn_digest.update(self.device.memory.receive(launched.draws.tokens)().tobytes())
        self._steps += 1
        if self._steps % CHECK_STEPS == 0:
            self._compare()
        return launched

    def _compare(self) -> None:
        """Compare what the ranks have drawn so far. Raises RankLost."""
        ranks = self.ranks_of.exchange.ranks
        digest = torch.frombuffer(bytearray(self._drawn_digest.digest()), dtype=torch.uint8)
        first, *others = self.ranks_of.exchange.numbers(digest, [digest.shape] * ranks)
        for rank, other in enumerate(others, 1):
            if not torch.equal(other, first):
                raise RankLost(f"rank {rank} of {ranks} has drawn other tokens than rank 0 within {CHECK_STEPS} steps")


Weigh = Callable[[LoadedPart, Callable[[], None], DeviceMemory], Any]
"""makes the weights, given what to call when they have moved, and the memory where they are"""


def open_rank(config: EngineConfig, ranks: Ranks, report: Report, weigh: Weigh, kind: type[RankWorker]) -> RankWorker:
    """Load this rank's part of the model and make its worker; all ranks do it together. Raises ValueError, RankLost."""
    report(f"loading part {ranks.exchange.rank + 1} of {config.tp} of the weights as {config.dtype}")
    try:
        loaded = load_part(config.model, getattr(torch, config.dtype), ranks.place)
    except NotCut:
        raise
    except Exception as error:
        raise BrokenModel(f"model folder {config.model!r} cannot be loaded: {in_one_line(error)}") from error
    loaded.module.to(torch.device(config.device))
    sum_slices(summed_products_of(loaded.module), Summed(SLICES // config.tp, ranks.exchange))
    model = Model(loaded.module, config.model)
    parts = WorkerParts(
        kind,
        lambda _, model, device: weigh(loaded, partial(weights_moved, model), device.memory),
        partial(agreed, ranks),
        partial(agreed_with_states, config, ranks),
    )
    worker = open_worker(config, model, report, parts)
    assert isinstance(worker, kind)
    check_alike(ranks, f"{worker.kernels.arithmetic}, steps of {worker.config.most_seqs} × {worker.config.most_tokens}")
    worker.join(ranks, config.tp_timeout_s)
    return worker


def check_alike(ranks: Ranks, computes: str) -> None:
    """Raise ValueError if ranks compute different things, such as on devices of different kinds."""
    data = computes.encode()
    sizes = [int(each) for each in ranks.exchange.numbers(torch.tensor([len(data)]), [(1,)] * ranks.exchange.ranks)]
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = [bytes(each.tolist()).decode() for each in ranks.exchange.numbers(own, [(size,) for size in sizes])]
    for rank, each in enumerate(found):
        if each != found[0]:
            raise ValueError(f"rank {rank} computes {each}, rank 0 {found[0]}: all ranks need the same kind of device")


def agreed(ranks: Ranks, sizes: PoolSizes) -> PoolSizes:
    """Return the pools of the rank that has least room; default sizes are divided among ranks, which share a host's memory."""
    sharing = ranks.local_ranks if ranks.exchange.on_host else 1
    device = sizes.device if sizes.commit_device else max(1, sizes.device // sharing)
    host = sizes.host if sizes.commit_host or not sizes.host else max(1, sizes.host // ranks.local_ranks)
    least = least_of(ranks, [device, host])
    return sizes._replace(device=least[0], host=least[1])


def agreed_with_states(config: EngineConfig, ranks: Ranks, slots: SlotCounts, sizes: PoolSizes) -> tuple[SlotCounts, PoolSizes]:
    """Return the same with slots of states, which `state_sizes` made of what ranks had agreed on, and of their free memory."""
    by_memory = config.kv_tokens is not None and not sizes.commit_host
    host = max(1, sizes.host // ranks.local_ranks) if by_memory and sizes.host else sizes.host
    least = least_of(ranks, [slots.device, slots.host, sizes.device, host])
    return SlotCounts(least[0], least[1]), sizes._replace(device=least[2], host=least[3])


def least_of(ranks: Ranks, numbers: list[int]) -> list[int]:
    """Return the least of all ranks' numbers, each by its place."""
    own = torch.tensor(numbers)
    return torch.stack(ranks.exchange.numbers(own, [own.shape] * ranks.exchange.ranks)).amin(0).tolist()
