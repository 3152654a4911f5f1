"""Checks of received samples and chunks against the request, before they are used.

The client checks what its service sends, and a router what its replicas send, for the group as they submitted it. Possible but
wrong tokens are not found here; docs/fleet.md describes what finds those.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np

from rollout.engine.values import (
    SEED_LIMIT,
    Group,
    PartialSample,
    Refreshed,
    Routing,
    Sample,
    Sampling,
    Spans,
    TokenChunk,
    valid_kv_spans,
)

ROUNDING = 1e-4
"""by which a log-prob may exceed 0, because of float32 sums"""
LOWEST = float(np.finfo(np.float32).min)
"""lower values are -inf"""
DTYPES = {"logprobs": np.float32, "raw_logprobs": np.float32, "top_ids": np.int32, "top_logprobs": np.float32}


def any_version(version: int) -> bool:
    """Accept any version: a client does not know which were live."""
    return True


class Bounds(NamedTuple):
    """Bounds of a group's samples that the group does not state."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    """the model's own"""
    least_version: int = 0
    """of the weights when the group was sent: older ones cannot generate its tokens"""
    was_live: Callable[[int], bool] = any_version
    routing: Routing | None = None
    """shape of the routes that the service keeps"""
    newest_version: Callable[[], int] | None = None
    """returns the newest version that was live; None: unknown, then a child may end as "stale" at any time"""
    deadline_at: float = -math.inf
    """time.monotonic before which no child can end as "deadline\""""
    any_kv: bool = False
    """whether KV may be of any older weights: what the group continued is unknown"""


NOTHING = Bounds(0, frozenset())
"""bounds of an unsent group"""


def check_sample(sample: Sample, group: Group, partial: PartialSample | None, bounds: Bounds) -> None:
    """Raises ValueError naming the child, the field and what the group allows. partial: what the child had when it was
    submitted."""
    if sample.index not in group.wanted:
        raise ValueError(f"sample {sample.index} of a group of {len(group.wanted)}")
    if sample.prompt_tokens != len(group.prompt):
        raise _wrong(sample, "prompt_tokens", sample.prompt_tokens, f"{len(group.prompt)}, as in the prompt")
    if not _is_seed(sample.seed, group.sampling):
        raise _wrong(sample, "seed", sample.seed, f"{group.sampling.seed}")
    if not (0.0 <= sample.seconds < math.inf and sample.offloads >= 0):
        raise _wrong(sample, "seconds, offloads", (sample.seconds, sample.offloads), "finite, and not below 0")
    if sample.error is not None and sample.finish_reason != "error":
        raise _wrong(sample, "error", sample.error, 'None, unless finish_reason is "error"')
    _check_columns(sample, group.sampling, bounds.vocab_size)
    _check_routes(sample, group.sampling, bounds.routing)
    if sample.prompt_routed_experts is not None:
        _check_prompt_routes(sample, group.sampling, bounds.routing)
    if sample.finish_reason == "error" and not len(sample.token_ids):
        partial = None  # what it had was dropped with it
    skip = 0 if partial is None or group.score else len(partial.token_ids)
    _check_values(sample, skip, bounds.vocab_size, given=group.score and not group.redraw)
    _check_partial(sample, partial, group)
    _check_versions(sample, skip, bounds)
    check_kv(sample, group, partial, bounds)
    _check_ranks(sample, group, bounds.vocab_size)
    _check_end(sample, group, partial, bounds)


def check_group(samples: Iterable[Sample], group: Group) -> None:
    """Raises ValueError if children of a complete group were cut, and fewer than `finish_after` have ended by themselves."""
    enough, reasons = group.sampling.finish_after, [sample.finish_reason for sample in samples]
    ended = sum(reason in ("stop", "length") for reason in reasons)
    if enough is not None and "cut" in reasons and {*reasons} <= {"cut", "stop", "length"} and ended < enough:
        raise ValueError(f"{reasons.count('cut')} children were cut, and {ended} ended by themselves: must be {enough}")


def _check_ranks(sample: Sample, group: Group, vocab_size: int) -> None:
    """Check the ranks of scored tokens, which a service may leave out."""
    ranks = sample.ranks
    if ranks is None:
        return
    wanted = len(sample.token_ids) if group.score and group.sampling.top_logprobs else 0
    if len(ranks) != wanted or (wanted and not 1 <= int(ranks.min()) <= int(ranks.max()) <= vocab_size):
        raise _wrong(sample, "ranks", str(ranks[:20].tolist()), f"{wanted} from 1 to {vocab_size}, or none")


def check_chunk(chunk: TokenChunk, group: Group, bounds: Bounds) -> None:
    """Raises ValueError for new tokens that are impossible for the group; `PartialSample.validate` checks the columns."""
    if not _is_seed(chunk.seed, group.sampling):
        raise _wrong(chunk, "seed", chunk.seed, f"{group.sampling.seed}")
    chunk.validate(group.sampling, bounds.vocab_size)
    _check_routes(chunk, group.sampling, bounds.routing)
    _check_values(chunk, 0, bounds.vocab_size, given=False)
    _check_versions(chunk, 0, bounds)
    oldest = 0 if group.after is not None else max(0, bounds.least_version - group.sampling.max_kv_lag)
    for at, _, version in chunk.kv_versions:
        if not (oldest <= version <= version_at(chunk.weight_versions, at) and bounds.was_live(version)):
            raise _wrong(
                chunk, "kv_versions", chunk.kv_versions, f"of weights from {oldest} on that were live before the token"
            )


def check_goes_on(sample: Sample, known: PartialSample) -> None:
    """Raises ValueError if a sample differs from its streamed tokens, as far as the same versions generated both."""
    same = agreed(sample.weight_versions, known.weight_versions, min(len(sample.token_ids), len(known.token_ids)))
    for name in ("token_ids", "logprobs"):
        if getattr(sample, name)[:same].tobytes() != getattr(known, name)[:same].tobytes():
            raise ValueError(f"sample {sample.index} has other {name} than the tokens that were streamed of it")


def check_refreshed(refreshed: Refreshed, version: int | None) -> None:
    """Raises ValueError if the answer to a refresh names another version, or impossible numbers. version: requested; None: the
    next one."""
    if refreshed.version < 0 or version not in (None, refreshed.version):
        raise ValueError(f"version {refreshed.version} for a refresh of version {version}")
    for name in ("bytes", "sent_bytes", "seconds", "staged_seconds", "paused_seconds"):
        if not 0 <= getattr(refreshed, name) < math.inf:
            raise ValueError(f"{name}={getattr(refreshed, name)}: must be finite, and not below 0")


def agreed(one: Spans, other: Spans, length: int) -> int:
    """Return how many of the first `length` tokens have equal versions in both."""
    starts = sorted({first for first, _ in (*one, *other) if first < length})
    return next((at for at in starts if version_at(one, at) != version_at(other, at)), length)


def version_at(spans: Spans, at: int) -> int:
    """Return the version of the token at `at`; -1 if no span covers it."""
    place = bisect_right(spans, (at, math.inf)) - 1
    return spans[place][1] if place >= 0 else -1


def _wrong(child: Sample | TokenChunk, field: str, value: object, must: str) -> ValueError:
    kind = "sample" if isinstance(child, Sample) else "chunk of child"
    return ValueError(f"{kind} {child.index} has {field} {str(value)[:80]}: must be {must}")


def _is_seed(seed: int, sampling: Sampling) -> bool:
    return 0 <= seed < SEED_LIMIT if sampling.seed is None else seed == sampling.seed


def _check_columns(sample: Sample, sampling: Sampling, vocab_size: int) -> None:
    """Check which arrays exist, their dtypes and shapes, and token ids."""
    tokens, k = sample.token_ids, sampling.top_logprobs
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise _wrong(sample, "token_ids", f"{tokens.dtype} {tokens.shape}", "int32 [tokens]")
    raw, top = sampling.raw_logprobs, k > 0
    for name, column, wanted in (
        ("logprobs", sample.logprobs, True),
        ("raw_logprobs", sample.raw_logprobs, raw),
        ("top_ids", sample.top_ids, top),
        ("top_logprobs", sample.top_logprobs, top),
    ):
        if column is None and (not wanted or not len(tokens)):
            continue
        shape = (len(tokens), k) if name.startswith("top") else (len(tokens),)
        if column is None or not wanted or column.dtype != DTYPES[name] or column.shape != shape:
            found = "none" if column is None else f"{column.dtype} {column.shape}"
            raise _wrong(
                sample, name, found, f"{np.dtype(DTYPES[name]).name} {list(shape)}" if wanted else "none: it was not requested"
            )
    if len(tokens) > (most := sampling.max_tokens):
        raise _wrong(sample, "token_ids", f"of {len(tokens)} tokens", f"at most max_tokens={most}")
    if len(tokens) and int(tokens.view(np.uint32).max()) >= vocab_size:  # those below 0 are the largest
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise _wrong(sample, "token_ids", f"with {bad}", f"0 to {vocab_size - 1}")


def _check_routes(child: Sample | TokenChunk, sampling: Sampling, routing: Routing | None) -> None:
    """Check whether there are routes, their dtype, shape and values."""
    routes, tokens = child.routed_experts, len(child.token_ids)
    if routes is None and (not sampling.routed_experts or not tokens):
        return
    if routes is None or not sampling.routed_experts or routing is None:
        raise _wrong(
            child, "routed_experts", "none" if routes is None else routes.shape, "there if they were requested, else none"
        )
    routing.check(routes, tokens, f"sample {child.index} has routed_experts")


def _check_prompt_routes(sample: Sample, sampling: Sampling, routing: Routing | None) -> None:
    routes = sample.prompt_routed_experts
    assert routes is not None
    if not sampling.routed_experts or routing is None:
        raise _wrong(sample, "prompt_routed_experts", routes.shape, "none: they were not requested")
    routing.check(routes, sample.prompt_tokens - 1, f"sample {sample.index} has prompt_routed_experts")


def _check_values(child: Sample | TokenChunk, skip: int, vocab_size: int, given: bool) -> None:
    """Check log-probs after the first `skip` tokens, which the client submitted. given: the tokens are given, so some may have
    probability 0."""
    for name in ("logprobs", "raw_logprobs"):
        values = getattr(child, name)
        if values is None or len(values) <= skip:
            continue
        values = values[skip:]
        if not (values.max() <= ROUNDING and (given or values.min() >= LOWEST)):
            bad = values[~(np.isfinite(values) & (values <= ROUNDING))][0]
            raise _wrong(child, name, f"with {bad}", "finite, and not above 0")
    ids, values = child.top_ids, child.top_logprobs
    if ids is None or values is None or not ids[skip:].size:
        return
    ids, values = ids[skip:], values[skip:]
    if not -1 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise _wrong(child, "top_ids", f"from {ids.min()} to {ids.max()}", f"0 to {vocab_size - 1}, and -1 for none")
    if not (values.max() <= ROUNDING and np.array_equal(values >= LOWEST, ids >= 0)):
        raise _wrong(child, "top_logprobs", "that are none", "finite, not above 0, and -inf where top_ids is -1")


def _check_partial(sample: Sample, partial: PartialSample | None, group: Group) -> None:
    """Check that the sample begins with the tokens of its partial sample."""
    if partial is None:
        return
    had, tokens = len(partial.token_ids), sample.token_ids
    if group.score:
        same = max(0, len(tokens) - group.redraw)  # a child that is drawn again ends with the first other token
        if len(tokens) > had or not np.array_equal(tokens[:same], partial.token_ids[:same]):
            raise _wrong(sample, "token_ids", "that were not given", "those to score")
        return
    if not np.array_equal(tokens[:had], partial.token_ids):
        raise _wrong(
            sample, "token_ids", "that do not begin with those it had", f"the {had} of the partial sample, then others"
        )
    given, got = partial.routed_experts, sample.routed_experts
    if given is not None and got is not None and got[:had].tobytes() != given.tobytes():
        raise _wrong(
            sample, "routed_experts", "that do not begin with those it had", f"the {had} of the partial sample, then others"
        )
    if sample.logprobs[:had].tobytes() != partial.logprobs.tobytes():
        raise _wrong(sample, "logprobs", "that do not begin with those it had", f"the {had} of the partial sample, then others")
    if agreed(sample.weight_versions, partial.weight_versions, had) < had:
        raise _wrong(
            sample, "weight_versions", sample.weight_versions, f"{partial.weight_versions} of the partial sample, then others"
        )


def _check_versions(child: Sample | TokenChunk, skip: int, bounds: Bounds) -> None:
    """Check the spans: their order, and the versions of the tokens after the first `skip`."""
    spans, tokens = child.weight_versions, len(child.token_ids)
    if len(spans) == 1 and not skip and tokens and spans[0][0] == 0:  # as nearly always
        new = [spans[0][1]]
    else:
        new = _new_versions(child, skip)
    if new and (new != sorted(set(new)) or not bounds.least_version <= new[0] <= new[-1] < 2**63):
        raise _wrong(child, "weight_versions", spans, f"versions that ascend from {bounds.least_version}, the live one before")
    for version in new:
        if not bounds.was_live(version):
            raise _wrong(child, "weight_versions", spans, f"versions that were live; {version} never was")


def check_kv(sample: Sample, group: Group, partial: PartialSample | None, bounds: Bounds) -> None:
    """Raises ValueError for spans of KV that are none, that differ from those that the child had, or that no engine can have
    read: it reads KV of the weights that generate the token, of those that generated its tokens before (kv="keep"), of prompts
    as old as `max_kv_lag` allows, and of any age of the turn that it continues. It says only what does not follow."""
    spans, tokens = sample.kv_versions, len(sample.token_ids)
    skip = 0 if partial is None or group.score else len(partial.token_ids)
    if not spans and not (partial is not None and partial.kv_versions):
        return
    if not valid_kv_spans(spans, tokens):
        raise _wrong(sample, "kv_versions", spans, "spans that ascend, within its tokens")
    if partial is not None and skip and [span for span in spans if span[0] < skip] != partial.kv_versions:
        raise _wrong(sample, "kv_versions", spans, f"{partial.kv_versions} of the partial sample, then others")
    first = version_at(sample.weight_versions, skip)
    oldest = 0 if bounds.any_kv or group.after is not None else max(0, first - group.sampling.max_kv_lag)
    stated = {at: [(position, version) for _, position, version in some] for at, some in groupby(spans, lambda span: span[0])}
    kv: list[tuple[int, int]] = []
    """(first position, version that computed the KV from there on) of what a token has read; each piece is looked at once"""
    for at in sorted({*stated, skip} if skip < tokens else stated):
        pieces, own = stated.get(at, []), version_at(sample.weight_versions, at)
        follows = pieces == (_put(kv, pieces) or [(0, own)]) and at in stated
        if at < skip or not kv:
            continue
        if kv[0][0] != 0 or kv[-1][0] >= sample.prompt_tokens + at or kv[-1][1] != own or follows:
            must = f"spans of all KV that token {at} of version {own} has read, if they differ"
            raise _wrong(sample, "kv_versions", spans, must)
        for _, version in kv if at == skip else pieces:
            if not (oldest <= version <= own and bounds.was_live(version)):
                must = f"of weights from {oldest} to {own} that were live; {version} cannot have computed KV of token {at}"
                raise _wrong(sample, "kv_versions", spans, must)


def _put(kv: list[tuple[int, int]], pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Let pieces take the place of those from their first position on. Returns these."""
    replaced: list[tuple[int, int]] = []
    for piece in pieces:
        while kv and kv[-1][0] >= piece[0]:
            replaced.append(kv.pop())
        kv.append(piece)
    return replaced[::-1]


def _new_versions(child: Sample | TokenChunk, skip: int) -> list[int]:
    """Return the versions of the tokens after the first `skip`, in order. Raises ValueError for invalid spans."""
    spans, tokens = child.weight_versions, len(child.token_ids)
    firsts = [first for first, _ in spans]
    if firsts != sorted(set(firsts)) or firsts[:1] != ([0] if tokens else []) or (tokens and firsts[-1] >= tokens):
        raise _wrong(child, "weight_versions", spans, f"spans that ascend from token 0 to below {tokens}")
    return [version_at(spans, skip), *(version for first, version in spans if first > skip)] if tokens > skip else []


def _check_end(sample: Sample, group: Group, partial: PartialSample | None, bounds: Bounds) -> None:
    """Check that a child may end for this reason, with these tokens."""
    reason, sampling, tokens = sample.finish_reason, group.sampling, sample.token_ids
    most = sampling.max_tokens if partial is None or not group.score else len(partial.token_ids)
    match reason:
        case "length":
            allowed = not group.score and len(tokens) == most
        case "stop":
            allowed = not group.score and len(tokens) > sampling.min_tokens and _stops(sample, sampling, bounds.eos_token_ids)
        case "scored":
            allowed = group.score and (len(tokens) == most or (group.redraw and 0 < len(tokens) < most))
        case "cut":
            allowed = not group.score and sampling.finish_after is not None
        case "deadline":
            allowed = sampling.deadline_s is not None and time.monotonic() >= bounds.deadline_at
        case "stale":
            allowed = len(tokens) > 0 and _is_stale(sample, sampling.max_version_lag, bounds)
        case _:  # "error", and "aborted", which another client may cause
            allowed = True
    if not allowed:
        raise _wrong(sample, "finish_reason", f"{reason!r} after {len(tokens)} tokens", "one that its group allows")
    by, end = sample.stopped_by, sample.text_end
    stops = reason == "stop" or (reason == "scored" and group.redraw)
    if (by is None) != (end is None) or by is not None and (not stops or by not in sampling.stop) or (end or 0) < 0:
        raise _wrong(sample, "stopped_by, text_end", (by, end), "one of Sampling.stop, and where it begins, or None")


def _is_stale(sample: Sample, lag: int | None, bounds: Bounds) -> bool:
    """Return whether a child's first token can have become too old."""
    newest = None if bounds.newest_version is None else bounds.newest_version()
    return lag is not None and (newest is None or newest - sample.weight_versions[0][1] > lag)


def _stops(sample: Sample, sampling: Sampling, eos: frozenset[int]) -> bool:
    """Return whether the last token may end the child."""
    last = int(sample.token_ids[-1])
    own = last in sampling.stop_token_ids or (last in eos and not sampling.ignore_eos)
    return own or sample.stopped_by is not None
