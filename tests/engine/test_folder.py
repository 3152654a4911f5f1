"""What a model's folder holds: one rule for every number of ranks, no tensor that stays in a file, and nothing in silence."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter

from rollout.engine.forward.load import BrokenModel, _look_at_saved, end_tokens, load_model
from rollout.engine.forward.saved_parts import SavedTensors, Source, same_part
from rollout.engine.forward.shards import RankPlace, load_part
from rollout.engine.memory import HostMemory
from rollout.engine.model_files import INDEX, MAX_FILES, MAX_INDEX_BYTES, SINGLE, AmbiguousFolder, checkpoint_of
from rollout.engine.weights.cuts import WHOLE, Part
from rollout.engine.weights.rounding import MEASURED, RoundingLog, Roundings
from rollout.engine.weights.tensors import checkpoint_tensors
from tests.support.counted import lines_of
from tests.support.ranks import tiny_shared
from tests.support.tiny import tiny, tiny_engine

ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1,
          "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 16}  # fmt: skip


def nothing(*_: object) -> list[torch.Tensor]:
    raise AssertionError("loading exchanges nothing")


def load(folder: Path, ranks: int = 1, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    if ranks == 1:
        return load_model(str(folder), dtype, HostMemory())
    return load_part(folder, dtype, RankPlace(0, ranks, nothing)).module


def sharded(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    tiny("llama").save_pretrained(folder, max_shard_size="60KB")
    return folder


def index_of(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return read


def with_single(folder: Path) -> None:
    tiny("qwen2").save_pretrained(folder / "old")
    (folder / "old" / SINGLE).rename(folder / SINGLE)


def without_index(folder: Path) -> None:
    with_single(folder)
    (folder / INDEX).unlink()


def twice(folder: Path) -> None:
    """A tensor in two shards."""
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**tensors, name: tensor + 1}, second, {"format": "pt"})


def elsewhere(folder: Path) -> None:
    """The index names another shard for a tensor."""
    index = index_of(folder)
    files = list(index["weight_map"].values())
    name, own = next((name, file) for name, file in index["weight_map"].items() if files.count(file) > 1)
    index["weight_map"][name] = next(file for file in files if file != own)
    (folder / INDEX).write_text(json.dumps(index))


def nowhere(folder: Path) -> None:
    index = index_of(folder)
    index["weight_map"]["model.more.weight"] = next(iter(index["weight_map"].values()))
    (folder / INDEX).write_text(json.dumps(index))


def lost(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[0].unlink()


def outside(folder: Path) -> None:
    index = index_of(folder)
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../other.safetensors")
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_single, "has model.safetensors, and model.safetensors.index.json, which names other files"),
        (without_index, "and shards without an index, such as model-00001"),
        (twice, "is in model-00001.* and in model-00002"),
        (elsewhere, "model.safetensors.index.json says that it is in model-.*, but it is in model-"),
        (nowhere, "'model.more.weight': .* but it is in none of the files"),
        (lost, "is missing, which model.safetensors.index.json names"),
        (outside, "must name files of this folder"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_contradicts_itself_is_refused(
    tmp_path: Path, change: Callable[[Path], None], says: str, ranks: int
) -> None:
    load(sharded(tmp_path), ranks)
    change(tmp_path)
    with pytest.raises((ValueError, OSError), match=says):
        load(tmp_path, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_lies_beside_a_model_is_not_read(tmp_path: Path, ranks: int) -> None:
    """An adapter, files of other tools, shards of an older save that no index names."""
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        shutil.copy(tmp_path / SINGLE, tmp_path / name)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}))
    try:
        found = load(tmp_path, ranks)
    except BrokenModel as error:  # older transformers load it always
        assert "adapter_config.json" in str(error) and Version(transformers.__version__) < Version("5.23")
        return
    assert not [name for name, _ in found.named_parameters() if "lora" in name or "base_layer" in name]
    assert ranks > 1 or all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
    (tmp_path / "config.json").unlink()
    with pytest.raises(BrokenModel, match="it holds an adapter .*: serve its base model"):
        load_model(str(tmp_path), torch.float32, HostMemory())


def test_the_single_file_may_be_in_the_index(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    names = load_file(tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))
    found = checkpoint_of(tmp_path)
    assert found is not None and [file.name for file in found.files] == [SINGLE]
    load(tmp_path)
    with pytest.raises(AmbiguousFolder, match="in none of the files"):
        found.check([])
    (tmp_path / INDEX).write_text('{"weight_map": [')
    with pytest.raises(ValueError, match="is not an index of safetensors"):
        checkpoint_of(tmp_path)


@pytest.mark.parametrize("file", ["", ".", "..", "a/b", "/a", "a/", "../other.safetensors", "a\0b", 1, None, ["a"]], ids=repr)
def test_an_index_names_files_of_its_folder(tmp_path: Path, file: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file, "b": SINGLE}}))
    with pytest.raises(ValueError, match="is not an index of safetensors"):
        checkpoint_of(tmp_path)


def test_an_index_has_bounds(tmp_path: Path) -> None:
    """Of its bytes, before any of it is parsed, and of its files, before any of them is looked for."""
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(MAX_FILES + 1)}}))
    with pytest.raises(ValueError, match="names 4097 files: at most 4096"):
        checkpoint_of(tmp_path)
    size = (tmp_path / INDEX).stat().st_size
    with pytest.raises(ValueError, match=f"has more than {size - 1} bytes"):
        checkpoint_of(tmp_path, size - 1)
    with (tmp_path / INDEX).open("wb") as opened:
        opened.truncate(MAX_INDEX_BYTES + 1)
    with pytest.raises(ValueError, match=f"has more than {MAX_INDEX_BYTES} bytes"):
        checkpoint_of(tmp_path, 2 * MAX_INDEX_BYTES)


def test_an_index_is_read_without_a_line_of_python_for_each_tensor(tmp_path: Path) -> None:
    """A service reads it in its loop, whoever offers the folder."""
    lines: dict[int, int] = {}
    for count in (1000, 2000):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {f"model.{i}": SINGLE for i in range(count)}}))
        (tmp_path / SINGLE).touch()
        lines[count] = lines_of(lambda: checkpoint_of(tmp_path))
    assert lines[2000] <= lines[1000] + 10


@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_tensors_that_differ_are_refused(tmp_path: Path, ranks: int) -> None:
    """transformers unties them then; a rank cannot, and a service must not depend on their number."""
    tiny("llama-mha").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / SINGLE, {"format": "pt"})
    load(tmp_path, ranks)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tmp_path / SINGLE, {"format": "pt"})
    with pytest.raises(ValueError, match="config.json ties lm_head.weight to model.embed_tokens.weight, and they differ"):
        load(tmp_path, ranks)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert load(tmp_path, ranks).lm_head.weight is not load(tmp_path, ranks).model.embed_tokens.weight


def test_stacked_sources_of_a_tied_tensor_are_compared(tmp_path: Path) -> None:
    """Number by number, like those that are one tensor in a file."""
    tensors = {f"{name}.{i}": torch.full((3, 4), float(i)) for name in ("one", "same", "other") for i in range(2)}
    tensors["other.1"] += 1
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    whole = torch.stack([tensors["one.0"], tensors["one.1"]])
    with ExitStack() as opened:
        saved, part = SavedTensors(tmp_path, opened), Part((2, 3, 4), WHOLE, 0, 1)
        equal = [same_part(saved, Source([[f"{x}.0", f"{x}.1"]], stacked=True), part, whole) for x in ("same", "other")]
    assert equal == [True, False]


def mapped(module: torch.nn.Module) -> list[str]:
    """Names of tensors that lie in a file's pages."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [[int(x, 16) for x in fields[0].split("-")] for fields in lines if fields[-1].endswith(".safetensors")]
    named = checkpoint_tensors(module)[0].items()
    return [name for name, each in named if any(low <= each.data_ptr() < high for low, high in ranges)]


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", "lfm2_moe"])
def test_no_tensor_stays_in_the_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases of routers are buffers: whoever writes the file in place would change the live weights."""
    from tests.support.families import build

    model = build(kind)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert mapped(loaded) == [] and any("bias" in name for name, _ in loaded.named_buffers())
    before = copy.deepcopy(loaded.state_dict())
    with open(tmp_path / SINGLE, "r+b") as file:
        file.seek(2000)
        file.write(b"\x11" * 20_000)
    assert all(torch.equal(each, before[name]) for name, each in loaded.state_dict().items())
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("rollout.engine.forward.load.checkpoint_tensors", lambda module: (dict(module.named_parameters()), {}))
    assert mapped(load(tmp_path)), "the negative control: parameters alone"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_is_named(tmp_path: Path, ranks: int, value: float) -> None:
    model = tiny("llama")
    model.model.norm.weight.data[3] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(BrokenModel, match=r"tensor 'model.norm.weight' holds NaN or infinity as float32"):
        load(tmp_path, ranks)


def test_a_value_that_overflows_is_named(tmp_path: Path) -> None:
    model = tiny("llama")
    model.model.norm.weight.data[3] = 1e6
    model.save_pretrained(tmp_path)
    load(tmp_path)
    with pytest.raises(BrokenModel, match=r"'model.norm.weight' holds NaN or infinity as float16: .*needs engine.dtype"):
        load(tmp_path, dtype=torch.float16)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_without_scales_are_refused(tmp_path: Path, ranks: int, codes: torch.dtype) -> None:
    tiny("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: (tensors[name] * 10).to(codes)}, tmp_path / SINGLE, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} is saved as .*: codes of a quantised model"):
        load(tmp_path, ranks)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_implementations_of_the_configuration_are_not_used(tmp_path: Path, key: str, ranks: int) -> None:
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    value = "flash_attention_2" if "attn" in key else "deepgemm"
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    found = load(tmp_path, ranks).config
    assert (found._attn_implementation, found._experts_implementation) != (value, value)


@pytest.mark.parametrize(
    ("value", "right"),
    [(2, {2}), ([2, 5], {2, 5}), ([], set()), (None, {2})]
    + [(each, None) for each in ("2", ["2"], "</s>", 2.0, [2, None], True, -1, [[2]], {"a": 2}, 199, [2, 2**31])],
)
def test_end_tokens(tmp_path: Path, value: Any, right: set[int] | None) -> None:
    tiny("llama", eos_token_id=2).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    for ranks in (1, 2):
        module = load(tmp_path, ranks)
        if right is not None:
            assert end_tokens(module, 199, "a model") == right
            continue
        with pytest.raises(BrokenModel, match=r"a model: eos_token_id in generation_config.json is .*: must be a token"):
            end_tokens(module, 199, "a model")


def test_end_tokens_of_the_configuration(tmp_path: Path) -> None:
    model = tiny("llama")
    model.generation_config = None
    model.config.eos_token_id = [2, 199]
    with pytest.raises(BrokenModel, match="eos_token_id in config.json is .2, 199.: must be a token, 0 to 198"):
        end_tokens(model, 199, "a model")
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(BrokenModel, match="is not a generation configuration"):
        load(tmp_path)


# ── what casts round ──────────────────────────────────────────────────────────────────────────────────────────────────
def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "weights were rounded" in record.getMessage()]


def routed() -> tuple[PreTrainedModel, str]:
    """A model whose router has biases that bf16 does not tell apart, and their name."""
    from tests.support.families import build

    model = build("minimax_m2", torch.float32)
    name, bias = next(pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias"))
    bias.copy_(6.8 + 0.001 * torch.arange(len(bias)))
    return model, name


def test_what_a_cast_rounds_is_said_with_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the load and at a refresh, once; nothing where nothing is rounded."""
    model, name = routed()
    model.save_pretrained(tmp_path)
    change = float((model.get_buffer(name).bfloat16().float() - model.get_buffer(name)).abs().max())
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
        assert not warned(caplog)
        loaded = load(tmp_path, dtype=torch.bfloat16)
        (said,) = warned(caplog)
        assert f"'{name} (float32 to bfloat16, by up to {change:.2g}), " in said
        caplog.clear()
        engine = tiny_engine(dtype="bfloat16", model=loaded)
        engine.refresh(model)
        engine.refresh(model)
        (said,) = warned(caplog)
        assert said.startswith("weights were rounded at='refresh version=1' ")
        assert f"{name} (float32 to bfloat16, by up to {change:.2g})" in said
        caplog.clear()
        engine.refresh(copy.deepcopy(loaded))
        assert not warned(caplog)


def test_large_integers_are_not_rounded(tmp_path: Path) -> None:
    model = tiny("llama")
    model.register_buffer("ids", torch.arange(MEASURED + 1))
    model.register_buffer("mask", torch.ones(MEASURED + 1, dtype=torch.bool))
    model.save_pretrained(tmp_path)
    with ExitStack() as opened:
        _look_at_saved(str(tmp_path), model, SavedTensors(tmp_path, opened), quantised=False)


def test_what_a_rule_makes_is_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All tensors that a rule makes of one have their source, and small ones are said to be rounded."""
    model = tiny("llama")
    rule = WeightConverter("mlp.both_proj.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(0)])
    names = [f"model.layers.0.mlp.{each}_proj.weight" for each in ("gate", "up")]
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    both = torch.cat([tensors.pop(name) for name in names])
    save_file({**tensors, "model.layers.0.mlp.both_proj.weight": both}, tmp_path / SINGLE, {"format": "pt"})
    with (
        ExitStack() as opened,
        pytest.MonkeyPatch.context() as patch,
        caplog.at_level(logging.WARNING),
    ):
        patch.setattr("rollout.engine.weights.published.get_model_conversion_mapping", lambda module: [rule])
        saved = SavedTensors(tmp_path, opened)
        sources = saved.sources(model)
        assert all(sources[name].names == [["model.layers.0.mlp.both_proj.weight"]] for name in names)
        _look_at_saved(str(tmp_path), model.bfloat16(), saved, quantised=False)
    (said,) = warned(caplog)
    assert "2 matrices (float32 to bfloat16" in said


def test_ranks_say_what_they_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = tiny_shared("lfm2_moe")
    name, bias = next(pair for pair in whole.named_buffers() if len(pair[1]) == 4 and pair[1].ndim == 1)
    bias.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    whole.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        load(tmp_path, 2, torch.bfloat16)
    kept = load(tmp_path, 2, torch.bfloat16).get_buffer(name).dtype == torch.float32
    assert kept or any(name in said for said in warned(caplog))


def test_matrices_are_counted() -> None:
    found = Roundings()
    found.add("small", 3, torch.tensor([1.0, 1.001, 2.0]), torch.tensor([1.0, 1.001, 2.0]).bfloat16())
    found.add("exact", 2, torch.ones(2), torch.ones(2).bfloat16())
    found.add("wide", 2, torch.ones(2).bfloat16(), torch.ones(2))
    found.add("large", 1 << 20, torch.ones(2), torch.ones(2).bfloat16())
    assert found.found.keys() == {"small", "large"} and found.found["small"].most == pytest.approx(0.001, rel=0.01)
    log = RoundingLog()
    log.say("load", found.found, frozenset())
    assert "large" not in log._said or log._said.keys() == {"small", "large"}


def test_saved_tensors_name_the_folder(tmp_path: Path) -> None:

    with ExitStack() as opened, pytest.raises(ValueError, match="has neither model.safetensors.index.json nor"):
        SavedTensors(tmp_path, opened)
