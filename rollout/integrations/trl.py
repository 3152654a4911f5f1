"""TRL 1.16 on this service, through its published plug points: nothing is patched, and vLLM is not needed.

`GRPOTrainer` (also on the CPU):

    rollouts = GroupRollouts(client)
    trainer = GRPOTrainer(model=…, args=…, reward_funcs=…, train_dataset=…, rollout_func=rollouts)
    correct_importance(trainer, rollouts)      # TRL's importance-sampling correction and its sampling/* metrics
    trainer.train()

`AsyncGRPOTrainer` (its attention kernel wants a GPU):

    sampling = sampling_of(args, args.num_generations)
    worker = ServiceRolloutWorker(client, dataset, tokenizer, reward_funcs, sampling, groups_in_flight=8, buffer=64)
    trainer = AsyncGRPOTrainer(model=…, args=…, rollout_worker=worker, weight_transfer=ServiceWeights(client))

with `token_budget` set in its args, or it asks a vLLM server for one.

Versions. `GroupRollouts` pushes the trainer's weights before each generation as version `global_step + 1`: what TRL logs as
step k was sampled by version k. A service that is further already, since it has seen another training, gets that much higher
ones. `ServiceWeights` counts its pushes from the service's version, as the trainer counts `model_version` from 0.

This module imports neither trl nor torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.engine.values import KVPolicy, Sample, Sampling
from rollout.integrations.common import checkpoint_name, encode, finished, full_buffers, seed_of, whole
from rollout.integrations.trl_async import RolloutSample, ServiceRolloutWorker, ServiceWeights
from rollout.transport.weights import Via

__all__ = [
    "GroupRollouts",
    "RolloutSample",
    "ServiceRolloutWorker",
    "ServiceWeights",
    "correct_importance",
    "sampling_of",
]


def sampling_of(args: Any, n: int) -> Sampling:
    """The sampling that a GRPOConfig or AsyncGRPOConfig asks for. Raises ValueError for what the service does not do."""
    if args.repetition_penalty != 1.0:
        raise ValueError(f"repetition_penalty={args.repetition_penalty}: the service samples without one; set it to 1.0")
    if getattr(args, "generation_kwargs", None):
        raise ValueError(f"generation_kwargs={args.generation_kwargs}: not used by the service; leave it unset")
    return Sampling(
        n=n,
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        min_p=args.min_p or 0.0,
    )


class GroupRollouts:
    """`rollout_func` of GRPOTrainer: each run of equal prompts becomes one group, prefilled once and forked.

    TRL calls it with every prompt repeated `num_generations` times, on each process with that process's slice; a group that
    straddles two processes is then two groups, each of the size of its part. Before a generation the weights of the trainer
    are pushed in place, once a step; with `peft_config` the LoRA adapter alone (`RolloutClient.refresh_lora`).

    Reward functions get two more columns: `weight_version` (of a completion's first token) and `finish_reason`.

    Args:
        kv: what happens to the KV of samples that other clients have running ("keep", "recompute" or "abort").
        timeout: seconds for a refresh, and for a generation.
    """

    def __init__(
        self,
        client: RolloutClient,
        *,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        timeout: float = 600.0,
        routed_experts: bool = False,
    ) -> None:
        """routed_experts: also return the field `routed_experts`, for `rollout.exact.replay`."""
        self._client = client
        self._routed = routed_experts
        self._kv, self._via, self._timeout = kv, via, timeout
        self._pushed = -1
        self._ahead: int | None = None
        """how far the service was ahead of the trainer's steps at the first push"""
        self._calls = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """prompts: texts or lists of messages, repeated. One entry for each of them in every list that is returned: prompt_ids,
        completion_ids, logprobs (of the distribution sampled from), weight_version, finish_reason; if they are wanted,
        routed_experts, [prompt + completion - 1, layers, chosen] arrays.

        Raises ValueError for settings that the service cannot follow, RuntimeError for a completion that did not finish."""
        self._refresh(trainer)
        self._calls += 1
        step, process = trainer.state.global_step, trainer.accelerator.process_index
        rows: list[tuple[list[int], Sample]] = []
        groups: list[tuple[list[int], Handle]] = []
        try:
            for first, prompt, count in runs(prompts):
                ids = encode(trainer.processing_class, prompt, **template_of(trainer))
                seed = seed_of(trainer.args.seed, step, self._calls, process, first)
                sampling = msgspec.structs.replace(sampling_of(trainer.args, count), seed=seed, routed_experts=self._routed)
                groups.append((ids, self._client.submit(ids, sampling)))
            for ids, handle in groups:
                rows += [(ids, finished(sample)) for sample in handle.result(self._timeout)]
        finally:
            for _, handle in groups:
                if not handle.done:
                    handle.cancel()
        return {
            "prompt_ids": [ids for ids, _ in rows],
            "completion_ids": [sample.token_ids.tolist() for _, sample in rows],
            "logprobs": [sample.logprobs.tolist() for _, sample in rows],
            "weight_version": [sample.weight_versions[0][1] for _, sample in rows],
            "finish_reason": [sample.finish_reason for _, sample in rows],
            **({"routed_experts": [sample.routes for _, sample in rows]} if self._routed else {}),
        }

    def sync_weights(self) -> None:
        """What TRL calls before it calls us, if `correct_importance` was used. The refresh happens in the call itself."""

    def _refresh(self, trainer: Any) -> None:
        step = trainer.state.global_step
        if step == self._pushed:
            return
        accelerator = trainer.accelerator
        model = accelerator.unwrap_model(trainer.model)
        adapted = hasattr(model, "peft_config")
        weights = iter(()) if adapted else full_parameters(model)
        if adapted and any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            raise ValueError("a sharded PEFT model: its adapter is sent whole; train it without FSDP, or without peft_config")
        if accelerator.is_main_process:
            if self._ahead is None:
                self._ahead = max(0, int(self._client.status()["version"]) - step)
            version = self._ahead + step + 1
            if adapted:
                self._client.refresh_lora(model, version=version, kv=self._kv, via=self._via, timeout=self._timeout)
            else:
                self._client.refresh(weights, version=version, kv=self._kv, via=self._via, timeout=self._timeout)
        else:
            for _ in weights:  # gathering a sharded parameter takes every process
                pass
        accelerator.wait_for_everyone()
        self._pushed = step


def correct_importance(trainer: Any, rollouts: GroupRollouts) -> None:
    """Switch on TRL's importance-sampling correction and the `sampling/*` metrics, for log-probs that a `rollout_func` returns.

    TRL guards both by `use_vllm`, which its constructor grants only with vLLM installed; set on the finished trainer it means
    no more than "the log-probs come from another engine". Raises RuntimeError if this TRL has no such guard (any more)."""
    missing = [name for name in ("use_vllm", "vllm_mode", "vllm_importance_sampling_correction") if not hasattr(trainer, name)]
    if missing:
        raise RuntimeError(f"this trainer has no {', '.join(missing)}: written for TRL 1.16; train without correct_importance")
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    trainer.vllm_generation, trainer._last_loaded_step = rollouts, -1


def runs(prompts: list[Any]) -> Iterator[tuple[int, Any, int]]:
    """(first row, prompt, how often it comes in a row)."""
    at = 0
    for prompt, same in itertools.groupby(prompts):
        count = sum(1 for _ in same)
        yield at, prompt, count
        at += count


def template_of(trainer: Any) -> dict[str, Any]:
    """How GRPOTrainer itself applies the chat template. Raises ValueError for tools."""
    if getattr(trainer, "tools", None):
        raise ValueError("tools: GroupRollouts answers single turns only")
    kwargs = dict(getattr(trainer, "chat_template_kwargs", None) or {})
    chat_template = getattr(trainer, "chat_template", None)
    return {**kwargs, "chat_template": chat_template} if chat_template is not None else kwargs


def full_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, whole tensor) of each parameter and persistent buffer under its checkpoint name; sharded ones are gathered one at
    a time."""
    for name, parameter in model.named_parameters():
        yield checkpoint_name(name), whole(parameter)
    yield from full_buffers(model)
