"""What connects to rank 0 and is no rank is dropped, costs little, and delays no rank."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rollout.engine.parallel import greeting
from rollout.engine.parallel.greeting import MOST_ARRIVING, MOST_BYTES, Reception
from rollout.engine.parallel.messages import LENGTH, Joining, RankChannel, Reply
from rollout.engine.parallel.messages import MOST_BYTES as MOST_OF_A_RANK

WAIT = 60.0
SECRET = "s" * 32
RANK = Joining(1, 7, "host", SECRET)


@pytest.fixture
def place() -> Iterator[tuple[Reception, tuple[str, int]]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reception = Reception(listener, SECRET)
        yield reception, listener.getsockname()
        reception.close()


def said(message: Joining) -> bytes:
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def connected(address: tuple[str, int], data: bytes = b"") -> socket.socket:
    end = socket.create_connection(address, WAIT)
    end.sendall(data)
    return end


STRANGERS = {
    "a length of 2**40": LENGTH.pack(1 << 40) + b"x" * 100,
    "a length above the bound": LENGTH.pack(MOST_BYTES + 1),
    "nothing in it": LENGTH.pack(0),
    "another secret": said(msgspec.structs.replace(RANK, secret="t" * 32)),
    "a secret of other letters": said(msgspec.structs.replace(RANK, secret="é")),
    "no msgpack": LENGTH.pack(4) + b"\xc1\xc1\xc1\xc1",
    "another message": LENGTH.pack(1) + b"\x01",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "it goes": b"",
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_dropped_and_the_rank_after_it_comes(kind: str, place: tuple[Reception, tuple[str, int]]) -> None:
    reception, address = place
    stranger = connected(address, STRANGERS[kind])
    if kind == "it goes":
        stranger.close()
    rank = connected(address, said(RANK) + b"next")
    end, joining = reception.next(time.monotonic() + WAIT)
    assert joining == RANK and end.getpeername() == rank.getsockname()
    with pytest.raises(TimeoutError):
        reception.next(time.monotonic() + 0.05)  # so that the stranger's bytes are read
    assert not reception._callers
    end.settimeout(WAIT)
    assert end.recv(4) == b"next", "no byte behind the greeting is taken"
    for each in (stranger, rank, end):
        each.close()


def test_the_silent_and_the_slow_delay_no_rank(
    place: tuple[Reception, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other they would take their time each."""
    monkeypatch.setattr(greeting, "GREETING_S", 3600.0)
    reception, address = place
    others = [connected(address, b"\x01" * (i % 5)) for i in range(20)]
    rank = connected(address, said(RANK))
    end, joining = reception.next(time.monotonic() + WAIT)
    assert joining == RANK and len(reception._callers) == 20
    for each in (*others, rank, end):
        each.close()


def test_a_greeting_has_one_deadline_however_slowly_it_comes(
    place: tuple[Reception, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 0.3)
    reception, address = place
    slow = connected(address, LENGTH.pack(1000))
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.02):
            try:
                slow.send(b"x")
            except OSError:  # it was closed
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        reception.next(began + 1.0)
    assert not reception._callers
    ended.set()
    dripping.join(WAIT)
    slow.close()


def test_as_many_wait_as_are_bounded(place: tuple[Reception, tuple[str, int]]) -> None:
    reception, address = place
    others = [connected(address) for _ in range(MOST_ARRIVING + 20)]
    rank = connected(address, said(RANK))
    end, joining = reception.next(time.monotonic() + WAIT)
    assert joining == RANK and len(reception._callers) <= MOST_ARRIVING
    for each in (*others, rank, end):
        each.close()


class Full:
    """A listener for which there are no descriptors, so many times."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self._listener = listener
        self.left = times
        self.tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.left > 0:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


@pytest.mark.parametrize("leaves", [False, True])
def test_without_descriptors_it_waits_and_says_so(
    leaves: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For PAUSE_S, or until a caller has left; it is told once."""
    monkeypatch.setattr(greeting, "PAUSE_S", 3600.0 if leaves else 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        full = Full(listener, 0)
        reception = Reception(full, SECRET)  # type: ignore[arg-type]
        silent = connected(listener.getsockname())
        with pytest.raises(TimeoutError):
            reception.next(time.monotonic() + 0.05)
        assert full.tries == len(reception._callers) == 1
        full.left, full.tries = (1 if leaves else 3), 0
        rank = connected(listener.getsockname(), said(RANK))
        if leaves:
            with pytest.raises(TimeoutError):
                reception.next(time.monotonic() + 0.1)
            assert full.tries == 1
            silent.close()
        end, joining = reception.next(time.monotonic() + WAIT)
        assert joining == RANK and full.tries == (2 if leaves else 4)
        assert caplog.text.count("no rank can connect: Too many open files; callers=1") == 1
        reception.close()
        for each in (silent, rank, end):
            each.close()


def test_a_rank_that_sends_no_message_is_lost() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(LENGTH.pack(MOST_OF_A_RANK + 1))
        with pytest.raises(EOFError, match="a rank sends at most"):
            RankChannel(ours, Reply).recv()
