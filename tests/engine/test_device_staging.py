"""A refresh that is staged on the device, on host memory that plays one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine import memory as engine_memory  # noqa: E402
from rollout.engine.memory import HostMemory, anonymous  # noqa: E402
from rollout.engine.values import TensorInfo, WeightUpdate  # noqa: E402
from rollout.engine.weights.buffers import RefreshBuffers  # noqa: E402
from rollout.engine.weights.in_place import InPlaceStaging  # noqa: E402
from rollout.engine.weights.in_process import update_from  # noqa: E402
from rollout.engine.weights.live import Weights  # noqa: E402
from rollout.engine.weights.staging import Staging  # noqa: E402
from rollout.engine.weights.tensors import InvalidWeights, describe, flat_bytes, with_digest  # noqa: E402
from tests.support.fake_device import FakeDeviceMemory  # noqa: E402
from tests.support.fake_regions import HostDriver  # noqa: E402
from tests.support.weights import ON_DEVICE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="host memory plays the device: kernels need the interpreter")
SHAPES = {"embed": (70, 40), "norm": (40,), "bias": (3,), "none": (0, 4)}


@pytest.fixture(autouse=True)
def no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_memory, "pinned", anonymous)


def module(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, shape in SHAPES.items():
        made.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
    made.register_parameter("head", made.embed)
    return made


def tensors(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    r = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=r).to(dtype) for name, shape in SHAPES.items()}


def manifest_of(named: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [with_digest(*describe(name, tensor)) for name, tensor in named.items()]


def source_of(named: dict[str, torch.Tensor], piece: int = 1 << 20) -> Callable[[Any], int]:
    """Fills tensors, which a staging in host memory does not hand out."""
    left = torch.cat([flat_bytes(tensor) for tensor in named.values()])

    def read(memory: Any) -> int:
        nonlocal left
        count = min(len(memory), len(left), piece)
        if isinstance(memory, torch.Tensor):
            memory[:count].copy_(left[:count])
        else:
            memory[:count] = left[:count].numpy()
        left = left[count:]
        return count

    return read


def staged(weights: Weights, named: dict[str, torch.Tensor], sent: dict[str, torch.Tensor] | None = None) -> Staging:
    """All of the bytes are handed in; what came of them is not known yet. sent: what is handed in, if it is not `named`."""
    staging = weights.stage(WeightUpdate(manifest_of(named), on_device=True))
    source = source_of(named if sent is None else sent, 1000)
    while staging.received < staging.total:
        assert staging.feed(source)
    return staging


def settled(weights: Weights, memory: FakeDeviceMemory, staging: Staging) -> None:
    assert not staging.feed(lambda _: 0) and not staging.complete, "the device is not done"
    memory.settle()
    staging.feed(lambda _: 0)


def live(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.inventory.tensors.items()}


@pytest.mark.parametrize("driver", [None, HostDriver()], ids=["moving", "staying"])
@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_it_is_the_refresh_that_host_memory_makes(sent: torch.dtype, driver: HostDriver | None) -> None:
    """The same tensors, the same digests, addresses that stay; the room goes back, and no copy was in host memory."""
    memory = FakeDeviceMemory(driver)
    weights, other = Weights(module(), ON_DEVICE, memory=memory), Weights(module())
    before = [tensor.data_ptr() for tensor in weights.inventory.tensors.values()]
    for version in (1, 2):
        named = tensors(version, sent)
        staging = staged(weights, named)
        settled(weights, memory, staging)
        assert staging.complete and len(memory.taken_rooms) == version
        assert weights.version == version - 1 and not torch.equal(live(weights)["embed"], named["embed"].to(torch.bfloat16))
        weights.commit(staging)
        twin = other.stage(WeightUpdate(manifest_of(named)))
        twin.feed_all(source_of(named))
        other.commit(twin)
        assert weights.version == version and weights.digest == other.digest == weights.live_digest()
        assert all(torch.equal(live(weights)[name], tensor.to(torch.bfloat16)) for name, tensor in named.items())
        assert weights._buffers.staged is None and weights._buffers.host is None
    assert [tensor.data_ptr() for tensor in weights.inventory.tensors.values()] == before


def test_a_tied_tensor_under_both_names() -> None:
    memory = FakeDeviceMemory()
    weights, named = Weights(module(), ON_DEVICE, memory=memory), tensors(1)
    staging = staged(weights, {**named, "head": named["embed"]})
    settled(weights, memory, staging)
    weights.commit(staging)
    assert torch.equal(live(weights)["embed"], named["embed"])


def spoiled(named: dict[str, torch.Tensor], name: str, value: float) -> dict[str, torch.Tensor]:
    changed = {**named, name: named[name].clone()}
    changed[name].view(-1)[-1] = value
    return changed


@pytest.mark.parametrize(
    ("sent", "value", "says"),
    [
        (torch.float16, float("nan"), "'norm': it holds NaN or infinity"),
        (torch.float16, float("-inf"), "'norm': it holds NaN or infinity"),
        (torch.float32, float("nan"), "'norm': it holds NaN or infinity"),
        (torch.float32, 70_000.0, "'norm': a value overflows the model's dtype"),
    ],
)
def test_what_is_not_finite_is_refused(sent: torch.dtype, value: float, says: str) -> None:
    memory = FakeDeviceMemory()
    weights = Weights(module(torch.float16), ON_DEVICE, memory=memory)
    staging = staged(weights, spoiled(tensors(1, sent), "norm", value))
    with pytest.raises(InvalidWeights, match=says):
        settled(weights, memory, staging)
    with pytest.raises(InvalidWeights, match="has failed"):
        staging.feed(lambda _: 0)
    staging.close()
    assert not live(weights)["norm"].any() and weights.version == 0 and not weights.staging


@pytest.mark.parametrize("name", ["embed", "bias"])
def test_other_bytes_than_the_manifest_s_are_refused(name: str) -> None:
    """Whether they are hashed on the device or, few as they are, on the host."""
    memory, named = FakeDeviceMemory(), tensors(1)
    weights = Weights(module(), ON_DEVICE, memory=memory)
    staging = staged(weights, named, spoiled(named, name, 0.5))
    with pytest.raises(InvalidWeights, match=f"'{name}': the bytes do not match the manifest's digest"):
        settled(weights, memory, staging)


def test_what_the_trainer_writes_later_does_not_matter() -> None:
    memory, named = FakeDeviceMemory(), tensors(1)
    weights, want = Weights(module(), ON_DEVICE, memory=memory), tensors(1)
    staging = staged(weights, named)
    named["embed"].zero_()
    settled(weights, memory, staging)
    weights.commit(staging)
    assert torch.equal(live(weights)["embed"], want["embed"])


def test_without_room_it_is_staged_in_host_memory() -> None:
    memory = FakeDeviceMemory(rooms=100)
    weights, named = Weights(module(), ON_DEVICE, memory=memory), tensors(1)
    staging = staged(weights, named)
    assert staging.complete and weights._buffers.host is not None and not memory.taken_rooms
    weights.commit(staging)
    assert torch.equal(live(weights)["embed"], named["embed"])


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float32], ids=str)
def test_without_room_a_payload_that_stays_is_written_in_place(sent: torch.dtype) -> None:
    """Nothing of it is kept before the commit; the live tensors stay where they are; the second time as well."""
    memory = FakeDeviceMemory(rooms=100)
    weights, other = Weights(module(), ON_DEVICE, memory=memory), Weights(module())
    before = [tensor.data_ptr() for tensor in weights.inventory.tensors.values()]
    for version in (1, 2):
        named, old = tensors(version, sent), live(weights)
        update, source = update_from(list(named.items()), memory, None, False)
        staging = weights.stage(update)
        assert isinstance(staging, InPlaceStaging) and weights._buffers.host is None
        while staging.received < staging.total:
            assert staging.feed(source)
        settled(weights, memory, staging)
        assert staging.complete and all(torch.equal(old[name], live(weights)[name]) for name in old)
        weights.commit(staging)
        twin = other.stage(WeightUpdate(manifest_of(named)))
        twin.feed_all(source_of(named))
        other.commit(twin)
        assert weights.version == version and not weights.dropped and weights.digest == other.digest == weights.live_digest()
    assert [tensor.data_ptr() for tensor in weights.inventory.tensors.values()] == before and not memory.taken_rooms


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float32], ids=str)
def test_what_has_changed_since_its_check_drops_the_weights(sent: torch.dtype) -> None:
    """The trainer has written a tensor before the refresh was over: nothing runs until all tensors are sent again."""
    memory, named = FakeDeviceMemory(rooms=100), tensors(1, sent)
    weights = Weights(module(), ON_DEVICE, memory=memory)
    update, source = update_from(list(named.items()), memory, None, False)
    staging = weights.stage(update)
    while staging.received < staging.total:
        staging.feed(source)
    settled(weights, memory, staging)
    named["norm"][0] += 1
    with pytest.raises(InvalidWeights, match="'norm': its bytes have changed.*dropped; refresh all tensors again"):
        weights.commit(staging)
    staging.close()
    assert weights.dropped and weights.version == 0 and not weights.staging
    with pytest.raises(InvalidWeights, match="a refresh of all tensors must come first"):
        weights.stage(WeightUpdate(manifest_of(named)[:1], partial=True))
    update, source = update_from(list(named.items()), memory, None, False)
    again = weights.stage(update)
    while again.received < again.total:
        again.feed(source)
    settled(weights, memory, again)
    weights.commit(again)
    assert not weights.dropped and weights.version == 1 and weights.digest == weights.live_digest()


def test_a_payload_that_is_checked_is_refused_as_ever() -> None:
    """Before anything is written: the live weights serve on."""
    memory, named = FakeDeviceMemory(rooms=100), tensors(1)
    weights = Weights(module(), ON_DEVICE, memory=memory)
    update, source = update_from(list(spoiled(named, "norm", float("nan")).items()), memory, None, False)
    staging = weights.stage(update)
    with pytest.raises(InvalidWeights, match="'norm': it holds NaN or infinity"):
        while not staging.complete:
            staging.feed(source)
            memory.settle()
    staging.close()
    assert not weights.dropped and not live(weights)["norm"].any()


def test_tensors_of_the_device_stay_there() -> None:
    """The manifest and the bytes are those that go by way of the host; a source begins again after its end."""
    memory, named = FakeDeviceMemory(), tensors(3, torch.float32)
    named["embed"] = named["embed"].t().contiguous().t()  # in another order than its elements
    update, source = update_from(list(named.items()), memory, 7, True)
    plain, of_host = update_from(list(named.items()), HostMemory(), 7, True)
    assert update.on_device and update.stays and not (plain.on_device or plain.stays)
    assert update.manifest == plain.manifest and (update.version, update.partial) == (plain.version, plain.partial) == (7, True)
    whole = torch.cat([flat_bytes(named[info.name]) for info in plain.manifest])

    def read(one: Callable[[Any], int], buffer: Any) -> torch.Tensor:
        filled = 0
        while filled < len(buffer):
            filled += (count := one(buffer[filled:]))
            assert count
        return torch.as_tensor(buffer)

    assert torch.equal(read(of_host, np.empty(len(whole), np.uint8)), whole)
    assert torch.equal(read(source, torch.empty(2 * len(whole), dtype=torch.uint8)), whole.repeat(2))
    assert torch.equal(read(source, np.empty(len(whole), np.uint8)), whole)


def test_closing_in_the_middle_gives_the_room_back_when_the_device_is_done() -> None:
    memory = FakeDeviceMemory()
    weights = Weights(module(), ON_DEVICE, memory=memory)
    staging, source = weights.stage(WeightUpdate(manifest_of(tensors(1)), on_device=True)), source_of(tensors(1), 1000)
    staging.feed(source)
    stream = staging._stream  # type: ignore[attr-defined]
    done: list[str] = []
    stream.issue(lambda: done.append("copied"))
    memory.streams.compute.synchronize()
    staging.close()
    staging.close()
    assert done == ["copied"] and weights._buffers.staged is None and memory.trims and not weights.staging
    assert not staging._parts
    again = weights.stage(WeightUpdate(manifest_of(tensors(2)), on_device=True))
    memory.settle()
    again.close()


@pytest.mark.parametrize("driver", [None, HostDriver()], ids=["moving", "staying"])
def test_dropped_weights_are_written_where_they_are(driver: HostDriver | None) -> None:
    memory, named = FakeDeviceMemory(driver), tensors(1)
    weights = Weights(module(), ON_DEVICE, memory=memory)
    weights.release_memory(keep=False)
    weights.restore_memory()
    staging = staged(weights, named)
    settled(weights, memory, staging)
    assert not memory.taken_rooms and weights._buffers.host is None
    weights.commit(staging)
    assert weights.live_digest() == weights.digest and torch.equal(live(weights)["embed"], named["embed"])


def test_a_failure_in_the_exchange_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeDeviceMemory()
    weights = Weights(module(), ON_DEVICE, memory=memory)
    staging = staged(weights, tensors(1))
    settled(weights, memory, staging)
    slices = RefreshBuffers.slices

    def failing(self: RefreshBuffers, name: str) -> Any:
        if name == "bias":
            raise RuntimeError("no")
        return slices(self, name)

    monkeypatch.setattr(RefreshBuffers, "slices", failing)
    with pytest.raises(RuntimeError, match="no"):
        weights.commit(staging)
    assert not any(tensor.any() for tensor in live(weights).values()) and weights.version == 0 and not weights.torn
