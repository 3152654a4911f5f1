"""The trainer's end: in each rank of verl's workers, one of these for the replica that the rank belongs to."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout

from rollout.client.api import RolloutClient


class ServiceAdapter(BaseRollout):  # type: ignore[misc]
    """Pushes the weights of verl's trainer to the service of its replica, and lets that sleep and wake."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None
        self._client: RolloutClient | None = None

    @property
    def server(self) -> Any:
        """The replica's actor; it is made after the workers."""
        if self._server is None:
            self._server = ray.get_actor(f"{self.config.name}_server_{self.replica_rank}_0")
        return self._server

    async def resume(self, tags: list[str]) -> None:
        if self.config.free_cache_engine:
            await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self.config.free_cache_engine:
            await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Push all tensors as one transaction; returns when they are live.

        weights: (name, tensor) pairs of any device. Each is copied to host memory as it comes, since verl's trainers make one
        full tensor at a time and reuse its memory.

        Raises ValueError for wire formats and adapters that are not served, WeightsRefused naming the tensor."""
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format={wire_format!r}: the service takes named_tensors; choose another checkpoint engine")
        if peft_config is not None:
            raise ValueError("an adapter without its base: set actor_rollout_ref.model.lora.merge=True")
        named = [(name, tensor.detach().to("cpu", copy=True)) async for name, tensor in each(weights)]
        if self._client is None:
            address = await self.server.get_server_address.remote()
            self._client = RolloutClient(address, name=f"verl trainer {self.replica_rank}")
        version, kv = await self.server.next_version.remote(global_steps)
        self._client.refresh(named, version=version, kv=kv)


async def each(weights: Any) -> Any:
    """Yield the pairs of an iterable, asynchronous or not."""
    if hasattr(weights, "__aiter__"):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair
