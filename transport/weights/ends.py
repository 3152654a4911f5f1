"""Interfaces of a weight transport: `WeightTransport`, `Sender` at the client; `WeightOffer`, `Payload` at the service."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from engine.types import Limits, Refreshed, TensorInfo
from transport.errors import InvalidRequest, RolloutError, SourceUnreachable, WeightsRefused
from transport.weights.tensors import Tensors


class Channel(Protocol):
    """What the connection does for a sender while its refresh is open."""

    @property
    def limits(self) -> Limits:
        """Limits of the service."""
        ...

    def window_bytes(self) -> int:
        """Wait for the lease. Returns how many bytes of chunks may be in flight."""
        ...

    def chunk(self, offset: int, views: list[np.ndarray]) -> Callable[[], None]:
        """Send a chunk; what is returned waits until it is staged."""
        ...


class Sender:
    """The trainer's end of one refresh. This one is for ways whose offer says all: nothing is sent besides it.

    Args:
        via: name of the way, as Refreshed has it.
        offer: where the service finds the bytes, a tagged Struct of the way's own; travels in Begin.
        manifest: of the tensors, digests included.
        data: [bytes] uint8 arrays or tensors, held until the refresh is over; [] where the service has a copy of its own."""

    def __init__(self, via: str, offer: Any, manifest: list[TensorInfo], data: Sequence[Any]) -> None:
        self.via = via
        self.offer = offer
        self.manifest = manifest
        self.data = data
        self.reason = "it was asked for"
        """why this way"""
        self.instead: Callable[[Sender], Sender] | None = None
        """makes of this one the sender for a service that does not see what is offered; None: the refresh fails then"""
        self.instead_of: tuple[type[RolloutError], ...] = (SourceUnreachable,)
        """refusals after which `instead` is tried"""
        self.applied: Callable[[Refreshed], None] = lambda refreshed: None
        """called when it is live"""

    def before_commit(self, channel: Channel) -> None:
        """Send the bytes that must be there before Commit is asked for."""

    def after_commit(self, over: Callable[[], bool], end: float) -> None:
        """Send the bytes for which the service looks once it has been asked to commit: all, or until `over` says that it has
        answered. Raises SourceUnreachable; RequestTimeout at `end` (time.monotonic)."""

    def close(self) -> None:
        """Free what this refresh alone needed. May be repeated."""


class WeightTransport:
    """The trainer's end of all its refreshes by one way: keeps what the next one can use again."""

    via: str

    def offer_folder(self, folder: Path) -> Sender:
        """Offer the safetensors of a folder, absolute. Raises InvalidRequest where this way has no use for one."""
        raise InvalidRequest(f'via="{self.via}" takes tensors, not the path of a folder')

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        """Offer tensors. `capabilities`: what the service said in Welcome.

        Raises SourceUnreachable where the two ends do not have this way, WeightsRefused naming a tensor that cannot go it."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what is kept from one refresh to the next."""


class WeightOffer(msgspec.Struct, frozen=True):
    """What stands in Begin: base of the tagged Struct of each way, which opens itself."""

    @property
    def on_device(self) -> bool:
        """The payload lies, or comes to lie, on the device of the service's model: `Payload.read` fills tensors there."""
        return False

    def open(self, expected: Expected) -> Payload:
        """Open the service's end. Raises as `transport.weights.open_payload`."""
        raise NotImplementedError


class SharedMapping(Protocol):
    """What the service needs of `transport.weights.shm.SegmentView`."""

    def open(self, offer: Any) -> np.ndarray:
        """Map what is offered. Returns [bytes] uint8."""
        ...


class LiveTensors(Protocol):
    """What the service needs of `engine.weights.inventory.Inventory`. name: any that the manifest may list."""

    def dtype(self, name: str) -> str: ...
    def size(self, name: str) -> tuple[int, int]:
        """Return the bytes of a tensor, and of an element of it."""
        ...

    def read_slice(self, name: str, start: int, size: int) -> np.ndarray:
        """Copy live bytes, [size] uint8."""
        ...


class LiveWeights(Protocol):
    """What the service needs of `engine.weights.live.Weights`, for what says how weights change."""

    version: int
    dropped: bool

    @property
    def digest(self) -> str: ...
    @property
    def inventory(self) -> LiveTensors: ...


class Expected(NamedTuple):
    """What the service knows of a payload before it comes. An offer opens itself: `offer.open(expected) -> Payload`."""

    manifest: Sequence[TensorInfo]
    total: int
    """bytes"""
    segment: SharedMapping
    """keeps shared memory mapped from one refresh to the next"""
    device: Any
    """torch.device of the model; None: an engine without torch"""
    live: LiveWeights | None
    """None: an engine without weights of its own"""

    def check_total(self, offered: int) -> None:
        """Compare the bytes that are offered with the manifest's. Raises InvalidRequest."""
        if offered != self.total:
            raise InvalidRequest(f"{offered} bytes are offered, the manifest's tensors have {self.total}")


class Payload:
    """The service's end of one refresh. Base of one class for each way."""

    via: str
    unannounced = False
    """bytes come of which no message tells: the loop must look for them"""
    window_bytes = 0
    """that the trainer may send ahead in chunks"""
    read_bytes = 0
    """of the chunks"""
    sent_bytes: int | None = None
    """that travel, where they are not those of the manifest's tensors"""

    @property
    def ready(self) -> bool:
        """Whether `read` would give bytes, or raise."""
        return True

    def put(self, offset: int, data: Sequence[np.ndarray]) -> int:
        """Take a chunk, a list of [bytes] uint8. Returns the byte of the payload where it ends. Raises WeightsRefused for a way
        that has none, InvalidRequest for a chunk that does not fit."""
        raise WeightsRefused(f"a chunk in a refresh via {self.via}")

    def check_sent(self) -> None:
        """Check that all chunks have come, before Commit is taken. Raises WeightsRefused."""

    def read(self, memory: Any) -> int:
        """Fill the beginning of [bytes] uint8, a numpy array, with what comes next. Returns how many bytes; 0: nothing has come
        yet. One whose offer is `on_device` also fills a tensor there, on the current stream."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the payload holds. May be repeated."""
