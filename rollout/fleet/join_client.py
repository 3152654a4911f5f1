"""The replica's end of joining: reports its address each second; `rollout.fleet.join_listener` answers."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from rollout.engine.values import Limits
from rollout.logs import logger
from rollout.transport import messages as m
from rollout.transport.errors import ProtocolError
from rollout.transport.frames import Decoder, pack
from rollout.transport.sockets import ClientEnd

JOIN_S = 1.0
"""interval of Join messages"""
LEAVE_S = 0.5
"""longest time for Leave to be sent"""

log = logger(__name__)


class JoinClient:
    """A thread that keeps this process joined to the router at an address, also after the router was restarted.

    Args:
        router: its address for replicas, or a connection file.
        name: of this replica.
        address: at which the router reaches it.
        server: public key of the service there, "" = it has no keys.
        on_leave: called when the router asks this process to stop, with True if it should be restarted.

    Raises ValueError for an address or file that cannot be used."""

    def __init__(self, router: str, name: str, address: str, server: str, on_leave: Callable[[bool], None]) -> None:
        self._end = ClientEnd(router, Limits())
        self._join = m.Join(m.PROTOCOL, name, secrets.token_hex(16), address, server, os.getpid())
        self._on_leave = on_leave
        self._decoder: Decoder[m.RouterMessage] = Decoder(m.RouterMessage, Limits())
        self._closing = False
        self._leaving = False
        """the router has asked this process to stop"""
        self._logged = ""
        self._thread = threading.Thread(target=self._run, name="rollout-join", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report that this process has stopped."""
        self._closing = True
        self._end.wake()
        self._thread.join()

    def _run(self) -> None:
        due = 0.0
        while not self._closing:
            now = time.monotonic()
            if self._end.connected and now >= due and self._end.send(pack(self._join)):
                due = now + JOIN_S
            self._note_link()
            for frames in self._end.receive(0.2):
                try:
                    self._answered(self._decoder.unpack(frames))
                except ProtocolError as error:
                    self._log(f"the router's answer cannot be decoded: {error}")
        if self._end.connected:
            self._end.send(pack(m.Leave(self._join.name, self._join.incarnation)))
        self._end.close(LEAVE_S)

    def _note_link(self) -> None:
        if self._end.refusal:
            self._log(self._end.refusal)
        elif not self._end.connected:
            self._log(f"no router at {self._end.address}")

    def _answered(self, answer: m.RouterMessage) -> None:
        if isinstance(answer, m.Refused):
            self._log(f"the router refuses: {answer.message}")
            return
        if not self._leaving:
            self._log("joined")
        if answer.leave and not self._leaving:
            self._leaving = True
            self._log(f"the router asks this process to stop ({answer.leave}): {answer.why}")
            self._on_leave(answer.leave == "restart")

    def _log(self, event: str) -> None:
        """Log a change once."""
        if event != self._logged:
            self._logged = event
            log.info("replica name=%s router=%s %s", self._join.name, self._end.address, event)


def own_name() -> str:
    """Return the default name of this process: HOST-PID."""
    host = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in socket.gethostname())[:40]
    return f"{host.lstrip('_.-') or 'host'}-{os.getpid()}"
