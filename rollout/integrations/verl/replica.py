"""Ray's part of a replica: one actor that holds a service, made where verl wants it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.device import get_resource_name, get_visible_devices_keyword
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from rollout.integrations.verl.server import VerlOptions, VerlService


def options_of(config: Any) -> VerlOptions:
    """Read `engine_kwargs.rollout`, with verl's own keys where it does not say. Raises ValueError naming what is wrong."""
    said: Mapping[str, Any] = dict(config.engine_kwargs or {}).get("rollout") or {}
    from omegaconf import DictConfig, OmegaConf

    plain = OmegaConf.to_container(said, resolve=True) if isinstance(said, DictConfig) else dict(said)
    assert isinstance(plain, dict)
    replay = bool(getattr(config, "enable_rollout_routing_replay", False))
    engine = {"dtype": config.dtype, "max_num_seqs": config.max_num_seqs, "max_batch_tokens": config.max_num_batched_tokens}
    try:
        return msgspec.convert(
            {"routed_experts": replay, **plain, "engine": {**engine, **plain.get("engine", {})}}, VerlOptions
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"engine_kwargs.rollout: {error}") from None


class Server:
    """The actor. Its methods are those that verl calls; what they mean stands in `VerlService`."""

    def __init__(self, config: Any, model: str, mode: RolloutMode) -> None:
        self._config, self._mode = config, mode
        self._served = VerlService(
            options_of(config), model, config.response_length, config.prompt_length, max_model_len=config.max_model_len
        )

    async def _call(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, partial(function, *args))

    async def get_server_address(self) -> str:
        return self._served.address

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        priority: int = 0,
        **other: Any,
    ) -> TokenOutput:
        """Sample one response. Raises ValueError for images, videos and other inputs that are no token ids."""
        given = {"image_data": image_data, "video_data": video_data, **other}
        if extra := sorted(name for name, value in given.items() if value):
            raise ValueError(f"{', '.join(extra)}: the service takes token ids only")
        ended = await self._served.generate(prompt_ids, sampling_params, request_id, priority)
        wanted = sampling_params.get("logprobs")
        log_probs = ended.log_probs if wanted is not None and wanted is not False else None
        return TokenOutput(
            token_ids=ended.token_ids,
            log_probs=log_probs,
            routed_experts=ended.routed_experts,
            stop_reason=ended.stop_reason,
            extra_fields=ended.extra_fields,
        )

    async def next_version(self, step: int | None) -> tuple[int, str]:
        """Return the version for a push that is to come, and what it does with KV. `step`: the trainer's."""
        version = await self._call(self._served.version) + 1
        self._served.note(version, version if step is None else step)
        return version, self._served.kv

    async def set_global_steps(self, global_steps: int) -> None:
        self._served.note(await self._call(self._served.version), global_steps)

    async def abort_all_requests(self, reject_request: bool = False, **_: Any) -> dict[str, Any]:
        return {"aborted_count": await self._call(self._served.pause, reject_request), "request_ids": []}

    async def resume_generation(self) -> None:
        await self._call(self._served.resume)

    async def abort_request(self, request_id: str, **_: Any) -> dict[str, Any]:
        return {"aborted": self._served.abort(request_id), "request_id": request_id}

    async def wait_for_requests_to_drain(self) -> None:
        """Nothing to wait for: what runs is preempted, keeps its KV, and goes on when it may."""

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self._mode is not RolloutMode.STANDALONE:
            await self._call(self._served.wake, tags)

    async def sleep(self) -> None:
        if self._config.free_cache_engine and self._mode is not RolloutMode.STANDALONE:
            await self._call(self._served.sleep, 2 if self._mode is RolloutMode.HYBRID else 1)

    async def clear_kv_cache(self) -> None:
        """Nothing to do: KV of other weights is never reused by a group that does not allow it."""

    async def release_kv_cache(self) -> None:
        if self._config.free_cache_engine and self._mode is not RolloutMode.COLOCATED:
            await self._call(self._served.sleep, 1)
            await self._call(self._served.wake, ["weights"])

    async def resume_kv_cache(self) -> None:
        if self._config.free_cache_engine and self._mode is not RolloutMode.COLOCATED:
            await self._call(self._served.wake, ["kv_cache"])

    async def start_profile(self, **_: Any) -> None:
        """Not served: profile the service itself, `py-spy` or `rollout top`."""

    async def stop_profile(self) -> None:
        """See `start_profile`."""

    async def close(self) -> None:
        await self._call(self._served.close)


class ServiceReplica(RolloutReplica):  # type: ignore[misc]
    """A replica of verl: one actor with one service."""

    def _name(self) -> str:
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        return f"{self.config.name}_server_{kind}{self.replica_rank}_0{self.name_suffix}"

    async def launch_servers(self) -> None:
        """Start the actor on the node of the first worker. Raises ValueError for replicas of several devices."""
        if self.world_size != 1:
            raise ValueError(
                f"a replica of {self.world_size} devices: set tensor_model_parallel_size, data_parallel_size and "
                "pipeline_model_parallel_size to 1; verl then makes a replica for each device"
            )
        worker = self.workers[0]
        node, devices = await worker.__ray_call__.remote(_place)
        environment = {} if devices is None else {get_visible_devices_keyword(): devices}
        actor = ray.remote(Server).options(
            name=self._name(),
            max_concurrency=self.max_concurrency,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": {**environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
        )
        path = getattr(self.model_config, "local_path", None) or self.model_config.path
        self.servers = [actor.remote(self.config, path, self.rollout_mode)]
        self._server_handle = self.servers[0]
        self._server_address = await self._server_handle.get_server_address.remote()


def _place(worker: Any) -> tuple[str, str | None]:
    """Return the node of a worker, and the devices that Ray gave it."""
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(get_resource_name(), [])
    return context.get_node_id(), ",".join(devices) or None
