"""Routes that report on the service and change nothing, for all APIs."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from rollout.http.endpoints import Endpoints, only_parameters
from rollout.http.generation import GenerationService


class StatusRoutes:
    """The routes, over one `GenerationService`.

    Args:
        url: of this gateway, which reports itself as a router with one worker.
    """

    def __init__(self, generation: GenerationService, url: str) -> None:
        self._name, self._upstream, self._url = generation.models[0], generation.upstream, url

    def routes(self, endpoints: Endpoints) -> list[Route]:
        get, post = endpoints.get, endpoints.post
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
            get("/model_info", self.model_info),
            get("/get_model_info", self.model_info),
            get("/v1/loads", self.loads),
            get("/workers", self.workers),
            get("/flush_cache", self.flush_cache),
            post("/flush_cache", self.flush_cache),
        ]

    async def health(self, request: Request) -> dict[str, Any]:
        """Answer 200 if the service does, else 503."""
        await self._upstream.status()
        return {"status": "ok"}

    async def liveness(self, request: Request) -> dict[str, Any]:
        """Answer 200 if this process does."""
        return {"status": "ok"}

    async def is_paused(self, request: Request) -> dict[str, Any]:
        """Tell whether the service is paused or draining."""
        state = (await self._upstream.status()).get("state", "running")
        return {"is_paused": state in ("paused", "draining")}

    async def is_sleeping(self, request: Request) -> dict[str, Any]:
        """Tell whether weights and KV are asleep."""
        return {"is_sleeping": (await self._upstream.status()).get("state") == "asleep"}

    async def world_size(self, request: Request) -> dict[str, Any]:
        """Report one process, regardless of the number of devices."""
        return {"world_size": 1}

    async def weight_info(self, request: Request) -> dict[str, Any]:
        """Report the live weight version."""
        await self._upstream.status()
        return {"weight_version": str(self._upstream.version)}

    async def version(self, request: Request) -> dict[str, Any]:
        """Report the version of this program."""
        from rollout import __version__

        return {"version": f"rollout {__version__}"}

    async def server_info(self, request: Request) -> dict[str, Any]:
        """Report model and limits with the fields of vLLM (`vllm_config`) and SGLang (all others), as a single engine."""
        status, info = await self._upstream.status(), self._upstream.info
        model = {
            "model": self._name,
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
        more = {"model_path": self._name, "context_length": info.context, "weight_version": str(self._upstream.version)}
        return {"vllm_config": config, **sizes, **modes, **more, "arithmetic": info.arithmetic, "limits": info.limits}

    async def model_info(self, request: Request) -> dict[str, Any]:
        """Report the model's name and the live weight version."""
        await self._upstream.status()
        version = str(self._upstream.version)
        return {"model_path": self._name, "tokenizer_path": self._name, "is_generation": True, "weight_version": version}

    async def loads(self, request: Request) -> dict[str, Any]:
        """Report the numbers of running and waiting requests."""
        only_parameters(request, "include", "dp_rank")
        status = await self._upstream.status()
        running, waiting = int(status.get("running", 0)), int(status.get("waiting", 0))
        total = running + waiting
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}
        sums = {"num_reqs": total, "num_total_reqs": total}
        aggregate = {"total_reqs": total, "total_running_reqs": running, "total_waiting_reqs": waiting}
        return {"loads": [load | sums], "aggregate": aggregate, **sums}

    async def workers(self, request: Request) -> dict[str, Any]:
        """List the workers of a router: this gateway."""
        worker = {"id": "0", "url": self._url, "worker_type": "regular", "is_healthy": True}
        return {"workers": [worker], "total": 1, "urls": [self._url]}

    async def flush_cache(self, request: Request) -> dict[str, Any]:
        """Do nothing: KV blocks record their weight version, and those of other versions are not used unless requested."""
        return {"success": True}
