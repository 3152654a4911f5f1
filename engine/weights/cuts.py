"""Which part of each tensor of a model a rank has, where several devices run one replica.

Names, shapes and digests of manifests are those of whole tensors; a `Part` maps elements of a whole tensor, in C order, to
those of one rank's part. Which tensors are cut how: `rollout.engine.weights.layer_cuts`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

ROWS, COLUMNS = 0, 1


class NotCut(ValueError):
    """A model cannot be divided among ranks; the message names the model and the reason."""


class Cut(NamedTuple):
    """How a tensor is divided."""

    dim: int | None
    """such as ROWS or COLUMNS; None: each rank has the whole tensor"""
    units: int = 1
    """parts of this dimension that stay whole, such as heads. Fewer than ranks: several ranks have the same one"""
    blocks: tuple[int, ...] = ()
    """sizes of what lies one behind the other in this dimension and is cut each, such as gate and up; (): there is one"""

    def spans(self, size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return the first index of a rank's part of each block of a dimension of `size`, and the one behind it."""
        assert sum(self.blocks) in (0, size)
        first, last = self.units * rank // ranks, self.units * (rank + 1) // ranks
        if self.units < ranks:
            last = first + 1
        found, at = [], 0
        for block in self.blocks or (size,):
            each = block // self.units
            found.append((at + first * each, at + last * each))
            at += block
        return found


WHOLE = Cut(None)


class Part(NamedTuple):
    """One rank's part of a tensor."""

    shape: tuple[int, ...]
    """of the whole tensor"""
    cut: Cut
    rank: int
    ranks: int

    @property
    def here(self) -> tuple[int, ...]:
        """Return the shape of the part."""
        if self.cut.dim is None:
            return self.shape
        width = sum(last - first for first, last in self._spans)
        return (*self.shape[: self.cut.dim], width, *self.shape[self.cut.dim + 1 :])

    @property
    def _spans(self) -> list[tuple[int, int]]:
        assert self.cut.dim is not None
        return self.cut.spans(self.shape[self.cut.dim], self.rank, self.ranks)

    def touches(self, start: int, count: int) -> bool:
        """Return whether the part may have some of `count` elements of the whole tensor from number `start` on."""
        if self.cut.dim != ROWS:
            return True
        columns = math.prod(self.shape[1:])
        return any(start < last * columns and start + count > first * columns for first, last in self._spans)

    def of(self, whole: Any) -> torch.Tensor:
        """Return the part of a whole tensor, or of what can be indexed as one."""
        if self.cut.dim is None:
            return whole[:] if self.shape else whole  # type: ignore[no-any-return]
        before = (slice(None),) * self.cut.dim
        pieces = [whole[*before, first:last] for first, last in self._spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.cut.dim)

    def overlap(self, piece: torch.Tensor, start: int, part: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of views of equal shape: of `piece`, the elements of the whole tensor from number `start` on, and of
        `part`, the rank's part: the elements that both have."""
        dim = self.cut.dim
        inner = 1 if dim is None else math.prod(self.shape[dim + 1 :])
        columns = math.prod(self.shape[dim or 0 :])
        spans = [(0, columns)] if dim is None else [(first * inner, last * inner) for first, last in self._spans]
        local = part.view(-1, sum(last - first for first, last in spans))
        for row, rows, column, width in _blocks(start, len(piece), columns):
            at = row * columns + column - start
            block, behind = piece[at : at + rows * width].view(rows, width), 0
            for first, last in spans:
                low, high = max(column, first), min(column + width, last)
                if low < high:
                    here, there = slice(low - column, high - column), slice(behind + low - first, behind + high - first)
                    yield block[:, here], local[row : row + rows, there]
                behind += last - first


def _blocks(start: int, count: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide elements of a matrix into blocks: the rest of a row, whole rows, the beginning of one. Yields row, rows, column,
    columns of each."""
    at, end = start, start + count
    while at < end:
        row, column = divmod(at, columns)
        rows = (end - at) // columns if not column else 0
        width = columns if rows else min(columns - column, end - at)
        yield row, max(1, rows), column, width
        at += max(1, rows) * width


def parts_of(cuts: Mapping[str, Cut], shapes: Mapping[str, Sequence[int]], rank: int, ranks: int) -> dict[str, Part]:
    """Return a rank's part of each tensor. shapes: of the whole tensors."""
    return {name: Part(tuple(shape), cuts[name], rank, ranks) for name, shape in shapes.items()}
