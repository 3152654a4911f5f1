"""Engine: groups in, samples out, in process and without sockets. `step` is the table of contents of this package."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, get_args

import msgspec
import numpy as np
import torch

from engine.arithmetic import arithmetic, chosen_kernels
from engine.config import EngineConfig
from engine.cuda.graphs import DecodeGraphs, cuda_capture
from engine.devices import Backend, Capacity, TritonAttention, choose_backend
from engine.forward.batch import Batch
from engine.forward.judge import judge, try_out
from engine.forward.model import Model, open_model
from engine.forward.sampling import launch_draws, uniform
from engine.in_flight import Flight, Stopwatch
from engine.kv.pages import KVGeometry, PagedKV
from engine.kv.sizing import blocks_in_host_memory, blocks_on_device
from engine.memory import taken_memory
from engine.scheduling.counters import Counters
from engine.scheduling.invariants import check
from engine.scheduling.plan import Plan
from engine.scheduling.scheduler import Scheduler
from engine.status import status
from engine.types import Group, KVPolicy, Limits, Refreshed, Sample, TensorInfo
from engine.weights.live import Weights, WeightsTorn
from engine.weights.staging import Staging, source_of
from engine.weights.tensors import NamedTensors, describe, named_pairs, with_digest

log = logging.getLogger("rollout.engine")


class ModelLike(Protocol):
    """What the engine needs of a model; `engine.forward.model.Model` is one, tests have smaller ones."""

    name: str
    vocab_size: int
    context: int
    q_heads: int
    device: torch.device
    geometry: KVGeometry
    eos_token_ids: frozenset[int]

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor: ...


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
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self.limits = limits or Limits()
        if config.device != "cpu" and not torch.cuda.is_available():
            raise ValueError(f"device={config.device}: torch {torch.__version__} finds no CUDA device here; device=cpu works")
        if (index := torch.device(config.device).index) is not None:
            if index >= torch.cuda.device_count():
                raise ValueError(f"device={config.device}: the last one here is cuda:{torch.cuda.device_count() - 1}")
            torch.cuda.set_device(index)  # Triton and events take the current one
        if model is None:
            model = open_model(config)
        streamed = getattr(model, "streamed", None)
        if config.weight_offload is not None and streamed is None:
            raise ValueError(f"weight_offload: {model.name} was given without it; give Model(module, name, Streamed(…))")
        self.model = model
        capacity = Capacity.of(config, model)
        self.chosen = chosen_kernels(config, model)
        isa = None if self.chosen is None else self.chosen.isa
        tried = partial(try_out, model, config.block_size) if isinstance(model, Model) else lambda backend: None
        self.backend = choose_backend(config.attention, model.device, config.threads, capacity, isa, tried)
        self.arithmetic = arithmetic(model, self.backend)
        log.info("%s: %s, arithmetic %s", model.name, self.backend, self.arithmetic)
        if self.chosen is not None:
            log.info("%s: isa %s", model.name, self.chosen)
        if isinstance(model, Model):
            judge(model, self.backend, config.block_size, capacity.tokens)
        self.graphs: DecodeGraphs | None = None
        if config.cuda_graphs and model.device.type == "cuda" and isinstance(self.backend, TritonAttention):
            ring = None if streamed is None else streamed.ring
            new_capture = partial(cuda_capture, torch.cuda.Stream())
            self.graphs = DecodeGraphs(model.forward, capacity.rows, model.device, new_capture, ring)
        fused = getattr(model, "fused", None)
        lay_out = {} if fused is None else {"lay_out": fused.stack}
        self.weights = Weights(getattr(model, "module", None), streamed, **lay_out)
        self.counters = Counters()
        bytes_per_block = model.geometry.bytes_per_token * config.block_size
        device_blocks = blocks_on_device(config, bytes_per_block, model.device)
        taken = device_blocks * bytes_per_block if model.device.type == "cpu" else 0
        host_blocks = blocks_in_host_memory(config, bytes_per_block, taken)
        asked = config.kv_tokens is not None or config.kv_gib is not None, config.cpu_offload_gib is not None
        self.kv = PagedKV(model.geometry, config.block_size, device_blocks, host_blocks, model.device, take_now=asked)
        self.scheduler = Scheduler(
            config,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            max_blocks=-(-model.context // config.block_size),
            counters=self.counters,
        )
        self.paused = False
        """True: no step computes anything; what was submitted waits"""
        self.asleep = False
        """True: the same, and memory was given back; see `sleep`"""
        self.overlap = model.device.type == "cuda" if config.overlap_steps is None else config.overlap_steps
        self._flight: Flight | None = None
        """the step that was launched and is not committed; between two calls of `step` only where steps overlap"""
        self._committed_at = 0.0
        """when the last step was"""
        self._seeded = 0
        self._ended: list[Sample] = []
        """samples that a refresh ended, for the next step to return"""
        self.refreshes = 0
        self.refreshed: Refreshed | None = None
        """the last one"""

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def has_work(self) -> bool:
        """`step` would do something."""
        return bool(self._ended or self._flight or self.scheduler.overdue or (self.scheduler.has_work and self._computes))

    @property
    def _computes(self) -> bool:
        return not (self.paused or self.asleep or self.weights.dropped)

    def submit(self, group: Group, client: str = "") -> None:
        """Take a group on. `client` shares the engine fairly with other clients. Raises ValueError with the reason if the group
        is refused; nothing has been allocated for it then."""
        group.validate(self.limits, self.vocab_size, self.context)
        seed = group.sampling.seed
        if seed is None:
            unit = uniform(*(np.array([x], np.uint64) for x in (self.config.seed, self._seeded, 0)))
            seed = int(unit[0] * 2**53)
            self._seeded += 1
        eos = frozenset(group.sampling.stop_token_ids)
        if not group.sampling.ignore_eos:
            eos |= self.model.eos_token_ids
        if group.sampling.min_tokens and len(eos.intersection(range(self.vocab_size))) == self.vocab_size:
            reason = f"each of the model's {self.vocab_size} tokens ends a sample, so none is left to draw before"
            raise ValueError(f"min_tokens={group.sampling.min_tokens}: {reason}; set it to 0, or give fewer stop_token_ids")
        for child in group.begun:
            child.validate_unfinished(group.sampling, eos, self.version)
        self._ended += self.scheduler.submit(group, client, seed, eos)

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        """End a group now, or one child of it. Returns the children that this ends, with what they have; [] for an unknown id
        or index, and for a child of a group that has not forked: a step returns it when it does."""
        return self.scheduler.abort(group_id, index)

    def step(self) -> list[Sample]:
        """Launch one forward, and read what it drew; where steps overlap, what the one before drew. Returns the samples that
        ended; [] when there is nothing to do. What goes wrong inside ends the groups of that step with finish_reason "error",
        never the engine."""
        self._ended += self.scheduler.expire()
        if self._ended:
            ended, self._ended = self._ended, []
            return ended
        if self.weights.torn:
            raise WeightsTorn("the weights are torn: nothing may be sampled from them")
        if not self._computes:
            return self._land()
        samples = self._land() if self._flight is not None and self.scheduler.must_preempt else []
        began = time.perf_counter()
        plan = self.scheduler.plan()
        self.counters.plan_seconds += time.perf_counter() - began
        if not self._move(plan):
            return samples
        if not plan.num_rows:
            if self._flight is not None:
                return samples + self._land()
            return samples or (self.scheduler.fail_stuck() if self._stuck() else [])
        try:
            flight = self._launch(plan, began)
        except Exception as error:
            samples += self._land()
            return samples + self.scheduler.launch_failed(plan, self._failed(error))
        launched = time.perf_counter()
        self.scheduler.launched(plan)
        self.counters.commit_seconds += time.perf_counter() - launched
        last, self._flight = self._flight, flight
        samples += self._commit(last)
        return samples if self.overlap else samples + self._land()

    def stage(self, manifest: Sequence[TensorInfo], *, version: int | None = None, partial: bool = False) -> Staging:
        """Begin a refresh: see `Weights.begin`. Steps may go on while the staging takes its bytes in."""
        if self.asleep:
            raise ValueError("the engine is asleep: wake it, then refresh")
        return self.weights.begin(manifest, version=version, partial=partial)

    def commit(self, staging: Staging, kv: KVPolicy = "keep", via: str = "memory") -> Refreshed:
        """End a refresh: the staged weights are live from the next step on, in place. `kv`: as in `refresh`. The
        next `step` returns the samples that this ends. Raises what went wrong, after everything is as it was."""
        if kv not in get_args(KVPolicy):
            raise ValueError(f"kv={kv!r}: must be one of {', '.join(get_args(KVPolicy))}")
        self._ended += self._land()
        started = time.perf_counter()
        self.weights.commit(staging)
        self._ended += self.scheduler.refresh(self.version, kv)
        digest = self.weights.digest
        paused = time.perf_counter() - started
        self.refreshes += 1
        self.refreshed = Refreshed(
            version=self.version,
            via=via,
            bytes=staging.total,
            seconds=staging.seconds + paused,
            staged_seconds=staging.seconds,
            paused_seconds=paused,
            digest=digest,
        )
        return self.refreshed

    def refresh(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        kv: KVPolicy = "keep",
        partial: bool = False,
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
        source = source_of(data for _, data in described)
        try:
            while not staging.complete:
                staging.feed(source)
            refreshed = self.commit(staging, kv)
        finally:
            staging.close()
        return msgspec.structs.replace(refreshed, seconds=time.perf_counter() - started)

    def drain(self) -> bool:
        """Let groups that have begun run to their end and start no others, until `resume`. True when none is left."""
        self.scheduler.admitting = False
        return not (self.scheduler.has_work or self._flight or self._ended)

    def resume(self) -> None:
        """Undo `drain` and `paused`."""
        self.scheduler.admitting = True
        self.paused = False

    def sleep(self, level: int = 1) -> int:
        """Give memory to others, between two steps. Returns how many bytes went back to the device or the machine.

        The KV pool goes. What runs is offloaded to host memory as far as that has room, else it is prefilled again; either way
        it goes on after `wake`, and so does whatever is submitted meanwhile. Level 1 moves the weights to host memory, where a
        CPU's are already; level 2 drops them, so that after `wake` a whole refresh must come before the next token.

        Raises ValueError while asleep, while a refresh is staged, and for another level. Levels: vLLM's sleep mode."""
        if level not in (1, 2):
            raise ValueError(f"level={level!r}: must be 1 (weights to host memory) or 2 (weights dropped)")
        if self.asleep:
            raise ValueError("the engine is asleep already; wake it first")
        if self.weights.staging:
            raise ValueError("a refresh is being staged; finish or abandon it first")
        self._ended += self._land()
        before = taken_memory(self.model.device)
        self._move(self.scheduler.offload_all())
        self.kv.release()
        if self.graphs is not None:
            self.graphs.forget()
        self.weights.release_memory(keep=level == 1)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        self.asleep = True
        return max(0, before - taken_memory(self.model.device))

    def wake(self) -> None:
        """Undo `sleep`. Raises ValueError if the engine is not asleep."""
        if not self.asleep:
            raise ValueError("the engine is not asleep")
        self.weights.restore_memory()
        self.kv.take_back()
        self.asleep = False

    def status(self) -> dict[str, Any]:
        """Everything there is to know, JSON-able; see `engine.status`."""
        return status(self)

    def check(self) -> None:
        """Asserts that every block is accounted for."""
        check(self.scheduler)

    def _move(self, plan: Plan) -> bool:
        """The plan's copies. A failed one voids the plan: what cannot be trusted is prefilled again."""
        try:
            copied = self.kv.move(plan.moves)
        except Exception:
            log.exception("copying KV failed; the sequences concerned are prefilled again")
            self._ended += self._land()
            self.scheduler.move_failed(plan)
            return False
        self.scheduler.moved()
        self.counters.moved(plan.moves, copied, self.kv.block_bytes)
        return True

    def _launch(self, plan: Plan, began: float) -> Flight:
        counters, geometry, building = self.counters, self.model.geometry, time.perf_counter()
        with torch.inference_mode():
            drawn = None if self._flight is None else self._flight.draws.tokens
            batch = Batch.build(plan, self.config.block_size, self.model.device, geometry.dtype, drawn)
            batch = replace(batch, attention=self.backend.prepare(batch, self.kv))
            built = time.perf_counter()
            run = self.graphs if self.graphs is not None and self.graphs.covers(batch) else self.model
            watch = Stopwatch(self.model.device) if batch.num_tokens > 4 * plan.num_rows else None
            logits = run.forward(batch, self.kv, self.backend)
            if watch is not None:
                watch.mark()
            modelled = time.perf_counter()
            draws = launch_draws(logits, batch.sampling, self.chosen and self.chosen.kernels)
        counters.build_seconds += built - building
        counters.model_seconds += modelled - built
        counters.sample_seconds += time.perf_counter() - modelled
        return Flight(plan, began, draws, watch)

    def _land(self) -> list[Sample]:
        """Commit the step in flight, if there is one. Returns the samples that ended."""
        flight, self._flight = self._flight, None
        return self._commit(flight)

    def _commit(self, flight: Flight | None) -> list[Sample]:
        if flight is None:
            return []
        try:
            drawn = flight.land(self.counters)
        except Exception as error:
            return self.scheduler.step_failed(flight.plan, self._failed(error))
        landed = time.perf_counter()
        samples = self.scheduler.commit(flight.plan, drawn)
        committed = time.perf_counter()
        self.counters.commit_seconds += committed - landed
        self.counters.stepped(flight.plan, committed - max(flight.began, self._committed_at))
        self._committed_at = committed
        return samples

    def _failed(self, error: Exception) -> str:
        log.error("step failed", exc_info=error)
        self.counters.failed_steps += 1
        return f"{type(error).__name__}: {error}"

    def _stuck(self) -> bool:
        scheduler = self.scheduler
        return scheduler.has_work and not scheduler.running
