"""One session with a service. No method blocks: groups return handles, requests return futures.

RolloutClient, AsyncRolloutClient ──→ ClientSession ──→ Link (I/O thread)
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from rollout.client.config import ClientConfig
from rollout.client.handle import Handle, OnChange, OpenHandle, answered, refused
from rollout.client.link import Link
from rollout.client.submission import check_budget, check_configuration, seeded, sendable
from rollout.engine.values import Group, Limits, Sample, Served, Tag
from rollout.identity import WORDS
from rollout.transport import messages as m
from rollout.transport.errors import GroupFailed, InvalidRequest, ServiceLost
from rollout.transport.sockets import ClientEnd, ClientTransport

if TYPE_CHECKING:
    from rollout.client.memo import Memo


class ClientSession:
    """A session with one service. Thread-safe.

    Args:
        end: of the connection.
        config: settings; what is about the memo, the address and texts is for the caller.
        memo: answers groups that were had before.
        offline: the memo is all there is."""

    def __init__(self, end: ClientTransport, config: ClientConfig, memo: Memo | None = None, offline: bool = False) -> None:
        self.memo, self.offline = memo, offline
        self._end = end
        self.address = end.address
        self._budget = config.budget
        self._resubmit = config.resubmit
        self._ids, self._serials = itertools.count(), itertools.count(1)
        self._required = Served(config.require_version)
        self.link = Link(
            end, secrets.token_hex(16), config.name, config.intervals, budget=config.budget, resubmit=config.resubmit,
            clock=config.clock,
        )  # fmt: skip
        if memo is not None and not self.offline:
            self.link.first_welcome.add_done_callback(partial(note_welcome, memo))

    @property
    def info(self) -> m.Welcome:
        """Return the service's last Welcome. Raises RuntimeError before the first one."""
        if self.link.welcome is None:
            raise RuntimeError("not connected yet: use it inside `async with AsyncRolloutClient(…) as client`")
        return self.link.welcome

    @property
    def require_version(self) -> int:
        """Return the oldest version of the weights that groups accept."""
        return self._required.version

    @require_version.setter
    def require_version(self, version: int) -> None:
        """Set it. Groups also require the digest that this client has seen for the version."""
        self._required = Served(version, self.link.weights.digest(version))

    @property
    def summary(self) -> str:
        """Describe the session in a few words."""
        closed = "" if self.link.calls.ended is None else ", closed"
        welcome = self.link.welcome
        model = "not connected" if welcome is None else f"{welcome.model!r} version {self.link.weights.live.version}"
        return f"{self.address!r} {model}{closed}"

    def group_id(self, given: str | None) -> str:
        """Return the given group id, or a new one."""
        return given if given is not None else f"#{next(self._ids)}"

    def submit(self, group: Group, on_change: OnChange | None = None) -> Handle:
        """Answer a group from the memo, or send it. Raises InvalidRequest or LimitExceeded if it cannot be sent."""
        memo, info, live = self.memo, self.info, self.link.weights.live
        if memo is None:
            return self.compute(group, on_change)
        check_configuration(group, info.configuration)
        name = memo.name(group, info, live) if (follows := live.follow(self._required)) else None
        if not follows:
            memo.passed(group, f"version {live.version} is live, and it requires {self._required.version}")
        if name is not None and (samples := memo.find(name, group, info, live)) is not None:
            return answered(group, samples, on_change)
        if self.offline:
            return refused(group, GroupFailed(f"offline, and not in the memo: {memo.why_missing(name)}", group.id), on_change)
        same = partial(self._computes_as, info, live)
        return self._send(group, on_change, lambda handle, new: memo.arrived(name, live, same, handle, new))

    def _computes_as(self, info: m.Welcome, live: Served) -> bool:
        """Return whether the service computes as it did, and a version still has the same weights."""
        same = all(getattr(self.info, name) == getattr(info, name) for name in WORDS)
        return same and self.link.weights.digest(live.version) == live.digest

    def compute(self, group: Group, on_change: OnChange | None = None) -> Handle:
        """Send a group; the memo does not answer it. Raises InvalidRequest or LimitExceeded if it cannot be sent."""
        check_configuration(group, self.info.configuration)
        return self._send(group, on_change)

    def _send(
        self,
        group: Group,
        on_change: OnChange | None,
        on_arrival: Callable[[OpenHandle, list[Sample]], None] | None = None,
    ) -> Handle:
        serial, info, required = next(self._serials), self.info, self._required
        group = seeded(group) if self._resubmit else group
        digest = required.digest if m.DIGESTS in info.capabilities else ""
        handle = sendable(group, serial=serial, require_version=required.version, require_digest=digest, limits=info.limits)
        check_budget(handle, self._budget)
        handle.on_cancel, handle.on_change, handle.on_arrival = self.link.cancel, on_change, on_arrival
        self.link.submit(handle)
        return handle

    def status(self) -> Future[dict[str, Any]]:
        """Ask for the service's status."""
        return self.link.request(m.StatusRequest)

    def weights_status(self, verify: bool) -> Future[dict[str, Any]]:
        """Ask for the live and staged weights. Raises InvalidRequest."""
        if not isinstance(verify, bool):
            raise InvalidRequest(f"verify={verify!r}: must be True or False")
        return self.link.request(lambda id: m.WeightsRequest(id, verify))

    def control(self, action: Literal["pause", "resume", "drain", "abort_all"]) -> Future[m.Done]:
        """Pause, resume, drain or abort the groups of all clients."""
        return self.link.request(lambda id: m.Control(id, action))

    def change_replicas(self, action: Literal["scale", "drain", "roll"], count: int, name: str) -> Future[m.Done]:
        """Change the replicas of a fleet."""
        return self.link.request(lambda id: m.Replicas(id, action, count, name))

    def sleep(self, level: int) -> Future[m.Asleep]:
        """Release the service's device memory. Raises InvalidRequest."""
        if type(level) is not int or level not in (1, 2):
            raise InvalidRequest(f"level={level!r}: must be 1 (weights to host memory) or 2 (weights dropped)")
        return self.link.request(lambda id: m.Sleep(id, cast(Literal[1, 2], level)))

    def wake(self, tags: Sequence[Tag] | None) -> Future[m.Done]:
        """Allocate the memory again. Raises InvalidRequest."""
        if tags is not None and (isinstance(tags, str) or not tags or not set(tags) <= set(get_args(Tag))):
            raise InvalidRequest(f'tags={tags!r}: must be ("weights",), ("kv",), both, or None for all that is asleep')
        return self.link.request(lambda id: m.Wake(id, None if tags is None else tuple(tags)))

    def unreachable(self, seconds: float) -> ServiceLost:
        """Return the error for a service that sent no Welcome within `seconds`. It says what to check."""
        if self._end.connected:
            return ServiceLost(
                f"{self.address} accepts connections but did not answer within {seconds} s: it is in a long step, it is "
                "stopped, or it is not a rollout service"
            )
        return ServiceLost(
            f"no service at {self.address} within {seconds} s: is `rollout serve` running, is this the endpoint that it "
            "printed, and if it has keys, is the connection file of this service given in place of the address?"
        )

    def close(self) -> None:
        """End the session. May be repeated."""
        self.link.close()
        if self.memo is not None:
            self.memo.close()


def note_welcome(memo: Memo, first: Future[m.Welcome]) -> None:
    """Store how the service describes itself."""
    if not first.cancelled() and first.exception() is None:
        memo.welcomed(first.result())


def end_of(address: str | None, transport: ClientTransport | None) -> ClientTransport:
    """Return the client's end of the connection. Raises ValueError unless exactly one argument is given."""
    if (address is None) == (transport is None):
        raise ValueError("give either an address or a transport")
    return transport if transport is not None else ClientEnd(str(address), Limits())
