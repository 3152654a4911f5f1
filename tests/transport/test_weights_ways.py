"""The ways that tensors travel: what one end offers is what the other end reads, or it is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from rollout.engine.values import Limits, TensorInfo, manifest_digest
from rollout.transport.errors import InvalidRequest, SourceUnreachable
from rollout.transport.weights import Offer, Via
from rollout.transport.weights.automatic import choose
from rollout.transport.weights.ends import Payload, Sender, WeightTransport
from rollout.transport.weights.files import MAX_HEADER_BYTES, OTHER_TENSORS, FilesOffer, describe_folder, read_folder
from rollout.transport.weights.inline import CHUNK_BYTES, CHUNK_VIEWS, WINDOW_BYTES, InlineOffer, InlinePayload, chunks
from rollout.transport.weights.manifest import pack_manifest, unpack_manifest
from rollout.transport.weights.receiving import OPENED, open_payload
from rollout.transport.weights.sending import transports
from rollout.transport.weights.shm import NONCE_BYTES, Segment, SegmentView, ShmOffer, ShmPayload, host_key
from rollout.transport.weights.tensors import Tensors
from tests.support.sent_tensors import ARRAYS, MANIFEST, TENSORS, WHOLE

ROOT = Path(__file__).parents[2]


def read_all(payload: Payload, piece: int = 100_003) -> bytes:
    got, memory = b"", np.empty(piece, np.uint8)
    while count := payload.read(memory):
        got += memory[:count].tobytes()
    payload.close()
    return got


# ── the table of ways ─────────────────────────────────────────────────────────────────────────────────────────────────────

ASKS = re.compile(r"""\bvia\s*(==|!=|(not\s+)?in\s*[(\[{])|isinstance\(.*\b(\w+Offer|\w+Payload|\w+Sender)\b|case \w+Offer""")


def test_no_file_asks_which_way_weights_travel() -> None:
    for path in [*ROOT.glob("transport/**/*.py"), *ROOT.glob("rollout/**/*.py")]:
        assert not ASKS.search(path.read_text()), f"{path.relative_to(ROOT)} knows a way by name: let the way itself say it"


@pytest.mark.parametrize(
    "line",
    ['if via == "shm":', 'via in ("auto", "shm")', 'via != "auto"', "isinstance(begin.offer, InlineOffer)", "case ShmOffer():"],
)
def test_asking_which_way_would_be_seen(line: str) -> None:
    assert ASKS.search(line)


def test_every_name_has_a_way_and_every_offer_opens() -> None:
    assert set(transports("127.0.0.1")) == set(get_args(Via))
    assert set(OPENED) == set(get_args(Offer)) and len(set(OPENED.values())) == len(OPENED)


class Tried(WeightTransport):
    """A way that works, or does not."""

    def __init__(self, via: str, failure: str | None = None) -> None:
        self.via = via
        self.failure = failure
        self.tried = 0

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        self.tried += 1
        if self.failure is not None:
            raise SourceUnreachable(self.failure)
        return Sender(self.via, InlineOffer(), [], [])


def test_the_first_way_that_both_ends_have_is_taken_and_says_why() -> None:
    none, tensors = Tried("a", "no such GPU"), Tensors([], [])
    some, last = Tried("b"), Tried("c")
    way, sender = choose([none, some, last], tensors, ())
    assert (way, sender.via, sender.reason) == (some, "b", "a: no such GPU") and not last.tried
    assert choose([last], tensors, ())[1].reason == "the first that both ends have"
    with pytest.raises(SourceUnreachable, match="a: no such GPU; d: no memory"):
        choose([none, Tried("d", "no memory")], tensors, ())


# ── manifest ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_manifest_round_trip() -> None:
    assert unpack_manifest(pack_manifest(MANIFEST), len(MANIFEST)) == MANIFEST


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([["a", "float32", [1]]]),
        msgspec.msgpack.encode([["a", "float32", [-1], "0"]]),
        msgspec.msgpack.encode([["a", "float32", [1.5], "0"]]),
        b"\x91" * 100_000,
        pack_manifest(MANIFEST).tobytes()[:-1],
    ],
)
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        unpack_manifest(np.frombuffer(data, np.uint8), 10)


@pytest.mark.parametrize("head", [b"\xdd\x00\xcc\x77\x40", b"\xdc\x00\x0b", b"\x9b"])
def test_a_manifest_is_bounded_before_it_is_decoded(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.transport.weights.manifest._tensors", None)
    with pytest.raises(InvalidRequest, match="the model has 10|at most 1024"):
        unpack_manifest(np.frombuffer(head + msgspec.msgpack.encode(["", "", [], ""]) * 11, np.uint8), 10)
    with pytest.raises(InvalidRequest, match="at most 1024 for each"):
        unpack_manifest(np.zeros(20_000, np.uint8), 10)


def test_the_digest_of_a_manifest_tells_everything_but_the_order() -> None:
    digest = manifest_digest(MANIFEST)
    assert manifest_digest(reversed(MANIFEST)) == digest
    for field, value in (("name", "x"), ("dtype", "float32"), ("shape", (1, 2)), ("digest", "0" * 32)):
        assert manifest_digest([msgspec.structs.replace(MANIFEST[0], **{field: value}), *MANIFEST[1:]]) != digest
    assert manifest_digest(MANIFEST[1:]) != digest


# ── inline ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_inline_round_trip_without_a_copy() -> None:
    payload = InlinePayload(len(WHOLE))
    memory, got = np.empty(300_000, np.uint8), b""
    for offset, views in chunks(ARRAYS, Limits()):
        assert sum(map(len, views)) <= CHUNK_BYTES and len(views) <= CHUNK_VIEWS
        assert all(any(np.shares_memory(view, array) for array in ARRAYS) for view in views)
        end = payload.put(offset, views)
        assert payload.put(offset, views) == end, "a repeated chunk changes nothing"
        while count := payload.read(memory):
            got += memory[:count].tobytes()
        assert payload.read_bytes == end
    assert got == WHOLE


def test_many_small_tensors_share_a_chunk() -> None:
    small = [np.full(10, i, np.uint8) for i in range(100)]
    sizes = [len(views) for _, views in chunks(small, Limits())]
    assert sizes == [CHUNK_VIEWS] * 3 + [4]
    tight = list(chunks(small, Limits(max_frames=3, max_frame_bytes=7)))
    assert all(len(views) <= 2 and sum(map(len, views)) <= 7 for _, views in tight)
    assert [offset for offset, _ in tight] == list(range(0, 1000, 7))


def test_chunks_out_of_order_are_refused() -> None:
    payload = InlinePayload(100)
    payload.put(0, [np.zeros(10, np.uint8)])
    for offset, size in ((11, 5), (5, 10), (10, 91), (-1, 1), (-5, 3)):
        with pytest.raises(InvalidRequest, match="chunk of bytes"):
            payload.put(offset, [np.zeros(size, np.uint8)])
    for wrong in (np.zeros(3, np.int32), np.zeros((2, 2), np.uint8)):
        with pytest.raises(InvalidRequest, match="must be uint8"):
            payload.put(10, [wrong])
    payload.put(10, [np.zeros(90, np.uint8)])


def test_the_window_bounds_what_is_held() -> None:
    payload = InlinePayload(4 * WINDOW_BYTES)
    big = np.zeros(WINDOW_BYTES, np.uint8)
    payload.put(0, [big])
    with pytest.raises(InvalidRequest, match="in flight"):
        payload.put(WINDOW_BYTES, [big[:1]])
    assert payload.read(np.empty(1, np.uint8)) == 1
    payload.put(WINDOW_BYTES, [big[:1]])


# ── shared memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────

needs_shm = pytest.mark.skipif(host_key() is None, reason="no memfd on this system")


@needs_shm
def test_shm_round_trip_reuses_its_memory() -> None:
    segment, view = Segment(), SegmentView()
    offers = []
    for order in (ARRAYS, ARRAYS[::-1], ARRAYS[:2]):
        offer, digests = segment.write(order)
        offers.append(offer)
        assert digests == [xxhash.xxh3_128_hexdigest(array) for array in order]
        payload = open_payload(offer, MANIFEST, offer.total, view)
        assert read_all(payload) == b"".join(array.tobytes() for array in order)
    assert len({offer.inode for offer in offers}) == 1 and len({offer.nonce for offer in offers}) == 3
    with pytest.raises(SourceUnreachable, match="not what was offered"):
        view.open(offers[0])  # it holds another payload now
    bigger, _ = segment.write([*ARRAYS, np.ones(1 << 20, np.uint8)])
    assert bigger.inode != offers[0].inode and len(view.open(bigger)) == bigger.total
    view.close()
    segment.close()
    with pytest.raises(SourceUnreachable):
        view.open(bigger)


@needs_shm
def test_shm_has_no_name_and_dies_with_its_ends() -> None:
    before = set(os.listdir("/dev/shm"))
    program = (
        "import msgspec, numpy as np, sys; from rollout.transport.weights.shm import Segment\n"
        "segment = Segment()\n"
        "offer, _ = segment.write([np.full(1000, 7, np.uint8)])\n"
        "print(msgspec.json.encode(offer).decode(), flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    offer = msgspec.json.decode(child.stdout.readline(), type=ShmOffer)
    view = SegmentView()
    payload = ShmPayload(view.open(offer))
    assert set(os.listdir("/dev/shm")) == before
    child.kill()
    child.wait(60)
    assert read_all(payload) == bytes([7]) * 1000, "what was opened stays readable after the trainer's death"
    child.stdin.close()
    child.stdout.close()
    view.close()
    with pytest.raises(SourceUnreachable):
        view.open(offer)


@needs_shm
def test_shm_that_is_not_what_it_says(tmp_path: Path) -> None:
    segment, view = Segment(), SegmentView()
    offer, _ = segment.write(ARRAYS)
    with pytest.raises(InvalidRequest, match="the manifest's tensors have"):
        open_payload(offer, MANIFEST, offer.total + 1, view)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    keep = os.open(fifo, os.O_RDWR)
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    unsealed = os.memfd_create("rollout-weights")
    for change in (
        {"fd": 10_000},
        {"fd": keep},
        {"fd": plain},
        {"fd": unsealed, "inode": os.fstat(unsealed).st_ino},
        {"pid": 2**22 + 1},
        {"pid": 1},
        {"inode": 1},
        {"nonce": "00" * NONCE_BYTES},
        {"nonce": ""},
        {"total": offer.total + 10_000_000},
    ):
        with pytest.raises(SourceUnreachable):
            view.open(msgspec.structs.replace(offer, **change))
    assert len(view.open(offer)) == offer.total
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(offer.fd, NONCE_BYTES + 10)  # sealed: what is mapped elsewhere stays there
    for fd in (keep, plain, unsealed):
        os.close(fd)


@needs_shm
def test_no_descriptor_and_no_map_is_left(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("rollout-weights")

    save_file(TENSORS, tmp_path / "a.safetensors")
    before = held()
    for _ in range(5):
        segment, view = Segment(), SegmentView()
        offer, _ = segment.write(ARRAYS)
        read_all(ShmPayload(view.open(offer)))
        assert held() > before
        with pytest.raises(SourceUnreachable):
            view.open(msgspec.structs.replace(offer, inode=1))
        segment.close()
        view.close()
        describe_folder(tmp_path)
    assert held() == before


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_files_round_trip(tmp_path: Path) -> None:
    names = list(TENSORS)
    save_file({name: TENSORS[name] for name in names[:2]}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({name: TENSORS[name] for name in names[2:]}, tmp_path / "model-2.safetensors")
    described = describe_folder(tmp_path)
    assert sorted(described, key=lambda info: info.name) == sorted(MANIFEST, key=lambda info: info.name)
    assert read_all(open_payload(FilesOffer(str(tmp_path)), MANIFEST, len(WHOLE), SegmentView())) == WHOLE


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="absolute"):
        open_payload(FilesOffer("checkpoints/7"), MANIFEST, 0, SegmentView())
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SourceUnreachable, match=r"no \*.safetensors"):
            open_payload(FilesOffer(str(folder)), MANIFEST, 0, SegmentView())
    save_file({"norm": TENSORS["norm"].double()}, tmp_path / "a.safetensors")
    for name in ("norm", "embed"):
        info = next(info for info in MANIFEST if info.name == name)
        with pytest.raises(InvalidRequest, match=name):
            open_payload(FilesOffer(str(tmp_path)), [info], 0, SegmentView())
    save_file({"norm": TENSORS["norm"]}, tmp_path / "b.safetensors")
    with pytest.raises(InvalidRequest, match="a.safetensors and in b.safetensors"):
        describe_folder(tmp_path)


def header(entries: object) -> bytes:
    return raw_header(json.dumps(entries).encode())


def raw_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(16)


BROKEN = {
    "empty": b"",
    "cut in its header": header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})[:20],
    "no JSON": (5).to_bytes(8, "little") + b"hello" + bytes(16),
    "not an object": header([1]),
    "a list nested without end": (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "header longer than the file": (2**62).to_bytes(8, "little") + bytes(100),
    "past the end": header({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}),
    "before the start": header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}),
    "of another size than its shape": header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}),
    "negative lengths": header({"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}),
    "an unknown dtype": header({"a": {"dtype": "Q4", "shape": [4], "data_offsets": [0, 16]}}),
    "without offsets": header({"a": {"dtype": "F32", "shape": [4]}}),
    "nine dimensions": header({"a": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}),
    "many dimensions": header({"a": {"dtype": "F32", "shape": [2**63 - 1] * 100_000, "data_offsets": [0, 0]}}),
    "a length of 64 bits": header({"a": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}),
    "an infinite length": raw_header(b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}'),
    "an infinite offset": raw_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}'),
    "a fraction": raw_header(b'{"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}'),
    "a number of many digits": raw_header(
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 50_000 + b'], "data_offsets": [0, 4]}}'
    ),
    "half of a surrogate pair": raw_header(b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
    "a surrogate in UTF-8": raw_header(b'{"\xed\xa0\x80": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
    "a surrogate for a dtype": raw_header(b'{"a": {"dtype": "\\udfff", "shape": [1], "data_offsets": [0, 4]}}'),
    "a header over the bound": raw_header(b'{"__metadata__": {"a": "' + b"b" * (1 << 24) + b'"}}'),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(InvalidRequest, match="a.safetensors"):
        describe_folder(tmp_path)


def test_a_header_takes_no_time_that_grows_with_its_square(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape of a hundred thousand lengths is refused before they are multiplied; a manifest's, too."""
    monkeypatch.setattr("math.prod", lambda shape: pytest.fail("multiplied"))
    (tmp_path / "a.safetensors").write_bytes(BROKEN["many dimensions"])
    with pytest.raises(InvalidRequest, match="length <= 8"):
        describe_folder(tmp_path)
    long = [TensorInfo("a", "float32", (2**62,) * 1000, "0" * 32)]
    with pytest.raises(InvalidRequest, match="1000 dimensions; at most 8"):
        unpack_manifest(pack_manifest(long), 100)


def test_a_service_reads_no_more_of_headers_than_the_manifest_needs(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors", {"format": "x" * 100_000})
    manifest = describe_folder(tmp_path)
    with pytest.raises(InvalidRequest, match=r"a header of 10\d+ bytes: at most 70656 for these tensors"):
        open_payload(FilesOffer(str(tmp_path)), manifest, 0, SegmentView())


def test_the_bound_on_headers_is_for_all_files(tmp_path: Path) -> None:
    """However large it is; the trainer's end has one for each file."""
    for i in range(2):
        save_file({f"a{i}": torch.zeros(1)}, tmp_path / f"{i}.safetensors", {"format": "x" * (MAX_HEADER_BYTES // 8 * 5)})
    assert len(read_folder(tmp_path)) == 2
    with pytest.raises(InvalidRequest, match=r"1.safetensors has a header of \d+ bytes: at most \d+ for these tensors"):
        read_folder(tmp_path, MAX_HEADER_BYTES)
    assert len(read_folder(tmp_path, 2 * MAX_HEADER_BYTES)) == 2


def test_the_index_has_the_bound_of_the_headers(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": "x" * 100_000, "weight_map": dict.fromkeys(TENSORS, "model.safetensors")})
    )
    manifest = describe_folder(tmp_path)
    with pytest.raises(InvalidRequest, match=r"index.json has more than 7\d+ bytes"):
        open_payload(FilesOffer(str(tmp_path)), manifest, 0, SegmentView())


def test_a_good_file_by_the_same_hand_is_read(tmp_path: Path) -> None:
    """Negative control of the broken ones."""
    (tmp_path / "a.safetensors").write_bytes(header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}))
    assert describe_folder(tmp_path)[0].shape == (4,)


def test_a_fifo_does_not_hang_the_service(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(InvalidRequest, match="no regular file"):
        open_payload(FilesOffer(str(tmp_path)), MANIFEST, 0, SegmentView())


def test_inline_needs_no_offer() -> None:
    assert isinstance(open_payload(InlineOffer(), MANIFEST, 10, SegmentView()), InlinePayload)


def test_a_folder_has_few_tensors_beside_those_that_were_announced(tmp_path: Path) -> None:
    """However short their entries: each costs the loop microseconds."""
    announced = {f"a{i}": torch.zeros(1) for i in range(64)}
    save_file(announced, tmp_path / "model.safetensors")
    manifest = describe_folder(tmp_path)
    save_file(announced | {f"x{i:x}": torch.zeros(0) for i in range(OTHER_TENSORS + 65)}, tmp_path / "model.safetensors")
    assert len(read_folder(tmp_path)) == OTHER_TENSORS + 129
    with pytest.raises(InvalidRequest, match=f"{OTHER_TENSORS + 129} tensors: at most {OTHER_TENSORS + 128} here"):
        open_payload(FilesOffer(str(tmp_path)), manifest, 0, SegmentView())
