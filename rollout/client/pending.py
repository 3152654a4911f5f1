"""Everybody who waits for the service: for samples of a group, for the answer to a request, for the first Welcome."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from engine.types import Served
from rollout.client.open_groups import OpenGroups
from rollout.client.open_requests import OpenRequests
from rollout.client.seen import Seen
from rollout.logs import logger
from transport.errors import RolloutError, ServiceLost, ServiceRestarted, copy_of
from transport.messages import Applied, Welcome

log = logger(__name__)


class PendingRequests:
    """Keeps everybody who waits. For one thread. True while somebody waits for a group or a request."""

    def __init__(self, budget: int | None = None) -> None:
        self.seen = Seen()
        self.groups = OpenGroups(self.seen, budget)
        self.requests = OpenRequests()
        self.first_welcome: Future[Welcome] = Future()

    def __bool__(self) -> bool:
        return bool(self.groups) or bool(self.requests)

    def fail(self, error: RolloutError, groups: bool = True) -> list[int]:
        """Raise this error for everybody, each in an object of its own: tracebacks are written into it. Who waits for the first
        Welcome waits on where the service is only lost. `groups`: those who wait for a group included.

        Returns the ids of the requests."""
        for handle in self.groups.clear() if groups else []:
            handle.fail(copy_of(error, handle.group_id))
        failed = self.requests.ids
        for request_id in failed:
            self.requests.answer(request_id, copy_of(error))
        if not self.first_welcome.done() and not isinstance(error, ServiceLost):
            self.first_welcome.set_exception(copy_of(error))
        return failed

    def answer(self, request_id: int, result: Any) -> None:
        """Give the caller of a request its result, or raise an error there."""
        if isinstance(result, Applied):
            self.seen.note(Served(result.refreshed.version, result.refreshed.digest))
        self.requests.answer(request_id, result)

    def restarted(self, old: Welcome, new: Welcome, address: str, resubmit: bool) -> list[int]:
        """Make good what a restart has lost: with a journal little, else all, an error unless `resubmit`. Returns the ids
        of the requests that have failed."""
        failed = []
        self.seen.restarted(old.incarnation == new.incarnation, resubmit)
        if old.incarnation != new.incarnation:
            # unsent groups were never in the old one, but their caller chose it, its model and its weights
            failed = self.fail(ServiceRestarted(f"{address} was restarted; what ran there is gone"), groups=not resubmit)
        live, needed = new.version, self.seen.live.version
        if self.groups and live < needed:
            log.warning("service restarted with older weights, open groups wait for a refresh live=%d needed=%d", live, needed)
        self.groups.restarted(new.groups, new.limits)
        return failed

    def told(self, live: Served, address: str) -> bool:
        """Note which weights are live. Groups that a restart has stopped under other weights of that version end. Returns
        whether there were such."""
        self.seen.told(live)
        strangers = self.groups.strangers(live)
        for handle in strangers:
            handle.fail(
                ServiceRestarted(
                    f"{address} was started again, and has other weights as version {live.version} (digest {live.digest:.12}…, "
                    f"it was {handle.needs.digest:.12}…): what ran under those does not go on",
                    handle.group_id,
                )
            )
        return bool(strangers)
