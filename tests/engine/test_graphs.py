"""Decode that is captured and replayed, on a stand-in for CUDA graphs, which repeats a forward on the addresses it was captured
with and refuses if one of them has moved. tests/gpu has real ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support.captured import Captured, largest
from tests.support.equivalence import same

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.config import EngineConfig  # noqa: E402
from rollout.engine.cuda import tiles  # noqa: E402
from rollout.engine.cuda.graphs import FEW_LOGITS, MOST_TOKENS, Run, StepGraphs, mixed_sizes, sizes  # noqa: E402
from rollout.engine.engine import Engine  # noqa: E402
from rollout.engine.forward.batch import padded  # noqa: E402
from rollout.engine.memory import HostMemory, anonymous  # noqa: E402
from rollout.engine.values import Sample  # noqa: E402
from rollout.engine.worker import ModelKernels, Worker  # noqa: E402
from tests.support.fake_device import eager_memory  # noqa: E402
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
        patch.setattr("rollout.engine.forward.self_check.try_out", lambda *_: None)
        patch.setattr("rollout.engine.forward.self_check.check_model", lambda *_: None)
        yield


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
    engine.worker.graphs = StepGraphs(engine.model.forward, largest(24, 32), engine.model.device, lambda: stub)
    return engine, stub


def some(engine: Engine, tag: str = "") -> dict[tuple[str, int], Sample]:
    return run(
        engine, [group(f"a{tag}", [5, 6, 7] * 3, n=3, max_tokens=3), group(f"b{tag}", [9] * 5, n=1, max_tokens=2, seed=7)]
    )


def wide(engine: Engine) -> dict[tuple[str, int], Sample]:
    return run(engine, [group("wide", [5, 6, 7], n=17, max_tokens=2, ignore_eos=True)])


@pytest.fixture(scope="module")
def eager(small_chunks: None) -> Engine:
    """Without graphs, for what it makes of `some` and `wide`; who changes it takes one of their own."""
    return small_engine(None)[0]


@pytest.fixture(scope="module")
def wanted(eager: Engine) -> dict[tuple[str, int], Sample]:
    return some(eager)


def test_sizes() -> None:
    for most in (1, 2, 3, 16, 24, 100, 256, 300, 1024):
        made = sizes(most)
        assert made == sorted(set(made)) and made[-1] == most
    assert len(sizes(256)) < 20 and len(sizes(1024)) < 30
    for most in (16, 17, 64, 1000, 2048):
        made = mixed_sizes(most)
        assert made == sorted(set(made)) and made[-1] == most
        assert all(2 * larger <= 3 * size + 1 for size, larger in pairwise(made))


@pytest.mark.skipif(DEVICE == "cuda", reason="padded products have other bits there: tests/gpu/test_graphs_on_a_device.py")
def test_replayed_steps_make_the_same_samples_and_follow_refresh_and_sleep(
    wanted: dict[tuple[str, int], Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, _ = small_engine(None)
    monkeypatch.setattr("rollout.engine.memory.pinned", anonymous)
    monkeypatch.setattr("rollout.engine.cpu.device.HostMemory", lambda: eager_memory(HostDriver()))
    graphed, stub = small_engine(Captured)
    assert stub is not None
    sample = wanted["a", 0]
    prompt = np.array([5, 6, 7] * 3, np.int32)
    np.testing.assert_allclose(
        sample.logprobs,
        plain_logprobs(tiny("llama", torch.float32, **SMALL), prompt, sample),
        atol=1e-5 if DEVICE == "cpu" else 1e-4,
    )
    assert same(wanted, some(graphed))
    first = stub.captures
    assert stub.replays > first and {shape.logits > 0 for shape in graphed.worker.graphs._replays} == {False, True}  # type: ignore[union-attr]
    new = {name: tensor * 1.5 for name, tensor in graphed.model.module.state_dict().items()}
    for engine in (eager, graphed):
        engine.refresh(new)
    changed = some(eager, "2")
    assert same(changed, some(graphed, "2"))
    assert not same(wanted, dict(zip(wanted, changed.values(), strict=True)))
    assert stub.captures == first, "a refresh in place keeps the graphs"
    graphed.sleep(1)
    graphed.wake()
    assert same(changed, dict(zip(changed, some(graphed, "3").values(), strict=True)))
    assert stub.captures == first and graphed.weights.stays, "addresses stay over a sleep, and so do they"


@pytest.mark.long
def test_graphs_of_all_sizes_leave_their_logits_in_one_place() -> None:
    engine, stub = small_engine(Captured)
    assert stub is not None and engine.worker.graphs is not None
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


class Noted(NamedTuple):
    """As much of what attention prepares as graphs look at."""

    launched: tuple[bool, bool, bool]


def by_hand(counts: list[int], wanted: list[int], seed: int, large: bool = False) -> Any:
    """As much of a `Batch` as graphs look at: rows of `counts` tokens of random ids, those at `wanted` with logits."""
    ids = padded(np.random.default_rng(seed).integers(1, 99, sum(counts)), 2)
    at = padded(np.array(wanted or [0]), 2)
    return Step(
        torch.from_numpy(ids)[None], seed + torch.arange(len(ids))[None], sum(counts), np.array(counts), torch.from_numpy(at),
        len(wanted), Noted((True, large, True)),
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    num_tokens: int
    context_lens: np.ndarray
    logits_at: torch.Tensor
    num_logits: int
    attention: Noted
    windowed: None = None
    state_rows: torch.Tensor | None = None
    states: Any = None


def ids_and_positions(batch: Any, kv: Any, backend: Any) -> torch.Tensor:
    """Stands in for a forward: what it is given at the tokens that want logits."""
    both = torch.stack([batch.input_ids[0], batch.position_ids[0]], 1)
    return both[batch.logits_at][: batch.num_logits]


def by_hand_graphs(rows: int, tokens: int) -> tuple[StepGraphs, list[int]]:
    """Graphs of `ids_and_positions`, and a list that grows with each capture."""
    captured: list[int] = []

    def capture(run: Run) -> Run:
        captured.append(len(run()))
        return run

    return StepGraphs(ids_and_positions, largest(rows, tokens), torch.device("cpu"), lambda: capture), captured


def random_step(r: random.Random, rows: int) -> Any:
    if r.random() < 0.3:
        return by_hand([1] * (n := r.randrange(1, rows + 1)), [*range(n)], r.randrange(999), r.random() < 0.5)
    counts = [r.choice([1, 1, 1, r.randrange(1, 120)]) for _ in range(r.randrange(1, rows + 1))]
    ends = np.cumsum(counts) - 1
    return by_hand(counts, [int(end) for end in ends if r.random() < 0.7], r.randrange(999), r.random() < 0.5)


def differing(graphs: StepGraphs, seed: int, rows: int = 40) -> int:
    """Of 200 steps, those whose logits are not the step's own."""
    r, wrong = random.Random(seed), 0
    for _ in range(200):
        batch = random_step(r, rows)
        if graphs.covers(batch):
            wrong += not torch.equal(graphs.forward(batch, None, None), ids_and_positions(batch, None, None))  # type: ignore[arg-type]
    return wrong


def test_steps_with_prefill_are_replayed() -> None:
    """Decode, chunks of prompts and both, with logits of some tokens and of none: the step's own, whatever the steps before
    left at those addresses. Few graphs serve them all."""
    graphs, captured = by_hand_graphs(40, 512)
    assert differing(graphs, 0) == 0
    assert len(captured) == len(graphs._replays) < 40 and {shape.logits for shape in graphs._replays} == {0, 40}
    few, _ = by_hand_graphs(200, 4096)
    assert differing(few, 0, 200) == 0 and {shape.logits for shape in few._replays} == {0, FEW_LOGITS, 200}
    assert graphs.covers(by_hand([500] + [1] * 12, [499], 0)) and not graphs.covers(by_hand([513], [512], 0))
    assert not graphs.covers(by_hand([100], [*range(41)], 0)), "more rows of logits than a step of decode has"
    assert by_hand_graphs(16, 8192)[0].covers(by_hand([MOST_TOKENS], [5], 0))
    assert not by_hand_graphs(16, 8192)[0].covers(by_hand([MOST_TOKENS + 1], [5], 0))


@pytest.mark.parametrize("stale", ["_ids", "_positions", "_logits_at"])
def test_inputs_of_another_step_are_seen(stale: str) -> None:
    """The negative control: inputs are copied to where no graph looks."""
    graphs, _ = by_hand_graphs(40, 512)
    differing(graphs, 0)
    setattr(graphs, stale, getattr(graphs, stale).clone())
    assert differing(graphs, 1) > 10


def test_a_failed_capture_ends_the_graphs_of_its_kind_alone() -> None:
    graphs, _ = by_hand_graphs(40, 512)

    def refuse(run: Run) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs._capture = refuse
    graphs.forward(by_hand([5, 1], [4, 5], 0), None, None)  # type: ignore[arg-type]
    assert not graphs.mixed and graphs.sizes and graphs.covers(by_hand([1], [0], 0))


def worker_by_hand(graphs: StepGraphs | None, forward: Any, **config: Any) -> Worker:
    """Make a worker with as much in it as warming up takes."""
    draws = SimpleNamespace(read=lambda: None)
    device: Any = SimpleNamespace(
        warms_up=True, memory=HostMemory(), sample=lambda logits, sampling: draws, graphs=lambda *_: graphs
    )
    model: Any = SimpleNamespace(context=100, geometry=SimpleNamespace(dtype=torch.bfloat16), forward=forward)
    backend: Any = SimpleNamespace(prepare=lambda batch, kv: Noted((True, False, True)))
    kv: Any = SimpleNamespace(block_size=4, states=None, window=None)
    weights: Any = None
    return Worker(EngineConfig(**config), device, ModelKernels(model, backend, None, ""), kv, weights)


def test_nothing_is_captured_after_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """The step with most tokens, then steps with prefill, then decode, the largest first, decode with large tiles of attention
    and without, while the log tells how far it is."""
    config: dict[str, Any] = {"max_num_seqs": 40, "max_batch_tokens": 4096}
    eager: list[tuple[int, int]] = []

    def forward(batch: Any, kv: Any, backend: Any) -> torch.Tensor:
        eager.append((len(batch.context_lens), batch.num_tokens))
        return ids_and_positions(batch, kv, backend)

    graphs, captured = by_hand_graphs(40, 4096)
    worker = worker_by_hand(graphs, forward, **config)
    with caplog.at_level("INFO", "rollout.engine"):
        worker.warm_up()
    assert eager == [(40, 4000)] * 2, (
        "as many rows of the model's context as there may be; a draw that cuts, and one that does not"
    )
    decode = [size for size in reversed(sizes(40)) if size > 1 for _ in range(2)]
    assert captured == [40] * len(graphs.mixed) + decode, "one row is padded to two"
    steps = len(graphs.mixed) + 9
    first, last = f"warming up step=1 of={steps} sequences=40 tokens=4000", f"step={steps} of={steps}"
    assert first in caplog.text and last in caplog.text
    with torch.inference_mode():
        for rows in range(1, 41):
            graphs.forward(by_hand([1] * rows, [*range(rows)], 0, large=rows % 2 > 0), None, None)  # type: ignore[arg-type]
        for tokens in range(2, 2000, 31):
            graphs.forward(by_hand([tokens], [tokens - 1], 0), None, None)  # type: ignore[arg-type]
            graphs.forward(by_hand([tokens] + [1] * 39, [*range(40)], 0), None, None)  # type: ignore[arg-type]
    assert len(captured) == len(graphs.mixed) + len(decode)
    eager.clear()
    worker_by_hand(None, forward, **config).warm_up()
    assert eager == [(40, 4000)] * 2 + [(40, 40)] * 2, "without graphs decode compiles all the same"
    worker.device.warms_up = False
    worker.warm_up()
    assert len(eager) == 4


def test_a_step_that_finds_no_memory_is_refused_at_the_start() -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ValueError, match="max_batch_tokens=64 or max_num_seqs=2"):
        worker_by_hand(None, full, max_num_seqs=2, max_batch_tokens=64).warm_up()
    worker_by_hand(None, full, warm_up=False).warm_up()


def test_a_replay_that_does_not_see_its_inputs_is_seen(wanted: dict[tuple[str, int], Sample]) -> None:
    frozen, _ = small_engine(Frozen)
    assert not same(wanted, some(frozen))


class Refusing(Captured):
    def __call__(self, forward: Run) -> Run:
        self.captures += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_forward_that_cannot_be_captured_runs_without_graphs(wanted: dict[tuple[str, int], Sample]) -> None:
    """A pool of memory whose only graph has failed is not used again: torch drops it."""
    refused, stub = small_engine(Refusing)
    assert stub is not None and refused.worker.graphs is not None
    pools: list[Any] = []
    refused.worker.graphs._new_capture = lambda: pools.append(stub) or stub  # type: ignore[func-returns-value]
    assert same(wanted, some(refused)) and stub.captures == 2, "once with prefill, once without"
    assert len(pools) == 2


class Full(Captured):
    def __call__(self, forward: Run) -> Run:
        if self.captures == self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(forward)

    room = 0
    """graphs that find memory"""


@pytest.mark.long
@pytest.mark.parametrize("room", [0, 1])
def test_without_memory_for_a_graph_smaller_steps_keep_theirs(
    room: int, eager: Engine, wanted: dict[tuple[str, int], Sample]
) -> None:
    """A pool of memory whose only graph has failed is not used again."""
    full, stub = small_engine(Full)
    assert isinstance(stub, Full) and full.worker.graphs is not None
    full.worker.graphs.mixed.clear()
    pools: list[Full] = []
    full.worker.graphs._new_capture = lambda: pools.append(stub) or stub  # type: ignore[func-returns-value]
    stub.room = room
    assert same(wanted, some(full))
    assert same(wide(eager), wide(full)) and stub.captures == room
    assert len(pools) == 1 - room and all(size < 24 for size in full.worker.graphs.sizes)
