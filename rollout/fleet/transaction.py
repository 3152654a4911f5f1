"""Two-phase commit of weights to replicas: sent to all, prepared by all, then committed.

router's segment ── Begin(shm) ──→ replicas of this host, which read it there
                └── Begin(inline), chunks ──→ replicas of other hosts, each a window ahead of its answers
all prepared ──→ Commit to all ──→ all applied
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from rollout.engine.values import KVPolicy, Refreshed, manifest_digest
from rollout.fleet.replica import Replica
from rollout.fleet.shared_weights import SharedWeights
from rollout.logs import logger
from rollout.transport import messages as m
from rollout.transport.checks import check_refreshed
from rollout.transport.errors import InvalidRequest, WeightsRefused
from rollout.transport.weights.inline import chunks
from rollout.transport.weights.manifest import pack_manifest, pack_targets
from rollout.transport.weights.offers import InlineOffer
from rollout.transport.weights.shm import host_key

REPEAT_S = 5.0
"""interval of repeated Prepare requests, which keep the lease while other replicas stage"""

log = logger(__name__)


class ReplicaTransaction:
    """Written by the service's thread.

    A replica that dies, is busy or has no room is removed from `members`. If one refuses the content, the transaction fails for
    all."""

    def __init__(self, content: SharedWeights, members: Iterable[Replica]) -> None:
        self.content = content
        self.members = set(members)
        self.prepared: set[Replica] = set()
        self.applied: dict[Replica, Refreshed] = {}
        self.error: Exception | None = None
        """refusal of the content, or by the last member that dropped out"""
        self.committing = False
        self.kv: KVPolicy = content.kv
        self._lost_in_commit = False
        self._refused_commit: Exception | None = None
        self._id = secrets.token_hex(16)
        self._prepared_at = time.monotonic()
        manifest, adapter = pack_manifest(content.manifest), content.adapter
        targets, base = (None, None) if adapter is None else (pack_targets(adapter.targets), adapter.base)
        for replica in list(self.members):
            offer = content.offer if sees_memory(replica) else InlineOffer()
            fields = manifest, offer, content.version, content.partial, "keep", targets, base
            begin = lambda id, fields=fields: m.Begin(id, self._id, *fields)  # noqa: E731
            replica.request_then(begin, lambda answer, replica=replica: self._begun(replica, answer))  # type: ignore[misc]

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
        """Whether a commit that is done counts: a replica has the weights, or had them and is dead."""
        return bool(self.applied) or self._lost_in_commit

    @property
    def failure(self) -> Exception:
        """The refusal of a commit that all members have refused."""
        assert self._refused_commit is not None
        return self._refused_commit

    def commit(self, kv: KVPolicy) -> None:
        """Ask all members to apply it; from now on it is only rolled forward."""
        assert self.ready and not self.committing
        self.committing, self.kv = True, kv
        digest = manifest_digest(self.content.manifest)
        for replica in list(self.members):
            make = lambda id: m.Commit(id, self._id, digest, kv)  # noqa: E731
            replica.request_then(make, lambda answer, replica=replica: self._answered(replica, answer))  # type: ignore[misc]

    def drop(self, replica: Replica) -> None:
        """Continue without a replica that is lost."""
        if replica in self.members:
            self._lost_in_commit |= self.committing and replica not in self.applied
            self.members.discard(replica)
            self.prepared.discard(replica)
            self.applied.pop(replica, None)

    def abandon(self) -> None:
        """Ask the members to drop it, unless it is being committed."""
        if not self.committing:
            for replica in self.members:
                replica.request_then(lambda id: m.Abandon(id, self._id))
            self.members.clear()

    def keep_leases(self, now: float) -> None:
        """Repeat Prepare to members that wait for the others."""
        if not self.committing and now - self._prepared_at > REPEAT_S:
            self._prepared_at = now
            for replica in self.prepared:
                replica.request_then(lambda id: m.Prepare(id, self._id))

    def _begun(self, replica: Replica, answer: Future[Any]) -> None:
        if replica not in self.members:
            return
        if (error := answer.exception()) is not None:
            self._refused(replica, error)
        elif sees_memory(replica):
            self._prepare(replica)
        else:
            window = answer.result().window_bytes
            ChunkForwarder(replica, self._id, self.content.memory, window, lambda error: self._forwarded(replica, error))

    def _forwarded(self, replica: Replica, error: BaseException | None) -> None:
        if replica not in self.members:
            return
        if error is not None:
            self._refused(replica, error)
        else:
            self._prepare(replica)

    def _prepare(self, replica: Replica) -> None:
        replica.request_then(lambda id: m.Prepare(id, self._id), lambda answer: self._staged(replica, answer))

    def _staged(self, replica: Replica, answer: Future[Any]) -> None:
        if replica not in self.members:
            return
        if (error := answer.exception()) is not None:
            self._refused(replica, error)
        else:
            self.prepared.add(replica)

    def _refused(self, replica: Replica, error: BaseException) -> None:
        """Remove a member that is busy or has no room; fail if it refuses the content, which is the same for all."""
        assert isinstance(error, Exception)
        self.members.discard(replica)
        if isinstance(error, WeightsRefused | InvalidRequest) or not self.members:
            self.error = error
            self.abandon()
        log.warning("replica refused version %d name=%s reason=%s", self.content.version, replica.name, error)

    def _answered(self, replica: Replica, answer: Future[Any]) -> None:
        if replica not in self.members:
            return
        if (error := answer.exception()) is None:
            applied: m.Applied = answer.result()
            check_refreshed(applied.refreshed, self.content.version)
            self.applied[replica] = applied.refreshed
            return
        assert isinstance(error, Exception)
        self.members.discard(replica)
        self._refused_commit = error
        log.error("replica failed to commit version %d name=%s reason=%s", self.content.version, replica.name, error)


class ChunkForwarder:
    """Sends a payload, [bytes] uint8, to one replica in chunks, at most `window_bytes` ahead of the answers. `then` is called
    in the service's thread when all are staged, or with the error; never if the replica is lost."""

    def __init__(
        self,
        replica: Replica,
        push_id: str,
        memory: np.ndarray,
        window_bytes: int,
        then: Callable[[BaseException | None], None],
    ) -> None:
        self._replica = replica
        self._push_id = push_id
        self._chunks = chunks([memory], replica.welcome.limits)
        self._window_bytes = window_bytes
        self._then = then
        self._in_flight = 0
        self._over = False
        self._send()

    def _send(self) -> None:
        while self._in_flight < self._window_bytes and (chunk := next(self._chunks, None)):
            offset, views = chunk
            size = sum(map(len, views))
            self._in_flight += size
            self._replica.request_then(
                lambda id, offset=offset, views=views: m.Chunk(id, self._push_id, offset, views),  # type: ignore[misc]
                lambda answer, size=size: self._staged(size, answer),  # type: ignore[misc]
            )
        if not self._in_flight and not self._over:
            self._over = True
            self._then(None)

    def _staged(self, size: int, answer: Future[Any]) -> None:
        self._in_flight -= size
        if self._over:
            return
        if (error := answer.exception()) is not None:
            self._over = True
            self._then(error)
        else:
            self._send()


def sees_memory(replica: Replica) -> bool:
    """Whether a replica is on this host, and can read the router's shared memory."""
    return host_key() in replica.welcome.capabilities
