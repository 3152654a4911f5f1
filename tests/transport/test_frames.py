"""message <-> frames: every kind there and back, without copies, and nothing but ProtocolError for anything else."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.engine.values import Limits, Sampling
from rollout.transport import frames as frames_module
from rollout.transport import messages as m
from rollout.transport.errors import InvalidRequest, ProtocolError
from rollout.transport.frames import DTYPES, Decoder, frame_bytes, pack
from tests.support.wire_fuzz import CLIENT_MESSAGES, HEADERS, REFERENCES, UNIONS, kinds, mutate, same, valid_frames

FUZZED = 20_000


@pytest.mark.parametrize(("union", "messages"), UNIONS, ids=["client", "service"])
def test_every_message_there_and_back(union: Any, messages: list[msgspec.Struct]) -> None:
    assert {type(message) for message in messages} == kinds(union)
    decoder: Decoder[Any] = Decoder(union, Limits())
    for message in messages:
        frames = pack(message)
        assert same(message, decoder.unpack(frames))
        assert same(message, decoder.unpack([bytes(frame) for frame in frames]))


def test_same_sees_a_difference() -> None:
    submit = CLIENT_MESSAGES[2]
    assert isinstance(submit, m.Submit)
    assert not same(submit, msgspec.structs.replace(submit, prompt=submit.prompt + 1))
    assert not same(submit, msgspec.structs.replace(submit, prompt=submit.prompt.astype(np.int64)))
    assert not same(submit, msgspec.structs.replace(submit, sampling=Sampling()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_and_layout(dtype: str) -> None:
    decoder: Decoder[m.Submit] = Decoder(m.Submit, Limits())
    whole = np.arange(24).astype(dtype).reshape(2, 3, 4)
    for array in (
        whole,
        whole[:, ::2],
        whole.T,
        whole[:0],
        whole[0, 0, 0:1].reshape(()),
        whole.astype(whole.dtype.newbyteorder(">")),
    ):
        back = decoder.unpack(pack(m.Submit("g", array, Sampling()))).prompt
        assert back.dtype == DTYPES[dtype] and back.shape == array.shape
        assert np.array_equal(back, array)


def test_no_copies() -> None:
    prompt = np.arange(1000, dtype=np.int32)
    frames = pack(m.Submit("g", prompt, Sampling()))
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), prompt)
    received = bytearray(frames[1])
    back = Decoder[m.Submit](m.Submit, Limits()).unpack([frames[0], memoryview(received)]).prompt
    received[0] = 99
    assert back[0] == 99
    # what is not laid out as on the wire has to be copied, and this test would see it
    strided = pack(m.Submit("g", prompt[::2], Sampling()))
    assert not np.shares_memory(np.frombuffer(strided[1], np.int32), prompt)


def test_frame_bytes() -> None:
    frames = pack(m.Submit("g", np.arange(10, dtype=np.int32), Sampling()))
    assert frame_bytes(frames) == len(frames[0]) + 40


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"]),
        np.array([object()]),
        np.array([1 + 2j]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.array([True]),
        np.zeros(2, "i4,i4"),
    ],
)
def test_what_cannot_travel_is_refused(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="cannot send array of"):
        pack(m.Submit("g", array, Sampling()))


def test_objects_cannot_travel() -> None:
    with pytest.raises(TypeError, match="cannot send object"):
        pack(m.Submit("g", object(), Sampling()))  # type: ignore[arg-type]


def refusal(frames: list[bytes], union: Any = m.ClientMessage, limits: Limits | None = None) -> str:
    decoder: Decoder[Any] = Decoder(union, limits or Limits())
    with pytest.raises(ProtocolError) as caught:
        decoder.unpack(frames)
    assert same(CLIENT_MESSAGES[2], Decoder[Any](m.ClientMessage, Limits()).unpack(pack(CLIENT_MESSAGES[2])))
    return caught.value.message


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: repr(reference)[:30])
def test_array_references_are_checked(reference: Any) -> None:
    header = {"type": "submit", "group_id": "g", "sampling": {}, "prompt": reference}
    refusal([msgspec.msgpack.encode(header), b"8 bytes."])
    header["prompt"] = [1, "int32", [2]]  # and the reference alone was wrong
    Decoder[Any](m.ClientMessage, Limits()).unpack([msgspec.msgpack.encode(header), b"8 bytes."])


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: repr(header)[:20])
def test_hostile_headers(header: bytes) -> None:
    for union in (m.ClientMessage, m.ServiceMessage):
        refusal([header], union)


def test_every_frame_is_named_once() -> None:
    submit = pack(CLIENT_MESSAGES[2])
    assert "1 array frames came, the header names 0" in refusal([*pack(m.Heartbeat()), b""])
    assert "the header names 1" in refusal([*map(bytes, submit), b"more"])
    samples = {"type": "samples", "group_ids": ["g"], "seeds": [0], "prompt_tokens": [1], "ended": []}
    header = msgspec.msgpack.encode({**samples, "token_ids": [1, "int32", [1]], "logprobs": [1, "int32", [1]]})
    assert "two arrays name frame 1" in refusal([header, b"four"], m.ServiceMessage)


def test_sizes_are_limited_before_anything_is_read() -> None:
    limits = Limits(max_frames=3, max_header_bytes=200, max_frame_bytes=300)
    assert "4 frames" in refusal([b"", b"", b"", b""], limits=limits)
    assert "0 frames" in refusal([], limits=limits)
    assert "header of 201 bytes" in refusal([b"\x91" * 201], limits=limits)
    assert "frame of 301 bytes" in refusal([b"", bytes(301)], limits=limits)


def test_unknown_fields_and_wrong_directions() -> None:
    heartbeat = msgspec.msgpack.encode({"type": "heartbeat", "more": 1})
    assert "not a message of this protocol: " in refusal([heartbeat])
    assert "not a message of this protocol: " in refusal([bytes(frame) for frame in pack(m.Heartbeat())], m.ServiceMessage)
    future = {"type": "hello", "protocol": 4, "session": "0" * 32, "more": 1}  # a newer client must be told its version
    assert Decoder[Any](m.ClientMessage, Limits()).unpack([msgspec.msgpack.encode(future)]).protocol == 4


def test_a_sampling_that_is_refused_concerns_its_group() -> None:
    """Other values that cannot be, and ids that are too long, concern the message."""
    header = {"type": "submit", "group_id": "g", "sampling": {"n": 0}, "prompt": [1, "int32", [2]]}
    with pytest.raises(InvalidRequest, match="n=0: must be at least 1") as caught:
        Decoder[Any](m.ClientMessage, Limits()).unpack([msgspec.msgpack.encode(header), b"8 bytes."])
    assert caught.value.group_id == "g"
    assert "Expected `int`" in refusal([msgspec.msgpack.encode(header | {"sampling": {"n": "0"}}), b"8 bytes."])
    assert "n=0: must be" in refusal([msgspec.msgpack.encode(header | {"group_id": "g" * 200}), b"8 bytes."])


def escapes(decoder: Decoder[Any], rng: random.Random, valid: list[list[bytes]], count: int) -> tuple[int, list[str]]:
    """(messages refused, what came out other than a message, ProtocolError or a refused `Sampling`)."""
    refused, escaped = 0, []
    for _ in range(count):
        frames = mutate(rng, rng.choice(valid))
        try:
            decoder.unpack(frames)
        except (ProtocolError, InvalidRequest):
            refused += 1
        except BaseException as error:
            escaped.append(f"{type(error).__name__}: {error}")
    return refused, escaped


@pytest.mark.parametrize(("union", "messages"), UNIONS, ids=["client", "service"])
def test_fuzzed_frames(union: Any, messages: list[msgspec.Struct]) -> None:
    decoder: Decoder[Any] = Decoder(union, Limits())
    refused, escaped = escapes(decoder, random.Random(7), valid_frames(messages), FUZZED // 2)
    assert not escaped
    assert FUZZED // 2 * 0.6 < refused < FUZZED // 2  # most are broken, and some of the mutations pass
    for message in messages:  # the decoder is as good as new
        assert same(message, decoder.unpack(pack(message)))


def test_the_fuzzer_would_find_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MALFORMED", ())
    _, escaped = escapes(Decoder(m.ClientMessage, Limits()), random.Random(7), valid_frames(CLIENT_MESSAGES), 500)
    assert {text.split(":")[0] for text in escaped} >= {"DecodeError", "ValidationError"}
