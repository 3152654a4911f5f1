"""One message of every kind, and ways to break their frames."""

from __future__ import annotations

import random
from typing import Any, get_args

import msgspec
import numpy as np

from rollout.engine.values import Limits, PartialSample, Refreshed, Routing, Sample, Sampling, TokenChunk
from rollout.transport import messages as m
from rollout.transport.columns import pack_partials, pack_progress, pack_samples
from rollout.transport.frames import DTYPES, pack
from rollout.transport.weights.cuda_ipc import CudaIpcOffer
from rollout.transport.weights.delta import DeltaOffer
from rollout.transport.weights.distributed import DistributedOffer
from rollout.transport.weights.files import FilesOffer
from rollout.transport.weights.inline import InlineOffer
from rollout.transport.weights.shm import ShmOffer

SAMPLING = Sampling(
    n=3, max_tokens=9, min_tokens=1, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, stop_token_ids=(7, 8), seed=2**62
)

PARTIALS = [
    PartialSample(
        index=index,
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        weight_versions=spans,
        raw_logprobs=np.full(len(tokens), -1.5, np.float32),
        top_ids=np.arange(2 * len(tokens), dtype=np.int32).reshape(-1, 2),
        top_logprobs=np.full((len(tokens), 2), -0.25, np.float32),
        kv_versions=kv,
        routed_experts=np.arange(6 * len(tokens), dtype=np.uint8).reshape(-1, 3, 2),
    )
    for index, tokens, spans, kv in ((0, [11, 5, 9], [(0, 3), (1, 4)], [(1, 0, 3), (1, 7, 4)]), (2, [40], [(0, 4)], []))
]


def _chunk(index: int, first: int, tokens: list[int], spans: list[tuple[int, int]]) -> TokenChunk:
    values = np.full(len(tokens), -0.5, np.float32)
    return TokenChunk(
        index=index, first=first, token_ids=np.array(tokens, np.int32), logprobs=values, weight_versions=spans, seed=2**62
    )


CLIENT_MESSAGES: list[msgspec.Struct] = [
    m.Hello(m.PROTOCOL, "0123456789abcdef" * 2, 5, "träiner", ("a",), np.arange(32, dtype=np.uint8).reshape(2, 16)),
    m.Hello(m.PROTOCOL, "f" * 32),
    m.Submit("grüppe/1", np.array([5, 0, 2**31 - 1], np.int32), SAMPLING, 17),
    m.Submit("", np.zeros(0, np.int32), Sampling()),
    m.Submit("g", np.array([5], np.int32), SAMPLING, 18, indices=(0, 2), partials=pack_partials(PARTIALS)),
    m.Submit("g", np.array([5], np.int32), SAMPLING, 19, indices=(0, 2), partials=pack_partials(PARTIALS), score=True),
    m.Submit("g", np.array([5], np.int32), SAMPLING, 19, after=("grüppe/1", 3)),
    m.Submit("g", np.array([5], np.int32), SAMPLING, 19, partials=pack_partials(PARTIALS), score=True, redraw=True),
    m.Submit("g", np.array([5], np.int32), SAMPLING, 20, 4, require_digest="ab" * 32),
    m.Abort(["a", "b"]),
    m.Ack([("a", 0), ("a", 1)]),
    m.Ack([], 7),
    m.StatusRequest(2**63),
    m.Heartbeat(),
    m.Goodbye(),
    m.Hello(m.PROTOCOL, "f" * 32, alone=True),
    m.Begin(1, "ab" * 16, np.arange(9, dtype=np.uint8), InlineOffer(), 7, True, "recompute"),
    m.Begin(1, "ab" * 16, np.arange(9, dtype=np.uint8), InlineOffer(), adapter=np.arange(5, dtype=np.uint8), base="ab" * 32),
    m.Begin(1, "ab" * 16, np.zeros(0, np.uint8), ShmOffer(1, 2, 3, 4, "00")),
    m.Begin(1, "ab" * 16, np.zeros(0, np.uint8), DeltaOffer(7, "ab" * 32, 4096)),
    m.Begin(1, "ab" * 16, np.zeros(0, np.uint8), FilesOffer("/checkpoints/7")),
    m.Begin(1, "ab" * 16, np.zeros(0, np.uint8), DistributedOffer("gloo", "127.0.0.1", 1, "cd" * 16, 4, "ef" * 32)),
    m.Begin(1, "ab" * 16, np.zeros(0, np.uint8), CudaIpcOffer(np.arange(9, dtype=np.uint8), np.zeros((2, 3), np.int64))),
    m.Prepare(3, "ab" * 16),
    m.Chunk(2, "ab" * 16, 2**40, [np.arange(5, dtype=np.uint8), np.zeros(0, np.uint8)]),
    m.Commit(3, "ab" * 16, "00ff"),
    m.Abandon(4, "ab" * 16),
    m.WeightsRequest(5, True),
    m.Share(5),
    m.Control(6, "drain"),
    m.Replicas(9, "scale", 4),
    m.Sleep(7, 2),
    m.Wake(8),
    m.Wake(9, ("weights",)),
]

SERVICE_MESSAGES: list[msgspec.Struct] = [
    m.Welcome(1, 5, "00ff", "model", 49152, 8192, (0, 2), 3, Limits(max_n=5), ("weights",)),
    m.Welcome(1, 0, "", "", 1, 1, (), 0, Limits(), (), m.digests([bytes(16), b"0123456789abcdef"])),
    m.Welcome(1, 5, "00ff", "model", 49152, 8192, (0, 2), 3, Limits(), routing=Routing((1, 2), 8, 512, 3)),
    m.Refused("invalid_request", "n=0: must be …", "g"),
    m.Refused("busy", "later", None, 3),
    pack_samples(
        ["g"],
        [
            Sample(
                group_id="g",
                index=2,
                token_ids=np.array([1, 2], np.int32),
                logprobs=np.array([-0.5, np.nan], np.float32),
                finish_reason="length",
                weight_versions=[(0, 4), (1, 5)],
                prompt_tokens=3,
                raw_logprobs=np.array([-1.5, -np.inf], np.float32),
                seconds=0.25,
                top_ids=np.array([[1, 5], [2, -1]], np.int32),
                top_logprobs=np.array([[-0.5, -0.75], [0.0, -np.inf]], np.float32),
                kv_versions=[(1, 0, 4), (1, 3, 5)],
                routed_experts=np.arange(16, dtype=np.uint16).reshape(2, 2, 4),
                prompt_routed_experts=np.zeros((2, 2, 4), np.uint16),
            )
        ],
    ),
    pack_samples(
        ["g"],
        [
            Sample(
                group_id="g",
                index=0,
                token_ids=np.zeros(0, np.int32),
                logprobs=np.zeros(0, np.float32),
                finish_reason="error",
                weight_versions=[],
                prompt_tokens=3,
                error="why",
            )
        ],
    ),
    pack_samples(
        ["g", "h", "g"],
        [
            Sample(
                group_id="",
                index=index,
                token_ids=np.array(tokens, np.int32),
                logprobs=np.full(len(tokens), -0.5, np.float32),
                finish_reason="stop",
                weight_versions=spans,
                prompt_tokens=3,
                raw_logprobs=np.full(len(tokens), -1.5, np.float32),
                error=why,
                seconds=0.25,
                offloads=index,
                seed=2**62,
                top_ids=np.arange(2 * len(tokens), dtype=np.int32).reshape(-1, 2),
                top_logprobs=np.full((len(tokens), 2), -0.25, np.float32),
                text_end=9,
            )
            for index, tokens, spans, why in ((2, [1, 2], [(0, 4), (1, 5)], None), (0, [], [], "why"), (1, [7], [(0, 5)], None))
        ],
    ),
    pack_progress(
        3, {"g": [_chunk(0, 4, [7, 8, 9], [(0, 4), (2, 5)]), _chunk(2, 0, [5], [(0, 5)])], "h": [_chunk(1, 9, [6], [(0, 5)])]}
    ),
    m.StatusReply(4, b'{"a": 1}'),
    m.Alive(2**64 - 1, 3, 2**40),
    m.Alive(5, 3, digest="ab" * 32),
    m.Closing("stopped"),
    m.Lease(1, 8, 30.0, 2**40),
    m.Staged(2),
    m.Applied(
        3,
        Refreshed(version=8, via="shm", bytes=2**40, seconds=0.5, staged_seconds=0.25, paused_seconds=0.125, digest="00ff"),
    ),
    m.Asleep(3, 1 << 40),
    m.Done(4),
]

UNIONS: list[tuple[Any, list[msgspec.Struct]]] = [
    (m.ClientMessage, CLIENT_MESSAGES),
    (m.ServiceMessage, SERVICE_MESSAGES),
]


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, arrays and their dtypes included; a NaN equals itself."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def kinds(union: Any) -> set[type]:
    return set(get_args(union))


HEADERS = [
    b"",
    b"\xc0",
    b"\x91" * 100_000,  # lists in lists
    b"\x81\xa1a" * 50_000,  # maps in maps
    b"\xdd\xff\xff\xff\xff",  # a list of 2**32 - 1 items that are not there
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\x00\x00\x00\x01\x05x",  # an extension type
    b"\xa2\xff\xfe",  # no UTF-8
    b"\x81\xa4type\xa5bogus",
    b"\x81\xa4type\x05",
    b"\x82\xa4type\xa5alive\xa4type\xa5alive",
    b"\xc1",  # a byte that MessagePack never uses
    b"GET / HTTP/1.1\r\n\r\n",
]

REFERENCES: list[Any] = [
    None, 1, "1", [], [1], [1, "int32"], [1, "int32", [2], 0], [0, "int32", [2]], [-1, "int32", [2]], [99, "int32", [2]],
    [True, "int32", [2]], [1.0, "int32", [2]], [2**63, "int32", [2]], [1, "object", [2]], [1, "O", [2]], [1, "|O", [2]],
    [1, "V8", [2]], [1, "datetime64", [2]], [1, "U4", [2]], [1, "int64", [2]], [1, 3, [2]], [1, None, [2]], [1, "int32", 2],
    [1, "int32", [-1]], [1, "int32", [-2, -1]], [1, "int32", [2.0]], [1, "int32", [True, 2]], [1, "int32", ["2"]],
    [1, "int32", [2**63, 2]], [1, "int32", [2**32, 2**32]], [1, "int32", [0, 2**62, 2**62]], [1, "int32", [1] * 33],
    [1, "int32", [1] * 5000], [1, "int32", [[2]]], [1, "int32", {}], {"1": "int32"}, [1, "int32\0", [2]], [1, "<i4", [2]],
]  # fmt: skip


def mutate(rng: random.Random, valid: list[bytes]) -> list[bytes]:
    """Break frames that were a message, once or more. Some mutations leave a valid message."""
    frames = [bytearray(frame) for frame in valid]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(frames)) if frames else -1
        match rng.randrange(12):
            case 0 | 1 if frames and frames[at]:  # another bit
                frames[at][rng.randrange(len(frames[at]))] ^= 1 << rng.randrange(8)
            case 2 if frames:  # truncated
                del frames[at][rng.randrange(len(frames[at]) + 1) :]
            case 3 if frames:
                del frames[at]
            case 4 if frames:
                frames.insert(rng.randrange(len(frames) + 1), bytearray(frames[at]))
            case 5:
                frames.insert(rng.randrange(len(frames) + 1), bytearray(rng.randbytes(rng.choice((0, 1, 4, 16, 500)))))
            case 6:
                frames[:1] = [bytearray(rng.choice(HEADERS))]
            case 7:
                frames[:1] = [bytearray(rng.randbytes(rng.randrange(200)))]
            case 8 if frames:
                frames[0] = bytearray(_other_values(rng, bytes(frames[0])))
            case 9 if frames and frames[at]:  # another run of bytes
                start = rng.randrange(len(frames[at]))
                frames[at][start : start + 8] = rng.randbytes(rng.randrange(12))
            case 10:
                rng.shuffle(frames)
            case 11:
                frames += [bytearray(b"x")] * rng.choice((1, 3, 100))
    return [bytes(frame) for frame in frames]


def _other_values(rng: random.Random, header: bytes) -> bytes:
    """Make a well-formed header with one value exchanged, a field more or a field less."""
    try:
        fields = msgspec.msgpack.decode(header)
    except Exception:
        return header
    if not isinstance(fields, dict) or not fields:
        return header
    name = rng.choice(list(fields))
    strange = [
        None, True, -1, 2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"), "", "x" * 1000, b"\0", [], {}, [[[[]]]],
        {"n": 1}, [1] * 300, ["a"] * 100, rng.choice(list(DTYPES)), *REFERENCES,
    ]  # fmt: skip
    match rng.randrange(4):
        case 0:
            del fields[name]
        case 1:
            fields[rng.choice(("extra", "prompt", "group_id", "groups", "type"))] = rng.choice(strange)
        case 2 if isinstance(fields[name], dict) and fields[name]:
            fields[name][rng.choice(list(fields[name]))] = rng.choice(strange)
        case _:
            fields[name] = rng.choice(strange)
    try:
        return msgspec.msgpack.encode(fields)
    except Exception:
        return header


def valid_frames(messages: list[msgspec.Struct]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in pack(message)] for message in messages]
