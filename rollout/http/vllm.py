"""vLLM's routes for tokens: `/v1/models`, `/v1/completions`, `/inference/v1/generate`.

Where versions of vLLM differ, responses have the fields of all: a token's log-prob has `token_id` and `token: "token_id:N"`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from rollout.engine.types import Sample, Sampling
from rollout.http.endpoints import Endpoints, EventStream, unless_disconnected
from rollout.http.errors import bad, not_served
from rollout.http.generation import GenerationService, PromptGroup, checked_name
from rollout.http.responses import (
    Contents,
    TokenLogprobs,
    Tokens,
    finish,
    id_name,
    prompt_logprobs,
    text_offsets,
    token_contents,
    token_logprobs,
    usage,
    vllm_routes,
    wants_routes,
    wants_usage,
)
from rollout.http.sampling import VllmSampling, lag_of, priority_of, sampling_of, top_logprobs_of
from rollout.http.text import TextOptions

COMPLETION_TOKENS = 16
"""default of max_tokens of /v1/completions, as in OpenAI's API"""


class VllmRequest(VllmSampling, kw_only=True, forbid_unknown_fields=True):
    """Fields of /v1/completions and /v1/chat/completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
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


class TokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: Params
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: dict[str, Any] | None = None


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
        if stream:
            return EventStream(request, self._generate_events(request, group, body, id))
        scores: list[Sample | None] = []
        if params.prompt_logprobs is not None:
            scores = await generation.score(request, [group], params.prompt_logprobs)
        (samples,) = await generation.sample(request, [group])
        answer: dict[str, Any] = {
            "request_id": id,
            "model": generation.models[0],
            "choices": [self._tokens_choice(group, sample, sample, body) for sample in samples],
            "prompt_token_ids": body.token_ids if body.return_token_ids else None,
            "usage": usage([group], samples),
        }
        for score in scores:
            answer["prompt_logprobs"] = prompt_logprobs(score, generation.text.token)
        return EventStream(request, one_event(answer)) if body.stream else answer

    def _tokens_choice(self, group: PromptGroup, tokens: Tokens, sample: Sample | None, body: TokensRequest) -> dict[str, Any]:
        logprobs = None if body.sampling_params.logprobs is None else {"content": token_contents(tokens, self._heads)}
        choice: dict[str, Any] = {"index": tokens.index, "token_ids": tokens.token_ids.tolist(), "logprobs": logprobs}
        if sample is not None:
            choice |= vllm_routes(sample, self._generation.upstream.info.routing, body.sampling_params)
        return choice | finish(group.sampling, sample)

    async def _generate_events(self, request: Request, group: PromptGroup, body: TokensRequest, id: str) -> Contents:
        finished: list[Sample] = []
        async with aclosing(self._generation.stream(request, [group])) as chunks:
            async for chunk in chunks:
                finished += [chunk.sample] if chunk.sample is not None else []
                yield {"request_id": id, "choices": [self._tokens_choice(group, chunk, chunk.sample, body)]}
        if wants_usage(body.stream_options):
            yield {"request_id": id, "choices": [], "usage": usage([group], finished)}

    # /v1/completions

    async def completions(self, request: Request, body: CompletionRequest) -> Any:
        """Sample from text or token ids, of one prompt or several."""
        generation = self._generation
        head: dict[str, Any] = {"object": "text_completion", "created": int(time.time()), "model": generation.model(body.model)}
        if body.suffix:
            raise not_served("suffix", "leave it out", "suffix")
        prompts = await unless_disconnected(request, self._prompts(body))
        head["id"], names = request_names(generation, "cmpl", body.request_id)
        scored = body.prompt_logprobs is not None or bool(body.echo and body.logprobs is not None)
        stream = bool(body.stream) and not scored and not body.echo
        groups = [self._group(ids, body, names, stream) for ids in prompts]
        generation.check_samples(groups)
        if stream:
            return EventStream(request, self._completion_events(request, groups, body, head))
        top = max(body.prompt_logprobs or 0, body.logprobs or 0 if body.echo else 0)
        scores: list[Sample | None] = await generation.score(request, groups, top) if scored else [None] * len(groups)
        samples = await generation.sample(request, groups)
        choices: list[dict[str, Any]] = []
        for group, score, children in zip(groups, scores, samples, strict=True):
            for child in children:
                choices.append(self._whole_choice(len(choices), group, child, score, body))
        answer = head | {"choices": choices, "usage": usage(groups, itertools.chain(*samples))}
        return EventStream(request, whole_events(answer, body.stream_options)) if body.stream else answer

    def _group(self, ids: list[int], body: CompletionRequest, names: set[str], stream: bool) -> PromptGroup:
        generation = self._generation
        more = top_logprobs_of(body.logprobs or 0, "logprobs") | generation.streaming(stream)
        sampling = vllm_sampling(
            generation, body, body, len(ids), max_tokens=body.max_tokens, default_tokens=COMPLETION_TOKENS, **more
        )
        return generation.group(ids, sampling, names, body.text_options())

    async def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Return the token ids of each prompt. Raises HttpError."""
        given, limits = body.prompt, self._generation.limits
        several: Any = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not several:
            raise bad("prompt is empty: give text, token ids, or a list of either", "prompt")
        if len(several) > limits.max_prompts:
            raise bad(f"{len(several)} prompts: at most {limits.max_prompts} in one request (max_prompts)", "prompt")
        for one in several:
            if isinstance(one, int) or (isinstance(one, list) and not all(type(id) is int for id in one)):
                raise bad("prompt mixes token ids and prompts: give one kind", "prompt")
        texts = [one for one in several if isinstance(one, str)]
        special = body.add_special_tokens is not False
        encoded = iter(await self._generation.prompts.texts(texts, special, "prompt") if texts else ())
        return [next(encoded) if isinstance(one, str) else one for one in several]

    def _whole_choice(
        self, index: int, group: PromptGroup, sample: Sample, score: Sample | None, body: CompletionRequest
    ) -> dict[str, Any]:
        text, options = self._generation.text, body.text_options()
        content = text.of(sample, options.skip_special, options.keep_stop)
        choice = self._choice(index, group, sample, content, body) | finish(group.sampling, sample)
        choice |= vllm_routes(sample, self._generation.upstream.info.routing, body)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(score, text.token)
        if body.echo:
            choice["text"] = text.decode(group.prompt.tolist(), options.skip_special is not False) + content
            if choice["logprobs"] is not None:
                choice["logprobs"] = self._with_prompt(choice["logprobs"], group, score, body)
        return choice

    def _choice(
        self, index: int, group: PromptGroup, tokens: Tokens, text: str, body: CompletionRequest, earlier: int | None = None
    ) -> dict[str, Any]:
        """Make a choice, or a part of it. earlier: characters of its earlier tokens; None: this is the first part."""
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if body.logprobs is not None:
            choice["logprobs"] = token_logprobs(tokens, self._name(body), earlier or 0)
        if body.return_token_ids:
            choice["token_ids"] = tokens.token_ids.tolist()
            choice["prompt_token_ids"] = group.prompt.tolist() if earlier is None else None
        return choice

    def _with_prompt(
        self, logprobs: TokenLogprobs, group: PromptGroup, score: Sample | None, body: CompletionRequest
    ) -> TokenLogprobs:
        """Put the prompt before a completion (`echo`). Its first token has no log-prob."""
        name = self._name(body)
        parts = [TokenLogprobs([name(int(group.prompt[0]))], [None], [None], [0])]
        parts += [token_logprobs(score, name)] if score is not None else []
        parts.append(logprobs)
        tokens = [token for part in parts for token in part.tokens]
        values = [value for part in parts for value in part.token_logprobs]
        return TokenLogprobs(tokens, values, [top for part in parts for top in part.top_logprobs], text_offsets(tokens))

    def _name(self, body: CompletionRequest) -> Callable[[int], str]:
        return id_name if body.return_tokens_as_token_ids else self._generation.text.token

    async def _completion_events(
        self, request: Request, groups: list[PromptGroup], body: CompletionRequest, head: dict[str, Any]
    ) -> Contents:
        first_choice = [0, *itertools.accumulate(group.sampling.n for group in groups)]
        finished: list[Sample] = []
        lengths: dict[int, int] = {}
        """characters of the tokens that were sent, by choice"""
        async with aclosing(self._generation.stream(request, groups)) as chunks:
            async for chunk in chunks:
                group, index = groups[chunk.group], first_choice[chunk.group] + chunk.index
                choice = self._choice(index, group, chunk, chunk.text, body, lengths.get(index))
                names = choice["logprobs"].tokens if choice["logprobs"] is not None else []
                lengths[index] = lengths.get(index, 0) + sum(map(len, names))
                finished += [chunk.sample] if chunk.sample is not None else []
                yield head | {"choices": [choice | finish(group.sampling, chunk.sample)]}
        if wants_usage(body.stream_options):
            yield head | {"choices": [], "usage": usage(groups, finished)}


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


async def whole_events(answer: dict[str, Any], options: dict[str, Any] | None) -> Contents:
    """Send a complete response with one event per choice."""
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage")}
    for choice in answer["choices"]:
        yield head | {"choices": [choice]}
    if wants_usage(options):
        yield answer | {"choices": []}
