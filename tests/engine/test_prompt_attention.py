"""Long prompts by torch's attention beside our tiles: the same numbers up to rounding, in packed steps. torch's plain kernel
stands in for cuDNN, and ours run in Triton's interpreter."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.build import device_of  # noqa: E402
from rollout.engine.config import AdvancedConfig, EngineConfig  # noqa: E402
from rollout.engine.cpu.device import CpuDevice  # noqa: E402
from rollout.engine.cuda import prompts as module  # noqa: E402
from rollout.engine.cuda import tiles  # noqa: E402
from rollout.engine.cuda.attention import TritonAttention  # noqa: E402
from rollout.engine.cuda.device import CudaDevice, fuse, use_cudnn_prompts  # noqa: E402
from rollout.engine.cuda.prompts import NotTaken, PromptAttention, cudnn_prompts  # noqa: E402
from rollout.engine.forward.attention import Scores, StepCapacity  # noqa: E402
from rollout.engine.forward.model import Model  # noqa: E402
from rollout.engine.forward.reference import ReferenceAttention  # noqa: E402
from rollout.engine.kv.pages import KVGeometry, PagedKV  # noqa: E402
from rollout.engine.kv.sizing import PoolSizes  # noqa: E402
from rollout.engine.memory import HostMemory  # noqa: E402
from rollout.engine.values import Sample  # noqa: E402
from tests.support.configs import engine_config  # noqa: E402
from tests.support.tiny import tiny, tiny_engine  # noqa: E402
from tests.support.toy import group, run  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 16
COUNTS = np.array([1, 9, 3, 8, 8, 5, 12], np.int32)
CONTEXTS = np.array([7, 9, 3, 20, 8, 5, 12], np.int32)
"""a row that decodes; prompts of 9, 3, 8, 5 and 12 tokens; the last 8 tokens of a prompt of 20, whose beginning is stored"""
WHOLE = [False, True, False, False, True, False, True]
"""rows with at least 8 tokens that are all of their context"""


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 8)
    monkeypatch.setattr(tiles, "SPLIT_TOKENS", 4)
    monkeypatch.setattr(module, "PADDED_TO", 8)
    monkeypatch.setattr(module, "TRIED_TOKENS", 12)
    return iter([None])


def stand_in(more_than: int = 0) -> PromptAttention:
    return PromptAttention(SDPBackend.MATH, "math", least=8, more_than=more_than)


class Step:
    """A packed step, its pool, and what the reference computes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        blocks = -(-CONTEXTS // BLOCK)
        table = np.zeros((len(COUNTS), blocks.max()), np.int32)
        ids = iter(range(int(blocks.sum())))
        for row, count in enumerate(blocks.tolist()):
            table[row, :count] = [next(ids) for _ in range(count)]
        self.starts = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)
        tokens = int(self.starts[-1])
        positions = np.concatenate([np.arange(c - n, c) for n, c in zip(COUNTS, CONTEXTS, strict=True)])
        of = np.repeat(np.arange(len(COUNTS)), COUNTS)
        slots = table[of, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        self.query, self.key, self.value = (
            torch.randn(tokens, heads, DIM, generator=generator).to(DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.kv: Any = PagedKV(
            KVGeometry(1, KV_HEADS, DIM, torch.float32), PoolSizes(BLOCK, int(blocks.sum()), 0), HostMemory()
        )
        self.kv.data = torch.randn(self.kv.data.shape, generator=generator).to(DEVICE)
        self.batch: Any = SimpleNamespace(
            query_starts=self.starts, context_lens=CONTEXTS, block_table=table, shared=np.zeros((0, 3), np.int32),
            num_tokens=tokens, slots=torch.from_numpy(slots),
        )  # fmt: skip
        self.capacity = StepCapacity(64, 16, table.shape[1], HEADS, KV_HEADS, DIM, 4)

    def attended(self, prompts: PromptAttention | None, pooled: bool = False) -> tuple[torch.Tensor, TritonAttention]:
        """Attend by tiles, and by `prompts`. pooled: K and V are in the pool, as fused layers leave them."""
        backend = TritonAttention(DEVICE, self.capacity, 2)
        backend.prompts = prompts
        self.batch.attention = backend.prepare(self.batch, self.kv)
        scores = Scores(DIM**-0.5)
        made = backend.attend(0, self.query, self.key, self.value, self.batch, self.kv, scores)
        return (backend.attend_stored(0, self.query, self.batch, self.kv, scores) if pooled else made), backend


@pytest.mark.parametrize("pooled", [False, True])
def test_whole_prompts_of_a_packed_step(pooled: bool) -> None:
    """Near those of tiles, and of other bits there alone: rows that are not whole prompts keep theirs."""
    step = Step()
    tiled, _ = step.attended(None)
    made, backend = step.attended(stand_in(), pooled)
    torch.testing.assert_close(made, tiled, rtol=1e-4, atol=1e-4)
    rows = [each.split(COUNTS.tolist()) for each in (made, tiled)]
    same = [torch.equal(mine, theirs) for mine, theirs in zip(*rows, strict=True)]
    assert same == [not each for each in WHOLE]
    prepared = step.batch.attention
    assert sorted(len(each.at) for each in prepared.prompts) == [1, 2], "of 8 tokens, and two of 16 when padded"
    with_tiles = {int(first) for kind in (prepared.small, prepared.large) for first in kind.view(-1, 6)[:, 0].tolist()}
    begins = step.starts[:-1][np.array(WHOLE)]
    assert not with_tiles & set(begins.tolist())


def test_wrong_results_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: K of the tokens before."""
    step = Step()
    tiled, _ = step.attended(None)
    attend = PromptAttention.attend

    def shifted(self: PromptAttention, out: Any, groups: Any, query: Any, key: Any, value: Any, scaling: float) -> None:
        attend(self, out, groups, query, key.roll(1, 0), value, scaling)

    monkeypatch.setattr(PromptAttention, "attend", shifted)
    made, _ = step.attended(stand_in())
    assert not torch.allclose(made, tiled, atol=1e-2)


def test_small_steps_keep_their_tiles() -> None:
    """Those that graphs replay, which know no prompts."""
    step = Step()
    made, _ = step.attended(stand_in(more_than=int(COUNTS.sum())))
    assert step.batch.attention.prompts == () and torch.equal(made, step.attended(None)[0])


def test_it_is_tried_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a name of its own; a kernel that does not take the heads, or is wrong, is not taken."""
    step = Step()
    backend = TritonAttention(DEVICE, step.capacity, 2)
    name = backend.arithmetic
    backend.use_prompts(stand_in(), torch.float32)
    assert backend.arithmetic == f"{name}/math" and backend.prompts is not None
    other = TritonAttention(DEVICE, step.capacity, 2)
    if DEVICE.type == "cpu":
        with pytest.raises(NotTaken, match="torch's kernel does not take them"):
            other.use_prompts(PromptAttention(SDPBackend.CUDNN_ATTENTION, "cudnn"), torch.float32)
        with pytest.raises(NotTaken, match="no cuDNN"):
            cudnn_prompts()
    attend = PromptAttention.attend

    def wrong(self: PromptAttention, out: Any, *given: Any) -> None:
        attend(self, out, *given)
        if self.name == "math":
            out[-1] += 1

    monkeypatch.setattr(PromptAttention, "attend", wrong)
    with pytest.raises(NotTaken, match="differ from attention in fp32"):
        other.use_prompts(stand_in(), torch.float32)
    assert other.prompts is None and other.arithmetic == name


@pytest.mark.long
def test_an_engine_with_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are those of tiles up to rounding, of fused layers too, and the status names the kernel."""
    monkeypatch.setattr("rollout.engine.forward.self_check.check_model", lambda _: None)
    monkeypatch.setattr("rollout.engine.cuda.fused.CHECKED_ROWS", (2,))
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    used: list[int] = []
    attend = PromptAttention.attend

    def counted(self: PromptAttention, out: Any, groups: Any, *given: Any) -> None:
        used.extend(len(each.at) for each in groups)
        attend(self, out, groups, *given)

    monkeypatch.setattr(PromptAttention, "attend", counted)

    def samples(prompts: PromptAttention | None) -> dict[tuple[str, int], Sample]:
        def equip(self: CpuDevice, model: Model, config: EngineConfig, backend: Any) -> Any:
            if prompts is not None:
                backend.use_prompts(prompts, torch.float32)
            return fuse(model, backend)

        for device in (CpuDevice, CudaDevice):
            monkeypatch.setattr(device, "equip", equip)
        engine = tiny_engine(
            model=tiny("qwen3", **small).to(DEVICE), device=DEVICE.type, attention="triton", block_size=4, kv_tokens=256,
            max_num_seqs=16, max_batch_tokens=64, cuda_graphs=False,
        )  # fmt: skip
        assert ("/math" in engine.arithmetic) == (prompts is not None)
        used.clear()
        asked = {"n": 1, "max_tokens": 2, "ignore_eos": True}
        return run(engine, [group("a", range(5, 23), **asked), group("b", range(9, 18), **asked)])

    tiled = samples(None)
    assert not used
    whole = samples(stand_in(more_than=20))
    assert used == [1, 1], "prompts of 18 and 9 tokens in one step of a layer"
    for one, other in zip(tiled.values(), whole.values(), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "cpu"}, "with device=cpu"),
        ({"device": "cuda", "exact": True}, "with exact: a prompt's numbers would depend on the step"),
    ],
)
def test_what_excludes_it_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        device_of(EngineConfig(advanced=AdvancedConfig(prompt_attention="cudnn"), **options))
    with pytest.raises(ValueError, match="must be tiles or cudnn"):
        AdvancedConfig(prompt_attention="flash")  # type: ignore[arg-type]


def test_models_that_it_does_not_take(caplog: pytest.LogCaptureFixture) -> None:
    """With windows, with KV in fp8, over another backend: tiles run, and the log says why."""
    settings = engine_config(device="cpu", dtype="float32")
    backend = TritonAttention(DEVICE, Step().capacity, 2)
    plain, windows = Model(tiny("qwen3"), "plain"), Model(tiny("mistral"), "windows")
    fp8 = engine_config(device="cpu", dtype="float32", kv_dtype="fp8_e4m3")
    cases = (
        (plain, settings, ReferenceAttention(), "reference attention of layers of several kinds"),
        (windows, settings, backend, "layers with windows, soft caps or sinks"),
        (plain, fp8, backend, "KV in fp8_e4m3"),
    )
    with caplog.at_level(logging.WARNING, "rollout"):
        for model, config, over, why in cases:
            caplog.clear()
            use_cudnn_prompts(model, config, over)
            assert why in caplog.text and backend.prompts is None
