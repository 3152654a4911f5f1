"""Packs the samples of one or many groups as columns of one message, and unpacks them.

Encoding a message takes some 50 microseconds, and each array 5; a sample within a message takes 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rollout.engine.values import COLUMNS, SEED_LIMIT, Layout, PartialSample, Sample, TokenChunk, TokenColumns, concat_arrays
from rollout.transport.errors import InvalidRequest, ProtocolError
from rollout.transport.messages import ROUTES_FRAME_BYTES, Ended, PackedChildren, Progress, SamplesDone

MAX_SPANS = 65_536
"""version spans of one message: the service's loop reads them between two steps"""


# partial samples: `Submit.partials`


def pack_partials(children: Sequence[PartialSample]) -> PackedChildren | None:
    """Lay children end to end; None without any."""
    if not children:
        return None
    spans = [(i, *span) for i, child in enumerate(children) for span in child.weight_versions]
    kv_spans = [(i, *span) for i, child in enumerate(children) for span in child.kv_versions]
    return PackedChildren(
        indices=np.array([child.index for child in children], np.int32),
        lengths=np.array([len(child.token_ids) for child in children], np.int32),
        spans=np.array(spans, np.int64).reshape(-1, 3),
        kv_spans=np.array(kv_spans, np.int64) if kv_spans else None,
        **_packed_arrays(children),
    )


def unpack_partials(packed: PackedChildren | None, most: int) -> tuple[PartialSample, ...]:
    """Return the children of a message, at most `most`. Raises InvalidRequest if the arrays do not fit each other;
    `Group.validate` checks their values."""
    if packed is None:
        return ()
    try:
        _check_children(packed, most)
    except ValueError as error:
        raise InvalidRequest(f"partials: {error}") from None
    spans: list[list[tuple[int, int]]] = [[] for _ in packed.indices]
    for which, first, version in packed.spans.tolist():
        spans[which].append((first, version))
    kv: list[list[tuple[int, int, int]]] = [[] for _ in packed.indices]
    for which, token, position, version in [] if packed.kv_spans is None else packed.kv_spans.tolist():
        kv[which].append((token, position, version))
    rows = zip(packed.indices.tolist(), spans, kv, _cut(packed, packed.lengths.tolist()), strict=True)
    return tuple(
        PartialSample(index=index, weight_versions=own, kv_versions=read, **columns) for index, own, read, columns in rows
    )


# new tokens of running children: `Progress`


def pack_progress(number: int, chunks: Mapping[str, Sequence[TokenChunk]]) -> Progress:
    """Make the message of chunks by group id: at least one group, each with at least one chunk. If only some groups ask for raw
    or top log-probs, the chunks of the others get filler rows, which the client drops."""
    flat = [chunk for of_group in chunks.values() for chunk in of_group]
    layouts = [chunk.layout for chunk in flat]
    routes = next((layout.routes for layout in layouts if layout.routes is not None), None)
    whole = Layout(any(layout.raw for layout in layouts), max(layout.top for layout in layouts), routes)
    packed = pack_partials([_filled(chunk, whole) for chunk in flat])
    assert packed is not None
    return Progress(
        number=number,
        group_ids=list(chunks),
        seeds=[of_group[0].seed for of_group in chunks.values()],
        groups=np.repeat(np.arange(len(chunks), dtype=np.int32), [len(of_group) for of_group in chunks.values()]),
        firsts=np.array([chunk.first for chunk in flat], np.int32),
        children=packed,
    )


def _filled(chunk: TokenChunk, layout: Layout) -> TokenChunk:
    """Give a chunk this layout."""
    if chunk.layout == layout:
        return chunk
    raw, k, routes = layout
    tokens, have = len(chunk.token_ids), chunk.layout.top
    changed: dict[str, np.ndarray] = {}
    if raw and chunk.raw_logprobs is None:
        changed["raw_logprobs"] = np.zeros(tokens, np.float32)
    if have < k:
        ids, logprobs = np.full((tokens, k), -1, np.int32), np.full((tokens, k), -np.inf, np.float32)
        if chunk.top_ids is not None and chunk.top_logprobs is not None:
            ids[:, :have], logprobs[:, :have] = chunk.top_ids, chunk.top_logprobs
        changed |= {"top_ids": ids, "top_logprobs": logprobs}
    if routes is not None and chunk.routed_experts is None:
        shape, dtype = routes
        changed["routed_experts"] = np.zeros((tokens, *shape), dtype)
    return msgspec.structs.replace(chunk, **changed)


def unpack_progress(progress: Progress, most: int) -> list[tuple[str, TokenChunk]]:
    """Return (group id, chunk) of at most `most` children. Raises ProtocolError if the columns do not fit each other; what a
    chunk may hold is checked with its group."""
    try:
        children = unpack_partials(progress.children, most)
    except InvalidRequest as error:
        raise ProtocolError(f"progress: {error.message}") from None
    ids, seeds = progress.group_ids, progress.seeds
    for name in ("groups", "firsts"):
        column = getattr(progress, name)
        if column.dtype != np.int32 or column.shape != (len(children),):
            raise ProtocolError(f"progress.{name} is {column.dtype} {column.shape}: must be int32 [{len(children)}]")
    if len(seeds) != len(ids) or not all(0 <= seed < SEED_LIMIT for seed in seeds):
        raise ProtocolError(f"{len(seeds)} seeds of {len(ids)} groups: must be one each, from 0 to 2**63 - 1")
    if children and not 0 <= int(progress.groups.min()) <= int(progress.groups.max()) < len(ids):
        raise ProtocolError(f"progress.groups has a number outside of the {len(ids)} groups")
    if children and int(progress.firsts.min()) < 0:
        raise ProtocolError("progress.firsts has a negative position")
    rows = zip(children, progress.groups.tolist(), progress.firsts.tolist(), strict=True)
    return [
        (ids[at], TokenChunk(index=child.index, first=first, seed=seeds[at], **child.columns())) for child, at, first in rows
    ]


# finished children: `SamplesDone`


def pack_samples(group_ids: Sequence[str], samples: Sequence[Sample]) -> SamplesDone:
    """Lay samples end to end: at least one, all of the same `layout`. group_ids: of each, replaces `Sample.group_id`."""
    of_groups = dict(zip(group_ids, samples, strict=True))
    places = {group_id: place for place, group_id in enumerate(of_groups)}
    prompts = [sample.prompt_routed_experts for sample in samples if sample.prompt_routed_experts is not None]
    return SamplesDone(
        group_ids=list(places),
        seeds=[sample.seed for sample in of_groups.values()],
        prompt_tokens=[sample.prompt_tokens for sample in of_groups.values()],
        ended=[
            Ended(
                places[group_id],
                sample.index,
                len(sample.token_ids),
                sample.finish_reason,
                sample.weight_versions,
                sample.seconds,
                sample.offloads,
                sample.error,
                sample.stopped_by,
                sample.text_end,
                None if sample.prompt_routed_experts is None else len(sample.prompt_routed_experts),
                sample.kv_versions,
            )
            for group_id, sample in zip(group_ids, samples, strict=True)
        ],
        prompt_routes=None if not prompts else route_frames(np.concatenate(prompts)),
        ranks=_packed_ranks(samples),
        **_packed_arrays(samples),
    )


def unpack_samples(done: SamplesDone) -> list[Sample]:
    """Return the samples; their arrays are views of the message's. Raises ProtocolError if its parts do not fit each other."""
    prompt_routes = _check_samples(done)
    ids, seeds, prompts = done.group_ids, done.seeds, done.prompt_tokens
    return [
        Sample(
            group_id=ids[child.group],
            index=child.index,
            finish_reason=child.finish_reason,
            weight_versions=child.weight_versions,
            prompt_tokens=prompts[child.group],
            error=child.error,
            seconds=child.seconds,
            offloads=child.offloads,
            seed=seeds[child.group],
            stopped_by=child.stopped_by,
            text_end=child.text_end,
            prompt_routed_experts=routes,
            kv_versions=child.kv_versions,
            ranks=ranks,
            **columns,
        )
        for child, columns, routes, ranks in zip(
            done.ended, _cut(done, [child.tokens for child in done.ended]), prompt_routes, _ranks_of(done), strict=True
        )
    ]


def _packed_ranks(samples: Sequence[Sample]) -> np.ndarray | None:
    """Lay ranks end to end, [T] int32; None: no sample has any."""
    if all(sample.ranks is None for sample in samples):
        return None
    none = [np.zeros(len(sample.token_ids), np.int32) for sample in samples]
    return np.concatenate([each if sample.ranks is None else sample.ranks for sample, each in zip(samples, none, strict=True)])


def _ranks_of(done: SamplesDone) -> list[np.ndarray | None]:
    """Return the ranks of each child's tokens, as views."""
    if done.ranks is None:
        return [None] * len(done.ended)
    ends = np.cumsum([child.tokens for child in done.ended]).tolist()
    parts = [done.ranks[end - child.tokens : end] for child, end in zip(done.ended, ends, strict=True)]
    return [part if part.any() else None for part in parts]


def _check_samples(done: SamplesDone) -> list[np.ndarray | None]:
    """Check that the parts of a message fit each other. Returns the routes of each child's prompt, as views. Raises
    ProtocolError."""
    groups = len(done.group_ids)
    try:
        _check_arrays(done, tokens := sum(child.tokens for child in done.ended))
        if done.ranks is not None and (done.ranks.dtype != np.int32 or done.ranks.shape != (tokens,)):
            raise ValueError(f"ranks is {done.ranks.dtype} {done.ranks.shape}: must be int32 [{tokens}]")
        prompt_routes = _prompt_routes(done)
    except ValueError as error:
        raise ProtocolError(f"samples: {error}") from None
    if len(done.seeds) != groups or len(done.prompt_tokens) != groups:
        raise ProtocolError(f"{len(done.seeds)} seeds, {len(done.prompt_tokens)} prompts of {groups} groups: must be one each")
    if not all(0 <= seed < SEED_LIMIT for seed in done.seeds):
        raise ProtocolError("samples.seeds: must be from 0 to 2**63 - 1")
    if max((child.group for child in done.ended), default=-1) >= groups:
        raise ProtocolError(f"samples.ended has a number outside of the {groups} groups")
    return prompt_routes


def _prompt_routes(done: SamplesDone) -> list[np.ndarray | None]:
    """Return the routes of each child's prompt, as views. Raises ValueError."""
    rows = [child.prompt_routes for child in done.ended]
    if done.prompt_routes is None:
        if set(rows) - {None}:
            raise ValueError("ended names routes of prompts, and there are none")
        return [None] * len(rows)
    whole = joined_routes(done.prompt_routes, "prompt_routes")
    if len(whole) != (total := sum(each or 0 for each in rows)):
        raise ValueError(f"prompt_routes has {len(whole)} positions, ended names {total}")
    ends = np.cumsum([each or 0 for each in rows]).tolist()
    return [None if each is None else whole[end - each : end] for each, end in zip(rows, ends, strict=True)]


# routes, in frames


def route_frames(routes: np.ndarray) -> list[np.ndarray]:
    """Cut routes [positions, layers, chosen] into views of at most ROUTES_FRAME_BYTES, at least one."""
    most = positions_per_frame(routes.nbytes // len(routes)) if len(routes) else 1
    return [routes[first : first + most] for first in range(0, max(1, len(routes)), most)]


def positions_per_frame(bytes_per_position: int) -> int:
    """Return how many positions of routes one frame takes."""
    return max(1, ROUTES_FRAME_BYTES // max(1, bytes_per_position))


def joined_routes(frames: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Return the routes of frames, without a copy if there is one. Raises ValueError if they do not fit each other."""
    kinds = {(frame.dtype, frame.shape[1:]) for frame in frames}
    dtypes, dimensions = COLUMNS["routed_experts"]
    if len(kinds) != 1 or frames[0].dtype not in dtypes or frames[0].ndim != dimensions:
        found = ", ".join(sorted(f"{dtype} [positions, {str(list(shape))[1:]}" for dtype, shape in kinds)) or "no frames"
        raise ValueError(f"{name} is {found[:200]}: must be frames of uint8 or uint16 [positions, layers, chosen], all alike")
    return frames[0] if len(frames) == 1 else np.concatenate(frames)


# both


def _packed_arrays(children: Sequence[TokenColumns]) -> dict[str, Any]:
    """Return the fields of a message with the arrays of children, end to end."""
    arrays = concat_arrays(children)
    routes = arrays["routed_experts"]
    return {**arrays, "routed_experts": None if routes is None else route_frames(routes)}


def _array_of(packed: PackedChildren | SamplesDone, name: str) -> np.ndarray | None:
    """Return an array of a message. Raises ValueError."""
    value = getattr(packed, name)
    return joined_routes(value, name) if isinstance(value, list) else value


def _cut(packed: PackedChildren | SamplesDone, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the arrays of each child, as views."""
    arrays = [(name, array) for name in COLUMNS if (array := _array_of(packed, name)) is not None]
    end = 0
    for length in lengths:
        first, end = end, end + length
        yield {name: array[first:end] for name, array in arrays}


def _check_arrays(packed: PackedChildren | SamplesDone, tokens: int) -> None:
    """Check dtypes, dimensions and that each array has `tokens` rows. Raises ValueError."""
    for name, (dtypes, dimensions) in COLUMNS.items():
        array = _array_of(packed, name)
        if array is not None and (array.dtype not in dtypes or array.ndim != dimensions or len(array) != tokens):
            shape, kinds = f"[{tokens}{', k' * (dimensions - 1)}]", " or ".join(np.dtype(each).name for each in dtypes)
            raise ValueError(f"{name} is {array.dtype} {array.shape}: must be {kinds} {shape}, a row per token")


def _check_children(packed: PackedChildren, most: int) -> None:
    """Check that the arrays fit each other. Raises ValueError."""
    for name in ("indices", "lengths"):
        array = getattr(packed, name)
        if array.dtype != np.int32 or array.ndim != 1:
            raise ValueError(f"{name} is {array.dtype} {array.shape}: must be int32 [children]")
    children, tokens = len(packed.indices), int(packed.lengths.sum(dtype=np.int64))
    if len(packed.lengths) != children or children > most:
        raise ValueError(f"{children} indices, {len(packed.lengths)} lengths: must be as many, at most {most}")
    if children and int(packed.lengths.min()) < 0:
        raise ValueError(f"lengths has {int(packed.lengths.min())}: must not be negative")
    _check_arrays(packed, tokens)
    _check_spans("spans", packed.spans, 3, min(tokens, MAX_SPANS), children)
    if packed.kv_spans is not None:
        _check_spans("kv_spans", packed.kv_spans, 4, MAX_SPANS, children)


def _check_spans(name: str, spans: np.ndarray, columns: int, bound: int, children: int) -> None:
    """Check the shape of spans, [at most `bound`, columns] int64, and the children that they name. Raises ValueError."""
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != columns or len(spans) > bound:
        raise ValueError(f"{name} is {spans.dtype} {spans.shape}: must be int64 [at most {bound}, {columns}]")
    if len(spans) and not 0 <= int(spans[:, 0].min()) <= int(spans[:, 0].max()) < children:
        raise ValueError(f"{name} has a number outside of the {children} children")
