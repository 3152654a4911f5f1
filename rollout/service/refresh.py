"""The service's side of a weight refresh: one at a time, from Begin to Applied or a typed refusal.

    Begin   names, shapes, dtypes, version → Lease         Busy(owner) while another refresh is open
    Chunk   inline only → Staged, once staged              renews the lease, as every message about the refresh does
    Prepare → Staged, once everything is staged and checked
    Commit  → Applied, between the first two steps after everything is staged and checked
    Abandon, an expired lease, a client that is forgotten, any error: staging ends, the old weights stay live
    Begin of another client, after the owner's connection ended `RefreshTiming.gone_s` ago: the same

`Refreshes.work` stages between steps in time slices, so that generation continues. Every request may be repeated: the results
of the last refreshes are kept, and answered again."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from rollout.engine.values import Adapter, Refreshed, TensorInfo, WeightUpdate
from rollout.engine.values import BaseMismatch as OtherBase
from rollout.logs import logger
from rollout.service.engine_api import EngineLike, StagingLike
from rollout.service.phases import LoopPhase
from rollout.service.recording import AppliedRefresh
from rollout.service.session import Session
from rollout.service.weight_export import WeightExport
from rollout.service.weight_reader import WeightReader
from rollout.transport import messages as m
from rollout.transport.errors import Busy, GroupFailed, RolloutError, WeightsRefused, WrongBase, copy_of
from rollout.transport.frames import pack
from rollout.transport.weights.ends import Payload
from rollout.transport.weights.inline import WINDOW_BYTES
from rollout.transport.weights.manifest import unpack_manifest, unpack_targets
from rollout.transport.weights.receiving import open_payload
from rollout.transport.weights.shm import SegmentView

MAX_REQUESTS = 1024
"""requests about one refresh that may wait for their answer"""
OTHER_TENSORS = 2048
"""tensors of a composite model that are not the text model's, and may be in a refresh"""
REMEMBERED = 64
"""ended refreshes whose result is kept"""


@dataclass(frozen=True, slots=True)
class RefreshTiming:
    """Durations of refreshes, in seconds."""

    slice_s: float = 0.1
    """longest time that staging delays the loop at once"""
    busy_ratio: float = 0.25
    """most of the time that staging takes while groups run"""
    gone_s: float = 1.0
    """a refresh whose client has had no connection for so long ends if another client wants to refresh"""
    look_s: float = 0.25
    """between two checks of the owner's connection"""


log = logger(__name__)


class EndedRefresh(NamedTuple):
    """The result of a refresh: it was applied, or it has an error."""

    session: Session
    version: int
    manifest_digest: str
    applied: Refreshed | None
    error: RolloutError | None

    def answer(self, message: m.WeightMessage, lease_s: float) -> m.Lease | m.Staged | m.Applied | m.Done:
        """Answer a repeated request. Raises the typed error for the client."""
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
                raise WeightsRefused(f"version {self.applied.version} is live already, so it cannot be abandoned")


class EndedRefreshes:
    """The last REMEMBERED ended refreshes, by id. Numbers only, no weights."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, EndedRefresh] = OrderedDict()

    def add(self, push_id: str, ended: EndedRefresh) -> None:
        self._ended[push_id] = ended
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def find(self, session: Session, push_id: str) -> EndedRefresh | None:
        """Find a refresh of this session. Another session with the same id gets None."""
        ended = self._ended.get(push_id)
        return ended if ended is not None and ended.session is session else None

    def forget(self, session: Session) -> None:
        self._ended = OrderedDict((id, ended) for id, ended in self._ended.items() if ended.session is not session)


class OngoingRefresh:
    """A refresh between Begin and its end."""

    def __init__(self, begin: m.Begin, session: Session, staging: StagingLike, payload: Payload, now: float) -> None:
        self.id = begin.push_id
        self.begin = begin
        self.kv = begin.kv
        self.session = session
        self.staging = staging
        self.payload = payload
        self.last_received_at = self.looked_at = now
        self.gone_since: float | None = None
        """when its client was first seen without a connection; None: it is connected"""
        self.chunks: deque[tuple[int, int]] = deque()
        """(end in the payload, request id) of chunks that are not staged yet"""
        self.prepares: list[int] = []
        self.commits: list[int] = []
        """ids of requests that wait for their answer"""
        self.applying = False
        """whether the engine has begun to apply it"""

    def reply(self, message: msgspec.Struct) -> None:
        self.session.reply(pack(message))

    def refuse(self, request_id: int, error: RolloutError) -> None:
        self.reply(m.Refused(error.kind, error.message, None, request_id))

    @property
    def ready(self) -> bool:
        """Whether `work` has something to do."""
        if self.staging.complete:
            return bool(self.commits) and not self.applying
        return self.payload.ready and self.staging.received < self.staging.total


class TimeSlices:
    """Bounds the time of staging. While groups run it gets `busy_ratio` of all time, saved up to `slice_s`; otherwise
    `slice_s`."""

    def __init__(self, timing: RefreshTiming, clock: Callable[[], float]) -> None:
        self._timing = timing
        self._clock = clock
        self._credit, self._credited = timing.slice_s, clock()
        """seconds that may be used while groups run, and when they were last added"""

    def run(self, busy: bool, work: Callable[[float], None]) -> None:
        """Call `work` with the time of the clock until which it may work; not at all if the credit is used up."""
        started, timing = self._clock(), self._timing
        self._credit = min(timing.slice_s, self._credit + timing.busy_ratio * (started - self._credited))
        self._credited = started
        if busy and self._credit <= 0:
            return
        work(started + (self._credit if busy else timing.slice_s))
        self._credit -= self._clock() - started


class Refreshes:
    """Written by the service's thread only.

    Args:
        watch: records when weights are swapped.
        lease_s: a refresh without a message from its client for so long is abandoned.
        clock: seconds, monotonic; for time slices. Leases use the `now` of each call.
    """

    def __init__(
        self,
        engine: EngineLike,
        watch: LoopPhase,
        lease_s: float,
        timing: RefreshTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._watch = watch
        self._lease_s = lease_s
        self._timing = timing or RefreshTiming()
        self._clock = clock
        self._open: OngoingRefresh | None = None
        self._last: Refreshed | None = None
        self._applied_since: list[AppliedRefresh] = []
        self._segment = SegmentView()
        self._ended = EndedRefreshes()
        self._reader = WeightReader(engine, clock)
        self._export = WeightExport(engine, clock)
        self._slices = TimeSlices(self._timing, clock)

    @property
    def has_work(self) -> bool:
        return bool(self._reader or self._export) or (self._open is not None and self._open.ready)

    @property
    def unannounced(self) -> bool:
        """Whether bytes may arrive, or a device may finish its checks, without a message."""
        push = self._open
        if push is None or push.staging.complete:
            return False
        return push.payload.unannounced or push.staging.received == push.staging.total

    @property
    def window_bytes(self) -> int:
        """Bytes that the owner of the refresh may send without waiting for an answer."""
        return 0 if self._open is None else self._open.payload.window_bytes

    @property
    def owner(self) -> str | None:
        """Name of the client whose refresh is open."""
        return None if self._open is None else _owner(self._open.session)

    def handle(self, session: Session, message: m.WeightMessage, now: float) -> None:
        """Handle a message about a refresh; `work` answers those that take time. Raises the typed error for the client."""
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
                raise WeightsRefused("no such refresh: its lease ran out, or it ended too long ago; call refresh again")
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
        """Work for a time slice: read the live weights for waiting requests, stage, commit once everything is staged, and end
        an expired lease. Called between two steps; now: of the leases; busy: whether groups run."""
        if self._reader or self._export:
            self._slices.run(busy, self._read)
        push = self._open
        if push is None:
            return
        try:
            self._slices.run(busy, lambda end: self._stage(push, end))
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
            self._fail(push, WeightsRefused(f"its lease ran out: no message about it for {self._lease_s} s"))

    def take_applied(self) -> list[AppliedRefresh]:
        """Return the refreshes that were applied since the last call, in order."""
        applied, self._applied_since = self._applied_since, []
        return applied

    def check_connection(self, reaches: Callable[[Session], bool], now: float) -> None:
        """Record since when the owner of the open refresh has no connection. reaches: whether a session has one."""
        push = self._open
        if push is not None and now - push.looked_at >= self._timing.look_s:
            push.looked_at = now
            push.gone_since = None if reaches(push.session) else now if push.gone_since is None else push.gone_since

    def abandon_if_disconnected(self, now: float) -> None:
        """End the open refresh if its client has had no connection for `gone_s`."""
        push, gone_s = self._open, self._timing.gone_s
        if push is not None and push.gone_since is not None and now - push.gone_since > gone_s:
            self._fail(push, WeightsRefused(f"its client's connection ended and was not opened again for {gone_s} s"))

    def forget(self, session: Session) -> None:
        """End the refresh of a session, and its requests to read weights."""
        if self._open is not None and self._open.session is session:
            self._fail(self._open, WeightsRefused("its client is gone"))
        if self._open is None:
            self._segment.close()  # its memory may be this client's; the mapping keeps it allocated
        self._reader.forget(session)
        self._export.forget(session)
        self._ended.forget(session)

    def close(self) -> None:
        """Unmap the trainers' memory, when the service ends."""
        if self._open is not None:
            self._open.payload.close()
        self._segment.close()
        self._export.discard()

    def ask_status(self, session: Session, request: m.WeightsRequest | m.Share) -> None:
        """Reply with the live version, and the open refresh and its owner. With `verify` the live bytes are read and hashed,
        and for Share they are copied; both take time slices, and the reply comes later. Raises Busy, InvalidRequest."""
        if isinstance(request, m.Share):
            return self._export.ask(session, request.request_id)

        def reply(**live_digest: str) -> None:
            session.reply_status(request.request_id, {**described(self._engine, self._open, self._last), **live_digest})

        if request.verify:
            self._reader.ask(session, request.request_id, lambda digest: reply(live_digest=digest))
        else:
            reply()

    def _commit_now(self, push: OngoingRefresh) -> Refreshed | None:
        self._watch.at("commit")
        applied, sent = self._engine.commit(push.staging, push.kv, push.payload.via), push.payload.sent_bytes
        self._watch.at("refresh")
        return applied if sent is None or applied is None else msgspec.structs.replace(applied, sent_bytes=sent)

    # messages

    def _find(self, session: Session, push_id: str) -> OngoingRefresh | None:
        push = self._open
        return push if push is not None and push.id == push_id and push.session is session else None

    def _begin(self, session: Session, begin: m.Begin, now: float) -> None:
        self.abandon_if_disconnected(now)
        if self._open is not None:
            owner = self._open
            raise Busy(f"{_owner(owner.session)} is staging version {owner.staging.version}; try again when it is done")
        manifest = unpack_manifest(begin.manifest, most_tensors(self._engine))
        try:
            staging = self._engine.stage(update_of(begin, manifest, self._engine))
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
            raise Busy(f"{len(push.prepares)} requests wait for the end of this staging; try again when they are answered")
        elif prepare.request_id not in push.prepares:
            push.prepares.append(prepare.request_id)

    def _commit(self, push: OngoingRefresh, commit: m.Commit) -> None:
        check_commit(commit, push.staging.manifest_digest)
        push.payload.check_sent()
        if commit.request_id in push.commits:
            return
        push.kv = commit.kv or push.kv
        if len(push.commits) >= MAX_REQUESTS:
            raise Busy(f"{len(push.commits)} commits of this refresh wait; try again when they are answered")
        push.commits.append(commit.request_id)

    # time slices

    def _read(self, end: float) -> None:
        self._export.work(end)
        self._reader.work(end)

    def _stage(self, push: OngoingRefresh, end: float) -> None:
        staging = push.staging
        while not staging.complete and staging.feed(push.payload.read):
            while push.chunks and push.chunks[0][0] <= push.payload.read_bytes:
                push.reply(m.Staged(push.chunks.popleft()[1]))
            if self._clock() >= end:
                break
        while staging.complete and push.prepares:
            push.reply(m.Staged(push.prepares.pop()))

    def _applied(self, push: OngoingRefresh, applied: Refreshed) -> None:
        self._last = applied
        begin = push.begin
        manifest = unpack_manifest(begin.manifest, most_tensors(self._engine))
        self._applied_since.append(AppliedRefresh(applied, push.kv, begin.partial, begin.adapter is not None, manifest))
        self._export.discard()
        log_applied(applied, push.session)
        self._close(push, applied, None)
        for request_id in push.commits:
            push.reply(m.Applied(request_id, applied))

    def _fail(self, push: OngoingRefresh, error: RolloutError) -> None:
        """End a refresh with an error, which answers its waiting and later requests."""
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
    """Describe the live weights and the open refresh."""
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


def update_of(begin: m.Begin, manifest: list[TensorInfo], engine: EngineLike) -> WeightUpdate:
    """Return what a Begin asks the engine to stage."""
    adapter = None if begin.adapter is None else Adapter(begin.base, unpack_targets(begin.adapter, engine.weights.names))
    on_device = begin.offer.on_device and engine.model.device is not None
    return WeightUpdate(manifest, begin.version, begin.partial, adapter, on_device, begin.offer.stays)


def check_commit(commit: m.Commit, manifest_digest: str) -> None:
    """Raises WeightsRefused for a commit of other weights than those of its Begin."""
    if commit.digest != manifest_digest:
        raise WeightsRefused("the manifests of Commit and Begin differ: commit what was begun, or call refresh again")


def most_tensors(engine: EngineLike) -> int:
    """Return how many tensors a manifest may list: those of a composite model, too, with names for ties."""
    return 2 * engine.weights.names + OTHER_TENSORS


def log_applied(done: Refreshed, session: Session) -> None:
    log.info(
        "refresh applied version=%d via=%s bytes=%d sent_bytes=%d seconds=%.3f paused_seconds=%.3f client=%d",
        done.version, done.via, done.bytes, done.sent_bytes, done.seconds, done.paused_seconds, session.number,
    )  # fmt: skip


def _typed(error: Exception) -> RolloutError:
    """Make the typed error for the client. InvalidWeights is a ValueError; other exceptions are faults of the engine or the
    machine, which the engine has undone."""
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
