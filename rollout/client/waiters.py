"""Everybody who waits for the service: for samples of a group, for the answer to a request, for the first Welcome."""

from __future__ import annotations

from concurrent.futures import Future

from rollout.client.open_groups import OpenGroups
from rollout.client.open_requests import OpenRequests
from rollout.logs import logger
from transport.errors import RolloutError, ServiceLost, ServiceRestarted, copy_of
from transport.messages import Welcome

log = logger("rollout.client.api")


class Waiters:
    """Keeps everybody who waits. For one thread. True while somebody waits for a group or a request."""

    def __init__(self, budget: int | None = None) -> None:
        self.groups = OpenGroups(budget)
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

    def restarted(self, old: Welcome, new: Welcome, address: str, resubmit: bool) -> list[int]:
        """Make good what a restart has lost: with a journal little, else all, an error unless `resubmit`. Returns the ids
        of the requests that have failed."""
        failed = []
        if old.incarnation != new.incarnation:
            # unsent groups were never in the old one, but their caller chose it, its model and its weights
            failed = self.fail(ServiceRestarted(f"{address} was restarted; what ran there is gone"), groups=not resubmit)
        if self.groups and new.version < self.groups.version:
            live, needed = new.version, self.groups.version
            log.warning("service restarted with older weights, open groups wait for a refresh live=%d needed=%d", live, needed)
        self.groups.restarted(new.groups, new.limits)
        return failed
