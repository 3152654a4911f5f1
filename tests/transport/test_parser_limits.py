"""What a client or a replica sends at its limit costs work that grows with its bytes, not with their square: it is counted.

Lines of Python are counted for an input of the largest size and for one of half of it (docs/limits.md has the table)."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.engine.scheduling.sequence import kv_at_end
from rollout.engine.values import Group, Limits, LoraTarget, Sample, Sampling, TensorInfo
from rollout.fleet.replica_status import read_status
from rollout.transport import messages as m
from rollout.transport.checks import NOTHING, check_sample
from rollout.transport.errors import RolloutError
from rollout.transport.frames import Decoder
from rollout.transport.messages import REPLICA_HEADER_BYTES
from rollout.transport.sockets import check_address
from rollout.transport.weights import delta
from rollout.transport.weights.files import METADATA_BYTES, OTHER_TENSORS, read_folder
from rollout.transport.weights.manifest import ENTRY_BYTES, pack_manifest, pack_targets, unpack_manifest, unpack_targets
from tests.support import counted

LIMITS = Limits()
MOST_LINES = 1_000_000
"""of Python, which runs some ten million in a second"""
LINEAR = 2.5
"""times the work of half the input: twice, and what is the same for both"""


def lines_of(work: Callable[[], Any]) -> int:
    """Count the lines of an answer; a refusal is one."""

    def answered() -> None:
        with suppress(ValueError, RolloutError):
            work()

    return counted.lines_of(answered)


def decoded(header: dict[str, Any]) -> Callable[[], object]:
    data = msgspec.msgpack.encode(header)
    assert len(data) <= LIMITS.max_header_bytes
    return lambda: Decoder(m.ClientMessage, LIMITS).unpack([data])


def spans(kind: str, count: int) -> Callable[[], object]:
    """A sample with so many spans: as many as a header holds."""
    tokens = np.zeros(count, np.int32)
    versions = [(i, i) for i in range(count)] if kind == "weights" else [(0, 1)]
    kv = {"weights": [], "positions": [(0, i, 1) for i in range(count)], "tokens": [(i, i % 2, i % 2) for i in range(count)]}[
        kind
    ]
    columns: dict[str, Any] = dict(
        token_ids=tokens, logprobs=np.full(count, -1, np.float32), weight_versions=versions, kv_versions=kv
    )
    sample = Sample(group_id="g", index=0, prompt_tokens=count, seed=1, finish_reason="length", **columns)
    group = Group("g", np.zeros(count, np.int32), Sampling(n=1, max_tokens=count, seed=1, max_kv_lag=9))
    return lambda: check_sample(sample, group, None, NOTHING._replace(vocab_size=9))


def status(value: Any, data_bytes: int) -> Callable[[], object]:
    """A replica's status with so many bytes of a value, as the router reads it."""
    one = json.dumps(value)
    count = data_bytes // (len(one) + 1)
    text = f'{{"groups": 0, "steps": 0, "generated_tokens": 0, "x": [{",".join([one] * count)}]}}'
    return lambda: read_status(json.loads(text))


def folder(entry: str, data_bytes: int) -> Callable[[], object]:
    """A folder of safetensors whose header has so many bytes of an entry."""
    entries = ",".join(entry % i for i in range(data_bytes // len(entry)))
    header = f"{{{entries}}}".encode()
    where = Path(tempfile.mkdtemp(prefix="rollout-parsers-"))
    (where / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(1))

    def read() -> None:
        try:
            read_folder(where, METADATA_BYTES + MANIFEST_ENTRIES * ENTRY_BYTES, OTHER_TENSORS + 2 * MANIFEST_ENTRIES)
        finally:
            shutil.rmtree(where)

    return read


def listed(name_bytes: int, count: int) -> Callable[[], object]:
    """A manifest of so many tensors, each with all dimensions that one may have."""
    tensors = [TensorInfo(f"{i:0{name_bytes}}", "float32", (1,) * 8, "0" * 32) for i in range(count)]
    packed = pack_manifest(tensors)
    return lambda: unpack_manifest(packed, MANIFEST_ENTRIES)


def targets(count: int) -> Callable[[], object]:
    packed = pack_targets([LoraTarget(f"{i:0300}", f"a{i}", f"b{i}", 1.0) for i in range(count)])
    return lambda: unpack_targets(packed, MANIFEST_ENTRIES)


def joins(count: int) -> Callable[[], object]:
    """A Join whose address is as long as its header allows."""
    header = {"type": "join", "protocol": m.PROTOCOL, "name": "a", "incarnation": "0" * 32, "pid": 1}
    header["address"] = "tcp://" + ":" * count
    data = msgspec.msgpack.encode(header)
    decoder: Decoder[m.ReplicaMessage] = Decoder(m.ReplicaMessage, LIMITS)

    def read() -> None:
        message = decoder.unpack([data])
        assert isinstance(message, m.Join)
        check_address(message.address)

    return read


def slice_of(data_bytes: int) -> Callable[[], object]:
    """Differences of a slice in which every element has changed."""
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 255, data_bytes, dtype=np.uint8) for _ in range(2))
    coded = np.frombuffer(delta.encode(old, new), np.uint8)
    return lambda: delta.decode(coded[:12].view("<u4"), coded[12:], old)


MANIFEST_ENTRIES = 2064
"""of a model of 1,000 tensors"""
PARSERS: dict[str, tuple[Callable[[int], Callable[[], object]], int]] = {
    "header of nested arrays": (lambda n: decoded({"type": "submit", "group_id": [[0]] * n}), 20_000),
    "header of unknown fields": (lambda n: decoded({"type": "hello", **{f"{i}": 0 for i in range(n)}}), 8_000),
    "header of many ids": (lambda n: decoded({"type": "abort", "group_ids": ["g"] * n}), 30_000),
    "spans of weights": (lambda n: spans("weights", n), 16_000),
    "spans of KV, by position": (lambda n: spans("positions", n), 16_000),
    "spans of KV, by token": (lambda n: spans("tokens", n), 16_000),
    "status of a replica, lists": (lambda n: status([], n), REPLICA_HEADER_BYTES),
    "status of a replica, numbers": (lambda n: status(1, n), REPLICA_HEADER_BYTES),
    "status of a replica, fractions": (lambda n: status(0.12345678901234567, n), REPLICA_HEADER_BYTES),
    "header of safetensors": (
        lambda n: folder('"%x":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1],"data_offsets":[0,1]}', n),
        METADATA_BYTES + MANIFEST_ENTRIES * ENTRY_BYTES,
    ),
    "manifest": (lambda n: listed(900, n), MANIFEST_ENTRIES),
    "targets of an adapter": (targets, MANIFEST_ENTRIES),
    "join": (joins, 60_000),
    "differences of a slice": (slice_of, delta.SLICE_BYTES),
    "spans of KV of a partial sample": (lambda n: lambda: kv_at_end([(0, i, 1) for i in range(n)]), 16_000),
}


@pytest.mark.parametrize("parser", PARSERS)
def test_the_largest_input_costs_work_in_proportion(parser: str) -> None:
    make, most = PARSERS[parser]
    lines_of(make(most // 4))  # modules that are imported at first use
    whole, half = lines_of(make(most)), lines_of(make(most // 2))
    assert whole <= MOST_LINES and whole <= LINEAR * half + 1000


def test_work_that_grows_with_the_square_is_seen() -> None:
    """The negative control: spans that are copied for each span, as a tuple."""

    def copying(count: int) -> None:
        found: tuple[int, ...] = ()
        for i in range(count):
            found = *(each for each in found if each < i), i

    whole, half = lines_of(lambda: copying(600)), lines_of(lambda: copying(300))
    assert whole > LINEAR * half + 1000
