"""Takes connections for ranks: those that say the secret. Any process may connect where rank 0 listens on an address of its
host, so a connection may send at most MOST_BYTES, within GREETING_S, and as many as MOST_ARRIVING wait side by side."""

from __future__ import annotations

import errno
import logging
import math
import selectors
import socket
import time
from secrets import compare_digest

import msgspec

from rollout.engine.parallel.messages import LENGTH, Joining

log = logging.getLogger(__name__)

NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""errors of `accept` that stay until something is closed"""
PAUSE_S = 1.0
"""for which no connection is taken after one of these, if no caller leaves"""
GREETING_S = 10.0
"""from the connection to the last byte of `Joining`, however slowly the bytes come"""
MOST_BYTES = 1024
"""of `Joining`"""
MOST_ARRIVING = 64
"""connections that have not said who they are; of more, the oldest is closed"""


class Stranger(Exception):
    """A connection is of no rank: it has sent something else, or nothing in time."""


class Caller:
    """A connection that has not said who it is."""

    def __init__(self, end: socket.socket, now: float) -> None:
        self.socket = end
        self.until = now + GREETING_S
        self._data = bytearray()
        self._size = 0
        """of the message; 0: unknown"""
        end.setblocking(False)

    def read(self) -> Joining | None:
        """Read what has come, and no byte behind `Joining`. None: more is to come. Raises Stranger."""
        try:
            got = self.socket.recv((self._size or LENGTH.size) - len(self._data))
        except BlockingIOError:
            return None
        except OSError as error:
            raise Stranger(str(error)) from None
        if not got:
            raise Stranger("it has closed the connection")
        self._data += got
        if not self._size and len(self._data) == LENGTH.size:
            (self._size,) = LENGTH.unpack(self._data)
            self._data.clear()
            if not 0 < self._size <= MOST_BYTES:
                raise Stranger(f"a message of {self._size} bytes")
        if not self._size or len(self._data) < self._size:
            return None
        try:
            return msgspec.msgpack.decode(self._data, type=Joining)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Stranger(str(error)) from None


class Reception:
    """Greets what connects to `listener`. secret: that a rank says."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener = listener
        self._secret = secret.encode()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._callers: dict[socket.socket, Caller] = {}
        """oldest first"""
        self._paused_until = math.inf
        """when connections are taken again (time.monotonic); infinite: they are taken"""
        self._told = False
        """that none can be taken"""
        listener.setblocking(False)

    def next(self, until: float) -> tuple[socket.socket, Joining]:
        """Wait for the next rank. Returns its connection and what it said. Raises TimeoutError at `until`, time.monotonic."""
        while (now := time.monotonic()) < until:
            if now >= self._paused_until:
                self._resume()
            ends = [until, self._paused_until, *(caller.until for caller in self._callers.values())]
            for key, _ in self._selector.select(max(0.0, min(ends) - now)):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                caller = self._callers.get(key.fileobj)  # type: ignore[call-overload]
                if caller is not None and (joining := self._read(caller)) is not None:  # it may have been dropped since
                    self._forget(caller.socket)
                    return caller.socket, joining
            for caller in [each for each in self._callers.values() if time.monotonic() >= each.until]:
                self._drop(caller)
        raise TimeoutError

    def close(self) -> None:
        """Close all connections of which nothing was heard. May be repeated."""
        for caller in list(self._callers.values()):
            self._drop(caller)
        self._selector.close()

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:
                self._pause(error)
            return  # others: it has gone
        self._told = False
        self._callers[end] = Caller(end, time.monotonic())
        self._selector.register(end, selectors.EVENT_READ)
        if len(self._callers) > MOST_ARRIVING:
            self._drop(next(iter(self._callers.values())))

    def _pause(self, error: OSError) -> None:
        """Take no connection before a caller has left, or for PAUSE_S: the listener would be ready at once, again and again."""
        if not self._told:
            log.error("no rank can connect: %s; callers=%d: raise ulimit -n", error.strerror, len(self._callers))
        self._told = True
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + PAUSE_S

    def _resume(self) -> None:
        if self._paused_until < math.inf:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._paused_until = math.inf

    def _read(self, caller: Caller) -> Joining | None:
        """Return what a rank says, once it is whole and has the secret."""
        try:
            joining = caller.read()
        except Stranger:
            self._drop(caller)
            return None
        if joining is not None and not compare_digest(joining.secret.encode(), self._secret):
            self._drop(caller)
            return None
        return joining

    def _drop(self, caller: Caller) -> None:
        self._forget(caller.socket)
        caller.socket.close()
        self._resume()

    def _forget(self, end: socket.socket) -> None:
        self._selector.unregister(end)
        del self._callers[end]
