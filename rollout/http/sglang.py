"""SGLang's route for tokens, `/generate`, as slime and AReaL use it.

A pause ends running requests ("abort", with the tokens so far). AReaL labels a response with the version at its end, so a
sample that continued under new weights would have the wrong label. A response has the version that made its last token.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from rollout.engine.values import Sample
from rollout.http.endpoints import Endpoints, EventStream, unless_disconnected
from rollout.http.errors import bad, not_served
from rollout.http.generation import Arrival, GenerationService, PromptGroup, checked_name
from rollout.http.responses import Contents, Tokens, routes_of, top_tokens, wants_routes, weight_spans
from rollout.http.sampling import NEUTRAL, SGLangSampling, sglang_sampling_of, top_logprobs_of
from rollout.http.text import TextChunk, TextOptions

NEW_TOKENS = 128
"""default of max_new_tokens, as in SGLang"""
GROWTH = 8
"""an event repeats all tokens so far, so it is sent once there is an eighth more: all events together are some 9 times the
response"""


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /generate."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SGLangSampling | list[SGLangSampling] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    """first position whose routes are returned"""
    rid: str | list[str] | None = None
    model: str | None = None
    # unsupported unless neutral
    image_data: Any = None
    lora_path: Any = None
    return_hidden_states: bool | None = None
    token_ids_logprob: Any = None


class SGLangPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a request to /generate."""

    id: str
    group: PromptGroup
    params: SGLangSampling
    first: int
    """index of its first sample in the response"""
    score: Sample | None
    """log-probs of the prompt, if requested"""


class SGLangRoutes:
    """The route, over one `GenerationService`."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation, self._upstream = generation, generation.upstream

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [endpoints.post("/generate", self.generate, GenerateRequest)]

    async def generate(self, request: Request, body: GenerateRequest) -> Any:
        """Sample one or several prompts."""
        generation = self._generation
        generation.model(body.model)
        self._refuse_unsupported(body)
        given, batched = self._given(body)
        ids = [name or generation.new_id("gen") for name in names_of(body.rid, len(given))]
        with generation.arrival(ids) as arrival:
            prompts = given
            if body.text is not None:
                prompts = await unless_disconnected(request, generation.prompts.texts(given, True, "text"))
            made = await self._prompts(request, arrival, body, prompts, ids)
            if body.stream:
                return EventStream(request, self._events(request, arrival, made, body))
            samples = await generation.sample(request, arrival, [prompt.group for prompt in made])
        answers = [
            self._answer(prompt, sample, body) for prompt, children in zip(made, samples, strict=True) for sample in children
        ]
        return answers if batched or len(answers) > 1 else answers[0]

    async def _prompts(
        self, request: Request, arrival: Arrival, body: GenerateRequest, prompts: list[list[int]], ids: list[str]
    ) -> list[SGLangPrompt]:
        """Check the prompts of a request, and score them if it asks for it. Raises HttpError, InvalidRequest."""
        generation, start = self._generation, body.logprob_start_len
        params = body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise bad(
                f"{len(params)} sampling_params for {len(prompts)} prompts: give one, or one per prompt", "sampling_params"
            )
        own_params = [each or SGLangSampling() for each in params]
        groups = [self._group(*each, body) for each in zip(prompts, own_params, ids, strict=True)]
        generation.check_samples(groups)
        scores: list[Sample | None] = [None] * len(groups)
        if start not in (None, -1):
            most = min(map(len, prompts))
            if not 0 <= start <= most:
                raise bad(f"logprob_start_len={start}: must be 0 to {most}, or -1 for none", "logprob_start_len")
            scores = await generation.score(request, arrival, groups, body.top_logprobs_num or 0)
        first = itertools.accumulate((group.sampling.n for group in groups), initial=0)
        return [
            SGLangPrompt(id=id, group=group, params=own, first=at, score=score)
            for id, group, own, score, at in zip(ids, groups, own_params, scores, first, strict=False)
        ]

    def _refuse_unsupported(self, body: GenerateRequest) -> None:
        """Raise HttpError for unsupported fields, and for an adapter that is not loaded."""
        for name in ("return_hidden_states", "token_ids_logprob", "image_data"):
            if getattr(body, name) not in (*NEUTRAL, 0):
                raise not_served(name, "send text" if name == "image_data" else "leave it out", name)
        if not body.return_logprob:
            for name, value in (("top_logprobs_num", 0), ("logprob_start_len", -1), ("return_text_in_logprobs", False)):
                if getattr(body, name) not in (None, value):
                    raise bad(f"{name} without return_logprob: set it to true, or leave {name} out", name)
        adapter, wanted = self._upstream.adapter, body.lora_path
        if wanted not in NEUTRAL and (adapter is None or wanted != adapter.name):
            raise not_served(f"lora_path={wanted!r}"[:200], "POST /load_lora_adapter, and give its name", "lora_path")

    def _given(self, body: GenerateRequest) -> tuple[list[Any], bool]:
        """Return the text or the ids of each prompt, and whether the request has a list of prompts. Raises HttpError."""
        if (body.input_ids is None) == (body.text is None):
            raise bad("give either input_ids or text", "input_ids")
        batched = isinstance(body.text, list) or bool(body.input_ids and isinstance(body.input_ids[0], list))
        given: Any = body.text if body.text is not None else body.input_ids
        prompts = given if batched else [given]
        field, most = "input_ids" if body.text is None else "text", self._generation.limits.max_prompts
        if not 1 <= len(prompts) <= most:
            raise bad(f"{len(prompts)} prompts: must be 1 to {most} (max_prompts)", field)
        if body.text is not None:
            return prompts, batched
        if not all(isinstance(ids, list) for ids in prompts) or any(isinstance(id, list) for ids in prompts for id in ids):
            raise bad("input_ids must be token ids, or a list of lists of token ids", field)
        return prompts, batched

    def _group(self, ids: list[int], params: SGLangSampling, id: str, body: GenerateRequest) -> PromptGroup:
        generation = self._generation
        most = generation.max_tokens(params.max_new_tokens, NEW_TOKENS, len(ids))
        more = top_logprobs_of(body.top_logprobs_num or 0, "top_logprobs_num") | generation.streaming(body.stream)
        more |= wants_routes(body.return_routed_experts, self._upstream.info.routing, "return_routed_experts")
        if not 0 <= (start := body.routed_experts_start_len or 0) <= len(ids):
            raise bad(f"routed_experts_start_len={start}: must be 0 to {len(ids)}", "routed_experts_start_len")
        sampling = sglang_sampling_of(params, most, generation.text.special, **more)
        text = TextOptions(skip_special=params.skip_special_tokens, keep_stop=params.no_stop_trim)
        return generation.group(ids, sampling, {id}, text)

    def _answer(self, prompt: SGLangPrompt, sample: Sample, body: GenerateRequest, index: int | None = None) -> dict[str, Any]:
        """Make the response for a finished sample. index: among all of the request; None: among those of its prompt."""
        ids, params = sample.token_ids.tolist(), prompt.params
        content = self._generation.text.of(sample, params.skip_special_tokens, params.no_stop_trim)
        version = sample.weight_versions[-1][1] if sample.weight_versions else self._upstream.version
        meta = self._meta(prompt, [sample], version, body) | {
            "finish_reason": finish_reason(sample, ids),
            "e2e_latency": sample.seconds,
            "weight_versions": weight_spans(sample),
        }
        routes = routes_of(sample, self._upstream.info.routing, body.routed_experts_start_len or 0)
        if routes is not None:
            meta["routed_experts"] = base64.b64encode(routes.astype("<i4").tobytes()).decode()
        return {"text": content, "output_ids": ids, "meta_info": meta, "index": sample.index if index is None else index}

    def _meta(self, prompt: SGLangPrompt, so_far: Sequence[Tokens], version: int, body: GenerateRequest) -> dict[str, Any]:
        """Make the fields that every event has. so_far: the tokens of the sample, in order."""
        tokens = sum(len(each.token_ids) for each in so_far)
        counts = {"prompt_tokens": len(prompt.group.prompt), "completion_tokens": tokens, "cached_tokens": 0}
        meta: dict[str, Any] = {"id": prompt.id, **counts, "weight_version": str(version), "finish_reason": None}
        if not body.return_logprob:
            return meta
        entries = LogprobLists(self._generation.text.token if body.return_text_in_logprobs else lambda _: None)
        meta["output_token_logprobs"] = [entry for each in so_far for entry in entries.own(each)]
        meta["output_token_logprobs_length"] = tokens
        if body.top_logprobs_num:
            meta["output_top_logprobs"] = [top for each in so_far for top in entries.top(each)]
        start, first = body.logprob_start_len, int(prompt.group.prompt[0])
        if start not in (None, -1):
            meta["input_token_logprobs"] = prompt_entries([None, first, entries.text(first)], entries.own, prompt, start)
            if body.top_logprobs_num:
                meta["input_top_logprobs"] = prompt_entries(None, entries.top, prompt, start)
        else:
            meta["input_token_logprobs"] = []
        return meta

    async def _events(self, request: Request, arrival: Arrival, prompts: list[SGLangPrompt], body: GenerateRequest) -> Contents:
        """Yield the events of a stream; each has all tokens of a child so far."""
        so_far: dict[int, list[TextChunk]] = {}
        sent: dict[int, int] = {}
        """tokens in the last event of each child"""
        async with aclosing(self._generation.stream(request, arrival, [prompt.group for prompt in prompts])) as chunks:
            async for chunk in chunks:
                prompt = prompts[chunk.group]
                index = prompt.first + chunk.index
                if chunk.sample is not None:
                    yield self._answer(prompt, chunk.sample, body, index)
                    continue
                so_far.setdefault(index, []).append(chunk)
                before, count = sent.get(index, 0), chunk.first + len(chunk.token_ids)
                if count - before >= before // GROWTH:
                    sent[index] = count
                    yield self._partial_answer(prompt, so_far[index], body, index)

    def _partial_answer(
        self, prompt: SGLangPrompt, so_far: list[TextChunk], body: GenerateRequest, index: int
    ) -> dict[str, Any]:
        ids = [id for chunk in so_far for id in chunk.ids]
        meta = self._meta(prompt, so_far, self._upstream.version, body)
        return {"text": "".join(chunk.text for chunk in so_far), "output_ids": ids, "meta_info": meta, "index": index}


class LogprobLists(msgspec.Struct, frozen=True):
    """Lists log-probs as SGLang does: [log-prob, id, text]. text: of a token, None = without."""

    text: Callable[[int], str | None]

    def own(self, tokens: Tokens) -> list[Any]:
        """List those of the tokens themselves."""
        pairs = zip(tokens.logprobs.tolist(), tokens.token_ids.tolist(), strict=True)
        return [[logprob, id, self.text(id)] for logprob, id in pairs]

    def top(self, tokens: Tokens) -> list[Any]:
        """List those of the most probable tokens at each position."""
        return [[[logprob, id, self.text(id)] for id, logprob in top] for top in top_tokens(tokens)]


def prompt_entries(unknown: Any, entries: Callable[[Tokens], list[Any]], prompt: SGLangPrompt, start: int) -> list[Any]:
    """List what belongs to the tokens of a prompt from `start` on. As in SGLang, the first entry has no log-prob.

    unknown: the entry of the prompt's first token."""
    listed = [unknown, *([] if prompt.score is None else entries(prompt.score))][start:]
    if listed and listed[0] is not None:
        listed[0] = [None, *listed[0][1:]] if not isinstance(listed[0][0], list) else None
    return listed


def names_of(rid: str | list[str] | None, prompts: int) -> list[str | None]:
    """Return the id that the request gives each prompt. Raises HttpError."""
    names: list[str | None] = [*rid] if isinstance(rid, list) else [rid] * prompts
    if len(names) != prompts:
        raise bad(f"{len(names)} rid for {prompts} prompts: give one, or one per prompt", "rid")
    return [checked_name(name, "rid") for name in names]


def finish_reason(sample: Sample, ids: list[int]) -> dict[str, Any]:
    """Return the end of a sample as SGLang does."""
    if sample.finish_reason == "stop":
        return {"type": "stop", "matched": sample.stopped_by or (ids[-1] if ids else None)}
    if sample.finish_reason == "length":
        return {"type": "length", "length": len(ids)}
    return {"type": "abort", "message": f"the sample ended as {sample.finish_reason!r}"}
