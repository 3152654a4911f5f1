"""Log-probs of tokens that somebody gives, without drawing any."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from engine.types import Group, PartialSample, Sample, Sampling
from rollout.client.generation import Generation
from rollout.client.submission import Prompt, plain, token_array
from transport.errors import GroupFailed, InvalidRequest


def scored_group(group_id: str, prompt: Prompt, completions: Sequence[Prompt], sampling: Sampling | None) -> Group:
    """Make the group that scores the completions of a prompt, child i the i-th. `sampling`: how they were drawn, but for n,
    numbers of tokens, and what would end some of them early. Raises InvalidRequest."""
    tokens = [token_array(completion) for completion in completions]
    empty = [i for i, each in enumerate(tokens) if not len(each)]
    if not tokens or empty:
        raise InvalidRequest(f"completion {empty[0]} has no tokens" if tokens else "a prompt without completions to score")
    sampling = plain(Sampling() if sampling is None else sampling)
    longest = max(map(len, tokens))
    own = {"n": len(tokens), "max_tokens": longest, "min_tokens": min(sampling.min_tokens, longest), "seed": sampling.seed or 0}
    sampling = msgspec.structs.replace(sampling, finish_after=None, min_len_to_cut=0, deadline_s=None, **own)
    partials = []
    for index, each in enumerate(tokens):
        zeros = np.zeros(len(each), np.float32)  # the service does not look at them
        partials.append(PartialSample(index=index, token_ids=each, logprobs=zeros, weight_versions=[(0, 0)]))
    return Group(group_id, token_array(prompt), sampling, None, tuple(partials), score=True)


def score_all(
    generation: Generation,
    name: Callable[[], str],
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Prompt]],
    sampling: Sampling | None,
    timeout: float | None,
) -> list[list[Sample]]:
    """Score the completions of each prompt. Raises what `RolloutClient.score` says."""
    if len(prompts) != len(completions):
        raise InvalidRequest(f"{len(prompts)} prompts, {len(completions)} lists of completions: must be as many")
    for prompt, mine in zip(prompts, completions, strict=True):
        generation.submit(scored_group(name(), prompt, mine, sampling))
    groups = list(generation.groups(timeout))
    for sample in itertools.chain.from_iterable(groups):
        if sample.finish_reason != "scored":
            why = sample.error or "somebody ended it"
            raise GroupFailed(f"completion {sample.index} ended as {sample.finish_reason!r}: {why}", sample.group_id)
    return groups
