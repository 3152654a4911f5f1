"""Refreshes under other names than the module's: composite models, published folders, modules in wrappers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from rollout.client.api import RolloutClient
from rollout.engine.engine import Engine
from rollout.engine.forward.load import load_model
from rollout.engine.memory import HostMemory
from rollout.engine.values import Sampling, TensorInfo
from rollout.engine.weights import published
from rollout.engine.weights.inventory import Inventory
from rollout.engine.weights.tensors import InvalidWeights, info_of, named_pairs
from rollout.transport.errors import WeightsRefused
from rollout.transport.loopback import LoopbackService
from rollout.transport.weights import Via
from tests.support.families import build
from tests.support.pictures import composite
from tests.support.ranks import ranked_engine
from tests.support.tiny import plain_logprobs, tiny, tiny_engine
from tests.support.wire import serving

WAIT = 60.0


@contextmanager
def served(engine: Engine) -> Iterator[RolloutClient]:
    end = LoopbackService()
    with serving(engine, end), RolloutClient(transport=end.connect(), connect_timeout_s=WAIT) as client:
        yield client


def loaded(folder: Path) -> PreTrainedModel:
    return load_model(str(folder), torch.float32, HostMemory())


def far(client: RolloutClient, model: PreTrainedModel) -> float:
    """The largest difference of log-probs from the plain forward of a model."""
    prompt = np.arange(5, 25, dtype=np.int32)
    samples = client.submit(prompt, Sampling(n=2, max_tokens=8, seed=1, ignore_eos=True)).result(WAIT)
    return max(float(np.abs(each.logprobs - plain_logprobs(model, prompt, each)).max()) for each in samples)


# ── a composite model that trains, and its text class that serves ─────────────────────────────────────────────────────
def test_a_composite_model_refreshes_its_text_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By every way, and as a folder; what the text class declares as not its own is skipped, and counted."""
    composite("qwen3_5").save_pretrained(tmp_path / "served")
    trained = composite("qwen3_5", seed=1)
    text = loaded(tmp_path / "served")
    assert type(text).__name__ == "Qwen3_5ForCausalLM"
    engine = tiny_engine(model=text)
    with served(engine) as client, caplog.at_level(logging.INFO):
        assert far(client, trained) > 0.01
        ways: tuple[Via, ...] = ("shm", "inline", "gloo", "delta", "delta")
        for version, via in enumerate(ways, 1):
            with torch.no_grad():
                trained.model.visual.patch_embed.proj.weight.add_(0.01)
                trained.lm_head.weight.mul_(1.01)
            done = client.refresh(trained, via=via, timeout=WAIT)
            assert done.version == version and (done.via == via or version == 4)
        trained.save_pretrained(tmp_path / "trained")
        assert client.refresh(tmp_path / "trained", timeout=WAIT).digest == done.digest
        assert far(client, trained) < 1e-5
        skipped = sum(name.startswith("model.visual.") for name, _ in trained.named_parameters())
        assert f" tensors={skipped} of=" in caplog.text
        with pytest.raises(WeightsRefused, match="'model.other.weight'.*the model has no tensor of this name"):
            client.refresh({**trained.state_dict(), "model.other.weight": torch.ones(2)}, timeout=WAIT)
        with pytest.raises(WeightsRefused, match="declares it, and all others here, as not its own"):
            client.refresh([(n, t) for n, t in trained.named_parameters() if "visual" in n], partial=True, timeout=WAIT)
        head = {"lm_head.weight": trained.lm_head.weight * 2, "model.language_model.norm.weight": text.model.norm.weight}
        client.refresh(head, partial=True, timeout=WAIT)
        assert far(client, trained) > 0.01


@pytest.mark.usefixtures("loads_in_full")
def test_ranks_take_a_composite_model(tmp_path: Path) -> None:
    composite("qwen3_5").save_pretrained(tmp_path)
    trained, engine = composite("qwen3_5", seed=1), ranked_engine(str(tmp_path), 2, "float32")
    try:
        with served(engine) as client:
            client.refresh(trained, timeout=WAIT)
            assert far(client, trained) < 1e-5
    finally:
        engine.close()


def test_a_manifest_of_one_s_own_model_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    inventory = Inventory(tiny("llama"), {})
    monkeypatch.setattr(inventory._published, "find", lambda name: 1 / 0)
    assert all(inventory.own_name(name) == name and not inventory.skips(name) for name in inventory.first_name)
    assert Inventory(nn.Linear(2, 2), {}).own_name("module.weight") is None


# ── folders ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("kind", ["gpt_neox", "nemotron_h", "granitemoe", "gemma3", "olmo_hybrid"])
def test_the_served_folder_refreshes(tmp_path: Path, kind: str) -> None:
    """Under the names that save_pretrained writes, or the refusal says what to write."""
    build(kind).save_pretrained(tmp_path)
    engine = tiny_engine(model=loaded(tmp_path))
    digest = engine.weights.digest
    with served(engine) as client:
        try:
            assert client.refresh(tmp_path, timeout=WAIT).digest == digest
        except WeightsRefused as error:
            assert "save_original_format=False" in str(error)
            AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path, save_original_format=False)
            assert client.refresh(tmp_path, timeout=WAIT).digest == digest


def test_what_lies_in_the_folder_beside_the_model(tmp_path: Path) -> None:
    """Tensors that the class ignores at load, files of other tools."""
    build("qwen3_5_text").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    more = {"mtp.layers.0.weight": torch.ones(3), "model.visual.blocks.0.weight": torch.ones(2, dtype=torch.int8)}
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    save_file(load_file(file), tmp_path / "consolidated.safetensors")
    engine = tiny_engine(model=loaded(tmp_path))
    with served(engine) as client:
        assert client.refresh(tmp_path, timeout=WAIT).digest == engine.weights.digest
        save_file({**load_file(file), "model.extra": torch.ones(3)}, file, {"format": "pt"})
        with pytest.raises(WeightsRefused, match="'model.extra'.*save_original_format=False"):
            client.refresh(tmp_path, timeout=WAIT)


@pytest.mark.parametrize(
    ("shapes", "named"), [([(2**60, 2**60)], 0), ([(2**30,), (2**30,)], 1), ([(2**62,) * 8, (1,)], 0)], ids=str
)
def test_skipped_tensors_have_a_bound(shapes: list[tuple[int, ...]], named: int) -> None:
    """Their sizes are in no relation to the model's; without the bound, each of them is work for the service."""
    inventory = Inventory(build("qwen3_5_text"), {})
    more = [TensorInfo(f"mtp.{i}.weight", "float32", shape, "") for i, shape in enumerate(shapes)]
    with pytest.raises(InvalidWeights, match=rf"'mtp\.{named}\.weight'.*at most the model's bytes and 4 GiB"):
        inventory.targets([*inventory.manifest(), *more], partial=False)
    inventory.targets([*inventory.manifest(), TensorInfo("mtp.0.weight", "float32", (2**30,), "")], partial=False)


def test_names_are_looked_up_once_by_rules_that_know_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slices are read of a tensor, and whatever an earlier refresh has listed."""
    inventory = Inventory(build("qwen3_5_text"), {})
    own = inventory.manifest()
    manifest = [replace(each, name=each.name.replace("model.", "model.language_model.", 1)) for each in own]
    seen, rename = list[str](), published.rename_source_key

    def counted(name: str, renamings: list[Any], *more: Any) -> Any:
        seen.append(name)
        return rename(name, renamings, *more)

    monkeypatch.setattr(published, "rename_source_key", counted)
    rules = []
    for order in (manifest, manifest[::-1]):
        seen.clear()
        inventory.targets(order, partial=False)
        for each in order:
            inventory.size(each.name), inventory.read_slice(each.name, 0, 4), inventory.skips(each.name)
        others = {each.name for each in manifest} - inventory.first_name.keys()
        assert len(seen) == len(others) and {*seen} == others and seen == sorted(seen, key=dot_natural_key)
        rules.append(inventory._published._renamings)
    assert rules[0] is not rules[1] and all(one is not other for one, other in zip(*rules, strict=True))


def test_one_tensor_under_two_names() -> None:
    """It is not tied: one of the names has to go. Equal bytes are written once."""
    inventory = Inventory(build("qwen3_5_text"), {})
    norm = next(each for each in inventory.manifest() if each.name == "model.norm.weight")
    again = replace(norm, name="model.language_model.norm.weight")
    assert inventory.own_name(again.name) == norm.name
    assert inventory.targets([*inventory.manifest(), again], partial=False)[-1] is None
    with pytest.raises(InvalidWeights, match="it is also listed as 'model.norm.weight', with other bytes: send one of them"):
        inventory.targets([*inventory.manifest(), replace(again, digest="other")], partial=False)


def test_old_frequencies_are_ignored(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file, {"format": "pt"})
    engine = tiny_engine(model=loaded(tmp_path))
    with served(engine) as client:
        assert client.refresh(tmp_path, timeout=WAIT).digest == engine.weights.digest


# ── modules in wrappers ───────────────────────────────────────────────────────────────────────────────────────────────
class Module(nn.Module):
    """Names parameters as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def checkpointed() -> nn.Module:
    model = tiny("llama", seed=7)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, backend="eager")
    return model


WRAPPED: dict[str, Any] = {
    "compiled": lambda: torch.compile(tiny("llama", seed=7), backend="eager"),
    "its state dict": lambda: torch.compile(tiny("llama", seed=7), backend="eager").state_dict(),
    "parallel": lambda: Module(tiny("llama", seed=7)),
    "compiled, then parallel": lambda: Module(torch.compile(tiny("llama", seed=7), backend="eager")),
    "parallel, then compiled": lambda: torch.compile(Module(tiny("llama", seed=7)), backend="eager"),
    "parts": checkpointed,
}


@pytest.mark.parametrize("how", WRAPPED)
def test_names_of_wrappers_are_removed(how: str) -> None:
    plain, engine = tiny("llama", seed=7), tiny_engine("llama")
    engine.refresh(plain)
    digest = engine.weights.digest
    engine.refresh(tiny("llama", seed=8))
    engine.refresh(WRAPPED[how]())
    assert engine.weights.digest == digest


def test_names_that_would_become_one_stay() -> None:
    pairs = [("_orig_mod.a", torch.ones(1)), ("a", torch.ones(1))]
    assert [name for name, _ in named_pairs(pairs)] == ["_orig_mod.a", "a"]
    assert [name for name, _ in named_pairs([("module.a", torch.ones(1)), ("b", torch.ones(1))])] == ["module.a", "b"]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_shards_are_refused_with_the_call_that_gathers_them(one_rank: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = tiny("llama", seed=7)
    fully_shard(model, mesh=one_rank)
    engine = tiny_engine("llama")
    with pytest.raises(InvalidWeights, match=r"'model.embed_tokens.weight': it is a DTensor, .* full_tensor\(\), .*state_dict"):
        engine.refresh(model)
    engine.refresh([(name, each.full_tensor()) for name, each in model.named_parameters()])
    assert engine.version == 1 and os.getpid()


def test_other_tensors_without_plain_bytes_are_refused() -> None:
    zero = nn.Parameter(torch.empty(0))
    zero.ds_id = 3  # type: ignore[attr-defined]
    with pytest.raises(InvalidWeights, match="'w': ZeRO has its elements elsewhere.*GatheredParameters"):
        info_of("w", zero)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(InvalidWeights, match="'w': it is a NestedTensor, not a plain tensor"):
        info_of("w", nested)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
            "adapter; send that with refresh_lora",
        ),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", "part of an adapter"),
        ("_flat_param", "FSDP has flattened the parameters"),
        ("model.layers.9.mlp.up_proj.weight", r"no tensor of this name; save_pretrained\(…, save_original_format=False\)"),
    ],
)
def test_a_refusal_says_what_to_send(name: str, says: str) -> None:
    with pytest.raises(InvalidWeights, match=says):
        tiny_engine("llama").refresh({name: torch.ones(2)}, partial=True)
