"""Shared by the integrations: token ids of prompts, checks of samples, seeds. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rollout.engine.values import Sample


def encode(tokenizer: Any, prompt: Any, **template: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    if any(not isinstance(message["content"], str) for message in prompt):
        raise ValueError("a message has content other than text: the service accepts only text")
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **template))


def finished(sample: Sample) -> Sample:
    """Return the sample. Raises RuntimeError if it ended for another reason than stop or length, so that no trainer uses it."""
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"sample {sample.index} of group {sample.group_id} ended as {sample.finish_reason!r}: {sample.error or 'no reason'}"
        )
    return sample


def seed_of(*numbers: int) -> int:
    """Return a seed for a group, from numbers that identify it."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def checkpoint_name(name: str) -> str:
    """Return the name in the checkpoint of a tensor in a wrapped model."""
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")


def whole(tensor: Any) -> Any:
    """Return a tensor of a model, gathered if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def full_buffers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (checkpoint name, whole tensor) of each persistent buffer."""
    from rollout.engine.weights.tensors import persistent_buffers

    for name, buffer in persistent_buffers(model).items():
        yield checkpoint_name(name), whole(buffer)
