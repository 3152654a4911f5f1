"""LoRA refreshes through client and service: adapters as PEFT has them, on the model and on disk."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.client.api import RolloutClient
from rollout.client.lora import read_folder, scaling_of
from rollout.engine.engine import Engine
from rollout.engine.values import Adapter, LoraTarget, Sampling, WeightUpdate
from rollout.engine.weights.staging import source_of
from rollout.engine.weights.tensors import describe, with_digest
from rollout.transport.errors import InvalidRequest, SourceUnreachable, WeightsRefused, WrongBase
from rollout.transport.loopback import LoopbackService
from rollout.transport.weights.manifest import pack_targets, unpack_targets
from tests.support.adapters import PREFIX, Q, write
from tests.support.tiny import tiny, tiny_engine
from tests.support.wire import serving

WAIT = 60.0


@pytest.fixture
def served() -> Iterator[tuple[Engine, RolloutClient]]:
    """A service of the tiny llama, and a client."""
    engine, end = tiny_engine(), LoopbackService()
    with serving(engine, end), RolloutClient(transport=end.connect(), connect_timeout_s=WAIT) as client:
        yield engine, client


def test_a_folder(served: Any, tmp_path: Path) -> None:
    engine, client = served
    base = client.weights_status()["base_digest"]
    done = client.refresh_lora(write(tmp_path), base=base, version=7)
    assert done.version == 7 and done.sent_bytes == 2 * 4 * 64 * 4 and done.sent_bytes < 0.02 * done.bytes
    tensors = {name.rpartition("lora_")[2][0]: each for name, each in torch_file(tmp_path).items()}
    want = tiny("llama")
    with torch.no_grad():
        want.get_submodule(Q).weight += tensors["B"] @ tensors["A"] * 2.0
    assert done.digest == tiny_engine(model=want).weights.digest == engine.weights.live_digest()
    status = client.weights_status(verify=True)
    assert status["base_digest"] == base and status["digest"] == status["live_digest"] == done.digest
    assert client.status()["weights"]["base_bytes"] == 64 * 64 * 4
    assert client.refresh_lora(write(tmp_path), scale=0.0).digest == base
    (sample,) = client.submit([5, 6, 7], Sampling(max_tokens=3, ignore_eos=True)).result(WAIT)
    assert sample.weight_versions == [(0, 8)]


def torch_file(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_another_base_is_refused_and_the_old_weights_serve_on(served: Any, tmp_path: Path) -> None:
    engine, client = served
    with pytest.raises(WrongBase, match="same checkpoint in the same dtype") as refused:
        client.refresh_lora(write(tmp_path), base="ab" * 32)
    assert isinstance(refused.value, WeightsRefused) and engine.version == 0 and not engine.weights.staging
    before = client.weights_status()["base_digest"]
    assert client.refresh(tiny("llama", seed=1)).version == 1
    with pytest.raises(WrongBase):
        client.refresh_lora(tmp_path, base=before)
    assert client.refresh_lora(tmp_path, base=client.weights_status()["base_digest"]).version == 2


def key(path: str, rest: str) -> dict[str, torch.Tensor]:
    return {f"{PREFIX}{path}.{rest}": torch.ones(4, 64), f"{PREFIX}{Q}.lora_A.weight": torch.ones(4, 64)}


@pytest.mark.parametrize(
    ("config", "tensors", "reason"),
    [
        ({"peft_type": "LOHA"}, None, "LOHA: only LORA"),
        ({"use_dora": True}, None, "DoRA is not plain LoRA"),
        ({"lora_bias": True}, None, "train without lora_bias"),
        ({"bias": "all"}, None, "bias='none'"),
        ({"trainable_token_indices": [1]}, None, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, None, "changes the base.*path_initial_model_for_weight_conversion.*merge_and_unload"),
        ({"lora_alpha": None}, None, "lora_alpha=None in the adapter's configuration: must be a number"),
        ({"lora_alpha": "16"}, None, "lora_alpha='16'"),
        ({"lora_alpha": True}, None, "lora_alpha=True"),
        ({"lora_alpha": math.inf}, None, "lora_alpha=inf"),
        ({"use_rslora": "yes"}, None, "use_rslora='yes' in the adapter's configuration: must be true or false"),
        ({"fan_in_fan_out": 1}, None, "fan_in_fan_out=1"),
        ({"alpha_pattern": ["q_proj"]}, None, "alpha_pattern="),
        ({"alpha_pattern": {"q_proj": "8"}}, None, "alpha_pattern={'q_proj': '8'} in the adapter's configuration"),
        ({"alpha_pattern": {"(": 8}}, None, "alpha_pattern has the key '.' in the adapter's configuration: must be a regular"),
        ({"rank_pattern": {"[": 8}}, None, "rank_pattern has the key '.' in the adapter's configuration: must be a regular"),
        ({}, key("model.embed_tokens", "lora_embedding_A"), "model.embed_tokens: an adapter of kind embedding_A"),
        ({}, key(Q, "lora_magnitude_vector"), "kind magnitude_vector"),
        ({}, key(Q, "lora_B.bias"), "kind B.bias"),
        ({}, {f"{PREFIX}{Q}.lora_A.weight": torch.ones(4, 64)}, "A or B is missing"),
        ({}, {f"{PREFIX}{Q}.lora_B.weight": torch.ones(64, 4)}, "no targets"),
    ],
    ids=range(21),
)
def test_what_cannot_be_merged_is_refused(served: Any, tmp_path: Path, config: Any, tensors: Any, reason: str) -> None:
    engine, client = served
    with pytest.raises(WeightsRefused, match=reason):
        client.refresh_lora(write(tmp_path, tensors, **config))
    assert engine.version == 0 and not engine.weights.staging


def test_what_is_no_adapter(served: Any, tmp_path: Path) -> None:
    _, client = served
    with pytest.raises(SourceUnreachable, match="adapter_config.json"):
        client.refresh_lora(tmp_path / "nothing")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(SourceUnreachable, match="adapter_model.safetensors"):
        client.refresh_lora(tmp_path)
    with pytest.raises(WeightsRefused, match="LlamaForCausalLM is no adapter"):
        client.refresh_lora(tiny("llama"))
    for bad in (math.nan, "2", True):
        with pytest.raises(InvalidRequest, match="scale="):
            client.refresh_lora(tmp_path, scale=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="base="):
        client.refresh_lora(tmp_path, base="xyz")
    with pytest.raises(InvalidRequest, match='via="files"'):
        client.refresh_lora(write(tmp_path), via="files")


def test_the_adapter_s_file_is_not_mapped(tmp_path: Path) -> None:
    """It may become shorter while it is sent."""
    pairs, _ = read_folder(write(tmp_path), 1.0)
    before = {name: tensor.clone() for name, tensor in pairs}
    os.truncate(tmp_path / "adapter_model.safetensors", 10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pairs)
    with pytest.raises(SourceUnreachable, match="not a readable adapter folder"):
        read_folder(tmp_path, 1.0)
    (tmp_path / "adapter_config.json").write_text("[1]")
    write(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "adapter_model.safetensors", tmp_path)
    with pytest.raises(WeightsRefused, match="adapter_config.json holds a list"):
        read_folder(tmp_path, 1.0)


def test_scaling_is_that_of_the_config() -> None:
    config = {"lora_alpha": 8, "alpha_pattern": {"q_proj": 2, "layers.1.*": 6}}
    assert scaling_of(config, "model.layers.0.self_attn.q_proj", 4) == 0.5
    assert scaling_of(config, "model.layers.1.mlp.up_proj", 4) == 1.5
    assert scaling_of({**config, "use_rslora": True}, "model.norm", 16) == 2.0


def test_targets_on_the_wire() -> None:
    targets = [LoraTarget("w", "a", "b", 0.1, True), LoraTarget("v", "c", "d", -2.0)]
    assert unpack_targets(pack_targets(targets), 2) == targets
    for bad in (pack_targets(targets)[:-1], np.frombuffer(b"\x91\x91\xa1w", np.uint8), np.zeros(3, np.float32)):
        with pytest.raises(InvalidRequest, match="list of targets"):
            unpack_targets(bad, 2)
    with pytest.raises(InvalidRequest, match="lists 2 tensors, the model has 1"):
        unpack_targets(pack_targets(targets), 1)


@pytest.mark.parametrize("order", ["before", "between", "behind"])
def test_a_target_that_comes_whole_as_well_is_what_is_added_to(served: Any, tmp_path: Path, order: str) -> None:
    """In whatever order; the base stays what it was, and takes the place of both when the next adapter comes."""
    engine, client = served
    base = client.weights_status()["base_digest"]
    torch.manual_seed(5)
    a, b, whole = torch.randn(4, 64), torch.randn(64, 4), torch.randn(64, 64)
    target = LoraTarget(f"{Q}.weight", "A", "B", 0.5)
    tensors = {"before": {target.weight: whole, "A": a, "B": b}, "between": {"A": a, target.weight: whole, "B": b},
               "behind": {"A": a, "B": b, target.weight: whole}}[order]  # fmt: skip
    described = [describe(name, tensor) for name, tensor in tensors.items()]
    staging = engine.stage(WeightUpdate([with_digest(*each) for each in described], adapter=Adapter(base, [target])))
    staging.feed_all(source_of(data for _, data in described))
    done = engine.commit(staging)
    want = tiny("llama")
    with torch.no_grad():
        want.get_submodule(Q).weight.copy_(whole + b @ a * 0.5)
    assert done.digest == tiny_engine(model=want).weights.digest == engine.weights.live_digest() != base
    assert client.weights_status()["base_digest"] == base
    assert client.refresh_lora(write(tmp_path), scale=0.0).digest == base


def test_a_target_that_comes_whole_twice_is_refused(served: Any, tmp_path: Path) -> None:
    _, client = served
    extra = {f"{PREFIX}{Q}{own}.weight": torch.ones(64, 64) for own in ("", ".base_layer")}
    tensors = {**torch_file(write(tmp_path)), **extra}
    with pytest.raises(WeightsRefused, match="more than once"):
        client.refresh_lora(write(tmp_path, tensors))


# ── with PEFT itself ──────────────────────────────────────────────────────────────────────────────────────────────────────


def adapted(model: Any, **config: Any) -> Any:
    """The model as a PeftModel whose adapter is not zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **config}
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
    ids=["plain", "rslora", "patterns", "modules_to_save", "lm_head"],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_a_peft_model_and_its_folder(served: Any, tmp_path: Path, config: Any) -> None:
    engine, client = served
    model = adapted(tiny("llama"), **config)
    if "modules_to_save" in config:
        with torch.no_grad():
            model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    done = client.refresh_lora(model)
    assert client.refresh_lora(tmp_path).digest == done.digest
    assert done.digest == tiny_engine(model=model.merge_and_unload()).weights.digest


def test_the_base_of_a_peft_model_is_compared(served: Any) -> None:
    engine, client = served
    model = adapted(tiny("llama"))
    client.refresh_lora(model)
    with torch.no_grad():
        model.get_base_model().model.norm.weight.mul_(1.01)
    with pytest.raises(WrongBase):
        client.refresh_lora(model)
    with pytest.raises(WrongBase, match="same dtype"):
        client.refresh_lora(adapted(tiny("llama", torch.bfloat16)))
    assert engine.version == 1
    known = client.weights_status()["base_digest"]
    assert client.refresh_lora(model, base=known).version == 2, "whoever knows better says so"


def test_peft_models_that_cannot_be_merged(served: Any) -> None:
    engine, client = served
    for config, reason in (
        ({"use_dora": True}, "DoRA"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens: an adapter of kind peft.tuners.lora.layer.Embedding"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ):
        with pytest.raises(WeightsRefused, match=reason):
            client.refresh_lora(adapted(tiny("llama"), **config))
    model = adapted(tiny("llama"))
    model.merge_adapter()
    with pytest.raises(WeightsRefused, match="merged or disabled"):
        client.refresh_lora(model)
    model = adapted(tiny("llama"))
    model.base_model.set_adapter([])
    with pytest.raises(WeightsRefused, match="choose one by model.set_adapter"):
        client.refresh_lora(model)
    assert engine.version == 0
