"""Loading of a rank's part: from files and of random weights, it is the part of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.engine.forward.random_weights import load_module
from rollout.engine.forward.shards import RankPlace, load_part
from rollout.engine.weights.cuts import NotCut, Part, cuts_of
from rollout.models import resolve
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
        for name, part in module.named_parameters():
            whole_part = Part(tuple(parameters[name].shape), cuts[name], rank, ranks)
            assert torch.equal(part, parameters[name][whole_part.where()]), name
        assert {name for name, _ in module.named_parameters()} == parameters.keys()
        assert [*module.state_dict()] == [*whole.state_dict()]


@pytest.mark.parametrize("name", ["llama", "llama-mha", "qwen2"])
def test_a_part_from_files_is_the_part_of_the_whole(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, name)
    for ranks in (2, 4):
        check_parts(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), folder, ranks, torch.bfloat16)
    check_parts(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folder, 2, torch.float32)


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
    with pytest.raises(NotCut, match="mixtral"):
        load_part(saved(tmp_path / "c", "mixtral"), torch.float32, place)
