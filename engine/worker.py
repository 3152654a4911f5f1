"""The worker: executes plans on one device, and owns its model, KV pages, graphs and weights. It makes no scheduling decisions.

    Engine ── Plan: ints and arrays ──► Worker ── InFlight: draws, read when they are there ──► Engine

A step depends only on its plan and on the worker's earlier steps. So a second worker with the same configuration and model,
given the same plans (`Plan.encode`), refreshes and sleeps, samples the same tokens, to the bit. Several devices need one worker
each, and one scheduler that sends every plan to all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.devices import Device
from rollout.engine.forward.attention import Backend, prepared, prepared_window
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.interface import ExecutionPath, ModelLike, advance_states, windows_of
from rollout.engine.forward.sampling import PendingTokens
from rollout.engine.kv.block import Copied, PoolCounts, WindowCounts
from rollout.engine.kv.pages import PagedKV
from rollout.engine.scheduling.plan import Plan, SampledTokens, StepRoutes, plan_by_hand
from rollout.engine.values import Routing, Tag, WeightUpdate
from rollout.engine.weights.live import Weights
from rollout.engine.weights.staging import Staging

log = logging.getLogger(__name__)
CUT = 0.9
"""`top_p` of a draw that truncates"""
Report = Callable[[str], None]
"""takes the name of a phase of a start"""
RecordRoutes = Callable[[Batch, Plan], Callable[[], StepRoutes] | None]
"""keeps the routes of a step that was launched; returns what waits for those that its plan asks for, None: it asks for none"""


def no_report(phase: str) -> None:
    """Report nothing."""


class ModelKernels(NamedTuple):
    """A model, and the kernels that were chosen for it."""

    model: ModelLike
    backend: Backend
    path: ExecutionPath | None
    """computes the layers; None: the module as it comes"""
    arithmetic: str
    """names what all of it computes: `rollout.engine.values.arithmetic`"""


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A launched step whose draws are not read yet."""

    draws: PendingTokens
    prefill_seconds: Callable[[], float] | None
    """waits for the forward and returns the seconds that it took; None unless nearly all tokens of the step were prefill"""
    build_seconds: float
    """for the batch, and for what the attention prepares"""
    model_seconds: float
    """to launch the forward"""
    sample_seconds: float
    """to launch the draws"""
    routes: Callable[[], StepRoutes] | None = None
    """waits for the routes of the step; None: no row wants them"""

    def read(self) -> SampledTokens:
        """Wait for the draws and return them. Raises the error of a step that failed on the device."""
        drawn = self.draws.read()
        return drawn if self.routes is None else drawn._replace(routes=self.routes())


class Worker:
    """Executes plans on one device. Writes KV pages, graphs and, through `Weights`, parameters. Independent of the
    scheduler."""

    def __init__(self, config: EngineConfig, device: Device, kernels: ModelKernels, kv: PagedKV, weights: Weights) -> None:
        self.config, self.device, self.kernels, self.kv, self.weights = config, device, kernels, kv, weights
        self.model, self.backend = kernels.model, kernels.backend
        self.graphs = device.graphs(kernels.model, config, kernels.backend)
        """captured steps; None: every step is launched kernel by kernel"""
        self.record_routes: RecordRoutes | None = None
        """keeps the routes of each step; None: they are not kept"""
        self.asleep: set[Tag] = set()
        """parts of the memory that are released"""
        self._drawn: torch.Tensor | None = None
        """[D] int32 on the device, drawn by the newest step: the next plan may refer to them as pending tokens"""

    @property
    def routing(self) -> Routing | None:
        """Return the shape of the routes that are kept; None: none are."""
        return None if self.kv.routes is None else Routing(*self.kv.routes.geometry)

    def check(self) -> None:
        """Raise RankLost if another rank of the replica has ended."""

    @property
    def lost(self) -> bool:
        """Return whether `check` raises."""
        return False

    def ranks(self) -> list[dict[str, Any]]:
        """Describe the ranks of the replica, for the status; [] for one device."""
        return []

    def close(self) -> None:
        """End the other ranks of the replica."""

    @property
    def pools(self) -> PoolCounts:
        """Return the sizes of the pools, for the scheduler."""
        longest = -(-self.model.context // self.config.block_tokens)
        states = self.kv.states
        slots = None if states is None else states.slots._replace(host=states.host_ready)
        window, windows = self.kv.window, None
        if window is not None:
            windows = WindowCounts(max(windows_of(self.model)), len(window.data), window.host_ready)
        return PoolCounts(len(self.kv.data), self.kv.host_ready, longest, slots, windows)

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def move(self, plan: Plan) -> Copied:
        """Run the copies of KV of a plan; called for every plan, copies or none. Returns the copies that have ended."""
        if self.kv.states is not None:
            self.kv.states.move(plan.state_moves)
        overlap = self.device.memory.streams is not None  # otherwise no copy meets a step
        copied = self.kv.move(plan.moves, plan.spans if overlap else None)
        if self.kv.window is None:
            return copied
        of_windows = self.kv.window.move(plan.window_moves, plan.window_spans if overlap else None)
        return Copied(copied.blocks + of_windows.blocks, copied.seconds + of_windows.seconds)

    @torch.inference_mode()
    def advance(self, plan: Plan) -> None:
        """Advance recurrent states by the tokens of the step before that count; before the copies of the plan (`move`)."""
        advance_states(self.model, self.kv, plan.state_advances)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> InFlight:
        """Launch the forward and the draws of a plan of at least one row, after its copies (`move`), without waiting for them.
        Pending tokens are read from the draws of the plan executed before."""
        started = time.perf_counter()
        batch = Batch.build(plan, self.kv.block_size, self.device.memory, self.model.geometry.dtype, self._drawn)
        windowed = prepared_window(batch, self.backend, self.kv)
        batch = replace(batch, attention=self.backend.prepare(batch, self.kv), windowed=windowed)
        built = time.perf_counter()
        began = self.device.mark() if batch.num_tokens > 4 * max(plan.num_rows, batch.num_logits) else None
        run = self.graphs if self.graphs is not None and self.graphs.covers(batch) else self.model
        logits = run.forward(batch, self.kv, self.backend)
        prefill_seconds = None if began is None else partial(self.device.seconds, began, self.device.mark())
        launched = time.perf_counter()
        routes = None if self.record_routes is None else self.record_routes(batch, plan)
        draws = self.device.sample(logits, batch.sampling)
        self._drawn = draws.tokens
        return InFlight(draws, prefill_seconds, built - started, launched - built, time.perf_counter() - launched, routes)

    # ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def stage(self, update: WeightUpdate) -> Staging:
        """Begin a refresh: see `Weights.stage`. Raises ValueError while the weights are asleep."""
        if "weights" in self.asleep:
            raise ValueError('the weights are asleep: wake all, or tags=("weights",) alone, then refresh')
        return self.weights.stage(update)

    def commit(self, staging: Staging) -> None:
        """Make the staged weights live, in place, with no step in flight: see `Weights.commit`. Returns when the device has
        them."""
        self.weights.commit(staging)
        self.device.settle()

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def check_may_sleep(self, level: int) -> None:
        """Raise ValueError if `sleep` may not be called: another level, asleep already, or a refresh is being staged."""
        if level not in (1, 2):
            raise ValueError(f"level={level!r}: must be 1 (weights to host memory) or 2 (weights dropped)")
        if self.asleep:
            raise ValueError(f"the engine is asleep already ({', '.join(sorted(self.asleep))}); wake it first")
        if self.weights.staging:
            raise ValueError("a refresh is being staged; finish or abandon it first")

    def sleep(self, level: int) -> None:
        """Release the memory of the KV pool and of the weights, with no step in flight and no block in use on the device.
        level: see `Engine.sleep`."""
        self._drawn = None
        self.kv.release()
        if self.graphs is not None and not (self.weights.stays and self.kv.stays):
            self.graphs.forget()
        self.weights.release_memory(keep=level == 1)
        self.device.memory.trim()
        self.asleep = set(get_args(Tag))

    def wake(self, tags: Collection[Tag] | None = None) -> None:
        """Undo `sleep` for the named parts, None = for all that is asleep. Raises ValueError if one of them is awake, and the
        error of an allocation that fails: that part stays asleep."""
        for tag in parts_to_wake(tags, self.asleep):
            (self.weights.restore_memory if tag == "weights" else self.kv.restore)()
            self.asleep.remove(tag)

    # ── warm-up ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def warm_up(self, report: Report = no_report) -> None:
        """Run a step of each size that is captured, and the largest step, on a device that compiles and captures on first use.
        The largest runs first, so that the others fit into its memory. They write into the first KV block, which no sequence
        has yet. Raises ValueError if a step does not fit into the device's memory."""
        config = self.config
        if not (config.warm_up and self.device.warms_up):
            return
        shapes = list(self._warm_up_shapes())
        for number, (rows, count) in enumerate(shapes, 1):
            log.info("warming up step=%d of=%d sequences=%d tokens=%d", number, len(shapes), rows, rows * count)
            report(f"warming up, step {number} of {len(shapes)}")
            try:
                self._warm_up_step(rows, count)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"a step of {rows * count} tokens does not fit into memory with the weights and the KV pool: lower kv_gib, "
                    f"max_batch_tokens={config.most_tokens} or max_num_seqs={config.most_seqs}"
                ) from error

    def _warm_up_shapes(self) -> Iterator[tuple[int, int]]:
        """Yield (rows, tokens of each row)."""
        config = self.config
        count = min(config.most_tokens, self.model.context)
        yield min(config.most_tokens // count, config.most_seqs), count
        yield from [(config.most_seqs, 1)] if self.graphs is None else self.graphs.warm_up_shapes(self.model.context)

    @torch.inference_mode()
    def _warm_up_step(self, rows: int, count: int) -> None:
        """Run a step twice: with draws from whole distributions, and with draws that truncate them. All rows write the first
        state, which no sequence has yet."""
        size, dtype = self.kv.block_size, self.model.geometry.dtype
        table = np.zeros((rows, -(-count // size)), np.int32)
        plan = plan_by_hand(np.zeros((rows, count), np.int32), np.zeros(rows, np.int32), table)
        if self.kv.states is not None:
            plan = plan._replace(state_reads=np.full(rows, -1, np.int32), state_writes=np.zeros(rows, np.int32))
        if self.kv.window is not None:
            plan = plan._replace(window_table=table)
        cut = plan._replace(sampling=plan.sampling.copy())
        cut.sampling["top_p"] = CUT
        for each in (plan, cut):
            batch = Batch.build(each, size, self.device.memory, dtype)
            batch = prepared(batch, self.backend, self.kv)
            if self.graphs is not None and self.graphs.covers(batch):
                logits = self.graphs.warm(batch, self.kv, self.backend)
            else:
                logits = self.model.forward(batch, self.kv, self.backend)
            self.device.sample(logits, batch.sampling).read()


def parts_to_wake(tags: Collection[Tag] | None, asleep: set[Tag]) -> list[Tag]:
    """List the parts to wake, weights first. tags: as for `Engine.wake`. Raises ValueError."""
    wanted = asleep if tags is None else set(tags)
    if not wanted or not wanted <= set(get_args(Tag)):
        raise ValueError("the engine is not asleep" if tags is None else f"tags={tuple(tags)}: name weights, kv or both")
    if awake := sorted(wanted - asleep):
        raise ValueError(f"the engine is not asleep with its {' and '.join(awake)}: sleep first")
    return sorted(wanted, reverse=True)
