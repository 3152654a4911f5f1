"""Real transformers architectures against their own plain forward, and what is refused at load."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model import Model, UnsupportedModel, load_model
from tests.engine.tiny import MODELS, plain_logprobs, tiny, tiny_engine
from tests.engine.toy import group, run


def prompts(lengths: tuple[int, ...] = (1, 5, 16, 40), n: int = 3, **sampling: object) -> list:
    r = np.random.default_rng(0)
    options = {"n": n, "max_tokens": 14, "ignore_eos": True, **sampling}
    return [group(f"g{i}", r.integers(3, 199, length), seed=i, **options) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_size", [4, 16])
def test_logprobs_equal_a_plain_forward(name: str, block_size: int) -> None:
    """Prefill in chunks, fork, decode in a mixed batch: log-probs as the trainer's full forward gives them, to 1e-5 in fp32."""
    model = tiny(name)
    trainer = copy.deepcopy(model)
    groups = prompts()
    samples = run(tiny_engine(name, model=model, block_size=block_size, max_batch_tokens=64), groups)
    for each in groups:
        for index in range(each.sampling.n):
            sample = samples[each.id, index]
            assert sample.finish_reason == "length"
            np.testing.assert_allclose(sample.logprobs, plain_logprobs(trainer, each.prompt, sample), atol=1e-5, rtol=0)


def mapped_from_files(module: torch.nn.Module) -> int:
    """Parameters that lie in a file's pages."""
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [[int(x, 16) for x in fields[0].split("-")] for fields in maps if fields[-1].endswith(".safetensors")]
    return sum(any(low <= parameter.data_ptr() < high for low, high in ranges) for parameter in module.parameters())


def test_a_loaded_model_owns_its_parameters(tmp_path: Path) -> None:
    """A refresh in place never writes into pages of a file; ties stay ties."""
    made = tiny("llama-mha")
    made.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert mapped_from_files(plain) == len(list(plain.parameters())), "what it would be otherwise"
    loaded = load_model(str(tmp_path), torch.float32, torch.device("cpu"))
    assert mapped_from_files(loaded) == 0
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for (name, mine), theirs in zip(loaded.named_parameters(), made.parameters(), strict=True):
        assert torch.equal(mine, theirs) and mine.data_ptr() % 64 == 0, name


def test_a_wrong_block_is_seen() -> None:
    """The negative control of the test above: one wrong entry of the block table moves log-probs far beyond its tolerance."""
    model = tiny("llama")
    trainer = copy.deepcopy(model)
    engine = tiny_engine(model=model)
    each = prompts((40,), n=1)[0]
    engine.submit(each)
    engine.step()
    sequence = engine.scheduler.running[0]
    sequence.table[0] = sequence.blocks[1].device
    samples = {(s.group_id, s.index): s for _ in range(20) for s in engine.step()}
    sample = samples[each.id, 0]
    assert np.abs(sample.logprobs - plain_logprobs(trainer, each.prompt, sample)).max() > 1e-2


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_window_is_honoured(name: str) -> None:
    """The same weights without a window give something else, so the equality above is not for want of length."""
    windowed, full = tiny(name), tiny(name, sliding_window=400)
    full.load_state_dict(windowed.state_dict())
    each = prompts((40,), n=1)[0]
    sample = run(tiny_engine(name, model=windowed), [each])[each.id, 0]
    assert np.abs(sample.logprobs - plain_logprobs(full, each.prompt, sample)).max() > 1e-3


def test_greedy_equals_generate() -> None:
    model = tiny("llama")
    trainer = copy.deepcopy(model)
    for each in prompts((7, 33), n=1, temperature=0.0, ignore_eos=False):
        sample = run(tiny_engine(model=model), [each])[each.id, 0]
        ids = torch.from_numpy(each.prompt.astype(np.int64))[None]
        want = trainer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False)
        assert want[0, ids.shape[1] :].tolist() == sample.token_ids.tolist()


def test_temperature_scales_logprobs() -> None:
    model = tiny("llama")
    trainer = copy.deepcopy(model)
    each = prompts((9,), n=2, temperature=0.7, raw_logprobs=True)[0]
    samples = run(tiny_engine(model=model), [each])
    for sample in samples.values():
        np.testing.assert_allclose(sample.logprobs, plain_logprobs(trainer, each.prompt, sample, 0.7), atol=2e-5, rtol=0)
        np.testing.assert_allclose(sample.raw_logprobs, plain_logprobs(trainer, each.prompt, sample), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "overrides", "feature"),
    [
        ("gemma2", {"head_dim": 16}, "softcap"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, "s_aux"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("qwen3_next", {"num_hidden_layers": 4}, "linear_attention"),
    ],
)
def test_what_the_seam_does_not_serve_is_refused(name: str, overrides: dict, feature: str) -> None:
    with pytest.raises(UnsupportedModel, match=feature) as caught:
        Model(tiny(name, **overrides), "some/model")
    assert "some/model" in str(caught.value)
