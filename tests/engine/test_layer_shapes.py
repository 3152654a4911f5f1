"""Layers whose KV have different shapes, and layers that share KV: Gemma 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.cpu.attention import NativeAttention
from rollout.engine.engine import Engine
from rollout.engine.forward.attention import KVPlace, Scores
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.model import Model, UnsupportedModel
from rollout.engine.forward.reference import ReferenceAttention
from rollout.engine.forward.self_check import LoadedModel, check_model
from rollout.engine.kv.cells import keys_and_values
from rollout.engine.kv.pages import KVGeometry, LayerShape, PagedKV
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import HostMemory
from rollout.engine.scheduling.plan import plan_by_hand
from rollout.engine.values import Group, Sample, Sampling
from rollout.exact import sample_logprobs, use_exact
from tests.support.equivalence import CLASSES, MIXED, ROOMY, assert_same, groups
from tests.support.families import build
from tests.support.samebits import torchs_log_softmax
from tests.support.tiny import plain_logprobs, tiny, tiny_engine
from tests.support.toy import group, run

BF16 = torch.bfloat16
UNEVEN = KVGeometry.of([LayerShape(2, 24, 24), LayerShape(1, 40, 12), LayerShape(4, 8, 8)], BF16)
FP8: dict[str, Any] = {"kv_dtype": "fp8_e4m3"}


def gemma4(**config: Any) -> Engine:
    return tiny_engine(model=build("gemma4_text", BF16), dtype="bfloat16", **config)


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_equal_layers_keep_the_pool_they_had() -> None:
    even = KVGeometry.of([LayerShape(2, 24, 24)] * 3, BF16)
    assert even == KVGeometry(3, 2, 24, BF16) and even.block_shape(8) == (3, 2, 2, 8, 24)
    assert KVGeometry.of([LayerShape(2, 24, 12)] * 3, BF16) == KVGeometry(3, 2, 24, BF16, 12)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_layers_lie_beside_each_other_and_fill_the_block(kv_dtype: Any) -> None:
    """Each byte of a block is some token's in some layer, and none is two layers'."""
    geometry = UNEVEN.kept_as(kv_dtype)
    pools = [PagedKV(geometry, PoolSizes(8, 3, 2), HostMemory()) for _ in range(2)]
    assert pools[0].data.nbytes == 3 * pools[0].block_bytes == 3 * 8 * geometry.bytes_per_token
    generator = torch.Generator().manual_seed(0)
    given: dict[tuple[int, int], torch.Tensor] = {}
    for kv, first in zip(pools, (0x00, 0x5A), strict=True):
        kv.data.view(torch.uint8).fill_(first)
        for layer in range(3):
            for which, cells in enumerate(keys_and_values(kv, layer)):
                shape = 24, cells.numbers.shape[1], cells.numbers.shape[3]
                if (layer, which) not in given:
                    given[layer, which] = torch.randn(shape, generator=generator).to(BF16)
                cells.write(torch.arange(24), given[layer, which])
    assert torch.equal(pools[0].data.view(torch.uint8), pools[1].data.view(torch.uint8))
    for (layer, which), numbers in given.items():
        kept = keys_and_values(pools[0], layer)[which].read(torch.arange(3)).transpose(1, 2).flatten(0, 1)
        assert (kept - numbers.float()).abs().max() <= (0 if kv_dtype == "auto" else 0.2)


def test_fp8_scales_of_a_narrow_layer_would_not_be_aligned() -> None:
    geometry = KVGeometry.of([LayerShape(1, 8, 8), LayerShape(1, 2, 4)], BF16).kept_as("fp8_e4m3")
    with pytest.raises(ValueError, match="a layer of a block has 6 numbers"):
        PagedKV(geometry, PoolSizes(1, 2, 0), HostMemory())
    odd = KVGeometry.of([LayerShape(1, 3, 4)], BF16).kept_as("fp8_e4m3")
    with pytest.raises(ValueError, match="heads of 3 and 4 numbers: both must be even"):
        PagedKV(odd, PoolSizes(16, 2, 0), HostMemory())


def test_the_kernel_refuses_a_layer_of_another_shape() -> None:
    geometry = KVGeometry.of([LayerShape(2, 16, 16), LayerShape(1, 32, 32)], torch.float32)
    kv = PagedKV(geometry, PoolSizes(16, 2, 0), HostMemory())
    batch = Batch.build(plan_by_hand(np.zeros((1, 3)), np.zeros(1, np.int32), np.zeros((1, 1), np.int32)), 16, HostMemory(),
                        torch.float32)  # fmt: skip
    backend = NativeAttention(1)
    step = backend._step_of(replace(batch, attention={}), kv, 0, 4)
    query, key = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16)
    backend.run(step, 0, query, key, key, Scores(1.0))
    with pytest.raises(ValueError, match="of another shape"):
        backend.run(step, 1, query, key, key, Scores(1.0))


# ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_only_layers_with_keys_of_their_own_store_them() -> None:
    model = Model(build("gemma4_text"), "gemma4")
    assert model.geometry.shapes == (LayerShape(1, 16, 16),) * 4 + (LayerShape(1, 32, 32),)
    assert [model.places[layer] for layer in (3, 4, 8, 9)] == [
        KVPlace(3, True), KVPlace(4, True), KVPlace(3, False), KVPlace(4, False),
    ]  # fmt: skip
    assert model.geometry.bytes_per_token == (4 * 16 + 32) * 2 * 4
    plain = Model(tiny("llama"), "llama")
    assert plain.places == {0: KVPlace(0, True), 1: KVPlace(1, True)}


def test_a_layer_that_reads_another_s_kv_is_seen() -> None:
    """The negative control of sharing: the self-check refuses a layer that reads the KV of a wrong one."""
    engine = tiny_engine(model=build("gemma4_text"))
    loaded = LoadedModel(engine.model, engine.worker.backend, 8, 128, HostMemory(), engine.model.geometry)
    check_model(loaded)
    engine.model.places[5] = KVPlace(0, False)
    with pytest.raises(UnsupportedModel, match="differ from those of the model's own forward"):
        check_model(loaded)


@pytest.fixture(scope="module")
def canonical() -> dict[tuple[str, int], Sample]:
    return run(gemma4(**ROOMY), groups())


SHORT = ("small chunks", "preemptions by recompute", "offload", "overlapped, offload")


@pytest.mark.some(2)
@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in CLASSES])
def test_class(name: str, canonical: dict[tuple[str, int], Sample]) -> None:
    """Alone, in a crowd, in chunks, forked in the middle of a block, reset, offloaded and restored: the same to the bit."""
    engine = gemma4(**CLASSES[name])
    assert engine.worker.backend.name == "native" and engine.worker.kernels.path.batch_invariant
    assert_same(canonical, run(engine, groups()))
    assert engine.counters.restored_blocks > 0 or name != "offload"


@pytest.mark.long
@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize("name", MIXED)
def test_class_in_fp8(name: str) -> None:
    engine = gemma4(**FP8, **CLASSES[name])
    assert engine.worker.backend.name == "reference"
    assert_same(run(gemma4(**FP8, **ROOMY), groups()), run(engine, groups()))


def test_a_turn_over_kept_kv_is_the_same_as_a_fresh_one() -> None:
    prompt, sampling = np.arange(5, 42, dtype=np.int32), Sampling(max_tokens=21, ignore_eos=True, seed=3, kv_ttl_s=60.0)
    engine = gemma4(cpu_offload_gib=0.01)
    first = run(engine, [Group("one", prompt, sampling)])["one", 0]
    history = np.concatenate([prompt, first.token_ids, np.array([9, 8, 7], np.int32)])
    engine.sleep()
    engine.wake()
    turn = Group("two", history, Sampling(max_tokens=9, ignore_eos=True, seed=4), after=("one", 0))
    drawn = run(engine, [turn])["two", 0]
    assert engine.counters.kept_tokens == 37 + 20
    fresh = run(gemma4(), [Group("two", history, turn.sampling)])["two", 0]
    assert fresh.logprobs.tobytes() == drawn.logprobs.tobytes()


@torchs_log_softmax
def test_a_trainer_has_the_same_bits() -> None:
    engine = gemma4()
    trainer = build("gemma4_text", BF16)
    each = group("a", np.arange(7, 60), n=2, max_tokens=30, ignore_eos=True)
    samples = run(engine, [each])
    use_exact(trainer, engine.arithmetic, 8, 1)
    for sample in samples.values():
        exact = sample_logprobs(trainer, [(each.prompt, sample.token_ids)])[0].detach().numpy()
        assert exact.tobytes() == sample.logprobs.tobytes()
    ids = torch.from_numpy(each.prompt[None]).long()
    assert trainer(input_ids=ids, use_cache=False).logits.shape[1] == len(each.prompt)
    with pytest.raises(ValueError, match="pass logits_to_keep as a tensor"):
        trainer(input_ids=ids, use_cache=False, logits_to_keep=1)


@pytest.mark.long
def test_triton_has_arrays_for_each_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: two sizes of heads, shared layers, chunks and a fork, right up to rounding."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("rollout.engine.cuda.tiles.CHUNK_TOKENS", 16)
    monkeypatch.setattr("rollout.engine.forward.self_check.check_model", lambda *_: None)
    sizes = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    each = group("a", np.arange(7, 30), n=2, max_tokens=4, ignore_eos=True)
    options: dict[str, Any] = {"max_batch_tokens": 16, "max_num_seqs": 16, "kv_tokens": 128}
    engine = tiny_engine(model=build("gemma4_text", **sizes), attention="triton", **options)
    assert engine.worker.backend.name == "triton" and engine.model.geometry.layers == 2
    samples = run(engine, [each])
    trainer = build("gemma4_text", **sizes)
    for sample in samples.values():
        np.testing.assert_allclose(sample.logprobs, plain_logprobs(trainer, each.prompt, sample), atol=1e-4, rtol=0)


def test_native_attention_over_layers_of_all_widths_is_the_reference_s() -> None:
    """Layers with other numbers of heads, and of keys and values of two widths, in one block; and a layer that stores none."""
    geometry = KVGeometry.of([LayerShape(2, 32, 16), LayerShape(1, 48, 48), LayerShape(4, 16, 32)], torch.float32)
    generator = torch.Generator().manual_seed(0)
    plan = plan_by_hand(np.zeros((2, 9)), np.zeros(2, np.int32), np.array([[0], [2]], np.int32))
    outs = []
    for backend in (NativeAttention(1), ReferenceAttention()):
        kv = PagedKV(geometry, PoolSizes(16, 3, 0), HostMemory())
        kv.data.fill_(torch.nan)
        batch = Batch.build(plan, 16, HostMemory(), torch.float32)
        batch = replace(batch, attention=backend.prepare(batch, kv))
        generator.manual_seed(0)
        for layer, (heads, k, v) in enumerate(geometry.shapes):
            shapes = (
                (batch.input_ids.shape[1], 4, k),
                (batch.input_ids.shape[1], heads, k),
                (batch.input_ids.shape[1], heads, v),
            )
            query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
            stored = backend.attend(layer, query, key, value, batch, kv, Scores(0.3, 5))
            read = backend.attend(layer, query, None, None, batch, kv, Scores(0.3, 5))
            assert torch.equal(stored, read)
            outs.append(stored)
    for one, other in zip(outs[:3], outs[3:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
