"""The proxy: forwards messages between each client and the service, and answers repeated groups from the folder.

    client ──Submit──→ CacheProxy ──hit──→ SamplesDone from the folder
                           └──miss──→ service ──SamplesDone──→ client, and, when the group is complete, the folder

All other messages pass through. One thread runs it; the connections to the service have threads that only queue.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from rollout.cache.clients import CachedClient, HeldGroup, Recording, Tally
from rollout.cache.keys import KnownWeights, NotCacheable, group_name, missing
from rollout.cache.recorder import Recorder
from rollout.cache.store import FolderStore
from rollout.cache.upstream import Arrived, UpstreamLike
from rollout.engine.types import Limits, Served
from rollout.logs import logger
from rollout.transport import messages as m
from rollout.transport.errors import RolloutError
from rollout.transport.frames import Decoder, Frame, frame_bytes, pack
from rollout.transport.sockets import ServiceTransport

Connect = Callable[[Callable[[Arrived], None]], UpstreamLike]
"""opens a client's connection to the service. Its argument takes what arrives, in any thread"""

HOLD_S = 10.0
"""for which an answer that was generated during a refresh waits for the weights after it; then the group is computed"""
SILENT_S = 30.0
"""without a message of a client, until its connection counts as ended"""
LEAST_S = 1e-6
"""for which a sample took at least: trainers divide by it"""
POLL_S = 0.25
BUSY_POLL_S = 0.005
"""the same while a client's socket takes no more"""
WAITING_BYTES = 256 << 20
"""of answers that a client has not received, until further groups are refused as busy"""

log = logger(__name__)


class CacheProxy:
    """Serves clients at `end`. One thread calls `run`.

    Args:
        connect: opens a client's connection to the service.
        limits: of messages, both ways.
        offline: there is no service: what is not in the folder is refused."""

    def __init__(
        self, end: ServiceTransport, store: FolderStore, connect: Connect, limits: Limits, offline: bool = False
    ) -> None:
        self.weights = KnownWeights()
        self.tally = Tally()
        self._end, self._connect, self._offline = end, connect, offline
        self._recorder = Recorder(store, self.weights)
        self._from_clients: Decoder[Any] = Decoder(m.ClientMessage, limits)
        self._from_service: Decoder[Any] = Decoder(m.ServiceMessage, m.answer_limits(limits))
        self._clients: dict[bytes, CachedClient] = {}
        self._held: list[HeldGroup] = []
        self._inbox: deque[tuple[CachedClient, Arrived]] = deque()
        self._info: m.Welcome | None = None
        self._stopping = False

    def stop(self) -> None:
        """Make `run` return. Safe from any thread and from a signal handler."""
        self._stopping = True
        self._end.wake()

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopping:
            self.turn()
        for client in list(self._clients.values()):
            client.say(pack(m.Closing("the cache is shutting down")))
            self._flush(client)
            self._leave(client)

    def turn(self) -> None:
        """Handle what has arrived from both sides."""
        blocked = any(client.out for client in self._clients.values())
        wait = 0.0 if self._inbox else BUSY_POLL_S if blocked else POLL_S
        for id, frames in self._end.receive(wait):
            self._receive(id, frames)
        for _ in range(len(self._inbox)):
            client, arrived = self._inbox.popleft()
            if self._clients.get(client.id) is client:
                self._arrived(client, arrived)
        now = time.monotonic()
        self._release(now)
        for client in list(self._clients.values()):
            self._flush(client)
            if now - client.last_received_at > SILENT_S:
                self._leave(client)

    # from clients

    def _receive(self, id: bytes, frames: list[Frame]) -> None:
        client = self._clients.get(id)
        try:
            message = self._from_clients.unpack(frames)
        except RolloutError as error:
            if client is not None:
                client.upstream.send(frames)  # the service says what is wrong
            else:
                self._end.send(id, pack(m.Refused("protocol_error", error.message)))
            return
        if isinstance(message, m.Hello):
            client = self._greeted(id, client, message)
        if client is None:
            self._end.send(id, pack(m.Refused("no_session", "send Hello first")))
            return
        client.last_received_at = time.monotonic()
        if not (isinstance(message, m.Submit) and self._submitted(client, message, frames)):
            self._recorder.requested(client, message)
            if isinstance(message, m.Abort):
                self._aborted(client, message)
            client.upstream.send(frames)
        if isinstance(message, m.Goodbye):
            self._leave(client)

    def _greeted(self, id: bytes, client: CachedClient | None, hello: m.Hello) -> CachedClient:
        """Return the client of a Hello. A new connection of a session replaces its old one."""
        if client is None:
            earlier = next((each for each in self._clients.values() if each.session == hello.session), None)
            client = CachedClient(id, hello.session, time.monotonic())
            client.upstream = self._connect(partial(self._queue, client))
            if earlier is not None:
                client.recordings, client.tally, client.begun = earlier.recordings, earlier.tally, earlier.begun
                self._leave(earlier)
            self._clients[id] = client
        client.answered_bytes = client.reported_bytes = 0
        client.last_alive = None
        self._held = [held for held in self._held if held.client is not client]  # the client sends them again
        return client

    def _queue(self, client: CachedClient, arrived: Arrived) -> None:
        self._inbox.append((client, arrived))
        self._end.wake()

    def _aborted(self, client: CachedClient, abort: m.Abort) -> None:
        """Have the service end the held groups that an Abort names."""
        named = {*abort.group_ids, *(group_id for group_id, _ in abort.children)}
        for held in [held for held in self._held if held.client is client and held.submit.group_id in named]:
            self._held.remove(held)
            self._compute(held, "it was aborted")

    def _submitted(self, client: CachedClient, submit: m.Submit, frames: list[Frame]) -> bool:
        """Answer a group from the folder. Returns False if the service must compute it."""
        live, info = self.weights.live, self._info
        try:
            if info is None or submit.require_version > live.version:
                raise NotCacheable(f"it requires version {submit.require_version} of the weights, {live.version} is live")
            name = group_name(submit, info, live, self.weights.digest)
        except NotCacheable as reason:
            self.tally.uncacheable += 1
            client.tally.uncacheable += 1
            log.debug("group is not cached group=%r reason=%s", submit.group_id, reason)
            return self._refused_offline(client, submit, str(reason))
        if client.out_bytes > WAITING_BYTES:
            refused = m.Refused("busy", "samples wait until this client has read more", group_id=submit.group_id)
            client.say(pack(refused))
            return True
        answer = self._recorder.find(name)
        awaited = None if answer is None else answer.awaits(live.version, self.weights.digest)
        if answer is None or awaited is None:
            why = self._missed(client, submit, missing(name, self._recorder.store.has_prefix))
            wanted = range(submit.sampling.n) if submit.indices is None else submit.indices
            client.recordings[submit.group_id] = Recording(name, live.version, set(wanted))
            return self._refused_offline(client, submit, why)
        client.answered_bytes += frame_bytes(frames)
        self._held.append(HeldGroup(client, submit, frames, answer, live.version, time.monotonic()))
        return True

    def _refused_offline(self, client: CachedClient, submit: m.Submit, why: str) -> bool:
        """Refuse a group if there is no service to compute it. Returns whether it was refused."""
        if self._offline:
            client.recordings.pop(submit.group_id, None)
            client.say(pack(m.Refused("group_failed", f"offline, and not in the cache: {why}", group_id=submit.group_id)))
        return self._offline

    def _release(self, now: float) -> None:
        """Return the answers whose weights are live; have the service compute those that have waited too long."""
        waiting, self._held = self._held, []
        for held in waiting:
            awaited = held.answer.awaits(held.version, self.weights.digest)
            if awaited is None or now - held.at > HOLD_S:
                why = "it was generated during a refresh, " + ("which was not sent" if awaited else "whose weights differ now")
                self._missed(held.client, held.submit, why)
                self._compute(held, why)
            elif awaited > self.weights.live.version:
                self._held.append(held)
            else:
                for frames in held.answer.frames(held.submit.group_id, held.version, max(LEAST_S, now - held.at)):
                    held.client.say(frames)
                self.tally.hits += 1
                held.client.tally.hits += 1

    def _compute(self, held: HeldGroup, why: str) -> None:
        """Have the service compute a held group."""
        if not self._refused_offline(held.client, held.submit, why):
            held.client.answered_bytes -= frame_bytes(held.frames)
            held.client.upstream.send(held.frames)

    def _missed(self, client: CachedClient, submit: m.Submit, why: str) -> str:
        """Count a miss; name the first one of a client. Returns `why`."""
        self.tally.misses += 1
        client.tally.misses += 1
        if client.tally.first_miss is None:
            version, hits = self.weights.live.version, client.tally.hits
            client.tally.first_miss = {"group": submit.group_id, "version": version, "after_hits": hits, "why": why}
            self.tally.first_miss = client.tally.first_miss
            log.warning("first miss group=%r version=%d after_hits=%d why=%r", submit.group_id, version, hits, why)
        return why

    # from the service

    def _arrived(self, client: CachedClient, arrived: Arrived) -> None:
        if isinstance(arrived, str):
            client.say(pack(m.Closing(arrived)))
            self._flush(client)
            self._leave(client)
            return
        try:
            message = self._from_service.unpack(arrived)
        except RolloutError:
            client.say(arrived)  # the client says what is wrong
            return
        match message:
            case m.Welcome():
                self._info = message
                self.weights.welcomed(message)
                client.upstream.patient = bool(message.starts)
                if not self._offline:
                    self._recorder.welcomed(message)
            case m.Alive():
                self.weights.seen(Served(message.version, message.digest))
                client.last_alive = message
                client.reported_bytes = client.answered_bytes
                arrived = pack(msgspec.structs.replace(message, taken_bytes=message.taken_bytes + client.answered_bytes))
            case m.SamplesDone():
                self._recorder.record(client, message)
            case m.Applied(request_id=number, refreshed=refreshed):
                self._recorder.applied(client, number, refreshed)
            case m.StatusReply(request_id=number, status=status) if number in client.status_requests:
                client.status_requests.discard(number)
                arrived = pack(m.StatusReply(number, self._with_status(client, status)))
            case m.Refused(group_id=group_id) if group_id is not None:
                client.recordings.pop(group_id, None)
        client.say(arrived)

    # status, connections

    def status(self, tally: Tally) -> dict[str, Any]:
        """Return what a client's status has as `cache`."""
        store = self._recorder.store
        return {
            "hits": tally.hits, "misses": tally.misses, "uncacheable": tally.uncacheable, "first_miss": tally.first_miss,
            "entries": len(store), "bytes": store.bytes, "evicted": store.evicted, "damaged": store.damaged,
            "unwritten": store.unwritten, "held": len(self._held), "clients": len(self._clients),
        }  # fmt: skip

    def _with_status(self, client: CachedClient, status: bytes) -> bytes:
        try:
            return json.dumps({**json.loads(status), "cache": self.status(client.tally)}).encode()
        except (ValueError, TypeError):
            return status

    def _flush(self, client: CachedClient) -> None:
        ahead = client.answered_bytes - client.reported_bytes
        if client.last_alive is not None and ahead > m.UNTAKEN_BYTES // 4:
            client.reported_bytes = client.answered_bytes
            alive = msgspec.structs.replace(
                client.last_alive, taken_bytes=client.last_alive.taken_bytes + client.answered_bytes
            )
            client.say(pack(alive))
        while client.out and self._end.send(client.id, client.out[0]):
            client.out_bytes -= frame_bytes(client.out.popleft())

    def _leave(self, client: CachedClient) -> None:
        """Forget a connection."""
        client.upstream.close()
        self._held = [held for held in self._held if held.client is not client]
        if self._clients.get(client.id) is client:
            del self._clients[client.id]
