"""The weights of a replica of several ranks, as rank 0 has them: whole names, shapes and digests, and a part of each tensor.

    payload ──► rank 0: hash, cast, check ──► the parts of each rank, staged: rank 0's own in its memory, the others' in memory
                                              that rank 0 and that rank map
    commit      all ranks swap live and staged parts, each by itself; if one cannot, those that could swap back

So every transport works as with one device, and nothing but a rank itself writes its live weights."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import xxhash

from rollout.engine.memory import placed, side_by_side
from rollout.engine.parallel.messages import ExchangeWeights, RankAnswer, ReadElements
from rollout.engine.types import TensorInfo
from rollout.engine.weights.cuts import Cut, Part, parts_of
from rollout.engine.weights.inventory import READ_BYTES, Inventory
from rollout.engine.weights.live import Weights, WeightsTorn
from rollout.engine.weights.lora import StagedTensors
from rollout.engine.weights.staging import SLICE_BYTES, StagedTensor
from rollout.engine.weights.tensors import tensor_bytes


class OtherRanks(Protocol):
    """What these weights need of the other ranks: `rollout.engine.parallel.leader.Followers`."""

    def tell(self, requests: Sequence[msgspec.Struct]) -> None:
        """Send a request to each. Raises RankLost."""

    def answers(self) -> list[RankAnswer]:
        """Wait for the answers to the newest requests. Raises RankLost."""

    @property
    def staged_fds(self) -> Sequence[int]: ...


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
        first = self.first_name[name]
        itemsize = self.tensors[first].element_size()
        return self.shapes[first].numel() * itemsize, itemsize

    def read_slice(self, name: str, start: int, size: int) -> np.ndarray:
        """Copy bytes of a whole tensor from all ranks."""
        first, itemsize = self.first_name[name], self.size(name)[1]
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


class DividedTensor(StagedTensor):
    """A tensor of the payload whose checked elements go to the parts of all ranks.

    Args:
        room: for the elements of a slice, in the model's dtype.
        places: the staged part of each rank.
    """

    __slots__ = ("places",)

    def __init__(self, info: TensorInfo, target: str, room: torch.Tensor, places: list[tuple[Part, torch.Tensor]]) -> None:
        super().__init__(info, getattr(torch, info.dtype), target, room)
        self.places = places

    def elements(self, start: int, count: int) -> torch.Tensor:
        assert self.place is not None
        return self.place[: count // self.dtype.itemsize]

    def land(self, staged: torch.Tensor, start: int) -> None:
        for part, place in self.places:
            for piece, here in part.overlap(staged, start // self.dtype.itemsize, place):
                here.copy_(piece)


class DividedMerge:
    """Tensors that are merged whole on rank 0, one at a time, and staged in parts: so the bits are those of one rank. The
    product B A of a part may have other ones.

    Args:
        divided: returns the part of a payload that is sent whole, of a name.
        places: returns each rank's part of a tensor, and where it is staged.
        tensors: rank 0's parts. shapes: of whole tensors.
    """

    def __init__(
        self,
        divided: Callable[[TensorInfo, str], StagedTensor],
        places: Callable[[str], list[tuple[Part, torch.Tensor]]],
        tensors: Mapping[str, torch.Tensor],
        shapes: Mapping[str, torch.Size],
    ) -> None:
        self.part, self._places, self._tensors, self._shapes = divided, places, tensors, shapes

    def room(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=self._tensors[name].dtype)

    def wrote(self, name: str, whole: torch.Tensor) -> None:
        for part, place in self._places(name):
            for piece, here in part.overlap(whole.view(-1), 0, place):
                here.copy_(piece)


class StagedMemory:
    """Memory in which rank 0 stages the parts of another rank. parts: by names, in order; dtypes: of the same."""

    def __init__(self, fd: int, parts: Mapping[str, Part], dtypes: Mapping[str, torch.dtype]) -> None:
        self._fd = fd
        self._likes = {name: torch.empty(part.here, dtype=dtypes[name], device="meta") for name, part in parts.items()}
        starts, self.size = side_by_side(self._likes.values())
        self._starts = dict(zip(parts, starts, strict=True))
        self._memory: torch.Tensor | None = None

    def open(self) -> None:
        """Allocate it, unless it is."""
        if self._memory is None:
            os.ftruncate(self._fd, self.size)
            self._memory = torch.frombuffer(mmap.mmap(self._fd, self.size), dtype=torch.uint8)

    def close(self) -> None:
        """Free it, when nothing is staged."""
        self._memory = None
        os.ftruncate(self._fd, 0)

    def place(self, name: str) -> torch.Tensor:
        assert self._memory is not None
        return placed(self._memory, self._starts[name], self._likes[name])


class DividedWeights(Weights):
    """`Weights` of a replica of several ranks, on rank 0. inventory: of its parts."""

    def __init__(self, module: torch.nn.Module, inventory: PartInventory, ranks: OtherRanks) -> None:
        super().__init__(module, inventory=inventory)
        self._ranks = ranks
        self._parts_of = inventory.parts
        dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        self._staged = [
            StagedMemory(fd, {name: parts[name] for name in self._tensors}, dtypes)
            for fd, parts in zip(ranks.staged_fds, inventory.parts[1:], strict=True)
        ]
        self._rooms = {dtype: torch.empty(SLICE_BYTES, dtype=dtype) for dtype in {*dtypes.values()}}

    @property
    def rank_bytes(self) -> list[int]:
        """Return the bytes of each rank's parts."""
        sizes = {name: tensor.element_size() for name, tensor in self._tensors.items()}
        return [sum(math.prod(parts[name].here) * size for name, size in sizes.items()) for parts in self._parts_of]

    def _open_in_host_memory(self) -> None:
        for staged in self._staged:
            staged.open()
        self._buffers.open_in_host_memory()

    def _parts(
        self, manifest: Sequence[TensorInfo], targets: Sequence[str | None], place: Callable[[str], torch.Tensor]
    ) -> list[StagedTensor]:
        return [self._divided(info, target) for info, target in zip(manifest, targets, strict=True)]

    def _staged_tensors(self) -> StagedTensors:
        return DividedMerge(self._divided, self._places, self._tensors, self.inventory.shapes)

    def _divided(self, info: TensorInfo, target: str | None) -> StagedTensor:
        dtype = getattr(torch, info.dtype)
        if target is None:  # it repeats a tied tensor
            return StagedTensor(info, dtype, None, None)
        return DividedTensor(info, target, self._rooms[self._tensors[target].dtype], self._places(target))

    def _places(self, name: str) -> list[tuple[Part, torch.Tensor]]:
        """Return each rank's part of a tensor, and where it is staged."""
        places = [self._buffers.place(name), *(staged.place(name) for staged in self._staged)]
        return list(zip((parts[name] for parts in self._parts_of), places, strict=True))

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
    module: Any, cuts: Mapping[str, Cut], shapes: Mapping[str, Sequence[int]], ranks: OtherRanks
) -> DividedWeights:
    """Make the weights of rank 0. cuts, shapes: of the whole model's tensors."""
    count = len(ranks.staged_fds) + 1
    parts = [parts_of(cuts, shapes, rank, count) for rank in range(count)]
    return DividedWeights(module, PartInventory(module, parts, ranks), ranks)
