"""Builds groups and their Submit messages from a trainer's arguments."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from rollout.client.handle import Handle, OpenHandle
from rollout.engine.values import SEED_LIMIT, Group, Limits, PartialSample, Sample, Sampling
from rollout.transport.columns import pack_partials
from rollout.transport.errors import GroupFailed, InvalidRequest, LimitExceeded
from rollout.transport.frames import Frame, pack
from rollout.transport.messages import Submit, digest

TokenIds = Sequence[int] | np.ndarray
"""[tokens]"""
Samples = Sample | Sequence[Sample]


def group_of(
    group_id: str,
    prompt: TokenIds,
    sampling: Sampling | None,
    indices: Iterable[int] | None = None,
    partials: Iterable[PartialSample] = (),
) -> Group:
    """Make a group in the types of the wire. Raises InvalidRequest."""
    sampling = Sampling() if sampling is None else sampling
    try:
        some = None if indices is None else tuple(operator.index(index) for index in indices)
    except TypeError:
        raise InvalidRequest(f"indices={indices!r}: must be the indices of children") from None
    return Group(group_id, token_array(prompt), checked(sampling), some, tuple(map(_plain_partial, partials)))


def groups_of(
    group_id: Callable[[str | None], str],
    prompts: Sequence[TokenIds],
    sampling: Sampling | Sequence[Sampling] | None,
    group_ids: Sequence[str] | None,
) -> Iterator[Group]:
    """Make a group for each prompt. group_id: gives a group without id a new one. sampling: for all of them, or one each.
    Raises ValueError for lists of different lengths, InvalidRequest."""
    samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling | None) else list(sampling)
    ids: list[str | None] = [None] * len(prompts) if group_ids is None else list(group_ids)
    if not len(prompts) == len(samplings) == len(ids):
        raise ValueError(f"{len(prompts)} prompts, {len(samplings)} samplings, {len(ids)} group_ids: must be equally many")
    for prompt, one, given in zip(prompts, samplings, ids, strict=True):
        yield group_of(group_id(given), prompt, one)


def continued_group(group_id: str, samples: Samples | Handle, prompt: TokenIds | None, sampling: Sampling | None) -> Group:
    """Make the group that continues unfinished samples of one group, or the missing children of a handle's. Raises
    InvalidRequest."""
    if isinstance(samples, Handle):
        return rest_of(group_id, samples)
    if prompt is None or sampling is None:
        raise InvalidRequest("samples without their prompt or sampling: give the prompt and the sampling of their group")
    samples = [samples] if isinstance(samples, Sample) else list(samples)
    finished = [sample.index for sample in samples if sample.finish_reason in ("stop", "length")]
    failed = [sample.index for sample in samples if sample.finish_reason == "error"]
    seeds = {sample.seed for sample in samples}
    if not samples or finished or failed:
        what = f"children {finished} have ended by themselves" if finished else f"children {failed} failed"
        raise InvalidRequest(f"{what if samples else 'no samples'}: give samples that ended early")
    if len(seeds) > 1 or sampling.seed not in (None, *seeds):
        raise InvalidRequest(f"samples of seeds {sorted(seeds)}, sampling.seed={sampling.seed}: all must be of one group")
    samples = sorted(samples, key=lambda sample: sample.index)
    partials = [PartialSample.of(sample) for sample in samples if len(sample.token_ids)]
    seeded = msgspec.structs.replace(checked(sampling), seed=seeds.pop())
    return group_of(group_id, prompt, seeded, [sample.index for sample in samples], partials)


def rest_of(group_id: str, handle: Handle) -> Group:
    """Make the group that continues the missing children of a group from their known tokens. Raises InvalidRequest if none is
    missing."""
    finished, sampling = handle.finished, handle.group.sampling
    gone = {sample.index for sample in finished} | handle.cancelled_children
    indices = [index for index in handle.group.wanted if index not in gone]
    if handle.cancelled or not indices:
        raise InvalidRequest("nothing is left of this group: its samples have arrived or were cancelled", handle.group_id)
    ended = sum(sample.finish_reason in ("stop", "length") for sample in finished)
    enough = sampling.finish_after
    if enough is not None and ended >= enough:
        raise InvalidRequest(
            f"finish_after={enough}: that many children have finished, so the group is complete", handle.group_id
        )
    left = None if enough is None else min(enough - ended, len(indices))
    sampling = msgspec.structs.replace(sampling, seed=handle.seed, finish_after=left)
    partials = [child for child in handle.partial_samples() if child.index in indices]
    return group_of(group_id, handle.group.prompt, sampling, indices, partials)


def scored_group(group_id: str, prompt: TokenIds, completions: Sequence[TokenIds], sampling: Sampling | None) -> Group:
    """Make the group that scores the completions of a prompt, one child each. sampling: how they were sampled; its n, numbers
    of tokens and early ends are replaced. Raises InvalidRequest."""
    tokens = [token_array(completion, f"completion {i}") for i, completion in enumerate(completions)]
    empty = [i for i, each in enumerate(tokens) if not len(each)]
    if not tokens or empty:
        raise InvalidRequest(
            f"completion {empty[0]} has no tokens: leave it out" if tokens else "a prompt has no completions: give at least one"
        )
    sampling = checked(Sampling() if sampling is None else sampling)
    longest = max(map(len, tokens))
    own = {"n": len(tokens), "max_tokens": longest, "min_tokens": min(sampling.min_tokens, longest), "seed": sampling.seed or 0}
    sampling = msgspec.structs.replace(sampling, finish_after=None, min_len_to_cut=0, deadline_s=None, **own)
    partials = []
    for index, each in enumerate(tokens):
        zeros = np.zeros(len(each), np.float32)  # ignored by the service
        partials.append(PartialSample(index=index, token_ids=each, logprobs=zeros, weight_versions=[(0, 0)]))
    return Group(group_id, token_array(prompt), sampling, None, tuple(partials), score=True)


def scored_groups(
    group_id: Callable[[str | None], str],
    prompts: Sequence[TokenIds],
    completions: Sequence[Sequence[TokenIds]],
    sampling: Sampling | None,
) -> Iterator[Group]:
    """Make the groups that score the completions of each prompt. Raises InvalidRequest."""
    if len(prompts) != len(completions):
        raise InvalidRequest(f"{len(prompts)} prompts, {len(completions)} lists of completions: must be equally many")
    for prompt, mine in zip(prompts, completions, strict=True):
        yield scored_group(group_id(None), prompt, mine, sampling)


def check_scored(group: Iterable[Sample]) -> None:
    """Raises GroupFailed for a completion that was not scored to its end."""
    for sample in group:
        if sample.finish_reason != "scored":
            why = sample.error or "it was aborted"
            raise GroupFailed(f"completion {sample.index} ended as {sample.finish_reason!r}: {why}", sample.group_id)


def seeded(group: Group) -> Group:
    """Give a group a seed if it has none, so that it can be sent again."""
    if group.sampling.seed is not None:
        return group
    sampling = msgspec.structs.replace(group.sampling, seed=secrets.randbelow(SEED_LIMIT))
    return msgspec.structs.replace(group, sampling=sampling)


def turn_group(group_id: str, sample: Sample, prompt: TokenIds, sampling: Sampling | None, append: TokenIds) -> Group:
    """Make the group of the next turn: its prompt is `prompt`, the sample's tokens and `append`. Raises InvalidRequest."""
    if not isinstance(sample, Sample):
        raise InvalidRequest(f"sample is a {type(sample).__name__}: a turn continues one sample; give that one")
    before, more = token_array(prompt), token_array(append, "append")
    if sample.finish_reason == "error":
        raise InvalidRequest(f"child {sample.index} of {sample.group_id!r} failed ({sample.error}): continue another one")
    if len(before) != sample.prompt_tokens:
        raise InvalidRequest(
            f"prompt of {len(before)} tokens, the sample has prompt_tokens={sample.prompt_tokens}: give the prompt of its group"
        )
    if not len(more):
        raise InvalidRequest("append is empty: give the tokens that follow the sample's")
    group = group_of(group_id, np.concatenate([before, sample.token_ids, more]), sampling)
    return msgspec.structs.replace(group, after=(sample.group_id, sample.index))


def sendable(
    group: Group, *, serial: int, require_version: int, limits: Limits, client: str = "", require_digest: str = ""
) -> OpenHandle:
    """Make the handle of a group, with its frames. Checks types and sizes; the service checks what depends on its model and
    limits.

    Raises InvalidRequest, LimitExceeded."""
    try:
        submit = submit_of(group, serial=serial, require_version=require_version, client=client)
        if require_digest:
            submit = msgspec.structs.replace(submit, require_digest=require_digest)
        check_types(submit)
        return handle_of(group, submit, limits)
    except LimitExceeded:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"this group cannot be sent: {error}") from None


def submit_of(group: Group, *, serial: int, require_version: int, client: str) -> Submit:
    """Make the message of a group."""
    packed = pack_partials(group.partials)
    wanted, score, after = group.indices, group.score, group.after
    sent = Submit(group.id, group.prompt, group.sampling, serial, require_version, wanted, packed, score, after, client)
    return msgspec.structs.replace(sent, redraw=True) if group.redraw else sent


def handle_of(group: Group, submit: Submit, limits: Limits) -> OpenHandle:
    """Make the handle of a group whose fields have the types of the wire. Raises LimitExceeded."""
    frames = pack(submit)
    check_sizes(submit, frames, limits)
    return OpenHandle(group, frames, digest(submit))


def check_configuration(group: Group, configuration: str) -> None:
    """Raises InvalidRequest for children whose tokens are of another configuration of the model than a service's: they would
    continue as samples of neither."""
    for child in () if group.score else group.partials:
        if child.configuration not in ("", configuration):
            raise InvalidRequest(
                f"child {child.index} was generated with configuration {child.configuration} of the model, this service has "
                f"{configuration}: continue it on a service with the same config.json, or submit its prompt anew",
                group.id,
            )


def check_budget(handle: Handle, budget: int | None) -> None:
    """Raises LimitExceeded for a group that exceeds the client's budget alone: it could never be sent."""
    if budget is not None and handle.in_flight > budget:
        raise LimitExceeded(
            f"a prompt of {len(handle.group.prompt)} tokens and {handle.n} x max_tokens {handle.group.sampling.max_tokens} are "
            f"over the client's budget of {budget} tokens; give fewer children at a time, or a larger budget",
            handle.group_id,
        )


def checked(sampling: Sampling) -> Sampling:
    """Return a `Sampling`, which has checked itself. Raises InvalidRequest for another type."""
    if not isinstance(sampling, Sampling):
        raise InvalidRequest(f"sampling is a {type(sampling).__name__}: give Sampling(n=…, max_tokens=…, …)")
    return sampling


def _plain_partial(child: PartialSample) -> PartialSample:
    """Convert the arrays of a partial sample to the dtypes of the wire. Raises InvalidRequest for anything else."""
    if not isinstance(child, PartialSample):
        raise InvalidRequest(f"partials has a {type(child).__name__}: give PartialSample.of(sample)")
    try:
        logprobs = np.asarray(child.logprobs, np.float32)
        raw, top = (None if a is None else np.asarray(a, np.float32) for a in (child.raw_logprobs, child.top_logprobs))
        top_ids = None if child.top_ids is None else np.asarray(child.top_ids, np.int32)
        routes = None if child.routed_experts is None else plain_routes(child.routed_experts)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"partial sample {child.index}: {error}") from None
    arrays = {"logprobs": logprobs, "raw_logprobs": raw, "top_ids": top_ids, "top_logprobs": top, "routed_experts": routes}
    return msgspec.structs.replace(child, token_ids=token_array(child.token_ids, f"partial sample {child.index}"), **arrays)


def plain_routes(routes: np.ndarray) -> np.ndarray:
    """Return routes in a dtype of the wire. Raises ValueError."""
    found = np.asarray(routes)
    if found.dtype not in (np.uint8, np.uint16) or found.ndim != 3:
        raise ValueError(f"routed_experts is {found.dtype} {found.shape}: must be uint8 or uint16 [tokens, layers, chosen]")
    return found


def check_types(submit: Submit) -> None:
    """Check field types; `Sampling` checks its own. Raises TypeError, ValueError or OverflowError for a value that the service
    would decode differently."""
    for value, kind in ((submit.group_id, str), (submit.require_version, int)):
        msgspec.convert(msgspec.to_builtins(value), kind)


def check_sizes(submit: Submit, frames: list[Frame], limits: Limits) -> None:
    """Check sizes. Raises LimitExceeded naming the limit."""
    for what, size, most, name in (
        ("a group id", len(submit.group_id.encode()), limits.max_id_bytes, "max_id_bytes"),
        ("a header", len(frames[0]), limits.max_header_bytes, "max_header_bytes"),
        ("a prompt", submit.prompt.nbytes, limits.max_frame_bytes, "max_frame_bytes"),
        ("an array of partial samples", max(map(len, frames[2:]), default=0), limits.max_frame_bytes, "max_frame_bytes"),
    ):
        if size > most:
            raise LimitExceeded(f"{what} of {size} bytes: at most {most} (Limits.{name})")
    if len(frames) > limits.max_frames:
        raise LimitExceeded(
            f"partial samples with routes take {len(frames)} frames: at most {limits.max_frames} (Limits.max_frames); submit "
            "fewer children at a time (indices)"
        )


def token_array(prompt: TokenIds, what: str = "prompt") -> np.ndarray:
    """Copy token ids to [tokens] int32. Raises InvalidRequest naming `what` for others than 32-bit integers in one
    dimension."""
    try:
        array = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"{what}: {error}") from None
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.dtype.kind in "US" or isinstance(prompt, Mapping):
        raise InvalidRequest(
            f"{what} holds text where it must be integer token ids [tokens]: give one text or one conversation as the "
            "prompt of a client's method, or tokenize first: ids = client.encode(text)"
        )
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(f"{what} is {array.dtype} of shape {array.shape}: must be integer token ids [tokens]")
    low, high = int(array.min()), int(array.max())
    if low < -(2**31) or high >= 2**31:
        raise InvalidRequest(f"{what} holds {low if low < -(2**31) else high}: must be token ids of 32 bits")
    return np.array(array, np.int32)
