"""Fused layers with `exact`: a trainer has the service's log-probs to the bit, and torch's gradients. In Triton's interpreter
where there is no GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.config import AdvancedConfig, EngineConfig  # noqa: E402
from rollout.engine.cpu.device import CpuDevice  # noqa: E402
from rollout.engine.cuda import sampling, tiles  # noqa: E402
from rollout.engine.cuda.attention import TritonAttention  # noqa: E402
from rollout.engine.cuda.device import CudaDevice, equip_exact  # noqa: E402
from rollout.engine.cuda.fused import FusedDecoder, NotFused  # noqa: E402
from rollout.engine.forward.attention import StepCapacity  # noqa: E402
from rollout.engine.forward.model import Model  # noqa: E402
from rollout.engine.forward.reference import ReferenceAttention  # noqa: E402
from rollout.engine.forward.sampling import launch_draws  # noqa: E402
from rollout.engine.memory import HostMemory  # noqa: E402
from rollout.engine.values import Sample  # noqa: E402
from rollout.exact import on_device, sample_logprobs, use_exact  # noqa: E402
from rollout.exact.attention import _attending, register  # noqa: E402
from rollout.exact.attention_on_device import DeviceAttention  # noqa: E402
from rollout.exact.fused import FusedAttention, _plain_rotation, rotated, silu_mul, use_fused_layers  # noqa: E402
from rollout.exact.module import plain_logprobs  # noqa: E402
from tests.support.tiny import tiny, tiny_engine  # noqa: E402
from tests.support.toy import group, run  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    "intermediate_size": 32,
}  # fmt: skip
BLOCK = 8
PROMPTS = {"a": np.arange(5, 23), "b": np.array([9, 8])}


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CHUNK_TOKENS", 16)
        patch.setattr("rollout.engine.cuda.fused.CHECKED_ROWS", (2,))
        yield


def model(family: str = "qwen3", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Make a model whose norms and biases are not those that it begins with."""
    heads = {"head_dim": 16} if family == "qwen3" else {}
    made = tiny(family, dtype, **SMALL | heads | options).to(DEVICE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return made


def trainer(made: Any, fused: bool = True) -> Any:
    """Do what `use_exact` does on CUDA, on the device that there is."""
    backend = DeviceAttention(torch.device(DEVICE), 2)
    _attending(made, register("tests_exact_fused", backend.attend, BLOCK), BLOCK, "sdpa")
    on_device.use_products(made)
    if fused:
        use_fused_layers(made, BLOCK)
    return made


def served(made: Any) -> tuple[dict[tuple[str, int], Sample], Any]:
    """Return samples of an exact service with fused layers, two groups beside each other, and its engine."""
    options: dict[str, Any] = {"attention": "triton", "block_size": BLOCK, "max_num_seqs": 16, "max_batch_tokens": 32}
    with pytest.MonkeyPatch.context() as patch:
        for device in (CpuDevice, CudaDevice):
            patch.setattr(device, "equip", lambda self, model, config, backend: equip_exact(model, backend, True, False))
        patch.setattr("rollout.engine.forward.self_check.check_model", lambda _: None)  # it takes a minute in the interpreter
        engine = tiny_engine(model=made, device=DEVICE, kv_tokens=512, **options)
    engine.worker.device.sample = lambda logits, batch: launch_draws(logits, batch, sampling)  # type: ignore[method-assign]
    asked = {"n": 1, "max_tokens": 3, "temperature": 0.7, "ignore_eos": True}
    return run(engine, [group(name, prompt.tolist(), **asked) for name, prompt in PROMPTS.items()]), engine


def scored(made: Any, samples: dict[tuple[str, int], Sample], patch: pytest.MonkeyPatch) -> list[np.ndarray]:
    patch.setattr("rollout.exact.module.token_logprobs", on_device.token_logprobs)
    with torch.no_grad():
        found = sample_logprobs(made, [(PROMPTS[name], sample.token_ids) for (name, _), sample in samples.items()], 0.7)
    return [each.cpu().numpy() for each in found]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", torch.float32),
        pytest.param("qwen3", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("qwen2", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("llama", torch.float32, marks=pytest.mark.long),
    ],
)
def test_a_trainer_has_the_bits_of_fused_layers(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a padded batch. The negative control is an exact trainer that multiplies silu · up in another order; in bf16, where a
    last bit of fp32 is seldom seen, one without exact products. One without the kernels of fused layers may have the same bits:
    the interpreter takes numpy's exp, which is torch's on some CPUs."""
    samples, engine = served(model(family, dtype))
    assert isinstance(engine.model.decoder, FusedDecoder) and engine.arithmetic.startswith("exact/1/fused+triton/1/t")
    assert on_device.is_fused(engine.arithmetic)
    assert on_device.arithmetic_of(engine.model.module, torch.device(DEVICE), fused=True) == engine.arithmetic
    made = trainer(model(family, dtype))
    for found, sample in zip(scored(made, samples, monkeypatch), samples.values(), strict=True):
        assert found.tobytes() == sample.logprobs.tobytes()
    wide = dtype == torch.float32
    control = trainer(model(family, dtype)) if wide else model(family, dtype)
    ids = torch.arange(3, 29, device=DEVICE)[None]
    with torch.no_grad():
        ours = made(input_ids=ids, use_cache=False).logits
        monkeypatch.setattr("rollout.exact.fused.silu_mul", lambda gate, up: gate * (gate.sigmoid() * up))
        other = control(input_ids=ids, use_cache=False).logits
    assert not torch.equal(ours, other)
    torch.testing.assert_close(ours, other, rtol=1e-4 if wide else 0.05, atol=1e-4 if wide else 0.1)


def test_an_exact_service_without_fused_layers_has_another_name() -> None:
    made = model()
    path = equip_exact(Model(made, "tiny"), Any, fused=False, library=True)
    assert path.arithmetic == "exact/1" and path.decoder is None
    other = Model(model(), "tiny")
    path = equip_exact(other, ReferenceAttention(), fused=True, library=True)
    assert path.arithmetic == "exact/1" and other.decoder is None and "stores K and V itself" in path.why


def test_gradients_are_torch_s() -> None:
    """Of the log-probs of a batch of two rows, as a trainer takes them: near those of the module, in every parameter."""
    ids = torch.stack([torch.arange(3, 10), torch.arange(11, 18)]).to(DEVICE)
    plain, made = model(), trainer(model())
    for each, score in ((plain, plain_logprobs), (made, on_device.token_logprobs)):
        score(each(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:], 0.7).sum().backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), made.named_parameters(), strict=True):
        assert one.grad is not None and one.grad.abs().max() > 0
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_turned_as_torch_turns_them(normed: bool) -> None:
    """Values up to rounding and gradients, for positions that all rows share, and K of which no row fills a block. The control
    is another position."""
    layer = model("qwen3" if normed else "llama").model.layers[0].self_attn
    (b, length, dim), generator = (2, 5, layer.head_dim), torch.Generator().manual_seed(0)
    query, key = (torch.randn(b, heads, length, dim, generator=generator).to(DEVICE).requires_grad_() for heads in (2, 1))
    angles = torch.randn(1, length, dim // 2, generator=generator).to(DEVICE).repeat(1, 1, 2)
    turned = [rotated(layer, BLOCK, query, key, at.cos(), at.sin()) for at in (angles, angles + 0.1)]
    weights = (layer.q_norm.weight, layer.k_norm.weight) if normed else (None, None)
    for made, other, x, weight in zip(*turned, (query, key), weights, strict=True):
        want = _plain_rotation(x, weight, angles.cos()[:, None], angles.sin()[:, None], 1e-6)
        torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(made, other, atol=1e-2)
        given = [x] if weight is None else [x, weight]
        grad = torch.randn(made.shape, generator=generator).to(DEVICE)
        for mine, theirs in zip(
            torch.autograd.grad(made, given, grad, retain_graph=True), torch.autograd.grad(want, given, grad), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_silu_mul_and_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = ((torch.randn(2, 3, 700, generator=generator) * 3).to(DEVICE) for _ in range(3))
    given = gate.requires_grad_(), up.requires_grad_()
    made, want = silu_mul(*given), silu(gate) * up
    torch.testing.assert_close(made, want)
    for mine, theirs in zip(torch.autograd.grad(made, given, grad), torch.autograd.grad(want, given, grad), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_copy_and_what_is_undone() -> None:
    """A copy computes with its own norms; undone, the model is exact as before."""
    ids = torch.arange(3, 9, device=DEVICE)[None]
    exact, made = trainer(model(), fused=False), trainer(model(), fused=False)
    with torch.no_grad():
        undo = use_fused_layers(made, BLOCK)
        other = copy.deepcopy(made)
        assert torch.equal(made(input_ids=ids).logits, other(input_ids=ids).logits)
        other.model.layers[0].self_attn.q_norm.weight.mul_(2)
        assert not torch.equal(made(input_ids=ids).logits, other(input_ids=ids).logits)
        undo()
        assert torch.equal(made(input_ids=ids).logits, exact(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("phi3", "unsupported decoder layer"),
        ("smollm3", "a layer without rotary positions"),
        ("granite", "a factor of the residual"),
        ("helium", "logits that differ"),
    ],
)
def test_layers_that_a_service_does_not_fuse_are_refused(family: str, why: str) -> None:
    """By what they have, or by what they compute. Nothing is changed then."""
    options = {"num_hidden_layers": 4} if family == "smollm3" else {}
    made = tiny(family, **SMALL | {"head_dim": 16} | options).to(DEVICE)
    with pytest.raises(NotFused, match=why):
        use_fused_layers(made, BLOCK)
    assert all("forward" not in vars(each) for each in made.modules())


class OnCuda(torch.nn.Module):
    """Says that a model is on CUDA, so that `use_exact` takes its way there."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.device, self.config = inner, torch.device("cuda"), inner.config


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_use_exact_does_what_the_name_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `/fused`, without it, and without a name: then what a service computes by default. A model whose layers no service
    fuses is refused under that name, and left as it was."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.__version__", "3.9.1")
    monkeypatch.setattr("rollout.exact.module._check_precision", lambda device: None)
    monkeypatch.setattr("rollout.exact.on_device.use_exact_attention", lambda model, block_size: lambda: None)
    monkeypatch.setattr(
        "rollout.exact.on_device.use_fused_layers", lambda model, block_size: use_fused_layers(model.inner, block_size)
    )
    plain, fused = "exact/1+triton/1/t3.9/sm90", "exact/1/fused+triton/1/t3.9/sm90"
    fuses = family == "qwen3"
    for name, wanted in ((plain, plain), (fused, fused), (None, fused if fuses else plain)):
        made = OnCuda(model(family))
        if name == fused and not fuses:
            with pytest.raises(ValueError, match=r"exact/1/fused\+triton.*cannot be fused: unsupported decoder layer"):
                use_exact(made, name)
        else:
            exact = use_exact(made, name)
            assert exact.arithmetic == wanted
            assert (type(vars(made.inner.model.layers[0].self_attn).get("forward")) is FusedAttention) == (wanted == fused)
            exact.remove()
        assert all("forward" not in vars(each) for each in made.modules())


@pytest.mark.parametrize(
    ("options", "fuses", "name"),
    [
        ({"exact": True}, True, "exact/1/fused"),
        ({"exact": True, "advanced": AdvancedConfig(fused_layers=False)}, False, "exact/1"),
        ({"exact": True, "routed_experts": True}, False, "exact/1"),
        ({}, True, "torch/"),
    ],
)
def test_what_a_service_on_cuda_runs(options: dict[str, Any], fuses: bool, name: str) -> None:
    """By its options: layers are fused with `exact` and without it, unless they are not to be."""
    served = Model(model(), "tiny")
    backend = TritonAttention(torch.device(DEVICE), StepCapacity(16, 16, 8, 2, 1, 16, 4), 2)
    device: Any = SimpleNamespace(memory=HostMemory())
    path = CudaDevice.equip(device, served, EngineConfig(device="cuda", dtype="float32", **options), backend)
    assert path is not None and isinstance(path.decoder, FusedDecoder) == fuses and served.decoder is path.decoder
    assert path.arithmetic.startswith(name) and path.arithmetic.endswith("/fused") == fuses
