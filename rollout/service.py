"""The service: one loop, one thread.

    receive  ->  take (validate, submit, abort, ack, answer)  ->  engine.step()  ->  deliver  ->  send  ->  tend (time)

Who asked for what is kept here and in `rollout.session` only; the engine knows groups by names of the service's making. Nothing
a client sends stops the loop: what is wrong with a message goes back to its sender as a typed refusal.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

import msgspec

from engine.request import Group, Limits, Sample
from rollout.admission import check_group, check_hello, check_room, welcome
from rollout.as_json import to_json
from rollout.closing import say_closing
from rollout.config import MIN_GRACE_S
from rollout.controls import Controls
from rollout.protocols import EngineLike
from rollout.pushes import Pushes
from rollout.session import Held, Session, Sessions, without_tokens
from rollout.tracking import Tracker
from transport import messages as m
from transport.errors import GroupFailed, IdConflict, InvalidRequest, NoSession, RolloutError, StaleWeights
from transport.frames import Decoder, Frame, pack
from transport.sockets import ServiceEnd, ServiceTransport

IDLE_POLL_S = 0.1
SOON_POLL_S = 0.005
HEARTBEAT_S = 1.0

log = logging.getLogger("rollout.service")


class Service:
    """Serves one engine to any number of clients until `stop`.

    Example:
        service = Service(engine, "tcp://127.0.0.1:*")
        print(service.endpoint)
        service.run()

    Args:
        endpoint: tcp://127.0.0.1:PORT (0 or *: any free one), tcp://[::1]:PORT or ipc://PATH. ValueError for any address that
            other hosts can reach, and for one that cannot be bound.
        limits: what clients may ask for; the engine's own by default.
        transport: another end instead of a socket, e.g. `transport.loopback.LoopbackService()`.
        client_grace_s: a client not heard from for so long has its groups aborted and is forgotten. At least MIN_GRACE_S.
        max_outbox_bytes: finished samples of one client that wait for its acks. Over it the client's groups end as "error" and
            it gets Busy until it has read.
        linger_s: longest that `stop` waits for clients to take the last messages.
        lease_s: a client that has begun a refresh and says nothing about it for so long has given it up.
        tracker: gets the metrics; closed with the service. By default one without sinks.
    """

    def __init__(
        self,
        engine: EngineLike,
        endpoint: str | None = None,
        *,
        limits: Limits | None = None,
        transport: ServiceTransport | None = None,
        client_grace_s: float = 10.0,
        max_outbox_bytes: int = 1 << 28,
        linger_s: float = 2.0,
        lease_s: float = 30.0,
        tracker: Tracker | None = None,
    ) -> None:
        if (endpoint is None) == (transport is None):
            raise ValueError("give an endpoint or a transport, one of the two")
        if client_grace_s < MIN_GRACE_S:
            raise ValueError(f"client_grace_s={client_grace_s}: at least {MIN_GRACE_S}, clients send a heartbeat every second")
        self.incarnation = secrets.token_hex(8)
        self._engine = engine
        self._limits = limits or engine.limits
        self._transport = transport if transport is not None else ServiceEnd(str(endpoint), self._limits)
        self._decoder: Decoder[m.ClientMessage] = Decoder(m.ClientMessage, self._limits)
        self._grace_s = client_grace_s
        self._max_outbox_bytes = max_outbox_bytes
        self._linger_s = linger_s

        self._sessions = Sessions(self._limits.max_clients)
        self._in_engine: dict[str, tuple[Session, Held]] = {}
        self._pushes = Pushes(engine, lease_s)
        self._controls = Controls(engine)
        self._tracker = tracker if tracker is not None else Tracker()
        self._made_groups = 0
        self._steps = 0
        self._malformed = 0
        self._stop_reason: str | None = None
        self._started = self._turned = time.monotonic()
        self._clock = 0.0
        """seconds the loop has been turning: see `_tend`"""

    @property
    def endpoint(self) -> str:
        """The bound address, with the real port."""
        return self._transport.endpoint

    def run(self) -> None:
        """Serve until `stop`, then end every group as "aborted", tell the clients, and close. Raises what the engine raises if
        it cannot step any more, after telling the clients."""
        try:
            while self._stop_reason is None:
                self.turn()
        except BaseException as error:
            self._stop_reason = f"the service failed: {_told(error)}"
            raise
        finally:
            self._close(self._stop_reason or "")

    def stop(self, reason: str = "stopped") -> None:
        """Makes `run` return, within one step. Safe from a signal handler and from any thread."""
        self._stop_reason = reason

    def turn(self) -> None:
        """Once around the loop. Waits up to IDLE_POLL_S if there is nothing to do."""
        soon = self._pushes.unannounced or any(session.pending for session in self._sessions)
        wait = 0.0 if self._engine.has_work or self._pushes.has_work else SOON_POLL_S if soon else IDLE_POLL_S
        for peer, frames in self._transport.receive(wait):
            self._take(peer, frames)
        self._pushes.work(self._clock, busy=self._engine.has_work)
        self._controls.work()
        self._flush()  # answers need not wait for the step
        if self._engine.has_work:
            self._step()
            self._flush()
        self._tend()

    def _flush(self) -> None:
        for session in list(self._sessions):
            session.flush(self._transport.send)
            if session.flooded:
                self._forget(session, "it does not read the answers to its requests")

    # receive

    def _take(self, peer: bytes, frames: list[Frame]) -> None:
        request_id = None
        try:
            try:
                message = self._decoder.unpack(frames)
            except RolloutError:
                self._malformed += 1
                raise
            request_id = getattr(message, "request_id", None)
            self._handle(peer, message)
        except RolloutError as error:
            self._refuse(peer, error, request_id)
        except Exception as error:
            log.exception("a message could not be served")
            self._refuse(peer, GroupFailed(f"the service failed on this message: {_told(error)}"), request_id)

    def _refuse(self, peer: bytes, error: RolloutError, request_id: int | None) -> None:
        refused = pack(m.Refused(error.kind, error.message, error.group_id, request_id))
        session = self._sessions.at(peer)
        if session is not None:
            session.reply(refused)
        else:
            self._transport.send(peer, refused)  # no session, nothing to keep it in: a stranger that does not read loses it

    def _handle(self, peer: bytes, message: m.ClientMessage) -> None:
        if isinstance(message, m.Hello):
            return self._hello(peer, message)
        session = self._sessions.at(peer)
        if session is None:
            raise NoSession("the service does not know this session (any more): send Hello first")
        session.heard = self._clock
        match message:
            case m.Submit():
                self._submit(session, message)
            case m.Abort():
                for group_id in message.group_ids:
                    self._abort(session, group_id)
            case m.Ack():
                session.ack(message.samples)
            case m.StatusRequest():
                session.reply(pack(m.StatusReply(message.request_id, to_json(self.status()))))
            case m.Begin() | m.Chunk() | m.Commit() | m.Abandon():
                self._pushes.take(session, message, self._clock)
            case m.WeightsRequest():
                session.reply(pack(m.StatusReply(message.request_id, to_json(self._pushes.status(message.verify)))))
            case m.Control():
                if message.action == "abort_all":
                    self._abort_all()
                self._controls.take(session, message)
            case m.Sleep():
                self._controls.sleep(session, message, self._pushes.owner)
            case m.Wake():
                self._controls.wake(session, message)
            case m.Heartbeat():
                pass
            case m.Goodbye():
                self._forget(session, "it said goodbye")

    def _hello(self, peer: bytes, hello: m.Hello) -> None:
        wanted = check_hello(hello, self._limits)
        session = self._sessions.open(hello.session, hello.name)
        for held in [held for held in session.groups.values() if held.digest not in wanted]:
            self._drop(session, held)
        session.heard = session.told = self._clock
        answer = pack(welcome(hello, session, self._engine, self.incarnation, self._limits))
        self._sessions.connect(session, peer, hello.number, answer)

    def _submit(self, session: Session, submit: m.Submit) -> None:
        group_id, engine = submit.group_id, self._engine
        check_group(submit, self._limits, engine.vocab_size, engine.context)
        if engine.version < submit.require_version:
            raise StaleWeights(f"the weights are version {engine.version}, {submit.require_version} is required", group_id)
        digest, held = m.digest(submit), session.groups.get(group_id)
        if held is not None:
            if held.digest != digest:
                raise IdConflict("this id is live with another prompt or other sampling; use a new id", group_id)
            return
        check_room(session, submit, self._limits, self._max_outbox_bytes)
        self._made_groups += 1
        group = Group(f"{session.number}.{self._made_groups}", submit.prompt, submit.sampling)
        try:
            engine.submit(group, client=str(session.number))
        except ValueError as error:
            raise InvalidRequest(str(error), group_id) from None
        except Exception as error:
            log.exception("engine.submit failed")
            raise GroupFailed(f"the engine failed on this group: {_told(error)}", group_id) from None
        held = Held(group_id, group.id, digest, group.sampling.n)
        session.hold(held)
        self._in_engine[group.id] = (session, held)
        self._tracker.begin(group)

    # step and deliver

    def _step(self) -> None:
        """The engine turns what goes wrong with a forward into "error" samples by itself. Here is for what it did not expect:
        which group it was cannot be told, so all end, and the service goes on with an empty engine."""
        try:
            samples = self._engine.step()
        except Exception as error:
            log.exception("engine.step failed")
            if not self._in_engine:
                raise  # it holds nobody's group and fails: no request caused this, and none will mend it
            self._fail_running(f"engine.step failed: {_told(error)}")
            return
        self._steps += 1
        for sample in samples:
            self._deliver(sample)
        for session in list(self._sessions):
            if session.unacked_bytes > self._max_outbox_bytes:
                for held in [held for held in session.groups.values() if held.running]:
                    self._abort(session, held.group_id)

    def _fail_running(self, reason: str) -> None:
        for session, held in list(self._in_engine.values()):
            try:
                ended = self._engine.abort(held.engine_id)
            except Exception:
                log.exception("engine.abort failed")
                ended = []
            for sample in ended:
                self._deliver(msgspec.structs.replace(sample, finish_reason="error", error=reason))
            if held.running:  # the engine has lost children of it
                del self._in_engine[held.engine_id]
                self._tracker.forget(held.engine_id)
                session.drop(held.group_id)
                session.reply(pack(m.Refused(GroupFailed.kind, reason, held.group_id)))

    def _deliver(self, sample: Sample) -> None:
        if sample.group_id not in self._in_engine:
            log.error("the engine ended a sample of group %s, which nobody waits for", sample.group_id)
            return
        session, held = self._in_engine[sample.group_id]
        self._tracker.observe(sample, self._engine.version)
        sample = msgspec.structs.replace(sample, group_id=held.group_id)
        if session.unacked_bytes > self._max_outbox_bytes:
            sample = without_tokens(sample, f"over {self._max_outbox_bytes} bytes of samples wait for this client to read them")
        session.deliver(held, sample)
        if not held.running:
            del self._in_engine[held.engine_id]

    def _abort(self, session: Session, group_id: str) -> None:
        held = session.groups.get(group_id)
        if held is not None and held.running:
            for sample in self._engine.abort(held.engine_id):
                self._deliver(sample)

    def _abort_all(self) -> None:
        for session in self._sessions:
            for group_id in list(session.groups):
                self._abort(session, group_id)

    def _drop(self, session: Session, held: Held) -> None:
        """Nobody wants this group any more: stop it and throw its samples away."""
        if self._in_engine.pop(held.engine_id, None):
            self._engine.abort(held.engine_id)
            self._tracker.forget(held.engine_id)
        session.drop(held.group_id)

    def _forget(self, session: Session, reason: str) -> None:
        log.info("client %d (%s) forgotten with %d running samples: %s", session.number, session.name, session.running, reason)
        for held in list(session.groups.values()):
            self._drop(session, held)
        self._pushes.forget(session)
        self._controls.forget(session)
        self._sessions.close(session)

    # time

    def _tend(self) -> None:
        """Heartbeats to the clients, and judgement of those not heard from.

        Runs after everything received was taken, so heartbeats that queued up during a long step count. The clock moves at
        most half the grace time a turn: a process that was itself suspended gives its clients time to come back."""
        now = time.monotonic()
        self._clock += min(now - self._turned, self._grace_s / 2)
        self._turned = now
        for session in list(self._sessions):
            if self._clock - session.heard > self._grace_s:
                self._forget(session, f"not heard from for {self._grace_s} s")
            elif self._clock - session.told >= HEARTBEAT_S:
                session.told = self._clock
                session.reply(pack(m.Alive(self._steps, self._engine.version)))
                session.flush(self._transport.send)
        self._tracker.tend(self._engine.status, self._engine.version)

    def status(self) -> dict[str, Any]:
        """The engine's status, the last `metrics` and a `service` object of our own."""
        return {
            **self._engine.status(),
            "metrics": self._tracker.row,
            "service": {
                "endpoint": self.endpoint,
                "incarnation": self.incarnation,
                "uptime_s": round(time.monotonic() - self._started, 3),
                "steps": self._steps,
                "malformed": self._malformed,
                "clients": [session.status(self._clock) for session in self._sessions],
            },
        }

    def _close(self, reason: str) -> None:
        deadline = time.monotonic() + self._linger_s
        try:
            try:
                self._abort_all()
            except Exception:  # a broken engine: its clients are told that the service closes, at least
                log.exception("engine.abort failed")
            say_closing(self._sessions, self._transport, self._decoder, reason, deadline)
        finally:
            self._transport.close(max(0.1, deadline - time.monotonic()))
            self._tracker.close(self._engine.status)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
