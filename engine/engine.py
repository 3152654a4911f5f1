"""Engine: groups in, samples out, in process and without sockets. `step` is the table of contents of this package."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, get_args

import msgspec
import numpy as np
import torch

from engine.config import EngineConfig
from engine.devices import StepCapacity, choose_backend, device_of, resolved
from engine.forward.arithmetic import arithmetic
from engine.forward.model import Model, ModelLike, module_of, open_model, streamed_of, weights_moved
from engine.forward.sampling import uniform
from engine.forward.self_check import LoadedModel, judge, try_out
from engine.kv.pages import PagedKV
from engine.kv.sizing import blocks_in_host_memory, blocks_on_device, check_tables
from engine.pipeline import Pipeline, warmed_up
from engine.scheduling.counters import Counters
from engine.scheduling.invariants import check
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.stops import Vocabulary, stops_of
from engine.status import status
from engine.types import Adapter, Group, KVPolicy, Limits, Mode, Refreshed, Sample, Tag, TensorInfo, TokenChunk
from engine.weights.live import Weights, WeightsTorn
from engine.weights.staging import Staging, source_of
from engine.weights.tensors import NamedTensors, describe, named_pairs, with_digest

log = logging.getLogger("rollout.engine")


class Engine:
    """One process, one thread: `submit`, `abort` and `refresh` happen between two calls of `step`.

    Example:
        engine = Engine(EngineConfig(model="path/to/model", kv_gib=2))
        engine.submit(Group("a", prompt, Sampling(n=8, max_tokens=512)))
        while engine.has_work:
            for sample in engine.step(): ...

    `model` may be given instead of loaded. Raises ValueError for a configuration that cannot work.
    """

    def __init__(self, config: EngineConfig, model: ModelLike | None = None, limits: Limits | None = None) -> None:
        self.vocabulary = cache(partial(Vocabulary.load, config.model))
        """reads the bytes of the tokens when a group asks for stop strings"""
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.limits = limits or Limits()
        self.device = device_of(config)
        self.config = config = resolved(config, self.device)
        self.model = model = open_model(config, self.device.memory) if model is None else model
        self.device.check(model)
        if config.weight_offload is not None and streamed_of(model) is None:
            raise ValueError(f"weight_offload: {model.name} was given without it; give Model(module, name, Streamed(…))")
        self._choose_kernels(model)
        self.weights = Weights(module_of(model), streamed_of(model), partial(weights_moved, model), self.device.memory)
        self.counters = Counters()
        self._take_memory(model)
        graphs = self.device.graphs(model, config, self.backend)
        self.steps = warmed_up(Pipeline(self.device, model, self.backend, graphs, self.kv, self.scheduler))
        self.overlap = bool(config.overlap_steps)
        self.refreshes = 0
        self.refreshed: Refreshed | None = None
        """the last one"""
        self._asked = Mode.RUNNING
        """RUNNING, DRAINING or PAUSED: what was asked for last"""
        self.asleep: set[Tag] = set()
        """parts of the memory that were given back"""
        self._seeded = 0

    def _choose_kernels(self, model: ModelLike) -> None:
        """Choose what attends and what runs the layers, and compare both with the module's own forward."""
        config, memory = self.config, self.device.memory
        capacity, kept = StepCapacity.of(config, model), model.geometry.kept_as(config.kv_dtype)
        tried = partial(try_out, model, kept, config.block_size, memory) if isinstance(model, Model) else lambda backend: None
        self.backend = choose_backend(config.attention, self.device, capacity, tried)
        self.computes = self.device.equip(model, config, self.backend) if isinstance(model, Model) else None
        self.arithmetic = arithmetic(self.computes, self.backend, kept.fp8)
        log.info("engine model=%s backend=%r arithmetic=%s", model.name, str(self.backend), self.arithmetic)
        if isinstance(model, Model):
            judge(LoadedModel(model, self.backend, config.block_size, capacity.tokens, memory, kept))

    def _take_memory(self, model: ModelLike) -> None:
        """Size both pools of KV and take their memory."""
        config, memory = self.config, self.device.memory
        kept = model.geometry.kept_as(config.kv_dtype)
        block_bytes = kept.bytes_per_token * config.block_size
        on_device = blocks_on_device(config, block_bytes, memory)
        on_host = blocks_in_host_memory(config, block_bytes, on_device, memory)
        take_now = config.kv_tokens is not None or config.kv_gib is not None, config.cpu_offload_gib is not None
        self.kv = PagedKV(kept, config.block_size, on_device, on_host, memory, self.device.lane(), take_now)
        longest = -(-model.context // config.block_size)
        check_tables(config, min(longest, on_device))
        self.scheduler = Scheduler(
            config, device_blocks=on_device, host_blocks=on_host, max_blocks=longest, counters=self.counters
        )

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def version(self) -> int:
        """Of the live weights."""
        return self.weights.version

    @property
    def graphs(self) -> Any:
        """Of decode steps; None: every step is launched kernel by kernel."""
        return self.steps.graphs

    @property
    def mode(self) -> Mode:
        """What the next step does; where several hold, the one that lasts longest."""
        if self.weights.torn:
            return Mode.TORN
        if self.asleep:
            return Mode.ASLEEP
        return Mode.WITHOUT_WEIGHTS if self.weights.dropped else self._asked

    @property
    def has_work(self) -> bool:
        """`step` would do something."""
        steps, scheduler = self.steps, self.scheduler
        return bool(steps.ended or steps.in_flight or scheduler.overdue or (scheduler.has_work and not self.mode.rests))

    def submit(self, group: Group, client: str = "") -> None:
        """Take a group on. `client` shares the engine fairly with other clients. Raises ValueError with the reason if the group
        is refused; nothing has been allocated for it then."""
        group.validate(self.limits, self.vocab_size, self.context)
        eos = stop_tokens(group, self.model)
        for child in () if group.score else group.begun:
            child.validate_unfinished(group.sampling, eos, self.version)
        seed = group.sampling.seed
        if seed is None:
            unit = uniform(*(np.array([x], np.uint64) for x in (self.config.seed, self._seeded, 0)))
            seed = int(unit[0] * 2**53)
            self._seeded += 1
        self.steps.ended += self.scheduler.submit(group, client, seed, eos, stops_of(group, self.vocabulary))

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        """End a group now, or one child of it. Returns the children that this ends, with what they have; [] for an unknown id
        or index, and for a child of a group that has not forked: a step returns it when it does."""
        return self.scheduler.abort(group_id, index)

    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
        """Return new tokens of children that run, without ending them: see `Groups.chunks`."""
        return self.scheduler.children.chunks(group_id, since, least, most)

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def step(self) -> list[Sample]:
        """Launch one forward and read what it drew; where steps overlap, what the one before drew. Returns the samples that
        ended; [] when there is nothing to do. What fails inside ends groups with finish_reason "error", never the engine."""
        steps = self.steps
        steps.ended += self.scheduler.expire()
        if steps.ended or self.mode.rests:
            return steps.rest()
        if self.mode is Mode.TORN:
            raise WeightsTorn("the weights are torn: nothing may be sampled from them; restart the engine")
        plan = steps.plan()
        with steps.voiding(plan):
            steps.move(plan)
            steps.launch(plan)
        steps.commit(but=plan if self.overlap and not plan.followed else None)
        return steps.hand_out()

    # ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def stage(
        self,
        manifest: Sequence[TensorInfo],
        *,
        version: int | None = None,
        partial: bool = False,
        adapter: Adapter | None = None,
        on_device: bool = False,
    ) -> Staging:
        """Begin a refresh: see `Weights.begin`. Steps may go on while the staging takes its bytes in."""
        if "weights" in self.asleep:
            raise ValueError('the weights are asleep: wake all, or tags=("weights",) alone, then refresh')
        return self.weights.begin(manifest, version=version, partial=partial, adapter=adapter, on_device=on_device)

    def commit(self, staging: Staging, kv: KVPolicy = "keep", via: str = "memory") -> Refreshed:
        """End a refresh: the staged weights are live from the next step on, in place. `kv`: as in `refresh`. The
        next `step` returns the samples that this ends. Raises what went wrong, after everything is as it was."""
        if kv not in get_args(KVPolicy):
            raise ValueError(f"kv={kv!r}: must be one of {', '.join(get_args(KVPolicy))}")
        self.steps.commit()
        started = time.perf_counter()
        self.weights.commit(staging)
        self.steps.ended += self.scheduler.refresh(self.version, kv)
        digest = self.weights.digest
        self.refreshes += 1
        self.refreshed = refreshed_of(staging, via, time.perf_counter() - started, digest)
        return self.refreshed

    def refresh(
        self, named_tensors: NamedTensors, *, version: int | None = None, kv: KVPolicy = "keep", partial: bool = False
    ) -> Refreshed:
        """New weights in place, all or nothing, between two steps.

        Args:
            named_tensors: the model, a state dict or any iterable of (name, tensor), floats of any float dtype. Parameters and
                persistent buffers, all of them: `model.named_parameters()` is enough where there are no such buffers.
            version: above the live one; None = the next.
            kv: running groups "keep" their KV, "recompute" it under the new weights, or end ("abort") in the next step.
            partial: tensors that are not given stay as they are.

        Raises InvalidWeights (a ValueError) naming the tensor; the old weights serve on."""
        started = time.perf_counter()
        described = [describe(name, tensor) for name, tensor in named_pairs(named_tensors)]
        staging = self.stage([with_digest(*each) for each in described], version=version, partial=partial)
        try:
            staging.feed_all(source_of(data for _, data in described))
            refreshed = self.commit(staging, kv)
        finally:
            staging.close()
        return msgspec.structs.replace(refreshed, seconds=time.perf_counter() - started)

    # ── modes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def pause(self) -> None:
        """Compute nothing until `resume`; what is submitted waits. A step in flight is committed by the next `step`."""
        self._asked = Mode.PAUSED

    def drain(self) -> bool:
        """Let groups that have begun run to their end and start no others, until `resume`. Returns True when none is left. A
        paused engine stays paused."""
        self.scheduler.admitting = False
        if self._asked is Mode.RUNNING:
            self._asked = Mode.DRAINING
        return not (self.scheduler.has_work or self.steps.in_flight or self.steps.ended)

    def resume(self) -> None:
        """Undo `drain` and `pause`."""
        self.scheduler.admitting = True
        self._asked = Mode.RUNNING

    def sleep(self, level: int = 1) -> int:
        """Give memory to others, between two steps. Returns how many bytes went back to the device or the machine.

        The KV pool goes. What runs is offloaded to host memory as far as that has room, else it is prefilled again; either way
        it goes on after `wake`, and so does whatever is submitted meanwhile. Level 1 moves the weights to host memory, where a
        CPU's are already; level 2 drops them, so that after `wake` a whole refresh must come before the next token.

        Raises ValueError while asleep, while a refresh is staged, and for another level. Levels: vLLM's sleep mode."""
        check_may_sleep(level, self.asleep, bool(self.weights.staging))
        self.steps.commit()
        memory = self.device.memory
        before, plan = memory.taken(), self.scheduler.offload_all()
        with self.steps.voiding(plan):
            self.steps.move(plan)
        self.kv.release()
        if self.graphs is not None and not (self.weights.stays and self.kv.stays):
            self.graphs.forget()
        self.weights.release_memory(keep=level == 1)
        memory.trim()
        self.asleep = set(get_args(Tag))
        return max(0, before - memory.taken())

    def wake(self, tags: Collection[Tag] | None = None) -> None:
        """Undo `sleep`, for all of the memory or for a part of it; steps go on when all is awake.

        tags: "weights", "kv" or both; None = all that is asleep. Beside a trainer on the same device: the weights, then a
        refresh, then, when the trainer has let its memory go, the KV pool. Tags: vLLM's wake_up.

        Raises ValueError where nothing of that is asleep, and what taking the memory raises: that part sleeps on then."""
        for tag in parts_to_wake(tags, self.asleep):
            (self.weights.restore_memory if tag == "weights" else self.kv.take_back)()
            self.asleep.remove(tag)

    def status(self) -> dict[str, Any]:
        """Tell everything there is to know, JSON-able; see `engine.status`."""
        return status(self)

    def check(self) -> None:
        """Assert that every block is accounted for."""
        check(self.scheduler)


def check_may_sleep(level: int, asleep: set[Tag], staging: bool) -> None:
    """Raises ValueError where `Engine.sleep` may not be called; staging: a refresh is being staged."""
    if level not in (1, 2):
        raise ValueError(f"level={level!r}: must be 1 (weights to host memory) or 2 (weights dropped)")
    if asleep:
        raise ValueError(f"the engine is asleep already ({', '.join(sorted(asleep))}); wake it first")
    if staging:
        raise ValueError("a refresh is being staged; finish or abandon it first")


def parts_to_wake(tags: Collection[Tag] | None, asleep: set[Tag]) -> list[Tag]:
    """List what is to be woken, weights first. tags: as for `Engine.wake`. Raises ValueError."""
    wanted = asleep if tags is None else set(tags)
    if not wanted or not wanted <= set(get_args(Tag)):
        raise ValueError("the engine is not asleep" if tags is None else f"tags={tuple(tags)}: name weights, kv or both")
    if awake := sorted(wanted - asleep):
        raise ValueError(f"the engine is not asleep with its {' and '.join(awake)}: sleep first")
    return sorted(wanted, reverse=True)


def refreshed_of(staging: Staging, via: str, paused: float, digest: str) -> Refreshed:
    """What a refresh that is live has taken. paused: seconds of its exchange."""
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
    """Tokens that end a child of the group. Raises ValueError where min_tokens would leave nothing to draw."""
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
