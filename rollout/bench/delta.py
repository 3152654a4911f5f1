"""`rollout bench delta`: how many bytes a refresh takes after small AdamW steps, if only what has changed travels.

A model is trained on ordinary text, in this process, with AdamW on fp32 masters; each refresh sends its bf16 weights by
via="delta": once after STEPS steps, then after one more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.types import Refreshed
from rollout.bench.inputs import PromptText
from rollout.client.api import RolloutClient
from rollout.client.lora import digest_of_tensors
from rollout.config import Config
from rollout.exact import use_exact
from rollout.models import hide_progress_bars
from rollout.process import service_process

NAME = "delta"
STEPS, RATE = 20, 1e-6
ROWS, TOKENS = 4, 128
"""of a training step"""


def measure(folder: Path, engine: EngineConfig, text: PromptText, scale: float = 1.0) -> dict[str, Any]:
    """Return the summary. `bytes_fraction`: bytes that travelled after STEPS steps over those of the model; `same_digest`: what
    is live then is what the trainer has, to the bit."""
    hide_progress_bars()
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, engine.dtype))
    use_exact(model, None, engine.block_size, engine.threads)  # plain torch takes minutes a step where it is slow in bf16
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    adam = torch.optim.AdamW(masters, lr=RATE, weight_decay=0.0)
    config = Config(engine=msgspec.structs.replace(engine, model=str(folder)))
    length = max(16, round(TOKENS * scale))
    with service_process(config) as service, RolloutClient(service.endpoint, name="rollout bench") as client:
        whole = client.refresh(model, via="inline")
        client.refresh(model, via="delta")
        done: list[Refreshed] = []
        for step in range(STEPS + 1):
            train(model, masters, adam, text, step, length)
            if step + 1 >= STEPS:
                done.append(client.refresh(model, via="delta"))
        live = client.weights_status(verify=True)["live_digest"]
    many, one = done
    return {
        "workload": NAME,
        "summary": True,
        "dtype": engine.dtype,
        "learning_rate": RATE,
        "steps": STEPS,
        "via": many.via,
        "reason": many.reason,
        "bytes_fraction": many.sent_bytes / many.bytes,
        "one_step_fraction": one.sent_bytes / one.bytes,
        "sent_bytes": many.sent_bytes,
        "model_bytes": many.bytes,
        "same_digest": live == one.digest == digest_of_tensors(dict(model.named_parameters())),
        "seconds": many.seconds,
        "staged_seconds": many.staged_seconds,
        "paused_seconds": many.paused_seconds,
        "inline_seconds": whole.seconds,
    }


def train(model: Any, masters: list[torch.Tensor], adam: Any, text: PromptText, step: int, length: int) -> None:
    """Take one step of AdamW on the next tokens of the text."""
    rows = torch.stack([torch.from_numpy(row).long() for row in text.slices(step * ROWS * length, ROWS, length)])
    model(input_ids=rows, labels=rows).loss.backward()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        master.grad, parameter.grad = parameter.grad.float(), None
    adam.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
