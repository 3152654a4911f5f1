"""The policy that a recipe trains: log-probs of a group by one forward, the loss, AdamW, adapters, saving.

Only this module imports torch, so that `--help` of a recipe does not wait for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout import Sample
from rollout.exact import replay, token_logprobs


class Learner:
    """The policy in bf16, as the service runs it, and AdamW on fp32 masters: a step of 1e-5 would vanish in bf16. Of a
    PeftModel the adapters learn."""

    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        self.model = model.eval()  # no dropout: the service has none
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self) -> float:
        """Apply the gradients gathered so far. Returns their norm before clipping to 1."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adam.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)
        return float(norm)


def logprobs(model: Any, prompt: list[int], samples: list[Sample], temperature: float) -> torch.Tensor:
    """Return [tokens of all samples] log-probs of the samples' tokens, by one forward that reads the prompt once.

    p p p p a a b b b      a row of the mask: the prompt, and what its own sample said so far
    └prompt┘└a┘└─b─┘       (the last token of a sample predicts nothing and is left out)
    """
    model = policy_of(model)
    start, ids, positions, owner = len(prompt), list(prompt), [*range(len(prompt))], [-1] * len(prompt)
    predictors, targets = [], []
    for index, sample in enumerate(samples):
        tokens = sample.token_ids.tolist()
        predictors += [start - 1, *range(len(ids), len(ids) + len(tokens) - 1)]
        targets += tokens
        ids += tokens[:-1]
        positions += range(start, start + len(tokens) - 1)
        owner += [index] * (len(tokens) - 1)
    who = torch.tensor(owner)
    hidden_from = ~((who == -1) | (who == who[:, None])).tril()
    mask = torch.zeros(hidden_from.shape, dtype=model.dtype).masked_fill(hidden_from, -torch.inf)
    with routed(model, samples):
        hidden = model.base_model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            attention_mask=mask[None, None],
            use_cache=False,
        ).last_hidden_state[0, predictors]
    return token_logprobs(model.get_output_embeddings()(hidden), torch.tensor(targets), temperature)


def routed(model: Any, samples: list[Sample]) -> AbstractContextManager[None]:
    """Let the routers choose the experts that the service chose, if the samples have them. Routes lie as the tokens do in
    `logprobs`: the first of each sample is that of the prompt's last token."""
    first = samples[0]
    if first.routed_experts is None:
        return nullcontext()
    own = [sample.routed_experts[1:] for sample in samples if sample.routed_experts is not None]
    assert first.prompt_routed_experts is not None and len(own) == len(samples)
    return replay(model, np.concatenate([first.prompt_routed_experts, first.routed_experts[:1], *own]))


def policy_of(model: Any) -> Any:
    """Return the transformers model, of a PeftModel the one that has the adapters in it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def behaviour(samples: list[Sample]) -> torch.Tensor:
    """Return [tokens of all samples] the service's log-probs."""
    return torch.from_numpy(np.concatenate([sample.logprobs for sample in samples]))


def policy_loss(now: torch.Tensor, then: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Compute PPO's surrogate, summed over tokens. The importance ratio counts within 1 - low and 1 + high; all [tokens]."""
    ratio = (now - then).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage).sum()


def add_gradients(
    model: Any,
    prompt: list[int],
    samples: list[Sample],
    advantage: np.ndarray,
    *,
    tokens: int,
    clip: tuple[float, float],
    temperature: float,
) -> np.ndarray:
    """Add the gradients of one group's loss. Returns [tokens of all samples] importance ratios.

    Args:
        advantage: [samples].
        tokens: of all groups of the step: each counts the same.
        clip: bounds of the importance ratio, below and above 1."""
    now, then = logprobs(model, prompt, samples, temperature), behaviour(samples)
    each = torch.from_numpy(np.repeat(advantage, [len(sample.token_ids) for sample in samples])).float()
    (policy_loss(now, then, each, *clip) / tokens).backward()
    return (now.detach() - then).exp().numpy()


def mismatch(model: Any, prompt: list[int], samples: list[Sample], temperature: float) -> float:
    """Return the mean |log-prob here - log-prob of the service| of samples of the same weights."""
    with torch.no_grad():
        now = logprobs(model, prompt, samples, temperature)
    return float((now - behaviour(samples)).abs().mean())


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Turn [groups, n] rewards into advantages: how much better than its siblings each sample did, in standard deviations of
    its group."""
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)


def lags(groups: list[list[Sample]], version: int) -> np.ndarray:
    """Return [tokens] how many versions behind the trainer's weights each token was made."""
    made = []
    for sample in (sample for group in groups for sample in group):
        starts = [start for start, _ in sample.weight_versions] + [len(sample.token_ids)]
        made.append(np.repeat([v for _, v in sample.weight_versions], np.diff(starts)))
    return version - np.concatenate(made)


def load(folder: Path, seed: int, threads: int) -> Any:
    """Load a model in bf16 for a trainer with `threads` CPU threads; of a shape the service's random weights. seed: of new
    adapters."""
    from rollout.engine.forward.random_weights import load_module

    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    return load_module(folder, dtype=torch.bfloat16)


def with_adapters(model: torch.nn.Module, rank: int, alpha: int) -> torch.nn.Module:
    """Put LoRA adapters, in fp32, on all linear layers of the decoder. The model's own weights are frozen from here on."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, settings)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model for `rollout serve --model FOLDER`: safetensors, configuration, tokenizer. Adapters are merged into it."""
    whole = model.merge_and_unload() if hasattr(model, "peft_config") else model
    whole.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
