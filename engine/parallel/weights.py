"""The weights of a replica of several ranks, as rank 0 has them: whole names, shapes and digests, and a part of each tensor.

    payload ──► rank 0: hash, cast, check ──► the parts of each rank, staged: rank 0's own in its memory, the others' in memory
                                              that rank 0 and that rank map; on another host, sent to it
    commit      all ranks swap live and staged parts, each by itself; if one cannot, those that could swap back

So every transport works as with one device, and nothing but a rank itself writes its live weights."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import xxhash

from rollout.engine.memory import DeviceMemory, placed, side_by_side, without_hashes
from rollout.engine.parallel.messages import ExchangeWeights, OpenStaged, RankAnswer, ReadElements, StageElements
from rollout.engine.values import TensorInfo
from rollout.engine.weights.cuts import Cut, Part, parts_of
from rollout.engine.weights.inventory import READ_BYTES, Inventory
from rollout.engine.weights.live import Weights, WeightsTorn, unstaged
from rollout.engine.weights.lora import AdapterBase
from rollout.engine.weights.parts import StagedTensors, WeightParts
from rollout.engine.weights.staging import SLICE_BYTES, StagedTensor
from rollout.engine.weights.tensors import tensor_bytes


class OtherRanks(Protocol):
    """What these weights need of the other ranks: `rollout.engine.parallel.followers.Followers`."""

    def send(self, rank: int, message: msgspec.Struct) -> None:
        """Send a message to one. Raises RankLost."""

    def tell(self, requests: Sequence[msgspec.Struct]) -> None:
        """Send a request to each. Raises RankLost."""

    def answers(self) -> list[RankAnswer]:
        """Wait for the answers to the newest requests. Raises RankLost."""

    shares_memory: bool
    """whether rank 0 and each of them map memory in which it stages"""
    staged_fds: list[int]
    """of this memory"""


class PartInventory(Inventory):
    """Tensors of which this rank has parts; `shapes` are those of the whole ones.

    Args:
        parts: of each rank, by names.
    """

    def __init__(self, module: torch.nn.Module, parts: Sequence[Mapping[str, Part]], ranks: OtherRanks) -> None:
        super().__init__(module, {})
        self.parts, self._ranks = parts, ranks
        self.shapes = {name: torch.Size(parts[0][name].shape) for name in self.tensors}
        self.nbytes = sum(self.size(name)[0] for name in self.tensors)

    def size(self, name: str) -> tuple[int, int]:
        first = self.first(name)
        itemsize = self.tensors[first].element_size()
        return self.shapes[first].numel() * itemsize, itemsize

    def read_slice(self, name: str, start: int, size: int) -> np.ndarray:
        """Copy bytes of a whole tensor from all ranks."""
        first, itemsize = self.first(name), self.size(name)[1]
        live, begin, count = self.tensors[first].detach(), start // itemsize, size // itemsize
        whole = torch.empty(count, dtype=live.dtype)
        for piece, here in self.parts[0][first].overlap(whole, begin, live):
            piece.copy_(here)
        self._ranks.tell([ReadElements(first, begin, count)] * (len(self.parts) - 1))
        for parts, answer in zip(self.parts[1:], self._ranks.answers(), strict=True):
            assert not answer.error, answer.error
            put_elements(answer.data, parts[first], whole, begin)
        return tensor_bytes(whole)

    def read(self, name: str) -> torch.Tensor:
        whole = torch.empty(self.shapes[name], dtype=self.tensors[name].dtype)
        raw, (size, _) = tensor_bytes(whole), self.size(name)
        for start in range(0, size, READ_BYTES):
            count = min(READ_BYTES, size - start)
            raw[start : start + count] = self.read_slice(name, start, count)
        return whole

    def digest(self, name: str) -> str:
        state, (size, _) = xxhash.xxh3_128(), self.size(name)
        for start in range(0, size, READ_BYTES):
            state.update(self.read_slice(name, start, min(READ_BYTES, size - start)).data)
        return state.hexdigest()


def elements_of(part: Part, piece: torch.Tensor, start: int) -> bytes:
    """Return the elements that belong to a rank's part of `piece`, the elements of the whole tensor from number `start` on."""
    shape_only = torch.empty(part.here, dtype=piece.dtype, device="meta")
    return b"".join(tensor_bytes(here).tobytes() for here, _ in part.overlap(piece, start, shape_only))


def put_in_part(data: bytes, part: Part, place: torch.Tensor, start: int, count: int) -> None:
    """Undo `elements_of` on that rank: write them to `place`, its part."""
    flat = torch.frombuffer(bytearray(data), dtype=place.dtype) if data else place.new_empty(0)
    shape_only, at = torch.empty(count, dtype=place.dtype, device="meta"), 0
    for _, here in part.overlap(shape_only, start, place):
        here.copy_(flat[at : at + here.numel()].view(here.shape))
        at += here.numel()
    assert at == len(flat)


def elements(part: Part, live: torch.Tensor, start: int, count: int) -> bytes:
    """Return the elements that a rank's part has among `count` of the whole tensor from number `start` on."""
    shape_only = torch.empty(count, dtype=live.dtype, device="meta")
    return b"".join(tensor_bytes(here).tobytes() for _, here in part.overlap(shape_only, start, live.detach()))


def put_elements(data: bytes, part: Part, whole: torch.Tensor, start: int) -> None:
    """Undo `elements`: write them to their places in `whole`, the elements of the whole tensor from number `start` on."""
    flat = torch.frombuffer(bytearray(data), dtype=whole.dtype) if data else whole.new_empty(0)
    shape_only, at = torch.empty(part.here, dtype=whole.dtype, device="meta"), 0
    for piece, _ in part.overlap(whole, start, shape_only):
        piece.copy_(flat[at : at + piece.numel()].view(piece.shape))
        at += piece.numel()
    assert at == len(flat)


def put_part(part: Part, piece: torch.Tensor, start: int, place: torch.Tensor) -> None:
    """Copy to `place` what a rank has of elements of a whole tensor from number `start` on."""
    for its, here in part.overlap(piece, start, place):
        here.copy_(its)


class DividedTensor(StagedTensor):
    """A tensor of the payload whose checked elements go to the parts of all ranks.

    Args:
        room: for the elements of a slice, in the model's dtype.
        put: stages elements of the whole tensor on all ranks, given the number of the first one.
    """

    __slots__ = ("put",)

    def __init__(self, info: TensorInfo, target: str, room: torch.Tensor, put: Callable[[torch.Tensor, int], None]) -> None:
        super().__init__(info, getattr(torch, info.dtype), target, room)
        self.put = put

    def elements(self, start: int, count: int) -> torch.Tensor:
        assert self.place is not None
        return self.place[: count // self.dtype.itemsize]

    def land(self, staged: torch.Tensor, start: int) -> None:
        self.put(staged, start // self.dtype.itemsize)


class DividedMerge:
    """Tensors that are merged whole on rank 0, one at a time, and staged in parts: so the bits are those of one rank. The
    product B A of a part may have other ones.

    Args:
        part: returns the part of a payload that is sent whole, of a name.
        put: stages elements of a tensor on all ranks, given its name and the number of the first one.
        inventory: of rank 0's parts.
    """

    def __init__(
        self,
        part: Callable[[TensorInfo, str], StagedTensor],
        put: Callable[[str, torch.Tensor, int], None],
        inventory: Inventory,
    ) -> None:
        self.part, self._put, self._inventory = part, put, inventory

    def room(self, name: str) -> torch.Tensor:
        return torch.empty(self._inventory.shapes[name], dtype=self._inventory.tensors[name].dtype)

    def wrote(self, name: str, whole: torch.Tensor) -> None:
        for start in range(0, whole.numel(), SLICE_BYTES):
            self._put(name, whole.view(-1)[start : start + SLICE_BYTES], start)


class StagedPart(Protocol):
    """Where rank 0 stages the parts of another rank."""

    size: int
    """bytes of memory that both map"""

    def open(self) -> None:
        """Allocate it, unless it is."""

    def put(self, name: str, piece: torch.Tensor, start: int) -> None:
        """Stage what the rank has of elements of a whole tensor from number `start` on."""

    def close(self) -> None:
        """Free it, when nothing is staged."""


class SentParts:
    """Memory of another rank, which rank 0 cannot map: it sends what it stages. parts: by names."""

    size = 0

    def __init__(self, rank: int, parts: Mapping[str, Part], ranks: OtherRanks) -> None:
        self._rank, self._parts, self._ranks = rank, parts, ranks

    def open(self) -> None:
        """Do nothing: all ranks are asked at once."""

    def put(self, name: str, piece: torch.Tensor, start: int) -> None:
        if self._parts[name].touches(start, len(piece)):
            data = elements_of(self._parts[name], piece, start)
            self._ranks.send(self._rank, StageElements(name, start, len(piece), data))

    def close(self) -> None:
        """Do nothing: the rank frees it when it sleeps."""


class StagedMemory:
    """Memory in which rank 0 stages the parts of another rank, and which that rank maps. parts: by names, in order; dtypes: of
    the same."""

    def __init__(self, fd: int, parts: Mapping[str, Part], dtypes: Mapping[str, torch.dtype]) -> None:
        self._fd, self._parts = fd, parts
        self._likes = {name: torch.empty(part.here, dtype=dtypes[name], device="meta") for name, part in parts.items()}
        starts, self.size = side_by_side(self._likes.values())
        self._starts = dict(zip(parts, starts, strict=True))
        self._memory: torch.Tensor | None = None

    def open(self) -> None:
        if self._memory is None:
            os.ftruncate(self._fd, self.size)
            self._memory = torch.frombuffer(mmap.mmap(self._fd, self.size), dtype=torch.uint8)

    def close(self) -> None:
        self._memory = None
        os.ftruncate(self._fd, 0)

    def put(self, name: str, piece: torch.Tensor, start: int) -> None:
        assert self._memory is not None
        put_part(self._parts[name], piece, start, placed(self._memory, self._starts[name], self._likes[name]))


class DividedWeights(Weights):
    """`Weights` of a replica of several ranks, on rank 0. inventory: of its parts."""

    def __init__(
        self,
        module: torch.nn.Module,
        inventory: PartInventory,
        ranks: OtherRanks,
        lay_out: Callable[[], None],
        memory: DeviceMemory | None = None,
    ) -> None:
        here = None if memory is None else without_hashes(memory)  # digests are of whole tensors: of payloads in host memory
        super().__init__(module, WeightParts(adapters=AdapterBase), lay_out, here, inventory)
        self._ranks = ranks
        self._parts_of = inventory.parts
        dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        others = [{name: parts[name] for name in self._tensors} for parts in inventory.parts[1:]]
        self._staged: list[StagedPart] = (
            [StagedMemory(fd, parts, dtypes) for fd, parts in zip(ranks.staged_fds, others, strict=True)]
            if ranks.shares_memory
            else [SentParts(rank, parts, ranks) for rank, parts in enumerate(others, 1)]
        )
        self._rooms = {dtype: torch.empty(SLICE_BYTES, dtype=dtype) for dtype in {*dtypes.values()}}

    @property
    def rank_bytes(self) -> list[int]:
        """Return the bytes of each rank's parts."""
        sizes = {name: tensor.element_size() for name, tensor in self._tensors.items()}
        return [sum(math.prod(parts[name].here) * size for name, size in sizes.items()) for parts in self._parts_of]

    def _open_in_host_memory(self) -> None:
        for staged in self._staged:
            staged.open()
        if not self._ranks.shares_memory:
            self._ranks.tell([OpenStaged()] * len(self._staged))
            for rank, answer in enumerate(self._ranks.answers(), 1):
                if answer.error:
                    raise MemoryError(f"rank {rank} cannot stage a refresh: {answer.error}")
        self._buffers.open_in_host_memory()

    def _parts(
        self, manifest: Sequence[TensorInfo], targets: Sequence[str | None], place: Callable[[str], torch.Tensor]
    ) -> list[StagedTensor]:
        return [self._divided(info, target) for info, target in zip(manifest, targets, strict=True)]

    def _staged_tensors(self) -> StagedTensors:
        return DividedMerge(self._divided, self._put, self.inventory)

    def _divided(self, info: TensorInfo, target: str | None) -> StagedTensor:
        if not target:  # it repeats a tied tensor, or is not the model's
            return unstaged(info, target)
        return DividedTensor(info, target, self._rooms[self._tensors[target].dtype], partial(self._put, target))

    def _put(self, name: str, piece: torch.Tensor, start: int) -> None:
        """Stage elements of a whole tensor from number `start` on, on all ranks."""
        put_part(self._parts_of[0][name], piece, start, self._buffers.place(name))
        for staged in self._staged:
            staged.put(name, piece, start)

    def _land(self, names: Sequence[str]) -> None:
        """Swap on all ranks, or on none."""
        requests = [ExchangeWeights(list(names), staged.size) for staged in self._staged]
        self._ranks.tell(requests)
        error: Exception | None = None
        try:
            self.exchange(names)
        except Exception as raised:
            error = raised
        answers = self._ranks.answers()
        failed = [(rank, answer.error) for rank, answer in enumerate(answers, 1) if answer.error]
        if error is None and not failed:
            return
        self._swap_back(names if error is None else [], requests, [not answer.error for answer in answers])
        if error is not None:
            raise error
        rank, reason = failed[0]
        raise RuntimeError(f"rank {rank} could not take the new weights, and all ranks keep the old ones: {reason}")

    def _swap_back(self, own: Sequence[str], requests: list[ExchangeWeights], done: list[bool]) -> None:
        """Let the ranks that have swapped swap again, and this one swap `own`. Raises WeightsTorn if one cannot."""
        nothing = [msgspec.structs.replace(request, names=[]) for request in requests]
        self._ranks.tell([request if has else empty for request, empty, has in zip(requests, nothing, done, strict=True)])
        try:
            self.exchange(own)
            errors = [answer.error for answer in self._ranks.answers() if answer.error]
            if errors:
                raise RuntimeError(errors[0])
        except Exception as error:
            self.torn = True
            raise WeightsTorn("a refresh failed on one rank, and undoing it failed as well") from error

    def release_memory(self, keep: bool) -> None:
        super().release_memory(keep)
        for staged in self._staged:
            staged.close()


def divided_weights(
    module: Any,
    cuts: Mapping[str, Cut],
    shapes: Mapping[str, Sequence[int]],
    ranks: OtherRanks,
    lay_out: Callable[[], None],
    memory: DeviceMemory | None = None,
) -> DividedWeights:
    """Make the weights of rank 0. cuts, shapes: of the whole model's tensors. lay_out, memory: as of `Weights`."""
    count = len(ranks.staged_fds) + 1
    parts = [parts_of(cuts, shapes, rank, count) for rank in range(count)]
    return DividedWeights(module, PartInventory(module, parts, ranks), ranks, lay_out, memory)
