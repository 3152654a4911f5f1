"""Steps of models with recurrent layers that are captured and replayed, on the stand-in of test_graphs.py, with Triton's mixers
in its interpreter where there is no GPU. tests/gpu has real graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda import tiles  # noqa: E402
from rollout.engine.cuda.device import CudaDevice, use_triton_mixers  # noqa: E402
from rollout.engine.cuda.graphs import StepGraphs  # noqa: E402
from rollout.engine.cuda.recurrence import TritonMixers  # noqa: E402
from rollout.engine.engine import Engine  # noqa: E402
from rollout.engine.forward.model import Model  # noqa: E402
from rollout.engine.memory import anonymous  # noqa: E402
from rollout.engine.values import Sample  # noqa: E402
from tests.support.captured import Captured, largest  # noqa: E402
from tests.support.configs import engine_config  # noqa: E402
from tests.support.equivalence import same  # noqa: E402
from tests.support.fake_device import eager_memory  # noqa: E402
from tests.support.fake_regions import HostDriver  # noqa: E402
from tests.support.tiny import tiny_engine  # noqa: E402
from tests.support.toy import group, run  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same on a device")
LINEAR, FULL = "linear_attention", "full_attention"
COMMON = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 64, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": [LINEAR, FULL], "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "falcon_h1": {"mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_ssm": 16, "mamba_d_state": 8, "head_dim": 16},
    "lfm2": {"layer_types": ["conv", FULL], "block_auto_adjust_ff_dim": False},
}  # fmt: skip
"""delta rule; Mamba-2 beside attention; convolutions alone"""


def model(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **COMMON, **TYPES[name]), dtype=torch.float32).eval()


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Short chunks; memory of a device, to which the rows of states are sent; and no trial or comparison at each start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CHUNK_TOKENS", 8)
        patch.setattr("rollout.engine.forward.self_check.try_out", lambda *_: None)
        patch.setattr("rollout.engine.forward.self_check.check_model", lambda *_: None)
        patch.setattr("rollout.engine.memory.pinned", anonymous)
        patch.setattr("rollout.engine.cpu.device.HostMemory", lambda: eager_memory(HostDriver()))
        yield


class CapturedStates(Captured):
    """Also holds the address of the states."""

    def addresses(self) -> list[int]:
        states = self.engine.worker.kv.states
        assert states is not None
        return [*super().addresses(), states.data.data_ptr()]


def engine_of(name: str, graphs: type[StepGraphs] | None, mixers: Any = None) -> tuple[Engine, CapturedStates | None]:
    options: dict[str, Any] = {"attention": "triton", "kv_tokens": 512, "max_num_seqs": 16, "cuda_graphs": False}
    engine = tiny_engine(model=model(name), **options)
    assert isinstance(engine.model, Model)
    engine.model.recurrence.kernels = mixers or TritonMixers()
    if graphs is None:
        return engine, None
    stub = CapturedStates(engine)
    engine.worker.graphs = graphs(engine.model.forward, largest(16, 32), engine.model.device, lambda: stub)
    return engine, stub


def some(engine: Engine) -> dict[tuple[str, int], Sample]:
    """Samples of a prompt with forks, and of one that is prefilled while they decode."""
    return run(
        engine,
        [
            group("a", [5, 6, 7] * 2, n=2, max_tokens=3, ignore_eos=True),
            group("b", [9] * 3, n=1, max_tokens=4, seed=7, ignore_eos=True),
        ],
    )


class Frozen(StepGraphs):
    """The negative control: graphs that see the rows of the step that was captured."""

    def _send_state_rows(self, rows: torch.Tensor, end: int) -> None:
        if not self._replays:
            super()._send_state_rows(rows, end)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3_5_text", "falcon_h1"))]
)
def test_replayed_steps_make_the_same_samples(name: str) -> None:
    """And those of torch's own functions, as far as rounding goes."""
    eager, _ = engine_of(name, None)
    want = some(eager)
    graphed, stub = engine_of(name, StepGraphs)
    assert stub is not None
    assert same(want, some(graphed)) and stub.replays > stub.captures
    kinds = {shape.logits > 0 for shape in graphed.worker.graphs._replays}  # type: ignore[union-attr]
    assert kinds == {False, True}, "steps of decode, and of prefill"
    plain, _ = engine_of(name, None)
    plain.model.recurrence.kernels = None  # type: ignore[attr-defined]
    for key, sample in some(plain).items():
        assert sample.token_ids.tolist() == want[key].token_ids.tolist()
        assert abs(sample.logprobs - want[key].logprobs).max() < 1e-5


def test_graphs_that_see_other_rows_are_seen() -> None:
    want = some(engine_of("lfm2", None)[0])
    assert not same(want, some(engine_of("lfm2", Frozen)[0]))


def test_a_model_without_kernels_is_refused_by_name(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton is missing, torch scans, and there are no graphs; where it is there, there are."""
    engine, _ = engine_of("lfm2", None)
    served: Any = engine.model
    made = CudaDevice.__new__(CudaDevice)
    made.memory = engine.worker.device.memory  # type: ignore[assignment]
    monkeypatch.setattr("torch.cuda.Stream", lambda: None)
    monkeypatch.setattr("rollout.engine.cuda.device.cuda_capture", lambda aside: lambda run: run)
    config = engine_config()
    assert use_triton_mixers(served) == f"+{TritonMixers.arithmetic}"
    assert isinstance(made.graphs(served, config, engine.worker.backend), StepGraphs)

    def missing(self: Any) -> None:
        raise ImportError("no module named triton")

    monkeypatch.setattr(TritonMixers, "__init__", missing)
    served.recurrence.kernels = None
    with caplog.at_level("WARNING"):
        assert use_triton_mixers(served) == "" and made.graphs(served, config, engine.worker.backend) is None
    assert "without CUDA graphs" in caplog.text and "row by row" in caplog.text
