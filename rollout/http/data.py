"""vLLM's data plane: `/v1/models`, `/v1/completions`, `/inference/v1/generate`.

Where its versions differ, answers hold the superset: a token's log-prob has `token_id` and `token: "token_id:N"`.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from engine.types import Sample, Sampling
from rollout.http.errors import HttpError, bad, not_served
from rollout.http.frame import Bodies, Bounds, Route, unless_gone
from rollout.http.sampling import Draws, lag_of, max_tokens_of, priority_of, sampling_of, top_logprobs_of
from rollout.http.text import Text
from rollout.http.upstream import Upstream

COMPLETION_TOKENS = 16
"""of /v1/completions without max_tokens, as OpenAI has it"""
FINISH = {"stop": "stop", "length": "length"}
"""every other end is "abort": cut, at a deadline, aborted, stale"""
Overlong = Literal["refuse", "empty"]

Group = tuple[np.ndarray, Sampling]


class CompletionRequest(Draws, kw_only=True, forbid_unknown_fields=True):
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


class Params(Draws, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of /inference/v1/generate."""

    logprobs: int | None = None


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
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


class Data:
    """The routes, over one `Upstream`.

    Args:
        names: of the model; the first is told, all are taken.
        overlong: what a prompt that leaves no room for `max_tokens` gets. "refuse": 400, as vLLM. "empty": as many tokens as
            there is room for, at least none, ended by "length", for clients that repeat a 400 for minutes (TRL's worker).
    """

    def __init__(
        self, upstream: Upstream, text: Text, names: Sequence[str], bodies: Bodies, bounds: Bounds, overlong: Overlong
    ) -> None:
        self.upstream, self.text, self.names, self.bodies, self.bounds = upstream, text, tuple(names), bodies, bounds
        self._overlong = overlong
        self._heads: dict[int, bytes] = {}
        """of `contents`; at most one for each id of the vocabulary"""
        self._numbers = itertools.count()
        self._start = secrets.token_hex(6)
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._generate = msgspec.json.Decoder(GenerateRequest)

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/inference/v1/generate", self.generate),
            Route("POST", "/v1/completions", self.completions),
            Route("GET", "/v1/models", self.models),
        ]

    def name(self, asked: str | None) -> str:
        """Return the name to answer with. Raises HttpError 404 for a model that is not here."""
        if asked is not None and asked not in self.names:
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
        return json({"object": "list", "data": cards})

    async def generate(self, request: Request) -> Response:
        asked = await self.bodies.decode(request, self._generate)
        self.name(asked.model)
        for field in ("features", "content_parts", "kv_transfer_params"):
            if getattr(asked, field):
                raise not_served(field, "send token_ids of text alone", field)
        if asked.stream:
            raise not_served("stream", "leave it out: the answer comes when the sample has ended", "stream")
        params = asked.sampling_params
        # 1 asks for the likeliest token besides the drawn one, which those who send it (renderers) do not read
        more = {} if params.logprobs == 1 else top_logprobs_of(params.logprobs or 0, "logprobs")
        group = self.group(asked.token_ids, params, None, asked.cache_salt, asked.priority, more)
        scored = None if params.prompt_logprobs is None else self.scoring([group], params.prompt_logprobs)
        (samples,) = await self.sampled(request, [group])
        scores = None if scored is None else await unless_gone(request, self.upstream.score(*scored))
        choices = [
            {
                "index": sample.index,
                "token_ids": (ids := sample.token_ids.tolist()),
                "logprobs": None if params.logprobs is None else {"content": self._contents(ids, sample)},
                "finish_reason": FINISH.get(sample.finish_reason, "abort"),
                **stopped_by(ids, group[1], sample),
                "weight_versions": sample.weight_versions,
            }
            for sample in samples
        ]
        answer: dict[str, Any] = {"request_id": asked.request_id or self.id("gen"), "model": self.names[0], "choices": choices}
        if scores is not None:
            answer["prompt_logprobs"] = prompt_logprobs(scores[0], self.text.token)
        answer["prompt_token_ids"] = asked.token_ids if asked.return_token_ids else None
        return json(answer | {"usage": usage([group[0]], [samples])})

    async def completions(self, request: Request) -> Response:
        asked = await self.bodies.decode(request, self._completion)
        name = self.name(asked.model)
        if asked.suffix:
            raise not_served("suffix", "leave it out", "suffix")
        prompts = prompts_of(asked, self.text)
        if len(prompts) > self.bounds.max_prompts:
            raise bad(f"{len(prompts)} prompts: at most {self.bounds.max_prompts} in one request (max_prompts)", "prompt")
        more = top_logprobs_of(asked.logprobs or 0, "logprobs")
        groups = [self.group(ids, asked, COMPLETION_TOKENS, asked.cache_salt, asked.priority, more) for ids in prompts]
        top = max(asked.prompt_logprobs or 0, asked.logprobs or 0 if asked.echo else 0)
        wanted = asked.prompt_logprobs is not None or bool(asked.echo and asked.logprobs is not None)
        scored = self.scoring(groups, top) if wanted else None
        children = await self.sampled(request, groups)
        scores = [None] * len(groups) if scored is None else await unless_gone(request, self.upstream.score(*scored))
        choices: list[dict[str, Any]] = []
        for (prompt, sampling), samples, score in zip(groups, children, scores, strict=True):
            made = [self.choice(len(choices) + i, prompt, sampling, sample, asked) for i, sample in enumerate(samples)]
            if asked.prompt_logprobs is not None:
                made = [choice | {"prompt_logprobs": prompt_logprobs(score, self.text.token)} for choice in made]
            choices += [self.echoed(choice, prompt, score, asked) for choice in made] if asked.echo else made
        answer = {"id": self.id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": name}
        tokens = usage([prompt for prompt, _ in groups], children)
        if asked.stream:
            return events([answer | {"choices": [choice]} for choice in choices], answer, tokens, asked.stream_options)
        return json(answer | {"choices": choices, "usage": tokens})

    def choice(
        self, index: int, prompt: np.ndarray, sampling: Sampling, sample: Sample, asked: CompletionRequest
    ) -> dict[str, Any]:
        ids = sample.token_ids.tolist()
        choice: dict[str, Any] = {
            "index": index,
            "text": self.text.of(sample, asked.skip_special_tokens, asked.include_stop_str_in_output),
            "finish_reason": FINISH.get(sample.finish_reason, "abort"),
            **stopped_by(ids, sampling, sample),
            "logprobs": None,
            "weight_versions": sample.weight_versions,
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

    def _contents(self, ids: list[int], sample: Sample) -> Any:
        """List log-probs as /inference/v1/generate does, in the superset of its versions."""
        if sample.top_ids is None:
            return contents(ids, sample.logprobs.tolist(), self._heads)
        return [
            named_id(id, logprob) | {"top_logprobs": [named_id(*top) for top in likeliest]}
            for id, logprob, likeliest in zip(ids, sample.logprobs.tolist(), tops(sample), strict=True)
        ]

    def group(
        self, ids: list[int], asked: Draws, tokens: int | None, salt: str | None, priority: int | None, more: dict[str, Any]
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

    async def sampled(self, request: Request, groups: list[Group]) -> list[list[Sample]]:
        """Sample groups, unless whoever asked hangs up. One without room for a token has empty children."""
        full = [group for group in groups if group[1].max_tokens]
        children = iter(await unless_gone(request, self.upstream.generate(full)) if full else ())
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


def prompts_of(asked: CompletionRequest, text: Text) -> list[list[int]]:
    """Return the token ids of each prompt. Raises HttpError for none."""
    given = asked.prompt
    several: Any = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not several:
        raise bad("prompt is empty: give text, token ids, or a list of either", "prompt")
    special = asked.add_special_tokens is not False
    prompts: list[list[int]] = []
    for one in several:
        if isinstance(one, int) or (isinstance(one, list) and not all(type(id) is int for id in one)):
            raise bad("prompt mixes token ids and prompts: give one kind", "prompt")
        prompts.append(text.encode(one, special) if isinstance(one, str) else one)
    return prompts


def as_id(id: int) -> str:
    return f"token_id:{id}"


def contents(ids: list[int], logprobs: list[float], heads: dict[int, bytes]) -> msgspec.Raw:
    """Write log-probs as /inference/v1/generate lists them, in the superset of its versions. A JSON text instead of objects:
    these are most of an answer, and all but the number is the same for every token of an id. `heads`: keeps that part."""
    if not ids:
        return msgspec.Raw(b"[]")
    for id in ids:
        if id not in heads:
            heads[id] = b'},{"token":"token_id:%d","token_id":%d,"top_logprobs":[],"logprob":' % (id, id)
    parts = [b""] * (2 * len(ids))
    parts[::2] = map(heads.__getitem__, ids)
    parts[1::2] = msgspec.json.encode(logprobs)[1:-1].split(b",")
    parts[0] = b"[" + parts[0].removeprefix(b"},")
    return msgspec.Raw(b"".join(parts) + b"}]")


def named_id(id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{id}", "token_id": id, "logprob": logprob}


def tops(sample: Sample) -> list[list[tuple[int, float]]]:
    """Return (id, log-prob) of the likeliest tokens of each position, as many as could be drawn."""
    if sample.top_ids is None or sample.top_logprobs is None:
        return [[] for _ in sample.token_ids]
    rows = zip(sample.top_ids.tolist(), sample.top_logprobs.tolist(), strict=True)
    return [[(id, logprob) for id, logprob in zip(ids, logprobs, strict=True) if id >= 0] for ids, logprobs in rows]


def token_logprobs(ids: list[int], sample: Sample, named: Callable[[int], str]) -> dict[str, Any]:
    """List log-probs as /v1/completions does; the drawn token is among the likeliest in any case."""
    tokens, logprobs = [named(id) for id in ids], sample.logprobs.tolist()
    likeliest = [
        {named(id): value for id, value in top} | {token: logprob}
        for token, logprob, top in zip(tokens, logprobs, tops(sample), strict=True)
    ]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets_of(tokens)}


def offsets_of(tokens: list[str]) -> list[int]:
    """Return where each token begins in their text."""
    return list(itertools.accumulate(map(len, tokens), initial=0))[: len(tokens)]


def prompt_logprobs(score: Sample | None, named: Callable[[int], str]) -> list[dict[str, Any] | None]:
    """List the log-probs of a prompt's tokens as vLLM does: none for the first, then for each the token itself and the
    likeliest ones, at temperature 1. The rank of a token that is not among those is not known."""
    if score is None:
        return [None]
    rows: list[dict[str, Any] | None] = [None]
    for id, logprob, likeliest in zip(score.token_ids.tolist(), score.logprobs.tolist(), tops(score), strict=True):
        ranks = {one: rank for rank, (one, _) in enumerate(likeliest, 1)}
        entries = {id: logprob} | dict(likeliest)
        rows.append(
            {
                str(one): {"logprob": value, "rank": ranks.get(one), "decoded_token": named(one)}
                for one, value in entries.items()
            }
        )
    return rows


def stopped_by(ids: list[int], sampling: Sampling, sample: Sample) -> dict[str, Any]:
    """Tell the stop string or token that ended a sample, None for the model's own end."""
    if sample.stopped_by is not None:
        return {"stop_reason": sample.stopped_by}
    stopped = sample.finish_reason == "stop" and ids and ids[-1] in sampling.stop_token_ids
    return {"stop_reason": ids[-1] if stopped else None}


def usage(prompts: Sequence[np.ndarray], children: Sequence[Sequence[Sample]]) -> dict[str, int]:
    prompt = sum(map(len, prompts))
    completion = sum(len(sample.token_ids) for samples in children for sample in samples)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def json(content: Any, status: int = 200) -> Response:
    """Answer with JSON; a number that is not finite is a mistake that was caught before."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def events(
    chunks: list[dict[str, Any]], head: dict[str, Any], tokens: dict[str, int], options: dict[str, Any] | None
) -> Response:
    """Answer with server-sent events. They come together, when all samples have ended: the service sends whole samples."""
    if (options or {}).get("include_usage"):
        chunks = [*chunks, head | {"choices": [], "usage": tokens}]
    lines = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
    return Response(b"".join([*lines, b"data: [DONE]\n\n"]), media_type="text/event-stream")
