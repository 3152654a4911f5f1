"""Control of the service, under the routes of vLLM and of SGLang: pause, weights from a folder, sleep, abort.

    VllmControl   ─┐
                   ├→ ServiceControl → Upstream
    SGLangControl ─┘

Weights come as a folder of safetensors that the service can read (prime-rl, slime, AReaL). The service stages them next to the
live ones and swaps them between two steps, so a pause during an update is allowed but not needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from rollout.engine.values import KVPolicy, Tag
from rollout.http.endpoints import Endpoints, Handler, flag, only_parameters
from rollout.http.errors import HttpError, bad, not_served
from rollout.http.generation import GenerationService

TAGS: dict[str, Tag | None] = {"weights": "weights", "kv_cache": "kv", "kv": "kv", "cuda_graph": None}
"""parts that wake one by one; CUDA graphs wake with the weights"""
STEP = re.compile(r"step_(\d{1,18})$")
FILES = 'write the weights as a folder of safetensors and POST /update_weights {"weight_dir": …}, or use rollout.client.refresh'
FROM_DISK = FILES.replace("/update_weights", "/update_weights_from_disk")
UNSUPPORTED = {
    "/init_weight_transfer_engine": FILES,
    "/start_weight_update": FILES,
    "/finish_weight_update": FILES,
    "/init_broadcaster": FILES,
    "/collective_rpc": FILES,
    "/fetch_weights": FILES,
    "/receive_weight_update": FILES,
    "/update_weights_from_distributed": FROM_DISK,
    "/update_weights_from_tensor": FROM_DISK,
    "/init_weights_update_group": FROM_DISK,
    "/destroy_weights_update_group": FROM_DISK,
    "/scale_elastic_ep": "start another service",
    "/weights_checker": "use rollout.client.weights_status",
    "/start_profile": "profile the service's process",
    "/stop_profile": "profile the service's process",
    "/v1/embeddings": "this service samples text only",
    "/pooling": "this service samples text only",
    "/v1/responses": "POST /v1/chat/completions",
}
"""routes of vLLM, OpenAI and SGLang, and the alternative"""


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /update_weights."""

    weight_dir: str | None = None
    update_info: Any = None
    """of a transfer over NCCL, which is not supported"""


class AbortRequests(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /abort_requests."""

    request_ids: list[str] | None = None


class ResetPrefixCache(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /reset_prefix_cache."""

    reset_running_requests: bool = False
    reset_external: bool = False
    device: str | None = None


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


class ServiceControl:
    """What both APIs do. For one event loop."""

    def __init__(self, generation: GenerationService) -> None:
        self.upstream, self.abort, self._generation = generation.upstream, generation.abort, generation
        self.kv_policy: KVPolicy = "keep"
        """for updates whose request has no policy of its own: set by the last pause, read when the update begins"""

    async def pause(self, running: Literal["keep", "wait", "abort"], kv: KVPolicy) -> None:
        """Pause. `running` requests stop and continue later, finish first, or end with their tokens so far; `kv`: the policy of
        later updates."""
        client = self.upstream.client
        if running == "abort":  # before the pause: what is sent afterwards waits for the end of it
            self._generation.abort_unsent()
        await self.upstream.control(client.drain if running == "wait" else client.pause)
        if running == "abort":
            await self.upstream.control(client.abort_all)
        self.kv_policy = kv

    async def resume(self) -> None:
        await self.upstream.control(self.upstream.client.resume)

    async def update(
        self, folder: str, version: int | None, param: str, kv: KVPolicy | None = None, exact: bool = False
    ) -> int:
        """Update all weights from a folder; an adapter is no longer loaded then. Returns the live version. Raises Busy, and as
        `Upstream.refresh`, which has the arguments.

        Args:
            kv: what happens to KV of other weights; None = as the last pause said."""
        upstream, policy = self.upstream, kv or self.kv_policy  # read now: a later pause sets the policy of later updates
        with upstream.changing_weights():
            live = await upstream.refresh(
                lambda wanted: upstream.client.refresh(folder, version=wanted, kv=policy), folder, version, param, exact
            )
            upstream.adapter = None
        return live

    async def sleep(self, level: int, tags: Sequence[str] | None) -> int:
        """Release the memory of weights and KV. Returns the freed bytes. Raises HttpError for `tags`, InvalidRequest."""
        if tags:
            raise not_served("tags", "leave it out: weights and KV sleep together, and may be woken one by one", "tags")
        return await self.upstream.control(lambda: self.upstream.client.sleep(level))

    async def wake(self, tags: Sequence[str] | None) -> None:
        """Wake all parts, or those in `tags`. Raises HttpError, InvalidRequest."""
        unknown = sorted(set(tags or ()) - TAGS.keys())
        if unknown:
            raise bad(f"tags: {unknown[0][:100]!r} must be one of {', '.join(TAGS)}", "tags")
        parts = None if tags is None else tuple(dict.fromkeys(part for tag in tags if (part := TAGS[tag])))
        if parts != ():
            await self.upstream.control(lambda: self.upstream.client.wake(tags=parts))


class VllmControl:
    """Routes of vLLM, and those that no API has here."""

    def __init__(self, control: ServiceControl) -> None:
        self._control = control

    def routes(self, endpoints: Endpoints) -> list[Route]:
        post = endpoints.post
        return [
            post("/pause", self.pause),
            post("/resume", self.resume),
            post("/update_weights", self.update_weights, UpdateWeights),
            post("/abort_requests", self.abort_requests, AbortRequests),
            post("/reset_prefix_cache", self.reset_prefix_cache, ResetPrefixCache),
            post("/sleep", self.sleep),
            post("/wake_up", self.wake_up),
        ]

    async def pause(self, request: Request) -> dict[str, Any]:
        """Pause. mode: keep = running requests stop and continue later; wait = they finish first; abort = they end with their
        tokens so far. clear_cache: the next update recomputes KV."""
        only_parameters(request, "mode", "clear_cache", "wait_for_inflight_requests")
        mode = request.query_params.get("mode", "wait" if flag(request, "wait_for_inflight_requests", False) else "abort")
        if mode not in ("keep", "wait", "abort"):
            raise bad(f"mode={mode!r}: must be keep, wait or abort", "mode")
        await self._control.pause(mode, "recompute" if flag(request, "clear_cache", True) else "keep")
        return {"status": "paused", "mode": mode}

    async def resume(self, request: Request) -> dict[str, Any]:
        """Undo a pause."""
        only_parameters(request)
        await self._control.resume()
        return {"status": "resumed"}

    async def update_weights(self, request: Request, body: UpdateWeights) -> dict[str, Any]:
        """Update the weights from a folder of safetensors."""
        if body.weight_dir is None:
            raise not_served("an update without weight_dir", FILES, "update_info" if body.update_info else "weight_dir")
        version = await self._control.update(body.weight_dir, step_of(body.weight_dir), "weight_dir")
        return {"status": "ok", "weight_version": str(version)}

    async def abort_requests(self, request: Request, body: AbortRequests) -> dict[str, Any]:
        """End requests of this process with their tokens so far: those named, or all."""
        return {"status": "aborted", "aborted": self._control.abort(body.request_ids)}

    async def reset_prefix_cache(self, request: Request, body: ResetPrefixCache) -> dict[str, Any]:
        """Do nothing: KV blocks record their weight version, and those of other versions are not used unless requested."""
        if body.reset_running_requests:
            raise not_served("reset_running_requests", "POST /pause?mode=abort", "reset_running_requests")
        return {"success": True}

    async def sleep(self, request: Request) -> dict[str, Any]:
        """Release the memory of weights and KV. level: 1 = weights to host memory, 2 = weights dropped."""
        only_parameters(request, "level", "mode", "tags")
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise bad(f"level={level!r}: must be 1 (weights to host memory) or 2 (weights dropped)", "level")
        freed = await self._control.sleep(int(level), request.query_params.getlist("tags"))
        return {"status": "sleeping", "freed_bytes": freed}

    async def wake_up(self, request: Request) -> dict[str, Any]:
        """Undo a sleep, or the parts of it in tags: weights, kv_cache."""
        only_parameters(request, "tags")
        await self._control.wake(request.query_params.getlist("tags") or None)
        return {"status": "awake"}


class SGLangControl:
    """Routes of SGLang, as slime and AReaL use them."""

    def __init__(self, control: ServiceControl) -> None:
        self._control = control

    def routes(self, endpoints: Endpoints) -> list[Route]:
        post = endpoints.post
        return [
            post("/update_weights_from_disk", self.update_from_disk, UpdateFromDisk),
            post("/pause_generation", self.pause, PauseRequest),
            post("/continue_generation", self.resume),
            post("/abort_request", self.abort, AbortRequest),
            post("/release_memory_occupation", self.release, MemoryTags),
            post("/resume_memory_occupation", self.take_back, MemoryTags),
        ]

    async def update_from_disk(self, request: Request, body: UpdateFromDisk) -> dict[str, Any]:
        """Update the weights from a folder of safetensors. weight_version: above the live one; null = the next."""
        if body.load_format not in (None, "auto", "safetensors"):
            raise not_served(f"load_format={body.load_format!r}"[:200], "write safetensors", "load_format")
        wanted = None if body.weight_version is None else version_of(body.weight_version)
        kv: KVPolicy = "abort" if body.abort_all_requests else "recompute" if body.flush_cache else "keep"
        live = await self._control.update(body.model_path, wanted, "model_path", kv, exact=True)
        return {"success": True, "message": f"version {live} is live", "num_paused_requests": 0, "weight_version": str(live)}

    async def pause(self, request: Request, body: PauseRequest) -> dict[str, Any]:
        """Pause. mode: abort = all requests end with their tokens so far; in_place, retract = they stop and continue later."""
        if body.mode not in ("abort", "in_place", "retract"):
            raise bad(f"mode={body.mode!r}: must be abort, in_place or retract"[:200], "mode")
        running: Literal["keep", "abort"] = "abort" if body.mode == "abort" else "keep"
        await self._control.pause(running, "keep" if body.mode == "in_place" else "recompute")
        return {"status": "ok", "success": True}

    async def resume(self, request: Request) -> dict[str, Any]:
        """Undo a pause."""
        await self._control.resume()
        return {"status": "ok", "success": True}

    async def abort(self, request: Request, body: AbortRequest) -> dict[str, Any]:
        """End a request of this process with its tokens so far, or all of them (abort_all)."""
        if not body.abort_all and not body.rid:
            raise bad("give rid, or abort_all", "rid")
        return {"success": True, "aborted": self._control.abort(None if body.abort_all else [body.rid or ""])}

    async def release(self, request: Request, body: MemoryTags) -> dict[str, Any]:
        """Release the memory of weights and KV."""
        return {"success": True, "freed_bytes": await self._control.sleep(1, body.tags)}

    async def take_back(self, request: Request, body: MemoryTags) -> dict[str, Any]:
        """Undo a release, or the parts of it in tags: weights, kv_cache."""
        await self._control.wake(body.tags)
        return {"success": True}


def unsupported_routes(endpoints: Endpoints) -> list[Route]:
    """Make the routes that answer 404 with an alternative."""
    return [endpoints.post(path, refusing(path, instead)) for path, instead in UNSUPPORTED.items()]


def refusing(path: str, instead: str) -> Handler:
    """Make the handler of an unsupported route."""

    async def refuse(request: Request) -> Any:
        raise HttpError(404, f"{path} is not supported: {instead}")

    return refuse


def version_of(given: str | int) -> int:
    """Return the version that a request names. Raises HttpError for text that is none."""
    text = str(given)
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise bad(f"weight_version={text[:100]!r}: must be a whole number above the live one, or null", "weight_version")
    return int(text)


def step_of(folder: str) -> int | None:
    """Return the number of a folder named step_N, as prime-rl's are; None for any other."""
    found = STEP.search(PurePath(folder).name)
    return int(found[1]) if found else None
