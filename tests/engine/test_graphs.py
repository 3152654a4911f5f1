"""Decode that is captured and replayed, on a stand-in for CUDA graphs, which repeats a forward on the addresses it was captured
with and refuses if one of them has moved. tests/gpu has real ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.equivalence import same

pytest.importorskip("triton", reason="Triton is not installed")

from engine.cuda import tiles  # noqa: E402
from engine.cuda.graphs import DecodeGraphs, Run, sizes  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.memory import anonymous  # noqa: E402
from engine.types import Sample  # noqa: E402
from tests.support.fake_device import FakeDeviceMemory  # noqa: E402
from tests.support.fake_regions import HostDriver  # noqa: E402
from tests.support.tiny import plain_logprobs, tiny, tiny_engine  # noqa: E402
from tests.support.toy import group, run  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "num_hidden_layers": 1}


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """And no trial or comparison at each start, which takes as long as a test here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CHUNK_TOKENS", 8)
        patch.setattr("engine.engine.try_out", lambda *_: None)
        patch.setattr("engine.engine.judge", lambda *_: None)
        yield


class Captured:
    """`Capture` without a GPU. `result`: what a replay makes of the forward."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.captures = self.replays = 0

    def addresses(self) -> list[int]:
        module, attention = self.engine.model.module, self.engine.backend
        tensors = [*module.parameters(), self.engine.kv.data, attention._arrays, attention.partial, attention.sums]
        return [tensor.data_ptr() for tensor in tensors]

    def __call__(self, forward: Run) -> Run:
        self.captures += 1
        captured = self.addresses()

        def replay() -> torch.Tensor:
            self.replays += 1
            assert self.addresses() == captured, "a graph was replayed on memory that has moved"
            return self.result(forward)

        return replay

    def result(self, forward: Run) -> torch.Tensor:
        return forward()


class Frozen(Captured):
    """The negative control: a replay that does not see new inputs."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.first: torch.Tensor | None = None

    def result(self, forward: Run) -> torch.Tensor:
        if self.first is None:
            self.first = forward()
        return self.first


def small_engine(capture: type[Captured] | None) -> tuple[Engine, Captured | None]:
    options = {"attention": "triton", "kv_tokens": 512, "max_num_seqs": 24, "cuda_graphs": False, "device": DEVICE}
    engine = tiny_engine(model=tiny("llama", torch.float32, **SMALL), **options)  # type: ignore[arg-type]
    if capture is None:
        return engine, None
    stub = capture(engine)
    engine.steps.graphs = DecodeGraphs(engine.model.forward, 24, engine.model.device, lambda: stub)
    return engine, stub


def some(engine: Engine, tag: str = "") -> dict[tuple[str, int], Sample]:
    return run(
        engine, [group(f"a{tag}", [5, 6, 7] * 3, n=3, max_tokens=4), group(f"b{tag}", [9] * 5, n=1, max_tokens=3, seed=7)]
    )


def wide(engine: Engine) -> dict[tuple[str, int], Sample]:
    return run(engine, [group("wide", [5, 6, 7], n=20, max_tokens=3, ignore_eos=True)])


@pytest.fixture(scope="module")
def eager(small_chunks: None) -> Engine:
    """Without graphs, for what it makes of `some` and `wide`; who changes it takes one of their own."""
    return small_engine(None)[0]


@pytest.fixture(scope="module")
def wanted(eager: Engine) -> dict[tuple[str, int], Sample]:
    return some(eager)


def test_sizes() -> None:
    for largest in (1, 2, 3, 16, 24, 100, 256, 300):
        made = sizes(largest)
        assert made == sorted(set(made)) and made[-1] == largest
    assert len(sizes(256)) < 20


def test_replayed_steps_make_the_same_samples_and_follow_refresh_and_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, _ = small_engine(None)
    monkeypatch.setattr("engine.memory.pinned", anonymous)
    monkeypatch.setattr("engine.devices.HostMemory", lambda: FakeDeviceMemory(HostDriver()))
    graphed, stub = small_engine(Captured)
    assert stub is not None
    want = some(eager)
    sample = want["a", 0]
    prompt = np.array([5, 6, 7] * 3, np.int32)
    np.testing.assert_allclose(
        sample.logprobs,
        plain_logprobs(tiny("llama", torch.float32, **SMALL), prompt, sample),
        atol=1e-5 if DEVICE == "cpu" else 1e-4,
    )
    assert same(want, some(graphed))
    assert stub.captures == 1 and stub.replays >= 2
    new = {name: tensor * 1.5 for name, tensor in graphed.model.module.state_dict().items()}
    for engine in (eager, graphed):
        engine.refresh(new)
    changed = some(eager, "2")
    assert same(changed, some(graphed, "2"))
    assert not same(want, dict(zip(want, changed.values(), strict=True)))
    assert stub.captures == 1, "a refresh in place keeps the graphs"
    for engine in (eager, graphed):
        engine.sleep(1)
        engine.wake()
    assert same(some(eager, "3"), some(graphed, "3"))
    assert stub.captures == 1 and graphed.weights.stays, "addresses stay over a sleep, and so do they"


def test_graphs_of_all_sizes_leave_their_logits_in_one_place() -> None:
    engine, stub = small_engine(Captured)
    assert stub is not None and engine.graphs is not None
    places = set()
    replayed = stub.result

    def noted(forward: Run) -> torch.Tensor:
        logits = replayed(forward)
        places.add(logits.data_ptr())
        return logits

    stub.result = noted  # type: ignore[method-assign]
    some(engine)
    wide(engine)
    assert stub.captures > 1 and len(places) == 1


def test_a_replay_that_does_not_see_its_inputs_is_seen(wanted: dict[tuple[str, int], Sample]) -> None:
    frozen, _ = small_engine(Frozen)
    assert not same(wanted, some(frozen))


class Refusing(Captured):
    def __call__(self, forward: Run) -> Run:
        self.captures += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_forward_that_cannot_be_captured_runs_without_graphs(wanted: dict[tuple[str, int], Sample]) -> None:
    refused, stub = small_engine(Refusing)
    assert stub is not None
    assert same(wanted, some(refused)) and stub.captures == 1


class Full(Captured):
    def __call__(self, forward: Run) -> Run:
        if self.captures == self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(forward)

    room = 0
    """graphs that find memory"""


@pytest.mark.parametrize("room", [pytest.param(0, marks=pytest.mark.long), 1])
def test_without_memory_for_a_graph_smaller_steps_keep_theirs(
    room: int, eager: Engine, wanted: dict[tuple[str, int], Sample]
) -> None:
    """A pool of memory whose only graph has failed is not used again."""
    full, stub = small_engine(Full)
    assert isinstance(stub, Full) and full.graphs is not None
    pools: list[Full] = []
    full.graphs._new_capture = lambda: pools.append(stub) or stub  # type: ignore[func-returns-value]
    stub.room = room
    assert same(wanted, some(full))
    assert same(wide(eager), wide(full)) and stub.captures == room
    assert len(pools) == 1 - room and all(size < 24 for size in full.graphs._sizes)
