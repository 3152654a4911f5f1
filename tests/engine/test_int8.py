"""Weights in eight bits: the arithmetic by definition, equal bits on every instruction set and in any company, an engine, its
refreshes, and a trainer whose importance ratio is 1."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rollout.engine.config import EngineConfig, WeightOffload
from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.cpu.device import CpuDevice
from rollout.engine.cpu.exact_modules import NotServed
from rollout.engine.cpu.int8 import GROUP, Int8Kernels, Int8Linear, int8_kernels
from rollout.engine.cpu.int8_modules import codes_in, plain_weights, use_int8
from rollout.engine.cpu.isa import here
from rollout.engine.cpu.kernels import Kernels
from rollout.engine.cuda.device import CudaDevice
from rollout.engine.engine import Engine
from rollout.engine.forward.model import UnsupportedModel
from rollout.engine.values import Adapter, LoraTarget, Sample, WeightUpdate
from rollout.engine.values.arithmetic import INT8
from rollout.engine.weights.live import Weights
from rollout.engine.weights.staging import source_of
from rollout.engine.weights.tensors import describe, tensor_bytes, with_digest
from rollout.exact import sample_logprobs, use_exact
from tests.support.broken_commit import fail_commit
from tests.support.equivalence import CLASSES, ROOMY, assert_same, groups
from tests.support.families import build
from tests.support.samebits import torchs_log_softmax
from tests.support.tiny import plain_logprobs, tiny, tiny_engine
from tests.support.toy import group, run

BF16 = torch.bfloat16
DTYPES = (BF16, torch.float32)
SHAPES = [(1, 1, 1), (2, 7, 3), (3, 100, 100), (9, 130, 1000), (8, 96, 576), (300, 50, 70)]
"""rows, outputs, inputs: ends inside groups, blocks, panels and blocks of rows"""
NORMAL = 2.0**-126
pytestmark = pytest.mark.skipif(here() == [], reason="no kernels for this CPU")


# ── the arithmetic ────────────────────────────────────────────────────────────────────────────────────────────────────
def encoded(numbers: torch.Tensor, is_weight: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, groups, GROUP] and scales [rows, groups] by the definition in docs/internals/int8.md, in torch's fp32."""
    padded = nn.functional.pad(numbers.float(), (0, -numbers.shape[1] % GROUP)).view(len(numbers), -1, GROUP)
    scales = padded.abs().amax(-1) / (127 if is_weight else 127 * 256)
    if is_weight:  # to bf16, upwards
        scales = ((scales.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    scales = torch.where(scales < NORMAL, 0.0, scales)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return torch.round(padded * inverse[..., None]), scales


def by_definition(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of rows x [T, K] with a weight [N, K]; an FMA in float64, whose product is exact, rounded to fp32."""
    (codes, scales), (of_w, scales_w) = encoded(x, False), encoded(w, True)
    total = torch.zeros(len(x), len(w))
    for g in range(codes.shape[1]):
        dot = (codes[:, g].double() @ of_w[:, g].double().T).float().double()  # of integers, rounded once
        total = (dot * (scales[:, g, None] * scales_w[None, :, g]).double() + total.double()).float()
    return (total if bias is None else total + bias.float()).to(x.dtype)


def numbers(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs + inputs)
    x, w, bias = (torch.randn(size, generator=generator) for size in ((rows, inputs), (outputs, inputs), (outputs,)))
    x *= torch.randn(rows, 1, generator=generator).exp()
    if inputs > GROUP:
        x[0, :GROUP], w[0, :GROUP] = 0, w[0, :GROUP] * 1e-39
    return x.to(dtype), w.to(dtype), bias.to(dtype)


def codes_of(kernels: Int8Kernels, weight: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(kernels.nbytes(weight), dtype=torch.uint8)
    kernels.encode(weight, codes, 0, len(weight))
    return codes


@pytest.fixture(scope="module", params=here())
def kernels(request: pytest.FixtureRequest) -> Int8Kernels:
    return Int8Kernels(Kernels(request.param))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_what_the_definition_says(kernels: Int8Kernels, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """To the bit, on every instruction set, and with both ways to multiply codes."""
    x, w, bias = numbers(*shape, dtype)
    want, codes = by_definition(x, w, bias), codes_of(kernels, w)
    for pairs in (False, True):
        before = kernels.kernels.tuning.bytes
        kernels.kernels.tuning.bytes &= not pairs
        assert torch.equal(kernels.linear(x, codes, w, bias), want)
        kernels.kernels.tuning.bytes = before
    assert torch.equal(kernels.linear(x, codes, w, None), by_definition(x, w, None))
    for rows, is_weight in ((x, False), (w, True)):
        stands, scales = encoded(rows, is_weight)
        stand_for = (stands * scales[..., None]).view(len(rows), -1)[:, : rows.shape[1]].to(dtype)
        assert torch.equal(kernels.rounded(rows, is_weight), stand_for)
    if shape[2] > 1:
        assert not torch.equal(want, nn.functional.linear(x, w, bias)), "rounding is not seen"


def test_a_row_is_the_same_in_any_company(kernels: Int8Kernels) -> None:
    x, w, bias = numbers(290, 70, 611, BF16)
    alone, codes = Int8Kernels(Kernels(kernels.kernels.isa, 3)), codes_of(kernels, w)
    together = kernels.linear(x, codes, w, bias)
    for first, rows in ((0, 1), (7, 2), (30, 9), (16, 17), (100, 130), (289, 1)):
        assert torch.equal(alone.linear(x[first : first + rows], codes, w, bias), together[first : first + rows])


def test_numbers_that_are_not_finite_reach_their_row_alone(kernels: Int8Kernels) -> None:
    x, w, _ = numbers(19, 35, 75, BF16)
    codes = codes_of(kernels, w)
    want = kernels.linear(x, codes, w, None)
    x[3], x[11, 70] = torch.nan, -torch.inf
    got, others = kernels.linear(x, codes, w, None), [i for i in range(19) if i not in (3, 11)]
    assert torch.equal(got[others], want[others]) and got[[3, 11]].isnan().all()


def test_blocks_of_outputs_are_encoded_apart(kernels: Int8Kernels) -> None:
    """As staging does, from a part of the weight to the next."""
    _, w, _ = numbers(1, 130, 200, BF16)
    want, codes = codes_of(kernels, w), torch.zeros(kernels.nbytes(w), dtype=torch.uint8)
    for first, end in ((48, 112), (0, 16), (112, 130), (16, 48)):
        assert not torch.equal(codes, want)
        kernels.encode(w, codes, first, end, threads=1)
    assert torch.equal(codes, want)


# ── an engine ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def int8_engine(name: str = "llama", dtype: torch.dtype = BF16, model: Any = None, **config: Any) -> Engine:
    module = tiny(name, dtype) if model is None else model
    return tiny_engine(model=module, dtype=str(dtype).removeprefix("torch."), weight_dtype="int8", **config)


def exactly(engine: Engine, trainer: Any, each: Any) -> tuple[float, float]:
    """Largest difference of log-probs, trainer with `use_exact` and plain trainer, of the samples of a group."""
    samples = run(engine, [each]).values()
    plain = max(float(np.abs(plain_logprobs(trainer, each.prompt, sample) - sample.logprobs).max()) for sample in samples)
    exact = use_exact(trainer, engine.arithmetic, 8, 1)
    assert exact.arithmetic == engine.arithmetic
    with torch.no_grad():
        scored = [sample_logprobs(trainer, [(each.prompt, sample.token_ids)])[0].numpy() for sample in samples]
    exact.remove()
    pairs = zip(scored, samples, strict=True)
    return max(float(np.abs(one - sample.logprobs).max()) for one, sample in pairs), plain


@pytest.fixture(scope="module")
def canonical() -> dict[tuple[str, int], Sample]:
    return run(int8_engine(**ROOMY), groups())


SHORT = ("small chunks", "offload")


@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in CLASSES])
def test_class(name: str, canonical: dict[tuple[str, int], Sample]) -> None:
    """Alone, in a crowd, in chunks, forked, reset, offloaded and restored: the same to the bit."""
    engine = int8_engine(**CLASSES[name])
    assert engine.worker.kernels.path.batch_invariant and not engine.worker.kernels.path.torch_bits
    assert_same(canonical, run(engine, groups()))


PATHS = {"llama": "module", "qwen2": "NativeDecoder", "gemma2": "module"}
FAMILIES = {"qwen3_5_text": "NativeDecoder", "lfm2": "NativeDecoder", "falcon_h1": "module"}


AT_ONCE = (("qwen2", BF16), ("qwen2", torch.float32), ("llama", BF16), ("qwen3_5_text", BF16))
CASES = [
    pytest.param(name, dtype, marks=() if (name, dtype) in AT_ONCE else pytest.mark.long)
    for name in (*PATHS, *FAMILIES)
    for dtype in DTYPES
]


@torchs_log_softmax
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_ratio_of_a_trainer_is_one(name: str, dtype: torch.dtype) -> None:
    """To the bit, through the C layers and through modules, recurrent ones included; without `use_exact` it is not."""
    wide = {"head_dim": 32} if name == "qwen2" else {}

    def make() -> Any:
        return build(name, dtype) if name in FAMILIES else tiny(name, dtype, **wide)

    engine = int8_engine(name, dtype, make())
    assert engine.arithmetic.endswith(INT8) and engine.status()["weight_dtype"] == "int8"
    assert engine.status()["computed_by"] == {**PATHS, **FAMILIES}[name]
    trainer = make()
    before = copy.deepcopy(trainer)
    each = group("a", np.arange(7, 60), n=2, max_tokens=20, ignore_eos=True)
    exact, plain = exactly(engine, trainer, each)
    assert exact == 0 and plain > 1e-4
    assert set(trainer.state_dict()) == set(before.state_dict()) and not codes_in(trainer)
    ids = torch.arange(9, 40)[None]
    assert torch.equal(trainer(input_ids=ids).logits, before(input_ids=ids).logits), "removed, it computes as before"


def test_a_gradient_is_straight_through() -> None:
    """That of the product of what the codes stand for: finite differences of (x + c) · (w + d)ᵀ, c and d the rounding of x and
    w, held fixed."""
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*size, generator=generator) for size in ((5, 100), (7, 100), (7,)))
    pull = torch.randn(5, 7, generator=generator).double()
    layer: Any = nn.Linear(100, 7)
    with torch.no_grad():
        layer.weight.copy_(w)
        layer.bias.copy_(bias)
    use_int8(layer, here()[0], kept=False)
    given = x.clone().requires_grad_()
    (layer(given).double() * pull).sum().backward()
    kernels = int8_kernels(here()[0])
    fixed = [kernels.rounded(each, is_weight).double() - each.double() for each, is_weight in ((x, False), (w, True))]
    assert all(each.abs().max() > 1e-6 for each in fixed), "nothing is rounded"

    def surrogate(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> float:
        return float((((x + fixed[0]) @ (w + fixed[1]).T + bias) * pull).sum())

    tensors, step = [each.double() for each in (x, w, bias)], 1e-3
    for which, gradient in enumerate((given.grad, layer.weight.grad, layer.bias.grad)):
        for at in range(0, tensors[which].numel(), 13):
            sides = []
            for sign in (step, -step):
                moved = [each.clone() for each in tensors]
                moved[which].view(-1)[at] += sign
                sides.append(surrogate(*moved))
            difference = (sides[0] - sides[1]) / (2 * step)
            assert abs(difference - float(gradient.view(-1)[at])) < 1e-4 * (1 + abs(difference))
    plain = pull.float() @ w
    assert (given.grad - plain).abs().max() > 1e-3, "the gradient of what is not rounded would do"


def test_every_weight_of_a_model_has_a_gradient() -> None:
    """A whole model: every weight has a gradient, near that of the plain forward."""
    model, plain = tiny("llama", head_dim=32), tiny("llama", head_dim=32)
    use_exact(model, int8_engine(model=tiny("llama", head_dim=32), dtype=torch.float32).arithmetic, 8, 1)
    ids = torch.arange(9, 60)[None]
    for each in (model, plain):
        each(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :, 5].sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        similar = nn.functional.cosine_similarity(one.grad.flatten(), other.grad.flatten(), 0)
        assert 0.98 < similar and not torch.equal(one.grad, other.grad), (name, similar)


# ── refreshes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def pushed(seed: int = 1, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    return dict(tiny("llama", dtype, seed=seed, head_dim=32).named_parameters())


def fresh(seed: int = 0, **config: Any) -> Engine:
    return int8_engine(model=tiny("llama", BF16, seed=seed, head_dim=32), **config)


def codes_are_of_the_weights(engine: Engine) -> bool:
    """Whether each module's codes are those of its parameter as it is now, and the decoder reads them."""
    module: Any = engine.model
    kept = [each for each in module.module.modules() if type(each) is Int8Linear]
    assert len(kept) == 15 and engine.status()["computed_by"] == "NativeDecoder"
    return all(torch.equal(each.twin.data, codes_of(int8_kernels(each.isa), each.weight.detach())) for each in kept)


def samples(engine: Engine) -> list[bytes]:
    made = run(engine, [group("late", [9, 8, 7, 6], n=3, max_tokens=12, ignore_eos=True)])
    return [made[key].logprobs.tobytes() for key in sorted(made)]


@pytest.mark.parametrize("sent", [torch.float32, pytest.param(BF16, marks=pytest.mark.long)])
def test_a_refresh_encodes(sent: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of any size, in place; digests are those of the weights that were sent."""
    monkeypatch.setattr("rollout.engine.weights.staging.SLICE_BYTES", 1100)
    engine = fresh()
    assert codes_are_of_the_weights(engine)
    before = [each.data_ptr() for each in codes_in(engine.model.module)]  # type: ignore[attr-defined]
    new = {name: tensor.detach().to(sent) for name, tensor in pushed().items()}
    done = engine.refresh(new)
    assert codes_are_of_the_weights(engine) and done.digest == engine.weights.live_digest() == fresh(1).weights.digest
    assert [each.data_ptr() for each in codes_in(engine.model.module)] == before  # type: ignore[attr-defined]
    assert samples(engine) == samples(fresh(1)) != samples(fresh())
    some = {name: tensor for name, tensor in pushed(2).items() if "mlp" in name}
    engine.refresh(some, partial=True)
    assert codes_are_of_the_weights(engine)


@pytest.mark.parametrize("k", [0, 30, *(pytest.param(k, marks=pytest.mark.long) for k in (20, 21, 35))])
def test_a_refresh_that_fails_leaves_the_codes(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the commit stops, at a parameter or at codes."""
    engine = fresh()
    want = samples(engine)
    fail_commit(monkeypatch, k, "writing")
    with pytest.raises(MemoryError, match="injected"):
        engine.refresh(pushed())
    monkeypatch.undo()
    assert codes_are_of_the_weights(engine) and engine.version == 0 and samples(engine) == want
    engine.refresh(pushed())
    assert codes_are_of_the_weights(engine) and samples(engine) == samples(fresh(1))


def test_without_undo_the_codes_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    engine = fresh()
    fail_commit(monkeypatch, 30, "writing")
    monkeypatch.setattr(Weights, "_undo", lambda self, done, error: None)
    with pytest.raises(MemoryError):
        engine.refresh(pushed())
    assert not codes_are_of_the_weights(engine)


def test_an_adapter_is_merged_before_it_is_encoded() -> None:
    engine, merged = fresh(), tiny("llama", BF16, head_dim=32)
    name = "model.layers.1.mlp.up_proj.weight"
    a, b = torch.randn(4, 64), torch.randn(96, 4) * 0.1
    described = [with_digest(*describe(key, each)) for key, each in (("A", a), ("B", b))]
    staging = engine.stage(WeightUpdate(described, adapter=Adapter(None, [LoraTarget(name, "A", "B", 0.5)])))
    staging.feed_all(source_of(tensor_bytes(each) for each in (a, b)))
    engine.commit(staging)
    with torch.no_grad():
        merged.get_parameter(name).add_(b @ a * 0.5)
    assert codes_are_of_the_weights(engine) and samples(engine) == samples(int8_engine(model=merged)) != samples(fresh())


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(level: int) -> None:
    engine = fresh(cpu_offload_gib=0.01)
    size = engine.status()["weights"]["resident_bytes"]
    parameters = sum(each.nbytes for each in engine.model.module.parameters())  # type: ignore[attr-defined]
    codes = sum(each.nbytes for each in codes_in(engine.model.module))  # type: ignore[attr-defined]
    assert size >= parameters + codes and codes > 0.5 * parameters * 0.9
    engine.sleep(level)
    if level == 2:
        assert not any(each.numel() for each in codes_in(engine.model.module))  # type: ignore[attr-defined]
    engine.wake()
    engine.refresh(pushed())
    assert codes_are_of_the_weights(engine) and samples(engine) == samples(fresh(1))
    engine.refresh(pushed(2))
    assert codes_are_of_the_weights(engine)


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_has_other_matrices_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"weight_dtype=\"int8\": model.layers.0.mlp.*is a matrix of a"):
        int8_engine("mixtral")
    quantised = tiny("llama", BF16)
    quantised.lm_head.__class__ = type("Other", (nn.Linear,), {})
    with pytest.raises(UnsupportedModel, match="lm_head is a Other: need a plain nn.Linear"):
        int8_engine(model=quantised)
    with torch.no_grad():
        (broken := tiny("llama", BF16)).lm_head.weight[3, 3] = torch.inf
    with pytest.raises(UnsupportedModel, match="lm_head holds NaN or infinity"):
        int8_engine(model=broken)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"isa": "torch"}, "isa='torch': it needs kernels"),
        ({"latent_kv": True}, "with latent_kv"),
        ({"weight_dtype": "int4"}, "must be one of auto, int8"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineConfig(**{"weight_dtype": "int8", **options})


def test_offloaded_layers_are_refused() -> None:
    with pytest.raises(ValueError, match='weight_dtype="int8" with weight_offload'):
        CpuDevice(EngineConfig(weight_dtype="int8", weight_offload=WeightOffload()))


def test_a_gpu_refuses_it() -> None:
    with pytest.raises(ValueError, match="weight_dtype='int8' is for the CPU"):
        CudaDevice(EngineConfig(weight_dtype="int8", device="cuda"))


def test_without_kernels_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(isa: str, *_: Any) -> None:
        raise NativeUnavailable(f"no {isa} today")

    monkeypatch.setattr("rollout.engine.cpu.kernels.Kernels", unavailable)
    with pytest.raises(ValueError, match="needs kernels, and there are none here: no "):
        int8_engine()


def test_a_trainer_with_an_adapter_is_refused() -> None:
    """The service encodes the sum, PEFT's forward the parts."""
    model: Any = tiny("llama", BF16)
    wrapped = nn.Module()
    wrapped.base_layer = model.model.layers[0].self_attn.q_proj
    with pytest.raises(NotServed, match="has an adapter"):
        use_int8(wrapped, here()[0], kept=False)
    assert type(wrapped.base_layer) is nn.Linear


def test_another_engine_may_take_the_module_without_it() -> None:
    module = tiny("llama", BF16, head_dim=32)
    want = samples(tiny_engine(model=copy.deepcopy(module), dtype="bfloat16"))
    assert samples(int8_engine(model=module)) != want
    engine = tiny_engine(model=module, dtype="bfloat16")
    assert samples(engine) == want and not engine.arithmetic.endswith(INT8)
    plain_weights(module)
    assert not codes_in(module)
