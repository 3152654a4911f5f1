"""Sends tensors in messages. Zero-copy at both ends: chunks are views of the tensors' memory and of libzmq's buffers.

    payload  ┌ embed ────────────────┬ norm ┬ q ──────┬ … ┐
    chunks   │ 0       │ 1       │ 2             │ 3          each a list of views, CHUNK_BYTES in all
             └ staged ─┴─ in flight, at most WINDOW_BYTES ─┘

A chunk is answered when it is staged, and the trainer sends at most WINDOW_BYTES ahead of the answers. That bounds the memory
of the service if the trainer is faster than staging.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from rollout.engine.values import Limits
from rollout.transport.errors import InvalidRequest, WeightsRefused
from rollout.transport.weights.ends import Channel, Expected, Payload, Sender, WeightTransport
from rollout.transport.weights.offers import InlineOffer
from rollout.transport.weights.tensors import Tensors, digest, on_host

CHUNK_BYTES = 4 << 20
CHUNK_VIEWS = 32
"""maximum views of one chunk: each is a frame, and messages have a limited number of frames"""
WINDOW_BYTES = 128 << 20


# the trainer's end


class Inline(WeightTransport):
    via = "inline"

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        arrays = tensors.on_host()
        return InlineSender(self.via, InlineOffer(), tensors.manifest(map(digest, arrays)), arrays)

    def after(self, other: Sender) -> Sender:
        """Offer the tensors of another sender that the service refused."""
        return InlineSender(self.via, InlineOffer(), other.manifest, on_host(other.data))


class InlineSender(Sender):
    """Sends chunks, at most a window ahead of their answers."""

    def before_commit(self, channel: Channel) -> None:
        window, in_flight = channel.window_bytes(), 0
        sent: deque[tuple[Callable[[], None], int]] = deque()
        for offset, views in chunks(self.data, channel.limits):
            size = sum(map(len, views))
            while sent and in_flight + size > window:
                staged, staged_bytes = sent.popleft()
                staged()
                in_flight -= staged_bytes
            sent.append((channel.chunk(offset, views), size))
            in_flight += size


# the service's end


def opened(offer: InlineOffer, expected: Expected) -> Payload:
    """Open the service's end of an offer."""
    return InlinePayload(expected.total)


class InlinePayload(Payload):
    via = "inline"
    window_bytes = WINDOW_BYTES

    def __init__(self, total: int) -> None:
        self.read_bytes = 0
        """of the payload"""
        self.came = 0
        self._total = total
        self._views: deque[np.ndarray] = deque()

    @property
    def ready(self) -> bool:
        """Whether unread bytes have arrived."""
        return bool(self._views)

    def put(self, offset: int, data: Sequence[np.ndarray]) -> int:
        for view in data:
            if view.dtype != np.uint8 or view.ndim != 1:
                raise InvalidRequest(f"chunk at {offset}: {view.dtype} of shape {view.shape}, must be uint8 [bytes]")
        end = offset + sum(map(len, data))
        if end <= self.came and 0 <= offset:
            return end
        if offset != self.came or end > self._total:
            raise InvalidRequest(f"chunk of bytes {offset} to {end} after {self.came} of {self._total} bytes")
        if end - self.read_bytes > WINDOW_BYTES:
            raise InvalidRequest(f"more than {WINDOW_BYTES} bytes are in flight; wait for the answers to chunks")
        self._views.extend(view for view in data if len(view))
        self.came = end
        return end

    def check_sent(self) -> None:
        if self.came < self._total:
            raise WeightsRefused(f"commit after {self.came} of {self._total} bytes")

    def read(self, memory: np.ndarray) -> int:
        if not self._views:
            return 0
        view = self._views[0]
        count = min(len(view), len(memory))
        memory[:count] = view[:count]
        self.read_bytes += count
        if count < len(view):
            self._views[0] = view[count:]
        else:
            self._views.popleft()
        return count

    def close(self) -> None:
        self._views.clear()


def chunks(arrays: Sequence[np.ndarray], limits: Limits) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Split the payload, the concatenation of [bytes] uint8 `arrays`, into (offset, views) within `limits`."""
    most_bytes, most_views = min(CHUNK_BYTES, limits.max_frame_bytes), min(CHUNK_VIEWS, limits.max_frames - 1)
    offset = size = 0
    views: list[np.ndarray] = []
    for array in arrays:
        start = 0
        while start < len(array):
            view = array[start : start + most_bytes - size]
            views.append(view)
            start += len(view)
            size += len(view)
            if size == most_bytes or len(views) == most_views:
                yield offset, views
                offset, size, views = offset + size, 0, []
    if views:
        yield offset, views
