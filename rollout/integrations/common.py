"""What the integrations have in common: text to token ids, samples that may be trained on, seeds. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.types import Sample


def encode(tokenizer: Any, prompt: Any, **template: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    if any(not isinstance(message["content"], str) for message in prompt):
        raise ValueError("a message whose content is not text: the service takes text only")
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **template))


def finished(sample: Sample) -> Sample:
    """Raises RuntimeError for a sample that the policy did not end: as a completion it would be trained on."""
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"sample {sample.index} of group {sample.group_id} ended as {sample.finish_reason!r}: {sample.error or 'no reason'}"
        )
    return sample


def seed_of(*numbers: int) -> int:
    """One seed for a group, from whatever makes it unique."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def checkpoint_name(name: str) -> str:
    """Of a tensor in a model that a trainer has wrapped."""
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")


def whole(tensor: Any) -> Any:
    """A tensor of a model, gathered if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def full_buffers(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, whole tensor) of each persistent buffer under its checkpoint name."""
    from engine.weights.tensors import persistent_buffers

    for name, buffer in persistent_buffers(model).items():
        yield checkpoint_name(name), whole(buffer)
