"""The groups that the engine holds, and whose they are.

    submit -> engine -> sample ends -> session          abort, drop -> ending -> engine.abort, in its turn

Ending a thousand samples takes time, and one turn of the loop has little of it: what is to end waits here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from time import perf_counter

import msgspec

from engine.types import SEED_LIMIT, Group, Limits, Sample, Served
from rollout.logs import logger
from rollout.metrics.tracker import Tracker
from rollout.service.admission import check_room, checked_group
from rollout.service.engine_api import EngineLike, live_of
from rollout.service.group_names import engine_name, number_of
from rollout.service.session import HeldGroup, Session, without_tokens
from transport import messages as m
from transport.errors import GroupFailed, IdConflict, InvalidRequest, RolloutError, StaleWeights
from transport.frames import pack

log = logger(__name__)


class Running:
    """Written by the service's loop only. True while the engine holds a group of somebody's."""

    def __init__(self, engine: EngineLike, tracker: Tracker, limits: Limits, max_outbox_bytes: int) -> None:
        self._engine = engine
        self._tracker = tracker
        self._limits = limits
        self._max_outbox_bytes = max_outbox_bytes
        self._groups: dict[str, tuple[Session, HeldGroup]] = {}
        """by the engine's name"""
        self._ending: dict[tuple[str, int | None], None] = {}
        """engine's names of groups that are to end, or of one child each, in the order in which that was asked for"""
        self._sweeps: dict[Session, int] = {}
        """sessions whose groups are to end, as far as they were made by then: the number of the last one made"""
        self._parked: dict[str, tuple[Session, Group, Served]] = {}
        """groups of before a restart, by the engine's name; they wait for these weights, or newer ones"""
        self._dropped: dict[str, int] = {}
        """children of groups that nobody wants any more, and that the engine has not given back"""
        self._asked: set[str] = set()
        """groups whose end was asked for and that still have children"""
        self._made = 0
        self.steps = 0
        self.step_s = 0.0
        """seconds of the last step"""

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def ending(self) -> bool:
        """Whether groups are to end that have not yet."""
        return bool(self._ending or self._sweeps)

    @property
    def awaits_ends(self) -> bool:
        """Whether groups whose end was asked for still have children: an engine that works elsewhere gives them back later."""
        return bool(self.ending or self._asked)

    def submit(self, session: Session, submit: m.Submit) -> None:
        """Hand a group to the engine. Raises the typed error that goes back to the client."""
        group_id, engine = submit.group_id, self._engine
        engine_id = engine_name(session.number, self._made + 1)
        after = session.names.turn(submit.after)
        group = checked_group(submit, engine_id, after, self._limits, engine.vocab_size, engine.context)
        check_required(submit, engine)
        digest, held = m.digest(submit), session.groups.get(group_id)
        if held is not None:
            if held.digest != digest:
                raise IdConflict("this id is live with another prompt or other sampling; use a new id", group_id)
            return
        check_room(session, group_id, len(group.wanted), self._limits, self._max_outbox_bytes)
        self._made += 1
        if session.record.lasting:
            group = seeded(group)
        self._hand_over(session, group, group_id, submit.client)
        held = HeldGroup(group_id, group.id, digest, group.wanted)
        session.hold(held)
        if session.record.lasting:
            session.record.accepted(session.key, session.id, group.id, pack(submit), group.sampling.seed, live_of(engine))
        self._groups[group.id] = (session, held)

    def _hand_over(self, session: Session, group: Group, group_id: str, client: str = "") -> None:
        """Give the engine a group. client: of the session's, if that is a front. Raises InvalidRequest, GroupFailed."""
        try:
            self._engine.submit(group, client=f"{session.number}.{client}" if client else str(session.number))
        except ValueError as error:
            raise InvalidRequest(str(error), group_id) from None
        except Exception as error:
            log.exception("engine.submit failed")
            raise GroupFailed(f"the engine failed on this group: {described(error)}", group_id) from None
        session.streaming.hold(group_id, group)
        keeps, most = group.sampling.kv_ttl_s > 0, self._limits.max_samples_per_client
        self._give_up(session.names.add(group_id, group.id, keeps, most))
        self._tracker.begin(group)

    @property
    def parked(self) -> int:
        """Groups of before a restart that wait for weights."""
        return len(self._parked)

    def park(self, session: Session, held: HeldGroup, group: Group, live: Served) -> None:
        """Take a group of before a restart: it runs on as soon as the weights that were live, or newer ones, are so again."""
        self._made = max(self._made, number_of(group.id))
        self._groups[group.id] = (session, held)
        self._parked[group.id] = (session, group, live)

    def unpark(self) -> None:
        """Give the engine the groups whose weights are there."""
        if not self._parked:
            return
        live = live_of(self._engine)
        for engine_id in [id for id, (_, _, before) in self._parked.items() if live.follow(before)]:
            self._unpark(engine_id)

    def _unpark(self, engine_id: str) -> None:
        session, group, _ = self._parked.pop(engine_id)
        held = self._groups[engine_id][1]
        try:
            self._hand_over(session, group, held.group_id)
        except RolloutError as error:
            del self._groups[engine_id]
            session.drop(held.group_id)
            session.reply(pack(m.Refused(error.kind, error.message, held.group_id)))

    def step(self, sessions: Iterable[Session]) -> None:
        """Step the engine and deliver what ended.

        The engine turns what goes wrong with a forward into "error" samples by itself. What it did not expect cannot be told
        from one group: all end, and the service goes on with an empty engine. Raises the error where it held no group: no
        request caused that, and none will mend it."""
        started = perf_counter()
        try:
            samples = self._engine.step()
        except Exception as error:
            log.exception("engine.step failed")
            if not self:
                raise
            self.fail_all(f"engine.step failed: {described(error)}")
            return
        self.steps += 1
        self.step_s = perf_counter() - started
        self.deliver(samples, sessions)
        for session in sessions:
            session.stream(self._engine)

    def deliver(self, samples: Sequence[Sample], sessions: Iterable[Session]) -> None:
        """Hand samples to their sessions, and end the groups of those that do not read."""
        self._deliver(samples)
        for session in sessions:
            if session.unacked_bytes > self._max_outbox_bytes:
                for held in session.groups.values():
                    self._end(held)

    def abort(self, session: Session, group_id: str, index: int | None = None) -> None:
        """End a group of this id, or one child of it, if there is such; the client gets its samples. What is kept of children
        that have ended is given up."""
        held = session.groups.get(group_id)
        if held is not None and held.running:
            if index is None or index in held.wanted:
                self._end(held, index)
        else:
            self._give_up(session.names.keeping(group_id), index)

    def abort_all(self, sessions: Iterable[Session]) -> None:
        """End every group that there is, in its turn; the clients get their samples."""
        self._sweeps |= dict.fromkeys(sessions, self._made)

    def _sweep(self) -> None:
        """Note the groups of one session that are to end."""
        session = next(iter(self._sweeps))
        last = self._sweeps.pop(session)
        for held in session.groups.values():
            if number_of(held.engine_id) <= last:
                self._end(held)
        self._give_up(engine_id for engine_id in session.names.keeping() if number_of(engine_id) <= last)

    def forget(self, session: Session) -> None:
        """End all that a client has here, KV that is kept for it included; its samples are thrown away."""
        self._sweeps.pop(session, None)
        for held in list(session.groups.values()):
            self.drop(session, held)
        self._give_up(session.names.keeping())

    def _give_up(self, engine_ids: Iterable[str], index: int | None = None) -> None:
        for engine_id in engine_ids:
            self._ending[engine_id, index] = None

    def drop(self, session: Session, held: HeldGroup) -> None:
        """End a group that nobody wants any more; its samples are thrown away."""
        if self._parked.pop(held.engine_id, None):
            del self._groups[held.engine_id]
        elif self._groups.pop(held.engine_id, None):
            self._ending[held.engine_id, None] = None
            self._asked.discard(held.engine_id)
            self._dropped[held.engine_id] = held.n - held.ended
            self._tracker.forget(held.engine_id)
        session.drop(held.group_id)

    def end_some(self, seconds: float | None) -> None:
        """End groups for so long, one at least if there is one; None: all that are to end."""
        until = None if seconds is None else perf_counter() + seconds
        while self.ending:
            if self._ending:
                self._end_one()
            else:
                self._sweep()
            if until is not None and perf_counter() >= until:
                return

    def _end_one(self) -> None:
        engine_id, index = next(iter(self._ending))
        try:
            self._deliver(self._engine.abort(engine_id, index))
        finally:
            del self._ending[engine_id, index]

    def fail_all(self, reason: str) -> None:
        """End every group as "error", with what the engine still has of it."""
        for session, held in [kept for id, kept in self._groups.items() if id not in self._parked]:
            try:
                ended = self._engine.abort(held.engine_id)
            except Exception:
                log.exception("engine.abort failed")
                ended = []
            self._deliver([msgspec.structs.replace(sample, finish_reason="error", error=reason) for sample in ended])
            if held.running:  # the engine has lost children of it
                del self._groups[held.engine_id]
                self._asked.discard(held.engine_id)
                self._tracker.forget(held.engine_id)
                session.drop(held.group_id)
                session.reply(pack(m.Refused(GroupFailed.kind, reason, held.group_id)))

    def _end(self, held: HeldGroup, index: int | None = None) -> None:
        if held.engine_id in self._parked:  # the engine makes what comes back of it
            self._unpark(held.engine_id)
        if held.engine_id in self._groups:
            self._ending[held.engine_id, index] = None
            if index is None:
                self._asked.add(held.engine_id)

    def _deliver(self, samples: Sequence[Sample]) -> None:
        if wanted := [sample for sample in samples if sample.group_id in self._groups]:
            self._tracker.observe(wanted, self._engine.version)
        for sample in samples:
            if sample.group_id not in self._groups:
                self._deliver_to_nobody(sample)
                continue
            session, held = self._groups[sample.group_id]
            if session.unacked_bytes > self._max_outbox_bytes:
                why = f"over {self._max_outbox_bytes} bytes of samples wait for this client to read them"
                sample = without_tokens(sample, why)
            session.deliver(held, sample)
            if not held.running:
                del self._groups[held.engine_id]
                self._asked.discard(held.engine_id)

    def _deliver_to_nobody(self, sample: Sample) -> None:
        left = self._dropped.pop(sample.group_id, 0)
        if not left:
            log.error("sample of an unknown group group=%s index=%d", sample.group_id, sample.index)
        elif left > 1:
            self._dropped[sample.group_id] = left - 1


def check_required(submit: m.Submit, engine: EngineLike) -> None:
    """Raises StaleWeights where the live weights are older than a group wants them, or others under that version."""
    version = submit.require_version
    if engine.version < version:
        raise StaleWeights(f"the weights are version {engine.version}, {version} is required", submit.group_id)
    if submit.require_digest and live_of(engine).differ(Served(version, submit.require_digest)):
        raise StaleWeights(
            f"version {version} is required with the digest {submit.require_digest:.12}…, here it has the digest "
            f"{engine.weights.digest:.12}…: the service was started again, and has other weights under that version",
            submit.group_id,
        )


def seeded(group: Group) -> Group:
    """Give a group a seed, if it has none: whoever runs it again gets the same samples."""
    if group.sampling.seed is not None:
        return group
    sampling = msgspec.structs.replace(group.sampling, seed=secrets.randbelow(SEED_LIMIT))
    return msgspec.structs.replace(group, sampling=sampling)


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
