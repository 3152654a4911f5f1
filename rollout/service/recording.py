"""What a service tells a ledger of its run, and its metrics: each group, each sample that a client gets, each refresh.

    open_service → started      Submit → accepted      sample → ended      refresh → refreshed      end of an iteration → commit

The base class `Ledger` records nothing; `rollout.ledger.writer.LedgerWriter` writes a file, and
`rollout.metrics.tracker.Tracker` measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from rollout.engine.values import Group, KVPolicy, Refreshed, Sample, TensorInfo
from rollout.service.engine_api import EngineLike


class AcceptedAs(NamedTuple):
    """How a client named a group."""

    group_id: str
    """the client's name for it"""
    client: int
    """number of its session"""
    after: tuple[str, int] | None = None
    """as `Submit.after`"""


class AppliedRefresh(NamedTuple):
    """A refresh that is live."""

    result: Refreshed
    kv: KVPolicy
    partial: bool
    adapter: bool
    manifest: list[TensorInfo]
    """as sent"""


class Ledger:
    """Records a run. Called by the service's thread only."""

    def started(self, engine: EngineLike) -> None:
        """Record the arithmetic and the weights of a service, before anything else."""

    def accepted(self, name: AcceptedAs, group: Group, version: int) -> None:
        """Record a group. version: of the weights that may sample it first."""

    def ended(self, sample: Sample) -> None:
        """Record a sample as a client gets it; its group_id is the engine's."""

    def forgotten(self, engine_id: str) -> None:
        """Expect no more samples of a group."""

    def refreshed(self, refresh: AppliedRefresh, engine: EngineLike) -> None:
        """Record which weights are live now."""

    def commit(self) -> None:
        """Write everything since the last commit. Never raises: a ledger that cannot be written stops nothing."""

    def status(self) -> dict[str, Any] | None:
        """Describe the ledger for the service's status; None: there is none."""
        return None

    def close(self) -> None:
        """Write everything and close the file. May be repeated."""


class Metrics(Protocol):
    """Measures a run; never raises. Called by the service's thread only."""

    row: dict[str, Any]
    """the newest figures, by name"""

    def begin(self, group: Group) -> None:
        """Record a group that the engine has taken on."""

    def observe(self, samples: Sequence[Sample], version: int) -> None:
        """Record children that have ended. version: of the live weights."""

    def forget(self, group_id: str) -> None:
        """Forget a group that was dropped."""

    def tend(self, status: Callable[[], dict[str, Any]], version: int) -> None:
        """Write a row if it is time, once around the loop."""

    def close(self, status: Callable[[], dict[str, Any]]) -> None:
        """Write a last row."""
