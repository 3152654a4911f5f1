"""Parts of responses: log-probs, ends and counts, in the formats of vLLM and OpenAI."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from rollout.engine.types import Routing, Sample, Sampling
from rollout.http.errors import not_served
from rollout.http.generation import PromptGroup
from rollout.http.sampling import VllmSampling
from rollout.http.text import TextChunk

Contents = AsyncGenerator[Any, None]
"""of the events of a stream"""
Tokens = Sample | TextChunk

FINISH = {"stop": "stop", "length": "length"}
"""any other reason (cut, deadline, aborted, stale) is "abort" """


class Usage(msgspec.Struct):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprobs(msgspec.Struct):
    """Log-probs of /v1/completions: one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """where the token begins in the text of all tokens"""


def usage(groups: Sequence[PromptGroup], samples: Iterable[Sample]) -> Usage:
    prompt = sum(len(group.prompt) for group in groups)
    completion = sum(len(sample.token_ids) for sample in samples)
    return Usage(prompt, completion, prompt + completion)


def wants_usage(options: dict[str, Any] | None) -> bool:
    """Whether the last event of a stream has the token counts."""
    return bool((options or {}).get("include_usage"))


def finish(sampling: Sampling, sample: Sample | None) -> dict[str, Any]:
    """Return the fields of a choice about its end; None: the sample has not finished. `stop_reason` is the stop string or stop
    token, None at the model's end of sequence."""
    if sample is None:
        return {"finish_reason": None}
    stop_reason: str | int | None = sample.stopped_by
    if stop_reason is None and sample.finish_reason == "stop" and len(sample.token_ids):
        last = int(sample.token_ids[-1])
        stop_reason = last if last in sampling.stop_token_ids else None
    return {
        "finish_reason": FINISH.get(sample.finish_reason, "abort"),
        "stop_reason": stop_reason,
        "weight_versions": sample.weight_versions,
    }


def wants_routes(asked: bool | None, routing: Routing | None, field: str) -> dict[str, bool]:
    """Return the field of `Sampling` for routes of experts. Raises HttpError if they are asked for and not kept."""
    if asked and routing is None:
        raise not_served(field, "start the service of a mixture of experts with routed_experts = true", field)
    return {"routed_experts": True} if asked else {}


def routes_of(sample: Sample, routing: Routing | None, first: int) -> np.ndarray | None:
    """Return the routes of a sample from position `first` on, as vLLM and SGLang have them: [positions, decoder layers, chosen]
    of all positions but the last token's, which was never an input. None: it has none."""
    routes = sample.routes
    return None if routes is None or routing is None else routing.by_decoder_layer(routes[first:])


def vllm_routes(sample: Sample, routing: Routing | None, params: VllmSampling) -> dict[str, Any]:
    """Return the field of a choice with routes: base64 of a NumPy file, uint8 or uint16."""
    routes = routes_of(sample, routing, params.routed_experts_prompt_start or 0)
    if routes is None:
        return {}
    file = io.BytesIO()
    np.save(file, routes, allow_pickle=False)
    return {"routed_experts": base64.b64encode(file.getvalue()).decode()}


def id_name(id: int) -> str:
    return f"token_id:{id}"


def top_tokens(tokens: Tokens) -> list[list[tuple[int, float]]]:
    """Return (id, log-prob) of the most probable tokens at each position, without those that could not be sampled."""
    if tokens.top_ids is None or tokens.top_logprobs is None:
        return [[] for _ in tokens.token_ids]
    rows = zip(tokens.top_ids.tolist(), tokens.top_logprobs.tolist(), strict=True)
    return [[(id, logprob) for id, logprob in zip(ids, logprobs, strict=True) if id >= 0] for ids, logprobs in rows]


def token_logprobs(tokens: Tokens, name: Callable[[int], str], offset: int = 0) -> TokenLogprobs:
    """List log-probs as /v1/completions does. `top_logprobs` always includes the sampled token. offset: characters of earlier
    tokens."""
    names, logprobs = [name(id) for id in tokens.token_ids.tolist()], tokens.logprobs.tolist()
    top: list[dict[str, float] | None] = [
        {name(id): value for id, value in most_probable} | {token: logprob}
        for token, logprob, most_probable in zip(names, logprobs, top_tokens(tokens), strict=True)
    ]
    return TokenLogprobs(names, logprobs, top, text_offsets(names, offset))


def text_offsets(names: list[str], first: int = 0) -> list[int]:
    """Return where each token begins in the text of all of them."""
    return list(itertools.accumulate(map(len, names), initial=first))[: len(names)]


def token_contents(tokens: Tokens, heads: dict[int, bytes]) -> Any:
    """List log-probs as /inference/v1/generate does, with the fields of all its versions.

    Args:
        heads: caches all but the number of each entry, by token id. Entries are most of a response, so they are written as JSON
            text instead of objects."""
    ids = tokens.token_ids.tolist()
    if tokens.top_ids is not None:
        return [
            id_logprob(id, logprob) | {"top_logprobs": [id_logprob(*one) for one in top]}
            for id, logprob, top in zip(ids, tokens.logprobs.tolist(), top_tokens(tokens), strict=True)
        ]
    if not ids:
        return []
    for id in ids:
        if id not in heads:
            heads[id] = b'},{"token":"token_id:%d","token_id":%d,"top_logprobs":[],"logprob":' % (id, id)
    parts = [b""] * (2 * len(ids))
    parts[::2] = map(heads.__getitem__, ids)
    parts[1::2] = msgspec.json.encode(tokens.logprobs.tolist())[1:-1].split(b",")
    parts[0] = b"[" + parts[0].removeprefix(b"},")
    return msgspec.Raw(b"".join(parts) + b"}]")


def id_logprob(id: int, logprob: float) -> dict[str, Any]:
    return {"token": id_name(id), "token_id": id, "logprob": logprob}


def prompt_logprobs(score: Sample | None, name: Callable[[int], str]) -> list[dict[str, Any] | None]:
    """List the log-probs of a prompt as vLLM does: None for the first token, then the token itself and the most probable ones.
    The rank of a token that is not among these is unknown (None)."""
    rows: list[dict[str, Any] | None] = [None]
    if score is None:
        return rows
    for id, logprob, top in zip(score.token_ids.tolist(), score.logprobs.tolist(), top_tokens(score), strict=True):
        ranks = {one: rank for rank, (one, _) in enumerate(top, 1)}
        entries = {id: logprob} | dict(top)
        rows.append(
            {str(one): {"logprob": value, "rank": ranks.get(one), "decoded_token": name(one)} for one, value in entries.items()}
        )
    return rows
