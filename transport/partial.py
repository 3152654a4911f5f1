"""Partial samples on the wire: the arrays of all of them end to end, since a message has few frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from engine.types import PartialSample
from transport.errors import InvalidRequest

COLUMNS = ("token_ids", "logprobs", "raw_logprobs", "top_ids", "top_logprobs")
"""fields of `PartialSample` with a row for each token"""
MAX_SPANS = 65_536
"""of all children of a message: what the service's loop can look at in one turn"""


class PartialColumns(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """What C children of a group have: T tokens in all, S spans of weight versions.

    Example:
        children 2 and 5 have three tokens and one; the last two tokens of child 2 are of version 4

        indices [2, 5]   lengths [3, 1]   token_ids [11, 5, 7, 40]   spans [[0, 0, 3], [0, 1, 4], [1, 0, 3]]
    """

    indices: np.ndarray
    """[C] int32: index of each child"""
    lengths: np.ndarray
    """[C] int32: tokens of each child"""
    token_ids: np.ndarray
    """[T] int32"""
    logprobs: np.ndarray
    """[T] float32"""
    spans: np.ndarray
    """[S, 3] int64: which of the C children, its first token of the span, version"""
    raw_logprobs: np.ndarray | None = None
    """[T] float32, if the group asks for them"""
    top_ids: np.ndarray | None = None
    """[T, k] int32, if the group asks for the k most probable tokens"""
    top_logprobs: np.ndarray | None = None
    """[T, k] float32"""

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield every array, in the order of the fields."""
        for name in self.__struct_fields__:
            if (value := getattr(self, name)) is not None:
                yield value


def pack_partials(children: Sequence[PartialSample]) -> PartialColumns | None:
    """Lay children end to end; None without any."""
    if not children:
        return None
    spans = [(i, *span) for i, child in enumerate(children) for span in child.weight_versions]
    return PartialColumns(
        indices=np.array([child.index for child in children], np.int32),
        lengths=np.array([len(child.token_ids) for child in children], np.int32),
        token_ids=np.concatenate([child.token_ids for child in children]),
        logprobs=np.concatenate([child.logprobs for child in children]),
        spans=np.array(spans, np.int64).reshape(-1, 3),
        raw_logprobs=joined([child.raw_logprobs for child in children]),
        top_ids=joined([child.top_ids for child in children]),
        top_logprobs=joined([child.top_logprobs for child in children]),
    )


def joined(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """All of them end to end; None unless every child has one."""
    there = [array for array in arrays if array is not None]
    return np.concatenate(there) if len(there) == len(arrays) else None


def unpack_partials(packed: PartialColumns | None, most: int) -> tuple[PartialSample, ...]:
    """The children of a message, at most `most`. Raises InvalidRequest where the arrays do not fit each other; what a child may
    have is checked with its group."""
    if packed is None:
        return ()
    _check(packed, most)
    ends = np.cumsum(packed.lengths, dtype=np.int64)
    spans: list[list[tuple[int, int]]] = [[] for _ in packed.indices]
    for which, first, version in packed.spans.tolist():
        spans[which].append((first, version))
    children = []
    for i, (index, length, end) in enumerate(zip(packed.indices.tolist(), packed.lengths.tolist(), ends.tolist(), strict=True)):
        mine = slice(end - length, end)
        columns: dict[str, Any] = {name: None if (array := getattr(packed, name)) is None else array[mine] for name in COLUMNS}
        children.append(PartialSample(index=index, weight_versions=spans[i], **columns))
    return tuple(children)


def _check(packed: PartialColumns, most: int) -> None:
    kinds = {
        "indices": np.int32,
        "lengths": np.int32,
        "token_ids": np.int32,
        "logprobs": np.float32,
        "raw_logprobs": np.float32,
    }
    for name, dtype in kinds.items():
        array = getattr(packed, name)
        if array is not None and (array.dtype != dtype or array.ndim != 1):
            raise InvalidRequest(
                f"partials.{name} is {array.dtype} of shape {array.shape}: must be {np.dtype(dtype).name} [..]"
            )
    children, tokens = len(packed.indices), len(packed.token_ids)
    if len(packed.lengths) != children or children > most:
        raise InvalidRequest(f"{children} partial samples with {len(packed.lengths)} lengths: as many of both, at most {most}")
    if children and int(packed.lengths.min()) < 0 or int(packed.lengths.sum(dtype=np.int64)) != tokens:
        raise InvalidRequest(f"partials.lengths do not add up to the {tokens} tokens of partials.token_ids")
    for name, dtype in (("top_ids", np.int32), ("top_logprobs", np.float32)):
        if (array := getattr(packed, name)) is not None and (array.dtype != dtype or array.ndim != 2):
            raise InvalidRequest(
                f"partials.{name} is {array.dtype} of shape {array.shape}: must be {np.dtype(dtype).name} [.., k]"
            )
    for name in COLUMNS[1:]:
        if (array := getattr(packed, name)) is not None and len(array) != tokens:
            raise InvalidRequest(f"partials.{name} has {len(array)} entries for {tokens} tokens: one for each")
    spans = packed.spans
    bound = min(tokens, MAX_SPANS)
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 3 or len(spans) > bound:
        raise InvalidRequest(f"partials.spans is {spans.dtype} of shape {spans.shape}: must be int64 [at most {bound}, 3]")
    if len(spans) and not 0 <= int(spans[:, 0].min()) <= int(spans[:, 0].max()) < children:
        raise InvalidRequest(f"partials.spans names children that are none of the {children}")
