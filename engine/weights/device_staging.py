"""Stages weights on the device, from a payload that is in device memory too (CUDA IPC).

    payload    the trainer's memory, opened here; or slots that received it
    staged     the same tensors in the model's dtype on the device, in a temporary buffer; if the weights were dropped, the live
               tensors themselves
    stream     copy → hash, cast, check → copy → …       in parallel with the steps, which do not wait

The host only launches work. It reads the results of the checks at the end, when an event says that they are complete. As in
host memory, digests are taken of the copy, so later changes of the original have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any

import torch

from rollout.engine.memory import DeviceMemory
from rollout.engine.values import WeightUpdate
from rollout.engine.weights.staging import Source, StagedTensor, Staging
from rollout.engine.weights.tensors import InvalidWeights, flat_bytes

RANGED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""dtypes whose values may overflow the model's dtype; fp8 values cannot"""


class DeviceStaging(Staging):
    """Stages into device memory.

    Args:
        memory: of a device that has `hashes`. The places of all parts are on this device. The source fills [bytes] uint8
            tensors on the device, on the current stream.
    """

    def __init__(
        self,
        update: WeightUpdate,
        parts: list[StagedTensor],
        memory: DeviceMemory,
        on_close: Callable[[], None],
    ) -> None:
        assert memory.hashes is not None
        self._streams, self._stream = memory.streams, memory.streams.Stream(memory.device)
        self._stream.wait_stream(self._streams.current_stream(memory.device))  # earlier work may still read this memory
        with self._streams.stream(self._stream):
            self._hashes: Any = memory.hashes(2 * len(parts))
            """row 2 i: part i as sent; row 2 i + 1: as cast"""
            self._finite = torch.ones((len(parts), 2), dtype=torch.bool, device=memory.device)
            """[parts, 2]: as staged, as sent"""
            self._device_scratch = torch.empty(self._scratch_bytes(parts), dtype=torch.uint8, device=memory.device)
            super().__init__(update, parts, torch.empty(0, dtype=torch.uint8).numpy(), on_close)

    def feed(self, source: Source) -> int:
        with self._streams.stream(self._stream):
            return super().feed(source)

    def close(self) -> None:
        """Wait for the launched work, then free the memory. May be called again."""
        if not self._closed:
            self._work.close()
            if not self.complete:
                self._stream.synchronize()  # the caller frees the payload next
            self._parts, self._hashes, self._finite, self._device_scratch = [], None, self._finite[:0], self._device_scratch[:0]
        super().close()

    def _scratch_bytes(self, parts: list[StagedTensor]) -> int:
        """Return the bytes of the largest slice that is cast, or not staged at all."""
        passing = [part.nbytes for part in parts if part.place is None or part.place.dtype != part.dtype]
        return max((end - begin for size in passing for begin, end in self._hashes.cuts(size)), default=0)

    def _work_through(self) -> Generator[bool, Source | None, None]:
        for i, part in enumerate(self._parts):
            for begin, end in self._hashes.cuts(part.nbytes):
                staged = None if part.place is None else self._staged(part, begin, end - begin)
                straight = staged is not None and staged.dtype == part.dtype
                raw = flat_bytes(staged) if staged is not None and straight else self._device_scratch[: end - begin]
                yield from self._fill(raw)
                self._hashes.update(2 * i, raw, end == part.nbytes)
                if staged is not None and not straight:
                    sent = raw.view(part.dtype)
                    staged.copy_(sent)
                    self._hashes.update(2 * i + 1, flat_bytes(staged), end == part.nbytes)
                    self._look_through(i, 1, sent)
                    self.rounded.launch(part.target or part.info.name, math.prod(part.info.shape), sent, staged)
                if staged is not None:
                    self._look_through(i, 0, staged)
        assert self.received == self.total
        digests = self._hashes.read()
        ended = self._stream.record_event()
        while not ended.query():
            yield False
        self._check(digests(), self._finite.tolist())
        self.rounded.read()
        yield True

    def _staged(self, part: StagedTensor, begin: int, count: int) -> torch.Tensor:
        """Return the elements that `count` bytes of a part from byte `begin` become."""
        return part.elements(begin, count)

    def _look_through(self, i: int, column: int, values: torch.Tensor) -> None:
        if values.dtype in RANGED and values.numel():
            low, high = torch.aminmax(values)  # propagates NaN, and needs no temporary
            self._finite[i, column] &= torch.isfinite(low) & torch.isfinite(high)

    def _check(self, digests: list[str], finite: list[list[bool]]) -> None:
        for i, part in enumerate(self._parts):
            if part.checked and digests[2 * i] != part.info.digest:
                raise InvalidWeights("the bytes do not match the manifest's digest", part.info.name)
            staged_is, sent_is = finite[i]
            if not staged_is:
                cast = part.place is not None and part.place.dtype != part.dtype
                overflows = "a value overflows the model's dtype"
                raise InvalidWeights(overflows if cast and sent_is else "it holds NaN or infinity", part.info.name)
            if part.target is not None:
                assert part.place is not None
                self.digests[part.target] = digests[2 * i + (part.place.dtype != part.dtype)]
