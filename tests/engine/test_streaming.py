"""Weight offload: the same numbers with it, whatever happens in between, and copies that wait for what they must wait for."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from rollout.engine.config import AdvancedConfig, EngineConfig, WeightOffload
from rollout.engine.cuda.memory import CudaMemory
from rollout.engine.engine import Engine
from rollout.engine.forward.load import load_model
from rollout.engine.memory import HostMemory, own_tensors, side_by_side
from rollout.engine.values import Sample
from rollout.engine.weights.live import Weights, WeightsTorn
from rollout.engine.weights.offload import OffloadedModel, SlotRing
from tests.support.broken_commit import PLACES, fail_commit
from tests.support.equivalence import same
from tests.support.fake_cuda import FakeCuda, FakeEvent, FakeStream
from tests.support.naps import groups, run_with_naps
from tests.support.nightly import Draw
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import group, run

CPU = torch.device("cpu")
LAYERS = 7
Samples = dict[tuple[str, int], Sample]

OFFLOADS = [
    (1, 1, 1),  # all layers, one slot
    (1, 1, 3),  # all; 7 layers in 3 slots, so that two have one alone
    (2, 1, 1),
    (2, 1, 2),  # layers 1, 3, 5; slot 1 is one layer's alone
    (3, 2, 3),  # 1, 2, 4, 5 in 3 slots
    (4, 2, 1),  # 2, 3; the last group is not whole
    (2, 1, 9),  # more slots than layers
    (7, 7, 2),
]
SOME = [(1, 1, 3), (2, 1, 1)]
"""layers that take turns in a slot, and others that have one alone"""
every = pytest.mark.parametrize(
    "offload", [pytest.param(each, marks=() if each in SOME else pytest.mark.long) for each in OFFLOADS], ids=str
)
some = pytest.mark.parametrize("offload", [*SOME, pytest.param((2, 1, 9), marks=pytest.mark.long)], ids=str)


def settings(offload: tuple[int, int, int], part: Literal["layer", "mlp"] = "layer") -> WeightOffload:
    return WeightOffload(group_size=offload[0], num_in_group=offload[1], prefetch_step=offload[2], part=part)


def an_engine(
    offload: tuple[int, int, int] | None = None,
    name: str = "llama",
    part: Literal["layer", "mlp"] = "layer",
    **options: Any,
) -> Engine:
    module = tiny(name, getattr(torch, options.get("dtype", "float32")), num_hidden_layers=LAYERS)
    return tiny_engine(name, model=module, weight_offload=None if offload is None else settings(offload, part), **options)


@pytest.fixture(scope="module")
def plain() -> Samples:
    """What `groups` become without offload."""
    return run(an_engine(), groups())


@pytest.fixture(scope="module")
def probed() -> list[Samples]:
    """What `probe` becomes without offload, of the weights of version 0 and of `new_weights(1)` and `new_weights(2)`."""
    engine = an_engine()
    samples = [run(engine, probe())]
    for seed in (1, 2):
        engine.refresh(new_weights(seed))
        samples.append(run(engine, probe()))
    return samples


def streamed_of(engine: Engine) -> OffloadedModel:
    return engine.model.streamed  # type: ignore[attr-defined,no-any-return]


def new_weights(seed: int = 1, name: str = "llama") -> dict[str, torch.Tensor]:
    return dict(tiny(name, seed=seed, num_hidden_layers=LAYERS).named_parameters())


def probe() -> list[Any]:
    """A group whose samples tell which weights are live."""
    return [group("probe", range(3, 40), n=2, max_tokens=6, ignore_eos=True)]


# ── the same numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@every
def test_samples_do_not_notice(offload: tuple[int, int, int], plain: Samples) -> None:
    assert same(run(an_engine(offload), groups()), plain)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("llama-mha", "float32"), ("qwen3_moe", "bfloat16")])
def test_other_models(name: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    """Llamas run natively without offload; tied embeddings, which are in no decoder layer, stay tied; experts move along."""
    with caplog.at_level("INFO", "rollout.engine"):
        engine = an_engine((2, 1, 2), name, dtype=dtype)
    assert "weight_offload streams them" in caplog.text
    assert same(run(engine, probe()), run(an_engine(None, name, dtype=dtype), probe()))


def test_a_copy_that_is_left_out_shows(plain: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the two tests above."""
    copy, count = OffloadedModel._copy, iter(range(10_000))
    monkeypatch.setattr(OffloadedModel, "_copy", lambda self, k: copy(self, k) if next(count) % 50 < 49 else None)
    assert not same(run(an_engine((2, 1, 1)), groups()), plain)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_mlps_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same samples, before and after a refresh, with the MLPs (or experts) of some layers offloaded, and all else where it
    was. A copy that is left out shows."""
    engine, plain = an_engine((2, 1, 2), name, "mlp"), an_engine(None, name)
    layers = engine.model.module.model.layers  # type: ignore[attr-defined]
    streamed, slots = streamed_of(engine), streamed_of(engine)._slots.untyped_storage().data_ptr()
    moved = {path for path, p in layers.named_parameters() if p.untyped_storage().data_ptr() == slots}
    assert moved and moved == {
        path for path, _ in layers.named_parameters() if path.split(".")[:2] in [[i, "mlp"] for i in "135"]
    }
    assert streamed.offloaded_bytes == 3 * side_by_side(layers[1].mlp.parameters())[1]
    for weights in ({}, new_weights(name=name)):
        for each in (engine, plain) if weights else ():
            each.refresh(weights)
        assert same(run(engine, probe()), run(plain, probe()))
    copy = streamed.ring._copy
    monkeypatch.setattr(streamed.ring, "_copy", lambda k: copy(k) if k != 2 else None)
    streamed._slots.zero_()
    streamed.ring.fill()
    assert not same(run(engine, probe()), run(plain, probe()))


@every
def test_layers_are_copied_ahead_and_no_more_than_needed(
    offload: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = an_engine(offload)
    streamed = streamed_of(engine)
    count, slots = len(streamed.indices), streamed.ring.slots
    assert slots == min(offload[2], count)
    order: list[tuple[str, int]] = []
    before, copy = SlotRing.before, streamed.ring._copy
    monkeypatch.setattr(SlotRing, "before", lambda ring, k: (order.append(("layer", k)), before(ring, k))[1])
    monkeypatch.setattr(streamed.ring, "_copy", lambda k: (order.append(("copy", k)), copy(k))[1])
    run(engine, probe())
    forwards = engine.counters.steps
    copied = [k for what, k in order if what == "copy"]
    alone = [k for k in range(count) if k < slots and k + slots >= count]
    assert len(copied) == forwards * (count - len(alone)) and not set(copied) & set(alone)
    want: list[tuple[str, int]] = []
    for k in range(count):
        following = k + slots if k + slots < count else k % slots
        want += [("layer", k), ("copy", following)] if following != k else [("layer", k)]
    assert order == want * forwards, "each copy is issued when its slot falls free, none when its layer is wanted"


def test_a_forward_that_breaks_off(probed: list[Samples]) -> None:
    """The next one finds its layers all the same."""
    engine = an_engine((1, 1, 3))
    layer = engine.model.module.model.layers[4]  # type: ignore[attr-defined]
    forward = layer.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        layer.forward = forward
        raise RuntimeError("injected")

    layer.forward = broken
    assert {sample.finish_reason for sample in run(engine, probe()).values()} == {"error"}
    assert streamed_of(engine).ring._holds != [0, 1, 2], "otherwise this shows nothing"
    assert same(run(engine, probe()), probed[0])


def test_compiled_parts_of_layers(probed: list[Samples]) -> None:
    """With a backend that changes nothing, so that the bits are the same."""
    engine = an_engine((2, 1, 2))
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    for layer in engine.model.module.model.layers:  # type: ignore[attr-defined]
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend=backend)
    try:
        assert same(run(engine, probe()), probed[0]) and graphs
        engine.refresh(new_weights())
        assert same(run(engine, probe()), probed[1])
    finally:
        torch._dynamo.reset()


# ── refresh ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@some
def test_a_refresh_reaches_masters_and_slots(offload: tuple[int, int, int]) -> None:
    """Whole and in part, before the first forward and between forwards, and the addresses are what they were."""
    engine, plain = an_engine(offload), an_engine()
    module, streamed = engine.model.module, streamed_of(engine)  # type: ignore[attr-defined]
    addresses = [tensor.data_ptr() for tensor in (*module.parameters(), *streamed.masters.values())]
    layer = {name: tensor for name, tensor in new_weights(3).items() if ".layers.3." in name}
    for version, new in enumerate([new_weights(1), new_weights(2), layer, {}], 1):
        if new:
            for each in (engine, plain):
                each.refresh(new, partial=len(new) < 20)
            assert engine.version == version
        assert engine.weights.digest == engine.weights.live_digest() == plain.weights.digest
        assert same(run(engine, probe()), run(plain, probe()))
    assert addresses == [tensor.data_ptr() for tensor in (*module.parameters(), *streamed.masters.values())]


def test_a_refresh_waits_for_the_device_and_fills_the_slots_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the streams below rely on: no byte of a master is written before `settle`, all are before `fill`."""
    engine = an_engine((2, 1, 2))
    weights, seen = engine.weights, []
    for name in ("settle", "fill"):
        monkeypatch.setattr(streamed_of(engine).ring, name, lambda name=name: seen.append((name, weights.live_digest())))
    before = weights.live_digest()
    engine.refresh(new_weights())
    assert seen == [("settle", before), ("fill", weights.live_digest())] and weights.live_digest() != before
    monkeypatch.setattr(streamed_of(engine).ring, "settle", lambda: seen.append(("slots", streamed_of(engine)._slots.nbytes)))
    engine.sleep()
    assert seen[2][0] == "slots" and seen[2][1] > 0, "and sleep waits before it takes the slots away"


def test_slots_that_a_refresh_forgets_show(probed: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    engine = an_engine((2, 1, 2))
    monkeypatch.setattr(Weights, "_fill_slots", lambda self: None)
    engine.refresh(new_weights())
    assert not same(run(engine, probe()), probed[1])


@pytest.mark.parametrize("offload", [(1, 1, 3), pytest.param((2, 1, 2), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("k", [pytest.param(13, marks=pytest.mark.long), 64])
def test_a_refresh_that_fails_leaves_all_as_it_was(
    offload: tuple[int, int, int], where: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = an_engine(offload)
    digest = engine.weights.digest
    slots = streamed_of(engine)._slots.clone()
    fail_commit(monkeypatch, k, where)
    with pytest.raises(MemoryError, match="injected"):
        engine.refresh(new_weights())
    assert engine.version == 0 and engine.weights.live_digest() == digest
    assert torch.equal(streamed_of(engine)._slots, slots)
    engine.refresh(new_weights())
    assert engine.weights.live_digest() == engine.weights.digest != digest


def fail_copies(engine: Engine, failing: set[int]) -> None:
    """Of the copies into slots from now on."""
    ring, count = streamed_of(engine).ring, iter(range(10_000))
    copy = ring._copy

    def broken(k: int) -> None:
        if next(count) in failing:
            raise MemoryError("injected")
        copy(k)

    ring._copy = broken


def test_slots_that_cannot_be_filled_undo_the_refresh(probed: list[Samples]) -> None:
    """The first slot holds the new layer already when the second copy fails."""
    engine = an_engine((1, 1, 3))
    digest = engine.weights.digest
    fail_copies(engine, {1})
    with pytest.raises(MemoryError, match="injected"):
        engine.refresh(new_weights())
    assert engine.version == 0 and engine.weights.live_digest() == digest
    assert same(run(engine, probe()), probed[0])


def test_slots_that_undo_forgets_show(probed: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above: the slots are filled only once."""
    engine = an_engine((1, 1, 3))
    fill, count = Weights._fill_slots, iter(range(100))
    monkeypatch.setattr(Weights, "_fill_slots", lambda self: fill(self) if next(count) == 0 else None)
    fail_copies(engine, {1})
    with pytest.raises(MemoryError, match="injected"):
        engine.refresh(new_weights())
    assert not same(run(engine, probe()), probed[0])


def test_slots_that_cannot_be_filled_at_all() -> None:
    engine = an_engine((2, 1, 2))
    fail_copies(engine, set(range(100)))
    with pytest.raises(WeightsTorn):
        engine.refresh(new_weights())
    with pytest.raises(WeightsTorn):
        engine.step()


# ── sleep ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@some
def test_sleep_in_the_middle(offload: tuple[int, int, int], plain: Samples) -> None:
    engine = an_engine(offload, max_batch_tokens=64, cpu_offload_gib=0.01)
    assert same(run_with_naps(engine, {0, 2, 9, 25}), plain)


@pytest.mark.parametrize("level", [1, 2])
def test_memory_that_sleep_gives_back(level: int, probed: list[Samples]) -> None:
    engine = an_engine((2, 1, 2))
    streamed, module = streamed_of(engine), engine.model.module  # type: ignore[attr-defined]
    run(engine, probe())
    before, digest = engine.status()["weights"]["resident_bytes"], engine.weights.digest
    slots = streamed._slots.nbytes
    engine.sleep(level)
    assert all(not p.numel() for layer in streamed.indices for p in module.model.layers[layer].parameters())
    assert engine.status()["weights"]["resident_bytes"] == (before - slots if level == 1 else 0)
    masters = sum(layer.buffer.nbytes for layer in streamed._layers)
    assert masters == (streamed.offloaded_bytes if level == 1 else 0)
    assert engine.weights.digest == digest
    engine.wake()
    assert engine.status()["weights"]["resident_bytes"] == before
    assert masters in (0, engine.status()["weights"]["offloaded_bytes"])
    if level == 1:
        assert engine.weights.live_digest() == digest
        assert same(run(engine, probe()), probed[0])
    else:
        assert not engine.has_work and engine.status()["state"] == "without weights"
    engine.refresh(new_weights())
    assert same(run(engine, probe()), probed[1])
    assert engine.weights.live_digest() == engine.weights.digest
    engine.refresh(new_weights(2))  # the next one is an ordinary one
    assert same(run(engine, probe()), probed[2])


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@every
def test_bytes_of_the_status(offload: tuple[int, int, int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "rollout.engine"):
        engine = an_engine(offload)
    module, streamed = tiny("llama", num_hidden_layers=LAYERS), streamed_of(engine)
    whole = sum(parameter.nbytes for parameter in module.parameters())
    layer = sum(parameter.nbytes for parameter in module.model.layers[0].parameters())
    count, slots = len(streamed.indices), min(offload[2], len(streamed.indices))
    status = engine.status()["weights"]
    assert status["offloaded_bytes"] == count * layer
    assert whole - count * layer + slots * layer == status["resident_bytes"]
    assert f"layers={streamed.indices} " in caplog.text
    assert f"device_mib_before={whole / 2**20:.1f} device_mib={status['resident_bytes'] / 2**20:.1f}" in caplog.text
    assert "lower prefetch_step" in caplog.text if slots == count else "nothing on the CPU" in caplog.text
    plain = an_engine().status()["weights"]
    assert (plain["resident_bytes"], plain["offloaded_bytes"]) == (whole, 0)


def test_layers_that_stay_all_the_same_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the assertion: what stays keeps one buffer alive, in which the offloaded layers lie as well."""
    module = tiny("llama", num_hidden_layers=LAYERS)
    own_tensors(module.parameters())
    monkeypatch.setattr(HostMemory, "own", lambda self, parameters: None)
    with pytest.raises(AssertionError, match="left memory on the device"):
        OffloadedModel(module, "x", settings((2, 1, 1)), HostMemory())


def test_an_engine_loads_a_model_so(tmp_path: Any) -> None:
    tiny("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    options: dict[str, Any] = {"model": str(tmp_path), "dtype": "float32", "kv_tokens": 2048, "cpu_offload_gib": 0}
    engine = Engine(EngineConfig(**options, weight_offload=settings((2, 1, 1))))
    assert same(run(engine, probe()), run(Engine(EngineConfig(**options)), probe()))
    weights = engine.status()["weights"]
    loaded = load_model(str(tmp_path), torch.float32, HostMemory())
    slot = weights["offloaded_bytes"] // 2
    assert weights["resident_bytes"] == side_by_side(loaded.parameters())[1] - slot


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tied_layers_are_refused() -> None:
    module = tiny("llama", num_hidden_layers=4)
    module.model.layers[3].mlp.up_proj.weight = module.model.layers[0].mlp.up_proj.weight
    before = [parameter.data_ptr() for parameter in module.parameters()]
    with pytest.raises(ValueError, match=r"some/model: .*layers\.3\.mlp.* is tied to .*layers\.0.*stays on the device"):
        OffloadedModel(module, "some/model", settings((2, 1, 1)), HostMemory())
    assert before == [parameter.data_ptr() for parameter in module.parameters()], "the module is as it was"
    assert OffloadedModel(module, "some/model", settings((3, 1, 1)), HostMemory()).indices == [2], "the fix works"


class Toy(nn.Module):
    """A model of layers that call `compute`, and of other lists."""

    def __init__(self, layers: int, compute: Callable[[int, torch.Tensor], None] = lambda i, weight: None) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=layers))
        self.layers = nn.ModuleList(ToyLayer(i, layers, compute) for i in range(layers))

    def forward(self) -> None:
        for layer in self.layers:
            layer()


class ToyLayer(nn.Module):
    def __init__(self, i: int, layers: int, compute: Callable[[int, torch.Tensor], None]) -> None:
        super().__init__()
        self.i, self.compute = i, compute
        self.weight = nn.Parameter(torch.full((32,), float(i)), requires_grad=False)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))  # as many as layers, but inside of them

    def forward(self) -> None:
        self.compute(self.i, self.weight)


def test_layers_without_an_mlp_are_refused() -> None:
    module = Toy(4)
    with pytest.raises(ValueError, match=r'toy: weight_offload.part="mlp" finds no module mlp, .*set part="layer"'):
        OffloadedModel(module, "toy", settings((2, 1, 1), "mlp"), HostMemory())
    for i, layer in enumerate(module.layers):
        layer.feed_forward = nn.Linear(3 + i, 3)  # type: ignore[assignment]
    assert OffloadedModel(module, "toy", settings((2, 1, 1), "mlp"), HostMemory()).offloaded_bytes == 64 * (1 + 1 + 2 + 1)


def test_layers_that_cannot_be_found_are_refused() -> None:
    assert OffloadedModel(Toy(4), "toy", settings((2, 1, 1)), HostMemory()).indices == [1, 3]
    two = Toy(4)
    two.others = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    none = Toy(4)
    del none.layers
    for module, found in ((two, 2), (none, 0)):
        with pytest.raises(ValueError, match=rf"some/model \(Toy\): weight_offload finds {found} lists of 4 decoder layers"):
            OffloadedModel(module, "some/model", settings((2, 1, 1)), HostMemory())


def test_groups_larger_than_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"some/model: weight_offload\.group_size=5 is more than its 4 layers"):
        OffloadedModel(Toy(4), "some/model", settings((5, 1, 1)), HostMemory())
    assert OffloadedModel(Toy(4), "x", settings((5, 2, 1)), HostMemory()).indices == [3]


def test_a_model_given_without_it_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_offload: llama was given without it"):
        Engine(EngineConfig(dtype="float32", kv_tokens=64, weight_offload=WeightOffload()), an_engine().model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 0}, "group_size=0: must be at least 1; leave weight_offload out"),
        ({"num_in_group": 0}, "num_in_group=0"),
        ({"prefetch_step": 0}, "prefetch_step=0"),
        ({"group_size": 2, "num_in_group": 3}, "num_in_group=3: must be at most group_size=2"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightOffload(**fields)


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Cuda(FakeCuda):
    """Streams whose work runs in any order that their events allow, and graphs of it."""

    device = torch.device("cuda")

    def synchronize(self, device: torch.device) -> None:
        self.work(100_000)

    def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
        """torch.cuda.graph around a forward: returns its replay. Raises RuntimeError for what CUDA refuses."""
        compute, copies = self.streams[:2]
        before = compute.queue, copies.queue
        compute.queue, copies.queue = [], []
        forward()
        graph = compute.queue, copies.queue
        compute.queue, copies.queue = before
        recorded = {work.__self__ for part in graph for _, work in part if getattr(work, "__name__", "") == "_happen"}  # type: ignore[attr-defined]
        waited = [event for part in graph for event, _ in part if event is not None]
        if not recorded.issuperset(waited):
            raise RuntimeError("work inside the capture waits for work outside of it")
        if graph[1] and getattr(graph[1][-1][1], "__self__", None) not in {event for event, _ in graph[0]}:
            raise RuntimeError("a stream that the capture forked has not joined")

        def reset() -> None:
            for event in recorded:
                event.happened = False

        def replay() -> None:
            branch, start = self.Stream(self.device), FakeEvent()  # a graph's branches are no streams of the program
            compute.issue(reset)
            start.record(compute)
            branch.wait_event(start)
            branch.queue += graph[1]
            compute.queue += graph[0]

        return replay


class Deferred(OffloadedModel):
    """Copies are work of the stream that is current, half a layer at a time."""

    def _copy(self, k: int) -> None:
        layer, slot, cuda = self._layers[k], self._slots[k % self.ring.slots], self.ring._cuda
        half = layer.size // 2
        cuda.current.issue(lambda: slot[:half].copy_(layer.buffer[:half]))
        cuda.current.issue(lambda: slot[half : layer.size].copy_(layer.buffer[half:]))


def device_runs(seed: int, graphs: bool = False, join: str = "each") -> int:
    """Forwards, refreshes and, with `graphs`, replays, issued by the host and run at the device's own pace: every layer
    computes with its own weights of the version that was live when it was issued. Returns how often a copy could run while the
    compute was busy.

    `join`: "each" where it belongs; or all but "before capture", "inside" or "before replay"."""
    r = random.Random(seed)
    cuda = Cuda(r)
    expected: list[float] = []
    seen: list[float] = []
    beside = version = 0

    def compute(i: int, weight: torch.Tensor) -> None:
        cuda.current.issue(lambda: seen.append(weight[0].item() if (weight == weight[0]).all() else -1))

    count = r.choice([3, 5, 8])
    module = Toy(count, compute)
    for layer in module.layers:  # a step of the device's between two layers of the host
        layer.register_forward_hook(lambda *_: None if capturing else cuda.work(r.randrange(5)))
    capturing, replay = False, None
    streamed = Deferred(
        module, "toy", settings(r.choice([(1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 1), (3, 2, 2)])), HostMemory(), cuda
    )
    for _ in range(12):
        what = r.choice(["forward", "forward", "refresh", "capture", "replay", "replay"][: None if graphs else 3])
        if what == "refresh":
            version += 1
            streamed.ring.settle()
            for layer, parameter in enumerate(layer.weight for layer in module.layers):
                streamed.masters.get(id(parameter), parameter).data.fill_(100.0 * version + layer)
            streamed.ring.fill()
        elif what == "capture" and replay is None:
            if join != "before capture":
                streamed.ring.join()
            capturing = True
            replay = cuda.capture(lambda: (module(), join != "inside" and streamed.ring.join()))  # type: ignore[func-returns-value]
            capturing = False
        elif what == "replay" and replay is not None:
            if join != "before replay":
                streamed.ring.join()
            replay()
            expected += [100.0 * version + i for i in range(count)]
        elif what == "forward":
            expected += [100.0 * version + i for i in range(count)]
            module()
        cuda.work(r.randrange(12))
        beside += bool(cuda.compute.queue and any(stream.ready() for stream in cuda.streams[1:]))
    cuda.synchronize(CPU)
    assert seen == expected
    return beside


def test_every_layer_computes_with_its_own_weights() -> None:
    assert sum(device_runs(seed) for seed in range(40)) > 5, "copies never run beside the compute"


def test_graphs_and_forwards_take_turns() -> None:
    for seed in range(40):
        device_runs(seed, graphs=True)


@pytest.mark.long
def test_more_forwards_and_graphs(new_seeds: Draw) -> None:
    for seed in new_seeds(400):
        device_runs(seed)
        device_runs(seed, graphs=True)


def goes_wrong(seeds: int = 100, **options: Any) -> bool:
    def wrong(seed: int) -> bool:
        try:
            device_runs(seed, **options)
        except AssertionError as error:
            assert "wait for each other" not in str(error)
            return True
        return False

    return any(wrong(seed) for seed in range(seeds))


@pytest.mark.parametrize("forgotten", ["the copy for the layer", "the layer for the copy", "the refresh for both"])
def test_a_forgotten_wait_is_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls of the streams."""
    wait = FakeStream.wait_event
    if forgotten == "the copy for the layer":
        monkeypatch.setattr(FakeStream, "wait_stream", lambda self, other: None)
    elif forgotten == "the layer for the copy":
        monkeypatch.setattr(FakeStream, "wait_stream", lambda self, other: wait(self, other.record_event()))
        monkeypatch.setattr(FakeStream, "wait_event", lambda self, event: None)
    else:
        monkeypatch.setattr(SlotRing, "settle", lambda self: None)
    assert goes_wrong()


def test_a_forgotten_join_is_seen() -> None:
    """The negative controls of the graphs."""
    assert goes_wrong(graphs=True, join="before replay")
    with pytest.raises(RuntimeError, match="waits for work outside"):
        goes_wrong(graphs=True, join="before capture")
    with pytest.raises(RuntimeError, match="has not joined"):
        goes_wrong(graphs=True, join="inside")


# ── a real device ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Linears(nn.Module):
    """[rows, 1024] float32 through layers of 4 MiB."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=layers))
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(layers)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.gpu
@torch.inference_mode()
def test_forwards_and_graphs_on_cuda() -> None:
    device = torch.device("cuda")
    module, other, x = Linears(7), Linears(7).to(device), torch.randn(64, 1024, device=device)
    other.load_state_dict(module.state_dict())
    streamed = OffloadedModel(module, "linears", settings((1, 1, 3)), CudaMemory(device))
    assert all(torch.equal(module(x), other(x)) for _ in range(20))
    streamed.ring.join()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
        streamed.ring.join()
    for version in range(10):
        streamed.ring.settle()
        for layer, theirs in zip(streamed._layers, other.layers, strict=True):
            for master, twin in zip(layer.masters, theirs.parameters(), strict=True):
                master.data.normal_(std=0.05, generator=torch.Generator().manual_seed(version))
                twin.copy_(master)
        streamed.ring.fill()
        for _ in range(3):
            assert torch.equal(module(x), other(x))
            streamed.ring.join()
            graph.replay()
            graph.replay()
            assert torch.equal(y, other(x))


@pytest.mark.gpu
def test_an_engine_on_cuda(tmp_path: Any) -> None:
    tiny("llama", num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    options: dict[str, Any] = {
        "model": str(tmp_path),
        "dtype": "float32",
        "kv_tokens": 2048,
        "cpu_offload_gib": 0,
        "device": "cuda",
        "drafts": 0,  # whose steps have other sizes
        "advanced": AdvancedConfig(fused_layers=False),  # which layers that move are not
    }
    engine, plain = Engine(EngineConfig(**options, weight_offload=settings((1, 1, 3)))), Engine(EngineConfig(**options))
    for level in (0, 1, 2):
        if level:
            engine.sleep(level)
            engine.wake()
        if level != 1:
            for each in (engine, plain):
                each.refresh(new_weights(level + 1))
        assert same(run(engine, probe()), run(plain, probe()))
        assert engine.weights.live_digest() == engine.weights.digest == plain.weights.digest
