"""The weights of a fleet: what is live everywhere, and the one refresh that is on its way.

trainer ─→ payload ─→ the front's segment (shared memory, read once from the trainer, by whatever way)
                           │ Begin(offer) to each serving replica, Prepare
           all prepared ─→ Commit to all ─→ all applied ─→ version and digest are live, the segment is kept
                           │
a replica that has not the live weights ←─ the kept segment, at any time; served from only when the digests are equal
                                        ←─ or a segment that a replica with the live weights writes, where nothing is kept here
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.types import KVPolicy, Refreshed, TensorInfo, manifest_digest
from rollout.fleet.replica import Replica
from rollout.logs import logger
from transport import messages as m
from transport.errors import Busy, InvalidRequest, SourceUnreachable, WeightsRefused
from transport.weights.files import DTYPES
from transport.weights.manifest import pack_manifest
from transport.weights.shm import Segment, ShmOffer

WIDTHS = dict(DTYPES.values())
"""bytes of an element, by dtype"""
MOST_WIDTH = 4
"""times the bytes of the model that a payload may have: float64 for bfloat16"""
READ_BYTES = 1 << 20
REPEAT_S = 5.0
"""Prepare is asked again, which keeps a lease from running out while other replicas stage"""
LOOK_S = 0.02

Told = Callable[[Replica, Exception | None], None]
"""called with a replica that has the live weights, or with why it has not"""

log = logger("rollout.fleet.weights")


class Content(msgspec.Struct, frozen=True, eq=False):
    """Weights in a segment of the front's."""

    version: int
    partial: bool
    """tensors that are not in the manifest are the base checkpoint's, or those that were live before"""
    manifest: list[TensorInfo]
    offer: ShmOffer
    kv: KVPolicy = "keep"


class Base(NamedTuple):
    """What an adapter would be added to: the live weights, since a fleet takes no adapters."""

    digest: str


class Transaction:
    """Content on its way to replicas: begun, prepared by all, committed. Written by the service's thread.

    `members` shrinks: a replica that dies or cannot take it drops out. A refusal of the content is everybody's."""

    def __init__(self, content: Content, members: Iterable[Replica]) -> None:
        self.content = content
        self.members = set(members)
        self.prepared: set[Replica] = set()
        self.applied: dict[Replica, Refreshed] = {}
        self.error: Exception | None = None
        """of the content, or of the last member that dropped out"""
        self.committing = False
        self.kv: KVPolicy = content.kv
        self._lost_in_commit = False
        self._refused_commit: Exception | None = None
        self._id = secrets.token_hex(16)
        self._asked_at = time.monotonic()
        manifest = pack_manifest(content.manifest)
        for replica in list(self.members):
            begin = lambda id: m.Begin(id, self._id, manifest, content.offer, content.version, content.partial)  # noqa: E731
            replica.ask(begin, lambda answer, replica=replica: self._begun(replica, answer))  # type: ignore[misc]

    @property
    def ready(self) -> bool:
        """Whether all members have it staged and checked."""
        return bool(self.members) and self.members == self.prepared

    @property
    def done(self) -> bool:
        """Whether every member has answered the commit, or is gone."""
        return self.committing and self.members == set(self.applied)

    @property
    def live(self) -> bool:
        """Whether a commit that is done counts: somebody has the weights, or had them and is dead."""
        return bool(self.applied) or self._lost_in_commit

    @property
    def failure(self) -> Exception:
        """Why a commit that is done does not count: all have refused it."""
        assert self._refused_commit is not None
        return self._refused_commit

    def commit(self, kv: KVPolicy) -> None:
        """Have it applied by all; from here on it is only rolled forward."""
        assert self.ready and not self.committing
        self.committing, self.kv = True, kv
        digest = manifest_digest(self.content.manifest)
        for replica in list(self.members):
            ask = lambda id: m.Commit(id, self._id, digest, kv)  # noqa: E731
            replica.ask(ask, lambda answer, replica=replica: self._answered(replica, answer))  # type: ignore[misc]

    def drop(self, replica: Replica) -> None:
        """Go on without a replica that is lost."""
        if replica in self.members:
            self._lost_in_commit |= self.committing and replica not in self.applied
            self.members.discard(replica)
            self.prepared.discard(replica)
            self.applied.pop(replica, None)

    def abandon(self) -> None:
        """Have the members forget it. Nothing to do once it is committed."""
        if not self.committing:
            for replica in self.members:
                replica.ask(lambda id: m.Abandon(id, self._id))
            self.members.clear()

    def tend(self, now: float) -> None:
        """Keep the leases of those that wait for the others."""
        if not self.committing and now - self._asked_at > REPEAT_S:
            self._asked_at = now
            for replica in self.prepared:
                replica.ask(lambda id: m.Prepare(id, self._id))

    def _begun(self, replica: Replica, answer: Future[Any]) -> None:
        if replica not in self.members:
            return
        if (error := answer.exception()) is not None:
            self._refused(replica, error)
            return
        replica.ask(lambda id: m.Prepare(id, self._id), lambda answer: self._staged(replica, answer))

    def _staged(self, replica: Replica, answer: Future[Any]) -> None:
        if replica not in self.members:
            return
        if (error := answer.exception()) is not None:
            self._refused(replica, error)
        else:
            self.prepared.add(replica)

    def _refused(self, replica: Replica, error: BaseException) -> None:
        """Only content is the same for all; a replica that is busy, or has no room, drops out."""
        assert isinstance(error, Exception)
        self.members.discard(replica)
        if isinstance(error, WeightsRefused | InvalidRequest) or not self.members:
            self.error = error
            self.abandon()
        log.warning("replica does not take version %d name=%s reason=%s", self.content.version, replica.name, error)

    def _answered(self, replica: Replica, answer: Future[Any]) -> None:
        if replica not in self.members:
            return
        if (error := answer.exception()) is None:
            applied: m.Applied = answer.result()
            self.applied[replica] = applied.refreshed
            return
        assert isinstance(error, Exception)
        self.members.discard(replica)
        self._refused_commit = error
        log.error("replica failed to commit version %d name=%s reason=%s", self.content.version, replica.name, error)


class FleetStaging:
    """Takes a payload into the front's memory, then waits until all replicas have prepared it: `StagingLike`."""

    def __init__(
        self, version: int, partial: bool, manifest: Sequence[TensorInfo], segment: Segment, on_received: Callable[[], None]
    ) -> None:
        """`on_received`: called once all bytes are here. Raises WeightsRefused for a dtype that no weights have, OSError where
        there is no memory."""
        self.version = version
        self.partial = partial
        self.manifest = list(manifest)
        self.manifest_digest = manifest_digest(manifest)
        self.total = sum(map(bytes_of, manifest))
        self.received = 0
        self.closed = False
        self.segment = segment
        self.transaction: Transaction | None = None
        self._on_received = on_received
        self._memory = segment.reserve(self.total)

    @property
    def complete(self) -> bool:
        """Whether every replica that takes part could commit."""
        return self.transaction is not None and self.transaction.ready

    def feed(self, source: Callable[[np.ndarray], int]) -> int:
        """Take in the next bytes, READ_BYTES at most. Returns how many; 0: none have come, or all are here. Raises what a
        replica finds wrong with the content."""
        if self.transaction is not None and self.transaction.error is not None:
            raise self.transaction.error
        count = source(self._memory[self.received : self.received + READ_BYTES]) if self.received < self.total else 0
        self.received += count
        if self.received == self.total and self.transaction is None:
            self._on_received()
        return count

    def close(self) -> None:
        """Forget it, unless it is committed. May be repeated."""
        if not self.closed:
            self.closed = True
            self._memory = np.zeros(0, np.uint8)
            if self.transaction is not None:
                self.transaction.abandon()


class FleetWeights:
    """Written by the service's thread; what the service needs of an engine's weights is in it as well.

    Args:
        serving: replicas that have the live weights and may be asked now.
        linked: those that may be asked, whatever weights they have.
        on_live: called when other weights are live.
        version: of the weights that were live when the front before this one died; 0 = there was none."""

    def __init__(
        self,
        serving: Callable[[], list[Replica]],
        linked: Callable[[], list[Replica]],
        on_live: Callable[[], None],
        version: int = 0,
    ) -> None:
        self.version = version
        self.digest = ""
        """of the live weights, "" until somebody has said it"""
        self._from_base = version == 0
        """whether the base checkpoint is what the first refresh is laid over"""
        self.settled = False
        """whether it is known which weights are live"""
        self.names = 0
        self.model_bytes = 0
        self.dropped = False
        self.live: Content | None = None
        """what was refreshed since the base checkpoint; None: nothing, or only replicas have it"""
        self._lender: Replica | None = None
        """whose memory holds `live`, if not the front's"""
        self._asked: Replica | None = None
        """who was asked to share its weights"""
        self.refreshes = 0
        self.refreshed: Refreshed | None = None
        self._serving = serving
        self._linked = linked
        self._on_live = on_live
        self._staging: FleetStaging | None = None
        self._segments = [Segment(), Segment()]
        """the live one, and the one to stage into"""
        self._updates: dict[Replica, tuple[Transaction, Told]] = {}
        """replicas that are being given the live weights"""

    @property
    def base(self) -> Base:
        return Base(self.digest)

    @property
    def staging(self) -> bool:
        return self._staging is not None

    @property
    def lost(self) -> bool:
        """Whether the live weights are nowhere any more: nothing is sampled before a refresh of all tensors."""
        gone = self.settled and self.version > 0 and self.live is None
        return gone and all(replica.version != self.version for replica in self._linked())

    def sized(self, status: dict[str, Any]) -> None:
        """Learn from a replica's status how large the model is."""
        sizes = status.get("weights", {})
        self.model_bytes = max(self.model_bytes, sizes.get("resident_bytes", 0) + sizes.get("offloaded_bytes", 0))

    def settle(self, told: Sequence[Replica]) -> None:
        """Say which weights are live when a front starts: the newest that a replica has. A refresh that the front before had
        begun to commit is one of all if one replica has it, and otherwise none. `told`: replicas that have told theirs."""
        newest = max(told, key=lambda replica: replica.version)
        self.settled = True
        if newest.version >= self.version:
            self.version, self.digest = newest.version, newest.digest
            self._from_base = newest.version == 0
        else:
            log.warning("weights lost with the replicas version=%d newest=%d", self.version, newest.version)

    # a refresh of all

    def stage(self, manifest: Sequence[TensorInfo], version: int | None, partial: bool) -> FleetStaging:
        """Begin a refresh. Raises WeightsRefused, Busy, SourceUnreachable."""
        if self._staging is not None and not self._staging.closed:
            raise Busy("another refresh is being staged; close it first")
        if self._staging is not None:
            raise Busy("the last refresh, whose client is gone, is being applied; try again when it is done")
        version = self.version + 1 if version is None else version
        if not self.version < version < 2**63:
            raise WeightsRefused(f"version {version} is not above the live one, {self.version}: versions only grow")
        if partial and self.lost:
            raise WeightsRefused(f"no replica has version {self.version} any more: a refresh of all tensors must come first")
        total = sum(map(bytes_of, manifest))
        if total > MOST_WIDTH * self.model_bytes:
            raise WeightsRefused(f"a payload of {total} bytes: the model has {self.model_bytes}")
        try:
            self._staging = FleetStaging(version, partial, manifest, self._segments[1], self._begin)
        except OSError as error:
            raise SourceUnreachable(f"the front has no shared memory for {total} bytes: {error}") from None
        return self._staging

    def commit(self, staging: FleetStaging, kv: KVPolicy, via: str) -> Refreshed | None:
        """Apply what all have prepared. None: not all have said yet that they have it. Raises why nobody has."""
        assert staging.transaction is not None
        if not staging.transaction.committing:
            staging.transaction.commit(kv)
        if not staging.transaction.done:
            return None
        self.tend(time.monotonic())
        if not staging.transaction.live:
            raise staging.transaction.failure
        assert self.refreshed is not None
        return msgspec.structs.replace(self.refreshed, via=via)

    def tend(self, now: float) -> None:
        """Do what is due: send what has been read to the replicas, end what all have applied."""
        for replica in list(self._updates):
            self._look_at_update(replica)
        staging = self._staging
        if staging is None:
            return
        transaction = staging.transaction
        if transaction is None or not (transaction.members or transaction.committing or transaction.error):
            self._begin()  # as soon as a replica serves
        elif transaction.done:
            self._end(transaction)
        else:
            transaction.tend(now)
        if staging.closed and not (transaction and transaction.committing):
            self._staging = None

    def _begin(self) -> None:
        """Send what has been read to the replicas that serve; to all, where none has what was live."""
        staging, serving = self._staging, self._linked() if self.lost else self._serving()
        if staging is not None and not staging.closed and staging.received == staging.total and serving:
            offer = staging.segment.offer(staging.total)
            content = Content(staging.version, staging.partial, staging.manifest, offer)
            staging.transaction = Transaction(content, serving)

    def _end(self, transaction: Transaction) -> None:
        """Make what was committed the live weights; everything submitted from here on is sampled by them."""
        self._staging = None
        if not transaction.live:
            return
        content = transaction.content
        done = list(transaction.applied.values())
        self.version = content.version
        self.digest = done[0].digest if done else ""
        self._keep(msgspec.structs.replace(content, kv=transaction.kv))
        for replica, refreshed in transaction.applied.items():
            replica.version, replica.digest = content.version, refreshed.digest
        self.dropped = False
        self.refreshes += 1
        self.refreshed = slowest(done, content, self.digest)
        self._on_live()

    def _keep(self, content: Content) -> None:
        """Keep what is live for replicas that come later."""
        lender, self._lender = self._lender, None
        if not content.partial or (self.live is None and self._from_base):
            self._segments.reverse()
            self.live = content
            return
        if self.live is None or lender is not None:  # what it was laid over is the replicas'
            self.live = None
            return
        old = dict(pieces(self.live, self._segments[0]))
        new = dict(pieces(content, self._segments[1]))
        infos = {info.name: info for info in (*self.live.manifest, *content.manifest)}
        if all(name in old and len(old[name]) == len(piece) for name, piece in new.items()):
            for name, piece in new.items():
                old[name][:] = piece  # a replica that reads it just now finds another digest, and asks again
            offer = self.live.offer
        else:
            kept = np.concatenate([new.get(name, old.get(name)) for name in infos])
            self._segments[0].reserve(len(kept))[:] = kept
            offer = self._segments[0].offer(len(kept))
        self.live = Content(content.version, self.live.partial, list(infos.values()), offer, content.kv)

    # a replica that has other weights

    def update(self, replica: Replica, then: Told) -> None:
        """Give one replica the live weights. `then` is called when it has said what came of it; not yet where they must be
        fetched first."""
        if self.live is None:
            self._borrow()
        elif replica not in self._updates:
            self._updates[replica] = Transaction(self.live, [replica]), then

    def _borrow(self) -> None:
        """Ask a replica for the live weights, which the front has not."""
        serving = self._serving()
        if self._asked is not None or not serving:
            return
        lender = self._asked = serving[0]
        version = self.version

        def told(answer: Future[Any]) -> None:
            self._asked = None
            if (error := answer.exception()) is not None:
                log.warning("replica does not share its weights name=%s reason=%s", lender.name, error)
                return
            shared = answer.result()
            if (
                self.live is None
                and (shared["version"], shared["digest"]) == (version, self.digest)
                and version == self.version
            ):
                manifest = msgspec.convert(shared["manifest"], list[TensorInfo])
                self.live = Content(version, False, manifest, msgspec.convert(shared["offer"], ShmOffer))
                self._lender = lender

        lender.ask(m.Share, told)

    def _look_at_update(self, replica: Replica) -> None:
        transaction, then = self._updates[replica]
        if transaction.error is None and not transaction.done:
            if transaction.ready and not transaction.committing:
                transaction.commit(transaction.kv)
            return
        del self._updates[replica]
        if refreshed := transaction.applied.get(replica):
            replica.version, replica.digest = transaction.content.version, refreshed.digest
        then(replica, transaction.error or (None if transaction.applied else transaction.failure))

    def drop(self, replica: Replica) -> None:
        """Go on without a replica that is lost."""
        self._updates.pop(replica, None)
        self._asked = None if self._asked is replica else self._asked
        if self._lender is replica:
            self.live = self._lender = None
        if self._staging is not None and self._staging.transaction is not None:
            self._staging.transaction.drop(replica)

    # looking

    def live_digest(self) -> str:
        """Take the digest of the bytes as they lie there, of all serving replicas."""
        *_, digest = self.read_live()
        assert digest is not None
        return digest

    def read_live(self) -> Iterator[str | None]:
        """Take `live_digest`; yields None while replicas read."""
        asked = {replica.name: replica.request(lambda id: m.WeightsRequest(id, True)) for replica in self._serving()}
        while pending := [future for future in asked.values() if not future.done()]:
            wait(pending, LOOK_S)
            yield None
        found = {name: future.result()["live_digest"] for name, future in asked.items() if future.exception() is None}
        yield next(iter(found.values())) if len(set(found.values())) == 1 else f"not the same everywhere: {found}"

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


def bytes_of(info: TensorInfo) -> int:
    """Count the bytes of a tensor as it is sent. Raises WeightsRefused for a dtype that no weights have."""
    if info.dtype not in WIDTHS:
        raise WeightsRefused(f"tensor {info.name!r:.200} is {info.dtype!r:.40}: must be one of {', '.join(WIDTHS)}")
    return math.prod(info.shape) * WIDTHS[info.dtype]


def pieces(content: Content, segment: Segment) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the [bytes] uint8 of each tensor of a payload."""
    payload, at = segment.payload(sum(map(bytes_of, content.manifest))), 0
    for info in content.manifest:
        yield info.name, payload[at : at + bytes_of(info)]
        at += bytes_of(info)


def slowest(done: Sequence[Refreshed], content: Content, digest: str) -> Refreshed:
    """Tell of a refresh what the slowest replica took."""
    sent = sum(map(bytes_of, content.manifest))
    return Refreshed(
        version=content.version,
        via="shm",
        bytes=sent,
        sent_bytes=sent,
        seconds=max((one.seconds for one in done), default=0.0),
        staged_seconds=max((one.staged_seconds for one in done), default=0.0),
        paused_seconds=max((one.paused_seconds for one in done), default=0.0),
        digest=digest,
    )
