"""Fused decoder layers, in Triton's interpreter where there is no GPU: the module's logits up to rounding, refreshed in place,
there again after a sleep; what is of another kind is left alone. How many kernels they launch is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cpu.device import CpuDevice  # noqa: E402
from rollout.engine.cuda import fused_kernels  # noqa: E402
from rollout.engine.cuda.device import fuse  # noqa: E402
from rollout.engine.cuda.fused import CHECKED_ROWS, FusedDecoder, NotFused  # noqa: E402
from rollout.engine.engine import Engine  # noqa: E402
from rollout.engine.forward.model import Model  # noqa: E402
from rollout.engine.kv import fp8  # noqa: E402
from rollout.engine.kv.cells import keys_and_values  # noqa: E402
from rollout.engine.kv.pages import PagedKV  # noqa: E402
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import HostMemory  # noqa: E402
from tests.support.configs import engine_config
from tests.support.cuda_launches import launches_per_layer  # noqa: E402
from tests.support.tiny import plain_logprobs, tiny  # noqa: E402
from tests.support.toy import group, run  # noqa: E402

pytestmark = pytest.mark.usefixtures("loads_in_full")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def decoder(module: Any) -> tuple[FusedDecoder, Model]:
    model = Model(module.to(DEVICE), "tiny")
    head = model.geometry.head_dim
    asked = {i: {"scaling": head**-0.5, "window": 0} for i in range(model.geometry.layers)}
    return FusedDecoder(model.module, asked, fused_kernels), model


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", torch.bfloat16),
        ("qwen2", torch.float32),
        pytest.param("qwen3", torch.float32, marks=pytest.mark.long),
        pytest.param("qwen2", torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_the_logits_of_the_module(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.cuda.fused.CHECKED_ROWS", CHECKED_ROWS[:1])
    options = SMALL | ({"head_dim": 24} if family == "qwen3" else {})
    module = tiny(family, dtype, **options)
    names = dict(module.named_parameters())
    if family == "qwen2":
        for name, parameter in names.items():
            if name.endswith("bias"):
                parameter.data.normal_()
    fused, model = decoder(module)
    with torch.inference_mode():
        fused.check(model.forward_transformers, model.vocab_size)
        module.model.layers[0].self_attn.k_proj.weight.mul_(1.5)  # in place, as by a refresh
        module.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        fused.check(model.forward_transformers, model.vocab_size)
    assert dict(module.named_parameters()).keys() == names.keys()


def test_numbers_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the above: kernels that leave something out."""
    fused, model = decoder(tiny("qwen3", **SMALL))
    layer = fused.body.layers[0]
    layer.post_attention_layernorm.weight.data.mul_(2)
    monkeypatch.setattr("rollout.engine.cuda.fused.CHECKED_ROWS", CHECKED_ROWS[:1])
    other = SimpleNamespace(weight=torch.ones_like(layer.input_layernorm.weight), variance_epsilon=1e-6)
    norm = fused._norm
    monkeypatch.setattr(fused, "_norm", lambda x, residual, each: norm(x, residual, other))
    with torch.inference_mode(), pytest.raises(NotFused, match="logits that differ"):
        fused.check(model.forward_transformers, model.vocab_size)


@pytest.mark.parametrize("family", ["phi3", "gemma3_text", "mixtral", "olmo2"])
def test_layers_of_another_kind_are_left_alone(family: str) -> None:
    with pytest.raises(NotFused):
        decoder(tiny(family))


def test_scores_that_are_not_computed() -> None:
    model = Model(tiny("qwen3", **SMALL), "qwen3")
    model.asked[0]["sinks"] = (4,)
    with pytest.raises(NotFused, match="sinks or soft caps"):
        FusedDecoder(model.module, model.asked, None)


def test_weights_that_are_multiplied_as_one_lie_side_by_side() -> None:
    module = tiny("qwen2", **SMALL)
    want = {name: parameter.clone() for name, parameter in module.named_parameters()}
    fused, _ = decoder(module)
    attention = module.model.layers[0].self_attn
    one = {each.weight.untyped_storage().data_ptr() for each in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(one) == 1
    assert all(torch.equal(want[name].to(DEVICE), parameter) for name, parameter in module.named_parameters())
    before = attention.k_proj.weight.data_ptr()
    fused.stack()
    assert attention.k_proj.weight.data_ptr() == before, "stacked again without need"
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()  # as after a sleep
    fused.stack()
    one = {each.weight.untyped_storage().data_ptr() for each in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(one) == 1 and torch.equal(attention.k_proj.weight, want["model.layers.0.self_attn.k_proj.weight"].to(DEVICE))


@pytest.mark.long
def test_an_engine_of_fused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs of a full forward of the module, with a prefix in common and padding; refreshed in place, and after a sleep."""
    monkeypatch.setattr("rollout.engine.cuda.fused.CHECKED_ROWS", (3,))
    monkeypatch.setattr(CpuDevice, "equip", lambda self, model, config, backend: fuse(model, backend))
    monkeypatch.setattr(
        "rollout.engine.forward.self_check.check_model", lambda served: None
    )  # takes seconds in the interpreter
    settings = engine_config(
        device=DEVICE, dtype="float32", attention="triton", block_size=4, kv_tokens=512, max_num_seqs=16, max_batch_tokens=64,
        cpu_offload_gib=0, cuda_graphs=False, fused_layers=True,
    )  # fmt: skip
    module = tiny("qwen3", **SMALL | {"head_dim": 16}).to(DEVICE)
    engine = Engine(settings, Model(module, "tiny"))
    assert isinstance(engine.model, Model) and isinstance(engine.model.decoder, FusedDecoder)
    assert engine.status()["computed_by"] == "FusedDecoder" and "/fused" in engine.arithmetic
    prompt = np.arange(3, 9, dtype=np.int32)

    def assert_plain(tag: str) -> None:
        for sample in run(engine, [group(tag, prompt.tolist(), n=2, max_tokens=2, ignore_eos=True)]).values():
            want = plain_logprobs(other, prompt, sample)
            np.testing.assert_allclose(sample.logprobs, want, atol=1e-4)

    other = tiny("qwen3", **SMALL | {"head_dim": 16}).to(DEVICE)
    assert_plain("first")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    engine.refresh(other.state_dict())
    assert_plain("refreshed")
    engine.sleep(2)
    engine.wake()
    engine.refresh(other.state_dict())
    attention = module.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert_plain("awake")


def test_launches_of_a_layer() -> None:
    """The module's own operators are the control: the counter sees them."""
    counted = launches_per_layer()
    print(counted)
    assert counted["unshared"] < counted["launches_per_layer"] <= 14 and counted["transformers"] > 40


def test_fp8_is_stored_as_the_numbers_in_bf16_would_be() -> None:
    """K after its norm and rotation, and V: the pool in fp8 has the codes and scales of the pool in bf16."""
    fused, model = decoder(tiny("qwen3", torch.bfloat16, **SMALL | {"head_dim": 24}))
    plain = model.geometry
    pools = [PagedKV(each, PoolSizes(4, 2, 0), HostMemory()) for each in (plain, plain.kept_as("fp8_e4m3"))]
    for kv in pools:
        kv.data = kv.data.to(DEVICE)
    attention, rows = fused.body.layers[0].self_attn, 6
    normed = torch.randn(rows, 32, device=DEVICE).to(torch.bfloat16)
    angles = torch.randn(rows, 24, device=DEVICE).to(torch.bfloat16)
    slots: Any = SimpleNamespace(slots_of=lambda batch: torch.tensor([4, 1, 7, 2, 0, -1], dtype=torch.int32, device=DEVICE))
    queries = [fused._query(0, attention, normed, angles.cos(), angles.sin(), Any, kv, slots) for kv in pools]
    assert torch.equal(*queries)
    for given, kept in zip(*(keys_and_values(kv, 0) for kv in pools), strict=True):
        codes, scales = fp8.encode(given.numbers[0])
        written = torch.tensor([True, True, True, False])
        assert kept.scales is not None and (given.numbers[0][:, written] != 0).any() and not kept.scales[0, :, ~written].any()
        assert torch.equal(kept.numbers[0][:, written], codes[:, written])
        assert torch.equal(kept.scales[0][:, written], scales[:, written])


def test_steps_of_one_token_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that `max_batch_tokens` may be: what is tried at load fits there too."""
    monkeypatch.setattr("rollout.engine.forward.self_check.TOKENS", 12)
    settings = engine_config(
        device=DEVICE, dtype="float32", attention="triton", block_size=8, kv_tokens=64, max_num_seqs=1, max_batch_tokens=1,
        cpu_offload_gib=0, cuda_graphs=False,
    )  # fmt: skip
    engine = Engine(settings, Model(tiny("llama", torch.float32, **SMALL).to(DEVICE), "tiny"))
    (sample,) = run(engine, [group("g", [5, 6], n=1, max_tokens=2, ignore_eos=True)]).values()
    assert len(sample.token_ids) == 2
