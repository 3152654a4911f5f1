"""What a client knows of children that have not come back: the tokens they began with, and those that were streamed since."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from engine.types import Group, PartialSample, Sampling, TokenChunk
from transport.checks import Bounds, check_chunk
from transport.partial import COLUMNS, joined


class PartialOutputs:
    """Gathers what has come of the children of one group. `Handle` locks it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.seed = group.sampling.seed
        """None: the engine chose it, and has not told"""
        self._pieces: dict[int, list[PartialSample]] = {}
        """of each child, in order"""
        self._known: dict[int, int] = {}
        """tokens of each child"""
        self._ended: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Go back to what the children had when the group was submitted: it is submitted again."""
        self.seed = self._group.sampling.seed
        self._pieces = {child.index: [child] for child in self._group.partials if child.index not in self._ended}
        self._known = {child.index: len(child.token_ids) for child in self._group.partials}

    def add(self, chunk: TokenChunk, bounds: Bounds) -> TokenChunk | None:
        """Take in a chunk. Returns the part of it that is new, if there is one. Raises ValueError for a chunk that this group
        cannot have."""
        group, index = self._group, chunk.index
        if index not in group.wanted:
            raise ValueError(f"tokens of child {index} of a group that has {list(group.wanted[:20])}")
        chunk = _asked(chunk, group.sampling)
        check_chunk(chunk, group, bounds)
        if index in self._ended:  # a service that was killed before it knew so runs it again
            return None
        known, most = self._known.get(index, 0), group.sampling.max_tokens
        if chunk.first > known or chunk.first + len(chunk.token_ids) > most:
            raise ValueError(
                f"tokens from {chunk.first} to {chunk.first + len(chunk.token_ids)} of child {index}, of which {known} are "
                f"known: must follow these, up to max_tokens={most}"
            )
        new = beyond(chunk, known)
        if new is None:
            return None
        self.seed = chunk.seed
        self._pieces.setdefault(index, []).append(new)
        self._known[index] = known + len(new.token_ids)
        return new

    def streamed(self, index: int) -> PartialSample | None:
        """Return what a child has, if tokens of it were streamed."""
        pieces = self._pieces.get(index, [])
        return _joined(index, pieces) if any(isinstance(piece, TokenChunk) for piece in pieces) else None

    def end(self, index: int) -> None:
        """Forget a child that has come back."""
        self._ended.add(index)
        self._pieces.pop(index, None)

    def partial_samples(self) -> list[PartialSample]:
        """Return what the children have of which anything is known, by index."""
        return [_joined(index, pieces) for index, pieces in sorted(self._pieces.items())]


def _asked(chunk: TokenChunk, sampling: Sampling) -> TokenChunk:
    """Return a chunk without what its group did not ask for: it came beside those of other groups."""
    k, ids, logprobs = sampling.top_logprobs, chunk.top_ids, chunk.top_logprobs
    return msgspec.structs.replace(
        chunk,
        raw_logprobs=chunk.raw_logprobs if sampling.raw_logprobs else None,
        top_ids=ids[:, :k] if k and ids is not None else None,
        top_logprobs=logprobs[:, :k] if k and logprobs is not None else None,
    )


def beyond(chunk: TokenChunk, known: int) -> TokenChunk | None:
    """Return a copy of the tokens of a chunk that follow the first `known` of the child."""
    skip = known - chunk.first
    if skip >= len(chunk.token_ids):
        return None
    spans = [(max(0, first - skip), version) for first, version in chunk.weight_versions]
    return msgspec.structs.replace(
        chunk,
        first=known,
        weight_versions=_merged(spans),
        **{name: None if (column := getattr(chunk, name)) is None else column[skip:].copy() for name in COLUMNS},
    )


def _joined(index: int, pieces: list[PartialSample]) -> PartialSample:
    firsts = np.cumsum([0, *(len(piece.token_ids) for piece in pieces)]).tolist()
    spans = [
        (at + first, version) for at, piece in zip(firsts, pieces, strict=False) for first, version in piece.weight_versions
    ]
    columns: dict[str, Any] = {name: joined([getattr(piece, name) for piece in pieces]) for name in COLUMNS}
    return PartialSample(index=index, weight_versions=_merged(spans), **columns)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Drop spans that go on with the version before them, and all but the last of those that begin at one token."""
    kept: list[tuple[int, int]] = []
    for first, version in spans:
        if kept and kept[-1][0] == first:
            kept.pop()
        if not kept or kept[-1][1] != version:
            kept.append((first, version))
    return kept
