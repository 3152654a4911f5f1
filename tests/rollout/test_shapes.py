"""Shapes of published models: sizes, patterns, cuts, and weights that are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollout import models
from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.forward import shapes
from rollout.engine.forward.random_weights import draw, load_module
from rollout.engine.forward.shapes import is_random
from rollout.engine.paths import cache_dir
from rollout.models import ModelNotFound, resolve
from tests.support.families import build
from tests.support.toy import group, run

KINDS = {
    "qwen3.5-0.8b": {"linear_attention": 18, "full_attention": 6},
    "gemma3-270m": {"sliding_attention": 15, "full_attention": 3},
    "gemma4-e2b": {"sliding_attention": 28, "full_attention": 7},
    "lfm2-1.2b": {"conv": 10, "full_attention": 6},
    "gpt-oss-20b": {"sliding_attention": 12, "full_attention": 12},
    "nemotron-3-nano": {"linear_attention": 23, "moe": 23, "full_attention": 6},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, but for the compiled kernels."""
    compiled = cache_dir() / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    (tmp_path / "native").symlink_to(compiled)
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))


def parameters(config: Any) -> float:
    """Return the billions of parameters of a configuration."""
    with torch.device("meta"):
        return sum(each.numel() for each in transformers.AutoModelForCausalLM.from_config(config).parameters()) / 1e9


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    config = shapes.configuration(shapes.PREFIX + name)
    assert parameters(config) == pytest.approx(shapes.SHAPES[name].billions, rel=0.02)
    kinds = list(getattr(config, "layer_types", None) or [])
    if name in KINDS:
        assert {kind: kinds.count(kind) for kind in kinds} == KINDS[name]


def test_another_width_is_not_the_published_number() -> None:
    """The negative control of the test before: 5 % more width."""
    shape = shapes.SHAPES["qwen3-0.6b"]
    config = transformers.AutoConfig.for_model(shape.model_type, **{**shape.options, "hidden_size": 1072})
    assert parameters(config) != pytest.approx(shape.billions, rel=0.02)


def test_a_cut_is_the_beginning() -> None:
    config = shapes.configuration("shape:qwen3.5-0.8b:8")
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert shapes.configuration("shape:nemotron-3-nano:6").layer_types[-2:] == ["linear_attention", "full_attention"]
    assert shapes.configuration("shape:qwen3-30b-a3b:1").num_hidden_layers == 1
    assert shapes.configuration("shape:gemma4-e2b:10").num_kv_shared_layers == 0
    assert shapes.configuration("shape:gemma4-e2b:20").num_kv_shared_layers == 5
    whole = shapes.configuration("shape:gemma3-1b:26")
    assert whole.to_dict() == shapes.configuration("shape:gemma3-1b").to_dict()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shape:qwen3-0.7b", "there are: shape:tiny, shape:tiny-moe, shape:qwen3-0.6b, "),
        ("shape:qwen3-0.6b:29", "a number of layers from 1 to 28"),
        ("shape:qwen3-0.6b:x", "a number of layers from 1 to 28"),
        ("shape:qwen3.5-0.8b:6", "take a multiple of 4"),
        ("shape:lfm2-350m:2", "take at least 3"),
        ("shape:nemotron-3-nano:5", "take at least 6"),
    ],
)
def test_what_is_no_shape_says_what_is(name: str, says: str) -> None:
    with pytest.raises(ModelNotFound, match=says):
        resolve(name)


def test_a_shape_is_a_folder_without_weights_and_without_a_tokenizer() -> None:
    folder = resolve("shape:tiny:2")
    assert is_random(folder) and not list(folder.glob("*.safetensors")) and not list(folder.glob(".config*"))
    assert resolve("shape:tiny:2") == folder != resolve("shape:tiny")
    with pytest.raises(ModelNotFound, match="no tokenizer: pass prompts as token ids"):
        models.tokenizer_of("shape:tiny")


def test_weights_depend_on_names_and_shapes_alone() -> None:
    """The same twice, in another dtype up to rounding, with fewer layers, whatever was drawn before."""
    whole = load_module(resolve("shape:tiny"), dtype=torch.float32)
    torch.manual_seed(5)
    again = load_module(resolve("shape:tiny"), dtype=torch.bfloat16)
    first = load_module(resolve("shape:tiny:2"), dtype=torch.float32).state_dict()
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor.bfloat16(), again.state_dict()[name])
        assert name not in first or torch.equal(tensor, first[name])
    assert len(first) == 2 * 11 + 3
    layers = whole.model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    assert torch.get_rng_state().equal(torch.manual_seed(5).get_state()), "drawing weights changed the caller's seed"


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "gemma4_text", "qwen3_5_text", "lfm2", "nemotron_h", "gpt_oss", "olmoe"]
)
def test_distributions_are_neither_flat_nor_certain(family: str) -> None:
    """Logits of standard deviation 3 in 199 tokens: about 2.5 nats; transformers' own initialisation has 5.2 or more of 5.3."""
    config = build(family).config
    model, other = (draw(config, torch.float32) for _ in range(2))
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two) and one.isfinite().all(), name
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 199, (1, 64)))
    with torch.inference_mode():
        logprobs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    assert 1 < entropy < 4
    assert logprobs.gather(1, ids[0][:, None]).mean() < -3, "the last token again"


def test_an_engine_serves_a_shape() -> None:
    config = EngineConfig(model=str(resolve("shape:tiny:2")), dtype="float32", threads=1, kv_tokens=512, cpu_offload_gib=0)
    first, second = (run(Engine(config), [group("a", np.arange(9), seed=1, n=1)])["a", 0] for _ in range(2))
    assert (first.token_ids == second.token_ids).all() and (first.logprobs == second.logprobs).all()
    assert first.logprobs.mean() < -0.5


def test_a_bench_of_a_shape_needs_no_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    from rollout.bench.command import run as run_bench
    from rollout.bench.harness import BenchOptions

    assert run_bench(BenchOptions(("fanout",), model="shape:tiny", in_process=True, scale=0.01, repeat=1, compare=False)) == 0
    assert "fanout" in capsys.readouterr().out


def test_the_documentation_lists_the_shapes() -> None:
    text = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    assert [name for name in shapes.SHAPES if f"`{name}`" not in text] == []
