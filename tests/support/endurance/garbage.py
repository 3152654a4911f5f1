"""An attacker:  python -m tests.support.endurance.garbage ENDPOINT SEED MESSAGES_A_SECOND COUNT_FILE

Sends mutated messages of every type over ZeroMQ, bytes that are no ZMTP over TCP, half a handshake that it leaves open, and
questions whose answers it never reads; and, to every port at which a child of its parent listens, what web pages and peers of
older protocols send. Until SIGTERM, or the end of its parent. Writes how many of each into COUNT_FILE.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq

from rollout.engine.values import Limits
from rollout.process import write_atomically
from rollout.transport import messages as m
from rollout.transport.errors import RolloutError
from rollout.transport.frames import Decoder, pack
from rollout.transport.keys.cookie import ClientCookie
from tests.support import by_hand
from tests.support.endurance.older import bare, believed, ports_below, request
from tests.support.wire_fuzz import CLIENT_MESSAGES, mutate, valid_frames

READY = by_hand.command(b"READY", by_hand.PROPERTIES)
HELLO = by_hand.command(b"HELLO", by_hand.text(b"rollout") + by_hand.text(b"no secret"))
PAGE = [bytes(pack(each)[0]) for each in (m.Hello(m.PROTOCOL, "e" * 32, 1, "page"), m.Control(1, "abort_all"))]
MOST_HALF_OPEN = 30
RECONNECT_EVERY = 4000
"""messages of one connection; then another one, which the service does not know. The old one stays until its messages are
taken, so attackers that change it more often than the service takes them would have ever more descriptors open there"""
TICK_S = 0.1
COUNTS_EVERY_S = 1.0
PORTS_EVERY_S = 5.0
OLDER = 0.15
"""share of the ticks in which a port gets what is no ZMTP 3"""

HARMFUL = m.Control | m.Sleep | m.Wake | m.Replicas
"""that do what they say when they are valid: sent only if broken"""


class Attacker:
    """`counts`: what was sent, by name."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self.endpoint = endpoint
        self.port = int(endpoint.rpartition(":")[2])
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.valid = valid_frames(CLIENT_MESSAGES)
        self.decoder = Decoder(m.ClientMessage, Limits())
        self.half_open: list[socket.socket] = []
        self.context = zmq.Context()
        self.dealer = self.connect()
        self.deaf = self.connect()

    def connect(self) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.sndhwm = 50  # no faster than the service takes it
        dealer.sndtimeo = 0  # nor does it wait: libzmq does not connect again where it was refused
        self.cookie = ClientCookie(self.endpoint)
        self.cookie.show(dealer)  # of this user: what it sends is read
        dealer.connect(self.endpoint)
        return dealer

    # over ZeroMQ

    def broken(self) -> list[bytes]:
        """Make frames that were a message; of those that would do harm only broken ones."""
        while True:
            frames = mutate(self.rng, self.rng.choice(self.valid)) or [b""]
            try:
                message = self.decoder.unpack(frames)
            except RolloutError:
                return frames
            if not isinstance(message, HARMFUL):
                return frames

    def send(self) -> None:
        """Send a broken message, if the service takes it."""
        if self.counts["messages"] % RECONNECT_EVERY == RECONNECT_EVERY - 1:
            self.dealer.close()
            self.dealer = self.connect()
        if not self.dealer.poll(0, zmq.POLLOUT):
            self.counts["not_taken"] += 1
            if self.cookie.is_old:  # another service is there, which does not let this connection in
                self.dealer.close()
                self.dealer = self.connect()
            return
        if self.rng.random() < 0.05:
            self._try(self.dealer, pack(m.Hello(m.PROTOCOL, f"{self.rng.randrange(5):032x}", name="attacker")))
        self._try(self.dealer, self.broken())
        self.counts["messages"] += 1
        while self.rng.random() < 0.6 and self.dealer.poll(0):
            self.dealer.recv_multipart()

    def ask_deaf(self) -> None:
        """Ask for a status whose answer is never read; now and then anew."""
        if self.rng.random() < 0.02:
            self.deaf.close()
            self.deaf = self.connect()
            self.counts["deaf"] += 1
        if self.deaf.poll(0, zmq.POLLOUT):
            self._try(self.deaf, pack(m.Hello(m.PROTOCOL, "d" * 32, name="deaf")))
            self._try(self.deaf, pack(m.StatusRequest(self.rng.randrange(2**32))))

    def _try(self, dealer: zmq.Socket[bytes], frames: list[Any]) -> None:
        """Send a message, or count it as one that was not taken."""
        try:
            dealer.send_multipart(frames)
        except zmq.Again:
            self.counts["not_taken"] += 1

    # over TCP

    def raw(self) -> None:
        """Send bytes that are no ZMTP, or the beginning of one; or leave a handshake half done."""
        try:
            raw = socket.create_connection(("127.0.0.1", self.port), timeout=1.0)
        except OSError:
            return
        try:
            half = self.rng.random() < 0.3
            greeting = self.rng.choice((by_hand.NULL, by_hand.GREETING))
            if half:
                raw.sendall(self.rng.choice((b"", greeting[: self.rng.randrange(64)], greeting)))
            else:
                begin = self.rng.choice((b"", greeting[: self.rng.randrange(64)], greeting, by_hand.GREETING + HELLO))
                begin = self.rng.choice((begin, greeting + READY, by_hand.post(*PAGE), by_hand.version_1(b"", *PAGE)))
                raw.sendall(begin + self.rng.randbytes(self.rng.randrange(300)))
                if self.rng.random() < 0.3:
                    raw.sendall(greeting + b"\x02" + b"\xff" * 8)  # a frame of 2**64 - 1 bytes
        except OSError:
            half = False  # thrown out already
        self.counts["half_handshakes" if half else "raw"] += 1
        if not half:
            raw.close()
            return
        self.half_open.append(raw)
        if len(self.half_open) > MOST_HALF_OPEN:
            self.half_open.pop(0).close()

    def send_older(self, ports: list[int]) -> None:
        """Send one of the ports what a web page, or a peer of an older protocol sends."""
        if ports:
            port = self.rng.choice(ports)
            kind, data = ("pages", request(port, self.rng)) if self.rng.random() < 0.5 else ("older_peers", bare(self.rng))
            self.counts[kind] += 1
            self.counts["believed"] += believed(port, data)

    def run(self, rate: float, counts: Path) -> None:
        """Keep the rate; what could not be sent while the service was gone is not made up for."""
        parent = os.getppid()
        ports: list[int] = []
        looked = float("-inf")
        over: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: over.append(number))
        told = 0.0
        while not over and os.getppid() == parent:
            started = time.monotonic()
            for _ in range(max(1, round(rate * TICK_S))):
                self.send()
            self.raw()
            self.ask_deaf()
            if started - looked > PORTS_EVERY_S:
                looked, ports = started, ports_below(parent)
            if self.rng.random() < OLDER:
                self.send_older(ports)
            if started - told > COUNTS_EVERY_S:
                told = started
                write_atomically(counts, json.dumps(self.counts))
            time.sleep(max(0.0, TICK_S - (time.monotonic() - started)))
        write_atomically(counts, json.dumps(self.counts))
        self.context.destroy(linger=0)


def main() -> None:
    endpoint, seed, rate, counts = sys.argv[1:]
    Attacker(endpoint, int(seed)).run(float(rate), Path(counts))


if __name__ == "__main__":
    main()
