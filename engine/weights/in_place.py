"""Refreshes without a second copy of the model, where a device has no room for one: the payload is checked where it is, while
steps run, and copied into the live tensors between two steps.

    beside steps    payload ─→ scratch ─→ digests, cast, checks        as `rollout.engine.weights.device_staging`, kept nowhere
    the exchange    payload ─→ live tensors, digests again             they must be those that were checked

If the payload has changed between the two, nothing is left to restore: the weights are dropped, as after a sleep of level 2,
and no step runs until a refresh of all tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout.engine.memory import DeviceMemory
from rollout.engine.values import WeightUpdate
from rollout.engine.weights.device_staging import DeviceStaging
from rollout.engine.weights.staging import Source, StagedTensor
from rollout.engine.weights.tensors import InvalidWeights, flat_bytes


def stage_on_device(
    update: WeightUpdate,
    parts: list[StagedTensor],
    memory: DeviceMemory,
    on_close: Callable[[], None],
    in_place: bool,
) -> DeviceStaging:
    """Begin to stage in device memory (`rollout.engine.weights.parts.StageOnDevice`)."""
    return (InPlaceStaging if in_place else DeviceStaging)(update, parts, memory, on_close)


class InPlaceStaging(DeviceStaging):
    """Checks a payload that stays readable until the commit, and then writes it. The places of its parts are the live tensors.
    Its first source begins again after the last byte."""

    in_place = True

    def __init__(
        self, update: WeightUpdate, parts: list[StagedTensor], memory: DeviceMemory, on_close: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._cast = torch.empty(0, dtype=torch.uint8)
        self._source: Source | None = None
        super().__init__(update, parts, memory, on_close)

    def feed(self, source: Source) -> int:
        self._source = self._source or source
        return super().feed(source)

    def write(self) -> None:
        """Copy the payload into the live tensors, with no step in flight. Raises InvalidWeights and what the source raises; the
        weights are lost then."""
        assert self.complete and self._memory.hashes is not None
        with self._streams.stream(self._stream):
            self._stream.wait_stream(self._streams.current_stream(self._memory.device))
            hashes: Any = self._memory.hashes(len(self._parts))
            for i, part in enumerate(self._parts):
                for begin, end in hashes.cuts(part.nbytes):
                    live = None if part.place is None else part.elements(begin, end - begin)
                    straight = live is not None and live.dtype == part.dtype
                    raw = flat_bytes(live) if live is not None and straight else self._device_scratch[: end - begin]
                    self._read_again(raw)
                    hashes.update(i, raw, end == part.nbytes)
                    if live is not None and not straight:
                        live.copy_(raw.view(part.dtype))
            digests = hashes.read()()
        self._streams.current_stream(self._memory.device).wait_stream(self._stream)
        for part, digest in zip(self._parts, digests, strict=True):
            if part.checked and digest != part.info.digest:
                raise InvalidWeights(
                    "its bytes have changed between their check and the exchange, which was in place: the weights are dropped; "
                    "refresh all tensors again, and leave them as they are until the refresh is over",
                    part.info.name,
                )

    def _read_again(self, raw: torch.Tensor) -> None:
        filled = 0
        while filled < len(raw):
            assert self._source is not None
            count = self._source(raw[filled:])
            if not count:
                raise InvalidWeights("the trainer's memory is gone; the weights are dropped: refresh all tensors again")
            filled += count

    def _staged(self, part: StagedTensor, begin: int, count: int) -> torch.Tensor:
        elements = part.elements(begin, count)
        if len(self._cast) < elements.nbytes:
            self._cast = torch.empty(elements.nbytes, dtype=torch.uint8, device=self._memory.device)
        return self._cast[: elements.nbytes].view(elements.dtype)
