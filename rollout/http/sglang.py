"""SGLang's API, as slime and AReaL use it.

A pause ends running requests ("abort", with the tokens so far). AReaL labels a response with the version at its end, so a
sample that continued under new weights would have the wrong label. A response has the version that made its last token.
"""

from __future__ import annotations

import itertools
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.routing import Route

from rollout.engine.types import KVPolicy, Sample
from rollout.http.control import FILES, load_folder, refusing, wake
from rollout.http.endpoints import Endpoints, EventStream, only_parameters, unless_disconnected
from rollout.http.errors import bad, not_served
from rollout.http.generation import GenerationService, PromptGroup, checked_name
from rollout.http.responses import Contents, top_tokens
from rollout.http.sampling import NEUTRAL, SGLangSampling, sglang_sampling_of, top_logprobs_of
from rollout.http.text import TextChunk, TextOptions

NEW_TOKENS = 128
"""default of max_new_tokens, as in SGLang"""
GROWTH = 8
"""an event repeats all tokens so far, so it is sent once there is an eighth more: all events together are some 9 times the
response"""
FILES_HERE = FILES.replace("/update_weights", "/update_weights_from_disk")
UNSUPPORTED = {
    "/update_weights_from_distributed": FILES_HERE,
    "/update_weights_from_tensor": FILES_HERE,
    "/init_weights_update_group": FILES_HERE,
    "/destroy_weights_update_group": FILES_HERE,
    "/weights_checker": "use rollout.client.weights_status",
    "/start_profile": "profile the service's process",
    "/stop_profile": "profile the service's process",
}


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
    rid: str | list[str] | None = None
    model: str | None = None
    # unsupported unless neutral
    image_data: Any = None
    lora_path: Any = None
    return_routed_experts: bool | None = None
    return_hidden_states: bool | None = None
    token_ids_logprob: Any = None


class UpdateFromDisk(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    weight_version: str | int | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0


class PauseRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /pause_generation."""

    mode: str = "abort"


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /abort_request."""

    rid: str | None = None
    abort_all: bool = False
    abort_message: str | None = None


class MemoryTags(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /release_memory_occupation and /resume_memory_occupation."""

    tags: list[str] | None = None


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
    """The routes, over one `GenerationService`.

    Args:
        url: of this gateway, which reports itself as a router with one worker.
    """

    def __init__(self, generation: GenerationService, url: str) -> None:
        self._generation, self._upstream, self._url = generation, generation.upstream, url

    def public(self, endpoints: Endpoints) -> list[Route]:
        """Make the routes that sample, and those that change nothing."""
        get, post = endpoints.get, endpoints.post
        return [
            post("/generate", self.generate, GenerateRequest),
            get("/model_info", self.model_info),
            get("/get_model_info", self.model_info),
            get("/v1/loads", self.loads),
            get("/flush_cache", self.flush_cache),
            post("/flush_cache", self.flush_cache),
            get("/workers", self.workers),
        ]

    def admin(self, endpoints: Endpoints) -> list[Route]:
        """Make the routes that control the service."""
        post = endpoints.post
        return [
            post("/update_weights_from_disk", self.update_from_disk, UpdateFromDisk),
            post("/pause_generation", self.pause, PauseRequest),
            post("/continue_generation", self.resume),
            post("/abort_request", self.abort, AbortRequest),
            post("/release_memory_occupation", self.release, MemoryTags),
            post("/resume_memory_occupation", self.take_back, MemoryTags),
            *(post(path, refusing(path, instead)) for path, instead in UNSUPPORTED.items()),
        ]

    # /generate

    async def generate(self, request: Request, body: GenerateRequest) -> Any:
        generation = self._generation
        generation.model(body.model)
        self._refuse_unsupported(body)
        prompts, batched = await unless_disconnected(request, self._prompts(body))
        params = body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise bad(
                f"{len(params)} sampling_params for {len(prompts)} prompts: give one, or one per prompt", "sampling_params"
            )
        own_params = [each or SGLangSampling() for each in params]
        ids = [name or generation.new_id("gen") for name in names_of(body.rid, len(prompts))]
        groups = [self._group(*each, body) for each in zip(prompts, own_params, ids, strict=True)]
        generation.check_samples(groups)
        scored = body.logprob_start_len not in (None, -1)
        scores: list[Sample | None] = await generation.score(request, groups, 0) if scored else [None] * len(groups)
        first = itertools.accumulate((group.sampling.n for group in groups), initial=0)
        made = [
            SGLangPrompt(id=id, group=group, params=own, first=at, score=score)
            for id, group, own, score, at in zip(ids, groups, own_params, scores, first, strict=False)
        ]
        if body.stream:
            return EventStream(request, self._events(made, body))
        samples = await generation.sample(request, groups)
        answers = [
            self._answer(prompt, sample, body) for prompt, children in zip(made, samples, strict=True) for sample in children
        ]
        return answers if batched or len(answers) > 1 else answers[0]

    def _refuse_unsupported(self, body: GenerateRequest) -> None:
        """Raise HttpError 501 for unsupported fields, and for an adapter that is not loaded."""
        for name in ("return_routed_experts", "return_hidden_states", "token_ids_logprob", "image_data"):
            if getattr(body, name) not in (*NEUTRAL, 0):
                raise not_served(name, "send text" if name == "image_data" else "leave it out", name)
        adapter, wanted = self._upstream.adapter, body.lora_path
        if wanted not in NEUTRAL and (adapter is None or wanted != adapter.name):
            raise not_served(f"lora_path={wanted!r}"[:200], "POST /load_lora_adapter, and give its name", "lora_path")

    async def _prompts(self, body: GenerateRequest) -> tuple[list[list[int]], bool]:
        """Return the ids of each prompt, and whether the request has a list of prompts. Raises HttpError."""
        if (body.input_ids is None) == (body.text is None):
            raise bad("give either input_ids or text", "input_ids")
        batched = isinstance(body.text, list) or bool(body.input_ids and isinstance(body.input_ids[0], list))
        given: Any = body.text if body.text is not None else body.input_ids
        prompts = given if batched else [given]
        field, most = "input_ids" if body.text is None else "text", self._generation.limits.max_prompts
        if not 1 <= len(prompts) <= most:
            raise bad(f"{len(prompts)} prompts: must be 1 to {most} (max_prompts)", field)
        if body.text is not None:
            return await self._generation.prompts.texts(prompts, True, field), batched
        if not all(isinstance(ids, list) for ids in prompts) or any(isinstance(id, list) for ids in prompts for id in ids):
            raise bad("input_ids must be token ids, or a list of lists of token ids", field)
        return prompts, batched

    def _group(self, ids: list[int], params: SGLangSampling, id: str, body: GenerateRequest) -> PromptGroup:
        generation = self._generation
        most = generation.max_tokens(params.max_new_tokens, NEW_TOKENS, len(ids))
        more = top_logprobs_of(body.top_logprobs_num or 0, "top_logprobs_num") | generation.streaming(body.stream)
        sampling = sglang_sampling_of(params, most, generation.text.special, **more)
        text = TextOptions(skip_special=params.skip_special_tokens, keep_stop=params.no_stop_trim)
        return generation.group(ids, sampling, {id}, text)

    def _answer(self, prompt: SGLangPrompt, sample: Sample, body: GenerateRequest, index: int | None = None) -> dict[str, Any]:
        """Make the response for a finished sample. index: among all of the request; None: among those of its prompt."""
        ids, params, text = sample.token_ids.tolist(), prompt.params, self._generation.text
        if sample.finish_reason == "stop" and sample.stopped_by is None:  # at a token, which is trimmed as well
            shown = ids if params.no_stop_trim is True else ids[:-1]
            content = text.decode(shown, params.skip_special_tokens is not False)
        else:
            content = text.of(sample, params.skip_special_tokens, params.no_stop_trim)
        version = sample.weight_versions[-1][1] if sample.weight_versions else self._upstream.version
        meta = self._meta(prompt, ids, sample.logprobs, version, body) | {
            "finish_reason": finish_reason(sample, ids),
            "e2e_latency": sample.seconds,
            "weight_versions": sample.weight_versions,
        }
        if sample.top_ids is not None:
            meta["output_top_logprobs"] = [[[logprob, id, None] for id, logprob in top] for top in top_tokens(sample)]
        return {"text": content, "output_ids": ids, "meta_info": meta, "index": sample.index if index is None else index}

    def _meta(
        self, prompt: SGLangPrompt, ids: list[int], logprobs: np.ndarray, version: int, body: GenerateRequest
    ) -> dict[str, Any]:
        counts = {"prompt_tokens": len(prompt.group.prompt), "completion_tokens": len(ids), "cached_tokens": 0}
        meta: dict[str, Any] = {"id": prompt.id, **counts, "weight_version": str(version), "finish_reason": None}
        if body.return_logprob:
            meta["output_token_logprobs"] = entries(logprobs, ids)
            score, start = prompt.score, max(body.logprob_start_len or 0, 0)
            meta["input_token_logprobs"] = [] if score is None else entries(score.logprobs, score.token_ids.tolist())[start:]
        return meta

    async def _events(self, prompts: list[SGLangPrompt], body: GenerateRequest) -> Contents:
        """Yield the events of a stream; each has all tokens of a child so far."""
        so_far: dict[int, list[TextChunk]] = {}
        sent: dict[int, int] = {}
        """tokens in the last event of each child"""
        async with aclosing(self._generation.stream([prompt.group for prompt in prompts])) as chunks:
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
        logprobs = np.concatenate([chunk.logprobs for chunk in so_far])
        meta = self._meta(prompt, ids, logprobs, self._upstream.version, body)
        return {"text": "".join(chunk.text for chunk in so_far), "output_ids": ids, "meta_info": meta, "index": index}

    # status

    async def model_info(self, request: Request) -> dict[str, Any]:
        await self._upstream.status()
        model, version = self._upstream.info.model, str(self._upstream.version)
        return {"model_path": model, "tokenizer_path": model, "is_generation": True, "weight_version": version}

    async def loads(self, request: Request) -> dict[str, Any]:
        only_parameters(request, "include", "dp_rank")
        status = await self._upstream.status()
        running, waiting = int(status.get("running", 0)), int(status.get("waiting", 0))
        total = running + waiting
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}
        sums = {"num_reqs": total, "num_total_reqs": total}
        aggregate = {"total_reqs": total, "total_running_reqs": running, "total_waiting_reqs": waiting}
        return {"loads": [load | sums], "aggregate": aggregate, **sums}

    async def flush_cache(self, request: Request) -> dict[str, Any]:
        """Do nothing: KV blocks record their weight version, and those of other versions are not used unless requested."""
        return {"success": True}

    async def workers(self, request: Request) -> dict[str, Any]:
        worker = {"id": "0", "url": self._url, "worker_type": "regular", "is_healthy": True}
        return {"workers": [worker], "total": 1, "urls": [self._url]}

    # control

    async def update_from_disk(self, request: Request, body: UpdateFromDisk) -> dict[str, Any]:
        if body.load_format not in (None, "auto", "safetensors"):
            raise not_served(f"load_format={body.load_format!r}"[:200], "write safetensors", "load_format")
        version = str(body.weight_version) if body.weight_version is not None else ""
        wanted = int(version) if version.isdecimal() and len(version) < 19 else None
        kv: KVPolicy = "abort" if body.abort_all_requests else "recompute" if body.flush_cache else "keep"
        live = await load_folder(self._upstream, body.model_path, wanted, kv, "model_path")
        return {"success": True, "message": f"version {live} is live", "num_paused_requests": 0, "weight_version": str(live)}

    async def pause(self, request: Request, body: PauseRequest) -> dict[str, Any]:
        if body.mode not in ("abort", "in_place", "retract"):
            raise bad(f"mode={body.mode!r}: must be abort, in_place or retract"[:200], "mode")
        await self._upstream.control(self._upstream.client.pause)
        if body.mode == "abort":
            await self._upstream.control(self._upstream.client.abort_all)
        self._upstream.kv_policy = "keep" if body.mode == "in_place" else "recompute"
        return {"status": "ok", "success": True}

    async def resume(self, request: Request) -> dict[str, Any]:
        await self._upstream.control(self._upstream.client.resume)
        return {"status": "ok", "success": True}

    async def abort(self, request: Request, body: AbortRequest) -> dict[str, Any]:
        if not body.abort_all and not body.rid:
            raise bad("give rid, or abort_all", "rid")
        return {"success": True, "aborted": self._generation.abort(None if body.abort_all else [body.rid or ""])}

    async def release(self, request: Request, body: MemoryTags) -> dict[str, Any]:
        if body.tags:
            raise not_served(
                "tags", "leave it out: weights and KV are released together, and may be resumed one by one", "tags"
            )
        return {"success": True, "freed_bytes": await self._upstream.control(self._upstream.client.sleep)}

    async def take_back(self, request: Request, body: MemoryTags) -> dict[str, Any]:
        await wake(self._upstream, body.tags)
        return {"success": True}


def entries(logprobs: np.ndarray, ids: list[int]) -> list[list[Any]]:
    """List log-probs of tokens as SGLang does."""
    return [[logprob, id, None] for logprob, id in zip(logprobs.tolist(), ids, strict=True)]


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
