"""`python -m tests.bench delta`: bytes of a refresh after small AdamW steps, if only changed values are sent.

This process trains the model on ordinary text, with AdamW on fp32 masters. It sends the bf16 weights by via="delta" after STEPS
steps, and again after one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rollout.bench.harness import BenchSetup, Row
from rollout.bench.inputs import PromptSource
from rollout.bench.target import connected
from rollout.client.lora import digest_of_tensors
from rollout.config import Config
from rollout.engine.forward.random_weights import load_module
from rollout.engine.values import Refreshed
from rollout.exact import use_exact
from rollout.models import hide_progress_bars

STEPS, RATE = 20, 1e-6
ROWS, TOKENS = 4, 128
"""shape of a training batch"""


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield the summary. bytes_fraction: bytes sent after STEPS steps, over the bytes of the model. same_digest: the live
    weights equal the trainer's to the bit."""
    hide_progress_bars()
    engine = setup.config()
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    model = load_module(setup.folder, dtype=getattr(torch, engine.dtype))
    use_exact(model, None, engine.block_tokens, engine.threads)  # on some CPUs plain torch takes minutes per step in bf16
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    adam = torch.optim.AdamW(masters, lr=RATE, weight_decay=0.0)
    length = setup.scaled(TOKENS, 16)
    with connected(Config(engine=engine)) as (_, client):
        whole = client.refresh(model, via="inline")
        client.refresh(model, via="delta")
        done: list[Refreshed] = []
        for step in range(STEPS + 1):
            train(model, masters, adam, setup.text, step, length)
            if step + 1 >= STEPS:
                done.append(client.refresh(model, via="delta"))
        live = client.weights_status(verify=True)["live_digest"]
    many, one = done
    yield {
        "summary": True,
        "dtype": engine.dtype,
        "learning_rate": RATE,
        "steps": STEPS,
        "bytes_fraction": many.sent_bytes / many.bytes,
        "one_step_fraction": one.sent_bytes / one.bytes,
        "model_bytes": many.bytes,
        "same_digest": live == one.digest == digest_of_tensors(dict(model.named_parameters())),
        **{
            name: getattr(many, name) for name in ("via", "reason", "sent_bytes", "seconds", "staged_seconds", "paused_seconds")
        },
        "inline_seconds": whole.seconds,
    }


def train(model: Any, masters: list[torch.Tensor], adam: Any, text: PromptSource, step: int, length: int) -> None:
    """Take one AdamW step on the next tokens of the text."""
    rows = torch.stack([torch.from_numpy(row).long() for row in text.slices(step * ROWS * length, ROWS, length)])
    model(input_ids=rows, labels=rows).loss.backward()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        master.grad, parameter.grad = parameter.grad.float(), None
    adam.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
