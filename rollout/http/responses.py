"""Parts of responses: log-probs, ends and counts, in the formats of vLLM and OpenAI."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from rollout.engine.values import Routing, Sample, Sampling
from rollout.http.errors import bad, not_served
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
    """where the token begins in the text of the choice"""


class WeightSpan(msgspec.Struct):
    """`version` generated the tokens `start` to `end` - 1 of a sample. As in vLLM and SGLang."""

    version: str
    start: int
    end: int


def weight_spans(sample: Sample) -> list[WeightSpan]:
    """Return which weights generated which tokens of a sample."""
    spans = sample.weight_versions
    ends = [start for start, _ in spans[1:]] + [len(sample.token_ids)] * bool(spans)
    return [WeightSpan(str(version), start, end) for (start, version), end in zip(spans, ends, strict=True)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options` of a request."""

    include_usage: bool | None = None
    """the last event has the token counts of all samples"""
    continuous_usage_stats: bool | None = None
    """each event has the token counts of its choice so far"""
    include_obfuscation: bool | None = None
    """of OpenAI: unsupported unless false"""


class StreamUsage:
    """Token counts of a stream. options: None = without."""

    def __init__(self, options: StreamOptions | None) -> None:
        self.last = options is not None and bool(options.include_usage)
        """whether the last event has the counts of all samples"""
        self._continuous = options is not None and bool(options.continuous_usage_stats)

    def so_far(self, prompt_tokens: int, tokens: int) -> dict[str, Usage]:
        """Return the field of an event: counts of its choice."""
        return {"usage": Usage(prompt_tokens, tokens, prompt_tokens + tokens)} if self._continuous else {}


def checked_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    """Raise HttpError for options of a request that is no stream, and for unsupported ones."""
    if options is None or options == StreamOptions():
        return
    if not stream:
        raise bad("stream_options: only a stream has them; set stream, or leave them out", "stream_options")
    if options.include_obfuscation:
        raise not_served("include_obfuscation", "leave it out: no event is padded", "stream_options")


def usage(groups: Sequence[PromptGroup], samples: Iterable[Sample]) -> Usage:
    prompt = sum(len(group.prompt) for group in groups)
    completion = sum(len(sample.token_ids) for sample in samples)
    return Usage(prompt, completion, prompt + completion)


def finish(sampling: Sampling, sample: Sample | None, versions: bool | None = None) -> dict[str, Any]:
    """Return the fields of a choice about its end; None: the sample has not finished. `stop_reason` is the stop string or stop
    token, None at the model's end of sequence. versions: false = without `weight_versions`."""
    if sample is None:
        return {"finish_reason": None}
    stop_reason: str | int | None = sample.stopped_by
    if stop_reason is None and sample.finish_reason == "stop" and len(sample.token_ids):
        last = int(sample.token_ids[-1])
        stop_reason = last if last in sampling.stop_token_ids else None
    return {
        "finish_reason": FINISH.get(sample.finish_reason, "abort"),
        "stop_reason": stop_reason,
        **({} if versions is False else {"weight_versions": weight_spans(sample)}),
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


def top_tokens(tokens: Tokens, most: int | None = None) -> list[list[tuple[int, float]]]:
    """Return (id, log-prob) of the most probable tokens at each position, without those that could not be sampled. most: so
    many of them; None = all."""
    if tokens.top_ids is None or tokens.top_logprobs is None:
        return [[] for _ in tokens.token_ids]
    rows = zip(tokens.top_ids.tolist(), tokens.top_logprobs.tolist(), strict=True)
    return [[(id, logprob) for id, logprob in zip(ids, logprobs, strict=True) if id >= 0][:most] for ids, logprobs in rows]


class Names(msgspec.Struct, frozen=True):
    """How tokens are called in /v1/completions."""

    plain: Callable[[int], str]
    distinct: Callable[[int], str]
    """of a token whose plain name another one has"""


def token_logprobs(tokens: Tokens, names: Names, offsets: list[int], most: int | None = None) -> TokenLogprobs:
    """List log-probs as /v1/completions does. `top_logprobs` always includes the sampled token, under its name in `tokens`.

    Args:
        offsets: where the tokens begin in the text of the choice.
        most: so many of the most probable tokens; None = all."""
    ids, logprobs = tokens.token_ids.tolist(), tokens.logprobs.tolist()
    top: list[dict[str, float] | None] = [
        named_logprobs([*most_probable, *([] if id in dict(most_probable) else [(id, logprob)])], id, names)
        for id, logprob, most_probable in zip(ids, logprobs, top_tokens(tokens, most), strict=True)
    ]
    return TokenLogprobs([names.plain(id) for id in ids], logprobs, top, offsets)


def named_logprobs(entries: list[tuple[int, float]], sampled: int, names: Names) -> dict[str, float]:
    """Return log-probs by name, as many as there are entries. Of tokens with the same name, such as parts of characters, the
    sampled one has it."""
    named = {names.plain(sampled): 0.0}
    keys = {sampled: names.plain(sampled)}
    for id, logprob in entries:
        if id not in keys:
            tries = (names.plain(id), names.distinct(id), id_name(id))
            keys[id] = next(name for name in tries if name not in named)
            named[keys[id]] = logprob
    return {keys[id]: logprob for id, logprob in entries}


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


def prompt_logprobs(score: Sample | None, name: Callable[[int], str], most: int) -> list[dict[str, Any] | None]:
    """List the log-probs of a prompt as vLLM does: None for the first token, then the token itself and the `most` most probable
    ones. The rank of a token is 1 + the number of tokens that are more probable; None if the service does not tell it."""
    rows: list[dict[str, Any] | None] = [None]
    if score is None:
        return rows
    own_ranks: list[int | None] = [None] * len(score.token_ids) if score.ranks is None else score.ranks.tolist()
    columns = zip(score.token_ids.tolist(), score.logprobs.tolist(), own_ranks, top_tokens(score, most), strict=True)
    for id, logprob, own_rank, top in columns:
        ranks: dict[int, int | None] = {id: own_rank} | {one: rank for rank, (one, _) in enumerate(top, 1)}
        entries = {id: logprob} | dict(top)
        rows.append(
            {str(one): {"logprob": value, "rank": ranks[one], "decoded_token": name(one)} for one, value in entries.items()}
        )
    return rows
