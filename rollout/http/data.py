"""vLLM's data plane: `/v1/models`, `/v1/completions`, `/inference/v1/generate`.

Where its versions differ, answers hold the superset: a token's log-prob has `token_id` and `token: "token_id:N"`.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from engine.types import Sample, Sampling, TokenChunk
from rollout.http.answers import (
    as_id,
    contents,
    ending,
    json,
    named_id,
    offsets_of,
    prompt_logprobs,
    token_logprobs,
    tops,
    usage,
)
from rollout.http.app import Answer, BodyReader, EventStream, RequestLimits, Route, unless_gone
from rollout.http.errors import HttpError, bad, not_served
from rollout.http.prompt_pool import PromptPool
from rollout.http.sampling import VllmSampling, lag_of, max_tokens_of, priority_of, sampling_of, top_logprobs_of
from rollout.http.streams import Contents, counted, one_event, wants_usage, whole_events
from rollout.http.text import Text
from rollout.http.text_stream import TextChunk, TextOptions, beyond, pieces
from rollout.http.upstream import Names, Upstream

COMPLETION_TOKENS = 16
"""of /v1/completions without max_tokens, as OpenAI has it"""
MAX_NAME = 256
"""characters of a request's own id"""
Overlong = Literal["refuse", "empty"]

Group = tuple[np.ndarray, Sampling]


class CompletionRequest(VllmSampling, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/completions."""

    prompt: str | list[int | str | list[int]]
    """text, token ids, or a list of either"""
    model: str | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None


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


class CompletionRoutes:
    """The routes, over one `Upstream`.

    Args:
        names: of the model; the first is told, all are taken.
        overlong: what a prompt that leaves no room for `max_tokens` gets. "refuse": 400, as vLLM. "empty": as many tokens as
            there is room for, at least none, ended by "length", for clients that repeat a 400 for minutes (TRL's worker).
    """

    def __init__(
        self,
        upstream: Upstream,
        text: Text,
        prompts: PromptPool,
        names: Sequence[str],
        bodies: BodyReader,
        bounds: RequestLimits,
        overlong: Overlong,
    ) -> None:
        self.upstream, self.text, self.prompts = upstream, text, prompts
        self.names, self.bodies, self.bounds = tuple(names), bodies, bounds
        self._overlong = overlong
        self._heads: dict[int, bytes] = {}
        """of `contents`; at most one for each id of the vocabulary"""
        self._numbers = itertools.count()
        self._start = secrets.token_hex(6)
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._generate = msgspec.json.Decoder(TokensRequest)

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/inference/v1/generate", self.generate),
            Route("POST", "/v1/completions", self.completions),
            Route("GET", "/v1/models", self.models),
        ]

    def name(self, asked: str | None) -> str:
        """Return the name to answer with. Raises HttpError 404 for a model that is not here."""
        adapter = self.upstream.adapter
        if asked is not None and asked not in self.names and (adapter is None or asked != adapter.name):
            raise HttpError(404, f"the model {asked[:200]!r} is not here: {self.names[0]!r} is", "model")
        return asked or self.names[0]

    def id(self, prefix: str) -> str:
        return f"{prefix}-{self._start}{next(self._numbers):x}"

    async def models(self, request: Request) -> Response:
        info = self.upstream.info
        cards = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "rollout",
                "max_model_len": info.context,
                "root": info.model,
            }
            for name in self.names
        ]
        if (adapter := self.upstream.adapter) is not None:
            cards.append(cards[0] | {"id": adapter.name, "root": adapter.path, "parent": self.names[0]})
        return json({"object": "list", "data": cards})

    async def generate(self, request: Request) -> Answer:
        asked = await self.bodies.decode(request, self._generate)
        self.name(asked.model)
        for field in ("features", "content_parts", "kv_transfer_params"):
            if getattr(asked, field):
                raise not_served(field, "send token_ids of text alone", field)
        params, name = asked.sampling_params, name_of(asked.request_id) or self.id("gen")
        # 1 asks for the likeliest token besides the drawn one, which those who send it (renderers) do not read
        more = {} if params.logprobs == 1 else top_logprobs_of(params.logprobs or 0, "logprobs")
        streams = bool(asked.stream) and params.prompt_logprobs is None
        more |= self.streaming(streams)
        group = self.group(asked.token_ids, params, None, asked.cache_salt, asked.priority, more)
        self.check_samples([group])
        if streams:
            return EventStream(request, generate_events(self, group, asked, name))
        scored = None if params.prompt_logprobs is None else self.scoring([group], params.prompt_logprobs)
        (samples,) = await self.sampled(request, [group], [{name}])
        scores = None if scored is None else await unless_gone(request, self.upstream.score(*scored))
        choices = [
            {
                "index": sample.index,
                "token_ids": (ids := sample.token_ids.tolist()),
                "logprobs": None if params.logprobs is None else {"content": self.contents(ids, sample)},
                **ending(ids, group[1], sample),
            }
            for sample in samples
        ]
        answer: dict[str, Any] = {"request_id": name, "model": self.names[0], "choices": choices}
        if scores is not None:
            answer["prompt_logprobs"] = prompt_logprobs(scores[0], self.text.token)
        answer["prompt_token_ids"] = asked.token_ids if asked.return_token_ids else None
        answer |= {"usage": usage([group[0]], [samples])}
        return EventStream(request, one_event(answer)) if asked.stream else json(answer)

    async def completions(self, request: Request) -> Answer:
        asked = await self.bodies.decode(request, self._completion)
        name = self.name(asked.model)
        if asked.suffix:
            raise not_served("suffix", "leave it out", "suffix")
        prompts = await unless_gone(request, self._prompts(asked))
        given, wanted = (
            name_of(asked.request_id),
            asked.prompt_logprobs is not None or bool(asked.echo and asked.logprobs is not None),
        )
        names = {id := f"cmpl-{given}" if given else self.id("cmpl"), *([given] if given else [])}
        streams = bool(asked.stream) and not wanted and not asked.echo
        more = top_logprobs_of(asked.logprobs or 0, "logprobs") | self.streaming(streams)
        groups = [self.group(ids, asked, COMPLETION_TOKENS, asked.cache_salt, asked.priority, more) for ids in prompts]
        self.check_samples(groups)
        answer = {"id": id, "object": "text_completion", "created": int(time.time()), "model": name}
        if streams:
            return EventStream(request, completion_events(self, groups, asked, answer, names))
        top = max(asked.prompt_logprobs or 0, asked.logprobs or 0 if asked.echo else 0)
        scored = self.scoring(groups, top) if wanted else None
        children = await self.sampled(request, groups, [names] * len(groups))
        scores = [None] * len(groups) if scored is None else await unless_gone(request, self.upstream.score(*scored))
        choices: list[dict[str, Any]] = []
        for (prompt, sampling), samples, score in zip(groups, children, scores, strict=True):
            made = [self.choice(len(choices) + i, prompt, sampling, sample, asked) for i, sample in enumerate(samples)]
            if asked.prompt_logprobs is not None:
                made = [choice | {"prompt_logprobs": prompt_logprobs(score, self.text.token)} for choice in made]
            choices += [self.echoed(choice, prompt, score, asked) for choice in made] if asked.echo else made
        tokens = usage([prompt for prompt, _ in groups], children)
        if asked.stream:
            return EventStream(request, whole_events(choices, answer, tokens, asked.stream_options))
        return json(answer | {"choices": choices, "usage": tokens})

    async def _prompts(self, asked: CompletionRequest) -> list[list[int]]:
        """Return the token ids of each prompt. Raises HttpError for none."""
        given = asked.prompt
        several: Any = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not several:
            raise bad("prompt is empty: give text, token ids, or a list of either", "prompt")
        if len(several) > self.bounds.max_prompts:
            raise bad(f"{len(several)} prompts: at most {self.bounds.max_prompts} in one request (max_prompts)", "prompt")
        for one in several:
            if isinstance(one, int) or (isinstance(one, list) and not all(type(id) is int for id in one)):
                raise bad("prompt mixes token ids and prompts: give one kind", "prompt")
        texts = [one for one in several if isinstance(one, str)]
        encoded = iter(await self.prompts.texts(texts, asked.add_special_tokens is not False, "prompt"))
        return [next(encoded) if isinstance(one, str) else one for one in several]

    def check_samples(self, groups: Sequence[Group]) -> None:
        """Raise HttpError for more samples than one request may have."""
        samples, most = sum(sampling.n for _, sampling in groups), self.bounds.max_samples
        if samples > most:
            raise bad(f"{samples} samples, n of each prompt: at most {most} in one request (max_samples)", "n")

    def choice(
        self, index: int, prompt: np.ndarray, sampling: Sampling, sample: Sample, asked: CompletionRequest
    ) -> dict[str, Any]:
        ids = sample.token_ids.tolist()
        choice: dict[str, Any] = {
            "index": index,
            "text": self.text.of(sample, asked.skip_special_tokens, asked.include_stop_str_in_output),
            "logprobs": None,
            **ending(ids, sampling, sample),
        }
        if asked.logprobs is not None:
            named: Callable[[int], str] = as_id if asked.return_tokens_as_token_ids else self.text.token
            choice["logprobs"] = token_logprobs(ids, sample, named)
        if asked.return_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt.tolist()}
        return choice

    def scoring(self, groups: list[Group], top: int) -> tuple[list[np.ndarray], Sampling]:
        """Return what `Upstream.score` takes for the prompts of these groups. Raises HttpError, InvalidRequest."""
        longest = max(1, *(len(prompt) - 1 for prompt, _ in groups))
        sampling = Sampling(top_logprobs=top, max_tokens=longest)
        self.upstream.check(groups[0][0][:1], sampling)
        return [prompt for prompt, _ in groups], sampling

    def echoed(
        self, choice: dict[str, Any], prompt: np.ndarray, score: Sample | None, asked: CompletionRequest
    ) -> dict[str, Any]:
        """Put the prompt in front of a completion, as `echo` asks for."""
        ids = prompt.tolist()
        choice["text"] = self.text.decode(ids, asked.skip_special_tokens is not False) + choice["text"]
        if choice["logprobs"] is None:
            return choice
        named: Callable[[int], str] = as_id if asked.return_tokens_as_token_ids else self.text.token
        before = {"tokens": [named(ids[0])], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        behind = {} if score is None else token_logprobs(ids[1:], score, named)
        parts = [before, behind, choice["logprobs"]]
        joined = {name: [one for part in parts for one in part.get(name, ())] for name in before}
        joined["text_offset"] = offsets_of(joined["tokens"])
        return choice | {"logprobs": joined}

    def streaming(self, streams: bool) -> dict[str, int]:
        """Return the fields of `Sampling` for tokens that are sent as they come."""
        return {"stream_every": self.bounds.stream_every} if streams else {}

    async def children(
        self, groups: Sequence[Group], spellings: Sequence[TextOptions | None], names: Names
    ) -> AsyncGenerator[TextChunk, None]:
        """Sample groups and yield what is new of their children. One without room for a token has empty children."""
        full = [i for i, group in enumerate(groups) if group[1].max_tokens]
        for i in sorted(set(range(len(groups))) - set(full)):
            for sample in empty(groups[i]):
                yield TextChunk(group=i, index=sample.index, tokens=beyond(sample, 0), text="", sample=sample)
        wanted, how, own = [groups[i] for i in full], [spellings[i] for i in full], [names[i] for i in full]
        async with aclosing(pieces(self.upstream, wanted, self.text, how, own)) as new:
            async for piece in new:
                yield msgspec.structs.replace(piece, group=full[piece.group])

    def contents(self, ids: list[int], sample: Sample | TokenChunk) -> Any:
        """List log-probs as /inference/v1/generate does, in the superset of its versions."""
        if sample.top_ids is None:
            return contents(ids, sample.logprobs.tolist(), self._heads)
        return [
            named_id(id, logprob) | {"top_logprobs": [named_id(*top) for top in likeliest]}
            for id, logprob, likeliest in zip(ids, sample.logprobs.tolist(), tops(sample), strict=True)
        ]

    def group(
        self,
        ids: list[int],
        asked: VllmSampling,
        tokens: int | None,
        salt: str | None,
        priority: int | None,
        more: dict[str, Any],
    ) -> Group:
        """Make and check a group; `tokens`: how many where nobody says, None = all that there is room for. Raises HttpError,
        InvalidRequest."""
        info = self.upstream.info
        most = asked.max_tokens
        if self._overlong == "empty" and len(ids) + (most or 1) > info.context:
            most = info.context - len(ids)
            if most < 1:
                self.upstream.check(ids[:1], sampling := sampling_of(asked, 1, self.text.special))
                return np.zeros(len(ids), np.int32), msgspec.structs.replace(sampling, max_tokens=0)
        most = max_tokens_of(most, tokens, len(ids), info.context, info.limits)
        lag = lag_of(salt, self.upstream.version, info.limits)
        sampling = sampling_of(asked, most, self.text.special, max_kv_lag=lag, priority=priority_of(priority), **more)
        return self.upstream.check(ids, sampling), sampling

    async def sampled(self, request: Request, groups: list[Group], names: Names) -> list[list[Sample]]:
        """Sample groups, unless whoever asked hangs up. One without room for a token has empty children."""
        full = [(group, own) for group, own in zip(groups, names, strict=True) if group[1].max_tokens]
        work = self.upstream.generate([group for group, _ in full], [own for _, own in full])
        children = iter(await unless_gone(request, work))
        return [next(children) if group[1].max_tokens else empty(group) for group in groups]


def empty(group: Group) -> list[Sample]:
    """Return the children of a group without room for a token."""
    nothing, prompt = np.zeros(0, np.float32), len(group[0])
    return [
        Sample(
            group_id="", index=i, token_ids=np.zeros(0, np.int32), logprobs=nothing, finish_reason="length", weight_versions=[],
            prompt_tokens=prompt,
        )
        for i in range(group[1].n)
    ]  # fmt: skip


def name_of(given: str | None, field: str = "request_id") -> str | None:
    """Return the name that a request gave itself. Raises HttpError for one that is too long to keep."""
    if given is not None and not 1 <= len(given) <= MAX_NAME:
        raise bad(f"{field} of {len(given)} characters: must be 1 to {MAX_NAME}", field)
    return given


async def completion_events(
    data: CompletionRoutes, groups: list[Group], asked: CompletionRequest, head: dict[str, Any], names: Collection[str]
) -> Contents:
    """Yield the events of /v1/completions."""
    firsts = [0, *itertools.accumulate(sampling.n for _, sampling in groups)]
    named: Callable[[int], str] = as_id if asked.return_tokens_as_token_ids else data.text.token
    spelling = TextOptions(skip_special=asked.skip_special_tokens, keep_stop=asked.include_stop_str_in_output)
    ended: list[Sample] = []
    lengths: Counter[int] = Counter()
    """characters of the tokens of each choice; a choice that is not in it has not begun"""
    async with aclosing(data.children(groups, [spelling] * len(groups), [names] * len(groups))) as new:
        async for piece in new:
            prompt, sampling = groups[piece.group]
            index = firsts[piece.group] + piece.index
            choice: dict[str, Any] = {"index": index, "text": piece.text, "logprobs": None, "finish_reason": None}
            if asked.return_token_ids:
                choice |= {"token_ids": piece.ids, "prompt_token_ids": None if index in lengths else prompt.tolist()}
            if asked.logprobs is not None:
                choice["logprobs"] = logprobs = token_logprobs(piece.ids, piece.tokens, named)
                logprobs["text_offset"] = [lengths[index] + offset for offset in logprobs["text_offset"]]
                lengths[index] += sum(map(len, logprobs["tokens"]))
            lengths[index] += 0
            if piece.sample is not None:
                ended.append(piece.sample)
                choice |= ending(piece.sample.token_ids.tolist(), sampling, piece.sample)
            yield head | {"choices": [choice]}
    if wants_usage(asked.stream_options):
        yield head | counted(groups, ended)


async def generate_events(data: CompletionRoutes, group: Group, asked: TokensRequest, name: str) -> Contents:
    """Yield the events of /inference/v1/generate."""
    ended: list[Sample] = []
    async with aclosing(data.children([group], [None], [{name}])) as new:
        async for piece in new:
            choice: dict[str, Any] = {"index": piece.index, "token_ids": piece.ids, "logprobs": None, "finish_reason": None}
            if asked.sampling_params.logprobs is not None:
                choice["logprobs"] = {"content": data.contents(piece.ids, piece.tokens)}
            if piece.sample is not None:
                ended.append(piece.sample)
                choice |= ending(piece.sample.token_ids.tolist(), group[1], piece.sample)
            yield {"request_id": name, "choices": [choice]}
    if wants_usage(asked.stream_options):
        yield {"request_id": name, **counted([group], ended)}
