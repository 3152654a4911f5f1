"""docs/limits.md and docs/wire.md say what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from rollout.config import MIN_GRACE_S
from rollout.engine.values import Limits, Sampling
from rollout.service.loop import ServiceTiming
from rollout.service.session import MAX_REPLY_BYTES
from rollout.service.streaming import MOST_TOKENS, MOST_UNREAD
from rollout.transport import messages as m
from rollout.transport.errors import KINDS
from rollout.transport.frames import pack
from rollout.transport.receive_limit import TICK_MS, TOTAL_BYTES, WAITING_BYTES
from rollout.transport.sockets import QUEUED_MESSAGES

DOCS = Path(__file__).parents[1] / "docs"


def table() -> dict[str, int]:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| \S.* \|$", (DOCS / "limits.md").read_text(), re.MULTILINE)
    return {name: int(default.replace(",", "")) for name, default in rows}


def test_the_table_of_limits_is_the_struct() -> None:
    assert table() == msgspec.structs.asdict(Limits())
    assert table() != msgspec.structs.asdict(Limits(max_n=3))


def test_the_other_bounds_are_the_constants() -> None:
    text, timing = (DOCS / "limits.md").read_text(), ServiceTiming()
    for figure in (
        f"{QUEUED_MESSAGES} |",
        f"{WAITING_BYTES >> 20} MiB and one message",
        f"{TOTAL_BYTES >> 20} MiB; when exceeded, the connections",
        f"{m.UNTAKEN_BYTES >> 20} MiB; then it waits",
        f"{timing.least_requests_s * 1000:.0f} to {timing.requests_s * 1000:.0f} ms",
        f"every {TICK_MS} ms",
        f"{MAX_REPLY_BYTES >> 20} MiB;",
        f"at least {MIN_GRACE_S:.0f} s",
        f"{MOST_UNREAD} messages of at most {MOST_TOKENS:,} |",
    ):
        assert figure in text


def test_every_message_and_every_kind_of_refusal_is_described() -> None:
    text = (DOCS / "wire.md").read_text()
    unions = (m.ClientMessage, m.ServiceMessage, m.ReplicaMessage, m.RouterMessage)
    for message in (message for union in unions for message in get_args(union)):
        assert re.search(rf"\b{message.__name__}\b", text), message
    told_by_the_client_itself = {"error", "service_lost", "request_timeout", "client_closed", "no_tokenizer"}
    for kind in set(KINDS) - told_by_the_client_itself:
        assert kind in text, kind
    assert f"Version {m.PROTOCOL}." in text and f"{m.DIGEST_BYTES} bytes of BLAKE2b" in text


def test_the_example_is_a_message() -> None:
    text = (DOCS / "wire.md").read_text()
    example = re.search(r'^    (\{"type": "submit".*\})\n    ((?:[0-9a-f]{2} ?)+)$', text, re.MULTILINE)
    assert example
    header, array = pack(m.Submit("g", np.array([1, 42, 7], np.int32), Sampling(n=8), 1))
    shown, packed = msgspec.json.decode(example[1]), msgspec.msgpack.decode(header)
    assert bytes.fromhex(example[2]) == bytes(array)
    assert all(packed[name] == value for name, value in shown.items() if name != "sampling")
    assert packed["sampling"]["n"] == shown["sampling"]["n"]
