"""The service's side of a refresh: at most one at a time, from Begin to Applied or to a typed refusal.

    Begin   names, shapes, dtypes, version → Lease         Busy(owner) while another one is open
    Chunk   inline only → Staged, when staged              renews the lease, as everything about the push does
    Prepare → Staged, when all is staged and checked
    Commit  → Applied, at the first boundary between two steps at which all is staged and checked
    Abandon, a lease that runs out, a client that goes, any error: the staging is free again, the old weights serve on
    Begin of another client, and the connection of the owner has ended for GONE_S: the same

Staging is done by `work`, between steps and in small doses, so that generation goes on. Every request may be repeated: what
became of the last pushes is kept, and answered again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from engine.types import Adapter, Refreshed
from engine.types import BaseMismatch as OtherBase
from rollout.logs import logger
from rollout.service.as_json import to_json
from rollout.service.ended import EndedRefresh, EndedRefreshes, check_commit
from rollout.service.engine_api import EngineLike, StagingLike
from rollout.service.session import Session
from rollout.service.watchdog import LoopPhase
from rollout.service.weight_reader import WeightReader
from transport import messages as m
from transport.errors import Busy, GroupFailed, RolloutError, WeightsRefused, WrongBase, copy_of
from transport.frames import pack
from transport.weights import Payload, open_payload
from transport.weights.inline import WINDOW_BYTES
from transport.weights.manifest import unpack_manifest, unpack_targets
from transport.weights.shm import SegmentView

DOSE_S = 0.1
"""longest that staging holds the loop up at once"""
SHARE = 0.25
"""of the time that staging takes while groups run, doses apart"""
MAX_REQUESTS = 1024
"""about one refresh that wait for their answer"""
GONE_S = 1.0
"""without a connection, after which a refresh makes way for another client's: one that connects again has had the time"""
LOOK_S = 0.25
"""between two looks at the connection of who has a refresh open"""

log = logger(__name__)


class OngoingRefresh:
    """The refresh that is open."""

    def __init__(self, begin: m.Begin, session: Session, staging: StagingLike, payload: Payload, now: float) -> None:
        self.id = begin.push_id
        self.kv = begin.kv
        self.session = session
        self.staging = staging
        self.payload = payload
        self.last_received_at = self.looked_at = now
        self.gone_since: float | None = None
        """when the connection of its client was seen to have ended; None: it has not"""
        self.chunks: deque[tuple[int, int]] = deque()
        """(end in the payload, request) of those that are not staged yet"""
        self.prepares: list[int] = []
        self.commits: list[int] = []
        """requests"""
        self.applying = False
        """the engine has begun to, and has not ended"""

    def reply(self, message: msgspec.Struct) -> None:
        self.session.reply(pack(message))

    def refuse(self, request_id: int, error: RolloutError) -> None:
        self.reply(m.Refused(error.kind, error.message, None, request_id))

    @property
    def ready(self) -> bool:
        """Whether there is something to do for `work`."""
        if self.staging.complete:
            return bool(self.commits) and not self.applying
        return self.payload.ready and self.staging.received < self.staging.total


class Refreshes:
    """Written by the service's loop only. `lease_s`: a client that says nothing about its push for so long has given it up.
    `watch`: is told when weights are exchanged."""

    def __init__(self, engine: EngineLike, lease_s: float, watch: LoopPhase) -> None:
        self._engine = engine
        self._watch = watch
        self._lease_s = lease_s
        self._open: OngoingRefresh | None = None
        self._last: Refreshed | None = None
        self._segment = SegmentView()
        self._ended = EndedRefreshes()
        self._reads = WeightReader(engine)
        self._credit, self._credited = DOSE_S, time.perf_counter()

    @property
    def has_work(self) -> bool:
        return bool(self._reads) or (self._open is not None and self._open.ready)

    @property
    def unannounced(self) -> bool:
        """Whether bytes may come of which no message tells, or a device ends its checks."""
        push = self._open
        if push is None or push.staging.complete:
            return False
        return push.payload.unannounced or push.staging.received == push.staging.total

    @property
    def window_bytes(self) -> int:
        """Bytes that the owner of the refresh may send ahead."""
        return 0 if self._open is None else self._open.payload.window_bytes

    @property
    def owner(self) -> str | None:
        """Name of the client whose refresh is being staged."""
        return None if self._open is None else _owner(self._open.session)

    def handle(self, session: Session, message: m.WeightMessage, now: float) -> None:
        """Serve a request; what takes time is answered by `work`. Raises the typed error that goes back for it."""
        if (ended := self._ended.find(session, message.push_id)) is not None:
            session.reply(pack(ended.answer(message, self._lease_s)))
            return
        push = self._find(session, message.push_id)
        if push is None:
            if isinstance(message, m.Begin):
                self._begin(session, message, now)
            elif isinstance(message, m.Abandon):
                session.reply(pack(m.Done(message.request_id)))
            else:
                raise WeightsRefused("no such refresh: its lease ran out, or the service has forgotten it")
            return
        push.last_received_at = now
        match message:
            case m.Begin():
                push.reply(self._lease(push, message.request_id))
            case m.Chunk():
                self._chunk(push, message)
            case m.Prepare():
                self._prepare(push, message)
            case m.Commit():
                self._commit(push, message)
            case m.Abandon():
                self._fail(push, WeightsRefused("the client has abandoned this refresh"))
                push.reply(m.Done(message.request_id))

    def work(self, now: float, busy: bool) -> None:
        """Do a dose of staging or of reading the live weights, the commit if its time has come, and the end of a lease. For the
        time between two steps."""
        if self._reads:
            self._dose(busy, self._reads.work)
        push = self._open
        if push is None:
            return
        try:
            self._dose(busy, lambda end: self._stage(push, end))
            if push.staging.complete and push.commits:
                applied = self._commit_now(push)
                push.applying = applied is None
                if applied is not None:
                    self._applied(push, applied)
                return
        except Exception as error:
            self._fail(push, _typed(error))
            return
        if not (push.commits or push.chunks or push.prepares) and now - push.last_received_at > self._lease_s:
            self._fail(push, WeightsRefused(f"its lease ran out: nothing was heard of it for {self._lease_s} s"))

    def look_at_owner(self, reaches: Callable[[Session], bool], now: float) -> None:
        """Note whether the client of the open refresh still has a connection. `reaches`: whether that has not ended."""
        push = self._open
        if push is not None and now - push.looked_at >= LOOK_S:
            push.looked_at = now
            push.gone_since = None if reaches(push.session) else now if push.gone_since is None else push.gone_since

    def make_way(self, now: float) -> None:
        """End the open refresh if the connection of its client has ended, and no other one has come for GONE_S."""
        push = self._open
        if push is not None and push.gone_since is not None and now - push.gone_since > GONE_S:
            self._fail(push, WeightsRefused(f"its client's connection had ended, no other one came for {GONE_S} s"))

    def forget(self, session: Session) -> None:
        """End the refresh of a session that ends."""
        if self._open is not None and self._open.session is session:
            self._fail(self._open, WeightsRefused("its client is gone"))
        if self._open is None:
            self._segment.close()  # the memory may have been this client's, and lives as long as it is mapped
        self._reads.forget(session)
        self._ended.forget(session)

    def close(self) -> None:
        """Let go of the trainers' memory when the service ends."""
        if self._open is not None:
            self._open.payload.close()
        self._segment.close()
        self._reads.sharing.void()

    def ask_status(self, session: Session, request: m.WeightsRequest | m.Share) -> None:
        """Tell what is live, what is staged and whose it is. `verify`: with the digest of the live bytes as they lie there,
        which comes later, in doses, as a copy of them to share does. Raises Busy, InvalidRequest."""
        if isinstance(request, m.Share):
            return self._reads.sharing.ask(session, request.request_id)

        def reply(**live_digest: str) -> None:
            status = to_json({**described(self._engine, self._open, self._last), **live_digest})
            session.reply(pack(m.StatusReply(request.request_id, status)))

        if request.verify:
            self._reads.ask(session, request.request_id, lambda digest: reply(live_digest=digest))
        else:
            reply()

    def _commit_now(self, push: OngoingRefresh) -> Refreshed | None:
        self._watch.at("commit")
        applied, sent = self._engine.commit(push.staging, push.kv, push.payload.via), push.payload.sent_bytes
        self._watch.at("refresh")
        return applied if sent is None or applied is None else msgspec.structs.replace(applied, sent_bytes=sent)

    # requests

    def _find(self, session: Session, push_id: str) -> OngoingRefresh | None:
        push = self._open
        return push if push is not None and push.id == push_id and push.session is session else None

    def _begin(self, session: Session, begin: m.Begin, now: float) -> None:
        self.make_way(now)
        if self._open is not None:
            owner = self._open
            raise Busy(f"{_owner(owner.session)} is staging version {owner.staging.version}; try again when it is done")
        manifest = unpack_manifest(begin.manifest, 2 * self._engine.weights.names + 64)
        try:
            staging = self._engine.stage(manifest, version=begin.version, partial=begin.partial, **besides(begin, self._engine))
        except Exception as error:
            raise _typed(error) from None
        try:
            device, live = self._engine.model.device, self._engine.weights
            payload = open_payload(begin.offer, manifest, staging.total, self._segment, device, live)
        except BaseException:
            staging.close()
            raise
        push = self._open = OngoingRefresh(begin, session, staging, payload, now)
        push.reply(self._lease(push, begin.request_id))

    def _lease(self, push: OngoingRefresh, request_id: int) -> m.Lease:
        return m.Lease(request_id, push.staging.version, self._lease_s, WINDOW_BYTES)

    def _chunk(self, push: OngoingRefresh, chunk: m.Chunk) -> None:
        end = push.payload.put(chunk.offset, chunk.data)
        if end <= push.payload.read_bytes:
            push.reply(m.Staged(chunk.request_id))
        else:
            push.chunks.append((end, chunk.request_id))

    def _prepare(self, push: OngoingRefresh, prepare: m.Prepare) -> None:
        push.payload.check_sent()
        if push.staging.complete:
            push.reply(m.Staged(prepare.request_id))
        elif len(push.prepares) >= MAX_REQUESTS:
            raise Busy(f"{len(push.prepares)} requests wait for the end of this staging")
        elif prepare.request_id not in push.prepares:
            push.prepares.append(prepare.request_id)

    def _commit(self, push: OngoingRefresh, commit: m.Commit) -> None:
        check_commit(commit, push.staging.manifest_digest)
        push.payload.check_sent()
        if commit.request_id in push.commits:
            return
        push.kv = commit.kv or push.kv
        if len(push.commits) >= MAX_REQUESTS:
            raise Busy(f"{len(push.commits)} commits of this refresh wait for their answer")
        push.commits.append(commit.request_id)

    # work

    def _dose(self, busy: bool, work: Callable[[float], None]) -> None:
        """Do work until the time (of time.perf_counter) that it is given. Groups that run pay for it with SHARE of their time,
        saved up to DOSE_S."""
        started = time.perf_counter()
        self._credit = min(DOSE_S, self._credit + SHARE * (started - self._credited))
        self._credited = started
        if busy and self._credit <= 0:
            return
        work(started + (self._credit if busy else DOSE_S))
        self._credit -= time.perf_counter() - started

    def _stage(self, push: OngoingRefresh, end: float) -> None:
        staging = push.staging
        while not staging.complete and staging.feed(push.payload.read):
            while push.chunks and push.chunks[0][0] <= push.payload.read_bytes:
                push.reply(m.Staged(push.chunks.popleft()[1]))
            if time.perf_counter() >= end:
                break
        while staging.complete and push.prepares:
            push.reply(m.Staged(push.prepares.pop()))

    def _applied(self, push: OngoingRefresh, applied: Refreshed) -> None:
        self._last = applied
        self._reads.sharing.void()
        log_applied(applied, push.session)
        self._close(push, applied, None)
        for request_id in push.commits:
            push.reply(m.Applied(request_id, applied))

    def _fail(self, push: OngoingRefresh, error: RolloutError) -> None:
        """End a refresh, with this error for everybody who waits or asks."""
        number = push.session.number
        log.warning("refresh failed version=%d client=%d reason=%r", push.staging.version, number, error.message)
        self._close(push, None, copy_of(error))
        for request_id in [*(request_id for _, request_id in push.chunks), *push.prepares, *push.commits]:
            push.refuse(request_id, error)

    def _close(self, push: OngoingRefresh, applied: Refreshed | None, error: RolloutError | None) -> None:
        assert self._open is push
        self._open = None
        push.staging.close()
        push.payload.close()
        staging = push.staging
        self._ended.add(push.id, EndedRefresh(push.session, staging.version, staging.manifest_digest, applied, error))


def described(engine: EngineLike, push: OngoingRefresh | None, last: Refreshed | None) -> dict[str, Any]:
    """Tell which weights are live, and what is staged and whose it is."""
    staged = push and {
        "version": push.staging.version,
        "owner": _owner(push.session),
        "via": push.payload.via,
        "received": push.staging.received,
        "total": push.staging.total,
    }
    return {
        "version": engine.version,
        "digest": engine.weights.digest,
        "base_digest": engine.weights.base.digest,
        "names": engine.weights.names,
        "staged": staged,
        "last": None if last is None else msgspec.to_builtins(last),
    }


def besides(begin: m.Begin, engine: EngineLike) -> dict[str, Any]:
    """Return what a refresh tells the engine besides: LoRA factors, and whether the payload lies on the model's device."""
    on_device = begin.offer.on_device and engine.model.device is not None
    told: dict[str, Any] = {"on_device": True} if on_device else {}
    if begin.adapter is not None:
        told["adapter"] = Adapter(begin.base, unpack_targets(begin.adapter, engine.weights.names))
    return told


def log_applied(done: Refreshed, session: Session) -> None:
    log.info(
        "refresh applied version=%d via=%s bytes=%d sent_bytes=%d seconds=%.3f paused_seconds=%.3f client=%d",
        done.version, done.via, done.bytes, done.sent_bytes, done.seconds, done.paused_seconds, session.number,
    )  # fmt: skip


def _typed(error: Exception) -> RolloutError:
    """Make the error that goes to the client. InvalidWeights is a ValueError; anything else is the engine's or the machine's
    fault, and has been undone."""
    if isinstance(error, RolloutError):
        return error
    if isinstance(error, OtherBase):
        return WrongBase(str(error))
    if isinstance(error, ValueError):
        return WeightsRefused(str(error))
    log.exception("refresh failed")
    return GroupFailed(f"the service failed on this refresh: {type(error).__name__}: {error}")


def _owner(session: Session) -> str:
    return f"client {session.number} ({session.name})" if session.name else f"client {session.number}"
