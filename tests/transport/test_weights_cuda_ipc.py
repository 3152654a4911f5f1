"""Tensors by CUDA IPC, on fakes of its two ends: a handle is a name under which bytes lie. tests/gpu has the rest."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash

from rollout.engine.values import TensorInfo
from rollout.transport.errors import InvalidRequest, SourceUnreachable
from rollout.transport.weights.cuda_ipc import CudaIpcOffer, CudaIpcPayload, ExportedStorages, TrainerStorage
from rollout.transport.weights.tensors import digest
from tests.support.fake_gpu import MANIFEST, TENSORS, WHOLE, FakeGPU


def read_all(payload: CudaIpcPayload, piece: int) -> bytes:
    """Read the payload once: it begins again after its last byte."""
    got, memory = b"", np.empty(piece, np.uint8)
    while len(got) < len(WHOLE) and (count := payload.read(memory)):
        got += memory[:count].tobytes()
    return got


@pytest.mark.parametrize("piece", [1, 977, 100_000])
def test_every_byte_in_the_manifest_s_order_and_each_storage_opened_once(piece: int) -> None:
    gpu = FakeGPU()
    offer = ExportedStorages(gpu.export).offer(list(TENSORS.values()))
    assert len(gpu.storages) == 3 and offer.spans.tolist() == [
        [0, 4000, 20000],
        [1, 0, 1998],
        [0, 0, 0],
        [0, 0, 4000],
        [2, 0, 8],
    ]
    payload = gpu.payload(offer)
    assert payload.via == "cuda_ipc" and payload.ready and not payload.unannounced and not gpu.opened
    assert read_all(payload, piece) == WHOLE
    assert offer.stays and read_all(payload, piece) == WHOLE, "it begins again, for a refresh without a second copy"
    assert sorted(gpu.opened) == sorted(gpu.storages) and payload.read(np.empty(0, np.uint8)) == 0
    payload.close()
    assert payload.read(np.empty(9, np.uint8)) == 0


def test_closing_lets_go_of_all_memory() -> None:
    gpu = FakeGPU()
    payload = gpu.payload(ExportedStorages(gpu.export).offer(list(TENSORS.values())))
    payload.read(np.empty(30_000, np.uint8))
    payload.read(np.empty(30_000, np.uint8))
    assert len(payload._opened) == 2
    payload.close()
    payload.close()
    assert not payload._opened and payload.read(np.empty(9, np.uint8)) == 0


def test_a_storage_is_exported_once_in_its_life() -> None:
    gpu = FakeGPU()
    exports = ExportedStorages(gpu.export)
    weights = [torch.randn(10), torch.randn(20)]
    first = exports.offer(weights)
    assert exports.offer(weights).memory.tobytes() == first.memory.tobytes() and len(gpu.storages) == 2
    weights[1] = torch.randn(20)  # another storage, perhaps where the old one was
    gc.collect()
    assert exports.offer(weights).memory.tobytes() != first.memory.tobytes() and len(gpu.storages) == 3
    assert len(exports._known) == 2, "what is gone is forgotten"
    weights[0].untyped_storage().resize_(4000)  # the same storage in another place
    exports.offer(weights)
    assert len(gpu.storages) == 4


def test_memory_that_cannot_be_shared_is_told() -> None:
    def refuse(storage: Any) -> TrainerStorage:
        raise RuntimeError("CUDA error: operation not supported")

    with pytest.raises(SourceUnreachable, match="cannot share CUDA memory: CUDA error: operation not supported"):
        ExportedStorages(refuse).offer([torch.ones(3)])


def test_a_handle_that_does_not_open() -> None:
    gpu = FakeGPU()
    payload = gpu.payload(ExportedStorages(gpu.export).offer(list(TENSORS.values())))
    gpu.refuse = b"handle 1"
    memory = np.empty(30_000, np.uint8)
    assert payload.read(memory) == 20_000
    with pytest.raises(SourceUnreachable, match="cannot be opened"):
        payload.read(memory)


def changed(offer: CudaIpcOffer, row: int, column: int, value: int) -> CudaIpcOffer:
    spans = offer.spans.copy()
    spans[row, column] = value
    return msgspec.structs.replace(offer, spans=spans)


@pytest.mark.parametrize(
    ("row", "column", "value", "message"),
    [
        (0, 2, 20_001, "'second': bytes 4000 to 24001 are not in memory 0"),
        (0, 1, 4_001, "'second': bytes 4001 to 24001"),
        (0, 1, -1, "'second': bytes -1 to 19999"),
        (0, 1, 2**63 - 1, "'second'"),
        (1, 0, 3, "'alone': bytes 0 to 1998 are not in memory 3"),
        (1, 0, -1, "'alone': bytes 0 to 1998 are not in memory -1"),
        (3, 2, -4_000, "'first'"),
        (3, 2, 3_999, "the spans have 26005 bytes, the manifest's tensors 26006"),
        (1, 2, 0, "the spans have 24008 bytes"),
    ],
)
def test_spans_outside_of_their_memory_are_refused(row: int, column: int, value: int, message: str) -> None:
    """torch itself would read whatever lies there."""
    gpu = FakeGPU()
    offer = changed(ExportedStorages(gpu.export).offer(list(TENSORS.values())), row, column, value)
    with pytest.raises(InvalidRequest, match=message):
        gpu.payload(offer)
    assert not gpu.opened


def test_an_empty_tensor_needs_no_memory() -> None:
    gpu = FakeGPU()
    offer = ExportedStorages(gpu.export).offer([TENSORS["empty"]])
    assert read_all(gpu.payload(offer, [MANIFEST[2]], 0), 10) == b"" and not gpu.opened


@pytest.mark.parametrize(
    "fields",
    [
        {"memory": np.zeros(3, np.uint8)},
        {"memory": np.zeros(3, np.float32)},
        {"memory": np.frombuffer(msgspec.msgpack.encode([["gpu", b"h", "size", 0]]), np.uint8)},
        {"memory": np.frombuffer(b"\x91" * 100_000, np.uint8)},
        {"spans": np.zeros((5, 2), np.int64)},
        {"spans": np.zeros((4, 3), np.int64)},
        {"spans": np.zeros((5, 3), np.float64)},
    ],
)
def test_offers_that_are_none(fields: dict[str, np.ndarray]) -> None:
    gpu = FakeGPU()
    offer = ExportedStorages(gpu.export).offer(list(TENSORS.values()))
    with pytest.raises(InvalidRequest):
        gpu.payload(msgspec.structs.replace(offer, **fields))


def test_negative_sizes_are_refused() -> None:
    gpu = FakeGPU()
    packed = np.frombuffer(msgspec.msgpack.encode([TrainerStorage("GPU-1", b"h", -5, 0)]), np.uint8)
    with pytest.raises(InvalidRequest, match="'x': bytes 0 to 3"):
        gpu.payload(CudaIpcOffer(packed, np.array([[0, 0, 3]])), [TensorInfo("x", "float32", (3,), "")], 3)


def test_the_digest_of_slices_is_the_whole_s() -> None:
    data = torch.randint(0, 256, (9_000_001,), dtype=torch.uint8)
    assert digest(data) == xxhash.xxh3_128_hexdigest(data.numpy())
    assert digest(data[:0]) == xxhash.xxh3_128_hexdigest(b"")
