"""Real transformers architectures against their own plain forward, and what is refused at load."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.forward.load import BrokenModel, load_model
from rollout.engine.forward.model import Model, UnsupportedModel
from rollout.engine.forward.self_check import LoadedModel, check_model
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import HostMemory
from tests.support import families
from tests.support.equipped import equip
from tests.support.tiny import MODELS, plain_logprobs, tiny, tiny_engine
from tests.support.toy import group, run

pytestmark = pytest.mark.usefixtures("loads_in_full")


def prompts(lengths: tuple[int, ...] = (1, 5, 16, 40), n: int = 3, **sampling: object) -> list:
    r = np.random.default_rng(0)
    options = {"n": n, "max_tokens": 14, "ignore_eos": True, **sampling}
    return [group(f"g{i}", r.integers(3, 199, length), seed=i, **options) for i, length in enumerate(lengths)]


@pytest.mark.some(8)
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
    loaded = load_model(str(tmp_path), torch.float32, HostMemory())
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
    sequence = engine.scheduler.state.running[0]
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
        ("doge", {"num_key_value_heads": 4}, "dynamic_mask|mask"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("minimax", {"num_local_experts": 4, "num_experts_per_tok": 2}, "in 1 of 2 layers, the first model.layers.1"),
    ],
)
def test_what_the_seam_does_not_serve_is_refused(name: str, overrides: dict, feature: str) -> None:
    with pytest.raises(UnsupportedModel, match=feature) as caught:
        Model(tiny(name, **overrides), "some/model")
    assert "some/model" in str(caught.value)


WIDE = {"head_dim": 592}
MANY = {"hidden_size": 132, "num_attention_heads": 66, "num_key_value_heads": 1, "head_dim": 8}


@pytest.mark.parametrize("overrides", [WIDE, MANY], ids=["head_dim 592", "66 query heads over 1"])
def test_shapes_that_the_kernel_lacks_take_the_reference(overrides: dict, caplog: pytest.LogCaptureFixture) -> None:
    """Told in the log, and right; refused at load where the kernel was asked for by name."""
    model = tiny("llama", **overrides)
    trainer = copy.deepcopy(model)
    engine = tiny_engine(model=model)
    assert engine.worker.backend.name == "reference" and "attention runs in plain torch" in caplog.text
    each = prompts((40,), n=1)[0]
    sample = run(engine, [each])[each.id, 0]
    np.testing.assert_allclose(sample.logprobs, plain_logprobs(trainer, each.prompt, sample), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match='attention="native": .* query heads over'):
        tiny_engine(model=trainer, attention="native")


def test_keys_and_values_of_two_widths_survive_offload(copies_pay: None) -> None:
    """Latent attention with more children than the pool holds: through host memory and back, and right."""
    model = families.build("deepseek_v3", num_hidden_layers=2)
    trainer = copy.deepcopy(model)
    groups = prompts((40, 33), n=4, max_tokens=20)
    engine = tiny_engine(model=model, kv_tokens=160, cpu_offload_gib=0.01)
    assert engine.model.geometry == KVGeometry(2, 4, 24, torch.float32, 12)
    samples = run(engine, groups)
    assert engine.counters.restored_blocks > 0
    for each in groups:
        for index in range(4):
            sample = samples[each.id, index]
            np.testing.assert_allclose(sample.logprobs, plain_logprobs(trainer, each.prompt, sample), atol=1e-5, rtol=0)


def test_the_memory_of_two_widths_is_what_is_stored() -> None:
    geometry = KVGeometry(3, 4, 24, torch.bfloat16, 12)
    kv = PagedKV(geometry, PoolSizes(8, 5, 0), HostMemory())
    assert kv.block_bytes * 5 == kv.data.nbytes == 5 * 8 * 3 * 4 * (24 + 12) * 2


def test_the_native_decoder_sees_the_whole_context() -> None:
    """Queries that are scaled from position 2,048 on, by the module alone."""
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 2048,
               "llama_4_scaling_beta": 0.5}  # fmt: skip
    sizes = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
             "vocab_size": 208, "max_position_embeddings": 4096, "rope_parameters": scaling}  # fmt: skip
    model = Model(tiny("ministral3", torch.bfloat16, **sizes), "ministral3")
    equip(model)
    assert model.decoder is None


def test_positions_near_the_end_of_the_context_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose own forward and whose forward in the engine part only there."""
    engine = tiny_engine("llama")
    forward = engine.model.forward

    def wrong_from_400_on(batch, kv, backend):
        far = batch.position_ids[0, batch.logits_at[: batch.num_logits], None] > 400
        return forward(batch, kv, backend) * (1 + 0.1 * far)

    monkeypatch.setattr(engine.model, "forward", wrong_from_400_on)
    with pytest.raises(UnsupportedModel, match="at positions 416 to 511"):
        check_model(LoadedModel(engine.model, engine.worker.backend, 8, 128, HostMemory(), engine.model.geometry))


def test_what_goes_wrong_while_judging_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine("llama")
    monkeypatch.setattr(engine.worker.backend, "attend", lambda *_: 1 / 0)
    with pytest.raises(UnsupportedModel, match="cannot be compared: ZeroDivisionError: division by zero"):
        check_model(LoadedModel(engine.model, engine.worker.backend, 8, 128, HostMemory(), engine.model.geometry))


def test_the_judge_leaves_a_model_as_it_was() -> None:
    """Windows, attention and hooks."""
    module = tiny("mistral", sliding_window=300)
    engine = Engine(EngineConfig(dtype="float32", kv_tokens=512, cpu_offload_gib=0), Model(module, "mistral"))
    assert module.config.sliding_window == 300 and module.model.layers[0].self_attn.config.sliding_window == 300
    assert module.config._attn_implementation == "rollout"
    assert not module.get_input_embeddings()._forward_hooks
    assert engine.model.asked[0]["window"] == 300


def test_weights_with_ties_and_without_their_twins_load(tmp_path: Path) -> None:
    """What is legitimately absent from a checkpoint is not missing; what is there too much is named."""
    from safetensors.torch import load_file, save_file

    tiny("llama-mha").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    load_model(str(tmp_path), torch.float32, HostMemory())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # of old checkpoints
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_model(str(tmp_path), torch.float32, HostMemory())
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenModel, match=r"1 unexpected \(model.layers.0.self_attn.q_norm.weight\)"):
        load_model(str(tmp_path), torch.float32, HostMemory())


def test_experts_that_torch_has_no_grouped_product_for() -> None:
    """Of 12 numbers in bf16, as a rank's part of 48 is; of 16, transformers' product stays."""
    for width, implementation in ((12, "eager"), (16, "grouped_mm")):
        options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width}
        engine = tiny_engine(dtype="bfloat16", model=tiny("qwen3_moe", torch.bfloat16, **options))
        assert engine.model.module.config._experts_implementation == implementation
        assert all(each.finish_reason == "length" for each in run(engine, prompts((5,))).values())
