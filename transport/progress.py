"""Children of many groups in one message, to columns and back: new tokens of those that run, samples of those that have ended.

A message costs its two ends some 50 microseconds however small it is, and each array in it 5; in columns a sample costs 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from engine.types import SEED_LIMIT, Sample, TokenChunk
from transport.errors import InvalidRequest, ProtocolError
from transport.messages import Ended, Progress, SamplesDone
from transport.partial import pack_partials, unpack_partials

SAMPLE_COLUMNS = {
    "token_ids": (np.int32, 1),
    "logprobs": (np.float32, 1),
    "raw_logprobs": (np.float32, 1),
    "top_ids": (np.int32, 2),
    "top_logprobs": (np.float32, 2),
}
"""fields of `Sample` with a row for each token: dtype and dimensions"""


def pack_progress(number: int, chunks: Mapping[str, Sequence[TokenChunk]]) -> Progress:
    """Make the message of chunks by group id: one group at least, each with one chunk at least. What some have and
    others do not, these get as well: nobody asked for it, and the client leaves it out."""
    flat = [chunk for of_group in chunks.values() for chunk in of_group]
    raw, most = any(chunk.raw_logprobs is not None for chunk in flat), max(map(_columns, flat))
    if raw or most:
        flat = [_filled(chunk, raw, most) for chunk in flat]
    packed = pack_partials(flat)
    assert packed is not None
    return Progress(
        number=number,
        group_ids=list(chunks),
        seeds=[of_group[0].seed for of_group in chunks.values()],
        groups=np.repeat(np.arange(len(chunks), dtype=np.int32), [len(of_group) for of_group in chunks.values()]),
        firsts=np.array([chunk.first for chunk in flat], np.int32),
        children=packed,
    )


def _columns(chunk: TokenChunk) -> int:
    return 0 if chunk.top_ids is None else chunk.top_ids.shape[1]


def _filled(chunk: TokenChunk, raw: bool, most: int) -> TokenChunk:
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


def unpack_progress(progress: Progress, most: int) -> list[tuple[str, TokenChunk]]:
    """Return (group id, chunk) of each of at most `most` children. Raises ProtocolError where the columns do not fit each
    other; what a chunk may hold is checked with its group."""
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
        raise ProtocolError(f"{len(seeds)} seeds of {len(ids)} groups: one for each, from 0 to 2**63 - 1")
    if children and not 0 <= int(progress.groups.min()) <= int(progress.groups.max()) < len(ids):
        raise ProtocolError(f"progress.groups names none of the {len(ids)} groups")
    if children and int(progress.firsts.min()) < 0:
        raise ProtocolError("progress.firsts holds a position below 0")
    rows = zip(children, progress.groups.tolist(), progress.firsts.tolist(), strict=True)
    return [(ids[at], TokenChunk(**msgspec.structs.asdict(child), first=first, seed=seeds[at])) for child, at, first in rows]


def columns_of(sample: Sample) -> tuple[bool, int]:
    """Return what all samples of a message must have in common: whether there are raw log-probs, and how many of the most
    probable tokens."""
    return sample.raw_logprobs is not None, 0 if sample.top_ids is None else sample.top_ids.shape[1]


def sample_bytes(sample: Sample) -> int:
    """Count the bytes of a sample's arrays."""
    size = sample.token_ids.nbytes + sample.logprobs.nbytes
    for array in (sample.raw_logprobs, sample.top_ids, sample.top_logprobs):
        size += 0 if array is None else array.nbytes
    return size


def pack_samples(group_ids: Sequence[str], samples: Sequence[Sample]) -> SamplesDone:
    """Lay samples end to end: one at least, all of the same `columns_of`. group_ids: of each, in place of its own."""
    of_groups = dict(zip(group_ids, samples, strict=True))
    places = {group_id: place for place, group_id in enumerate(of_groups)}
    names = [name for name in SAMPLE_COLUMNS if getattr(samples[0], name) is not None]
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
            )
            for group_id, sample in zip(group_ids, samples, strict=True)
        ],
        **{name: np.concatenate([getattr(sample, name) for sample in samples]) for name in names},
    )


def unpack_samples(done: SamplesDone) -> list[Sample]:
    """Return the samples; their arrays are views of the message's. Raises ProtocolError where its parts do not fit each
    other."""
    _check_samples(done)
    ids, seeds, prompts = done.group_ids, done.seeds, done.prompt_tokens
    tokens, logprobs, raw = done.token_ids, done.logprobs, done.raw_logprobs
    top_ids, top_logprobs = done.top_ids, done.top_logprobs
    samples, end = [], 0
    for child in done.ended:
        at, first, end = child.group, end, end + child.tokens
        sample = Sample(
            group_id=ids[at],
            index=child.index,
            token_ids=tokens[first:end],
            logprobs=logprobs[first:end],
            finish_reason=child.finish_reason,
            weight_versions=child.weight_versions,
            prompt_tokens=prompts[at],
            raw_logprobs=None if raw is None else raw[first:end],
            error=child.error,
            seconds=child.seconds,
            offloads=child.offloads,
            seed=seeds[at],
            top_ids=None if top_ids is None else top_ids[first:end],
            top_logprobs=None if top_logprobs is None else top_logprobs[first:end],
            stopped_by=child.stopped_by,
            text_end=child.text_end,
        )
        samples.append(sample)
    return samples


def _check_samples(done: SamplesDone) -> None:
    groups, tokens = len(done.group_ids), sum(child.tokens for child in done.ended)
    for name, (dtype, dimensions) in SAMPLE_COLUMNS.items():
        array = getattr(done, name)
        if array is not None and (array.dtype != dtype or array.ndim != dimensions or len(array) != tokens):
            what = f"{np.dtype(dtype).name} [{tokens}{', k' * (dimensions - 1)}]"
            raise ProtocolError(f"samples.{name} is {array.dtype} {array.shape}: must be {what}, a row for each token")
    if len(done.seeds) != groups or len(done.prompt_tokens) != groups:
        raise ProtocolError(f"{len(done.seeds)} seeds, {len(done.prompt_tokens)} prompts of {groups} groups: one for each")
    if not all(0 <= seed < SEED_LIMIT for seed in done.seeds):
        raise ProtocolError("samples.seeds: must be from 0 to 2**63 - 1")
    if max((child.group for child in done.ended), default=-1) >= groups:
        raise ProtocolError(f"a sample of none of the {groups} groups")
