"""The tracker of a service: sees each group and sample, looks at the engine once an interval, hands rows to the sinks.

    Service ── begin, observe, forget ──> SampleMeter ┐
            ── tend (each turn of the loop) ──────────┼─ once an interval ─> row ──> console, JSONL, wandb
    Audit   <── finished samples ─────────────────────┘

It never stops the service: a sink, an audit or a status that fails is reported once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from rollout.config import TrackingConfig
from rollout.engine.values import Group, Sample
from rollout.logs import logger
from rollout.metrics.meters import EngineMeter, Row, SampleMeter
from rollout.metrics.sinks import TIME_AXIS, HistogramSink, Sink

log = logger(__name__)

Status = Callable[[], dict[str, Any]]


class Scorer(Protocol):
    """What the tracker needs of `rollout.metrics.audit.Audit`."""

    def offer(self, group: Group, sample: Sample) -> None: ...
    def run(self, version: int, now: float) -> None: ...
    def row(self, now: float) -> Row: ...


class Tracker:
    """Used by one service, in its thread.

    Args:
        config: interval and window.
        sinks: started ones, see `rollout.metrics.sinks.open_sinks`; closed by `close`.
        audit: scores a few finished samples, None = off.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: TrackingConfig | None = None,
        sinks: Iterable[Sink] = (),
        audit: Scorer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or TrackingConfig()
        self.row: Row = {}
        """the last row that went out"""
        self._interval_s = config.interval_s
        self._sinks = list(sinks)
        self._audit = audit
        self._clock = clock
        self._samples = SampleMeter(config.window_s)
        self._engine = EngineMeter(config.window_s)
        self._groups: dict[str, Group] = {}
        self._warned: set[str] = set()
        self._began = self._written = clock()

    def begin(self, group: Group) -> None:
        """Record a group that the engine has taken on. Its id names it until all its children are observed, or it is
        forgotten."""
        self._samples.begin(group)
        if self._audit is not None:
            self._groups[group.id] = group

    def observe(self, samples: Sequence[Sample], version: int) -> None:
        """Record children that have ended; `version`: of the live weights."""
        self._samples.add(samples, version, self._clock())
        if self._audit is not None:
            for sample in samples:
                if (group := self._groups.get(sample.group_id)) is not None:
                    self._audit.offer(group, sample)
            for sample in samples:
                if not self._samples.is_live(sample.group_id):
                    self._groups.pop(sample.group_id, None)

    def forget(self, group_id: str) -> None:
        """Forget a group that was dropped: no more of its children will be seen."""
        self._samples.forget(group_id)
        self._groups.pop(group_id, None)

    def tend(self, status: Status, version: int) -> None:
        """Write a row if it is time, once around the service's loop. `status` (`Engine.status`) is called at first and once an
        interval; `version`: of the live weights."""
        now = self._clock()
        if self._engine.empty:  # where the first rates begin
            self._try("status", lambda: self._engine.add(status(), now))
        if now - self._written >= self._interval_s:
            self._written = now
            self._try("status", lambda: self._write(status(), now))
        elif self._audit is not None:
            self._try("audit", partial(self._audit.run, version, now))

    def close(self, status: Status) -> None:
        """Write a last row, then close the sinks."""
        self._try("status", lambda: self._write(status(), self._clock()))
        for sink in self._sinks:
            self._try(sink.name, sink.close)
        self._sinks.clear()

    def _write(self, status: dict[str, Any], now: float) -> None:
        self._engine.add(status, now)
        self.row = {TIME_AXIS: now - self._began, **self._samples.row(now), **self._engine.row()}
        if self._audit is not None:
            self.row |= self._audit.row(now)
        for sink in self._sinks:
            if isinstance(sink, HistogramSink):
                sink.histograms = self._samples.histograms()
            self._try(sink.name, partial(sink.write, self.row))

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "tracking failed, its figures may be missing; said once: part=%s error=%s reason=%s",
                    name,
                    type(error).__name__,
                    error,
                )
