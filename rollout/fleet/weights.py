"""The weights of a fleet: what is live everywhere, and the one refresh that is on its way.

trainer ─→ payload ─→ the front's segment (shared memory, read once from the trainer, by whatever way)
                           │ Transaction: Begin(offer) to each serving replica, Prepare
           all prepared ─→ Commit to all ─→ all applied ─→ version and digest are live, the segment is kept
                           │
a replica that has not the live weights ←─ what is kept, at any time; served from only when the digests are equal
                                        ←─ or a segment that a replica with the live weights writes, where nothing is kept here
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.types import NONE_SERVED, Adapter, KVPolicy, Refreshed, Served, TensorInfo, manifest_digest
from rollout.fleet.content import LiveContent, SharedWeights, Versions, bytes_of
from rollout.fleet.replica import Replica
from rollout.fleet.transaction import ReplicaTransaction, sees_memory
from rollout.logs import logger
from transport import messages as m
from transport.errors import Busy, SourceUnreachable, WeightsRefused
from transport.weights.shm import Segment, SegmentView, ShmOffer

MOST_WIDTH = 4
"""times the bytes of the model that a payload may have: float64 for bfloat16"""
READ_BYTES = 1 << 20
LOOK_S = 0.02

Told = Callable[[Replica, Exception | None], None]
"""called with a replica that has the live weights, or with why it has not"""

log = logger(__name__)


class Shared(msgspec.Struct, frozen=True):
    """Where a replica has written the live weights."""

    version: int
    digest: str
    manifest: list[TensorInfo]
    offer: ShmOffer


class FleetBase(NamedTuple):
    """What adapters are added to."""

    digest: str


class FleetStaging:
    """Takes a payload into the front's memory, then waits until all replicas have prepared it: `StagingLike`."""

    def __init__(
        self,
        version: int,
        partial: bool,
        manifest: Sequence[TensorInfo],
        adapter: Adapter | None,
        segment: Segment,
        on_received: Callable[[], None],
    ) -> None:
        """`on_received`: called once all bytes are here. Raises WeightsRefused for a dtype that no weights have, OSError where
        there is no memory."""
        self.version = version
        self.partial = partial
        self.manifest = list(manifest)
        self.manifest_digest = manifest_digest(manifest)
        self.adapter = adapter
        self.total = sum(map(bytes_of, manifest))
        self.received = 0
        self.closed = False
        self.segment = segment
        self.transaction: ReplicaTransaction | None = None
        """None before all is here, and once it has ended: its content is a map of memory as large as the model"""
        self._prepared = False
        self._on_received = on_received
        self._memory = segment.reserve(self.total)

    @property
    def complete(self) -> bool:
        """Whether every replica that takes part could commit, or has."""
        return self._prepared or (self.transaction is not None and self.transaction.ready)

    @property
    def committing(self) -> bool:
        """Whether it is only rolled forward from here on."""
        return self.transaction is not None and self.transaction.committing

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

    def content(self) -> SharedWeights:
        """Return what has been read, for replicas."""
        offer, memory = self.segment.offer(self.total), self.segment.payload(self.total)
        return SharedWeights(self.version, self.partial, self.manifest, offer, memory, adapter=self.adapter)

    def close(self) -> None:
        """Forget it; one that is being committed, when that has ended and this is called again. May be repeated."""
        if not self.closed:
            self.closed = True
            self._memory = np.zeros(0, np.uint8)
            if self.transaction is not None:
                self.transaction.abandon()
        if self.transaction is not None and (self.transaction.done or not self.transaction.committing):
            self._prepared, self.transaction = self.transaction.done, None


class FleetWeights:
    """Written by the service's thread; what the service needs of an engine's weights is in it as well.

    Args:
        serving: replicas that have the live weights and may be asked now.
        linked: those that may be asked, whatever weights they have.
        on_live: called when other weights are live.
        before: the weights that were live when the front before this one died; version 0 = there was none."""

    def __init__(
        self,
        serving: Callable[[], list[Replica]],
        linked: Callable[[], list[Replica]],
        on_live: Callable[[], None],
        before: Served = NONE_SERVED,
    ) -> None:
        self.before = before
        self.version, self.digest = before
        """of the live weights; digest "" until somebody has said it"""
        self.versions = Versions(before.version)
        self.settled = False
        """whether it is known which weights are live"""
        self.names = 0
        self.model_bytes = 0
        self.dropped = False
        self.base_digest = ""
        """of what the live adapter was added to; "": none is live"""
        self.live = LiveContent()
        """what of the live weights is here"""
        self._lender: Replica | None = None
        """whose memory holds the base of `live`, if not the front's"""
        self._asked: Replica | None = None
        """who was asked to share its weights"""
        self.refreshes = 0
        self.refreshed: Refreshed | None = None
        self._serving = serving
        self._linked = linked
        self._on_live = on_live
        self._staging: FleetStaging | None = None
        self._updates: dict[Replica, tuple[ReplicaTransaction, Told]] = {}
        """replicas that are being given the live weights"""

    @property
    def base(self) -> FleetBase:
        return FleetBase(self.base_digest or self.digest)

    @property
    def inventory(self) -> LiveContent:
        """What refreshes that say what has changed are against."""
        return self.live

    @property
    def staging(self) -> bool:
        return self._staging is not None

    @property
    def lost(self) -> bool:
        """Whether the live weights are nowhere any more: nothing is sampled before a refresh of all tensors."""
        if not self.settled or self.version == 0 or self.live.whole:
            return False
        held = (replica.version for replica in self._linked())
        return all(version != self.version and self.live.next_for(version) is None for version in held)

    def sized(self, size: int) -> None:
        """Learn how large the model is, in bytes, as a replica says."""
        self.model_bytes = max(self.model_bytes, size)

    def settle(self, told: Sequence[Replica]) -> None:
        """Say which weights are live when a front starts: the newest that a replica has. A refresh that the front before had
        begun to commit is one of all if one replica has it, and otherwise none. `told`: replicas that have told theirs."""
        live = Served(self.version, self.digest)
        newest = max(told, key=lambda one: (one.version, not live.differ(Served(one.version, one.digest))))
        self.settled = True
        others = newest.version > 0 and live.differ(Served(newest.version, newest.digest))
        if newest.version >= self.version and not others:
            self.version, self.digest = newest.version, newest.digest
            self.base_digest = newest.base_digest if newest.base_digest != newest.digest else ""
        else:
            log.warning("weights lost with the replicas version=%d newest=%d others=%s", self.version, newest.version, others)
        self.live.since = self.version
        self.versions.add(self.version)

    # a refresh of all

    def stage(
        self, manifest: Sequence[TensorInfo], version: int | None, partial: bool, adapter: Adapter | None = None
    ) -> FleetStaging:
        """Begin a refresh. Raises WeightsRefused, Busy, SourceUnreachable."""
        if self._staging is not None and not self._staging.closed:
            raise Busy("another refresh is being staged; close it first")
        if self._staging is not None and self._staging.committing:
            raise Busy("the last refresh, whose client is gone, is being applied; try again when it is done")
        version = self.version + 1 if version is None else version
        if not self.version < version < 2**63:
            raise WeightsRefused(f"version {version} is not above the live one, {self.version}: versions only grow")
        if partial and self.lost:
            raise WeightsRefused(f"no replica has version {self.version} any more: a refresh of all tensors must come first")
        if partial and self.base_digest:
            raise WeightsRefused("some tensors over a live adapter: refresh all tensors of a fleet, or the whole adapter")
        total = sum(map(bytes_of, manifest))
        if total > MOST_WIDTH * self.model_bytes:
            raise WeightsRefused(f"a payload of {total} bytes: the model has {self.model_bytes}")
        try:
            spare = self.live.spare(adapter is not None)
            self._staging = FleetStaging(version, partial, manifest, adapter, spare, self._begin)
        except OSError as error:
            raise SourceUnreachable(f"the front has no shared memory for {total} bytes: {error}") from None
        return self._staging

    def commit(self, staging: FleetStaging, kv: KVPolicy, via: str) -> Refreshed | None:
        """Apply what all have prepared. None: not all have said yet that they have it. Raises why nobody has."""
        assert staging.transaction is not None
        if not staging.transaction.committing:
            self.versions.add(staging.version)  # as soon as a replica has it, and before all have
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
        if staging.closed and not staging.committing:
            self._staging = None

    def _begin(self) -> None:
        """Send what has been read to the replicas that serve; to all, where none has what was live."""
        staging, serving = self._staging, self._linked() if self.lost else self._serving()
        if staging is not None and not staging.closed and staging.received == staging.total and serving:
            staging.transaction = ReplicaTransaction(staging.content(), serving)

    def _end(self, transaction: ReplicaTransaction) -> None:
        """Make what was committed the live weights; everything submitted from here on is sampled by them."""
        staging, self._staging = self._staging, None
        if staging is not None and staging.closed:
            staging.close()  # whose client did not wait for it
        if not transaction.live:
            return
        content = transaction.content
        done = list(transaction.applied.values())
        self.version = content.version
        self.base_digest = "" if content.adapter is None else self.base.digest
        self.digest = Counter(one.digest for one in done).most_common(1)[0][0] if done else ""
        self._lender = None
        self.live.keep(msgspec.structs.replace(content, kv=transaction.kv))
        for replica, refreshed in transaction.applied.items():
            replica.version, replica.digest = content.version, refreshed.digest
        self.dropped = False
        self.refreshes += 1
        self.refreshed = slowest(done, content, self.digest)
        self._on_live()

    # a replica that has other weights

    def update(self, replica: Replica, then: Told) -> None:
        """Give one replica what it lacks of the live weights, or the first part of it. `then` is called when it has said what
        came of it; not yet where they must be fetched first."""
        content = self.live.next_for(replica.version)
        if content is None:
            self._borrow()
        elif replica not in self._updates:
            self._updates[replica] = ReplicaTransaction(content, [replica]), then

    def _borrow(self) -> None:
        """Ask a replica of this host for the live weights, which the front has not, unless an adapter is part of them."""
        lenders = [] if self.base_digest else [replica for replica in self._serving() if sees_memory(replica)]
        if self._asked is not None or not lenders:
            return
        lender = self._asked = lenders[0]
        version = self.version

        def told(answer: Future[Any]) -> None:
            self._asked = None
            if (error := answer.exception()) is not None:
                log.warning("replica does not share its weights name=%s reason=%s", lender.name, error)
                return
            shared = msgspec.convert(answer.result(), Shared)
            same = (shared.version, shared.digest) == (version, self.digest) and version == self.version
            if self.live.base is None and same:
                memory = SegmentView()
                try:
                    self.live.borrow(SharedWeights(version, False, shared.manifest, shared.offer, memory.open(shared.offer)))
                    self._lender = lender
                except SourceUnreachable as gone:
                    log.warning("replica has not shared its weights name=%s reason=%s", lender.name, gone)

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
        overtaken = transaction.content is not self.live.base and transaction.content is not self.live.adapter
        error = transaction.error or (None if transaction.applied else transaction.failure)
        then(replica, None if overtaken else error)

    def drop(self, replica: Replica) -> None:
        """Go on without a replica that is lost."""
        self._updates.pop(replica, None)
        self._asked = None if self._asked is replica else self._asked
        if self._lender is replica:
            self._lender = None
            self.live.give_back()
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
        found = {name: future.result().get("live_digest", "") for name, future in asked.items() if future.exception() is None}
        yield next(iter(found.values())) if len(set(found.values())) == 1 else f"not the same everywhere: {found}"

    def close(self) -> None:
        self.live.close()


def slowest(done: Sequence[Refreshed], content: SharedWeights, digest: str) -> Refreshed:
    """Tell of a refresh what the slowest replica took."""
    sent = sum(map(bytes_of, content.manifest))
    return Refreshed(
        version=content.version,
        via="shm",
        bytes=max((one.bytes for one in done), default=sent),
        sent_bytes=sent,
        seconds=max((one.seconds for one in done), default=0.0),
        staged_seconds=max((one.staged_seconds for one in done), default=0.0),
        paused_seconds=max((one.paused_seconds for one in done), default=0.0),
        digest=digest,
    )
