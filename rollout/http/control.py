"""vLLM's routes for status and control: pause, weights from a folder, sleep. Unsupported routes name an alternative.

Weights come as a folder of safetensors that the service can read (prime-rl). The service stages them next to the live ones and
swaps them between two steps, so a pause during an update is allowed but not needed.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from rollout.engine.types import KVPolicy, Tag
from rollout.http.endpoints import Endpoints, Handler, flag, only_parameters
from rollout.http.errors import bad, not_served
from rollout.http.generation import GenerationService
from rollout.http.upstream import Upstream

TAGS: dict[str, Tag | None] = {"weights": "weights", "kv_cache": "kv", "kv": "kv", "cuda_graph": None}
"""parts that wake one by one; CUDA graphs wake with the weights"""
STEP = re.compile(r"step_(\d{1,18})$")
FILES = 'write the weights as a folder of safetensors and POST /update_weights {"weight_dir": …}, or use rollout.client.refresh'
UNSUPPORTED = {
    "/init_weight_transfer_engine": FILES,
    "/start_weight_update": FILES,
    "/finish_weight_update": FILES,
    "/init_broadcaster": FILES,
    "/collective_rpc": FILES,
    "/fetch_weights": FILES,
    "/receive_weight_update": FILES,
    "/scale_elastic_ep": "start another service",
    "/v1/embeddings": "this service samples text only",
    "/pooling": "this service samples text only",
    "/v1/responses": "POST /v1/chat/completions",
}
"""routes of vLLM, and the alternative"""


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


class ControlRoutes:
    """The routes, over one `GenerationService`."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation, self._upstream = generation, generation.upstream

    def public(self, endpoints: Endpoints) -> list[Route]:
        """Make the routes that change nothing, those shared with SGLang included."""
        get = endpoints.get
        return [
            get("/health", self.health),
            get("/health_generate", self.health),
            get("/liveness", self.liveness),
            get("/is_paused", self.is_paused),
            get("/is_sleeping", self.is_sleeping),
            get("/get_world_size", self.world_size),
            get("/weight_info", self.weight_info),
            get("/get_weight_version", self.weight_info),
            get("/version", self.version),
            get("/server_info", self.server_info),
            get("/get_server_info", self.server_info),
        ]

    def admin(self, endpoints: Endpoints) -> list[Route]:
        """Make the routes that control the service."""
        post = endpoints.post
        return [
            post("/pause", self.pause),
            post("/resume", self.resume),
            post("/update_weights", self.update_weights, UpdateWeights),
            post("/abort_requests", self.abort_requests, AbortRequests),
            post("/reset_prefix_cache", self.reset_prefix_cache, ResetPrefixCache),
            post("/sleep", self.sleep),
            post("/wake_up", self.wake_up),
            *(post(path, refusing(path, instead)) for path, instead in UNSUPPORTED.items()),
        ]

    async def health(self, request: Request) -> dict[str, Any]:
        await self._upstream.status()
        return {"status": "ok"}

    async def liveness(self, request: Request) -> dict[str, Any]:
        return {"status": "ok"}

    async def is_paused(self, request: Request) -> dict[str, Any]:
        state = (await self._upstream.status()).get("state", "running")
        return {"is_paused": state in ("paused", "draining")}

    async def is_sleeping(self, request: Request) -> dict[str, Any]:
        return {"is_sleeping": (await self._upstream.status()).get("state") == "asleep"}

    async def world_size(self, request: Request) -> dict[str, Any]:
        return {"world_size": 1}

    async def weight_info(self, request: Request) -> dict[str, Any]:
        await self._upstream.status()
        return {"weight_version": str(self._upstream.version)}

    async def version(self, request: Request) -> dict[str, Any]:
        from rollout import __version__

        return {"version": f"rollout {__version__}"}

    async def server_info(self, request: Request) -> dict[str, Any]:
        """Return the fields of vLLM (`vllm_config`) and of SGLang (all others). Reports a single engine, regardless of the
        number of replicas."""
        status, info = await self._upstream.status(), self._upstream.info
        model = {
            "model": info.model,
            "dtype": f"torch.{status.get('dtype', 'float32')}",
            "logprobs_mode": "processed_logprobs",
            "max_model_len": info.context,
        }
        config = {
            "model_config": model,
            "weight_transfer_config": None,
            "lora_config": None,
            "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        }
        sizes = {"tp_size": 1, "pp_size": 1, "ep_size": 1, "dp_size": 1, "num_gpus": 1, "nnodes": 1}
        modes = {"disaggregation_mode": "null", "enable_memory_saver": False}
        more = {"model_path": info.model, "context_length": info.context, "weight_version": str(self._upstream.version)}
        return {"vllm_config": config, **sizes, **modes, **more, "arithmetic": info.arithmetic, "limits": info.limits}

    async def pause(self, request: Request) -> dict[str, Any]:
        """Pause. mode: keep = running requests stop and continue later; wait = they finish first; abort = they end with their
        tokens so far. clear_cache: the next update recomputes KV."""
        only_parameters(request, "mode", "clear_cache", "wait_for_inflight_requests")
        mode = request.query_params.get("mode", "wait" if flag(request, "wait_for_inflight_requests", False) else "abort")
        if mode not in ("keep", "wait", "abort"):
            raise bad(f"mode={mode!r}: must be keep, wait or abort", "mode")
        kv: KVPolicy = "recompute" if flag(request, "clear_cache", True) else "keep"
        client = self._upstream.client
        await self._upstream.control(client.drain if mode == "wait" else client.pause)
        if mode == "abort":
            await self._upstream.control(client.abort_all)
        self._upstream.kv_policy = kv
        return {"status": "paused", "mode": mode}

    async def resume(self, request: Request) -> dict[str, Any]:
        only_parameters(request)
        await self._upstream.control(self._upstream.client.resume)
        return {"status": "resumed"}

    async def update_weights(self, request: Request, body: UpdateWeights) -> dict[str, Any]:
        if body.weight_dir is None:
            raise not_served("an update without weight_dir", FILES, "update_info" if body.update_info else "weight_dir")
        kv = self._upstream.kv_policy  # read now: a later pause sets the policy of later updates
        version = await load_folder(self._upstream, body.weight_dir, step_of(body.weight_dir), kv, "weight_dir")
        return {"status": "ok", "weight_version": str(version)}

    async def abort_requests(self, request: Request, body: AbortRequests) -> dict[str, Any]:
        return {"status": "aborted", "aborted": self._generation.abort(body.request_ids)}

    async def reset_prefix_cache(self, request: Request, body: ResetPrefixCache) -> dict[str, Any]:
        """Do nothing: KV blocks record their weight version, and those of other versions are not used unless requested."""
        if body.reset_running_requests:
            raise not_served("reset_running_requests", "POST /pause?mode=abort", "reset_running_requests")
        return {"success": True}

    async def sleep(self, request: Request) -> dict[str, Any]:
        only_parameters(request, "level", "mode", "tags")
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise bad(f"level={level!r}: must be 1 (weights to host memory) or 2 (weights dropped)", "level")
        if request.query_params.get("tags"):
            raise not_served("tags", "leave it out: weights and KV sleep together, and may be woken one by one", "tags")
        freed = await self._upstream.control(lambda: self._upstream.client.sleep(int(level)))
        return {"status": "sleeping", "freed_bytes": freed}

    async def wake_up(self, request: Request) -> dict[str, Any]:
        only_parameters(request, "tags")
        await wake(self._upstream, request.query_params.getlist("tags") or None)
        return {"status": "awake"}


def step_of(folder: str) -> int | None:
    """Return the number of a folder named step_N, as prime-rl's are; None for any other."""
    found = STEP.search(PurePath(folder).name)
    return int(found[1]) if found else None


async def load_folder(upstream: Upstream, folder: str, version: int | None, kv: KVPolicy, param: str) -> int:
    """Update all weights from a folder; an adapter is no longer loaded then. Returns the live version. Raises Busy, and as
    `Upstream.refresh`, which has the arguments.

    Args:
        kv: what happens to KV of other weights."""
    with upstream.changing_weights():
        live = await upstream.refresh(
            lambda wanted: upstream.client.refresh(folder, version=wanted, kv=kv), folder, version, param
        )
        upstream.adapter = None
    return live


async def wake(upstream: Upstream, tags: list[str] | None) -> None:
    """Wake all parts, or those in `tags`. Raises HttpError, InvalidRequest."""
    unknown = sorted(set(tags or ()) - TAGS.keys())
    if unknown:
        raise bad(f"tags: {unknown[0][:100]!r} must be one of {', '.join(TAGS)}", "tags")
    parts = None if tags is None else tuple(dict.fromkeys(part for tag in tags if (part := TAGS[tag])))
    if parts != ():
        await upstream.control(lambda: upstream.client.wake(tags=parts))


def refusing(path: str, instead: str) -> Handler:
    """Make the handler of an unsupported route."""

    async def refuse(request: Request) -> Any:
        raise not_served(path, instead)

    return refuse
