"""prime-rl's loop from end to end, with SmolLM2: its configuration as docs/integrations.md has it, verifiers, its requests.

Its trainer wants GPUs, so the trainer is ours: GRPO with AdamW, a folder of safetensors for each step.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch

from rollout.client.api import RolloutClient
from rollout.config import Config
from rollout.engine.config import EngineConfig
from rollout.exact import sample_logprobs, use_exact
from rollout.process import service_process
from tests.support.gateway import gateway

pytestmark = pytest.mark.integrations

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(__file__).parent / "environments"


class Run(msgspec.Struct):
    """What the documents say, and a service and a gateway that are up."""

    settings: dict[str, Any]
    client: RolloutClient
    url: str
    folder: Path

    @property
    def orchestrator(self) -> dict[str, Any]:
        return self.settings["orchestrator"]


def documented() -> str:
    """The configuration in docs/integrations.md, as text."""
    section = (ROOT / "docs" / "integrations.md").read_text().split("## With prime-rl")[1].split("\n## ")[0]
    (text,) = re.findall(r"```toml\n(.*?)```", section, re.S)
    return str(text)


@pytest.fixture(scope="module")
def run(smollm2: Path) -> Iterator[Run]:
    pytest.importorskip("verifiers")
    settings = tomllib.loads(documented())
    engine = EngineConfig(model=str(smollm2), threads=1, kv_tokens=16_384, cpu_offload_gib=0, max_num_seqs=32)
    with (
        service_process(Config(engine=engine)) as service,
        RolloutClient(service.endpoint) as client,
        gateway(client, smollm2, names=(settings["model"]["name"],)) as running,
    ):
        yield Run(settings, client, running.url, smollm2)


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    monkeypatch.setenv("VLLM_API_KEY", "EMPTY")


def test_prime_rl_reads_the_documented_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own classes, out of a checkout: weights travel as folders, to the address that `rollout http` has by itself."""
    checkout = os.environ.get("PRIME_RL")
    if not checkout:
        pytest.skip("PRIME_RL names no checkout")
    monkeypatch.syspath_prepend(str(Path(checkout) / "packages/prime-rl-configs/src"))
    for name in [name for name in sys.modules if name.split(".")[0] == "prime_rl"]:
        monkeypatch.delitem(sys.modules, name)
    config = importlib.import_module("prime_rl.configs.rl").RLConfig.model_validate(tomllib.loads(documented()))
    for name in [name for name in sys.modules if name.split(".")[0] == "prime_rl"]:
        monkeypatch.delitem(sys.modules, name)
    assert config.orchestrator.weight_broadcast.type == config.trainer.weight_broadcast.type == "filesystem"
    assert config.orchestrator.model.client.base_url == "http://127.0.0.1:8000/v1"
    assert config.inference is None
    (source,) = config.orchestrator.train.source
    assert source.env.taskset.id == "rollout-sums" and source.env.agent.runtime.type == "subprocess"


async def episodes(run: Run, step: int, version: int) -> list[list[Any]]:
    """Play one batch of the configured environment; returns the traces of each task."""
    import verifiers.v1 as vf
    from renderers.configs import DefaultRendererConfig

    settings = run.orchestrator
    (source,) = settings["train"]["source"]
    config = vf.SingleAgentEnvConfig.model_validate(source["env"])
    base_url = settings["model"]["client"]["base_url"].replace("http://127.0.0.1:8000", run.url)
    assert settings["renderer"] == {"name": "default"}
    client = vf.TrainClientConfig(
        base_url=base_url, api_key_var="VLLM_API_KEY", renderer=DefaultRendererConfig(), renderer_model_name=str(run.folder)
    )
    sampling = vf.SamplingConfig(temperature=1.0, top_p=1.0, cache_salt=str(version), **settings["train"]["sampling"])
    context = vf.ModelContext(model=run.settings["model"]["name"], client=client, sampling=sampling)
    env, n = vf.SingleAgentEnv(config), settings["group_size"]
    tasks = list(env.taskset)[step * (count := settings["batch_size"] // n) :][:count]
    async with env.serving():
        played = await asyncio.gather(*(env.run_episode(task, context) for task in tasks for _ in range(n)))
    assert all(episode.ok for episode in played), [episode.errors or episode.traces[0].errors for episode in played]
    traces = [trace for episode in played for trace in episode.traces]
    return [traces[i : i + n] for i in range(0, len(traces), n)]


def row_of(trace: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompt, completion and the log-probs that verifiers kept of it."""
    (branch,) = trace.branches
    ids, drawn = np.array(branch.token_ids, np.int32), np.array(branch.sampled_mask)
    assert not drawn[: (first := int(drawn.argmax()))].any() and drawn[first:].all()
    return ids[:first], ids[first:], np.array(branch.logprobs, np.float32)[first:]


def learn(model: Any, optimizer: Any, rows: list[tuple[np.ndarray, np.ndarray]], advantages: torch.Tensor) -> None:
    logprobs = torch.stack([row.mean() for row in sample_logprobs(model, rows)])
    (-advantages * logprobs).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def publish(run: Run, folder: Path) -> None:
    """The requests that prime-rl's orchestrator sends once a step's folder is there."""
    with httpx.Client(base_url=run.url, timeout=120) as http:
        http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).raise_for_status()
        http.post("/update_weights", json={"weight_dir": folder.as_posix()}).raise_for_status()
        http.post("/resume").raise_for_status()


@pytest.mark.timeout(900)
def test_steps_of_prime_rl_s_loop(run: Run, tmp_path: Path, record_property: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.settings["trainer"]["optim"]["lr"])
    ours = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.bfloat16).eval()
    use_exact(ours, run.client.info.arithmetic)
    rewards = []
    for step in range(run.settings["max_steps"]):
        assert run.client.status()["version"] == step
        groups = asyncio.run(episodes(run, step, step))
        traces = [trace for group in groups for trace in group]
        whole = [row_of(trace) for trace in traces]
        rows = [(prompt, ids) for prompt, ids, _ in whole]
        scored = [run.client.score([prompt], [[ids]])[0][0] for prompt, ids in rows]
        with torch.no_grad():
            trainer = sample_logprobs(ours, rows)
        for (_, _, told), score, mine in zip(whole, scored, trainer, strict=True):
            assert score.weight_versions == [(0, step)] and np.array_equal(told, score.logprobs)
            assert np.array_equal(told, mine.numpy()), "the trainer's own log-probs are the sampled ones"
        reward = torch.tensor([[trace.reward for trace in group] for group in groups])
        rewards.append(float(reward.mean()))
        learn(model, optimizer, rows, (reward - reward.mean(1, keepdim=True)).flatten())
        ours.load_state_dict(model.state_dict())  # rounds to bf16
        folder = tmp_path / f"step_{step + 1}"
        ours.save_pretrained(folder)
        publish(run, folder)
        anew = run.client.score([rows[0][0]], [[rows[0][1]]])[0][0]
        assert anew.weight_versions == [(0, step + 1)] and not np.array_equal(anew.logprobs, scored[0].logprobs)
    assert run.client.status()["version"] == run.settings["max_steps"] and len(set(rewards)) > 1
    record_property("rewards", rewards)
    print(
        f"prime-rl's loop: {run.orchestrator['batch_size']} samples a step, mean rewards {[round(one, 3) for one in rewards]}"
    )
