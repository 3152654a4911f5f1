"""The trainer's process of the part `ipc` of `rollout.bench.gpu`: CUDA opens no memory in the process that has exported it.

python -m rollout.bench.gpu_trainer ENDPOINT MODEL DTYPE DEVICE REFRESHES ROWS      prints a JSON object a refresh
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import torch
import transformers

from engine.types import Refreshed, Sampling
from rollout.bench.gpu_bench import MODELS
from rollout.bench.inputs import RandomText, lognormal
from rollout.client.api import RolloutClient
from transport.weights import Via

GROUPS, LONGEST = 8, 512
"""groups that run while weights are refreshed, and tokens of the longest prompt"""


def row(what: str, refreshed: Refreshed, via: Via) -> dict[str, Any]:
    """Describe one refresh. via: the way that was asked for."""
    return {"what": what, "asked": via, **msgspec.to_builtins(refreshed)}


def main(endpoint: str, name: str, dtype: str, device: str, refreshes: str, rows: str) -> None:
    """Refresh while sequences run, the first time to warm up; then after a sleep that dropped the weights."""
    config = transformers.AutoConfig.for_model("qwen3", **MODELS[name])
    with torch.device(device):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    via: Via = "shm" if torch.device(device).type == "cpu" else "cuda_ipc"
    each = Sampling(n=max(1, int(rows) // GROUPS), max_tokens=256, ignore_eos=True)
    text, lengths = RandomText(config.vocab_size), lognormal(GROUPS, LONGEST // 4, LONGEST).tolist()
    with RolloutClient(endpoint, name="trainer") as client:
        for turn in range(int(refreshes) + 1):
            prompts = zip(text.slices(turn, GROUPS, LONGEST), lengths, strict=True)
            running = [client.submit(ids[:length], each) for ids, length in prompts]
            print(json.dumps({**row("beside steps", client.refresh(model, via=via), via), "warm": turn > 0}), flush=True)
            for handle in running:
                handle.cancel()
        client.sleep(level=2)
        client.wake(tags=("weights",))
        print(json.dumps(row("into place", client.refresh(model, via=via), via)), flush=True)
        client.wake(tags=("kv",))


if __name__ == "__main__":
    main(*sys.argv[1:])
