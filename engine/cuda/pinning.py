"""Host memory of a pool, pinned piece by piece: the first part at once, the rest by a thread while the pool is in use.

    rows   │ pinned at once │ piece │ piece │ piece that is being pinned │ not pinned yet │
                                            └ ready

A driver pins a few gigabytes per second, so a start would wait for a large pool. The thread writes each piece, which commits
its pages outside of CUDA, then registers it, and then pauses PAUSE times as long, since a launch may wait while the driver
registers. A piece has whole pages and whole rows, so no copy of a row crosses two registrations. The thread ends when all rows
are pinned, the memory is dropped, the main thread has ended, CUDA refuses, or too little host memory is free.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from rollout.engine.memory import HostRows, PinnedMap, anonymous, free_memory, pin_failed

PIECE_BYTES = 64 << 20
PAUSE = 9
"""pause after a piece, in times of what it took: steps may wait for a tenth of the time at most"""
LONGEST_PAUSE_S = 1.0
"""so that a process that ends does not wait for the thread"""
SPARE_BYTES = 1 << 30
"""host memory that stays free"""

log = logging.getLogger(__name__)


class Pins:
    """The pinned rows of a pool. Holds addresses only, so that it keeps no memory."""

    def __init__(self, address: int, rows: int, row_bytes: int, cudart: Any) -> None:
        self.rows, self.ready = rows, 0
        self.row_bytes = row_bytes
        self._address, self._cudart = address, cudart
        self._registered: list[int] = []

    def rows_of(self, size: int) -> int:
        """Return the rows of the next piece of about `size` bytes: whole pages, unless it is the last one."""
        least = mmap.PAGESIZE // math.gcd(self.row_bytes, mmap.PAGESIZE)
        return min(self.rows - self.ready, max(1, -(-size // (self.row_bytes * least))) * least)

    def add(self, rows: int) -> int:
        """Pin the next rows, with the memory held. Returns CUDA's error, 0 for none."""
        address, size = self._address + self.ready * self.row_bytes, rows * self.row_bytes
        ctypes.memset(address, 0, size)  # without the GIL, as the call below
        if not (status := int(self._cudart.cudaHostRegister(address, size, 0))):
            self._registered.append(address)
            self.ready += rows
        return status

    def remove(self) -> None:
        """Unpin all rows."""
        for address in self._registered:
            self._cudart.cudaHostUnregister(address)


def pinned_rows(
    rows: int,
    row_bytes: int,
    at_once: int,
    enter: Callable[[], None],
    cudart: Any = None,
    free: Callable[[], int] = free_memory,
    pause: Callable[[float], None] = time.sleep,
) -> HostRows:
    """Allocate the host memory of a pool, filled with zeros, and pin its rows. Raises OSError if the first part cannot be
    pinned.

    Args:
        at_once: bytes of the first part, rounded up to rows and pages.
        enter: called in the thread before it pins, to choose the device.
        cudart: torch.cuda.cudart(), or a stand-in for tests.
        free: returns the free bytes of host memory.
        pause: waits for seconds.
    """
    memory = anonymous(rows * row_bytes, PinnedMap)
    cudart = cudart or torch.cuda.cudart()
    pins = Pins(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), rows, row_bytes, cudart)
    first = pins.rows_of(at_once)
    if status := pins.add(first):
        raise pin_failed(first * row_bytes, status)
    memory.unpin = pins.remove
    if pins.ready < rows:
        arguments = weakref.ref(memory), pins, enter, free, pause
        threading.Thread(target=_pin_the_rest, args=arguments, name="pin host memory").start()
    return HostRows(memory, lambda: pins.ready)


def _pin_the_rest(
    memory: weakref.ref[PinnedMap],
    pins: Pins,
    enter: Callable[[], None],
    free: Callable[[], int],
    pause: Callable[[float], None],
) -> None:
    """Pin the other rows, a piece at a time. Holds the memory only while it pins, so the last holder may drop it between."""
    enter()
    started = time.perf_counter()
    while pins.ready < pins.rows and threading.main_thread().is_alive():
        held = memory()
        if held is None:
            return
        began, rows = time.perf_counter(), pins.rows_of(PIECE_BYTES)
        why = ""
        if free() < rows * pins.row_bytes + SPARE_BYTES:
            why = f"less than {SPARE_BYTES / 2**30:.0f} GiB would stay free"
        elif status := pins.add(rows):
            why = f"cudaHostRegister: error {status}"
        del held
        if why:
            log.warning(
                "the host pool stays smaller than configured gib=%.1f of=%.1f reason=%r",
                pins.ready * pins.row_bytes / 2**30, pins.rows * pins.row_bytes / 2**30, why,
            )  # fmt: skip
            return
        pause(min(LONGEST_PAUSE_S, PAUSE * (time.perf_counter() - began)))
    log.info("host pool pinned gib=%.1f seconds=%.1f", pins.ready * pins.row_bytes / 2**30, time.perf_counter() - started)
