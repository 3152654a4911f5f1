"""How the tensors of a refresh travel. The messages around them (`transport.messages`: Begin, Commit …) are the same for all.

    trainer's end                          service's end
    ─────────────                          ─────────────
    Offer   where the bytes are    ──→     open_payload(offer, manifest) → Payload
    chunks  (inline only)          ──→     Payload.read(memory) → staging

    inline     in messages, any host                                  transport.weights.inline
    shm        in memory that both ends see: one host, one user       transport.weights.shm
    files      in a folder of safetensors that both ends see          transport.weights.files
    cuda_ipc   in the trainer's memory on a GPU that both ends see    transport.weights.cuda_ipc
    gloo, nccl by torch.distributed, any host                         transport.weights.distributed

A further way is one more kind of offer and one more Payload. The payload is always the same: the bytes of the tensors, one
after the other as the manifest lists them. Nothing here imports torch before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from engine.types import TensorInfo
from transport.errors import InvalidRequest
from transport.weights.cuda_ipc import CudaIpcOffer, CudaIpcPayload, gpu_keys
from transport.weights.distributed import DistributedOffer, DistributedPayload, backends
from transport.weights.files import FilesOffer, FilesPayload, matching
from transport.weights.inline import InlineOffer, InlinePayload
from transport.weights.shm import SegmentView, ShmOffer, ShmPayload, host_key

__all__ = ["Offer", "Payload", "capabilities", "open_payload"]

Offer = InlineOffer | ShmOffer | FilesOffer | CudaIpcOffer | DistributedOffer


class Payload(Protocol):
    """The service's end."""

    via: str
    unannounced: bool
    """bytes come of which no message tells: the loop must look for them"""

    @property
    def ready(self) -> bool:
        """`read` would give bytes, or raise."""
        ...

    def read(self, memory: np.ndarray) -> int:
        """Fill the beginning of [bytes] uint8 with what comes next. Returns how many bytes; 0: nothing has come yet."""
        ...

    def close(self) -> None: ...


def capabilities(device: Any) -> tuple[str, ...]:
    """What a service whose model is on `device` (a torch.device; None = it is without torch) says in Welcome of the ways that
    depend on where the two ends are: `host_key`, `gpu_key` of each GPU, names of backends."""
    ways = [key] if (key := host_key()) is not None else []
    if device is not None:
        ways += backends(device)
        ways += gpu_keys() if device.type == "cuda" else []
    return tuple(ways)


def open_payload(offer: Offer, manifest: Sequence[TensorInfo], total: int, segment: SegmentView, device: Any = None) -> Payload:
    """`total`: bytes of the payload. `segment`: keeps shared memory mapped from one refresh to the next. `device`: torch.device
    of the model.

    Raises SourceUnreachable where this end does not see what is offered, InvalidRequest where it is not the manifest's."""
    match offer:
        case InlineOffer():
            return InlinePayload(total)
        case ShmOffer():
            if offer.total != total:
                raise InvalidRequest(f"{offer.total} bytes are offered, the manifest's tensors have {total}")
            return ShmPayload(segment.open(offer))
        case FilesOffer():
            return FilesPayload(matching(offer, manifest))
        case CudaIpcOffer():
            return CudaIpcPayload(offer, manifest, total)
        case DistributedOffer():
            if offer.total != total:
                raise InvalidRequest(f"{offer.total} bytes are offered, the manifest's tensors have {total}")
            return DistributedPayload(offer, device)
