"""Refreshes that have ended: numbers only, so that whoever repeats a request about one gets its answer again."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from engine.types import Refreshed
from rollout.service.session import Session
from transport import messages as m
from transport.errors import RolloutError, WeightsRefused, copy_of
from transport.weights.inline import WINDOW_BYTES

REMEMBERED = 64
"""refreshes that have ended and still get their answer again"""


class EndedRefresh(NamedTuple):
    """What became of a refresh: it was applied, or it has an error."""

    session: Session
    version: int
    manifest_digest: str
    applied: Refreshed | None
    error: RolloutError | None

    def answer(self, message: m.WeightMessage, lease_s: float) -> m.Lease | m.Staged | m.Applied | m.Done:
        """Answer a request that comes again. Raises the typed error that goes back."""
        if self.applied is None:
            if isinstance(message, m.Abandon):
                return m.Done(message.request_id)
            assert self.error is not None
            raise copy_of(self.error)
        match message:
            case m.Begin():
                return m.Lease(message.request_id, self.version, lease_s, WINDOW_BYTES)
            case m.Chunk() | m.Prepare():
                return m.Staged(message.request_id)
            case m.Commit():
                check_commit(message, self.manifest_digest)
                return m.Applied(message.request_id, self.applied)
            case m.Abandon():
                raise WeightsRefused(f"version {self.applied.version} is live already")


class EndedRefreshes:
    """The last REMEMBERED of them, by their id."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, EndedRefresh] = OrderedDict()

    def add(self, push_id: str, ended: EndedRefresh) -> None:
        self._ended[push_id] = ended
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def find(self, session: Session, push_id: str) -> EndedRefresh | None:
        """Find a refresh of this session."""
        ended = self._ended.get(push_id)
        return ended if ended is not None and ended.session is session else None

    def forget(self, session: Session) -> None:
        self._ended = OrderedDict((id, ended) for id, ended in self._ended.items() if ended.session is not session)


def check_commit(commit: m.Commit, manifest_digest: str) -> None:
    """Raises WeightsRefused for a commit that means other weights than those that were begun."""
    if commit.digest != manifest_digest:
        raise WeightsRefused("the commit is about another manifest than the begin")
