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
    """Make the message of chunks by group id: one group at least, each with one chunk at least. What some have and
    others do not, these get as well: nobody asked for it, and the client leaves it out."""
    flat = [chunk for of_group in chunks.values() for chunk in of_group]
    raw, most = any(chunk.raw_logprobs is not None for chunk in flat), max(map(_columns, flat))
    if raw or most:
        flat = [_filled(chunk, raw, most) for chunk in flat]
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


def _columns(chunk: Chunk) -> int:
    return 0 if chunk.top_ids is None else chunk.top_ids.shape[1]


def _filled(chunk: Chunk, raw: bool, most: int) -> Chunk:
    """Give a chunk raw log-probs, if it is to have some, and `most` columns of most probable tokens."""
    tokens, have = len(chunk.token_ids), _columns(chunk)
    changed: dict[str, np.ndarray] = {}
    if raw and chunk.raw_logprobs is None:
        changed["raw_logprobs"] = np.zeros(tokens, np.float32)
    if have < most:
        ids, logprobs = np.full((tokens, most), -1, np.int32), np.full((tokens, most), -np.inf, np.float32)
        if chunk.top_ids is not None and chunk.top_logprobs is not None:
            ids[:, :have], logprobs[:, :have] = chunk.top_ids, chunk.top_logprobs
        changed |= {"top_ids": ids, "top_logprobs": logprobs}
    return msgspec.structs.replace(chunk, **changed)


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
