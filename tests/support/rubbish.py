"""A peer that sends broken messages."""

from __future__ import annotations

import random

import zmq

from rollout.transport import messages as m
from rollout.transport.frames import pack
from rollout.transport.keys.cookie import ClientCookie
from tests.support.wire_fuzz import CLIENT_MESSAGES, mutate, valid_frames

WAIT = 120.0
"""for what comes: a bound for hangs only"""


def rubbish(endpoint: str, count: int, seed: int) -> int:
    """Send broken messages as a peer that reads none of the answers for long, and connects again when it is thrown out."""
    rng = random.Random(seed)
    valid = valid_frames([each for each in CLIENT_MESSAGES if not isinstance(each, m.Control | m.Sleep | m.Wake)])
    sent = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 30_000  # all of it arrives
        dealer.sndhwm = 50  # no faster than the service takes it
        ClientCookie(endpoint).show(dealer)
        dealer.connect(endpoint)
        while sent < count:
            if not dealer.poll(1000 * WAIT, zmq.POLLOUT):
                raise AssertionError("the service takes nothing any more")
            if rng.random() < 0.05:
                dealer.send_multipart(pack(m.Hello(m.PROTOCOL, f"{rng.randrange(5):032x}")))
            dealer.send_multipart(mutate(rng, rng.choice(valid)) or [b""])
            sent += 1
            while rng.random() < 0.3 and dealer.poll(0):
                dealer.recv_multipart()
    return sent
