"""How the tensors of a refresh travel. The messages around them (`transport.messages`: Begin, Commit …) are the same for all.

    trainer's end                          service's end
    ─────────────                          ─────────────
    Offer   where the bytes are    ──→     open_payload(offer, manifest) → Payload
    chunks  (inline only)          ──→     Payload.read(memory) → staging

    inline   in messages, any host                                  transport.weights.inline
    shm      in memory that both ends see: one host, one user       transport.weights.shm
    files    in a folder of safetensors that both ends see          transport.weights.files

A further way (CUDA IPC, NCCL) is one more kind of offer and one more Payload. The payload is always the same: the bytes of the
tensors, one after the other as the manifest lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.request import TensorInfo
from transport.errors import InvalidRequest
from transport.weights.files import FilesOffer, FilesPayload, matching
from transport.weights.inline import InlineOffer, InlinePayload
from transport.weights.shm import SegmentView, ShmOffer, ShmPayload

__all__ = ["Offer", "Payload", "open_payload"]

Offer = InlineOffer | ShmOffer | FilesOffer


class Payload(Protocol):
    """The service's end."""

    via: str

    def read(self, memory: np.ndarray) -> int:
        """Fill the beginning of [bytes] uint8 with what comes next. Returns how many bytes; 0: nothing has come yet."""
        ...

    def close(self) -> None: ...


def open_payload(offer: Offer, manifest: Sequence[TensorInfo], total: int, segment: SegmentView) -> Payload:
    """`total`: bytes of the payload. `segment`: keeps shared memory mapped from one refresh to the next.

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
