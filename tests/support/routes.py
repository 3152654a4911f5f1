"""Routes that forward hooks on a model see, beside those that an engine returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rollout.engine.forward.experts import choices_of, experts_in
from rollout.engine.values import Group, Sample


@contextmanager
def hooked(made: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Yield the choices of each module of experts in the newest forward, [positions, chosen] by its place."""
    seen: dict[int, torch.Tensor] = {}

    def look(place: int) -> Any:
        return lambda _, args, kwargs: seen.__setitem__(place, choices_of(args, kwargs).clone())

    layers = experts_in(made)
    hooks = [each.module.register_forward_pre_hook(look(place), with_kwargs=True) for place, each in enumerate(layers)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def seen_routes(made: Any, tokens: np.ndarray) -> np.ndarray:
    """Return [tokens, layers, chosen] of a plain forward of one sequence."""
    with hooked(made) as seen, torch.no_grad():
        made(input_ids=torch.as_tensor(tokens.astype(np.int64))[None], use_cache=False)
    return torch.stack([seen[place] for place in range(len(seen))], 1).numpy()


def prompt_routes(samples: Iterable[Sample]) -> np.ndarray:
    """Return the routes of a prompt: one sample of its group has them."""
    (found,) = [each.prompt_routed_experts for each in samples if each.prompt_routed_experts is not None]
    return found


def assert_routes(made: Any, group: Group, samples: dict[tuple[str, int], Sample]) -> None:
    """Assert that the routes of a group are those of the model's forward, in order."""
    mine = [samples[group.id, index] for index in group.wanted]
    for sample in mine:
        assert sample.routed_experts is not None, sample
        got = np.concatenate([prompt_routes(mine), sample.routed_experts])
        np.testing.assert_array_equal(got, seen_routes(made, np.concatenate([group.prompt, sample.token_ids])[:-1]))
