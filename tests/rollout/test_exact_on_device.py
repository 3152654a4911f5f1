"""A trainer on CUDA has the log-probs of a service with `exact = true`, to the bit: here in Triton's interpreter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda import sampling, tiles  # noqa: E402
from rollout.engine.cuda.attention import TritonAttention, TritonUnavailable  # noqa: E402
from rollout.engine.cuda.device import use_triton_mixers  # noqa: E402
from rollout.engine.cuda.exact import make_exact  # noqa: E402
from rollout.engine.forward.attention import StepCapacity  # noqa: E402
from rollout.engine.forward.sampling import launch_draws  # noqa: E402
from rollout.engine.values import Sample  # noqa: E402
from rollout.exact import on_device, sample_logprobs, use_exact  # noqa: E402
from rollout.exact.attention import _attending, register  # noqa: E402
from rollout.exact.attention_on_device import DeviceAttention  # noqa: E402
from rollout.exact.module import plain_logprobs  # noqa: E402
from tests.support.tiny import tiny, tiny_engine  # noqa: E402
from tests.support.toy import group, run  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": 64, "intermediate_size": 32,
}  # fmt: skip
BLOCK = 8


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CHUNK_TOKENS", 16)
        yield


def model(**options: Any) -> Any:
    return tiny("qwen3", **SMALL, **options).to(DEVICE)


def exact(made: Any, programs: int = 2) -> Any:
    """What `use_exact` does on CUDA, on the device that there is."""
    backend = DeviceAttention(torch.device(DEVICE), programs)
    _attending(made, register(f"tests_on_device_{programs}", backend.attend, BLOCK), BLOCK, "sdpa")
    on_device.use_products(made)
    return made


@pytest.fixture(scope="module")
def samples() -> dict[tuple[str, int], Sample]:
    """Of an exact service: two groups beside each other, drawn by the kernel."""
    made = model()
    make_exact(made)
    options: dict[str, Any] = {"attention": "triton", "block_size": BLOCK, "max_num_seqs": 16, "max_batch_tokens": 32}
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cpu.device.CpuDevice", "cuda.device.CudaDevice"):  # their own products are others
            patch.setattr(f"rollout.engine.{kind}.equip", lambda *_: None)
        patch.setattr(
            "rollout.engine.forward.self_check.check_model", lambda served: None
        )  # it has a test of its own, and takes a minute here
        engine = tiny_engine(model=made, device=DEVICE, kv_tokens=512, **options)
    engine.worker.device.sample = lambda logits, batch: launch_draws(logits, batch, sampling)  # type: ignore[method-assign]
    return run(
        engine,
        [
            group("a", range(5, 23), n=1, max_tokens=3, temperature=0.7, ignore_eos=True),
            group("b", [9, 8], n=1, max_tokens=3, temperature=0.7, ignore_eos=True),
        ],
    )


PROMPTS = {"a": np.arange(5, 23), "b": np.array([9, 8])}


def scored(made: Any, samples: dict[tuple[str, int], Sample], monkeypatch: pytest.MonkeyPatch) -> dict[Any, np.ndarray]:
    """Of a padded batch of all of them, longest first or last as the dictionary has it."""
    monkeypatch.setattr("rollout.exact.module.token_logprobs", on_device.token_logprobs)
    pairs = [(PROMPTS[name], sample.token_ids) for (name, _), sample in samples.items()]
    with torch.no_grad():
        found = sample_logprobs(made, pairs, 0.7)
    return {key: each.cpu().numpy() for key, each in zip(samples, found, strict=True)}


@pytest.mark.long
def test_a_padded_batch_has_the_service_s_bits(samples: dict[tuple[str, int], Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    for key, found in scored(exact(model()), samples, monkeypatch).items():
        np.testing.assert_array_equal(found, samples[key].logprobs)


def test_without_it_they_differ(samples: dict[tuple[str, int], Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: torch's attention, products and log-probs are near, and of other bits. Of many logits, since six
    log-probs are the same by chance now and then."""
    found = scored(model(), samples, monkeypatch)
    for key in samples:
        np.testing.assert_allclose(found[key], samples[key].logprobs, atol=1e-3)
    ids = torch.arange(3, 53, device=DEVICE)[None]
    with torch.no_grad():
        plain, ours = (each(input_ids=ids, use_cache=False).logits for each in (model(), exact(model())))
    assert not torch.equal(plain, ours)
    torch.testing.assert_close(plain, ours, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_module() -> None:
    ids = torch.arange(3, 13, device=DEVICE)[None]
    plain, made = model(), exact(model())
    for each, score in ((plain, plain_logprobs), (made, on_device.token_logprobs)):
        logits = each(input_ids=ids[:, :-1], use_cache=False).logits
        score(logits, ids[:, 1:], 0.7).sum().backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), made.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_log_probs_are_the_drawing_kernel_s(dtype: torch.dtype, temperature: float) -> None:
    r = np.random.default_rng(0)
    logits = torch.from_numpy(r.normal(0, 3, (2, 3000)).astype(np.float32)).to(DEVICE, dtype)
    uniform = r.random(2)
    row = np.arange(2)
    tokens, read = sampling.launch(logits, row, np.full(2, temperature), uniform, False)
    drawn = read()
    given = on_device.token_logprobs(logits, tokens, temperature)
    assert given.cpu().numpy().tobytes() == drawn.logprobs.tobytes()
    torch.testing.assert_close(given, plain_logprobs(logits, tokens, temperature), rtol=1e-5, atol=1e-5)


def test_what_it_undoes() -> None:
    plain, made = model(), model()
    undo = on_device.use_products(made)
    undo()
    ids = torch.arange(3, 20, device=DEVICE)[None]
    assert torch.equal(made(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert all("forward" not in vars(each) for each in made.modules())


def test_a_service_of_another_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other products, of a device of another capability, of another version of Triton."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.__version__", "3.9.1")
    device = torch.device("cuda")

    class OnCuda(torch.nn.Module):
        pass

    model: Any = OnCuda()
    model.device = device
    ours = "exact/1+triton/1/t3.9/sm90"
    assert on_device.arithmetic_of(model, device) == ours
    for other in ("torch/2.13.0+triton/1/t3.9/sm90", ours.replace("sm90", "sm80"), ours.replace("t3.9", "t3.8")):
        with pytest.raises(ValueError, match=rf"{re.escape(other)}.*{re.escape(ours)}.*exact = true.*versions of Triton"):
            use_exact(model, other)


@pytest.mark.parametrize(("version", "red"), [("3.5.1", True), ("3.6.0", False), ("3.9.0", False), ("3.10.0", True)])
def test_versions_of_triton(version: str, red: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", version)
    if red:
        with pytest.raises(TritonUnavailable, match=rf"Triton {version} is not supported, 3\.6 to 3\.9 are"):
            TritonAttention(torch.device(DEVICE), StepCapacity(16, 2, 8, 4, 1, 16, 2), 1)
    else:
        assert f"/t{version[:3]}/" in TritonAttention(torch.device(DEVICE), StepCapacity(16, 2, 8, 4, 1, 16, 2), 1).arithmetic


# ── recurrent layers and experts ──────────────────────────────────────────────────────────────────────────────────────
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}  # fmt: skip


def made_of(kind: str) -> Any:
    torch.manual_seed(0)
    options = {**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 256, "pad_token_id": 0, **KINDS[kind]}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).eval().to(DEVICE)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_service_and_a_trainer_with_states_or_experts_have_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a service that prefills and decodes two groups beside each other, and a trainer's padded batch, with gradients."""
    plain = made_of(kind)
    served = made_of(kind)
    make_exact(served)
    for device in ("cpu.device.CpuDevice", "cuda.device.CudaDevice"):
        monkeypatch.setattr(f"rollout.engine.{device}.equip", lambda *_: None)
    monkeypatch.setattr("rollout.engine.forward.self_check.check_model", lambda _: None)
    options: dict[str, Any] = {"attention": "triton", "block_size": BLOCK, "max_num_seqs": 16, "max_batch_tokens": 32}
    engine = tiny_engine(model=served, device=DEVICE, kv_tokens=256, **options)
    engine.worker.device.sample = lambda logits, batch: launch_draws(logits, batch, sampling)  # type: ignore[method-assign]
    whole: Any = engine.model
    if whole.states is not None:
        assert use_triton_mixers(whole) and on_device.arithmetic_of(plain, plain.device).startswith("exact/1+scan/1+triton/1/t")
    first = group("a", range(5, 15), n=1, max_tokens=2, ignore_eos=True)
    samples = run(engine, [first, group("b", [9, 8], n=2, max_tokens=2, ignore_eos=True)])
    trainer = exact(made_of(kind))
    monkeypatch.setattr("rollout.exact.module.token_logprobs", on_device.token_logprobs)
    prompts = {"a": np.arange(5, 15), "b": np.array([9, 8])}
    pairs = [(prompts[name], sample.token_ids) for (name, _), sample in samples.items()]
    for found, sample in zip(sample_logprobs(trainer, pairs), samples.values(), strict=True):
        assert found.detach().cpu().numpy().tobytes() == sample.logprobs.tobytes()
    ids = torch.arange(3, 33, device=DEVICE)[None]
    with torch.no_grad():
        ours, others = (each(input_ids=ids, use_cache=False).logits for each in (trainer, plain))
    torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-4)
    assert not torch.equal(ours, others), "the control: the module's own products and scans"
    torch.cat(sample_logprobs(trainer, pairs)).sum().backward()
    assert all(each.grad is not None for each in trainer.parameters() if each.requires_grad)
