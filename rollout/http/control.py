"""vLLM's control plane: pause, weights from a folder, sleep; what others ask for and is not here says what to use.

Weights travel as a folder of safetensors that the service sees (prime-rl). They are staged beside the live ones and exchanged
between two steps, so a pause around them is allowed and not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.types import KVPolicy, Refreshed, Tag
from rollout.http.answers import json
from rollout.http.app import BodyReader, Handler, Route, flag, only_parameters
from rollout.http.errors import bad, not_served
from rollout.http.upstream import Upstream

TAGS: dict[str, Tag | None] = {"weights": "weights", "kv_cache": "kv", "kv": "kv", "cuda_graph": None}
"""parts that sleep and wake on their own; graphs come with the rest"""
STEP = re.compile(r"step_(\d{1,18})$")
FILES = 'write the weights as a folder of safetensors and POST /update_weights {"weight_dir": …}, or use rollout.client.refresh'
ELSEWHERE = {
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
"""paths that clients of this dialect know, and what to use instead"""


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /update_weights."""

    weight_dir: str | None = None
    update_info: Any = None
    """of a transfer over NCCL, which is not here"""


class AbortRequests(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /abort_requests."""

    request_ids: list[str] | None = None


class ResetPrefixCache(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /reset_prefix_cache."""

    reset_running_requests: bool = False
    reset_external: bool = False
    device: str | None = None


class ControlRoutes:
    """The routes, over one `Upstream`."""

    def __init__(self, upstream: Upstream, bodies: BodyReader) -> None:
        self.upstream, self.bodies = upstream, bodies
        self._update = msgspec.json.Decoder(UpdateWeights)
        self._abort = msgspec.json.Decoder(AbortRequests)
        self._reset = msgspec.json.Decoder(ResetPrefixCache)

    def looks(self) -> list[Route]:
        """Routes that change nothing."""
        return [
            Route("GET", "/health", self.health),
            Route("GET", "/liveness", self.liveness),
            Route("GET", "/is_paused", self.is_paused),
            Route("GET", "/is_sleeping", self.is_sleeping),
            Route("GET", "/get_world_size", self.world_size),
            Route("GET", "/weight_info", self.weight_info),
            Route("GET", "/version", self.version),
            Route("GET", "/server_info", self.server_info),
            Route("GET", "/get_server_info", self.server_info),
        ]

    def routes(self) -> list[Route]:
        """Routes of administrators."""
        return [
            Route("POST", "/pause", self.pause),
            Route("POST", "/resume", self.resume),
            Route("POST", "/update_weights", self.update_weights),
            Route("POST", "/abort_requests", self.abort_requests),
            Route("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            Route("POST", "/sleep", self.sleep),
            Route("POST", "/wake_up", self.wake_up),
            *(Route("POST", path, refusing(path, instead)) for path, instead in ELSEWHERE.items()),
        ]

    async def health(self, request: Request) -> Response:
        await self.upstream.status()
        return json({"status": "ok"})

    async def liveness(self, request: Request) -> Response:
        return json({"status": "ok"})

    async def is_paused(self, request: Request) -> Response:
        state = (await self.upstream.status()).get("state", "running")
        return json({"is_paused": state in ("paused", "draining")})

    async def is_sleeping(self, request: Request) -> Response:
        return json({"is_sleeping": (await self.upstream.status()).get("state") == "asleep"})

    async def world_size(self, request: Request) -> Response:
        return json({"world_size": 1})

    async def weight_info(self, request: Request) -> Response:
        await self.upstream.status()
        return json({"weight_version": str(self.upstream.version)})

    async def version(self, request: Request) -> Response:
        from rollout import __version__

        return json({"version": f"rollout {__version__}"})

    async def server_info(self, request: Request) -> Response:
        """Say what vLLM (`vllm_config`) and SGLang (all else) do of a server. To whoever asks this is one engine, whatever lies
        behind it."""
        status, info = await self.upstream.status(), self.upstream.info
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
        more = {"model_path": info.model, "context_length": info.context, "weight_version": str(self.upstream.version)}
        return json({"vllm_config": config, **sizes, **modes, **more, "arithmetic": info.arithmetic, "limits": info.limits})

    async def pause(self, request: Request) -> Response:
        """mode=keep: what runs stops and goes on later. wait: it runs to its end first. abort: it ends with what it has.
        clear_cache: whether the next refresh has KV computed again."""
        only_parameters(request, "mode", "clear_cache", "wait_for_inflight_requests")
        mode = request.query_params.get("mode", "wait" if flag(request, "wait_for_inflight_requests", False) else "abort")
        if mode not in ("keep", "wait", "abort"):
            raise bad(f"mode={mode!r}: must be keep, wait or abort", "mode")
        kv: KVPolicy = "recompute" if flag(request, "clear_cache", True) else "keep"
        client = self.upstream.client
        await self.upstream.control(client.drain if mode == "wait" else client.pause)
        if mode == "abort":
            await self.upstream.control(client.abort_all)
        self.upstream.kv = kv
        return json({"status": "paused", "mode": mode})

    async def resume(self, request: Request) -> Response:
        only_parameters(request)
        await self.upstream.control(self.upstream.client.resume)
        return json({"status": "resumed"})

    async def update_weights(self, request: Request) -> Response:
        asked = await self.bodies.decode(request, self._update)
        if asked.weight_dir is None:
            raise not_served("an update without weight_dir", FILES, "update_info" if asked.update_info else "weight_dir")
        kv = self.upstream.kv  # as it is now: a pause that comes later is for later weights
        version = await load_folder(self.upstream, asked.weight_dir, step_of(asked.weight_dir), kv, "weight_dir")
        return json({"status": "ok", "weight_version": str(version)})

    async def abort_requests(self, request: Request) -> Response:
        asked = await self.bodies.decode(request, self._abort)
        ids = asked.request_ids
        aborted = self.upstream.abort_own() if ids is None else self.upstream.abort(ids)
        return json({"status": "aborted", "aborted": aborted})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Do nothing: KV knows which weights made it, and none of others is used without being asked for."""
        asked = await self.bodies.decode(request, self._reset)
        if asked.reset_running_requests:
            raise not_served("reset_running_requests", "POST /pause?mode=abort", "reset_running_requests")
        return json({"success": True})

    async def sleep(self, request: Request) -> Response:
        only_parameters(request, "level", "mode", "tags")
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise bad(f"level={level!r}: must be 1 (weights to host memory) or 2 (weights dropped)", "level")
        if request.query_params.get("tags"):
            raise not_served("tags", "leave it out: weights and KV go together, and may come back apart", "tags")
        freed = await self.upstream.control(lambda: self.upstream.client.sleep(int(level)))
        return json({"status": "sleeping", "freed_bytes": freed})

    async def wake_up(self, request: Request) -> Response:
        only_parameters(request, "tags")
        await wake(self.upstream, request.query_params.getlist("tags") or None)
        return json({"status": "awake"})


def step_of(folder: str) -> int | None:
    """Return the number of a folder called step_N, as prime-rl's are; None for others."""
    found = STEP.search(PurePath(folder).name)
    return int(found[1]) if found else None


async def load_folder(upstream: Upstream, folder: str, version: int | None, kv: KVPolicy, param: str) -> int:
    """Refresh the service's weights from a folder that both see.

    Args:
        version: taken if it is above the live one, else the next.
        kv: what becomes of the KV of other weights.
        param: the field that names the folder.

    Returns the version that is live. Raises HttpError, and the typed errors of `RolloutClient.refresh`."""
    client = upstream.client
    with upstream.changing_weights():
        wanted = await version_above(upstream, version)
        refreshed = await from_folder(upstream, folder, lambda: client.refresh(folder, version=wanted, kv=kv), param)
        upstream.adapter = None  # these are whole weights
    return refreshed.version


async def from_folder(upstream: Upstream, folder: str, refresh: Callable[[], Refreshed], param: str) -> Refreshed:
    """Run a refresh from a folder. Raises HttpError for a path that is none, and what the refresh does."""
    if not folder or "\0" in folder:
        raise bad(f"{param} is empty, or no path", param)
    try:
        refreshed = await upstream.control(refresh)
    except OSError as error:
        raise bad(f"{param}: {error.strerror or error}", param) from None
    upstream.saw(refreshed.version)
    return refreshed


async def version_above(upstream: Upstream, version: int | None) -> int | None:
    """Return the version for the next weights: the one that was asked for, if it is above the live one, else None, the next."""
    live = int((await upstream.status())["version"])
    return version if version is not None and version > live else None


async def wake(upstream: Upstream, tags: list[str] | None) -> None:
    """Wake all, or the parts that the dialects call weights and kv_cache. Raises HttpError, InvalidRequest."""
    unknown = sorted(set(tags or ()) - TAGS.keys())
    if unknown:
        raise bad(f"tags: {unknown[0][:100]!r} must be one of {', '.join(TAGS)}", "tags")
    parts = None if tags is None else tuple(dict.fromkeys(part for tag in tags if (part := TAGS[tag])))
    if parts != ():
        await upstream.control(lambda: upstream.client.wake(tags=parts))


def refusing(path: str, instead: str) -> Handler:
    """Make the handler of a path that is not served."""

    async def refuse(request: Request) -> Response:
        raise not_served(path, instead)

    return refuse
