"""SGLang's dialect, as slime and AReaL speak it.

Here a pause ends what runs ("abort", with the tokens so far): AReaL stamps an answer with the version at its end, so a sample
that went on over new weights would be mislabelled. An answer says the version that made its last token.
"""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from engine.types import KVPolicy, Sample, Sampling
from rollout.http.answers import json, tops
from rollout.http.app import Answer, BodyReader, EventStream, Route, only_parameters, unless_gone
from rollout.http.control import FILES, load_folder, refusing, wake
from rollout.http.data import CompletionRoutes, name_of
from rollout.http.errors import bad, not_served
from rollout.http.sampling import NEUTRAL, SGLangSampling, max_tokens_of, sglang_sampling_of, top_logprobs_of
from rollout.http.streams import Contents
from rollout.http.text_stream import TextChunk, TextOptions
from rollout.http.upstream import Upstream

NEW_TOKENS = 128
"""of /generate without max_new_tokens, as SGLang has it"""
GROWTH = 8
"""a part of a stream comes once there is an eighth more: all parts together are some 9 times the answer"""
ELSEWHERE = {
    "/update_weights_from_distributed": FILES.replace("/update_weights", "/update_weights_from_disk"),
    "/update_weights_from_tensor": FILES.replace("/update_weights", "/update_weights_from_disk"),
    "/init_weights_update_group": FILES.replace("/update_weights", "/update_weights_from_disk"),
    "/destroy_weights_update_group": FILES.replace("/update_weights", "/update_weights_from_disk"),
    "/weights_checker": "ask rollout.client.weights_status",
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
    # asks for what is not there
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


class SGLangPrompt:
    """One prompt of a request to /generate, and how its samples are described.

    Args:
        params: its own; `asked`: the whole request.
        name: by which others may ask for its end.
    """

    def __init__(
        self,
        group: tuple[np.ndarray, Sampling],
        params: SGLangSampling,
        asked: GenerateRequest,
        name: str,
        data: CompletionRoutes,
    ) -> None:
        self.group, self.name = group, name
        self.score: Sample | None = None
        """of the prompt, where its log-probs are wanted"""
        self._params, self._asked, self._data = params, asked, data

    @property
    def spelling(self) -> TextOptions:
        return TextOptions(skip_special=self._params.skip_special_tokens, keep_stop=self._params.no_stop_trim)

    def answer(self, sample: Sample, index: int | None = None) -> dict[str, Any]:
        """Describe a sample. `index`: among all that the request gets; None = among its group's."""
        ids, params = sample.token_ids.tolist(), self._params
        by_token = sample.finish_reason == "stop" and sample.stopped_by is None
        if by_token:
            shown = ids[:-1] if params.no_stop_trim is not True else ids
            text = self._data.text.decode(shown, params.skip_special_tokens is not False)
        else:
            text = self._data.text.of(sample, params.skip_special_tokens, params.no_stop_trim)
        version = sample.weight_versions[-1][1] if sample.weight_versions else self._data.upstream.version
        meta = self._meta(ids, version) | {
            "finish_reason": finish_reason(sample, ids),
            "e2e_latency": sample.seconds,
            "weight_versions": sample.weight_versions,
        }
        if self._asked.return_logprob:
            meta["output_token_logprobs"] = pairs(sample.logprobs, ids)
            meta["input_token_logprobs"] = self._inputs()
        if sample.top_ids is not None:
            meta["output_top_logprobs"] = [[[logprob, id, None] for id, logprob in top] for top in tops(sample)]
        return {"text": text, "output_ids": ids, "meta_info": meta, "index": sample.index if index is None else index}

    def part(self, so_far: list[TextChunk], index: int) -> dict[str, Any]:
        """Describe what there is of a child that runs."""
        ids = [id for piece in so_far for id in piece.ids]
        meta = self._meta(ids, self._data.upstream.version) | {"finish_reason": None}
        if self._asked.return_logprob:
            meta["output_token_logprobs"] = pairs(np.concatenate([piece.tokens.logprobs for piece in so_far]), ids)
            meta["input_token_logprobs"] = self._inputs()
        return {"text": "".join(piece.text for piece in so_far), "output_ids": ids, "meta_info": meta, "index": index}

    def _meta(self, ids: list[int], version: int) -> dict[str, Any]:
        counts = {"prompt_tokens": len(self.group[0]), "completion_tokens": len(ids), "cached_tokens": 0}
        return {"id": self.name, **counts, "weight_version": str(version)}

    def _inputs(self) -> list[list[Any]]:
        return [] if self.score is None else inputs(self.score, self._asked.logprob_start_len or 0)


class SGLang:
    """The routes, over one `Upstream`.

    Args:
        url: of this facade: it is its own router, with itself as the one worker.
    """

    def __init__(self, data: CompletionRoutes, upstream: Upstream, bodies: BodyReader, url: str) -> None:
        self._data, self.upstream, self.bodies, self._url = data, upstream, bodies, url
        kinds = (GenerateRequest, UpdateFromDisk, PauseRequest, AbortRequest, MemoryTags)
        self._decoders: dict[Any, Any] = {kind: msgspec.json.Decoder(kind) for kind in kinds}

    def looks(self) -> list[Route]:
        """Routes that change nothing, and the one that samples."""
        return [
            Route("POST", "/generate", self.generate),
            Route("GET", "/health_generate", self.health),
            Route("GET", "/get_weight_version", self.weight_version),
            Route("GET", "/model_info", self.model_info),
            Route("GET", "/get_model_info", self.model_info),
            Route("GET", "/v1/loads", self.loads),
            Route("GET", "/flush_cache", self.flush_cache),
            Route("POST", "/flush_cache", self.flush_cache),
            Route("GET", "/workers", self.workers),
        ]

    def routes(self) -> list[Route]:
        """Routes of administrators."""
        return [
            Route("POST", "/update_weights_from_disk", self.update_from_disk),
            Route("POST", "/pause_generation", self.pause),
            Route("POST", "/continue_generation", self.resume),
            Route("POST", "/abort_request", self.abort),
            Route("POST", "/release_memory_occupation", self.release),
            Route("POST", "/resume_memory_occupation", self.take_back),
            *(Route("POST", path, refusing(path, instead)) for path, instead in ELSEWHERE.items()),
        ]

    async def generate(self, request: Request) -> Answer:
        asked: GenerateRequest = await self.bodies.decode(request, self._decoders[GenerateRequest])
        self._data.name(asked.model)
        refuse(asked)
        self._check_adapter(asked.lora_path)
        prompts, batched = await unless_gone(request, self._prompts(asked))
        params = asked.sampling_params if isinstance(asked.sampling_params, list) else [asked.sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise bad(f"{len(params)} sampling_params for {len(prompts)} prompts: must be as many, or one", "sampling_params")
        names = names_of(asked.rid, len(prompts))
        wanted = [
            SGLangPrompt(
                self._group(ids, own or SGLangSampling(), asked),
                own or SGLangSampling(),
                asked,
                name or self._data.id("gen"),
                self._data,
            )
            for ids, own, name in zip(prompts, params, names, strict=True)
        ]
        groups, start = [one.group for one in wanted], asked.logprob_start_len
        self._data.check_samples(groups)
        if start is not None and start != -1:
            scores = await unless_gone(request, self.upstream.score(*self._data.scoring(groups, 0)))
            for one, score in zip(wanted, scores, strict=True):
                one.score = score
        if asked.stream:
            return EventStream(request, sglang_events(self._data, wanted))
        children = await unless_gone(request, self.upstream.generate(groups, [[one.name] for one in wanted]))
        answers = [one.answer(sample) for one, samples in zip(wanted, children, strict=True) for sample in samples]
        return json(answers if batched or len(answers) > 1 else answers[0])

    def _check_adapter(self, name: Any) -> None:
        """Raise HttpError for an adapter that is not the loaded one."""
        loaded = self.upstream.adapter
        if name not in NEUTRAL and (loaded is None or name != loaded.name):
            raise not_served(f"lora_path={name!r}"[:200], "POST /load_lora_adapter, and give its name", "lora_path")

    async def _prompts(self, asked: GenerateRequest) -> tuple[list[list[int]], bool]:
        """Return the ids of each prompt, and whether they came as a list. Raises HttpError."""
        if (asked.input_ids is None) == (asked.text is None):
            raise bad("give input_ids or text, one of the two", "input_ids")
        batched = isinstance(asked.text, list) or bool(asked.input_ids and isinstance(asked.input_ids[0], list))
        given: Any = asked.text if asked.text is not None else asked.input_ids
        prompts = given if batched else [given]
        field = "input_ids" if asked.text is None else "text"
        if not 1 <= len(prompts) <= self._data.bounds.max_prompts:
            raise bad(f"{len(prompts)} prompts: must be 1 to {self._data.bounds.max_prompts} (max_prompts)", field)
        if asked.text is not None:
            return await self._data.prompts.texts(prompts, True, field), batched
        if not all(isinstance(ids, list) for ids in prompts) or any(isinstance(id, list) for ids in prompts for id in ids):
            raise bad("input_ids must be token ids, or a list of prompts that are", field)
        return prompts, batched

    def _group(self, ids: list[int], params: SGLangSampling, asked: GenerateRequest) -> tuple[np.ndarray, Sampling]:
        info = self.upstream.info
        tokens = max_tokens_of(params.max_new_tokens, NEW_TOKENS, len(ids), info.context, info.limits)
        more = top_logprobs_of(asked.top_logprobs_num or 0, "top_logprobs_num") | self._data.streaming(bool(asked.stream))
        sampling = sglang_sampling_of(params, tokens, self._data.text.special, **more)
        return self.upstream.check(ids, sampling), sampling

    async def health(self, request: Request) -> Response:
        await self.upstream.status()
        return json({"status": "ok"})

    async def weight_version(self, request: Request) -> Response:
        await self.upstream.status()
        return json({"weight_version": str(self.upstream.version)})

    async def model_info(self, request: Request) -> Response:
        await self.upstream.status()
        model = self.upstream.info.model
        return json(
            {"model_path": model, "tokenizer_path": model, "is_generation": True, "weight_version": str(self.upstream.version)}
        )

    async def loads(self, request: Request) -> Response:
        only_parameters(request, "include", "dp_rank")
        status = await self.upstream.status()
        running, waiting = int(status.get("running", 0)), int(status.get("waiting", 0))
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}
        load |= {"num_total_reqs": running + waiting, "num_reqs": running + waiting}
        total = {"total_reqs": running + waiting, "total_running_reqs": running, "total_waiting_reqs": waiting}
        return json({"loads": [load], "aggregate": total, "num_reqs": running + waiting, "num_total_reqs": running + waiting})

    async def flush_cache(self, request: Request) -> Response:
        """Do nothing: KV knows which weights made it, and none of others is used without being asked for."""
        return json({"success": True})

    async def workers(self, request: Request) -> Response:
        worker = {"id": "0", "url": self._url, "worker_type": "regular", "is_healthy": True}
        return json({"workers": [worker], "total": 1, "urls": [self._url]})

    async def update_from_disk(self, request: Request) -> Response:
        asked: UpdateFromDisk = await self.bodies.decode(request, self._decoders[UpdateFromDisk])
        if asked.load_format not in (None, "auto", "safetensors"):
            raise not_served(f"load_format={asked.load_format!r}"[:200], "write safetensors", "load_format")
        version = str(asked.weight_version) if asked.weight_version is not None else ""
        kv: KVPolicy = "abort" if asked.abort_all_requests else "recompute" if asked.flush_cache else "keep"
        wanted = int(version) if version.isdecimal() and len(version) < 19 else None
        live = await load_folder(self.upstream, asked.model_path, wanted, kv, "model_path")
        return json(
            {"success": True, "message": f"version {live} is live", "num_paused_requests": 0, "weight_version": str(live)}
        )

    async def pause(self, request: Request) -> Response:
        asked: PauseRequest = await self.bodies.decode(request, self._decoders[PauseRequest])
        if asked.mode not in ("abort", "in_place", "retract"):
            raise bad(f"mode={asked.mode!r}: must be abort, in_place or retract"[:200], "mode")
        await self.upstream.control(self.upstream.client.pause)
        if asked.mode == "abort":
            await self.upstream.control(self.upstream.client.abort_all)
        self.upstream.kv = "keep" if asked.mode == "in_place" else "recompute"
        return json({"status": "ok", "success": True})

    async def resume(self, request: Request) -> Response:
        await self.bodies.read(request)
        await self.upstream.control(self.upstream.client.resume)
        return json({"status": "ok", "success": True})

    async def abort(self, request: Request) -> Response:
        asked: AbortRequest = await self.bodies.decode(request, self._decoders[AbortRequest])
        if not asked.abort_all and not asked.rid:
            raise bad("give rid, or abort_all", "rid")
        aborted = self.upstream.abort_own() if asked.abort_all else self.upstream.abort([asked.rid or ""])
        return json({"success": True, "aborted": aborted})

    async def release(self, request: Request) -> Response:
        asked: MemoryTags = await self.bodies.decode(request, self._decoders[MemoryTags])
        if asked.tags:
            raise not_served("tags", "leave it out: weights and KV go together, and may come back apart", "tags")
        return json({"success": True, "freed_bytes": await self.upstream.control(self.upstream.client.sleep)})

    async def take_back(self, request: Request) -> Response:
        asked: MemoryTags = await self.bodies.decode(request, self._decoders[MemoryTags])
        await wake(self.upstream, asked.tags)
        return json({"success": True})


def refuse(asked: GenerateRequest) -> None:
    """Raise HttpError 501 for what is not there."""
    wanted: dict[str, str] = {
        "image_data": "send text alone",
        "return_routed_experts": "leave it out",
        "return_hidden_states": "leave it out",
        "token_ids_logprob": "leave it out",
    }
    for name, instead in wanted.items():
        if getattr(asked, name) not in (*NEUTRAL, 0):
            raise not_served(name, instead, name)


def inputs(score: Sample, start: int) -> list[list[Any]]:
    """List the log-probs of a prompt's tokens behind the one at `start`, as SGLang does."""
    return pairs(score.logprobs, score.token_ids.tolist())[max(start, 0) :]


def pairs(logprobs: np.ndarray, ids: list[int]) -> list[list[Any]]:
    """List log-probs of tokens, as SGLang does."""
    return [[logprob, id, None] for logprob, id in zip(logprobs.tolist(), ids, strict=True)]


def names_of(rid: str | list[str] | None, prompts: int) -> list[str | None]:
    """Return the name that each prompt was given. Raises HttpError."""
    names: list[str | None] = [*rid] if isinstance(rid, list) else [rid] * prompts
    if len(names) != prompts:
        raise bad(f"{len(names)} rid for {prompts} prompts: must be as many, or one for all", "rid")
    return [name_of(name, "rid") for name in names]


def finish_reason(sample: Sample, ids: list[int]) -> dict[str, Any]:
    """Tell how a sample ended, as SGLang does."""
    if sample.finish_reason == "stop":
        return {"type": "stop", "matched": sample.stopped_by or (ids[-1] if ids else None)}
    if sample.finish_reason == "length":
        return {"type": "length", "length": len(ids)}
    return {"type": "abort", "message": f"the sample ended as {sample.finish_reason!r}"}


async def sglang_events(data: CompletionRoutes, asked: list[SGLangPrompt]) -> Contents:
    """Yield the events of SGLang's /generate: all of a child so far, in each."""
    groups = [one.group for one in asked]
    firsts = [0, *accumulate(sampling.n for _, sampling in groups)]
    so_far: dict[int, list[TextChunk]] = {}
    sent: Counter[int] = Counter()
    """tokens of each child in its last event"""
    async with aclosing(data.children(groups, [one.spelling for one in asked], [[one.name] for one in asked])) as new:
        async for piece in new:
            index = firsts[piece.group] + piece.index
            if piece.sample is not None:
                yield asked[piece.group].answer(piece.sample, index)
                continue
            so_far.setdefault(index, []).append(piece)
            count = piece.tokens.first + len(piece.tokens.token_ids)
            if count - sent[index] >= sent[index] // GROWTH:
                sent[index] = count
                yield asked[piece.group].part(so_far[index], index)
