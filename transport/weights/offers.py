"""Where the bytes of a refresh are: what Begin offers, one tagged Struct per transport. Plain values of the wire.

`rollout.transport.weights.sending` makes them at the trainer; `rollout.transport.weights.receiving` opens them at the service.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np

Backend = Literal["gloo", "nccl"]


class WeightOffer(msgspec.Struct, frozen=True):
    """Base of the offers in Begin, one tagged Struct per transport."""

    @property
    def on_device(self) -> bool:
        """Whether the payload is on the device of the service's model, so that `Payload.read` fills tensors there."""
        return False

    @property
    def stays(self) -> bool:
        """Whether `Payload.read` begins again after the last byte, until the refresh is over."""
        return False


class InlineOffer(WeightOffer, frozen=True, tag="inline", forbid_unknown_fields=True):
    """Chunk messages will follow."""


class ShmOffer(WeightOffer, frozen=True, tag="shm", forbid_unknown_fields=True):
    """A memory segment of the trainer."""

    pid: int
    fd: int
    inode: int
    total: int
    """bytes of the payload"""
    nonce: str
    """hex"""


class FilesOffer(WeightOffer, frozen=True, tag="files", forbid_unknown_fields=True):
    """A folder, as a path of the service."""

    folder: str
    """absolute"""


class CudaIpcOffer(WeightOffer, frozen=True, eq=False, tag="cuda_ipc", forbid_unknown_fields=True):
    """Memory on a GPU of this host."""

    memory: np.ndarray
    """[bytes] uint8: MessagePack of a list of Memory"""
    spans: np.ndarray
    """[tensors, 3] int64, in the manifest's order: index into `memory`, first byte, bytes"""

    @property
    def on_device(self) -> bool:
        return True

    @property
    def stays(self) -> bool:
        return True


class DistributedOffer(WeightOffer, frozen=True, tag="distributed", forbid_unknown_fields=True):
    """Join this group as rank 1; rank 0 broadcasts the payload in pieces."""

    backend: Backend
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    """address of the TCPStore for the service"""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    group: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """prefix of its keys in the store; chosen by the trainer for one refresh"""
    total: int
    """bytes of the payload"""
    secret: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """random, for this group only; never in the store. Each end proves to the other that it knows it"""
    announced: bool = False
    """the trainer sets GROUP/sent/K in the store when it starts broadcast K; the service posts it only then"""

    @property
    def on_device(self) -> bool:
        return self.backend == "nccl"


class DeltaOffer(WeightOffer, frozen=True, tag="delta", forbid_unknown_fields=True):
    """Chunk messages with differences will follow."""

    version: int
    """of the live weights that they are against"""
    digest: str
    """of those"""
    size: int
    """bytes of all chunks"""


Offer = InlineOffer | ShmOffer | FilesOffer | CudaIpcOffer | DistributedOffer | DeltaOffer
"""offers in Begin"""
