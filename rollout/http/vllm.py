"""vLLM's routes for tokens: `/v1/models`, `/v1/completions`, `/inference/v1/generate`.

Where versions of vLLM differ, responses have the fields of all: a token's log-prob has `token_id` and `token: "token_id:N"`.
"""

from __future__ import annotations

import itertools
import time
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from rollout.client.token_text import cut, visible
from rollout.engine.values import Sample, Sampling
from rollout.http.endpoints import Endpoints, EventStream, unless_disconnected
from rollout.http.errors import bad, not_served
from rollout.http.generation import Arrival, GenerationService, PromptGroup, checked_name
from rollout.http.responses import (
    Contents,
    Names,
    StreamOptions,
    StreamUsage,
    TokenLogprobs,
    Tokens,
    checked_stream_options,
    finish,
    id_name,
    prompt_logprobs,
    token_contents,
    token_logprobs,
    usage,
    vllm_routes,
    wants_routes,
)
from rollout.http.sampling import VllmSampling, lag_of, priority_of, sampling_of, top_logprobs_of
from rollout.http.text import Offsets, Text, TextOptions, characters

COMPLETION_TOKENS = 16
"""default of max_tokens of /v1/completions, as in OpenAI's API"""


class VllmRequest(VllmSampling, kw_only=True, forbid_unknown_fields=True):
    """Fields of /v1/completions and /v1/chat/completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    """null: as true"""
    response_format: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    user: str | None = None

    def text_options(self, marker: str | None = None) -> TextOptions:
        return TextOptions(skip_special=self.skip_special_tokens, keep_stop=self.include_stop_str_in_output, marker=marker)


class CompletionRequest(VllmRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/completions."""

    prompt: str | list[int | str | list[int]]
    """text, token ids, or a list of either"""
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class Params(VllmSampling, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of /inference/v1/generate."""

    logprobs: int | None = None
    # the route returns no text, and `stream` decides what its events hold
    detokenize: bool | None = None
    output_kind: int | None = None


class TokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: Params
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionPrompt(msgspec.Struct, frozen=True):
    """One prompt of /v1/completions."""

    ids: list[int]
    text: str | None
    """as the request has it; None: it has ids"""


class ModelCard(msgspec.Struct, kw_only=True):
    """Entry of /v1/models. parent: the base model of an adapter."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "rollout"
    max_model_len: int
    root: str
    parent: str | msgspec.UnsetType = msgspec.UNSET


class CompletionRoutes:
    """The routes, over one `GenerationService`."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation
        self._heads: dict[int, bytes] = {}
        """of `token_contents`; at most one entry per id of the vocabulary"""

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.post("/inference/v1/generate", self.generate, TokensRequest),
            endpoints.post("/v1/completions", self.completions, CompletionRequest),
            endpoints.get("/v1/models", self.models),
        ]

    async def models(self, request: Request) -> dict[str, Any]:
        """List the names of the model, and of the loaded adapter."""
        upstream, names = self._generation.upstream, self._generation.models
        context = upstream.info.context
        cards = [ModelCard(id=name, max_model_len=context, root=names[0]) for name in names]
        if (adapter := upstream.adapter) is not None:
            cards.append(ModelCard(id=adapter.name, max_model_len=context, root=adapter.name, parent=names[0]))
        return {"object": "list", "data": cards}

    # /inference/v1/generate

    async def generate(self, request: Request, body: TokensRequest) -> Any:
        """Sample from token ids."""
        generation, params = self._generation, body.sampling_params
        generation.model(body.model)
        checked_stream_options(body.stream_options, body.stream)
        for field in ("features", "content_parts", "kv_transfer_params"):
            if getattr(body, field):
                raise not_served(field, "send token_ids of text", field)
        id = checked_name(body.request_id) or generation.new_id("gen")
        # 1 also requests the most probable token, which clients that send it (renderers) do not read
        top = 0 if params.logprobs == 1 else params.logprobs or 0
        stream = bool(body.stream) and params.prompt_logprobs is None
        more = top_logprobs_of(top, "logprobs") | generation.streaming(stream)
        sampling = vllm_sampling(generation, params, body, len(body.token_ids), max_tokens=params.max_tokens, **more)
        group = generation.group(body.token_ids, sampling, {id})
        generation.check_samples([group])
        scores: list[Sample | None] = []
        with generation.arrival({id}) as arrival:
            if stream:
                return EventStream(request, self._generate_events(request, arrival, group, body, id))
            if params.prompt_logprobs is not None:
                scores = await generation.score(request, arrival, [group], max(1, params.prompt_logprobs))
            (samples,) = await generation.sample(request, arrival, [group])
        answer: dict[str, Any] = {
            "request_id": id,
            "model": generation.models[0],
            "choices": [self._tokens_choice(group, sample, sample, body) for sample in samples],
            "prompt_token_ids": body.token_ids if body.return_token_ids else None,
            "usage": usage([group], samples),
        }
        for score in scores:
            answer["prompt_logprobs"] = prompt_logprobs(score, generation.text.token, params.prompt_logprobs or 0)
        return EventStream(request, one_event(answer)) if body.stream else answer

    def _tokens_choice(self, group: PromptGroup, tokens: Tokens, sample: Sample | None, body: TokensRequest) -> dict[str, Any]:
        logprobs = None if body.sampling_params.logprobs is None else {"content": token_contents(tokens, self._heads)}
        choice: dict[str, Any] = {"index": tokens.index, "token_ids": tokens.token_ids.tolist(), "logprobs": logprobs}
        if sample is not None:
            choice |= vllm_routes(sample, self._generation.upstream.info.routing, body.sampling_params)
        return choice | finish(group.sampling, sample)

    async def _generate_events(
        self, request: Request, arrival: Arrival, group: PromptGroup, body: TokensRequest, id: str
    ) -> Contents:
        finished: list[Sample] = []
        counts = StreamUsage(body.stream_options)
        head: dict[str, Any] = {"request_id": id}
        if body.return_token_ids:
            head["prompt_token_ids"] = body.token_ids
        async with aclosing(self._generation.stream(request, arrival, [group])) as chunks:
            async for chunk in chunks:
                finished += [chunk.sample] if chunk.sample is not None else []
                so_far = counts.so_far(len(group.prompt), chunk.first + len(chunk.token_ids))
                yield head | {"choices": [self._tokens_choice(group, chunk, chunk.sample, body)]} | so_far
                head.pop("prompt_token_ids", None)  # in the first event only
        if counts.last:
            yield head | {"choices": [], "usage": usage([group], finished)}

    # /v1/completions

    async def completions(self, request: Request, body: CompletionRequest) -> Any:
        """Sample from text or token ids, of one prompt or several."""
        generation = self._generation
        head: dict[str, Any] = {"object": "text_completion", "created": int(time.time()), "model": generation.model(body.model)}
        if body.suffix:
            raise not_served("suffix", "leave it out", "suffix")
        checked_stream_options(body.stream_options, body.stream)
        head["id"], names = request_names(generation, "cmpl", body.request_id)
        with generation.arrival(names) as arrival:
            prompts = await unless_disconnected(request, self._prompts(body))
            scored = body.prompt_logprobs is not None or bool(body.echo and body.logprobs is not None)
            stream = bool(body.stream) and not scored and not body.echo
            groups = [self._group(prompt.ids, body, names, stream) for prompt in prompts]
            generation.check_samples(groups)
            if stream:
                return EventStream(request, self._completion_events(request, arrival, groups, body, head))
            scores: list[Sample | None] = [None] * len(groups)
            if scored:
                # with at least one a service tells the rank of the token itself as well
                top = max(1, body.prompt_logprobs or 0, body.logprobs or 0 if body.echo else 0)
                scores = await generation.score(request, arrival, groups, top)
            samples = await generation.sample(request, arrival, groups)
        choices: list[dict[str, Any]] = []
        for prompt, group, score, children in zip(prompts, groups, scores, samples, strict=True):
            for child in children:
                choices.append(self._whole_choice(len(choices), prompt, group, child, score, body))
        if not body.stream:
            return head | {"choices": choices, "usage": usage(groups, itertools.chain(*samples))}
        return EventStream(request, whole_events(head, choices, groups, samples, body))

    def _group(self, ids: list[int], body: CompletionRequest, names: set[str], stream: bool) -> PromptGroup:
        generation = self._generation
        more = top_logprobs_of(body.logprobs or 0, "logprobs") | generation.streaming(stream)
        sampling = vllm_sampling(
            generation, body, body, len(ids), max_tokens=body.max_tokens, default_tokens=COMPLETION_TOKENS, **more
        )
        return generation.group(ids, sampling, names, body.text_options())

    async def _prompts(self, body: CompletionRequest) -> list[CompletionPrompt]:
        """Return the token ids of each prompt. Raises HttpError."""
        given, limits = body.prompt, self._generation.limits
        several: Any = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not several:
            raise bad("prompt is empty: give text, token ids, or a list of either", "prompt")
        if len(several) > limits.max_prompts:
            raise bad(f"{len(several)} prompts: at most {limits.max_prompts} in one request (max_prompts)", "prompt")
        for one in several:
            if isinstance(one, int) or (isinstance(one, list) and set(map(type, one)) - {int}):
                raise bad("prompt mixes token ids and prompts: give one kind", "prompt")
        texts = [one for one in several if isinstance(one, str)]
        special = body.add_special_tokens is not False
        encoded = iter(await self._generation.prompts.texts(texts, special, "prompt") if texts else ())
        return [
            CompletionPrompt(next(encoded), one) if isinstance(one, str) else CompletionPrompt(one, None) for one in several
        ]

    def _whole_choice(
        self,
        index: int,
        prompt: CompletionPrompt,
        group: PromptGroup,
        sample: Sample,
        score: Sample | None,
        body: CompletionRequest,
    ) -> dict[str, Any]:
        text, options = self._generation.text, body.text_options()
        skip_special, ids = options.skip_special is not False, sample.token_ids.tolist()
        if body.echo:
            content, offsets = with_prompt(text, prompt, sample, options)
        else:
            content, offsets = text.of(sample, skip_special, options.keep_stop), Offsets(text.texts).add(ids, skip_special)
        offsets = [min(offset, len(content)) for offset in offsets]
        choice = self._choice(index, group, sample, content, body, offsets[-len(ids) :] if ids else [])
        choice |= finish(group.sampling, sample, body.return_weight_versions)
        choice |= vllm_routes(sample, self._generation.upstream.info.routing, body)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(score, text.token, body.prompt_logprobs)
        if body.echo and choice["logprobs"] is not None:
            choice["logprobs"] = self._with_prompt(choice["logprobs"], group, score, body, offsets)
        return choice

    def _choice(
        self,
        index: int,
        group: PromptGroup,
        tokens: Tokens,
        text: str,
        body: CompletionRequest,
        offsets: list[int],
        first: bool = True,
    ) -> dict[str, Any]:
        """Make a choice, or a part of it. offsets: of its tokens in its text."""
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if body.logprobs is not None:
            choice["logprobs"] = token_logprobs(tokens, self._names(body), offsets)
        if body.return_token_ids:
            choice["token_ids"] = tokens.token_ids.tolist()
            choice["prompt_token_ids"] = group.prompt.tolist() if first else None
        return choice

    def _with_prompt(
        self,
        logprobs: TokenLogprobs,
        group: PromptGroup,
        score: Sample | None,
        body: CompletionRequest,
        offsets: list[int],
    ) -> TokenLogprobs:
        """Put the prompt before a completion (`echo`). Its first token has no log-prob."""
        names = self._names(body)
        parts = [TokenLogprobs([names.plain(int(group.prompt[0]))], [None], [None], [])]
        parts += [token_logprobs(score, names, [], body.logprobs or 0)] if score is not None else []
        parts.append(logprobs)
        tokens = [token for part in parts for token in part.tokens]
        values = [value for part in parts for value in part.token_logprobs]
        return TokenLogprobs(tokens, values, [top for part in parts for top in part.top_logprobs], offsets)

    def _names(self, body: CompletionRequest) -> Names:
        text = self._generation.text
        return Names(id_name, id_name) if body.return_tokens_as_token_ids else Names(text.token, text.distinct_name)

    async def _completion_events(
        self, request: Request, arrival: Arrival, groups: list[PromptGroup], body: CompletionRequest, head: dict[str, Any]
    ) -> Contents:
        first_choice = [0, *itertools.accumulate(group.sampling.n for group in groups)]
        finished: list[Sample] = []
        counts, texts = StreamUsage(body.stream_options), self._generation.text.texts
        begun: dict[int, Offsets] = {}
        """by choice"""
        async with aclosing(self._generation.stream(request, arrival, groups)) as chunks:
            async for chunk in chunks:
                group, index = groups[chunk.group], first_choice[chunk.group] + chunk.index
                first = index not in begun
                offsets = begun.setdefault(index, Offsets(texts)).add(chunk.ids, body.skip_special_tokens is not False)
                choice = self._choice(index, group, chunk, chunk.text, body, offsets, first)
                choice |= finish(group.sampling, chunk.sample, body.return_weight_versions)
                if chunk.sample is not None:
                    finished.append(chunk.sample)
                    choice |= vllm_routes(chunk.sample, self._generation.upstream.info.routing, body)
                yield head | {"choices": [choice]} | counts.so_far(len(group.prompt), chunk.first + len(chunk.token_ids))
        if counts.last:
            yield head | {"choices": [], "usage": usage(groups, finished)}


def with_prompt(text: Text, prompt: CompletionPrompt, sample: Sample, options: TextOptions) -> tuple[str, list[int]]:
    """Return prompt and completion as one text, and where their tokens begin in it. The prompt is as it was given, with its
    special tokens, and without those that the tokenizer has put before it."""
    texts, skip_special, ids = text.texts, options.skip_special is not False, sample.token_ids.tolist()
    stream, offsets = texts.stream(), Offsets(texts)
    parts = [part._replace(special=False) for id in prompt.ids for part in stream.add(id)]
    parts += [part for id in ids for part in stream.add(id)] + stream.end()
    # what ended the completion is cut off at the end of both, since their border may lie in a character
    trimmed = characters(texts.parts(ids)) - characters(text.parts(sample, options.keep_stop))
    whole = visible(cut(parts, characters(parts) - trimmed), skip_special)
    begins = offsets.add(prompt.ids, False) + offsets.add(ids, skip_special)
    shown = texts.begun(whole, prompt.ids)
    own = texts.text(prompt.ids)
    added = len(own) - len(prompt.text) if prompt.text is not None and own.endswith(prompt.text) else 0
    before = len(whole) - len(shown) + added
    return shown[added:], [max(0, begin - before) for begin in begins]


def vllm_sampling(
    generation: GenerationService,
    params: VllmSampling,
    body: VllmRequest | TokensRequest,
    prompt_tokens: int,
    *,
    max_tokens: int | None,
    default_tokens: int | None = None,
    **more: Any,
) -> Sampling:
    """Make the sampling options of a vLLM request. Raises HttpError.

    Args:
        default_tokens: of max_tokens; None = the rest of the context.
        more: further fields of `Sampling`."""
    upstream = generation.upstream
    more["max_kv_lag"] = lag_of(body.cache_salt, upstream.version, upstream.info.limits)
    more["priority"] = priority_of(body.priority)
    routing, asked = upstream.info.routing, params.return_routed_experts
    wanted = wants_routes(routing is not None if asked is None else asked, routing, "return_routed_experts")
    if wanted and not 0 <= (start := params.routed_experts_prompt_start or 0) <= prompt_tokens:
        raise bad(f"routed_experts_prompt_start={start}: must be 0 to {prompt_tokens}", "routed_experts_prompt_start")
    more |= wanted
    most = generation.max_tokens(max_tokens, default_tokens, prompt_tokens)
    return sampling_of(params, most, generation.text.special, **more)


def request_names(generation: GenerationService, kind: str, given: str | None) -> tuple[str, set[str]]:
    """Return the id of a response, and all names by which its request can be aborted. given: `request_id`. Raises HttpError."""
    name = checked_name(given)
    id = f"{kind}-{name}" if name else generation.new_id(kind)
    return id, {id, name} if name else {id}


async def one_event(answer: dict[str, Any]) -> Contents:
    """Send a complete response as one event."""
    yield answer


async def whole_events(
    head: dict[str, Any],
    choices: list[dict[str, Any]],
    groups: list[PromptGroup],
    samples: list[list[Sample]],
    body: CompletionRequest,
) -> Contents:
    """Send a complete response with one event per choice."""
    counts = StreamUsage(body.stream_options)
    made = [(group, child) for group, children in zip(groups, samples, strict=True) for child in children]
    for choice, (group, child) in zip(choices, made, strict=True):
        yield head | {"choices": [choice]} | counts.so_far(len(group.prompt), len(child.token_ids))
    if counts.last:
        yield head | {"choices": [], "usage": usage(groups, itertools.chain(*samples))}
