"""New tokens of running children, of many groups in one message: chunks to columns and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from engine.types import SEED_LIMIT, Chunk
from transport.begun import pack_begun, unpack_begun
from transport.errors import InvalidRequest, ProtocolError
from transport.messages import Progress


def pack_progress(number: int, chunks: Mapping[str, Sequence[Chunk]]) -> Progress:
    """Make the message of chunks by group id: one group at least, each with one chunk at least. Where some have raw log-probs,
    the others get zeros, which nobody asked for."""
    flat = [chunk for of_group in chunks.values() for chunk in of_group]
    if any(chunk.raw_logprobs is not None for chunk in flat):
        flat = [_with_raw(chunk) for chunk in flat]
    packed = pack_begun(flat)
    assert packed is not None
    return Progress(
        number=number,
        group_ids=list(chunks),
        seeds=[of_group[0].seed for of_group in chunks.values()],
        groups=np.repeat(np.arange(len(chunks), dtype=np.int32), [len(of_group) for of_group in chunks.values()]),
        firsts=np.array([chunk.first for chunk in flat], np.int32),
        children=packed,
    )


def _with_raw(chunk: Chunk) -> Chunk:
    if chunk.raw_logprobs is not None:
        return chunk
    return msgspec.structs.replace(chunk, raw_logprobs=np.zeros(len(chunk.token_ids), np.float32))


def unpack_progress(progress: Progress, most: int) -> list[tuple[str, Chunk]]:
    """Return (group id, chunk) of each of at most `most` children. Raises ProtocolError where the columns do not fit each
    other; what a chunk may hold is checked with its group."""
    try:
        children = unpack_begun(progress.children, most)
    except InvalidRequest as error:
        raise ProtocolError(f"progress: {error.message}") from None
    ids, seeds = progress.group_ids, progress.seeds
    for name in ("groups", "firsts"):
        column = getattr(progress, name)
        if column.dtype != np.int32 or column.shape != (len(children),):
            raise ProtocolError(f"progress.{name} is {column.dtype} {column.shape}: must be int32 [{len(children)}]")
    if len(seeds) != len(ids) or not all(0 <= seed < SEED_LIMIT for seed in seeds):
        raise ProtocolError(f"{len(seeds)} seeds of {len(ids)} groups: one for each, from 0 to 2**63 - 1")
    if children and not 0 <= int(progress.groups.min()) <= int(progress.groups.max()) < len(ids):
        raise ProtocolError(f"progress.groups names none of the {len(ids)} groups")
    if children and int(progress.firsts.min()) < 0:
        raise ProtocolError("progress.firsts holds a position below 0")
    rows = zip(children, progress.groups.tolist(), progress.firsts.tolist(), strict=True)
    return [(ids[at], Chunk(**msgspec.structs.asdict(child), first=first, seed=seeds[at])) for child, at, first in rows]
