"""The exchange of ranks that share no memory: a thread of each rank sends its parts to the others over a process group.

    step ── writes this rank's part, arrives ──► memory of this process ◄── parts of the others, as if they had written them
                                                        │     ▲
                                                        ▼     │
                                     thread ──── all-gather of the parts ──── other ranks

So the products, their order of sums and their bits are those of ranks that share memory: nothing is added on the way."""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
import time
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_long, c_void_p
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import AllgatherOptions

from rollout.engine.cpu.sums import SHARED_BYTES, Exchange, ExchangeStruct, shared_bytes
from rollout.engine.values import RankLost

FUTEX = {"x86_64": 202, "aarch64": 98}
"""number of the system call, by the kind of machine"""
LOOK_S = 0.5
"""how often the thread looks whether it is to end"""
NOTICE_S = 1.0
"""how long it may take until a rank is known to have ended whose connection has closed"""
HEADER = 8
"""bytes in front of a part: what is exchanged"""


class TimeSpec(ctypes.Structure):
    """`timespec` of C."""

    _fields_ = [("seconds", c_long), ("nanoseconds", c_long)]


class GroupExchange(Exchange):
    """One rank's view of an exchange over a process group.

    Args:
        width: numbers of the widest row that is summed.
        group: of all ranks, for this exchange alone.
        library: the kernels.
    """

    def __init__(self, width: int, rank: int, ranks: int, group: Any, library: ctypes.CDLL) -> None:
        super().__init__(width, rank, ranks, mmap.mmap(-1, shared_bytes(ranks, width)), library=library)
        assert self._meeting is not None
        self._group = group
        self._broken = False
        self._closed = threading.Event()
        self._meeting.of[rank].asleep = 1  # the thread: so the kernels wake it
        threading.Thread(target=self._send_parts, name="rollout-ranks", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    @property
    def failed(self) -> bool:
        return self._broken or super().failed

    def gather(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        own = raw(tensor.detach().contiguous())
        whole = [torch.empty(tuple(shape), dtype=tensor.dtype) for shape in shapes]
        self.check()
        try:
            found = self._all_gather(-len(own) - 1, own, max(each.nbytes for each in whole))
        except RuntimeError as error:
            raise self._lost(error) from error
        for rank, ((size, data), to) in enumerate(zip(found, whole, strict=True)):
            if size != -to.nbytes - 1:
                raise RankLost(f"rank {rank} of {self.ranks} is out of step: it exchanges something else")
            raw(to)[...] = data[: to.nbytes]
        return whole

    def _lost(self, error: RuntimeError) -> RankLost:
        """Make the error for an exchange that has failed. Waits for the reason, which comes another way."""
        self._broken, until = True, time.monotonic() + NOTICE_S
        while self.lost is None and time.monotonic() < until:
            self._closed.wait(0.01)
        who = "a rank" if self.lost is None else f"rank {self.lost} of {self.ranks}"
        if "imed out" in str(error):
            return RankLost(f"{who} did not answer within {self.patience_s:g} s")
        return RankLost(f"{who} has ended: {str(error).splitlines()[0]}")

    def _all_gather(self, size: int, own: np.ndarray, room: int) -> list[tuple[int, np.ndarray]]:
        """Return what each rank gives: `size`, and bytes, of which there are `room`."""
        sent = torch.zeros(HEADER + room, dtype=torch.uint8)
        sent[:HEADER].view(torch.int64)[0] = size
        sent.numpy()[HEADER : HEADER + len(own)] = own
        received = [torch.empty_like(sent) for _ in range(self.ranks)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=self.patience_s)
        self._group.allgather([received], [sent], options).wait()
        return [(int(each[:HEADER].view(torch.int64)[0]), each.numpy()[HEADER:]) for each in received]

    def _send_parts(self) -> None:
        """Exchange the sums of this rank, one after the other. Returns after one fails: the kernels then time out."""
        turn = 0
        while self._arrives(turn + 1):
            turn += 1
            assert self._meeting is not None
            size, parts = self._meeting.of[self.rank].size[turn % 2], self._parts[turn % 2]
            try:
                found = self._all_gather(size, parts[self.rank, : 4 * size], 4 * size)
            except RuntimeError:
                return
            for rank, (other, data) in enumerate(found):
                if rank != self.rank:
                    parts[rank, : len(data)] = data
                    self._arrive(rank, turn, other)

    def _arrives(self, turn: int) -> bool:
        """Wait until this rank has come to an exchange. Whether it has: not if this is closed."""
        assert self._meeting is not None
        own = self._meeting.of[self.rank]
        address, wait = ctypes.addressof(own), TimeSpec(0, int(LOOK_S * 1e9))
        system, number = ctypes.CDLL(None).syscall, c_long(FUTEX[platform.machine()])
        before = c_int32(turn - 1)
        while own.arrived == before.value and not self._closed.is_set():
            system(number, c_void_p(address), c_int64(0), before, ctypes.byref(wait), None, c_int64(0))
        return not self._closed.is_set()

    def _arrive(self, rank: int, turn: int, size: int) -> None:
        """Let another rank come to an exchange in the memory of this process. Its part is there."""
        memory = self._memory.ctypes.data
        other = ExchangeStruct(rank, 0, self.struct.room, 0, turn, 0, memory + SHARED_BYTES, memory)  # it waits for 0 ranks
        assert self._library is not None
        self._library.rollout_meet(ctypes.byref(other), c_int64(size))


def raw(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy()
