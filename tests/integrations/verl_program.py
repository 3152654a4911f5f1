"""Run by the interpreter of an environment of verl:  python tests/integrations/verl_program.py MODEL SERVICE_PYTHON

verl's manager, router, client, worker group and registries, unpatched, over one service on this host's CPU. The trainer is a
worker of verl's with a model of transformers. Prints one JSON object of what happened; the last line of standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")

import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

PROMPT = list(range(10, 42))


class Trainer(Worker):
    """A rank of a trainer that shares its host with the service of its replica."""

    def __init__(self, rollout: Any, model: Any) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
        self.rollout = get_rollout_class(rollout.name)(rollout, model, None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, step: int, kv: bool) -> None:
        """As ActorRolloutRefWorker does with the backend "naive", after a step that changes every weight."""
        await self.rollout.resume(tags=["weights"])
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        await self.rollout.update_weights(iter(self.model.state_dict().items()), global_steps=step)
        if kv:
            await self.rollout.resume(tags=["kv_cache"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def logprobs(self, prompt: list[int], response: list[int]) -> list[float]:
        """Score a response with the trainer's own model."""
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            table = torch.log_softmax(self.model(ids).logits[0].float(), -1)
        at = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        return table[at, torch.tensor(response)].tolist()


def configuration(path: str, python: str) -> Any:
    """verl's own defaults, with what a user writes."""
    ours = {
        "actor_rollout_ref.model.path": path,
        "actor_rollout_ref.rollout.name": "rollout",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.prompt_length": 64,
        "actor_rollout_ref.rollout.response_length": 96,
        "actor_rollout_ref.rollout.max_num_seqs": 16,
        "actor_rollout_ref.rollout.max_num_batched_tokens": 256,
        "+actor_rollout_ref.rollout.engine_kwargs.rollout.python": python,
        "+actor_rollout_ref.rollout.engine_kwargs.rollout.engine": "{kv_tokens: 8192, threads: 1}",
    }
    folder = Path(verl.__file__).parent / "trainer/config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", [f"{key}={value}" for key, value in ours.items()])


async def run(path: str, python: str) -> dict[str, Any]:
    config = configuration(path, python)
    rollout = config.actor_rollout_ref.rollout
    trainer = RayClassWithInitArgs(cls=ray.remote(Trainer), rollout=rollout, model=config.actor_rollout_ref.model)
    group = RayWorkerGroup(RayResourcePool([1], use_gpu=False), trainer, name_prefix="trainer", device_name="cpu")
    manager = await LLMServerManager.create(config, worker_group=group)
    client = manager.get_client()
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "ignore_eos": True}

    async def one(number: int, **more: Any) -> Any:
        return await client.generate(f"r{number}", prompt_ids=PROMPT, sampling_params={**sampling, **more})

    first = await asyncio.gather(*[one(i) for i in range(8)])
    replica = manager.get_replicas()[0]

    # a step of a synchronous trainer: sleep, weights, KV
    await replica.sleep()
    ray.get(group.update_weights(1, True))
    second = await asyncio.gather(*[one(i, seed=i) for i in range(8)])
    scored = ray.get(group.logprobs(PROMPT, second[0].token_ids))[0]
    error = max(abs(a - b) for a, b in zip(scored, second[0].log_probs, strict=True))

    # a step of an asynchronous one: what runs goes on over the refresh
    running = [asyncio.create_task(one(i, max_tokens=96)) for i in range(8)]
    await asyncio.sleep(0.05)
    await replica.abort_all_requests()
    await replica.release_kv_cache()
    ray.get(group.update_weights(2, False))
    await replica.resume_kv_cache()
    await replica.resume_generation()
    third = await asyncio.gather(*running)
    await replica.abort_all_requests(reject_request=True)
    rejected = await one(0)
    await replica.resume_generation()
    merged = await manager.get_client(FullyAsyncLLMServerClient).generate("m", prompt_ids=PROMPT, sampling_params=sampling)
    refused = ""
    try:
        await one(0, best_of=4)
    except Exception as failure:
        refused = str(failure)
    await replica.servers[0].close.remote()
    return {
        "verl": verl.__version__,
        "lengths": [len(output.token_ids) for output in [*first, *second, *third, merged]],
        "logprobs": [len(output.log_probs) for output in [*first, *second, *third, merged]],
        "first_steps": [output.extra_fields["global_steps"] for output in first],
        "second_steps": [output.extra_fields["min_global_steps"] for output in second],
        "third_spans": [output.extra_fields["global_steps_spans"] for output in third],
        "stop_reasons": [output.stop_reason for output in third],
        "logprob_error": error,
        "rejected": rejected.stop_reason,
        "refused": refused,
    }


if __name__ == "__main__":
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=True,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    try:
        print(json.dumps(asyncio.run(run(*sys.argv[1:]))), flush=True)
    finally:
        ray.shutdown()
