"""Sends tensors on a GPU: the service opens the trainer's memory by CUDA IPC and copies from it. Linux, one host.

    trainer   storage ─┬─ Memory: GPU, handle of the allocation, offset, size     exported once in a storage's life
                       └─ spans [tensors, 3]: which memory, first byte, bytes
    service   opens each memory once ──→ slices, device → device, or → host where it stages there ──→ closes all

The offer is a Struct of bytes and integers. The trainer keeps the tensors until the version is live. If it writes to them
before that, the digests differ, since it computed them from the bytes at the offer.

torch counts the readers of a storage in shared memory, for senders that do not wait for their readers, and keeps the memory of
one whose readers never came. This sender waits, so it releases the count at once and sends none to the service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.engine.values import TensorInfo
from rollout.transport.errors import InvalidRequest, SourceUnreachable
from rollout.transport.frames import MALFORMED
from rollout.transport.weights.capabilities import gpu_key
from rollout.transport.weights.ends import Expected, Payload, Sender, WeightTransport
from rollout.transport.weights.offers import CudaIpcOffer
from rollout.transport.weights.tensors import Tensors

EVENT_BYTES = 64
"""of a CUDA event's handle"""
NO_COUNTER = b"/rollout-counts-no-readers"
"""names no shared memory, so torch has nothing to count down when the service closes a storage"""


class TrainerStorage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A storage of the trainer."""

    gpu: str
    """UUID: the two ends may number their devices differently"""
    handle: bytes
    """of the allocation that contains it"""
    size: int
    """bytes"""
    offset: int
    """in the allocation"""


# the trainer's end


class CudaIpc(WeightTransport):
    via = "cuda_ipc"

    def __init__(self) -> None:
        self._exports = ExportedStorages()

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        tensors.check_on_gpus(self.via)
        if not {gpu_key(device) for device in tensors.devices} <= set(capabilities):
            raise SourceUnreachable("this process and the service share no GPU: another host, or a service on another device")
        data = tensors.finished()
        return Sender(self.via, self._exports.offer(data), tensors.manifest(tensors.digests()), data)


def export(storage: Any) -> TrainerStorage:
    """Export a torch.UntypedStorage on a CUDA device. Raises RuntimeError if the driver cannot share its memory."""
    import torch

    _, handle, size, offset, counter, place, _, _ = storage._share_cuda_()
    torch.UntypedStorage._release_ipc_counter(counter, place, device=storage.device)
    return TrainerStorage(str(torch.cuda.get_device_properties(storage.device).uuid), handle, size, offset)


class _Known(NamedTuple):
    alive: Any
    """a weak reference"""
    address: int
    memory: TrainerStorage


class ExportedStorages:
    """Cache of exported storages. Each is exported once: torch wraps its memory for each export, and keeps the wrappers as long
    as the storage. export: makes the Memory of a storage."""

    def __init__(self, export: Callable[[Any], TrainerStorage] = export) -> None:
        self._export = export
        self._known: dict[int, _Known] = {}
        """by the storage's identity"""

    def offer(self, tensors: Sequence[Any]) -> CudaIpcOffer:
        """Offer contiguous `tensors`, which the caller holds, and does not write, until the refresh is over; `Tensors.finished`
        gives such. Raises SourceUnreachable where their memory cannot be shared."""
        self._known = {key: known for key, known in self._known.items() if not known.alive.expired()}
        memories: dict[int, tuple[int, TrainerStorage]] = {}
        spans = np.zeros((len(tensors), 3), np.int64)
        for row, tensor in zip(spans, tensors, strict=True):
            assert tensor.is_contiguous()
            if tensor.numel():
                storage = tensor.untyped_storage()
                index, _ = memories.setdefault(storage._cdata, (len(memories), self._of(storage)))
                row[:] = index, tensor.storage_offset() * tensor.element_size(), tensor.nbytes
        packed = msgspec.msgpack.encode([memory for _, memory in memories.values()])
        return CudaIpcOffer(np.frombuffer(packed, np.uint8), spans)

    def _of(self, storage: Any) -> TrainerStorage:
        from torch.multiprocessing.reductions import StorageWeakRef

        known = self._known.get(storage._cdata)
        if known is None or known.address != storage.data_ptr() or known.memory.size != storage.nbytes():
            try:
                memory = self._export(storage)
            except RuntimeError as error:
                raise SourceUnreachable(f"this process cannot share CUDA memory: {error}") from None
            known = self._known[storage._cdata] = _Known(StorageWeakRef(storage), storage.data_ptr(), memory)
        return known.memory


# the service's end


def opened(offer: CudaIpcOffer, expected: Expected) -> Payload:
    """Open the service's end of an offer. Raises InvalidRequest, SourceUnreachable."""
    return CudaIpcPayload(offer, expected.manifest, expected.total)


def open_memory(memory: TrainerStorage) -> Any:
    """Open a Memory as a [bytes] uint8 tensor on its device; it is closed with the last view. Raises SourceUnreachable."""
    import torch

    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == memory.gpu:
            break
    else:
        raise SourceUnreachable(f"the service does not see the trainer's GPU {memory.gpu:.60}: another host or container?")
    counter, event = (NO_COUNTER, 0), (bytes(EVENT_BYTES), False)
    try:
        storage = torch.UntypedStorage._new_shared_cuda(index, memory.handle, memory.size, memory.offset, *counter, *event)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    except (RuntimeError, OverflowError) as error:
        raise SourceUnreachable(f"the trainer's CUDA memory cannot be opened here: {str(error)[:300]}") from None


class Copies:
    """Copies [n] uint8 from a device. Into a tensor: on the current stream, without waiting. Into host memory: on its own
    stream, and waits for it, so that the copy does not wait for the step in flight."""

    def __init__(self) -> None:
        self._stream: Any = None

    def __call__(self, memory: Any, data: Any) -> None:
        import torch

        if not isinstance(memory, np.ndarray):
            memory.copy_(data, non_blocking=True)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(data.device)
        with torch.cuda.stream(self._stream):
            torch.from_numpy(memory).copy_(data, non_blocking=True)
        self._stream.synchronize()


class CudaIpcPayload(Payload):
    """`open_memory` and `copy` are the calls to CUDA.

    Raises InvalidRequest, with the tensor, for spans that are not in their memory or not the manifest's."""

    via = "cuda_ipc"

    def __init__(
        self,
        offer: CudaIpcOffer,
        manifest: Sequence[TensorInfo],
        total: int,
        open_memory: Callable[[TrainerStorage], Any] = open_memory,
        copy: Callable[[Any, Any], None] | None = None,
    ) -> None:
        self._memories, spans = _checked(offer, manifest, total)
        self._all = [(index, first, size) for index, first, size in reversed(spans) if size]
        self._spans = list(self._all)
        self._open_memory, self._copy = open_memory, copy or Copies()
        self._opened: dict[int, Any] = {}

    def read(self, memory: Any) -> int:
        """Read as every Payload; begin again after the last byte. Raises SourceUnreachable where memory cannot be opened."""
        if not self._spans:
            self._spans = list(self._all)
        if not self._spans or not len(memory):
            return 0
        index, first, size = self._spans.pop()
        if index not in self._opened:
            self._opened[index] = self._open_memory(self._memories[index])
        count = min(size, len(memory))
        self._copy(memory[:count], self._opened[index][first : first + count])
        if count < size:
            self._spans.append((index, first + count, size - count))
        return count

    def close(self) -> None:
        self._opened.clear()
        self._spans, self._all = [], []


_decoder = msgspec.msgpack.Decoder(list[TrainerStorage])


def _checked(
    offer: CudaIpcOffer, manifest: Sequence[TensorInfo], total: int
) -> tuple[list[TrainerStorage], list[tuple[int, int, int]]]:
    if offer.memory.dtype != np.uint8 or offer.memory.ndim != 1:
        raise InvalidRequest(f"the list of memories is {offer.memory.dtype} {offer.memory.shape}: must be uint8 [bytes]")
    try:
        memories = _decoder.decode(offer.memory.data)
    except MALFORMED as error:
        raise InvalidRequest(f"not a list of memories: {str(error)[:300]}") from None
    if offer.spans.dtype != np.int64 or offer.spans.shape != (len(manifest), 3):
        raise InvalidRequest(f"the spans are {offer.spans.dtype} {offer.spans.shape}: must be int64 [{len(manifest)}, 3]")
    spans = [(int(index), int(first), int(size)) for index, first, size in offer.spans]
    for info, (index, first, size) in zip(manifest, spans, strict=True):
        empty = size == 0 and math.prod(info.shape) == 0
        inside = 0 <= index < len(memories) and 0 <= first <= first + size <= memories[index].size
        if not (empty or inside):
            raise InvalidRequest(f"tensor {info.name!r:.200}: bytes {first} to {first + size} are not in memory {index}")
    if sum(size for _, _, size in spans) != total:
        raise InvalidRequest(f"the spans have {sum(size for _, _, size in spans)} bytes, the manifest's tensors {total}")
    return memories, spans
