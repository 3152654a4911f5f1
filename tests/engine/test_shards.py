"""Loading of a rank's part: from files and of random weights, it is the part of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout.engine.forward.random_weights import blank, draw, load_module
from rollout.engine.forward.shards import RankPlace, draw_parts, load_part
from rollout.engine.weights.cuts import NotCut, Part, parts_of
from rollout.engine.weights.layer_cuts import cuts_of, tensors_of
from rollout.models import resolve
from tests.support.ranks import tiny_shared
from tests.support.tiny import tiny


def nothing(*_: object) -> list[torch.Tensor]:
    raise AssertionError("loading exchanges nothing")


def saved(folder: Path, name: str, **options: object) -> Path:
    tiny(name, torch.bfloat16, **options).save_pretrained(folder, max_shard_size="30KB")
    return folder


def check_parts(whole: torch.nn.Module, folder: Path, ranks: int, dtype: torch.dtype) -> None:
    cuts = cuts_of(whole)
    parameters = dict(whole.named_parameters())
    for rank in range(ranks):
        module = load_part(folder, dtype, RankPlace(rank, ranks, nothing)).module
        buffers = dict(module.named_buffers())
        assert all(torch.equal(buffers[name], each) for name, each in whole.named_buffers())
        for name, part in module.named_parameters():
            whole_part = Part(tuple(parameters[name].shape), cuts[name], rank, ranks)
            assert torch.equal(part, whole_part.of(parameters[name])), name
        assert {name for name, _ in module.named_parameters()} == parameters.keys()
        assert [*module.state_dict()] == [*whole.state_dict()]


@pytest.mark.parametrize("name", ["llama", "llama-mha", "qwen2"])
def test_a_part_from_files_is_the_part_of_the_whole(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, name)
    for ranks in (2, 4):
        check_parts(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), folder, ranks, torch.bfloat16)
    check_parts(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folder, 2, torch.float32)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_5_moe_text", "lfm2_moe"])
@pytest.mark.parametrize("original", [True, False])
def test_experts_are_read_from_either_form(tmp_path: Path, name: str, original: bool) -> None:
    """As they are published, a matrix of each expert, or as the module has them. Buffers are read, too."""
    whole = tiny_shared(name, torch.bfloat16)
    with torch.no_grad():
        for each in whole.buffers():
            if each.ndim == 1 and len(each) == 4:  # biases of routers
                each.normal_()
    whole.save_pretrained(tmp_path, save_original_format=original, max_shard_size="60KB")
    stacked = any("experts.down_proj" in file.read_text() for file in tmp_path.glob("*.index.json"))
    assert stacked != original
    for ranks in (2, 4):
        check_parts(whole, tmp_path, ranks, torch.bfloat16)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    whole = tiny_shared("qwen3_moe")
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="for model.layers.0.mlp.experts.gate_up_proj: 4 and 3 experts"):
        load_part(tmp_path, torch.float32, RankPlace(0, 2, nothing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "lfm2"])
def test_a_part_of_a_random_hybrid_is_the_part_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """Its decays are drawn when transformers initialises them."""
    monkeypatch.setattr("rollout.engine.forward.random_weights.CHUNK", 1000)
    config = tiny_shared(name).config
    whole = draw(config, dtype)
    assert name == "lfm2" or len(whole.get_parameter("model.layers.0.linear_attn.A_log").unique()) == 8
    cuts, parameters = cuts_of(whole), dict(whole.named_parameters())
    shapes = {each: tuple(tensor.shape) for each, tensor in tensors_of(whole)}
    for rank in range(4):
        parts = parts_of(cuts, shapes, rank, 4)
        module = blank(config, dtype)
        draw_parts(module, parts, 4)
        for each, part in module.named_parameters():
            assert torch.equal(part, parts[each].of(parameters[each])), each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_random_weights_is_the_part_of_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr("rollout.engine.forward.random_weights.CHUNK", 1000)  # chunks that end within rows
    folder = resolve("shape:tiny")
    check_parts(load_module(folder, dtype=dtype), folder, 4, dtype)


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    place = RankPlace(0, 2, nothing)
    folder = saved(tmp_path / "a", "llama")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="has neither model.safetensors.index.json nor model.safetensors"):
        load_part(folder, torch.float32, place)
    other = saved(tmp_path / "b", "llama", intermediate_size=128)
    (folder / "model.safetensors.index.json").write_text((other / "model.safetensors.index.json").read_text())
    for file in other.glob("*.safetensors"):
        file.rename(folder / file.name)
    with pytest.raises(ValueError, match=r"has shape \(\d+, \d+\), and \(\d+, \d+\) in config.json"):
        load_part(folder, torch.float32, place)
    with pytest.raises(NotCut, match="phi3"):
        load_part(saved(tmp_path / "c", "phi3"), torch.float32, place)
