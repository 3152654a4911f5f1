"""The service: serves an engine to clients, with one loop in one thread.

    receive, handle (validate, submit, abort, acknowledge, answer) → engine.step() → deliver → send → check timers

Requests get a bounded share of each iteration: messages are received from all connections in turn for at most
`ServiceTiming.requests_s` or a fraction of the last step, then aborts are processed for as long. The rest waits for the next
iteration, so no client can prevent the samples of others from being generated.

Only the service stores which client submitted which group (`rollout.service.session`); the engine gets group ids that the
service made. No message can stop the loop: errors in a message are answered with a typed refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from rollout.config import ServiceConfig
from rollout.engine.values import NONE_SERVED, Served
from rollout.logs import logger
from rollout.service.access import REVOKED, Access
from rollout.service.engine_api import EngineLike, HasReplicas, live_of
from rollout.service.engine_groups import EngineGroups, described
from rollout.service.lifecycle import Lifecycle
from rollout.service.persistence import Persistence
from rollout.service.phases import MODELS, LoopPhase, Phase
from rollout.service.receiver import Receiver
from rollout.service.refresh import Refreshes, RefreshTiming
from rollout.service.session import Session, Sessions
from rollout.service.validation import check_hello, welcome
from rollout.transport import messages as m
from rollout.transport.errors import NoSession
from rollout.transport.frames import pack
from rollout.transport.sockets import ServiceTransport

CLOSING_POLL_S = 0.005

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceTiming:
    """Durations of the loop, in seconds, and the clock that measures them."""

    idle_poll_s: float = 0.1
    """longest wait for a message when there is nothing to do"""
    soon_poll_s: float = 0.005
    """the same, while messages wait to be sent or bytes of a refresh may arrive without a message"""
    heartbeat_s: float = 1.0
    """between two heartbeats to a client"""
    requests_s: float = 0.04
    """longest time per iteration to handle requests, and again to process aborts"""
    requests_ratio: float = 0.25
    """while groups run: this fraction of the last step instead, …"""
    least_requests_s: float = 0.002
    """… but at least this long"""
    linger_s: float = 2.0
    """longest time that `Service.stop` waits for clients to receive the last messages"""
    refresh: RefreshTiming = RefreshTiming()
    clock: Callable[[], float] = time.monotonic
    """seconds, monotonic"""

    def for_requests(self, busy: bool, step_s: float) -> float:
        """Return the seconds that this iteration may spend on requests. busy: whether groups run; step_s: of the last step."""
        return min(self.requests_s, max(self.least_requests_s, self.requests_ratio * step_s)) if busy else self.requests_s


class SilenceClock:
    """The time by which silent clients are forgotten.

    It advances by at most half the grace time per iteration, so that after the process was suspended clients have time to send
    a heartbeat. Heartbeats that were queued during a long step count: a client is forgotten after the grace time only if all
    received messages were handled, otherwise after twice the grace time, in which each connection had many turns.

    Args:
        now_s: seconds, monotonic.
        grace_s: how long a client may be silent.
    """

    def __init__(self, now_s: float, grace_s: float) -> None:
        self.now = 0.0
        self._grace_s = grace_s
        self._advanced_at = now_s
        self._caught_up = 0.0

    def advance(self, now_s: float) -> None:
        """Advance to `now_s`, once per iteration."""
        self.now += min(now_s - self._advanced_at, self._grace_s / 2)
        self._advanced_at = now_s

    def catch_up(self) -> None:
        """Record that all received messages were handled."""
        self._caught_up = self.now

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which a client is forgotten in this iteration."""
        behind = self.now - self._caught_up  # since before this iteration if no message was left
        return self._grace_s if behind <= self._grace_s / 2 else 2 * self._grace_s


class Service:
    """Serves one engine to any number of clients until `stop`. `rollout.service.build.open_service` makes it.

    Args:
        groups: the groups in the engine.
        sessions: of the clients.
        transport: connects them; closed with the service.
        config: time-outs and limits of clients.
        timing: durations of the loop.
    """

    def __init__(
        self,
        groups: EngineGroups,
        sessions: Sessions,
        transport: ServiceTransport,
        config: ServiceConfig,
        timing: ServiceTiming,
    ) -> None:
        engine = self._engine = groups.engine
        self._running, self._sessions, self._transport = groups, sessions, transport
        self._config, self._timing, self._clock = config, timing, timing.clock
        self._persistence, self._ledger = sessions.persistence, groups.ledger
        self.incarnation = self._persistence.incarnation
        models = frozenset[Phase]() if isinstance(engine, HasReplicas) else MODELS  # a router's step runs no model
        self.watch = LoopPhase(config.stall_s, alone_s=config.exit_without_clients_s, models=models)
        """phase of the loop, for a watchdog"""
        self._access = Access(transport.keys)
        self._receiver = Receiver(transport, engine.limits, sessions, self._handle, timing.clock)
        self._refreshes = Refreshes(engine, self.watch, config.lease_s, timing.refresh, timing.clock)
        self._lifecycle = Lifecycle(engine)
        self._unsent = False  # a connection accepts more than one iteration sends
        self._stop_reason: str | None = None
        self._started = timing.clock()
        self._silence = SilenceClock(self._started, config.client_grace_s)

    @property
    def endpoint(self) -> str:
        """The bound address, with the real port."""
        return self._transport.endpoint

    @property
    def unfinished(self) -> int:
        """Number of accepted samples that have not finished."""
        return sum(session.running for session in self._sessions)

    def run(self) -> None:
        """Serve until `stop`, then end all groups as "aborted", notify the clients, and close.

        Raises the engine's exception if it can no longer step. With a journal, clients are then not notified, as if the process
        had been killed: the next process continues their groups."""
        silent = False
        try:
            while self._stop_reason is None:
                self.run_once()
        except BaseException as error:
            self._stop_reason, silent = f"the service failed: {described(error)}", self._persistence.lasting
            raise
        finally:
            self._close(self._stop_reason or "", silent)

    def stop(self, reason: str = "stopped") -> None:
        """Make `run` return within one step. Safe from a signal handler and from any thread."""
        self._stop_reason = reason

    def wake(self) -> None:
        """End the loop's wait for messages. For any thread: an engine that runs elsewhere calls it when it has samples."""
        self._transport.wake()

    def run_once(self) -> None:
        """Run one iteration of the loop. Waits up to `ServiceTiming.idle_poll_s` if there is nothing to do."""
        timing, engine = self._timing, self._engine
        soon = self._refreshes.unannounced or any(session.pending for session in self._sessions)
        at_once = engine.has_work or self._refreshes.has_work or self._running.has_aborts or self._unsent
        self.watch.at("wait")
        if self._receiver.receive(
            0.0 if at_once else timing.soon_poll_s if soon else timing.idle_poll_s, self._time_for_requests
        ):
            self._silence.catch_up()
        self._running.process_aborts(timing.for_requests(engine.has_work, self._running.step_s))
        self.watch.at("refresh")
        self._refreshes.work(self._silence.now, busy=engine.has_work)
        for refresh in self._refreshes.take_applied():
            self._ledger.refreshed(refresh, engine)
        if self._lifecycle.has_waiters and not self._running.aborting:
            self._lifecycle.answer_waiters()
        self._transport.expect(self._refreshes.window_bytes)
        self.watch.at("send")
        self._persistence.served(to_store(engine, self._persistence))  # before a trainer gets the answer to its refresh
        self._ledger.commit()
        self._flush()  # so that answers do not wait for the step
        self._running.unpark()
        if engine.has_work:
            self.watch.at("step")
            self._running.step(self._sessions)
        self.watch.at("send")
        self._ledger.commit()  # before the journal: after a kill, the next service sends what the journal has
        self._persistence.commit(to_store(engine, self._persistence))  # before clients get samples that are not stored
        self._flush()
        self.watch.at("timers")
        self._check_timers()

    def _time_for_requests(self) -> float:
        self.watch.at("receive")
        return self._timing.for_requests(self._engine.has_work, self._running.step_s)

    def _flush(self) -> None:
        more_come = self._engine.has_work and self._running.step_s < self._sessions.send_limits.gather_s
        self._unsent = any([session.flush(self._transport.send, more_come) for session in self._sessions])
        if (flooded := first(self._sessions, lambda session: session.flooded)) is not None:
            self._forget(flooded, "it does not read the answers to its requests")

    def _handle(self, peer: bytes, message: m.ClientMessage) -> None:
        self._access.check(peer, message)
        if isinstance(message, m.Hello):
            return self._hello(peer, message)
        session = self._sessions.at(peer)
        if session is None:
            raise NoSession("the service has no such session (any more): send Hello first")
        session.last_received_at = self._silence.now
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
                session.reply_status(message.request_id, self.status())
            case m.Begin() | m.Chunk() | m.Prepare() | m.Commit() | m.Abandon():
                self._refreshes.handle(session, message, self._silence.now)
            case m.WeightsRequest() | m.Share():
                self._refreshes.ask_status(session, message)
            case m.Control():
                if message.action == "abort_all":
                    self._running.abort_all(self._sessions)
                self._lifecycle.handle(session, message)
            case m.Replicas():
                self._lifecycle.change_replicas(session, message)
            case m.Sleep():
                self._refreshes.abandon_if_disconnected(self._silence.now)
                self._lifecycle.sleep(session, message, self._refreshes.owner)
            case m.Wake():
                self._lifecycle.wake(session, message)
            case m.Heartbeat():
                pass
            case m.Goodbye():
                self._forget(session, "it sent Goodbye")

    def _hello(self, peer: bytes, hello: m.Hello) -> None:
        wanted = check_hello(hello, self._engine.limits)
        session = self._sessions.open(hello.session, hello.name, self._access.key(peer))
        for unwanted in [accepted for accepted in session.groups.values() if accepted.digest not in wanted]:
            self._running.drop(session, unwanted)
        for other in self._sessions.others(session) if hello.alone else []:
            self._forget(other, "another router has replaced it")
        session.greeted(hello.capabilities, self._silence.now)
        about = self._engine, self.incarnation, self._persistence.starts, self._config.served_model_name
        answer = pack(welcome(hello, session, *about))
        self._sessions.connect(session, peer, hello.number, answer)

    def _forget(self, session: Session, reason: str) -> None:
        who = session.number, session.name, session.running
        log.info("client forgotten client=%d name=%r running_samples=%d reason=%r", *who, reason)
        self._running.forget(session)
        self._refreshes.forget(session)
        self._lifecycle.forget(session)
        self._sessions.close(session)

    def _check_timers(self) -> None:
        """Send heartbeats, forget silent clients, and let the tracker write its metrics."""
        self._silence.advance(self._clock())
        now, patience_s = self._silence.now, self._silence.patience_s
        for session in self._access.revoked(self._sessions):
            session.reply(pack(m.Refused(REVOKED.kind, REVOKED.message)))
            session.flush(self._transport.send)
            self._forget(session, "its key was revoked")
        alive = partial(heartbeat, self._engine, self._running)
        self._refreshes.check_connection(lambda session: session.reached(self._transport.reaches, alive()), now)
        for session in self._sessions:
            if now - session.last_sent_at >= self._timing.heartbeat_s or session.unreported_bytes > m.UNTAKEN_BYTES // 4:
                session.report(alive(), now)
                session.flush(self._transport.send)
        if (silent := first(self._sessions, lambda session: now - session.last_received_at > patience_s)) is not None:
            self._forget(silent, f"silent for {self._config.client_grace_s} s")
        if self.watch.alone(len(self._sessions), now):
            self.stop("no client was connected for too long")
        self._running.tracker.tend(self._engine_status, self._engine.version)

    def _engine_status(self) -> dict[str, Any]:
        return {**with_parked(self._engine.status(), self._running.parked), "loop": self.watch.status()}

    def status(self) -> dict[str, Any]:
        """Return the engine's status, the last `metrics`, and a `service` object with what only the service knows."""
        return {
            **self._engine_status(),
            "digest": self._engine.weights.digest,
            "metrics": self._running.tracker.row,
            "ledger": self._ledger.status(),
            "service": {
                "endpoint": self.endpoint,
                "served_model_name": self._config.served_model_name,
                "incarnation": self.incarnation,
                "uptime_s": round(self._clock() - self._started, 3),
                "steps": self._running.steps,
                "malformed": self._receiver.malformed,
                "keys": self._access.describe(),
                "starts": self._persistence.starts,
                "parked_groups": self._running.parked,
                "clients": [session.status(self._silence.now) for session in self._sessions],
            },
        }

    def _close(self, reason: str, silent: bool) -> None:
        """silent: leave groups and sessions to the next process, and do not notify clients."""
        deadline = self._clock() + self._timing.linger_s
        try:
            if not silent:
                in_time = lambda: self._clock() < deadline  # noqa: E731
                end_groups(self._running, self._sessions, self._transport, in_time)
                notify_closing(self._sessions, self._transport, self._receiver, reason, in_time)
        finally:
            self._refreshes.close()
            self._transport.close(max(0.1, deadline - self._clock()))
            self._running.tracker.close(self._engine_status)
            self._ledger.close()
            self._persistence.close(None if silent else to_store(self._engine, self._persistence))


def end_groups(running: EngineGroups, sessions: Sessions, transport: ServiceTransport, in_time: Callable[[], bool]) -> None:
    """End all groups as "aborted". An engine that runs elsewhere returns their samples later: wait for them while `in_time`."""
    try:
        running.abort_all(sessions)
        running.process_aborts(None)
        while running.aborting and in_time():
            transport.receive(CLOSING_POLL_S)
            running.step(sessions)
    except Exception:  # the engine is broken; clients are notified nevertheless
        log.exception("engine.abort failed")


def notify_closing(
    sessions: Sessions, transport: ServiceTransport, receiver: Receiver, reason: str, in_time: Callable[[], bool]
) -> None:
    """Send the queued messages and then Closing to every client. Returns when all have answered with Goodbye, or no longer
    `in_time`. Other messages are dropped: Closing answers them."""
    for session in sessions:
        session.reply(pack(m.Closing(reason)))
    while in_time() and any(session.peer is not None for session in sessions):
        for session in sessions:
            session.flush(transport.send)
        for peer in receiver.goodbyes(CLOSING_POLL_S):
            if (gone := sessions.at(peer)) is not None:
                sessions.close(gone)


def first(sessions: Sessions, wanted: Callable[[Session], bool]) -> Session | None:
    """Find a session to forget. One per iteration: each may have many groups to abort."""
    return next((session for session in sessions if wanted(session)), None)


def to_store(engine: EngineLike, persistence: Persistence) -> Served:
    """Return the live weights if they are stored. To get their digest may take a pass over all of them."""
    return live_of(engine) if persistence.lasting else NONE_SERVED


def heartbeat(engine: EngineLike, running: EngineGroups) -> m.Alive:
    """Make a heartbeat with the number of steps and the live weights."""
    live = live_of(engine)
    return m.Alive(running.steps, live.version, digest=live.digest)


def with_parked(status: dict[str, Any], parked: int) -> dict[str, Any]:
    """Count parked groups among the engine's groups, which they join once their weights are live."""
    return status | {name: status[name] + parked for name in ("groups", "waiting") if parked and name in status}


def __getattr__(name: str) -> Any:
    """Find `open_service` where users have imported it from; `rollout.service.build` has it."""
    if name != "open_service":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("rollout.service.build").open_service
