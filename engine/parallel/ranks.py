"""What every rank of a replica does: it has its part of the model, executes each plan, and exchanges sums and logits with the
others.

Exchange    memory that all ranks map: partial sums, embeddings, logits
RankWorker  a `Worker` that compares what the ranks have drawn, every CHECK_STEPS steps"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import xxhash

from rollout.engine.config import EngineConfig
from rollout.engine.cpu.exact_modules import sum_slices
from rollout.engine.cpu.kernels import choose
from rollout.engine.cpu.sums import SLICES, Exchange, SumKernels, Summed, shared_bytes
from rollout.engine.forward.model import BrokenModel, Model, in_one_line, weights_moved
from rollout.engine.forward.shards import LoadedPart, RankPlace, load_part
from rollout.engine.kv.block import SlotCounts
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.parallel.placement import START_S, RankPosition
from rollout.engine.scheduling.plan import Plan
from rollout.engine.types import RankLost
from rollout.engine.weights.cuts import NotCut
from rollout.engine.weights.layer_cuts import summed_products_of
from rollout.engine.worker import InFlight, Report, Worker, WorkerParts, open_worker

CHECK_STEPS = 256
"""steps between two comparisons of what the ranks have drawn"""


class Ranks(NamedTuple):
    """A rank, and how it reaches the others."""

    exchange: Exchange
    kernels: SumKernels
    local_ranks: int
    """ranks that share the memory of this host"""

    def gather(self, tensor: torch.Tensor, shapes: Any) -> list[torch.Tensor]:
        return self.kernels.gather(tensor, shapes, self.exchange)

    @property
    def place(self) -> RankPlace:
        return RankPlace(self.exchange.rank, self.exchange.ranks, self.gather)


def open_ranks(config: EngineConfig, exchange: Callable[[SumKernels], Exchange], position: RankPosition | None) -> Ranks:
    """Join the exchange of a replica, which `exchange` opens. position: None: all ranks are on this host. Raises ValueError
    where there are no kernels for it."""
    chosen = choose(config.isa)
    if chosen.kernels is None:
        raise ValueError(f"tp={config.tp}: several ranks need the kernels of the CPU: {chosen.why}")
    kernels = SumKernels(chosen.kernels)
    opened = exchange(kernels)
    opened.patience(START_S)
    return Ranks(opened, kernels, config.tp if position is None else position.local_ranks)


def shared_exchange(fd: int, config: EngineConfig, rank: int, width: int) -> Exchange:
    """Map the exchange of the ranks of a host."""
    return Exchange(width, rank, config.tp, mmap.mmap(fd, shared_bytes(config.tp, width)))


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

    def execute(self, plan: Plan) -> InFlight:
        launched = super().execute(plan)
        self._drawn_digest.update(launched.draws.tokens.numpy().tobytes())
        self._steps += 1
        if self._steps % CHECK_STEPS == 0:
            self._compare()
        return launched

    def _compare(self) -> None:
        """Compare what the ranks have drawn so far. Raises RankLost."""
        ranks = self.ranks_of.exchange.ranks
        digest = torch.frombuffer(bytearray(self._drawn_digest.digest()), dtype=torch.uint8)
        first, *others = self.ranks_of.gather(digest, [digest.shape] * ranks)
        for rank, other in enumerate(others, 1):
            if not torch.equal(other, first):
                raise RankLost(f"rank {rank} of {ranks} has drawn other tokens than rank 0 within {CHECK_STEPS} steps")


Weigh = Callable[[LoadedPart, Callable[[], None]], Any]


def open_rank(config: EngineConfig, ranks: Ranks, report: Report, weigh: Weigh, kind: type[RankWorker]) -> RankWorker:
    """Load this rank's part of the model and make its worker; all ranks do it together. weigh: makes the weights; it is given
    what to call when they have moved. Raises ValueError, RankLost."""
    report(f"loading part {ranks.exchange.rank + 1} of {config.tp} of the weights as {config.dtype}")
    try:
        loaded = load_part(config.model, getattr(torch, config.dtype), ranks.place)
    except NotCut:
        raise
    except Exception as error:
        raise BrokenModel(f"model folder {config.model!r} cannot be loaded: {in_one_line(error)}") from error
    sum_slices(summed_products_of(loaded.module), Summed(SLICES // config.tp, ranks.exchange))
    model = Model(loaded.module, config.model)
    parts = WorkerParts(
        kind,
        lambda model, device: weigh(loaded, partial(weights_moved, model)),
        partial(agreed, ranks),
        partial(agreed_with_states, config, ranks),
    )
    worker = open_worker(config, model, report, parts)
    assert isinstance(worker, kind)
    worker.join(ranks, config.tp_timeout_s)
    return worker


def agreed(ranks: Ranks, sizes: PoolSizes) -> PoolSizes:
    """Return the pools of the rank that has least room; default sizes are divided among ranks, which share a host's memory."""
    device = sizes.device if sizes.commit_device else max(1, sizes.device // ranks.local_ranks)
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
    return torch.stack(ranks.gather(own, [own.shape] * ranks.exchange.ranks)).amin(0).tolist()
