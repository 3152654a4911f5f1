"""Records which experts of a mixture the tokens of a step choose.

A hook on each module of experts writes the choices into one buffer, which CUDA graphs replay:

    buffer [tokens, layers, chosen] ──► RoutePages, at the slots of the step's KV ──► of prompts ┐
                                   └──► of the draws ────────────────────────────────────────────┴──► host, with the draws

Idea of keeping routes beside KV: vLLM's routed experts by block. Ids only, since a trainer computes weights from live scores:
R3 (arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from rollout.engine.forward.batch import Batch
from rollout.engine.forward.experts import NoRoutes, choices_of, experts_in
from rollout.engine.forward.paged import AttentionProbe
from rollout.engine.kv.routes import RouteGeometry, RoutePages
from rollout.engine.memory import DeviceMemory
from rollout.engine.scheduling.plan import Plan, StepRoutes


def routes_geometry(module: Any) -> RouteGeometry:
    """Return the shape of the routes of a model whose attention is ours, from a forward of two tokens. Raises NoRoutes."""
    layers, seen = experts_in(module), dict[int, list[torch.Tensor]]()

    def look(layer: int) -> Any:
        return lambda _, args, kwargs: seen.setdefault(layer, []).append(choices_of(args, kwargs))

    hooks = [each.module.register_forward_pre_hook(look(each.layer), with_kwargs=True) for each in layers]
    try:
        device = module.device
        places = torch.arange(2, device=device)[None]
        with torch.inference_mode():
            module(input_ids=0 * places, position_ids=places, use_cache=False, rollout=AttentionProbe())
    finally:
        for hook in hooks:
            hook.remove()
    kind = type(module).__name__
    for each in layers:
        calls = [tuple(chosen.shape) for chosen in seen.get(each.layer, [])]
        if len(calls) != 1 or len(calls[0]) != 2 or calls[0][0] != 2:
            raise NoRoutes(f"{kind}: the experts {each.name} got choices {calls} for two tokens, not [(2, chosen)]")
    sizes = {(seen[each.layer][0].shape[1], each.experts) for each in layers}
    if len(sizes) > 1:
        raise NoRoutes(f"{kind} has layers with different experts: {sorted(sizes)} chosen and in all")
    ((chosen, experts),) = sizes
    numbers = tuple(each.layer for each in layers)
    return RouteGeometry(numbers, chosen, experts, module.config.get_text_config().num_hidden_layers)


class RouteRecorder:
    """Records the routes of every forward of a module."""

    def __init__(self, module: nn.Module, geometry: RouteGeometry, most_tokens: int, memory: DeviceMemory) -> None:
        """Install the hooks. most_tokens: of a forward, padding included."""
        self.geometry, self.memory = geometry, memory
        self.chosen = torch.zeros((most_tokens, *geometry.shape), dtype=geometry.stored, device=memory.device)
        """[tokens, layers, chosen] of the newest forward"""
        self._hooks = [
            each.module.register_forward_pre_hook(self._record(place), with_kwargs=True)
            for place, each in enumerate(experts_in(module))
        ]

    def _record(self, place: int) -> Any:
        chosen = self.chosen[:, place]

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = choices_of(args, kwargs)
            chosen[: len(found)].copy_(found)

        return record

    def keep(self, batch: Batch, plan: Plan, pages: RoutePages) -> Callable[[], StepRoutes] | None:
        """Store the routes of a step that was launched with the KV of its tokens. Returns a function that waits for those of
        its draws and of prompts, as the plan asks; None: it does not."""
        rows = plan.sampling["routed_experts"]
        asked = [_slots(plan, row, tokens, pages.data.shape[1]) for row, tokens in plan.prompt_routes]
        of_draws = batch.sampling.logits_row if rows.any() else np.zeros(0, np.int64)
        slots, draws, *prompts = self.memory.send([batch.slots.numpy(), of_draws, *asked])
        by_token, tokens = pages.by_token, batch.num_tokens
        by_token[slots] = self.chosen[:tokens]
        if not rows.any():
            return None
        drawn = self._to_host(self.chosen[batch.logits_at[draws]])
        read = [self._to_host(by_token[each]) for each in prompts]

        def routes() -> StepRoutes:
            rows = (row for row, _ in plan.prompt_routes)
            return StepRoutes(drawn(), {row: each() for row, each in zip(rows, read, strict=True)})

        return routes

    def _to_host(self, routes: torch.Tensor) -> Callable[[], np.ndarray]:
        receive = self.memory.receive(routes)
        return lambda: receive().view(self.geometry.dtype)


def _slots(plan: Plan, row: int, tokens: int, block_size: int) -> np.ndarray:
    """Return [tokens] int64 slots of the first tokens of a row."""
    at = np.arange(tokens)
    slots: np.ndarray = plan.block_table[row, at // block_size].astype(np.int64) * block_size + at % block_size
    return slots
