"""Products whose inputs are cut into eight slices (`c/sums.c`), and the memory in which the ranks of a replica exchange what
they have of them.

    alone       one rank has all slices
    two ranks   have four each: half of the tree of sums; each writes its half where both can read it, and adds up the rest

The bits do not depend on the number of ranks. `Exchange` also gathers other tensors, such as the logits of each rank."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from ctypes import c_char, c_int32, c_int64, c_void_p

import numpy as np
import torch

from rollout.engine.cpu.build import check_layout
from rollout.engine.cpu.experts import Routes
from rollout.engine.cpu.functions import plain_calls
from rollout.engine.cpu.kernels import Kernels, Linear, linear_struct
from rollout.engine.forward.summed import Summed
from rollout.engine.values import RankLost

MOST_RANKS = 8
ROWS = 256
"""rows whose sums are exchanged at once"""
SHARED_BYTES = 4096
"""room for a `Meeting` in front of the parts"""


class _Arrival(ctypes.Structure):
    _fields_ = [("arrived", c_int32), ("asleep", c_int32), ("size", c_int64 * 2), ("apart", c_char * 40)]


class Meeting(ctypes.Structure):
    """`Meeting` of c/sums.h."""

    _fields_ = [("lost", c_int32), ("apart", c_char * 60), ("of", _Arrival * MOST_RANKS)]


class ExchangeStruct(ctypes.Structure):
    """`Exchange` of c/sums.h."""

    _fields_ = [
        *((name, c_int64) for name in ("rank", "ranks", "room", "patience_ms", "turn", "failed")),
        ("parts", c_void_p), ("meeting", c_void_p),
    ]  # fmt: skip


class SumStruct(ctypes.Structure):
    """`Sum` of c/sums.h."""

    _fields_ = [
        ("l", Linear), ("slices", c_int64), ("rows", c_int64),
        *((name, c_void_p) for name in ("x", "residual", "out", "packed", "exchange")),
    ]  # fmt: skip


class GroupedSumStruct(ctypes.Structure):
    """`GroupedSum` of c/sums.c."""

    _fields_ = [("all", SumStruct), ("groups", c_int64), ("expert", c_void_p), ("begin", c_void_p)]


def shared_bytes(ranks: int, width: int) -> int:
    """Return the bytes of memory in which ranks exchange rows of `width` numbers."""
    return SHARED_BYTES + 2 * ranks * ROWS * width * 4


class Exchange:
    """One rank's view of what the ranks of a replica exchange.

    Args:
        width: numbers of the widest row that is summed.
        shared: zeros that all ranks map, `shared_bytes` of them; None: there is one rank.
        patience_s: how long a rank waits for another one.
        library: the kernels, of `SumKernels`, with which tensors are gathered; None: none are.
    """

    on_host = True

    def __init__(
        self,
        width: int,
        rank: int = 0,
        ranks: int = 1,
        shared: mmap.mmap | None = None,
        patience_s: float = 60.0,
        library: ctypes.CDLL | None = None,
    ) -> None:
        assert ranks in (1, 2, 4, 8) and (ranks == 1) == (shared is None)
        self.rank, self.ranks, self.patience_s, self._library = rank, ranks, patience_s, library
        self._memory: np.ndarray = (
            np.zeros(shared_bytes(1, width), np.uint8) if shared is None else np.frombuffer(shared, np.uint8)
        )
        assert len(self._memory) >= shared_bytes(ranks, width)
        start, room = self._memory.ctypes.data, ROWS * width
        meeting = None if shared is None else start
        self._meeting = None if meeting is None else Meeting.from_address(meeting)
        self.struct = ExchangeStruct(rank, ranks, room, round(1000 * patience_s), 0, 0, start + SHARED_BYTES, meeting)
        parts = self._memory[SHARED_BYTES : SHARED_BYTES + 2 * ranks * room * 4]
        self._parts: np.ndarray = parts.reshape(2, ranks, room * 4)

    def lose(self, rank: int) -> None:
        """Tell all ranks that one has ended: whoever waits raises RankLost. For any thread."""
        assert self._meeting is not None
        self._meeting.lost = rank + 1

    @property
    def lost(self) -> int | None:
        """Return the rank that has ended; None: all run."""
        lost = 0 if self._meeting is None else self._meeting.lost
        return lost - 1 if lost else None

    @property
    def failed(self) -> bool:
        """Return whether no exchange will succeed any more."""
        return self.lost is not None or self.struct.failed != 0

    def patience(self, seconds: float) -> None:
        """Set how long this rank waits for another one."""
        self.patience_s, self.struct.patience_ms = seconds, round(1000 * seconds)

    def close(self) -> None:
        """End what this exchange has started: nothing."""

    def check(self) -> None:
        """Raise RankLost if an exchange has failed."""
        failed = self.struct.failed
        if failed > 0:
            raise RankLost(f"rank {failed - 1} of {self.ranks} has ended")
        if failed < -MOST_RANKS:
            raise RankLost(f"rank {-failed - MOST_RANKS - 1} of {self.ranks} is out of step: it exchanges something else")
        if failed < 0:
            raise RankLost(f"rank {-failed - 1} of {self.ranks} did not answer within {self.patience_s:g} s")

    def wait(self, reached: Callable[[], bool]) -> None:
        """Do nothing: a step has been computed when it is launched."""

    def numbers(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return self.gather(tensor, shapes)

    def gather(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the tensors that the ranks give, in their order. shapes: of each rank's; all have one dtype. Raises
        RankLost."""
        assert self._library is not None
        own = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        whole = [torch.empty(tuple(shape), dtype=tensor.dtype) for shape in shapes]
        raw = [each.view(-1).view(torch.uint8).numpy() for each in whole]
        assert raw[self.rank].shape == own.shape
        room = self._parts.shape[2]
        for start in range(0, max(map(len, raw)), room):
            self.struct.turn += 1
            parts, piece = self._parts[self.struct.turn % 2], own[start : start + room]
            parts[self.rank, : len(piece)] = piece
            self._library.rollout_meet(ctypes.byref(self.struct), c_int64(-start - 1))
            self.check()
            for rank, to in enumerate(raw):
                left = to[start : start + room]
                left[...] = parts[rank, : len(left)]
        return whole


def exchange_of(summed: Summed, width: int) -> Exchange:
    """Return the exchange of a product of the CPU with `width` outputs: one of its own, if this rank has all slices."""
    assert summed.exchange is None or isinstance(summed.exchange, Exchange)
    return summed.exchange or Exchange(width)


class SumKernels:
    """The kernels of c/sums.c."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.library = kernels, kernels.library
        structs = {"Meeting": Meeting, "Exchange": ExchangeStruct, "Sum": SumStruct, "GroupedSum": GroupedSumStruct}
        check_layout(self.library, "rollout_layout_sums", **structs)
        for name in ("rollout_sum", "rollout_grouped_sum", "rollout_meet", "rollout_sum_bytes"):
            getattr(self.library, name).restype = c_int64

    def packed(self, rows: int, inputs: int, slices: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a buffer for `rows` rows of a product's inputs."""
        sizes = (c_int64(each) for each in (min(rows, ROWS), inputs, slices, dtype == torch.bfloat16))
        size = self.library.rollout_sum_bytes(ctypes.byref(self.kernels.team()), *sizes)
        return torch.empty(size, dtype=torch.uint8)

    @plain_calls
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, summed: Summed) -> torch.Tensor:
        """Return [T, inputs] · [outputs, inputs]ᵀ (+ [outputs]) → [T, outputs], all bf16 or all fp32, on the CPU, summed over
        the ranks. Raises RankLost."""
        assert x.dtype == weight.dtype and x.shape[1] == weight.shape[1] and not weight.shape[1] % (2 * summed.slices)
        x, weight, out = x.contiguous(), weight.contiguous(), x.new_empty(len(x), len(weight))
        bias = None if bias is None else bias.contiguous()
        if not out.numel():
            return out
        exchange = exchange_of(summed, len(weight))
        packed = self.packed(len(x), weight.shape[1], summed.slices, x.dtype)
        work = SumStruct(
            linear_struct(weight, bias), summed.slices, len(x), x.data_ptr(), None, out.data_ptr(), packed.data_ptr(),
            ctypes.addressof(exchange.struct),
        )  # fmt: skip
        self.library.rollout_sum(ctypes.byref(self.kernels.team()), ctypes.byref(work))
        exchange.check()
        return out

    @plain_calls
    def grouped(self, x: torch.Tensor, weight: torch.Tensor, routes: Routes, summed: Summed) -> torch.Tensor:
        """Return x [R, inputs] · weight[expert]ᵀ for each row of `routes`, [R, outputs], in the bits of `linear`. weight:
        [E, outputs, inputs], contiguous. Raises RankLost."""
        outputs, inputs = weight.shape[1:]
        assert x.dtype == weight.dtype and x.shape == (len(routes.choice), inputs) and not inputs % (2 * summed.slices)
        assert weight.is_contiguous() and (not len(routes.expert) or routes.expert[-1] < len(weight))
        x, out = x.contiguous(), x.new_empty(len(x), outputs)
        exchange = exchange_of(summed, outputs)
        packed = self.packed(len(x), inputs, summed.slices, x.dtype)
        work = GroupedSumStruct(
            SumStruct(
                Linear(weight.data_ptr(), None, outputs, inputs, x.dtype == torch.bfloat16, False, 0, inputs), summed.slices,
                len(x), x.data_ptr(), None, out.data_ptr(), packed.data_ptr(), ctypes.addressof(exchange.struct),
            ),
            len(routes.expert), routes.expert.ctypes.data, routes.begin.ctypes.data,
        )  # fmt: skip
        self.library.rollout_grouped_sum(ctypes.byref(self.kernels.team()), ctypes.byref(work))
        exchange.check()
        return out
