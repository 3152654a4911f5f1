"""The real model: SmolLM2-135M-Instruct over real prompts."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.forward.load import load_model
from rollout.engine.forward.model import Model
from rollout.engine.memory import HostMemory
from rollout.engine.values import Group, Sampling
from tests.support.tiny import plain_logprobs
from tests.support.toy import run

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List the first five prime numbers.",
)


def prompts(folder: Path, sampling: Sampling) -> list[Group]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    return [Group(str(i), np.array(one, np.int32), sampling) for i, one in enumerate(ids)]


def engine_of(module: PreTrainedModel, dtype: str) -> Engine:
    config = EngineConfig(dtype=dtype, kv_tokens=4096, cpu_offload_gib=0)  # type: ignore[arg-type]
    return Engine(config, Model(copy.deepcopy(module), "smollm2"))


def test_greedy_equals_generate(smollm2: Path) -> None:
    """fp32: token for token what `generate` makes, one prompt after the other; here all at once."""
    module = load_model(str(smollm2), torch.float32, HostMemory())
    groups = prompts(smollm2, Sampling(n=1, max_tokens=4, temperature=0.0))[:2]
    samples = run(engine_of(module, "float32"), groups)
    for each in groups:
        ids = torch.from_numpy(each.prompt.astype(np.int64))[None]
        want = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert want[0, ids.shape[1] :].tolist() == samples[each.id, 0].token_ids.tolist()


@pytest.mark.long
def test_logprobs_in_bf16(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a plain forward with transformers' own attention, in bf16: different rounding, the same model. The bound is twice
    what transformers shows between its own full and cached forward (4e-2)."""
    module = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    groups = prompts(smollm2, Sampling(n=1, max_tokens=24, seed=1))
    samples = run(engine_of(module, "bfloat16"), groups)
    by_id = {each.id: each for each in groups}
    pairs = [
        (sample.logprobs, plain_logprobs(module, by_id[group_id].prompt, sample)) for (group_id, _), sample in samples.items()
    ]
    difference = np.abs(np.concatenate([a - b for a, b in pairs]))
    with capsys.disabled():
        print(f"\nSmolLM2 bf16 against plain sdpa: |Δ log-prob| mean {difference.mean():.2e}, max {difference.max():.2e}")
    assert difference.mean() < 8e-2
