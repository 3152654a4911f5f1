"""What the service needs of an engine; `engine.engine.Engine` is one, tests have smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from engine.types import Adapter, Group, KVPolicy, Limits, Mode, Refreshed, Sample, Served, Tag, TensorInfo, TokenChunk
from transport.weights.ends import LiveTensors, LiveWeights


class ModelInfo(Protocol):
    """What Welcome tells of the model."""

    @property
    def name(self) -> str: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def device(self) -> Any:
        """torch.device; None: an engine without torch."""
        ...


class StagingLike(Protocol):
    """What the service needs of `engine.weights.staging.Staging`."""

    version: int
    manifest_digest: str
    total: int
    received: int

    @property
    def complete(self) -> bool: ...

    # `received` may reach `total` before `complete`: others are still checking, and `feed` returns 0
    def feed(self, source: Callable[[Any], int]) -> int: ...
    def close(self) -> None: ...


class AdapterBaseLike(Protocol):
    """What the service needs of `engine.weights.lora.Base`."""

    @property
    def digest(self) -> str: ...


class OwnTensors(LiveTensors, Protocol):
    """What another process of the host can be given of `engine.weights.inventory.Inventory`."""

    def manifest(self) -> list[TensorInfo]: ...


class WeightsLike(LiveWeights, Protocol):
    """What the service needs of `engine.weights.live.Weights`."""

    before: Served
    """the newest that were served before a restart: their version is given to no others"""

    @property
    def base(self) -> AdapterBaseLike: ...
    @property
    def own(self) -> OwnTensors | None:
        """What this process serves from; None: a front, whose replicas do."""
        ...

    @property
    def names(self) -> int: ...
    def live_digest(self) -> str: ...
    def read_live(self) -> Iterator[str | None]: ...


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
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int: ...
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
    def stage(
        self,
        manifest: Sequence[TensorInfo],
        *,
        version: int | None = None,
        partial: bool = False,
        adapter: Adapter | None = None,
    ) -> StagingLike:
        """Begin a refresh. An engine whose model has a device also takes `on_device`: the source fills tensors there."""
        ...

    def commit(self, staging: Any, kv: KVPolicy = "keep", via: str = "memory") -> Refreshed | None:
        """Apply what is staged. None: it is under way, ask again in the next turn; it is applied even if nobody does."""
        ...

    def drain(self) -> bool: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def sleep(self, level: int = 1) -> int: ...
    def wake(self, tags: Collection[Tag] | None = None) -> None: ...


def live_of(engine: EngineLike) -> Served:
    """Return the weights that are live."""
    return Served(engine.version, engine.weights.digest)


@runtime_checkable
class HasReplicas(Protocol):
    """An engine that is many."""

    def change_replicas(self, action: str, count: int, name: str) -> None:
        """Begin to change them, as `transport.messages.Replicas` says. Raises ValueError."""
        ...
