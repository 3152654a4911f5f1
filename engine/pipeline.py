"""A step that was launched and whose draws are not read yet.

    one after the other   host     plan 1, launch 1 │ read 1, commit 1, plan 2, launch 2 │ …
                          device                    ─ step 1 ─┤                          ─ step 2 ─┤

    overlapped            host     plan 1, launch 1, plan 2, launch 2 │ read 1, commit 1, plan 3, launch 3 │ read 2 …
                          device                   ──── step 1 ───────┤──── step 2 ──────────────────────┤──── step 3 …

Overlapped, the device goes from one step to the next without waiting for the host. A step takes the tokens that it continues
from the draws of the one before, on the device (`Batch.build`). That a child has ended is seen one step late: its row of the
step in flight is computed and thrown away. The device runs what it is given in order, so blocks that an ended child gives back
are written again only after that row. Refresh and sleep land the step in flight first, and so does a plan that would stop
somebody. Idea: SGLang's overlap scheduler (v0.4), vLLM's async scheduling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Literal

import numpy as np
import torch

from engine.devices import Device, Graphs
from engine.forward.attention import Backend
from engine.forward.batch import Batch
from engine.forward.model import ModelLike
from engine.forward.sampling import PendingTokens
from engine.kv.pages import PagedKV
from engine.scheduling.counters import Counters
from engine.scheduling.plan import Plan, SampledTokens, plan_by_hand
from engine.scheduling.scheduler import Scheduler
from engine.types import Sample

log = logging.getLogger("rollout.engine")
CUT = 0.9
"""`top_p` of a draw that truncates"""


@dataclass(slots=True, eq=False)
class InFlight:
    plan: Plan
    began: float
    """when the host began to plan it, by `time.perf_counter`"""
    draws: PendingTokens
    prefill_seconds: Callable[[], float] | None
    """waits for the forward and returns what it took, if nearly all tokens of the step were prefill"""

    def read(self, counters: Counters) -> SampledTokens:
        """Wait for the draws. Raises what went wrong on the device."""
        with timed(counters, "sample_seconds"):
            drawn = self.draws.read()
            if self.prefill_seconds is not None:
                counters.prefilled(self.plan.num_tokens, self.prefill_seconds())
        return drawn


Part = Literal["plan_seconds", "build_seconds", "model_seconds", "sample_seconds", "commit_seconds"]


class timed:  # noqa: N801 - reads as a statement
    """Add the seconds of a `with` block to one of the counters; of a block that raises nothing is added."""

    __slots__ = ("_counters", "_part", "began", "ended")

    def __init__(self, counters: Counters, part: Part) -> None:
        self._counters, self._part = counters, part
        self.began = self.ended = 0.0

    def __enter__(self) -> timed:
        self.began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.ended = time.perf_counter()
            setattr(self._counters, self._part, getattr(self._counters, self._part) + self.ended - self.began)


class CopyFailed(Exception):
    """The copies of KV of a plan stopped in the middle."""


class Pipeline:
    """The parts of `Engine.step`, and the steps that were launched and are not committed: no other code knows of overlap."""

    def __init__(
        self,
        device: Device,
        model: ModelLike,
        backend: Backend,
        graphs: Graphs | None,
        kv: PagedKV,
        scheduler: Scheduler,
    ) -> None:
        self.device, self.model, self.backend, self.graphs = device, model, backend, graphs
        self.kv, self.scheduler, self.counters = kv, scheduler, scheduler.counters
        self.in_flight: list[InFlight] = []
        """oldest first; between two calls of `Engine.step` only where steps overlap"""
        self.ended: list[Sample] = []
        """samples that the next `hand_out` returns"""
        self._planning = self._committed_at = 0.0
        """`time.perf_counter` when the newest plan was begun, and when the last step was committed"""

    def plan(self) -> Plan:
        """Decide the next step. Whoever it preempts must have no token pending, nor whoever has drafts behind it, so what is in
        flight is committed first."""
        if self.in_flight and (self.scheduler.must_preempt or self.scheduler.would_draft):
            self.commit()
        with timed(self.counters, "plan_seconds") as planning:
            plan = self.scheduler.plan()
        self._planning = planning.began
        return plan

    def move(self, plan: Plan) -> None:
        """Do the copies of KV of a plan. Raises CopyFailed."""
        try:
            copied = self.kv.move(plan.moves, plan.spans)
        except Exception as error:
            raise CopyFailed from error
        self.scheduler.moved()
        self.counters.moved(plan.moves, copied, self.kv.block_bytes)

    def launch(self, plan: Plan) -> None:
        """Put the rows of a plan in flight. Without rows nothing is launched; if that leaves all stuck, a group ends with an
        error."""
        if not plan.num_rows:
            if not (self.in_flight or self.ended or self.scheduler.running) and self.scheduler.has_work:
                self.ended += self.scheduler.fail_stuck()
            return
        with torch.inference_mode(), timed(self.counters, "build_seconds"):
            drawn = self.in_flight[-1].draws.tokens if self.in_flight else None
            batch = Batch.build(plan, self.kv.block_size, self.device.memory, self.model.geometry.dtype, drawn)
            batch = replace(batch, attention=self.backend.prepare(batch, self.kv))
        with torch.inference_mode(), timed(self.counters, "model_seconds"):
            began = self.device.mark() if batch.num_tokens > 4 * max(plan.num_rows, batch.num_logits) else None
            run = self.graphs if self.graphs is not None and self.graphs.covers(batch) else self.model
            logits = run.forward(batch, self.kv, self.backend)
            seconds = None if began is None else partial(self.device.seconds, began, self.device.mark())
        with torch.inference_mode(), timed(self.counters, "sample_seconds"):
            draws = self.device.sample(logits, batch.sampling)
        self.in_flight.append(InFlight(plan, self._planning, draws, seconds))
        with timed(self.counters, "commit_seconds"):
            self.scheduler.launched(plan)

    def commit(self, but: Plan | None = None) -> None:
        """Read the steps in flight, oldest first, and record what they drew. The step of `but` stays in flight."""
        while self.in_flight and self.in_flight[0].plan is not but:
            step = self.in_flight.pop(0)
            try:
                drawn = step.read(self.counters)
            except Exception as error:
                self.ended += self.scheduler.step_failed(step.plan, self._failed(error))
                continue
            had = self.counters.generated_tokens
            with timed(self.counters, "commit_seconds") as committing:
                self.ended += self.scheduler.commit(step.plan, drawn)
            seconds = committing.ended - max(step.began, self._committed_at)
            self.counters.stepped(step.plan, seconds, self.counters.generated_tokens - had)
            self._committed_at = committing.ended

    def hand_out(self) -> list[Sample]:
        """Return the samples that have ended, once."""
        ended, self.ended = self.ended, []
        return ended

    def rest(self) -> list[Sample]:
        """Plan nothing: return the samples that have ended, or if there are none those of the steps in flight."""
        if not self.ended:
            self.commit()
        return self.hand_out()

    @contextmanager
    def voiding(self, plan: Plan) -> Iterator[None]:
        """Void a plan whose copies or launch fail in the block: what the copies may have spoiled is prefilled again, the groups
        of a launch end with an error. What was in flight before is committed first."""
        try:
            yield
        except CopyFailed as error:
            log.error("copies of KV failed, their sequences are prefilled again step=%d", plan.step, exc_info=error)
            self.commit()
            self.scheduler.move_failed(plan)
        except Exception as error:
            self.commit()
            self.ended += self.scheduler.launch_failed(plan, self._failed(error))

    def _failed(self, error: Exception) -> str:
        log.error("step failed error=%r", error, exc_info=error)
        self.counters.failed_steps += 1
        return f"{type(error).__name__}: {error}"


def warmed_up(steps: Pipeline) -> Pipeline:
    """Run a step of each size that is captured, and the largest one of all, on a device that compiles and captures on first
    use. The largest first: what the others need finds room in its memory. They write KV of nobody into the first block. Returns
    the same steps. Raises ValueError where the device's memory does not hold one."""
    config = steps.scheduler.config
    if not (config.warm_up and steps.device.warms_up):
        return steps
    made = list(_shapes(steps))
    for number, (rows, count) in enumerate(made, 1):
        log.info("warming up step=%d of=%d sequences=%d tokens=%d", number, len(made), rows, rows * count)
        try:
            _run(steps, rows, count)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a step of {rows * count} tokens finds no memory beside the weights and the KV pool: lower kv_gib, "
                f"max_batch_tokens={config.most_tokens} or max_num_seqs={config.most_seqs}"
            ) from error
    return steps


def _shapes(steps: Pipeline) -> Iterator[tuple[int, int]]:
    """Yield rows, and tokens of each."""
    config = steps.scheduler.config
    count = min(config.most_tokens, steps.model.context)
    yield min(config.most_tokens // count, config.most_seqs), count
    decode = [config.most_seqs] if steps.graphs is None else [*steps.graphs.sizes]
    yield from ((rows, 1) for rows in reversed(decode))


@torch.inference_mode()
def _run(steps: Pipeline, rows: int, count: int) -> None:
    size, dtype = steps.kv.block_size, steps.model.geometry.dtype
    table = np.zeros((rows, -(-count // size)), np.int32)
    plan = plan_by_hand(np.zeros((rows, count), np.int32), np.zeros(rows, np.int32), table)
    cut = plan._replace(sampling=plan.sampling.copy())
    cut.sampling["top_p"] = CUT
    for each in (plan, cut):
        batch = Batch.build(each, size, steps.device.memory, dtype)
        batch = replace(batch, attention=steps.backend.prepare(batch, steps.kv))
        if steps.graphs is not None and steps.graphs.covers(batch):
            logits = steps.graphs.warm(batch, steps.kv, steps.backend)
        else:
            logits = steps.model.forward(batch, steps.kv, steps.backend)
        steps.device.sample(logits, batch.sampling).read()
