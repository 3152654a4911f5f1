"""LoRA refreshes: base + scale · B A in the bits of PEFT's merge, all or nothing, and back to the base again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout.client.lora import Adapters
from rollout.engine.config import WeightOffload
from rollout.engine.values import Adapter, BaseMismatch, LoraTarget, TensorInfo, WeightUpdate
from rollout.engine.weights.lora import merge_into
from rollout.engine.weights.staging import source_of
from rollout.engine.weights.tensors import InvalidWeights, describe, with_digest
from tests.support.adapters import Named, adapter, factors, refresh, staged
from tests.support.broken_commit import fail_commit
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import group, run

Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"


def by_hand(model: PreTrainedModel, tensors: Named, names: list[str], scale: float = 0.5) -> PreTrainedModel:
    """The merged model, as the paper has it."""
    with torch.no_grad():
        for name in names:
            parameter = dict(model.named_parameters())[name]
            parameter += (tensors[name + ".B"].float() @ tensors[name + ".A"].float() * scale).to(tensors[name + ".B"].dtype)
    return model


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [None, WeightOffload(group_size=2, num_in_group=1, prefetch_step=1)], ids=["", "offload"])
def test_samples_are_those_of_the_merged_model(dtype: str, sent: torch.dtype, offload: WeightOffload | None) -> None:
    engine = tiny_engine(dtype=dtype, weight_offload=offload)
    base = engine.weights.digest
    tensors = factors(tiny("llama"), [Q, UP], dtype=sent)
    done = refresh(engine, tensors, adapter([Q, UP], base=base))
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert (done.version, done.sent_bytes, done.bytes) == (
        1,
        size,
        sum(p.nbytes for p in tiny("llama", getattr(torch, dtype)).parameters()),
    )
    merged = tiny_engine(dtype=dtype, model=by_hand(tiny("llama", getattr(torch, dtype)), tensors, [Q, UP]))
    assert engine.weights.live_digest() == engine.weights.digest == merged.weights.digest == done.digest != base
    assert engine.weights.base.digest == base
    asked = group("g", [9, 8, 7, 6], n=3, max_tokens=12, ignore_eos=True)
    mine, theirs = run(engine, [asked]), run(merged, [asked])
    assert all(mine[key].logprobs.tobytes() == theirs[key].logprobs.tobytes() for key in theirs)


def test_each_adapter_is_added_to_the_base_and_not_to_the_one_before() -> None:
    engine = tiny_engine()
    base = engine.weights.digest
    first, second = factors(tiny("llama"), [Q], 1), factors(tiny("llama"), [UP], 2)
    refresh(engine, first, adapter([Q]))
    assert engine.status()["weights"]["base_bytes"] == 64 * 64 * 4
    refresh(engine, second, adapter([UP], base=base))
    assert engine.weights.digest == tiny_engine(model=by_hand(tiny("llama"), second, [UP])).weights.digest
    assert list(engine.weights.base.changed) == [UP], "what went back to its base takes no memory"
    refresh(engine, {name: torch.zeros_like(tensor) for name, tensor in second.items()}, adapter([UP]))
    assert engine.weights.digest == engine.weights.live_digest() == base


def test_the_base_is_known_though_nobody_asked_before() -> None:
    """Its digests are taken while it is still live."""
    engine = tiny_engine()
    refresh(engine, factors(tiny("llama"), [Q]) | {NORM: torch.ones(64)}, adapter([Q]))
    assert engine.weights.base.digest == tiny_engine().weights.digest
    refresh(engine, factors(tiny("llama"), [Q], 3), adapter([Q]))
    assert engine.weights.base.digest == tiny_engine().weights.digest


def test_whole_tensors_come_with_an_adapter_and_go_with_it() -> None:
    """What PEFT calls modules_to_save."""
    engine = tiny_engine()
    base, norm = engine.weights.digest, torch.linspace(0.5, 1.5, 64)
    refresh(engine, factors(tiny("llama"), [Q]) | {NORM: norm}, adapter([Q]))
    assert torch.equal(engine.model.module.model.norm.weight, norm) and engine.weights.base.digest == base  # type: ignore[attr-defined]
    other = factors(tiny("llama"), [Q], 5)
    refresh(engine, other, adapter([Q], base=base))
    assert engine.weights.digest == tiny_engine(model=by_hand(tiny("llama"), other, [Q])).weights.digest


def test_a_refresh_of_whole_tensors_is_the_next_base() -> None:
    engine = tiny_engine()
    tensors = factors(tiny("llama"), [Q, UP])
    refresh(engine, tensors, adapter([Q, UP]))
    new = tiny("llama", seed=3)
    engine.refresh({Q: dict(new.named_parameters())[Q]}, partial=True)
    assert list(engine.weights.base.changed) == [UP]
    engine.refresh(new)
    assert not engine.weights.base.changed and engine.weights.base.digest == engine.weights.digest
    refresh(engine, tensors, adapter([Q, UP], base=engine.weights.digest))
    assert engine.weights.digest == tiny_engine(model=by_hand(tiny("llama", seed=3), tensors, [Q, UP])).weights.digest


def test_another_base_is_refused() -> None:
    engine = tiny_engine()
    tensors = factors(tiny("llama"), [Q])
    other = tiny_engine(dtype="bfloat16").weights.digest
    with pytest.raises(BaseMismatch, match="same checkpoint in the same dtype"):
        staged(engine, tensors, adapter([Q], base=other))
    assert engine.version == 0 and not engine.weights.staging
    refresh(engine, tensors, adapter([Q], base=engine.weights.digest))
    with pytest.raises(BaseMismatch):
        staged(engine, tensors, adapter([Q], base=engine.weights.digest))  # of the sum, which is no base


TWO = {"A": torch.ones(4, 64), "B": torch.ones(64, 4)}


def bad(**changes: Any) -> tuple[Named, Adapter]:
    """An adapter of Q with one thing changed."""
    tensors = factors(tiny("llama"), [Q])
    fields = {"weight": Q, "a": Q + ".A", "b": Q + ".B", "scale": 1.0, "transposed": False}
    fields |= {name: value for name, value in changes.items() if name in fields}
    target = LoraTarget(*fields.values())
    tensors |= changes.get("tensors", {})
    return tensors, Adapter(None, changes.get("targets", [target]))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (bad(targets=[]), "no targets"),
        (bad(weight="model.nothing.weight"), "no tensor of this name"),
        (bad(a=Q + ".C"), "is missing"),
        (bad(a=Q + ".B"), "belongs to another"),
        (bad(scale=float("nan")), "scale is nan"),
        (bad(weight=UP), "B A is .64, 64., the model's is .96, 64."),
        (bad(weight=NORM), "B A is"),
        (bad(tensors={Q + ".A": torch.ones(4, 64).double()}), "A is float64, B is float32"),
        (bad(tensors={Q + ".A": torch.ones(3, 64)}), "must be .rank, in. and .out, rank."),
        (bad(tensors={Q + ".A": torch.ones(65, 64), Q + ".B": torch.ones(64, 65)}), "rank 65 is above"),
        (
            bad(targets=[LoraTarget(Q, Q + ".A", Q + ".B", 1.0), LoraTarget(Q, "A", "B", 1.0)], tensors=TWO),
            "more than once",
        ),
        (bad(tensors={"model.nothing": torch.ones(2)}), "no tensor of this name"),
        (bad(tensors={Q + ".B": torch.full((64, 4), 1e38), Q + ".A": torch.full((4, 64), 1e38)}), "overflows"),
        (bad(tensors={Q + ".B": torch.full((64, 4), float("nan"))}), "NaN"),
    ],
    ids=range(14),
)
def test_refused_with_the_tensor_named(made: tuple[Named, Adapter], reason: str) -> None:
    engine = tiny_engine()
    digest = engine.weights.digest
    with pytest.raises(InvalidWeights, match=reason):
        refresh(engine, *made)
    assert engine.weights.live_digest() == engine.weights.digest == digest and engine.version == 0
    assert not engine.weights.staging and not engine.weights.base.nbytes
    engine.refresh(tiny("llama", seed=1))


def test_tied_weights_are_refused() -> None:
    engine = tiny_engine("llama-mha")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors = {"A": torch.ones(2, 64), "B": torch.ones(199, 2)}
        with pytest.raises(InvalidWeights, match="ties .* would change both"):
            staged(engine, tensors, Adapter(None, [LoraTarget(name, "A", "B", 1.0)]))
        with pytest.raises(InvalidWeights, match="ties"):
            staged(engine, factors(tiny("llama-mha"), [Q]) | {name: torch.ones(199, 64)}, adapter([Q]))


def test_a_transposed_weight() -> None:
    """GPT-2 keeps its linear layers as [in, out]."""
    model = tiny("gpt2", n_embd=64, n_layer=2, n_head=4, tie_word_embeddings=False)
    name = "transformer.h.0.mlp.c_fc.weight"
    engine, before = tiny_engine(model=model), dict(model.named_parameters())[name].detach().clone()
    a, b = torch.randn(4, 64), torch.randn(256, 4)
    refresh(engine, {"A": a, "B": b}, Adapter(None, [LoraTarget(name, "A", "B", 0.25, True)]))
    live = dict(engine.model.module.named_parameters())[name]  # type: ignore[attr-defined]
    assert torch.equal(live, before + (b @ a).T * 0.25)


@pytest.mark.parametrize("fault", ["flipped bit", "exchange", "abandoned"])
def test_an_adapter_that_breaks_leaves_no_trace(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    first = factors(tiny("llama"), [Q], 1)
    refresh(engine, first, adapter([Q]))
    digest, base = engine.weights.digest, engine.weights.base.digest
    described = [describe(*each) for each in factors(tiny("llama"), [UP], 2).items()]
    staging = engine.stage(WeightUpdate([with_digest(*each) for each in described], adapter=adapter([UP])))
    data = [array.copy() for _, array in described]
    if fault == "flipped bit":
        data[-1][7] ^= 1
        with pytest.raises(InvalidWeights, match="digest"):
            staging.feed_all(source_of(data))
    elif fault == "exchange":
        staging.feed_all(source_of(data))

        with monkeypatch.context() as patch:
            fail_commit(patch, 1, "writing")
            with pytest.raises(MemoryError):
                engine.commit(staging)
    staging.close()
    assert engine.weights.live_digest() == engine.weights.digest == digest and engine.weights.base.digest == base
    assert list(engine.weights.base.changed) == [Q]
    second = factors(tiny("llama"), [UP], 2)
    refresh(engine, second, adapter([UP], base=base))
    assert engine.weights.digest == tiny_engine(model=by_hand(tiny("llama"), second, [UP])).weights.digest


def test_no_adapter_on_weights_that_were_dropped() -> None:
    engine = tiny_engine()
    tensors = factors(tiny("llama"), [Q])
    refresh(engine, tensors, adapter([Q]))
    engine.sleep(2)
    engine.wake()
    assert not engine.weights.base.nbytes
    with pytest.raises(InvalidWeights, match="all tensors must come first"):
        staged(engine, tensors, adapter([Q]))
    engine.refresh(tiny("llama"))
    refresh(engine, tensors, adapter([Q]))
    assert engine.weights.digest == tiny_engine(model=by_hand(tiny("llama"), tensors, [Q])).weights.digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_bits_are_those_of_peft(dtype: torch.dtype, rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=12, use_rslora=rslora, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny("llama", dtype), config)
    engine = tiny_engine(dtype=str(dtype).removeprefix("torch."), model=tiny("llama", dtype))
    pairs, read = Adapters().read(model, 1.0, None)
    assert read.base == engine.weights.digest
    refresh(engine, {name: tensor.detach() for name, tensor in pairs}, read)
    want = tiny_engine(dtype=str(dtype).removeprefix("torch."), model=model.merge_and_unload())
    assert engine.weights.digest == want.weights.digest


def test_another_rounding_would_show() -> None:
    """The control: a product that is rounded before it is added, as PEFT's `safe_merge=True` does, has other bits."""
    base, a, b = (torch.randn(*shape).mul(0.05) for shape in ((576, 576), (8, 576), (576, 8)))
    low = base.bfloat16()
    merged = merge_into(torch.empty_like(low), low, a, b, LoraTarget("w", "a", "b", 0.7))
    assert torch.equal(merged, (low.float() + b @ a * 0.7).bfloat16())
    assert not torch.equal(merged, low + (b @ a * 0.7).bfloat16())


def test_an_entry_for_nothing_is_refused() -> None:
    engine = tiny_engine()
    with pytest.raises(InvalidWeights, match="more than once"):
        info = TensorInfo("x", "float32", (1,), "")
        engine.stage(WeightUpdate([info, info], adapter=adapter([Q])))
