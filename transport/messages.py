"""The messages, as msgspec tagged unions. docs/wire.md tells when each is sent and what answers it.

    client -> service:  Hello Submit Abort Ack StatusRequest Heartbeat Goodbye
    service -> client:  Welcome Refused SampleDone StatusReply Alive Closing

Adding one: define the Struct with its own tag, put it into the union of its direction, handle it on that side. A changed
meaning or a changed field raises PROTOCOL.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
import numpy as np

from engine.request import Limits, Sample, Sampling

PROTOCOL = 1
DIGEST_BYTES = 16

SessionId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class Hello(msgspec.Struct, frozen=True, eq=False, tag="hello"):
    """First message on every connection. Unknown fields pass, so that an end of another version can be told so."""

    protocol: int
    session: SessionId
    """made by the client, 128 random bits; who knows it owns the session's groups"""
    name: str = ""
    """for people: logs, status"""
    capabilities: tuple[str, ...] = ()
    groups: np.ndarray | None = None
    """[groups, DIGEST_BYTES] uint8: digests of the groups sent before and still wanted. Whatever else the service holds for
    this session is dropped, so aborts and acks that a broken link swallowed are made good here."""


class Submit(msgspec.Struct, frozen=True, eq=False, tag="submit", forbid_unknown_fields=True):
    """Take a group. Repeating it is harmless."""

    group_id: str
    prompt: np.ndarray
    """[prompt_tokens] int32"""
    sampling: Sampling
    serial: int = 0
    """part of the digest: tells two groups apart that use one id, one after the other, with the same content"""


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """End these groups; their unfinished children come back as "aborted". Unknown ids are nothing to do."""

    group_ids: list[str]


class Ack(msgspec.Struct, frozen=True, tag="ack", forbid_unknown_fields=True):
    """These samples (group id, index) have arrived; the service may forget them."""

    samples: list[tuple[str, int]]


class StatusRequest(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    request_id: int


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", forbid_unknown_fields=True):
    """The client lives; once a second."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye", forbid_unknown_fields=True):
    """The session ends now: abort its groups, forget it."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to Hello. Unknown fields pass, as in Hello."""

    protocol: int
    incarnation: str
    """random hex, new at each start of the service"""
    model: str
    vocab_size: int
    """rows of the embedding: token ids are 0 to vocab_size - 1"""
    context: int
    """most tokens of prompt + max_tokens"""
    eos_token_ids: tuple[int, ...]
    version: int
    """of the weights"""
    limits: Limits
    capabilities: tuple[str, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """A request is not served. `kind` is one of transport.errors.KINDS; with neither id it is about the message itself."""

    kind: str
    message: str
    group_id: str | None = None
    request_id: int | None = None


class SampleDone(msgspec.Struct, frozen=True, eq=False, tag="sample", forbid_unknown_fields=True):
    """One child has ended. Repeated after a reconnect until it is acked: tell repeats by (group_id, index)."""

    sample: Sample


class StatusReply(msgspec.Struct, frozen=True, tag="status_reply", forbid_unknown_fields=True):
    request_id: int
    status: bytes
    """a JSON object"""


class Alive(msgspec.Struct, frozen=True, tag="alive", forbid_unknown_fields=True):
    """The service's loop turns; once a second."""

    steps: int
    """steps of the engine since the service started"""
    version: int
    """of the weights"""


class Closing(msgspec.Struct, frozen=True, tag="closing", forbid_unknown_fields=True):
    """The service stops; nothing comes after this."""

    reason: str


ClientMessage = Hello | Submit | Abort | Ack | StatusRequest | Heartbeat | Goodbye
ServiceMessage = Welcome | Refused | SampleDone | StatusReply | Alive | Closing


def digest(submit: Submit) -> bytes:
    """DIGEST_BYTES bytes that two Submits share only if they ask for the same (BLAKE2b; a NaN equals itself)."""
    prompt = np.ascontiguousarray(submit.prompt)
    fields = (submit.group_id, submit.serial, prompt.dtype.name, prompt.shape, submit.sampling)
    state = hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=DIGEST_BYTES)
    state.update(prompt.reshape(-1).view(np.uint8).data)
    return state.digest()
