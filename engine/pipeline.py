"""The pipeline between scheduler and worker: keeps steps in flight, reads their draws, and discards plans that fail.

    one after the other   host     plan 1, execute 1 │ read 1, commit 1, plan 2, execute 2 │ …
                          device                     ─ step 1 ─┤                           ─ step 2 ─┤

    overlapped            host     plan 1, execute 1, plan 2, execute 2 │ read 1, commit 1, plan 3, execute 3 │ read 2 …
                          device                    ──── step 1 ────────┤──── step 2 ───────────────────────┤──── step 3 …

Overlapped, the device goes from one step to the next without waiting for the host. A step takes the tokens that it continues
from the draws of the one before, on the device (`Batch.build`). The end of a child is noticed one step late: its row of the
step in flight is computed and discarded. The device executes steps in order, so blocks that an ended child releases are written
again only after that row. Refresh and sleep commit the step in flight first, and so does a plan that would preempt a sequence.
Idea: SGLang's overlap scheduler (v0.4), vLLM's async scheduling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rollout.engine.scheduling import output
from rollout.engine.scheduling.plan import Plan
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.values import DeviceLost, Sample
from rollout.engine.worker import InFlight, Worker

log = logging.getLogger(__name__)


class LaunchedStep(NamedTuple):
    """A step of the pipeline."""

    plan: Plan
    began: float
    """when the host began to plan it, by `time.perf_counter`"""
    result: InFlight


class CopyFailed(Exception):
    """The KV copies of a plan failed, and some may have been made; or recurrent states have not advanced."""


class Pipeline:
    """The parts of `Engine.step` between scheduler and worker, the steps in flight, and the samples that ended: it is the only
    writer of both, and no other code depends on overlap."""

    def __init__(self, worker: Worker, scheduler: Scheduler) -> None:
        self.worker, self.scheduler, self.counters = worker, scheduler, scheduler.state.counters
        self.in_flight: list[LaunchedStep] = []
        """oldest first; between two calls of `Engine.step` only where steps overlap"""
        self._ended: list[Sample] = []
        """samples that the next `take_ended` returns"""
        self._planning = self._committed_at = 0.0
        """`time.perf_counter` when the newest plan was begun, and when the last step was committed"""

    # ── samples that ended ────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def has_ended(self) -> bool:
        """Whether samples wait for `take_ended`."""
        return bool(self._ended)

    @property
    def empty(self) -> bool:
        """Whether no step is in flight and no sample waits for `take_ended`."""
        return not (self._ended or self.in_flight)

    def add_ended(self, samples: Iterable[Sample]) -> None:
        """Add samples to those that the next `take_ended` returns."""
        self._ended += samples

    def take_ended(self) -> list[Sample]:
        """Return the samples that have ended, once."""
        ended, self._ended = self._ended, []
        return ended

    def rest(self) -> list[Sample]:
        """Return the samples that have ended, or if there are none those of the steps in flight; plan nothing."""
        if not self._ended:
            self.commit()
        return self.take_ended()

    def check(self) -> None:
        """Raise DeviceLost if the worker cannot go on."""
        try:
            self.worker.check()
        except Exception as error:
            self._check_device(error)
            raise

    # ── the lines of `Engine.step` ────────────────────────────────────────────────────────────────────────────────────
    def plan(self) -> Plan:
        """Decide the next step. A sequence with a pending token can neither be preempted nor have drafts, so the steps in
        flight are committed first if the decision needs their results."""
        self.scheduler.grow_host(self.worker.kv.host_sizes)
        while True:
            self._planning = time.perf_counter()
            plan = self.scheduler.plan()
            self.counters.plan_seconds += time.perf_counter() - self._planning
            if plan is not None:
                return plan
            self.commit()

    def move(self, plan: Plan) -> None:
        """Advance the recurrent states of a plan and run its copies. Raises CopyFailed."""
        try:
            if len(plan.state_advances):
                began = time.perf_counter()
                self.worker.advance(plan)
                self.scheduler.advanced(time.perf_counter() - began)
            copied = self.worker.move(plan)
        except Exception as error:
            raise CopyFailed from error
        state = self.scheduler.state
        for store in state.stores:
            store.moved()
        state.counters.moved(plan.moves, copied, self.worker.kv.block_bytes)
        if self.worker.kv.window is not None:
            state.counters.moved(plan.window_moves, copied._replace(seconds=0.0), self.worker.kv.window.block_bytes)
        state.counters.states_moved(plan.state_moves)
        state.rates.copied(copied.blocks, copied.seconds)

    def execute(self, plan: Plan) -> None:
        """Launch the rows of a plan. A plan without rows launches nothing; if no sequence can run then, a group ends with an
        error."""
        if not plan.num_rows:
            state = self.scheduler.state
            if self.empty and not state.running and state.has_work:
                self.add_ended(self.scheduler.fail_stuck())
            return
        assert self.in_flight or not len(plan.pending_tokens), "a token is pending, and nothing is in flight"
        result = self.worker.execute(plan)
        self.counters.build_seconds += result.build_seconds
        self.counters.model_seconds += result.model_seconds
        self.counters.sample_seconds += result.sample_seconds
        self.in_flight.append(LaunchedStep(plan, self._planning, result))
        launched = time.perf_counter()
        self.scheduler.launched(plan)
        self.counters.commit_seconds += time.perf_counter() - launched

    def commit(self, but: Plan | None = None) -> None:
        """Read the steps in flight, oldest first, and record their draws. The step of the plan `but` stays in flight. Raises
        DeviceLost."""
        while self.in_flight and self.in_flight[0].plan is not but:
            plan, began, result = self.in_flight.pop(0)
            reading = time.perf_counter()
            try:
                drawn = result.read()
                if result.prefill_seconds is not None:
                    self.scheduler.state.rates.prefilled(plan.num_tokens, result.prefill_seconds())
            except Exception as error:
                self._check_device(error)
                self.add_ended(output.step_failed(self.scheduler.state, plan.step, self._failed(error)))
                continue
            committing, had = time.perf_counter(), self.counters.generated_tokens
            self.counters.sample_seconds += committing - reading
            self.add_ended(self.scheduler.commit(plan, drawn))
            now = time.perf_counter()
            self.counters.commit_seconds += now - committing
            self.counters.stepped(plan, now - max(began, self._committed_at), self.counters.generated_tokens - had)
            self._committed_at = now

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def discarding(self, plan: Plan) -> Iterator[None]:
        """Discard a plan whose copies or launch fail in the `with` block, once the steps in flight are committed. Sequences
        whose blocks the copies may have spoiled are prefilled again; the groups of a failed launch end with an error. Raises
        DeviceLost."""
        try:
            yield
        except CopyFailed as error:
            self._check_device(error)
            log.error("copies of KV failed, their sequences are prefilled again step=%d", plan.step, exc_info=error)
            self.commit()
            output.copies_failed(self.scheduler.state, plan.step)
        except Exception as error:
            self._check_device(error)
            self.commit()
            self.add_ended(output.launch_failed(self.scheduler.state, plan.step, self._failed(error)))

    def _check_device(self, error: Exception) -> None:
        """Raise DeviceLost if the device is lost, or another rank. A process that stayed would end every group with an error,
        and a router would send it all groups, since it has the fewest."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, DeviceLost):
                raise cause
            cause = cause.__cause__
        if self.worker.device.is_lost(error):
            raise DeviceLost(f"the device fails every call since {type(error).__name__}: {error}") from error

    def _failed(self, error: Exception) -> str:
        """Log and count a failed step. Returns the reason for its groups."""
        log.error("step failed error=%r", error, exc_info=error)
        self.counters.failed_steps += 1
        return f"{type(error).__name__}: {error}"
