"""The service: one loop, one thread.

    receive  ->  take (validate, submit, abort, ack, answer)  ->  engine.step()  ->  deliver  ->  send  ->  tend (time)

Who asked for what is kept here and in `rollout.session` only; the engine knows groups by names of the service's making. Nothing
a client sends stops the loop: what is wrong with a message goes back to its sender as a typed refusal.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from typing import Any

import msgspec
import numpy as np

from engine.request import Group, Limits, Sample
from rollout.protocols import EngineLike
from rollout.session import Held, Session, without_tokens
from transport import messages as m
from transport.errors import (
    Busy,
    GroupFailed,
    IdConflict,
    InvalidRequest,
    LimitExceeded,
    NoSession,
    RolloutError,
    VersionMismatch,
)
from transport.frames import Decoder, Frame, pack
from transport.sockets import ServiceEnd, ServiceTransport

IDLE_POLL_S = 0.1
UNSENT_POLL_S = 0.005
HEARTBEAT_S = 1.0
MAX_FAILED_STEPS = 3
"""a step that raises this often in a row, with nothing in common but the engine, is the engine: the service gives up"""

log = logging.getLogger("rollout.service")


class Service:
    """Serves one engine to any number of clients until `stop`.

    Example:
        service = Service(engine, "tcp://127.0.0.1:*")
        print(service.endpoint)
        service.run()

    Args:
        endpoint: tcp://127.0.0.1:PORT (0 or *: any free one), tcp://[::1]:PORT or ipc://PATH. ValueError for any address that
            other hosts can reach.
        limits: what clients may ask for; the engine's own by default.
        transport: another end instead of a socket, e.g. `transport.loopback.LoopbackService()`.
        client_grace_s: a client not heard from for so long has its groups aborted and is forgotten.
        max_outbox_bytes: finished samples of one client that wait for its acks. Over it the client's groups end as "error" and
            it gets Busy until it has read.
        linger_s: longest that `stop` waits for clients to take the last messages.
    """

    def __init__(
        self,
        engine: EngineLike,
        endpoint: str,
        *,
        limits: Limits | None = None,
        transport: ServiceTransport | None = None,
        client_grace_s: float = 10.0,
        max_outbox_bytes: int = 1 << 28,
        linger_s: float = 2.0,
    ) -> None:
        self.incarnation = secrets.token_hex(8)
        self._engine = engine
        self._limits = limits or engine.limits
        self._transport = transport if transport is not None else ServiceEnd(endpoint, self._limits)
        self._decoder: Decoder[m.ClientMessage] = Decoder(m.ClientMessage, self._limits)
        self._grace_s = client_grace_s
        self._max_outbox_bytes = max_outbox_bytes
        self._linger_s = linger_s

        self._sessions: dict[str, Session] = {}
        self._peers: dict[bytes, Session] = {}
        self._in_engine: dict[str, tuple[Session, Held]] = {}
        self._made_sessions = 0
        self._made_groups = 0
        self._steps = 0
        self._failed_steps = 0
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
            self._stop_reason = f"the service failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._close(self._stop_reason or "")

    def stop(self, reason: str = "stopped") -> None:
        """Makes `run` return, within one step. Safe from a signal handler and from any thread."""
        self._stop_reason = reason

    def turn(self) -> None:
        """Once around the loop. Waits up to IDLE_POLL_S if there is nothing to do."""
        unsent = any(session.pending for session in self._sessions.values())
        wait = 0.0 if self._engine.has_work else UNSENT_POLL_S if unsent else IDLE_POLL_S
        for peer, frames in self._transport.receive(wait):
            self._take(peer, frames)
        if self._engine.has_work:
            self._step()
        for session in list(self._sessions.values()):
            session.flush(self._transport.send)
            if session.flooded:
                self._forget(session, "it does not read the answers to its requests")
        self._tend()

    # receive

    def _take(self, peer: bytes, frames: list[Frame]) -> None:
        request_id = None
        try:
            try:
                message = self._decoder.unpack(frames)
            except RolloutError:
                self._malformed += 1
                raise
            request_id = message.request_id if isinstance(message, m.StatusRequest) else None
            self._handle(peer, message)
        except RolloutError as error:
            self._refuse(peer, error, request_id)
        except Exception as error:
            log.exception("a message could not be served")
            self._refuse(peer, GroupFailed(f"the service failed on this message: {type(error).__name__}: {error}"), request_id)

    def _refuse(self, peer: bytes, error: RolloutError, request_id: int | None) -> None:
        refused = pack(m.Refused(error.kind, error.message, error.group_id, request_id))
        session = self._peers.get(peer)
        if session is not None:
            session.reply(refused)
        else:
            self._transport.send(peer, refused)  # no session, nothing to keep it in: a stranger that does not read loses it

    def _handle(self, peer: bytes, message: m.ClientMessage) -> None:
        if isinstance(message, m.Hello):
            return self._hello(peer, message)
        session = self._peers.get(peer)
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
                session.reply(pack(m.StatusReply(message.request_id, json.dumps(self.status(), default=_plain).encode())))
            case m.Heartbeat():
                pass
            case m.Goodbye():
                self._forget(session, "it said goodbye")

    def _hello(self, peer: bytes, hello: m.Hello) -> None:
        if hello.protocol != m.PROTOCOL:
            raise VersionMismatch(
                f"the client speaks protocol {hello.protocol}, the service {m.PROTOCOL}: install the same version"
            )
        if len(hello.name.encode()) > self._limits.max_id_bytes:
            raise LimitExceeded(f"client name: at most {self._limits.max_id_bytes} bytes (Limits.max_id_bytes)")
        groups = hello.groups if hello.groups is not None else np.zeros((0, m.DIGEST_BYTES), np.uint8)
        if groups.dtype != np.uint8 or groups.ndim != 2 or groups.shape[1] != m.DIGEST_BYTES:
            raise InvalidRequest(f"Hello.groups is {groups.dtype} {groups.shape}: must be uint8 [groups, {m.DIGEST_BYTES}]")
        session = self._sessions.get(hello.session)
        if session is None:
            if len(self._sessions) >= self._limits.max_clients:
                raise Busy(f"{len(self._sessions)} clients are connected, the most allowed (Limits.max_clients)")
            self._made_sessions += 1
            session = self._sessions[hello.session] = Session(hello.session, hello.name, self._made_sessions)
            log.info("client %d (%s) connected", session.number, session.name)
        wanted = {row.tobytes() for row in groups}
        for held in [held for held in session.groups.values() if held.digest not in wanted]:
            self._drop(session, held)
        previous = self._peers.get(peer)
        if previous is not None and previous is not session:
            previous.peer = None
        if session.peer is not None:
            self._peers.pop(session.peer, None)
        self._peers[peer] = session
        session.heard = session.told = self._clock
        session.attach(peer, pack(self._welcome()))

    def _welcome(self) -> m.Welcome:
        engine = self._engine
        return m.Welcome(
            protocol=m.PROTOCOL,
            incarnation=self.incarnation,
            model=engine.model.name,
            vocab_size=engine.vocab_size,
            context=engine.context,
            eos_token_ids=tuple(sorted(engine.model.eos_token_ids)),
            version=engine.version,
            limits=self._limits,
        )

    def _submit(self, session: Session, submit: m.Submit) -> None:
        limits, group_id = self._limits, submit.group_id
        if len(group_id.encode()) > limits.max_id_bytes:  # before the id is kept or echoed
            raise LimitExceeded(
                f"a group id of {len(group_id.encode())} bytes: at most {limits.max_id_bytes} (Limits.max_id_bytes)"
            )
        self._made_groups += 1
        group = Group(f"{session.number}.{self._made_groups}", submit.prompt, submit.sampling)
        try:
            msgspec.structs.replace(group, id=group_id).validate(limits, self._engine.vocab_size, self._engine.context)
        except ValueError as error:
            raise InvalidRequest(str(error), group_id) from None
        digest, held = m.digest(submit), session.groups.get(group_id)
        if held is not None:
            if held.digest != digest:
                raise IdConflict("this id is live with another prompt or other sampling; use a new id", group_id)
            return
        if session.unacked_bytes > self._max_outbox_bytes:
            raise Busy(f"{session.unacked_bytes} bytes of samples wait to be read; read them and submit again", group_id)
        if len(session.groups) >= limits.max_groups_per_client:
            raise LimitExceeded(f"{len(session.groups)} groups are live (Limits.max_groups_per_client)", group_id)
        if session.samples + group.sampling.n > limits.max_samples_per_client:
            raise LimitExceeded(
                f"{session.samples} samples are live, {group.sampling.n} more asked: at most {limits.max_samples_per_client} "
                "(Limits.max_samples_per_client)",
                group_id,
            )
        try:
            self._engine.submit(group, client=str(session.number))
        except ValueError as error:
            raise InvalidRequest(str(error), group_id) from None
        except Exception as error:
            log.exception("engine.submit failed")
            raise GroupFailed(f"the engine failed on this group: {type(error).__name__}: {error}", group_id) from None
        held = Held(group_id, group.id, digest, group.sampling.n)
        session.hold(held)
        self._in_engine[group.id] = (session, held)

    # step and deliver

    def _step(self) -> None:
        try:
            samples = self._engine.step()
            self._steps += 1
            self._failed_steps = 0
        except Exception as error:
            log.exception("engine.step failed")
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
            reason = f"engine.step failed: {type(error).__name__}: {error}"
            ended = [sample for engine_id in list(self._in_engine) for sample in self._engine.abort(engine_id)]
            samples = [msgspec.structs.replace(sample, finish_reason="error", error=reason) for sample in ended]
        for sample in samples:
            self._deliver(sample)
        for session in list(self._sessions.values()):
            if session.unacked_bytes > self._max_outbox_bytes:
                for held in [held for held in session.groups.values() if held.running]:
                    self._abort(session, held.group_id)

    def _deliver(self, sample: Sample) -> None:
        session, held = self._in_engine[sample.group_id]
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

    def _drop(self, session: Session, held: Held) -> None:
        """Nobody wants this group any more: stop it and throw its samples away."""
        if self._in_engine.pop(held.engine_id, None):
            self._engine.abort(held.engine_id)
        session.drop(held.group_id)

    def _forget(self, session: Session, reason: str) -> None:
        log.info("client %d (%s) forgotten with %d running samples: %s", session.number, session.name, session.running, reason)
        for held in list(session.groups.values()):
            self._drop(session, held)
        self._sessions.pop(session.id, None)
        if session.peer is not None:
            self._peers.pop(session.peer, None)

    # time

    def _tend(self) -> None:
        """Heartbeats to the clients, and judgement of those not heard from.

        Runs after everything received was taken, so heartbeats that queued up during a long step count. The clock moves at
        most half the grace time a turn: a process that was itself suspended gives its clients time to come back."""
        now = time.monotonic()
        self._clock += min(now - self._turned, self._grace_s / 2)
        self._turned = now
        for session in list(self._sessions.values()):
            if self._clock - session.heard > self._grace_s:
                self._forget(session, f"not heard from for {self._grace_s} s")
            elif self._clock - session.told >= HEARTBEAT_S:
                session.told = self._clock
                session.reply(pack(m.Alive(self._steps, self._engine.version)))
                session.flush(self._transport.send)

    def status(self) -> dict[str, Any]:
        """The engine's status and a `service` object of our own."""
        return {
            **self._engine.status(),
            "service": {
                "endpoint": self.endpoint,
                "incarnation": self.incarnation,
                "uptime_s": round(time.monotonic() - self._started, 3),
                "steps": self._steps,
                "malformed": self._malformed,
                "clients": [session.status(self._clock) for session in self._sessions.values()],
            },
        }

    def _close(self, reason: str) -> None:
        deadline = time.monotonic() + self._linger_s
        try:
            for session in self._sessions.values():
                for group_id in list(session.groups):
                    self._abort(session, group_id)
                session.reply(pack(m.Closing(reason)))
            while True:
                for session in self._sessions.values():
                    session.flush(self._transport.send)
                if time.monotonic() > deadline or not any(session.pending for session in self._sessions.values()):
                    break
                self._transport.receive(UNSENT_POLL_S)  # acks come too late to matter; this only waits for room to send
        finally:
            self._transport.close(max(0.1, deadline - time.monotonic()))


def _plain(value: Any) -> Any:
    """numpy scalars and arrays in a status become JSON; anything else is the engine's mistake."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"engine.status() holds a {type(value).__name__}, which is not JSON")
