"""Records of a ledger: MessagePack arrays, whose first element says which record it is.

Things that many records share are written once and named by their numbers: tensors, sampling options, groups. Fields at the end
of a record that have their defaults are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec
import numpy as np

from rollout.engine.values import FinishReason, KVPolicy, Role, Sample, Sampling
from rollout.identity import numbered

REASONS: tuple[str, ...] = get_args(FinishReason)
"""finish reasons, by the number in a record: append only"""
POLICIES: tuple[str, ...] = get_args(KVPolicy)
ROLES: tuple[Role, ...] = ("draws", "truncates", "ends", "returns")
"""fields of `Sampling` in a record, without the seed, which is the group's; the others decide no sample"""
TENSOR_DIGEST, TOKEN_DIGEST, MARK = 8, 4, 2
"""bytes of the digest of a tensor, of a sample's tokens, and of each of its marks"""


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One record."""


class Started(Record, tag=0, frozen=True):
    """A service began to write, or begins a new file."""

    at: float
    """seconds since 1970"""
    arithmetic: str
    block_size: int
    kv_dtype: str
    vocab_size: int
    context: int
    eos_token_ids: tuple[int, ...]
    model: str
    version: int
    weights: bytes
    """`manifest_digest` of the live weights; empty: unknown"""
    configuration: bytes = b""
    """as `Welcome.configuration`"""
    tokenizer: bytes = b""
    """as `Welcome.tokenizer`"""
    goes_on: bool = False
    """the service is the one before: the file was full, or could not be written for a while"""


class TensorNamed(Record, tag=1, frozen=True):
    """The next tensor, as it is from the next `WeightsLive` on, or an old one with another dtype or shape."""

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightsLive(Record, tag=2, frozen=True):
    """Weights that are live now."""

    version: int
    digest: bytes
    """as `Started.weights`"""
    kv: int
    """number of the policy in POLICIES for running samples; -1: those that a service starts with"""
    digests: bytes
    """of each tensor that differs from what the ledger has so far: the first 8 bytes of its xxh3-128"""
    at: float = 0.0
    sent: bool = False
    """the tensors are as a trainer sent them, in its dtype; otherwise as they are in the model"""
    partial: bool = False
    adapter: bool = False
    """the tensors are those of an adapter"""
    numbers: tuple[int, ...] = ()
    """of these tensors; empty: all tensors that are named, in the order of their numbers"""


class HowSampled(Record, tag=3, frozen=True):
    """Sampling options of groups."""

    number: int
    fields: dict[int, Any]
    """by their places in `rollout.identity.OPTIONS`; those with their defaults are left out"""


class PromptTokens(Record, tag=4, frozen=True):
    """Tokens of a prompt, if they are asked for."""

    digest: bytes
    ids: bytes
    """[tokens] int32, little-endian"""


class GroupOpened(Record, tag=5, frozen=True):
    """A group was accepted."""

    number: int
    group_id: str
    client: int
    """number of the session"""
    version: int
    """of the live weights"""
    prompt: bytes
    """SHA-256 of the token ids, 20 bytes"""
    prompt_tokens: int
    how: int
    """number of its sampling options"""
    seed: int | None = None
    """None: the samples have it"""
    indices: tuple[int, ...] | None = None
    after: tuple[str, int] | None = None
    """the child that its prompt continues"""
    given: tuple[tuple[int, int], ...] = ()
    """(index, tokens) of children that had tokens"""
    given_digest: bytes = b""
    """of these tokens, and of all else that they bring into the samples"""


class SampleEnded(Record, tag=6, frozen=True):
    """A client gets a sample."""

    group: int
    index: int
    reason: int
    """number in REASONS"""
    tokens: int
    result: bytes
    """SHA-256 of tokens, log-probs and finish reason, 20 bytes"""
    token_digest: bytes
    """BLAKE2b of the tokens, 4 bytes"""
    marks: bytes = b""
    """BLAKE2b of the first 1, 2, 4, 8, … tokens with their log-probs, 2 bytes each"""
    weight_versions: tuple[int, ...] = ()
    """spans as one row of numbers; empty: all tokens are of the version of the group"""
    kv_versions: tuple[int, ...] = ()
    seed: int | None = None
    """of a group that had none"""
    ids: bytes = b""
    """tokens, int32, and log-probs, float32, if they are asked for"""
    logprobs: bytes = b""


class Lost(Record, tag=7, frozen=True):
    """Records are missing here: the file could not be written."""

    samples: int
    refreshes: int
    why: str


class Stopped(Record, tag=8, frozen=True):
    """The service ended in order, and the file with it; or the file was full and another one follows."""

    full: bool = False


AnyRecord = Started | TensorNamed | WeightsLive | HowSampled | PromptTokens | GroupOpened | SampleEnded | Lost | Stopped
decode = msgspec.msgpack.Decoder(AnyRecord).decode


pack = msgspec.msgpack.Encoder().encode


def encode(record: Record) -> bytes:
    """Encode a record."""
    row = [record.__struct_config__.tag, *msgspec.structs.astuple(record)]
    for default in reversed(record.__struct_defaults__):
        if row[-1] != default:
            break
        row.pop()
    return pack(row)


def fields_of(sampling: Sampling) -> dict[int, Any]:
    """Return the fields of sampling options for a record."""
    return numbered(msgspec.structs.replace(sampling, seed=None), ROLES)


def flat(spans: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return spans as one row of numbers."""
    return tuple(number for span in spans for number in span)


def spans_of(row: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    """Return the spans of a row of numbers. Raises ValueError for one of another length."""
    return [tuple(row[i : i + width]) for i in range(0, len(row), width)] if len(row) % width == 0 else _odd(row)


def _odd(row: tuple[int, ...]) -> list[tuple[int, ...]]:
    raise ValueError(f"spans of {len(row)} numbers")


def token_digest(ids: np.ndarray) -> bytes:
    """Return the digest of [tokens] int32."""
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=TOKEN_DIGEST).digest()


def mark_lengths(tokens: int) -> Iterator[int]:
    """Yield after how many tokens a sample of so many has marks: 1, 2, 4, 8, …"""
    length = 1
    while length < tokens:
        yield length
        length *= 2


def marks_of(sample: Sample) -> bytes:
    """Return the marks of a sample."""
    ids, logprobs = sample.token_ids.astype("<i4"), sample.logprobs.astype("<f4")
    return b"".join(
        hashlib.blake2b(ids[:length].tobytes() + logprobs[:length].tobytes(), digest_size=MARK).digest()
        for length in mark_lengths(len(ids))
    )
