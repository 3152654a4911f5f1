"""Interfaces of a weight transport: `WeightTransport`, `Sender` at the client; `WeightOffer`, `Payload` at the service."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollout.engine.values import Limits, Refreshed, TensorInfo
from rollout.transport.errors import InvalidRequest, RolloutError, SourceUnreachable, WeightsRefused
from rollout.transport.weights.tensors import Tensors


class Channel(Protocol):
    """The connection, for a sender during its refresh."""

    @property
    def limits(self) -> Limits:
        """Limits of the service."""
        ...

    def window_bytes(self) -> int:
        """Wait for the lease. Returns how many bytes of chunks may be in flight."""
        ...

    def chunk(self, offset: int, views: list[np.ndarray]) -> Callable[[], None]:
        """Send a chunk. Returns a function that waits until it is staged."""
        ...


class Sender:
    """The trainer's end of one refresh. The base class sends nothing besides the offer.

    Args:
        via: name of the transport.
        offer: tells the service where the bytes are; sent in Begin.
        manifest: of the tensors, with digests.
        data: [bytes] uint8 arrays or tensors, held until the refresh has ended; [] if the source has its own copy."""

    def __init__(self, via: str, offer: Any, manifest: list[TensorInfo], data: Sequence[Any]) -> None:
        self.via = via
        self.offer = offer
        self.manifest = manifest
        self.data = data
        self.reason = "it was asked for"
        """why this transport was chosen"""
        self.fallback: Callable[[Sender], Sender] | None = None
        """makes the sender to use if the service refuses this one; None: the refresh fails"""
        self.fallback_after: tuple[type[RolloutError], ...] = (SourceUnreachable,)
        """refusals after which `fallback` is used"""
        self.applied: Callable[[Refreshed], None] = lambda refreshed: None
        """called when the weights are live"""

    def before_commit(self, channel: Channel) -> None:
        """Send the bytes that the service needs before Commit."""

    def after_commit(self, over: Callable[[], bool], end: float) -> None:
        """Send the bytes that the service reads after Commit: all, or until `over` returns that the service has answered.
        Raises SourceUnreachable; RequestTimeout at `end` (time.monotonic)."""

    def close(self) -> None:
        """Free the resources of this refresh. May be repeated."""


class WeightTransport:
    """The trainer's end of one transport, for all its refreshes."""

    via: str

    def offer_folder(self, folder: Path) -> Sender:
        """Offer the safetensors of a folder (absolute path). Raises InvalidRequest if this transport only takes tensors."""
        raise InvalidRequest(f'via="{self.via}" takes tensors, not the path of a folder')

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        """Offer tensors. capabilities: of Welcome.

        Raises SourceUnreachable if the service does not have this transport, WeightsRefused naming a tensor that it cannot
        send."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what was kept for further refreshes."""


class SharedMapping(Protocol):
    """The mapping of shared memory, see `rollout.transport.weights.shm.SegmentView`."""

    def open(self, offer: Any) -> np.ndarray:
        """Map the offered memory. Returns [bytes] uint8."""
        ...


class LiveTensors(Protocol):
    """Live tensors by their names in a manifest, see `rollout.engine.weights.inventory.Inventory`."""

    def dtype(self, name: str) -> str: ...
    def skips(self, name: str) -> bool:
        """Return whether the model skips a tensor of this name: it has none, and needs none."""
        ...

    def size(self, name: str) -> tuple[int, int]:
        """Return the bytes of a tensor, and of one element."""
        ...

    def read_slice(self, name: str, start: int, size: int) -> np.ndarray:
        """Copy live bytes, [size] uint8."""
        ...


class LiveWeights(Protocol):
    """Live weights, for transports that send changes, see `rollout.engine.weights.live.Weights`."""

    version: int
    dropped: bool

    @property
    def digest(self) -> str: ...
    @property
    def inventory(self) -> LiveTensors: ...


class Expected(NamedTuple):
    """Arguments of `WeightOffer.open`."""

    manifest: Sequence[TensorInfo]
    total: int
    """bytes"""
    segment: SharedMapping
    """keeps shared memory mapped between refreshes"""
    device: Any
    """torch.device of the model; None: an engine without torch"""
    live: LiveWeights | None
    """None: an engine without weights of its own"""

    def check_total(self, offered: int) -> None:
        """Raises InvalidRequest if the number of offered bytes is not the manifest's."""
        if offered != self.total:
            raise InvalidRequest(f"{offered} bytes are offered, the manifest's tensors have {self.total}")


class Payload:
    """The service's end of one refresh: base of one class per transport."""

    via: str
    unannounced = False
    """whether bytes arrive without messages, so that the loop must poll `ready`"""
    window_bytes = 0
    """bytes of chunks that the trainer may send ahead"""
    read_bytes = 0
    """bytes of chunks read so far"""
    sent_bytes: int | None = None
    """number of sent bytes, if it is not the manifest's"""

    @property
    def ready(self) -> bool:
        """Whether `read` would return bytes or raise."""
        return True

    def put(self, offset: int, data: Sequence[np.ndarray]) -> int:
        """Add a chunk, a list of [bytes] uint8. Returns its end in the payload. Raises WeightsRefused if this transport has no
        chunks, InvalidRequest for a chunk that does not fit."""
        raise WeightsRefused(f"a chunk in a refresh via {self.via}")

    def check_sent(self) -> None:
        """Check at Commit that all chunks have arrived. Raises WeightsRefused."""

    def read(self, memory: Any) -> int:
        """Copy the next bytes to the beginning of a [bytes] uint8 numpy array. Returns their number; 0: none have arrived yet.
        If the offer is `on_device`, also accepts a tensor there, and copies on the current stream."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the payload. May be repeated."""
