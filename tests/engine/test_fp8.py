"""KV in fp8: what is kept of a number, where it lies, and that samples go on being functions of what they follow from.

`tests/engine/test_triton_attention.py` has the kernels, `tests/rollout/test_against.py` the report on fidelity.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.kv import fp8
from rollout.engine.kv.cells import keys_and_values
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import HostMemory
from rollout.engine.values import Group, Sample, Sampling
from rollout.engine.values.arithmetic import FP8, Arithmetic
from rollout.exact import use_exact
from tests.support.equivalence import CLASSES, ROOMY, assert_same, groups
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import group, run

pytestmark = pytest.mark.usefixtures("loads_in_full")

GEOMETRY = KVGeometry(3, 4, 24, torch.bfloat16, 12, fp8=True)
KEPT: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "dtype": "bfloat16"}


def numbers(tokens: int = 500, heads: int = 3, width: int = 64) -> torch.Tensor:
    """Of many sizes from token to token."""
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(-20, 21, (tokens, heads, 1), generator=generator)
    return torch.randn(tokens, heads, width, generator=generator) * sizes


def assert_within_a_rounding(given: torch.Tensor, kept: torch.Tensor) -> None:
    """Half a unit of three bits; of numbers 2¹⁴ below the largest one, half of the smallest step that its scale has."""
    largest = given.abs().amax(-1, keepdim=True)
    assert ((given - kept).abs() <= torch.maximum(given.abs() * 2**-4, largest / 448 * 2**-10) * 1.004).all()


def test_a_number_comes_back_within_a_rounding_of_three_bits() -> None:
    given = numbers()
    codes, scales = fp8.encode(given)
    assert codes.dtype == torch.uint8 and scales.shape == given.shape[:-1]
    largest = given.abs().amax(-1) / scales.float()
    assert (largest <= 448 * 1.004).all() and (largest >= 448 * 0.996).all()
    back = fp8.decode(codes, scales)
    assert_within_a_rounding(given, back)
    assert ((given - back).abs().amax(-1) <= given.abs().amax(-1) * 16 / 448 * 1.004).all(), "half a unit of the largest"
    assert (back.abs().amax(-1) / given.abs().amax(-1) - 1).abs().max() <= 0.004, (
        "the largest is itself, up to the scale's bits"
    )
    with pytest.raises(AssertionError):  # the control: one scale for all, that of the first token
        assert_within_a_rounding(given, fp8.decode((given / scales[0, 0].float()).to(torch.float8_e4m3fn), scales[:1, :1]))


@pytest.mark.parametrize("value", [0.0, 448.0, 448.1, 2.0**-126, 2.0**-140, 3e38])
def test_at_the_ends_of_the_range(value: float) -> None:
    given = torch.tensor([[value, -value / 3]])
    back = fp8.decode(*fp8.encode(given))
    assert (given - back).abs().max() <= max(value * 2**-4, 2.0**-136), (given, back)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_and_spoils_nothing_else(wrong: float) -> None:
    given = numbers(3, 2, 8)
    want = fp8.decode(*fp8.encode(given))
    given[1, 1, 5] = wrong
    back = fp8.decode(*fp8.encode(given))
    assert back[1, 1].isnan().all()
    back[1, 1] = want[1, 1]
    assert torch.equal(back, want)


def test_what_is_stored_of_a_token_follows_from_it_alone() -> None:
    """Into memory full of other bytes, in any order, beside any others: the same block."""
    key, value = numbers(16, 4, 24), numbers(16, 4, 12)
    pools = [PagedKV(GEOMETRY, PoolSizes(8, 2, 0), HostMemory()) for _ in range(2)]
    pools[1].data.fill_(0xFF)
    ways = [[torch.arange(16)], [torch.tensor([i]) for i in range(15, -1, -1)]]
    for kv, way in zip(pools, ways, strict=True):
        for layer in range(3):
            for cells, given in zip(keys_and_values(kv, layer), (key, value), strict=True):
                for slots in way:
                    cells.write(slots, given[slots] * (layer + 1))
    assert torch.equal(pools[0].data, pools[1].data), "each byte of a full block is some token's"
    for layer in range(3):
        for cells, given in zip(keys_and_values(pools[0], layer), (key, value), strict=True):
            kept = cells.read(torch.tensor([0, 1])).transpose(1, 2).flatten(0, 1)
            assert_within_a_rounding(given * (layer + 1), kept)


def test_a_block_is_one_row_of_bytes() -> None:
    kv = PagedKV(GEOMETRY, PoolSizes(8, 5, 2), HostMemory())
    assert kv.block_bytes * 5 == kv.data.nbytes == 5 * 8 * 3 * 4 * (24 + 12 + 4) and kv.data[0].is_contiguous()
    assert kv.host.nbytes == 2 * kv.block_bytes and kv.data.dtype == torch.uint8
    wide = KVGeometry(30, 8, 128, torch.bfloat16)
    assert wide.bytes_per_token / wide.kept_as("fp8_e4m3").bytes_per_token == pytest.approx(1.97, abs=0.01)
    assert wide.kept_as("auto") == wide
    with pytest.raises(ValueError, match="block_size=1: a layer of a block has 6 numbers, .* a multiple of 4"):
        PagedKV(KVGeometry(1, 1, 2, torch.float32, 4, fp8=True), PoolSizes(1, 2, 0), HostMemory())
    with pytest.raises(ValueError, match="heads of 3 and 4 numbers: both must be even"):
        PagedKV(KVGeometry(1, 1, 3, torch.float32, 4, fp8=True), PoolSizes(4, 2, 0), HostMemory())


@pytest.fixture(scope="module")
def canonical() -> dict[tuple[str, int], Sample]:
    return run(tiny_engine(**KEPT, **ROOMY), groups())


SHORT = ("small chunks", "preemptions by recompute", "offload", "overlapped, offload")


@pytest.mark.some(2)
@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in CLASSES])
def test_class(name: str, canonical: dict[tuple[str, int], Sample]) -> None:
    """Prefilled in chunks, forked in the middle of a block, found by prefix, offloaded and restored: the same to the bit."""
    engine = tiny_engine(**KEPT, **CLASSES[name])
    assert_same(canonical, run(engine, groups()))
    assert engine.counters.restored_blocks > 0 or name != "offload"


@pytest.mark.usefixtures("copies_pay")
def test_a_turn_over_kv_that_has_slept_is_the_same_as_a_fresh_one() -> None:
    prompt, sampling = np.arange(5, 42, dtype=np.int32), Sampling(max_tokens=21, ignore_eos=True, seed=3, kv_ttl_s=60.0)
    engine = tiny_engine(**KEPT, cpu_offload_gib=0.01)
    first = run(engine, [Group("one", prompt, sampling)])["one", 0]
    history = np.concatenate([prompt, first.token_ids, np.array([9, 8, 7], np.int32)])
    engine.sleep()
    engine.wake()
    turn = Group("two", history, Sampling(max_tokens=9, ignore_eos=True, seed=4), after=("one", 0))
    drawn = run(engine, [turn])["two", 0]
    assert engine.counters.kept_tokens == 37 + 20
    fresh = run(tiny_engine(**KEPT), [Group("two", history, turn.sampling)])["two", 0]
    assert fresh.logprobs.tobytes() == drawn.logprobs.tobytes()
    other = run(tiny_engine(dtype="bfloat16"), [Group("two", history, turn.sampling)])["two", 0]
    assert other.logprobs.tobytes() != drawn.logprobs.tobytes(), "the control: KV as it was"


def test_an_engine_tells_what_it_keeps(caplog: pytest.LogCaptureFixture) -> None:
    """The arithmetic has another name; the same bytes hold more tokens; the judge tells what it changes."""
    with caplog.at_level(logging.INFO, "rollout.engine"):
        kept = tiny_engine(**KEPT, kv_tokens=None, kv_gib=0.001)
    plain = tiny_engine(dtype="bfloat16", kv_tokens=None, kv_gib=0.001, attention="reference")
    assert Arithmetic.parse(kept.arithmetic) == Arithmetic.parse(plain.arithmetic)._replace(fp8=True)
    mine, other = (engine.status() for engine in (kept, plain))
    assert mine["kv"]["dtype"] == "fp8_e4m3" and other["kv"]["dtype"] == mine["dtype"] == other["dtype"] == "bfloat16"
    assert mine["kv"]["device_blocks"] / other["kv"]["device_blocks"] == pytest.approx(2 * 16 / (16 + 2), rel=0.01)
    assert mine["attention"] == "reference" and "the kernel reads KV in the model's dtype" in caplog.text
    (told,) = (record.args[1] for record in caplog.records if record.msg.startswith("KV in fp8"))
    assert 0 < told < 0.5


def test_triton_s_samples_are_the_reference_s_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine in the interpreter: a prompt in chunks, a fork in the middle of a block, a partial block written on."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr("rollout.engine.cuda.tiles.CHUNK_TOKENS", 16)
    monkeypatch.setattr("rollout.engine.forward.self_check.check_model", lambda *_: None)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    asked = group("one", range(3, 24), n=2, max_tokens=4, ignore_eos=True)
    samples = []
    for attention in ("triton", "reference"):
        model = tiny("llama", torch.float32, **sizes)
        engine = tiny_engine(
            model=model, attention=attention, kv_dtype="fp8_e4m3", kv_tokens=128, max_num_seqs=16, max_batch_tokens=18
        )
        assert engine.worker.backend.name == attention and engine.worker.kv.data.dtype == torch.uint8
        samples.append(run(engine, [asked]))
    for key, sample in samples[0].items():
        np.testing.assert_array_equal(sample.token_ids, samples[1][key].token_ids)
        np.testing.assert_allclose(sample.logprobs, samples[1][key].logprobs, atol=1e-5, rtol=0)


def test_without_it_nothing_changes() -> None:
    engine = tiny_engine()
    assert engine.worker.kv.data.dtype == torch.float32 and engine.worker.kv.data.dim() == 6 and FP8 not in engine.arithmetic
    assert EngineConfig().kv_dtype == "auto"


def test_who_cannot_read_it_says_so() -> None:
    with pytest.raises(
        ValueError, match='attention="native": the kernel reads KV .* not in fp8_e4m3; attention="auto" selects'
    ):
        tiny_engine(**KEPT, attention="native")
    with pytest.raises(ValueError, match="kv_dtype='fp8_e5m2': must be one of auto, fp8_e4m3"):
        EngineConfig(kv_dtype="fp8_e5m2")  # type: ignore[arg-type]
    model: Any = None  # nothing of it is looked at
    with pytest.raises(ValueError, match=r"whose KV is in fp8, .* kv_dtype=\"auto\", or weigh its samples"):
        use_exact(model, f"fma/1+torch/2.13.0+{FP8}")
