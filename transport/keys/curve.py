"""CURVE on a socket: https://rfc.zeromq.org/spec/26/."""

from __future__ import annotations

import secrets

import zmq

from rollout.transport.keys.authenticator import DOMAIN
from rollout.transport.keys.files import BadKeys, ClientKeys, ServiceKeys
from rollout.transport.keys.ring import LEAST_NONCE_BYTES

LEAST_LIBZMQ = (4, 3, 5)
FRAME_BYTES = 33
"""bytes that encryption adds to a frame: name of the command, nonce, flags, authenticator"""


def check_libzmq() -> None:
    """Raises BadKeys for a libzmq without reliable CURVE support."""
    if zmq.zmq_version_info() < LEAST_LIBZMQ or not zmq.has("curve"):
        raise BadKeys(
            f"keys need libzmq {'.'.join(map(str, LEAST_LIBZMQ))} or later with CURVE, this is {zmq.zmq_version()}: "
            "pip install --upgrade --only-binary :all: pyzmq"
        )


def guard(sock: zmq.Socket[bytes], keys: ServiceKeys) -> None:
    """Accept only connections that the authenticator of this context accepts; without one, none."""
    check_libzmq()
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    sock.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def introduce(sock: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Set the client's key, and the key of the service that it accepts."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    renew_routing_id(sock)


def renew_routing_id(sock: zmq.Socket[bytes]) -> None:
    """Choose a new random routing id: messages to a routing id reach every peer that has it, and the service must not confuse a
    new connection with an old one."""
    sock.setsockopt(zmq.ROUTING_ID, b"\1" + secrets.token_bytes(LEAST_NONCE_BYTES))
