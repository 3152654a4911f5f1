"""Groups in the engine: submits them, aborts them, and delivers their samples to the sessions of their clients.

    submit → engine → finished samples → session          abort, drop → queue of aborts → engine.abort

To abort thousands of samples takes longer than one iteration of the loop may take, so aborts are queued and `process_aborts`
works for a bounded time."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from rollout.engine.values import SEED_LIMIT, DeviceLost, Group, Sample, Served
from rollout.logs import logger
from rollout.service.engine_api import EngineLike, live_of
from rollout.service.group_names import engine_name, number_of
from rollout.service.recording import AcceptedAs, Ledger, Metrics
from rollout.service.session import AcceptedGroup, GroupStatus, Session, without_tokens
from rollout.service.validation import check_room, checked_group
from rollout.transport import messages as m
from rollout.transport.errors import GroupFailed, IdConflict, InvalidRequest, RolloutError, StaleWeights
from rollout.transport.frames import pack

log = logger(__name__)


class ParkedGroup(NamedTuple):
    """A group of the journal that is not in the engine yet."""

    session: Session
    accepted: AcceptedGroup
    group: Group
    """its unfinished children"""
    weights: Served
    """submitted once these weights, or newer ones, are live"""


class GroupTable:
    """Groups in the engine, by engine id, and how many have each status."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[Session, AcceptedGroup]] = {}
        self._by_status: Counter[GroupStatus] = Counter()

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._groups

    def __getitem__(self, engine_id: str) -> tuple[Session, AcceptedGroup]:
        return self._groups[engine_id]

    def wants(self, engine_id: str) -> bool:
        """Whether a client gets the samples of a group."""
        return engine_id in self._groups and self._groups[engine_id][1].status is not GroupStatus.DROPPED

    def with_client(self) -> list[tuple[Session, AcceptedGroup]]:
        """List the groups that were not dropped."""
        return [entry for entry in self._groups.values() if entry[1].status is not GroupStatus.DROPPED]

    def count(self, status: GroupStatus) -> int:
        return self._by_status[status]

    def add(self, session: Session, accepted: AcceptedGroup) -> None:
        self._groups[accepted.engine_id] = (session, accepted)
        self._by_status[accepted.status] += 1

    def mark(self, accepted: AcceptedGroup, status: GroupStatus) -> None:
        """Change the status of a group in the table."""
        self._by_status[accepted.status] -= 1
        self._by_status[status] += 1
        accepted.status = status

    def remove(self, accepted: AcceptedGroup) -> None:
        del self._groups[accepted.engine_id]
        self._by_status[accepted.status] -= 1


class EngineGroups:
    """Written by the service's thread only. An accepted group is in one of two tables:

        parked (after a restart) → in the engine: running → aborting or dropped → finished, in no table

    Args:
        tracker: records groups and samples for the metrics.
        max_outbox_bytes: most bytes of finished samples that one client may leave unacknowledged.
        clock: seconds, monotonic.
        ledger: records groups and samples; by default nothing.
    """

    def __init__(
        self,
        engine: EngineLike,
        tracker: Metrics,
        max_outbox_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self.engine = engine
        self.tracker = tracker
        self.ledger = Ledger() if ledger is None else ledger
        self._limits = engine.limits
        self._max_outbox_bytes = max_outbox_bytes
        self._clock = clock
        self._groups = GroupTable()
        self._parked: dict[str, ParkedGroup] = {}
        """groups that wait for their weights, by engine id"""
        self._aborts: dict[tuple[str, int | None], None] = {}
        """queue of aborts: engine id and index of a child, None = all children. Also of finished groups whose KV is kept"""
        self._session_aborts: dict[Session, int] = {}
        """sessions all of whose groups are to be aborted, up to the group of this number; later groups are not"""
        self._submitted = 0
        """groups so far: the number in the newest engine id"""
        self.steps = 0
        self.step_s = 0.0
        """seconds of the last step"""

    @property
    def has_aborts(self) -> bool:
        """Whether `process_aborts` has work."""
        return bool(self._aborts or self._session_aborts)

    @property
    def aborting(self) -> bool:
        """Whether an aborted group has children that the engine has not returned. A router gets them later."""
        return self.has_aborts or self._groups.count(GroupStatus.ABORTING) > 0

    @property
    def parked(self) -> int:
        """Groups of the journal that wait for their weights."""
        return len(self._parked)

    def submit(self, session: Session, submit: m.Submit) -> None:
        """Submit a group to the engine. A repeated request changes nothing. Raises the typed error for the client."""
        group_id, engine = submit.group_id, self.engine
        engine_id = engine_name(session.number, self._submitted + 1)
        after = session.names.turn(submit.after)
        group = checked_group(submit, engine_id, after, engine)
        check_required(submit, engine)
        digest, accepted = m.digest(submit), session.groups.get(group_id)
        if accepted is not None:
            if accepted.digest != digest:
                raise IdConflict("this id is live with another prompt or other sampling; use a new id", group_id)
            return
        check_room(session, group_id, len(group.wanted), self._limits, self._max_outbox_bytes)
        self._submitted += 1
        if session.persistence.lasting:
            group = seeded(group)
        self._submit_to_engine(session, group, group_id, submit.client)
        accepted = AcceptedGroup(group_id, group.id, digest, group.wanted)
        session.hold(accepted)
        self.ledger.accepted(AcceptedAs(group_id, session.number, submit.after), group, engine.version)
        if session.persistence.lasting:
            session.persistence.accepted(session.key, session.id, group.id, pack(submit), group.sampling.seed, live_of(engine))
        self._groups.add(session, accepted)

    def _submit_to_engine(self, session: Session, group: Group, group_id: str, client: str = "") -> None:
        """client: of the session, if that is a router. Raises InvalidRequest, GroupFailed."""
        try:
            self.engine.submit(group, client=f"{session.number}.{client}" if client else str(session.number))
        except ValueError as error:
            raise InvalidRequest(str(error), group_id) from None
        except Exception as error:
            log.exception("engine.submit failed")
            raise GroupFailed(f"the engine failed on this group: {described(error)}", group_id) from None
        session.streaming.hold(group_id, group)
        keeps, most = group.sampling.kv_ttl_s > 0, self._limits.max_samples_per_client
        self._release_kept(session.names.add(group_id, group.id, keeps, most))
        self.tracker.begin(group)

    # groups of the journal

    def park(self, engine_id: str, parked: ParkedGroup) -> None:
        """Keep a group of the journal until the weights that it needs are live."""
        self._submitted = max(self._submitted, number_of(engine_id))
        self._parked[engine_id] = parked
        name = AcceptedAs(parked.accepted.group_id, parked.session.number)
        self.ledger.accepted(name, parked.group, parked.weights.version)

    def unpark(self) -> None:
        """Submit the parked groups whose weights are live."""
        if not self._parked:
            return
        live = live_of(self.engine)
        for engine_id in [id for id, parked in self._parked.items() if live.follow(parked.weights)]:
            self._unpark(engine_id)

    def _unpark(self, engine_id: str) -> None:
        session, accepted, group, _ = self._parked.pop(engine_id)
        try:
            self._submit_to_engine(session, group, accepted.group_id)
        except RolloutError as error:
            session.drop(accepted.group_id)
            session.reply(pack(m.Refused(error.kind, error.message, accepted.group_id)))
        else:
            self._groups.add(session, accepted)

    # samples

    def step(self, sessions: Iterable[Session]) -> None:
        """Step the engine and deliver the samples that finished.

        The engine returns the samples of a failed forward with the reason "error". Any other exception cannot be assigned to a
        group: all groups end as "error", and the service continues with an empty engine. If the engine held no group of a
        client, no request caused the exception, and it is raised; as is DeviceLost, since another process can compute the
        groups."""
        started = self._clock()
        try:
            samples = self.engine.step()
        except DeviceLost:
            raise
        except Exception as error:
            log.exception("engine.step failed")
            if not (self._parked or self._groups.with_client()):
                raise
            self.fail_all(f"engine.step failed: {described(error)}")
            return
        self.steps += 1
        self.step_s = self._clock() - started
        self.deliver(samples, sessions)
        for session in sessions:
            session.stream(self.engine)

    def deliver(self, samples: Sequence[Sample], sessions: Iterable[Session]) -> None:
        """Deliver samples to their sessions, and abort the groups of sessions whose outbox is full."""
        self._deliver(samples)
        for session in sessions:
            if session.unacked_bytes > self._max_outbox_bytes:
                for accepted in session.groups.values():
                    self._abort(accepted)

    def _deliver(self, samples: Sequence[Sample]) -> None:
        if wanted := [sample for sample in samples if self._groups.wants(sample.group_id)]:
            self.tracker.observe(wanted, self.engine.version)
        for sample in samples:
            if sample.group_id not in self._groups:
                log.error("sample of an unknown group group=%s index=%d", sample.group_id, sample.index)
                continue
            session, accepted = self._groups[sample.group_id]
            if accepted.status is GroupStatus.DROPPED:
                accepted.ended += 1
            elif session.unacked_bytes > self._max_outbox_bytes:
                why = f"over {self._max_outbox_bytes} bytes of samples wait for this client to read them"
                self._give(session, accepted, without_tokens(sample, why))
            else:
                self._give(session, accepted, sample)
            if not accepted.running:
                self._groups.remove(accepted)

    def _give(self, session: Session, accepted: AcceptedGroup, sample: Sample) -> None:
        """Deliver a sample to its client, and record it."""
        self.ledger.ended(sample)
        session.deliver(accepted, sample)

    # aborts

    def abort(self, session: Session, group_id: str, index: int | None = None) -> None:
        """Abort a group, or one child of it; the client gets its samples. An unknown id is ignored. If the children have
        finished, the KV that is kept for their next turn is released."""
        accepted = session.groups.get(group_id)
        if accepted is None or not accepted.running:
            self._release_kept(session.names.keeping(group_id), index)
        elif index is None or index in accepted.wanted:
            self._abort(accepted, index)

    def abort_all(self, sessions: Iterable[Session]) -> None:
        """Abort all groups that exist now; the clients get their samples."""
        self._session_aborts |= dict.fromkeys(sessions, self._submitted)

    def forget(self, session: Session) -> None:
        """Abort everything of a client and release the KV that is kept for it; its samples are dropped."""
        self._session_aborts.pop(session, None)
        for accepted in list(session.groups.values()):
            self.drop(session, accepted)
        self._release_kept(session.names.keeping())

    def drop(self, session: Session, accepted: AcceptedGroup) -> None:
        """Abort a group and drop its samples."""
        if accepted.engine_id in self._groups:
            self._groups.mark(accepted, GroupStatus.DROPPED)
            self._aborts[accepted.engine_id, None] = None
            self.tracker.forget(accepted.engine_id)
        self.ledger.forgotten(accepted.engine_id)
        self._parked.pop(accepted.engine_id, None)
        session.drop(accepted.group_id)

    def process_aborts(self, seconds: float | None) -> None:
        """Abort queued groups for this many seconds, but at least one; None: all."""
        until = None if seconds is None else self._clock() + seconds
        while self.has_aborts:
            if self._aborts:
                self._process_abort()
            else:
                self._queue_session()
            if until is not None and self._clock() >= until:
                return

    def _process_abort(self) -> None:
        engine_id, index = next(iter(self._aborts))
        try:
            self._deliver(self.engine.abort(engine_id, index))
        finally:
            del self._aborts[engine_id, index]

    def _queue_session(self) -> None:
        """Queue the aborts of one session."""
        session = next(iter(self._session_aborts))
        newest = self._session_aborts.pop(session)
        for accepted in session.groups.values():
            if number_of(accepted.engine_id) <= newest:
                self._abort(accepted)
        self._release_kept(engine_id for engine_id in session.names.keeping() if number_of(engine_id) <= newest)

    def _abort(self, accepted: AcceptedGroup, index: int | None = None) -> None:
        if accepted.engine_id in self._parked:  # so that the engine makes its samples
            self._unpark(accepted.engine_id)
        if accepted.engine_id in self._groups:
            self._aborts[accepted.engine_id, index] = None
            if index is None:
                self._groups.mark(accepted, GroupStatus.ABORTING)

    def _release_kept(self, engine_ids: Iterable[str], index: int | None = None) -> None:
        """Release the KV that the engine keeps of finished groups for their next turn (`Sampling.kv_ttl_s`)."""
        for engine_id in engine_ids:
            self._aborts[engine_id, index] = None

    def fail_all(self, reason: str) -> None:
        """End every group in the engine as "error", with the tokens that the engine still has."""
        for session, accepted in self._groups.with_client():
            try:
                ended = self.engine.abort(accepted.engine_id)
            except Exception:
                log.exception("engine.abort failed")
                ended = []
            self._deliver([msgspec.structs.replace(sample, finish_reason="error", error=reason) for sample in ended])
            if accepted.running:  # the engine did not return all of its children
                self._groups.remove(accepted)
                self.tracker.forget(accepted.engine_id)
                self.ledger.forgotten(accepted.engine_id)
                session.drop(accepted.group_id)
                session.reply(pack(m.Refused(GroupFailed.kind, reason, accepted.group_id)))


def check_required(submit: m.Submit, engine: EngineLike) -> None:
    """Raises StaleWeights if the live weights are older than the group requires, or others of the same version."""
    version = submit.require_version
    if engine.version < version:
        raise StaleWeights(
            f"require_version={version}: the weights are version {engine.version}; refresh them first", submit.group_id
        )
    if submit.require_digest and live_of(engine).differ(Served(version, submit.require_digest)):
        raise StaleWeights(
            f"version {version} is required with the digest {submit.require_digest:.12}…, here it has the digest "
            f"{engine.weights.digest:.12}…: the service restarted and has other weights under that version",
            submit.group_id,
        )


def seeded(group: Group) -> Group:
    """Give a group a seed if it has none, so that a second run gives the same samples."""
    if group.sampling.seed is not None:
        return group
    sampling = msgspec.structs.replace(group.sampling, seed=secrets.randbelow(SEED_LIMIT))
    return msgspec.structs.replace(group, sampling=sampling)


def described(error: BaseException) -> str:
    """Describe an exception in one line: its type and message."""
    return f"{type(error).__name__}: {error}"
