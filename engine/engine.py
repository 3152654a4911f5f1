"""The engine: runs groups and returns their samples, in process and without sockets. Read `Engine.step` first."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, get_args

import msgspec
import numpy as np

from rollout.engine.build import open_texts, open_workers
from rollout.engine.config import EngineConfig
from rollout.engine.forward.interface import ModelLike
from rollout.engine.forward.sampling import uniform
from rollout.engine.pipeline import Pipeline
from rollout.engine.scheduling.build import open_scheduler
from rollout.engine.status import status
from rollout.engine.values import (
    Group,
    KVPolicy,
    Limits,
    Mode,
    Refreshed,
    Routing,
    Sample,
    Tag,
    TokenChunk,
    WeightUpdate,
)
from rollout.engine.weights.in_process import update_from
from rollout.engine.weights.live import Weights, WeightsTorn
from rollout.engine.weights.staging import Staging
from rollout.engine.weights.tensors import NamedTensors, named_pairs
from rollout.engine.worker import Report, no_report


class Engine:
    """Joins a scheduler, a worker and the pipeline of steps between them. One thread calls it: `submit`, `abort` and `refresh`
    happen between two calls of `step`.

    Example:
        engine = Engine(EngineConfig(model="path/to/model", kv_gib=2))
        engine.submit(Group("a", prompt, Sampling(n=8, max_tokens=512)))
        while engine.has_work:
            for sample in engine.step(): ...

    `model` may be given instead of loaded. report: takes the name of each phase of the start when it begins. Raises ValueError
    for a configuration that cannot work.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelLike | None = None,
        limits: Limits | None = None,
        report: Report = no_report,
    ) -> None:
        self.limits = limits or Limits()
        self.texts = open_texts(config)
        self.worker = worker = open_workers(config, model, report)
        self.config = worker.config
        self.scheduler = open_scheduler(worker.config, worker.pools)
        self.counters = self.scheduler.state.counters
        self.pipeline = Pipeline(worker, self.scheduler)
        worker.warm_up(report)
        self.overlap = bool(self.config.overlap_steps)
        self.started_at = time.perf_counter()
        self.refreshes = 0
        self.refreshed: Refreshed | None = None
        """figures of the last refresh"""
        self._asked = Mode.RUNNING
        """RUNNING, DRAINING or PAUSED, as `resume`, `drain` and `pause` set it"""
        self._seeded = 0
        """groups that came without a seed"""

    @property
    def model(self) -> ModelLike:
        return self.worker.model

    @property
    def weights(self) -> Weights:
        return self.worker.weights

    @property
    def arithmetic(self) -> str:
        """Return the name of what the model's kernels compute: see `rollout.engine.values.arithmetic`."""
        return self.worker.kernels.arithmetic

    @property
    def configuration(self) -> str:
        """Return the digest of what the model's forward depends on besides its weights; "": a model without a configuration."""
        return getattr(self.model, "configuration", "")

    @property
    def tokenizer(self) -> str:
        """Return the digest of the text in which stop strings are searched; "": there is none, and they are refused."""
        return self.texts.digest

    @property
    def block_size(self) -> int:
        """Return the tokens of a KV block, which decide the order of sums in attention."""
        return self.config.block_tokens

    @property
    def kv_dtype(self) -> str:
        """Return the name of the dtype in which KV is stored."""
        return self.worker.kv.dtype_name

    @property
    def routing(self) -> Routing | None:
        """Return the shape of the routes that are kept; None: none are."""
        return self.worker.routing

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def version(self) -> int:
        """Return the version of the live weights."""
        return self.weights.version

    @property
    def mode(self) -> Mode:
        """Return the lifecycle state, which decides what the next step does. If several apply, the one that lasts longest."""
        if self.weights.torn:
            return Mode.TORN
        if self.worker.asleep:
            return Mode.ASLEEP
        return Mode.WITHOUT_WEIGHTS if self.weights.dropped else self._asked

    @property
    def has_work(self) -> bool:
        """Return whether `step` would do something."""
        scheduler = self.scheduler
        return (
            not self.pipeline.empty
            or scheduler.overdue
            or self.worker.lost
            or (scheduler.state.has_work and not self.mode.rests)
        )

    def submit(self, group: Group, client: str = "") -> None:
        """Queue a group. client: name of the client, which shares the engine fairly with others. Raises ValueError with the
        reason if the group is refused; nothing has been allocated for it then."""
        group.validate(self.limits, self.vocab_size, self.context)
        group.validate_routes(self.routing)
        eos = stop_tokens(group, self.model)
        for child in () if group.score else group.partials:
            child.validate_unfinished(group.sampling, eos, self.version)
        seed = group.sampling.seed
        if seed is None:
            unit = uniform(*(np.array([x], np.uint64) for x in (self.config.seed, self._seeded, 0)))
            seed = int(unit[0] * 2**53)
            self._seeded += 1
        stops = self.texts.stops_of(group) if group.sampling.stop else None
        self.pipeline.add_ended(self.scheduler.submit(group, client, seed, eos, stops))

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        """End a group now, or one child of it. Returns the children that this ends, with their tokens so far; [] for an unknown
        id or index, and for a child of a group that has not forked: a step returns it when it does."""
        return self.scheduler.state.abort(group_id, index)

    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
        """Return new tokens of children that run, without ending them: see `Scheduler.chunks`."""
        return self.scheduler.chunks(group_id, since, least, most)

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def step(self) -> list[Sample]:
        """Launch one forward and read its draws; where steps overlap, those of the forward before. Returns the samples that
        ended; [] when there is nothing to do. A failure inside ends groups with finish_reason "error", never the engine."""
        pipeline = self.pipeline
        pipeline.check()
        pipeline.add_ended(self.scheduler.expire())
        if pipeline.has_ended or self.mode.rests:
            return pipeline.rest()
        if self.mode is Mode.TORN:
            raise WeightsTorn("the weights are torn: nothing may be sampled from them; restart the engine")
        plan = pipeline.plan()
        with pipeline.discarding(plan):
            pipeline.move(plan)
            pipeline.execute(plan)
        pipeline.commit(but=plan if self.overlap and not plan.followed else None)
        return pipeline.take_ended()

    # ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def stage(self, update: WeightUpdate) -> Staging:
        """Begin a refresh: see `Weights.stage`. Steps may run while the staging receives its bytes."""
        return self.worker.stage(update)

    def commit(self, staging: Staging, kv: KVPolicy = "keep", via: str = "memory") -> Refreshed:
        """End a refresh: the staged weights are live from the next step on, in place. kv: as in `refresh`. The next `step`
        returns the samples that this ends. Raises the error that occurred, after everything is restored."""
        if kv not in get_args(KVPolicy):
            raise ValueError(f"kv={kv!r}: must be one of {', '.join(get_args(KVPolicy))}")
        self.pipeline.commit()
        started = time.perf_counter()
        self.worker.commit(staging)
        self.pipeline.add_ended(self.scheduler.refresh(self.version, kv))
        digest = self.weights.digest
        self.refreshes += 1
        self.refreshed = refreshed_of(staging, via, time.perf_counter() - started, digest)
        return self.refreshed

    def refresh(
        self, named_tensors: NamedTensors, *, version: int | None = None, kv: KVPolicy = "keep", partial: bool = False
    ) -> Refreshed:
        """Replace the weights in place, all or none, between two steps.

        Args:
            named_tensors: the model, a state dict or any iterable of (name, tensor), floats of any float dtype. Parameters and
                persistent buffers, all of them: `model.named_parameters()` is enough where there are no such buffers.
            version: above the live one; None = the next.
            kv: running groups "keep" their KV, "recompute" it under the new weights, or end ("abort") in the next step.
            partial: tensors that are not given stay as they are.

        Raises InvalidWeights (a ValueError) naming the tensor; the old weights serve on."""
        started = time.perf_counter()
        update, source = update_from(named_pairs(named_tensors), self.worker.device.memory, version, partial)
        staging = self.stage(update)
        try:
            staging.feed_all(source)
            refreshed = self.commit(staging, kv)
        finally:
            staging.close()
        return msgspec.structs.replace(refreshed, seconds=time.perf_counter() - started)

    # ── modes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def pause(self) -> None:
        """Compute nothing until `resume`; groups that are submitted wait. The next `step` commits a step in flight."""
        self._asked = Mode.PAUSED

    def drain(self) -> bool:
        """Finish the groups that have started and start no others, until `resume`. Returns True when none is left. A paused
        engine stays paused."""
        self.scheduler.state.admitting = False
        if self._asked is Mode.RUNNING:
            self._asked = Mode.DRAINING
        return self.pipeline.empty and not self.scheduler.state.has_work

    def resume(self) -> None:
        """Undo `drain` and `pause`."""
        self.scheduler.state.admitting = True
        self._asked = Mode.RUNNING

    def sleep(self, level: int = 1) -> int:
        """Free the memory of the KV pool and of the weights, between two steps. Returns the freed bytes of the device or the
        machine.

        Running sequences are offloaded to host memory as far as that has room, else prefilled again later; after `wake` all
        continue, and groups submitted meanwhile start. Level 1 moves the weights to host memory (on a CPU they are there
        already); level 2 drops them, so that after `wake` a refresh of all tensors must come before the next token.

        Raises ValueError while asleep, while a refresh is staged, and for another level. Levels: vLLM's sleep mode."""
        self.worker.check_may_sleep(level)
        self.pipeline.commit()
        memory = self.worker.device.memory
        before, plan = memory.taken(), self.scheduler.offload_all()
        with self.pipeline.discarding(plan):
            self.pipeline.move(plan)
        self.worker.sleep(level)
        return max(0, before - memory.taken())

    def wake(self, tags: Collection[Tag] | None = None) -> None:
        """Undo `sleep`, for all memory or for a part of it. Steps continue when all parts are awake.

        tags: "weights", "kv" or both; None = all that is asleep. With a trainer on the same device: wake the weights, refresh,
        and when the trainer has freed its memory, wake the KV pool. Tags: vLLM's wake_up.

        Raises ValueError if none of these parts is asleep, and the error of an allocation that fails: that part stays
        asleep."""
        self.worker.wake(tags)

    def close(self) -> None:
        """End the processes of other ranks, where several run this engine (`EngineConfig.tp`). May be repeated."""
        self.worker.close()

    def status(self) -> dict[str, Any]:
        """Return the status report, JSON-able; see `engine.status`."""
        return status(self)


def refreshed_of(staging: Staging, via: str, paused: float, digest: str) -> Refreshed:
    """Collect the figures of an applied refresh. paused: seconds of its exchange."""
    return Refreshed(
        version=staging.version,
        via=via,
        bytes=staging.stands_for,
        seconds=staging.seconds + paused,
        staged_seconds=staging.seconds,
        paused_seconds=paused,
        digest=digest,
        sent_bytes=staging.total,
    )


def stop_tokens(group: Group, model: ModelLike) -> frozenset[int]:
    """Return the tokens that end a child of the group. Raises ValueError if min_tokens would leave no token to sample."""
    eos = frozenset(group.sampling.stop_token_ids)
    if not group.sampling.ignore_eos:
        eos |= model.eos_token_ids
    allowed = group.sampling.allowed_token_ids
    if group.sampling.min_tokens and allowed is not None and eos.issuperset(allowed):
        reason = "each of the allowed_token_ids ends a sample, so none is left to draw before"
        raise ValueError(f"min_tokens={group.sampling.min_tokens}: {reason}; set it to 0, or allow other tokens")
    if group.sampling.min_tokens and len(eos.intersection(range(model.vocab_size))) == model.vocab_size:
        reason = f"each of the model's {model.vocab_size} tokens ends a sample, so none is left to draw before"
        raise ValueError(f"min_tokens={group.sampling.min_tokens}: {reason}; set it to 0, or give fewer stop_token_ids")
    return eos
