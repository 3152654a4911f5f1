"""The service: one loop, one thread.

    receive, handle (validate, submit, abort, ack, answer)  ->  engine.step()  ->  deliver  ->  send  ->  check timers

What clients ask for has a share of the time: messages are taken in turn from all connections for at most TAKE_S, or TAKE_SHARE
of a step, and groups end for as long. The rest waits, so that no peer keeps the others' samples from being made.

Who asked for what is kept here and in `rollout.service.session` only; the engine knows groups by names of the service's making.
Nothing a client sends stops the loop: what is wrong with a message goes back to its sender as a typed refusal.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.types import NONE_SERVED, Limits, Served
from rollout.config import MIN_GRACE_S
from rollout.logs import logger
from rollout.metrics.tracker import Tracker
from rollout.service.access import REVOKED, Access
from rollout.service.admission import check_hello, welcome
from rollout.service.as_json import to_json
from rollout.service.clock import LoopClock
from rollout.service.engine_api import EngineLike, live_of
from rollout.service.journal import Journal
from rollout.service.lifecycle import Lifecycle
from rollout.service.persistence import Persistence
from rollout.service.receiver import Receiver
from rollout.service.refresh import Refreshes
from rollout.service.restoring import restore
from rollout.service.running import Running, described
from rollout.service.session import GATHER_S, Session, Sessions
from rollout.service.shutdown import end_groups, say_closing
from rollout.service.watchdog import LoopPhase
from transport import messages as m
from transport.errors import NoSession
from transport.frames import pack
from transport.sockets import ServiceEnd, ServiceTransport

IDLE_POLL_S = 0.1
SOON_POLL_S = 0.005
HEARTBEAT_S = 1.0
TAKE_S = 0.04
"""longest that taking messages, and ending groups, hold the loop up at once"""
TAKE_SHARE, TAKE_LEAST_S = 0.25, 0.002
"""of the time of a step, while groups run"""

log = logger(__name__)


class Service:
    """Serves one engine to any number of clients until `stop`.

    Example:
        service = Service(engine, "tcp://127.0.0.1:*")
        print(service.endpoint)
        service.run()

    Args:
        endpoint: tcp://127.0.0.1:PORT (0 or *: any free one), tcp://[::1]:PORT or ipc://PATH; with `keys` any tcp://HOST:PORT.
            ValueError for an address that other hosts can reach without keys, and for one that cannot be bound.
        keys: the service's key file (`rollout keys init`), also for clients of this host; None: this user's clients may do all.
        journal: with it sessions outlive the process; closed with the service.
        limits: what clients may ask for; the engine's own by default.
        transport: another end instead of a socket, e.g. `transport.loopback.LoopbackService()`.
        client_grace_s: a client not heard from for so long has its groups aborted and is forgotten. At least MIN_GRACE_S.
        max_outbox_bytes: finished samples that wait for a client's acks. Over it its groups end as "error", and it gets Busy.
        linger_s: longest that `stop` waits for clients to take the last messages.
        lease_s: a client that has begun a refresh and says nothing about it for so long has given it up.
        tracker: gets the metrics; closed with the service. By default one without sinks.
        watch: is told where the loop is.
    """

    def __init__(
        self,
        engine: EngineLike,
        endpoint: str | None = None,
        *,
        keys: str | None = None,
        journal: Journal | None = None,
        limits: Limits | None = None,
        transport: ServiceTransport | None = None,
        client_grace_s: float = 10.0,
        max_outbox_bytes: int = 1 << 28,
        linger_s: float = 2.0,
        lease_s: float = 30.0,
        tracker: Tracker | None = None,
        watch: LoopPhase | None = None,
    ) -> None:
        if (endpoint is None) == (transport is None):
            raise ValueError("give an endpoint or a transport, one of the two")
        if client_grace_s < MIN_GRACE_S:
            raise ValueError(f"client_grace_s={client_grace_s}: at least {MIN_GRACE_S}, clients send a heartbeat every second")
        self._record = Persistence() if journal is None else journal
        self.incarnation = secrets.token_hex(8) if journal is None else journal.incarnation
        self._starts = 0 if journal is None else journal.starts
        self._engine = engine
        self._limits = limits or engine.limits
        self._transport = transport if transport is not None else ServiceEnd(str(endpoint), self._limits, keys)
        self._grace_s, self._linger_s = client_grace_s, linger_s
        self.watch = watch if watch is not None else LoopPhase()
        self._access = Access(self._transport.keys)
        self._sessions = Sessions(self._limits.max_clients, self._record)
        self._inbox = Receiver(self._transport, self._limits, self._access, self._sessions, self._handle)
        self._refreshes = Refreshes(engine, lease_s, self.watch)
        self._controls = Lifecycle(engine)
        self._tracker = tracker if tracker is not None else Tracker()
        self._running, self._unsent = Running(engine, self._tracker, self._limits, max_outbox_bytes), False
        """unsent: a connection takes more than it was sent at once"""
        self._stop_reason: str | None = None
        self._started = time.monotonic()
        self._clock = LoopClock(self._started, client_grace_s)
        if journal is not None:
            restore(journal, self._sessions, self._running, engine, self._limits)

    @property
    def endpoint(self) -> str:
        """The bound address, with the real port."""
        return self._transport.endpoint

    def run(self) -> None:
        """Serve until `stop`, then end every group as "aborted", tell the clients, and close. Raises what the engine raises if
        it cannot step any more, after telling the clients; with a journal it leaves them without a word, as if it had been
        killed: the next one goes on."""
        leaves = False
        try:
            while self._stop_reason is None:
                self.turn()
        except BaseException as error:
            self._stop_reason, leaves = f"the service failed: {described(error)}", self._record.lasting
            raise
        finally:
            self._close(self._stop_reason or "", leaves)

    def stop(self, reason: str = "stopped") -> None:
        """Make `run` return, within one step. Safe from a signal handler and from any thread."""
        self._stop_reason = reason

    def wake(self) -> None:
        """Have the loop look at its engine now. Safe from any thread: an engine that works elsewhere calls it."""
        self._transport.wake()

    def turn(self) -> None:
        """Go once around the loop. Waits up to IDLE_POLL_S if there is nothing to do."""
        soon = self._refreshes.unannounced or any(session.pending for session in self._sessions)
        at_once = self._engine.has_work or self._refreshes.has_work or self._running.ending or self._unsent
        self.watch.at("wait")
        if self._inbox.receive(0.0 if at_once else SOON_POLL_S if soon else IDLE_POLL_S, self._dose):
            self._clock.catch_up()
        self._running.end_some(dose(self._engine.has_work, self._running.step_s))
        self.watch.at("refresh")
        self._refreshes.work(self._clock.now, busy=self._engine.has_work)
        if not self._running.awaits_ends:
            self._controls.work()
        self._transport.expect(self._refreshes.window_bytes)
        self.watch.at("send")
        self._record.served(to_record(self._engine, self._record))  # before a trainer hears of it
        self._flush()  # answers need not wait for the step
        self._running.unpark()
        if self._engine.has_work:
            self.watch.at("step")
            self._running.step(self._sessions)
        self.watch.at("send")
        self._record.commit(to_record(self._engine, self._record))  # before clients may have samples that it has not
        self._flush()
        self.watch.at("timers")
        self._check_timers()

    def _flush(self) -> None:
        more_come = self._engine.has_work and self._running.step_s < GATHER_S
        self._unsent = any([session.flush(self._transport.send, more_come) for session in self._sessions])
        if (flooded := first(self._sessions, lambda session: session.flooded)) is not None:
            self._forget(flooded, "it does not read the answers to its requests")

    # receive

    def _dose(self) -> float:
        self.watch.at("take")
        return dose(self._engine.has_work, self._running.step_s)

    def _handle(self, peer: bytes, message: m.ClientMessage) -> None:
        if isinstance(message, m.Hello):
            return self._hello(peer, message)
        session = self._sessions.at(peer)
        if session is None:
            raise NoSession("the service does not know this session (any more): send Hello first")
        session.last_received_at = self._clock.now
        match message:
            case m.Submit():
                self._running.submit(session, message)
            case m.Abort():
                for group_id in message.group_ids:
                    self._running.abort(session, group_id)
                for group_id, index in message.children:
                    self._running.abort(session, group_id, index)
            case m.Ack():
                session.ack(message.samples)
                session.streaming.read(message.progress)
            case m.StatusRequest():
                session.reply(pack(m.StatusReply(message.request_id, to_json(self.status()))))
            case m.Begin() | m.Chunk() | m.Prepare() | m.Commit() | m.Abandon():
                self._refreshes.handle(session, message, self._clock.now)
            case m.WeightsRequest() | m.Share():
                self._refreshes.ask_status(session, message)
            case m.Control():
                if message.action == "abort_all":
                    self._running.abort_all(self._sessions)
                self._controls.handle(session, message)
            case m.Replicas():
                self._controls.change_replicas(session, message)
            case m.Sleep():
                self._refreshes.make_way(self._clock.now)
                self._controls.sleep(session, message, self._refreshes.owner)
            case m.Wake():
                self._controls.wake(session, message)
            case m.Heartbeat():
                pass
            case m.Goodbye():
                self._forget(session, "it said goodbye")

    def _hello(self, peer: bytes, hello: m.Hello) -> None:
        wanted = check_hello(hello, self._limits)
        session = self._sessions.open(hello.session, hello.name, self._access.key(peer))
        for held in [held for held in session.groups.values() if held.digest not in wanted]:
            self._running.drop(session, held)
        for other in self._sessions.others(session) if hello.alone else []:
            self._forget(other, "another front has taken its place")
        session.greeted(hello.capabilities, self._clock.now)
        answer = pack(welcome(hello, session, self._engine, self.incarnation, self._starts, self._limits))
        self._sessions.connect(session, peer, hello.number, answer)

    def _forget(self, session: Session, reason: str) -> None:
        fields = session.number, session.name, session.running, reason
        log.info("client forgotten client=%d name=%r running_samples=%d reason=%r", *fields)
        self._running.forget(session)
        self._refreshes.forget(session)
        self._controls.forget(session)
        self._sessions.close(session)

    def _dismiss(self, session: Session) -> None:
        """End a session whose key was revoked, and say so."""
        session.reply(pack(m.Refused(REVOKED.kind, REVOKED.message)))
        session.flush(self._transport.send)
        self._forget(session, "its key was revoked")

    # time

    def _check_timers(self) -> None:
        """Send heartbeats to the clients, forget those that are silent, and let the tracker look."""
        self._clock.turn(time.monotonic())
        now, patience_s = self._clock.now, self._clock.patience_s
        for session in self._access.revoked(self._sessions):
            self._dismiss(session)
        alive = partial(heartbeat, self._engine, self._running)
        self._refreshes.look_at_owner(lambda session: session.reached(self._transport.reaches, alive()), now)
        for session in self._sessions:
            if now - session.last_sent_at >= HEARTBEAT_S or session.unreported_bytes > m.UNTAKEN_BYTES // 4:
                session.report(alive(), now)
                session.flush(self._transport.send)
        if (silent := first(self._sessions, lambda session: now - session.last_received_at > patience_s)) is not None:
            self._forget(silent, f"not heard from for {self._grace_s} s")
        if self.watch.alone(len(self._sessions), now):
            self.stop("no client was there for too long")
        self._tracker.tend(self._engine_status, self._engine.version)

    def _engine_status(self) -> dict[str, Any]:
        return {**with_parked(self._engine.status(), self._running.parked), "loop": self.watch.status()}

    def status(self) -> dict[str, Any]:
        """Join the engine's status, the last `metrics` and a `service` object of our own."""
        return {
            **self._engine_status(),
            "digest": self._engine.weights.digest,
            "metrics": self._tracker.row,
            "service": {
                "endpoint": self.endpoint,
                "incarnation": self.incarnation,
                "uptime_s": round(time.monotonic() - self._started, 3),
                "steps": self._running.steps,
                "malformed": self._inbox.malformed,
                "keys": self._access.describe(),
                "starts": self._starts,
                "parked_groups": self._running.parked,
                "clients": [session.status(self._clock.now) for session in self._sessions],
            },
        }

    def _close(self, reason: str, leaves: bool) -> None:
        deadline = time.monotonic() + self._linger_s
        try:
            if not leaves:
                end_groups(self._running, self._sessions, self._transport, deadline)
                say_closing(self._sessions, self._transport, self._inbox.decoder, reason, deadline)
        finally:
            self._refreshes.close()
            self._transport.close(max(0.1, deadline - time.monotonic()))
            self._tracker.close(self._engine_status)
            self._record.close(None if leaves else to_record(self._engine, self._record))


def first(sessions: Sessions, wanted: Callable[[Session], bool]) -> Session | None:
    """Find one to forget in this turn: each may have much that is to end."""
    return next((session for session in sessions if wanted(session)), None)


def to_record(engine: EngineLike, record: Persistence) -> Served:
    """Return the live weights, for a record that keeps them."""
    return live_of(engine) if record.lasting else NONE_SERVED


def heartbeat(engine: EngineLike, running: Running) -> m.Alive:
    live = live_of(engine)
    return m.Alive(running.steps, live.version, digest=live.digest)


def with_parked(status: dict[str, Any], parked: int) -> dict[str, Any]:
    """Count groups of before a restart among those of the engine, which get them once their weights are there."""
    return status | {name: status[name] + parked for name in ("groups", "waiting") if parked and name in status}


def dose(busy: bool, step_s: float) -> float:
    """Return how many seconds of a turn are for what peers ask: of a `busy` loop a share of its last step, of `step_s`."""
    return min(TAKE_S, max(TAKE_LEAST_S, TAKE_SHARE * step_s)) if busy else TAKE_S
