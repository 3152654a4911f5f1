"""The exchange between ranks that have a CUDA device each, and the sums over what they exchange.

    a rank's sums of its slices [slices, rows, outputs] ─ add_up ─► its branch of the tree of eight, in fp32
    the branches of all ranks ◄─ all-gather ─► [ranks, rows, outputs] ─ add_up ─► + bias, rounded once

A library only moves bytes here: it adds nothing, so the order of sums is that of the ranks, for messages of any size. The
process group is NCCL's, one rank a device; tests have gloo's, on the CPU. The host launches a step and does not wait in it, so
nothing is noticed there: `wait` does, and gives the group up if a rank has ended or does not answer.

**Not run on a GPU yet.**"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions
from torch.nn.functional import linear

from rollout.engine.forward.summed import RankExchange, Summed, summed_of
from rollout.engine.values import RankLost

WIDTH = 1024
"""numbers that a program of `add_up` adds up"""
BUFFER_BYTES = 64 << 20
"""most bytes of sums that are written, or gathered, at once"""
LOOK_S = 5e-5
"""how often the host looks whether the device has come to a mark"""
LATER_S = 30.0
"""how much longer than `wait` the library itself waits: it ends the process then"""


class DeviceExchange:
    """One rank's view of an exchange between devices: a `RankExchange`.

    Args:
        host: of the same ranks, in host memory: small numbers, and which rank has ended.
        group: process group of all ranks, for this exchange alone.
    """

    on_host = False

    def __init__(self, host: RankExchange, group: Any) -> None:
        self.host, self._group = host, group
        self.rank, self.ranks = host.rank, host.ranks
        self._patience_s = 60.0
        self._failed = ""
        """why no exchange will succeed any more; "": none has failed"""

    @property
    def lost(self) -> int | None:
        return self.host.lost

    @property
    def failed(self) -> bool:
        return bool(self._failed) or self.host.failed

    def patience(self, seconds: float) -> None:
        self._patience_s = seconds
        self.host.patience(seconds)

    def numbers(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return self.host.numbers(tensor, shapes)

    def gather(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        sizes = [math.prod(shape) for shape in shapes]
        own = tensor.detach().reshape(-1)
        assert len(own) == sizes[self.rank], "other shapes than the tensor's"
        if len(own) < max(sizes):
            padded = own.new_empty(max(sizes))
            padded[: len(own)] = own
            own = padded
        whole = self._all_gather(own)
        return [part[:size].view(tuple(shape)) for part, size, shape in zip(whole, sizes, shapes, strict=True)]

    def sum(self, part: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum [rows, outputs] of all ranks' parts, in fp32, in a tree over the ranks, + bias [outputs], rounded once
        to `dtype`. Raises RankLost."""
        at_once = max(1, BUFFER_BYTES // (self.ranks * part.shape[1] * part.element_size()))
        made = []
        for piece in part.split(at_once):
            parts = self._all_gather(piece.reshape(-1)).view(self.ranks, *piece.shape)
            made.append(add_up(parts, bias, dtype))
        return made[0] if len(made) == 1 else torch.cat(made)

    def wait(self, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + self._patience_s
        while not reached():
            late = time.monotonic() > until
            if late or self.lost is not None:
                self._fail(f"another rank of {self.ranks} did not answer within {self._patience_s:g} s" if late else "")
            time.sleep(LOOK_S)
        if self.failed:
            self._fail("")

    def lose(self, rank: int) -> None:
        self.host.lose(rank)
        self._give_up()

    def close(self) -> None:
        self._give_up()
        self.host.close()

    def _all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return [ranks, numbers] of all ranks, in their order, given [numbers] of this one."""
        if self.failed:
            self._fail("")
        sent = own.contiguous().view(torch.uint8)
        whole = sent.new_empty(self.ranks * len(sent))
        options = AllgatherOptions()
        options.asyncOp = False  # on the stream of the step
        options.timeout = timedelta(seconds=self._patience_s + LATER_S)
        try:
            self._group._allgather_base(whole, sent, options).wait()
        except RuntimeError as error:
            self._fail(str(error).splitlines()[0])
        return whole.view(own.dtype).view(self.ranks, -1)

    def _fail(self, reason: str) -> None:
        """Raise RankLost, now and at each later exchange."""
        self._failed = self._failed or reason
        self._give_up()
        if self.lost is not None:
            raise RankLost(f"rank {self.lost} of {self.ranks} has ended")
        raise RankLost(self._failed or "the exchange of the ranks has failed")

    def _give_up(self) -> None:
        """End the kernels of the group that wait for another rank."""
        with suppress(RuntimeError):
            self._group.abort()


def process_group(store: Any, rank: int, ranks: int, device: torch.device) -> Any:
    """Make a process group of all ranks without torch's default one: of NCCL, and of gloo for a device that is the CPU, in
    tests. The current CUDA device is the rank's. Raises RankLost."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    kind: Any = dist.ProcessGroupGloo if device.type == "cpu" else dist.ProcessGroupNCCL
    options: Any = kind._Options() if device.type == "cpu" else kind.Options()
    if device.type == "cpu":
        options._devices = [kind.create_device(hostname="127.0.0.1")]
    try:
        return kind(PrefixStore("rollout/devices", store), rank, ranks, options)
    except RuntimeError as error:
        raise RankLost(f"the devices of the ranks cannot connect to each other: {str(error).splitlines()[0]}") from error


def check_apart(host: RankExchange, identity: str) -> None:
    """Raise ValueError if two ranks have one device. identity: the name of this rank's, which no other device has."""
    own = torch.frombuffer(bytearray(hashlib.blake2b(identity.encode(), digest_size=16).digest()), dtype=torch.uint8)
    found = [bytes(each.tolist()) for each in host.numbers(own, [own.shape] * host.ranks)]
    for rank, each in enumerate(found):
        if (first := found.index(each)) < rank:
            raise ValueError(
                f"ranks {first} and {rank} have the same CUDA device: each needs its own; check CUDA_VISIBLE_DEVICES, and "
                "LOCAL_RANK where torchrun or SLURM starts the ranks"
            )


def rows_at_once(summed: Summed, outputs: int) -> int:
    """Return the rows whose sums of slices are computed at once: as many on every rank."""
    return max(1, BUFFER_BYTES // (summed.slices * outputs * 4))


def joined(slices: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, summed: Summed) -> torch.Tensor:
    """Return the sum [rows, outputs] over all slices of all ranks, given this rank's [slices, rows, outputs] fp32. bias, dtype:
    as for `DeviceExchange.sum`. Raises RankLost."""
    assert summed.exchange is None or isinstance(summed.exchange, DeviceExchange), "ranks of another device"
    if summed.exchange is None:
        return add_up(slices, bias, dtype)
    branch = slices[0] if len(slices) == 1 else add_up(slices, None, torch.float32)
    return summed.exchange.sum(branch, bias, dtype)


def add_up(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum [rows, outputs] of parts [1, 2, 4 or 8, rows, outputs], in fp32, in a binary tree, in their order, + bias
    [outputs], rounded once to `dtype`."""
    from rollout.engine.cuda import exact_kernels

    count, rows, outs = parts.shape
    assert count in (1, 2, 4, 8) and parts.is_contiguous()
    out = parts.new_empty(rows, outs, dtype=dtype)
    if out.numel():
        exact_kernels.add_up[(-(-out.numel() // WIDTH),)](
            parts, parts if bias is None else bias, out, out.numel(), outs, PARTS=count, BIAS=bias is not None, WIDTH=WIDTH,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def sum_over_ranks(module: nn.Module) -> None:
    """Let the products that are marked as summed (`rollout.engine.forward.summed`) be the library's of this rank's inputs, in
    the model's dtype, added up over the ranks. Of experts, the weighted results of a token are."""
    for each in module.modules():
        if summed_of(each) is not None:
            function = _summed_linear if type(each) is nn.Linear else _summed_experts
            each.forward = MethodType(function, each)


def sum_of_ranks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, summed: Summed) -> torch.Tensor:
    """Return [rows, outputs] of x [rows, inputs] and a weight [outputs, inputs], added up over the ranks. Raises RankLost."""
    assert isinstance(summed.exchange, DeviceExchange)
    return summed.exchange.sum(linear(x, weight), bias, x.dtype)


def _summed_linear(self: Any, input: torch.Tensor) -> torch.Tensor:
    summed = summed_of(self)
    assert summed is not None
    made = sum_of_ranks(input.reshape(-1, input.shape[-1]), self.weight, self.bias, summed)
    return made.view(*input.shape[:-1], -1)


def _summed_experts(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    summed = summed_of(self)
    assert summed is not None and isinstance(summed.exchange, DeviceExchange)
    part = type(self).forward(self, *args, **kwargs)
    return summed.exchange.sum(part.reshape(-1, part.shape[-1]), None, part.dtype).view(part.shape)
