"""The live weights of a fleet: refreshes all replicas, and updates replicas that lack the live weights.

trainer ─→ payload ─→ the router's segment (shared memory, read once from the trainer, by any transport)
                           │ ReplicaTransaction: Begin(offer) to each serving replica, Prepare
           all prepared ─→ Commit to all ─→ all applied ─→ version and digest are live, the segment is stored
                           │
a replica without the live weights ←─ the stored segment; it serves once the digests are equal
                                   ←─ or a segment that a replica with the live weights writes, if none is stored
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.engine.values import NONE_SERVED, KVPolicy, Refreshed, Served, TensorInfo, WeightUpdate, manifest_digest
from rollout.fleet.replica import Replica, linked, serving
from rollout.fleet.shared_weights import LiveContent, SharedWeights, Versions, bytes_of
from rollout.fleet.transaction import ReplicaTransaction, sees_memory
from rollout.logs import logger
from rollout.transport import messages as m
from rollout.transport.errors import Busy, SourceUnreachable, WeightsRefused
from rollout.transport.weights.offers import ShmOffer
from rollout.transport.weights.shm import Segment, SegmentView

MAX_WIDTH = 4
"""largest ratio of a payload's bytes to the model's: float64 for bfloat16"""
READ_BYTES = 1 << 20
LOOK_S = 0.02

log = logger(__name__)


class LentWeights(msgspec.Struct, frozen=True):
    """Where a replica has written the live weights."""

    version: int
    digest: str
    manifest: list[TensorInfo]
    offer: ShmOffer


class FleetBase(NamedTuple):
    """The weights that adapters are added to."""

    digest: str


class FleetStaging:
    """Reads a payload into the router's memory, then waits until all replicas have prepared it: `StagingLike`."""

    def __init__(self, update: WeightUpdate, segment: Segment, on_received: Callable[[], None]) -> None:
        """update: with its version. on_received: called once all bytes have arrived. Raises WeightsRefused for an unknown
        dtype, OSError without memory."""
        assert update.version is not None
        self.version = update.version
        self.update = update
        self.manifest_digest = manifest_digest(update.manifest)
        self.total = sum(map(bytes_of, update.manifest))
        self.received = 0
        self.closed = False
        self.segment = segment
        self.transaction: ReplicaTransaction | None = None
        """None before all bytes have arrived, and once it has ended: its content maps memory as large as the model"""
        self._prepared = False
        self._on_received = on_received
        self._memory = segment.reserve(self.total)

    @property
    def complete(self) -> bool:
        """Whether every member could commit, or has."""
        return self._prepared or (self.transaction is not None and self.transaction.ready)

    @property
    def committing(self) -> bool:
        """Whether a commit has begun, which is only rolled forward."""
        return self.transaction is not None and self.transaction.committing

    def feed(self, source: Callable[[np.ndarray], int]) -> int:
        """Read the next bytes, READ_BYTES at most. Returns how many; 0: none have arrived, or all have. Raises a replica's
        refusal of the content."""
        if self.transaction is not None and self.transaction.error is not None:
            raise self.transaction.error
        count = source(self._memory[self.received : self.received + READ_BYTES]) if self.received < self.total else 0
        self.received += count
        if self.received == self.total and self.transaction is None:
            self._on_received()
        return count

    def content(self) -> SharedWeights:
        """Return the payload, for replicas."""
        offer, memory = self.segment.offer(self.total), self.segment.payload(self.total)
        update = self.update
        return SharedWeights(self.version, update.partial, list(update.manifest), offer, memory, adapter=update.adapter)

    def close(self) -> None:
        """Abandon the refresh; during a commit, close it when that has ended and this is called again. May be repeated."""
        if not self.closed:
            self.closed = True
            self._memory = np.zeros(0, np.uint8)
            if self.transaction is not None:
                self.transaction.abandon()
        if self.transaction is not None and (self.transaction.done or not self.transaction.committing):
            self._prepared, self.transaction = self.transaction.done, None


class FleetWeights:
    """Written by the service's thread; also what the service uses of an engine's weights.

    Args:
        replicas: those of `ReplicaSet`, by name.
        before: the weights that were live when the router before this one was killed; version 0: there was none."""

    def __init__(self, replicas: Mapping[str, Replica], before: Served = NONE_SERVED) -> None:
        self.before = before
        self.version, self.digest = before
        """of the live weights; digest "" until a replica has reported it"""
        self.versions = Versions(before.version)
        self.settled = False
        """whether it is known which weights are live"""
        self.names = 0
        self.model_bytes = 0
        self.dropped = False
        self.base_digest = ""
        """of the weights that the live adapter was added to; "": no adapter is live"""
        self.live = LiveContent()
        """the part of the live weights that is stored here"""
        self.refreshes = 0
        self.refreshed: Refreshed | None = None
        self._replicas = replicas
        self._lender: Replica | None = None
        """replica whose memory holds the base of `live`; None: the router's memory does"""
        self._asked_to_lend: Replica | None = None
        self._staging: FleetStaging | None = None
        self._updates: dict[Replica, ReplicaTransaction] = {}
        """replicas that are being sent the live weights"""

    @property
    def base(self) -> FleetBase:
        return FleetBase(self.base_digest or self.digest)

    @property
    def inventory(self) -> LiveContent:
        """The weights that a delta is added to."""
        return self.live

    @property
    def staging(self) -> bool:
        return self._staging is not None

    @property
    def lost(self) -> bool:
        """Whether no replica has the live weights any more: nothing is sampled before a refresh of all tensors."""
        if not self.settled or self.version == 0 or self.live.whole:
            return False
        held = (replica.version for replica in linked(self._replicas))
        return all(version != self.version and self.live.next_for(version) is None for version in held)

    def sized(self, size: int) -> None:
        """Note the size of the model in bytes, as a replica reports it."""
        self.model_bytes = max(self.model_bytes, size)

    def settle(self, reported: Sequence[Replica]) -> None:
        """Decide which weights are live when a router starts: the newest that a replica has. So a refresh whose commit the
        router before had begun is completed if one replica has it, and dropped otherwise. `reported`: replicas that have
        reported their weights."""
        live = Served(self.version, self.digest)
        newest = max(reported, key=lambda one: (one.version, not live.differ(Served(one.version, one.digest))))
        self.settled = True
        others = newest.version > 0 and live.differ(Served(newest.version, newest.digest))
        if newest.version >= self.version and not others:
            self.version, self.digest = newest.version, newest.digest
            self.base_digest = newest.base_digest if newest.base_digest != newest.digest else ""
        else:
            log.warning("weights lost with the replicas version=%d newest=%d others=%s", self.version, newest.version, others)
        self.live.since = self.version
        self.versions = Versions(self.version)  # replicas that served another router may have KV of any before

    # a refresh of all

    def stage(self, update: WeightUpdate) -> FleetStaging:
        """Begin a refresh. Raises WeightsRefused, Busy, SourceUnreachable."""
        if self._staging is not None and not self._staging.closed:
            raise Busy("another refresh is being staged; close it first")
        if self._staging is not None and self._staging.committing:
            raise Busy("the last refresh, whose client is gone, is being applied; try again when it is done")
        version = self.version + 1 if update.version is None else update.version
        if not self.version < version < 2**63:
            raise WeightsRefused(f"version {version} is not above the live one, {self.version}: versions only grow")
        if update.partial and self.lost:
            raise WeightsRefused(f"no replica has version {self.version} any more: a refresh of all tensors must come first")
        if update.partial and self.base_digest:
            raise WeightsRefused("some tensors over a live adapter: refresh all tensors of a fleet, or the whole adapter")
        total = sum(map(bytes_of, update.manifest))
        if total > MAX_WIDTH * self.model_bytes:
            raise WeightsRefused(f"a payload of {total} bytes: the model has {self.model_bytes}")
        try:
            spare = self.live.spare(update.adapter is not None)
            self._staging = FleetStaging(msgspec.structs.replace(update, version=version), spare, self._begin)
        except OSError as error:
            raise SourceUnreachable(f"the router has no shared memory for {total} bytes: {error}") from None
        return self._staging

    def commit(self, staging: FleetStaging, kv: KVPolicy, via: str) -> Refreshed | None:
        """Apply what all replicas have prepared. None: not all have confirmed it yet. Raises the refusal if none applied it."""
        assert staging.transaction is not None
        if not staging.transaction.committing:
            self.versions.add(staging.version)  # as soon as a replica has it, and before all have
            staging.transaction.commit(kv)
        if not staging.transaction.done:
            return None
        self._advance(time.monotonic())
        if not staging.transaction.live:
            raise staging.transaction.failure
        assert self.refreshed is not None
        return msgspec.structs.replace(self.refreshed, via=via)

    def poll(self, now: float) -> list[tuple[Replica, Exception | None]]:
        """Do what is due for the refresh and for replicas that lack the live weights. Returns those whose update has ended,
        with its error."""
        self._advance(now)
        return [ended for replica in list(self._updates) for ended in self._updated(replica)]

    def _advance(self, now: float) -> None:
        """Send what has been read to the replicas; complete what all have applied."""
        staging = self._staging
        if staging is None:
            return
        transaction = staging.transaction
        if transaction is None or not (transaction.members or transaction.committing or transaction.error):
            self._begin()  # as soon as a replica serves
        elif transaction.done:
            self._end(transaction)
        else:
            transaction.keep_leases(now)
        if staging.closed and not staging.committing:
            self._staging = None

    def _begin(self) -> None:
        """Send the payload to the replicas that serve; to all, if the live weights are lost."""
        staging, members = self._staging, linked(self._replicas) if self.lost else serving(self._replicas)
        if staging is not None and not staging.closed and staging.received == staging.total and members:
            staging.transaction = ReplicaTransaction(staging.content(), members)

    def _end(self, transaction: ReplicaTransaction) -> None:
        """Make the committed weights the live ones; groups that are submitted from now on are sampled by them."""
        staging, self._staging = self._staging, None
        if staging is not None and staging.closed:
            staging.close()  # its client has not waited for it
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

    # a replica that lacks the live weights

    def update(self, replica: Replica) -> None:
        """Send a replica what it lacks of the live weights, or the first part of it; `poll` returns the result. If nothing is
        stored here, ask another replica for the weights first."""
        content = self.live.next_for(replica.version)
        if content is None:
            self._borrow()
        elif replica not in self._updates:
            self._updates[replica] = ReplicaTransaction(content, [replica])

    def _borrow(self) -> None:
        """Ask a replica of this host to write the live weights into shared memory, unless an adapter is part of them."""
        lenders = [] if self.base_digest else [replica for replica in serving(self._replicas) if sees_memory(replica)]
        if self._asked_to_lend is not None or not lenders:
            return
        lender = self._asked_to_lend = lenders[0]
        version = self.version

        def lent(answer: Future[Any]) -> None:
            self._asked_to_lend = None
            if (error := answer.exception()) is not None:
                log.warning("replica does not share its weights name=%s reason=%s", lender.name, error)
                return
            weights = msgspec.convert(answer.result(), LentWeights)
            same = (weights.version, weights.digest) == (version, self.digest) and version == self.version
            if self.live.base is None and same:
                memory = SegmentView()
                try:
                    self.live.borrow(SharedWeights(version, False, weights.manifest, weights.offer, memory.open(weights.offer)))
                    self._lender = lender
                except SourceUnreachable as gone:
                    log.warning("replica has not shared its weights name=%s reason=%s", lender.name, gone)

        lender.request_then(m.Share, lent)

    def _updated(self, replica: Replica) -> list[tuple[Replica, Exception | None]]:
        """Advance the update of a replica. Returns it with its error once it has ended."""
        transaction = self._updates[replica]
        if transaction.error is None and not transaction.done:
            if transaction.ready and not transaction.committing:
                transaction.commit(transaction.kv)
            return []
        del self._updates[replica]
        if refreshed := transaction.applied.get(replica):
            replica.version, replica.digest = transaction.content.version, refreshed.digest
        overtaken = transaction.content is not self.live.base and transaction.content is not self.live.adapter
        error = transaction.error or (None if transaction.applied else transaction.failure)
        return [(replica, None if overtaken else error)]

    def drop(self, replica: Replica) -> None:
        """Continue without a replica that is lost."""
        self._updates.pop(replica, None)
        self._asked_to_lend = None if self._asked_to_lend is replica else self._asked_to_lend
        if self._lender is replica:
            self._lender = None
            self.live.give_back()
        if self._staging is not None and self._staging.transaction is not None:
            self._staging.transaction.drop(replica)

    # digests

    def live_digest(self) -> str:
        """Return the digest of the weights in the memory of all serving replicas."""
        *_, digest = self.read_live()
        assert digest is not None
        return digest

    def read_live(self) -> Iterator[str | None]:
        """Compute `live_digest`; yields None while replicas read."""
        answers = {one.name: one.request(lambda id: m.WeightsRequest(id, True)) for one in serving(self._replicas)}
        while pending := [future for future in answers.values() if not future.done()]:
            wait(pending, LOOK_S)
            yield None
        found = {name: future.result().get("live_digest", "") for name, future in answers.items() if future.exception() is None}
        yield next(iter(found.values())) if len(set(found.values())) == 1 else f"not the same everywhere: {found}"

    def close(self) -> None:
        self.live.close()


def slowest(done: Sequence[Refreshed], content: SharedWeights, digest: str) -> Refreshed:
    """Describe a refresh by the times of the slowest replica."""
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
