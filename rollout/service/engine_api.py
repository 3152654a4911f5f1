"""Interface between a service and the engine that it serves: `rollout.engine.engine.Engine`, `rollout.fleet.fleet.Fleet`, and
smaller ones in tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from rollout.engine.values import (
    Group,
    KVPolicy,
    Limits,
    Mode,
    Refreshed,
    Routing,
    Sample,
    Served,
    Tag,
    TensorInfo,
    TokenChunk,
    WeightUpdate,
)
from rollout.transport.weights.ends import LiveTensors, LiveWeights


class ModelInfo(Protocol):
    """The model's part of a Welcome."""

    @property
    def name(self) -> str: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def device(self) -> Any:
        """The torch.device; None if this process has no torch."""
        ...


class StagingLike(Protocol):
    """What the service needs of `rollout.engine.weights.staging.Staging`."""

    version: int
    manifest_digest: str
    total: int
    received: int

    @property
    def complete(self) -> bool: ...

    # `received` may reach `total` before `complete`: a replica or a device is still checking, and `feed` returns 0
    def feed(self, source: Callable[[Any], int]) -> int: ...
    def close(self) -> None: ...


class AdapterBaseLike(Protocol):
    """What the service needs of `rollout.engine.weights.lora.Base`."""

    @property
    def digest(self) -> str: ...


class OwnTensors(LiveTensors, Protocol):
    """The part of `rollout.engine.weights.inventory.Inventory` that exports tensors to another process of this host."""

    def manifest(self) -> list[TensorInfo]: ...


class WeightsLike(LiveWeights, Protocol):
    """What the service needs of `rollout.engine.weights.live.Weights`."""

    before: Served
    """the newest weights before a restart; other weights do not get their version"""

    @property
    def base(self) -> AdapterBaseLike: ...
    @property
    def names(self) -> int: ...
    def live_digest(self) -> str: ...
    def read_live(self) -> Iterator[str | None]: ...


@runtime_checkable
class HasDigests(Protocol):
    """Weights that know the digest of each of their tensors; a router's are in its replicas."""

    def live_manifest(self) -> list[TensorInfo]: ...


@runtime_checkable
class HasTensors(Protocol):
    """Weights whose tensors are in this process; a router's are in its replicas."""

    @property
    def own(self) -> OwnTensors: ...


class EngineLike(Protocol):
    """What the service needs of `engine.Engine`."""

    @property
    def mode(self) -> Mode: ...
    @property
    def model(self) -> ModelInfo: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def arithmetic(self) -> str: ...
    @property
    def configuration(self) -> str: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def routing(self) -> Routing | None: ...
    @property
    def version(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    def submit(self, group: Group, client: str = "") -> None: ...
    def step(self) -> list[Sample]: ...
    def abort(self, group_id: str, index: int | None = None) -> list[Sample]: ...
    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]: ...
    def status(self) -> dict[str, object]: ...
    @property
    def weights(self) -> WeightsLike: ...
    def stage(self, update: WeightUpdate) -> StagingLike:
        """Begin a refresh."""
        ...

    def commit(self, staging: Any, kv: KVPolicy = "keep", via: str = "memory") -> Refreshed | None:
        """Apply staged weights. None: not finished; call again in the next iteration. The weights are applied even without
        another call."""
        ...

    def drain(self) -> bool: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def sleep(self, level: int = 1) -> int: ...
    def wake(self, tags: Collection[Tag] | None = None) -> None: ...


def live_of(engine: EngineLike) -> Served:
    """Return version and digest of the live weights."""
    return Served(engine.version, engine.weights.digest)


@runtime_checkable
class HasReplicas(Protocol):
    """An engine that consists of replicas."""

    def change_replicas(self, action: str, count: int, name: str) -> None:
        """Begin to add, remove or drain replicas (`rollout.transport.messages.Replicas`). Raises ValueError."""
        ...
