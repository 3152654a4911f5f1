"""Addresses that stay over a sleep, on the host's virtual memory in place of a device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollout.engine import memory as engine_memory
from rollout.engine.cuda import regions
from rollout.engine.cuda.regions import MappedRegion
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import anonymous
from rollout.engine.weights.live import Weights
from tests.support.fake_device import FakeDeviceMemory, eager_memory
from tests.support.fake_regions import HostDriver
from tests.support.tiny import tiny_engine
from tests.support.toy import group, run
from tests.support.weights import ON_DEVICE


@pytest.fixture(autouse=True)
def no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_memory, "pinned", anonymous)


def test_memory_goes_and_comes_back_at_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.cuda.regions.PIECE_BYTES", 3 << 16)
    driver = HostDriver()
    region = MappedRegion(driver, 1_000_001)
    assert len(region.data) == 1_000_001 and region.mapped == 3 << 16 and driver.reserved == 16 << 16
    region.need(500_000)
    assert region.mapped == 9 << 16
    region.need(10)
    region.data[:500_000] = 7
    address = region.data.data_ptr()
    region.release()
    assert region.mapped == 0 and not driver.mapped and driver.settled == 1
    region.restore()
    assert region.mapped == 9 << 16 and region.data.data_ptr() == address
    assert not region.data[:500_000].any(), "other memory, as it comes"
    view = region.data[7:9]
    del region
    assert driver.mapped, "something may still read it"
    del view
    assert not driver.mapped and not driver.reserved


def test_a_driver_that_does_not_keep_its_word_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may report virtual memory and refuse to map it, or map other memory at each access."""

    class Refuses(HostDriver):
        def map(self, address: int, size: int) -> int:
            raise RuntimeError("cuMemSetAccess: CUDA error 801 on cuda:0")

    class Forgets(HostDriver):
        def tensor(self, address: int, size: int, on_end: Callable[[], None]) -> torch.Tensor:
            return super().tensor(address, size, on_end)[:-1]

    device = torch.device("cuda", 0)
    for driver, usable in ((HostDriver(), True), (Refuses(), False), (HostDriver(limit=0), False), (Forgets(), False)):
        monkeypatch.setattr(regions, "CudaDriver", lambda index, driver=driver: driver)
        assert (regions.open_driver(device) is driver) is usable
        assert not driver.mapped and not driver.reserved


def test_no_memory_to_wake_into_leaves_it_asleep() -> None:
    driver = HostDriver()
    region = MappedRegion(driver, 1 << 20)
    region.need(1 << 20)
    region.release()
    driver.limit = 1 << 16
    with pytest.raises(torch.OutOfMemoryError):
        region.restore()
    assert not driver.mapped
    driver.limit = 1 << 30
    region.restore()
    region.data.zero_()


def stacked() -> torch.nn.Module:
    """q and k are views of one storage, the norm is in the middle of another, the head is tied to the embedding."""
    made = torch.nn.Module()
    both = torch.arange(120, dtype=torch.float32).view(12, 10)
    views = {
        "q": both[:8], "embed": torch.full((50, 10), 2.0), "k": both[8:], "norm": torch.arange(30, dtype=torch.float32)[7:17],
    }  # fmt: skip
    for name, tensor in views.items():
        made.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    made.register_parameter("head", made.embed)
    return made


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
def test_weights_stay_where_they_are(keep: bool) -> None:
    module, driver = stacked(), HostDriver()
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    weights = Weights(module, ON_DEVICE, memory=FakeDeviceMemory(driver))
    addresses = [tensor.data_ptr() for tensor in module.parameters()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.named_parameters())
    assert module.k.data_ptr() == module.q.data_ptr() + module.q.nbytes, "still one product"
    digest, resident = weights.digest, weights.resident_bytes
    for _ in range(3):
        assert weights.stays and resident > 0
        weights.release_memory(keep)
        assert not driver.mapped and weights.resident_bytes == 0 and weights.digest == digest
        with pytest.raises(ValueError, match="asleep"):
            weights.read_live()
        weights.restore_memory()
        assert [tensor.data_ptr() for tensor in module.parameters()] == addresses and weights.resident_bytes == resident
        for name, tensor in module.named_parameters():
            assert torch.equal(tensor, before[name] if keep else torch.zeros_like(tensor))
    assert weights.dropped == (not keep)


def test_twenty_naps_take_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer in host memory for all of them, which a refresh stages in as well; device, host and addresses are flat."""
    taken: list[int] = []

    def pinned(size: int, *_: Any) -> Any:
        taken.append(size)
        return anonymous(size)

    monkeypatch.setattr(engine_memory, "pinned", pinned)
    driver = HostDriver()
    memory = FakeDeviceMemory(driver)
    weights = Weights(stacked(), ON_DEVICE, memory=memory)
    kv = PagedKV(KVGeometry(2, 2, 8, torch.float32), PoolSizes(4, 8, 0), memory)
    address, awake = kv.data.data_ptr(), sum(driver.mapped.values())
    for _ in range(20):
        kv.data.fill_(3)
        weights.release_memory(keep=True)
        kv.release()
        assert not driver.mapped and kv.stays
        weights.restore_memory()
        kv.restore()
        assert kv.data.data_ptr() == address and not kv.data.any() and sum(driver.mapped.values()) == awake
    assert len(taken) == 1


@pytest.mark.parametrize("driver", [HostDriver(), None], ids=["staying", "moving"])
def test_an_engine_forgets_its_graphs_where_memory_moves(driver: HostDriver | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only there; samples go on over a nap either way."""
    monkeypatch.setattr("rollout.engine.cpu.device.HostMemory", lambda: eager_memory(driver))
    made, plain = (tiny_engine(attention="reference", cpu_offload_gib=0.01) for _ in range(2))
    forgotten: list[str] = []

    class Graphs:
        def covers(self, batch: Any) -> bool:
            return False

        def forget(self) -> None:
            forgotten.append("all")

    made.worker.graphs = Graphs()
    for engine in (made, plain):
        engine.submit(group("g", range(5, 40), n=4, max_tokens=12, ignore_eos=True))
    for _ in range(5):
        made.step()
    made.sleep(1)
    made.wake()
    assert bool(forgotten) == (driver is None)
    napped, straight = run(made), run(plain)
    assert napped.keys() == straight.keys()
    assert all(napped[key].token_ids.tolist() == straight[key].token_ids.tolist() for key in straight)


def test_without_regions_a_nap_moves_weights() -> None:
    """The negative control."""
    module = stacked()
    weights = Weights(module, ON_DEVICE, memory=FakeDeviceMemory())
    weights.release_memory(keep=True)
    kept = [torch.empty(500) for _ in range(4)]  # takes the place
    weights.restore_memory()
    assert not weights.stays and len(kept) == 4
    kv = PagedKV(KVGeometry(2, 2, 8, torch.float32), PoolSizes(4, 8, 0), FakeDeviceMemory())
    assert not kv.stays
