"""Replay of routes: a trainer's mixture of experts chooses the experts that the service chose.

    with replay(model, batch_routes([sample.routes for sample in samples])):
        loss = ...                       # a forward of the padded batch
        loss.backward()

Only the choice is replayed. The weights of the chosen experts come from the trainer's own scores, normalised and scaled by its
own router, so the router keeps its gradient (R3, arXiv 2510.11370). Every router of transformers that is supported chooses by
one call of `topk` over the scores of all experts, so only the result of this call is replaced:

    topk(scores [tokens, experts], k)  ──►  scores.gather(-1, routes), routes
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from rollout.engine.forward.experts import ExpertsLayer, NoRoutes, experts_in

LIVE = -1
"""in place of an expert's id: the router chooses by itself"""
TOPK = (torch.topk, torch.Tensor.topk)


@contextmanager
def replay(model: nn.Module, routes: torch.Tensor | np.ndarray) -> Iterator[None]:
    """Let the routers of a model of transformers choose recorded experts, in every forward inside the `with` block. With
    gradient checkpointing the backward runs forwards too: keep it inside.

    Args:
        routes: ids, [batch, tokens, layers, chosen], or [tokens, layers, chosen] of a batch of one row, of any integer dtype:
            for each position of `input_ids` and each layer with experts the choices at this position. A position with an id
            below 0 is routed by the model, in this layer.

    Raises:
        NoRoutes: a ValueError that names the module of experts whose router is not supported.
        ValueError: routes do not fit the model, or, in a forward, its batch.
    """
    layers = experts_in(model)
    routers = [router_of(model, each) for each in layers]
    ids = flat_routes(routes, len(layers))
    most = min(each.experts for each in layers)
    if ids.numel() and int(ids.max()) >= most:
        raise ValueError(f"routes hold expert {int(ids.max())}: must be 0 to {most - 1}, or {LIVE} to choose live")
    before = [vars(router).get("forward") for _, router in routers]
    for place, ((name, router), each) in enumerate(zip(routers, layers, strict=True)):
        device = next(router.parameters()).device
        mode = Replayed(name, each.experts, ids[:, place].to(device))
        vars(router)["forward"] = _replaying(router, mode)
    try:
        yield
    finally:
        for (_, router), forward in zip(routers, before, strict=True):
            if forward is None:
                del vars(router)["forward"]
            else:
                vars(router)["forward"] = forward


def batch_routes(routes: Sequence[np.ndarray], length: int | None = None) -> torch.Tensor:
    """Lay the routes of sequences, [positions, layers, chosen] each, as those of a batch whose rows are padded on the right.
    length: positions of the batch; None: of the longest. Returns [batch, length, layers, chosen] int16; padding is routed live.
    Raises ValueError for longer routes."""
    longest = max(map(len, routes))
    if length is not None and longest > length:
        raise ValueError(f"routes of {longest} positions for a batch of {length}: cut them")
    rows = [torch.from_numpy(each.astype(np.int16)) for each in routes]
    padded = pad_sequence(rows, batch_first=True, padding_value=LIVE)
    more = 0 if length is None else length - longest
    return nn.functional.pad(padded, (0, 0, 0, 0, 0, more), value=LIVE)


def flat_routes(routes: torch.Tensor | np.ndarray, layers: int) -> torch.Tensor:
    """Return routes as [positions, layers, chosen] int64. Raises ValueError."""
    ids = torch.from_numpy(routes.astype(np.int64)) if isinstance(routes, np.ndarray) else routes.detach()
    if ids.is_floating_point() or ids.dim() not in (3, 4) or ids.shape[-2] != layers:
        raise ValueError(
            f"routes are {str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}: must be integers [batch, tokens, {layers}, "
            f"chosen], or [tokens, {layers}, chosen]; the model has {layers} layers with experts"
        )
    return ids.flatten(0, -3).long()


def router_of(model: nn.Module, experts: ExpertsLayer) -> tuple[str, nn.Module]:
    """Return name and module of the router of a module of experts: the module next to it whose forward calls `topk`. Raises
    NoRoutes."""
    parent = experts.name.rpartition(".")[0]
    beside = [
        (f"{parent}.{name}", each)
        for name, each in model.get_submodule(parent).named_children()
        if each is not experts.module and _chooses(each)
    ]
    kind = type(model).__name__
    if len(beside) != 1:
        found = ", ".join(name for name, _ in beside) or "none"
        raise NoRoutes(f"{kind}: the router of {experts.name} is not a module next to it that calls topk; found {found}")
    return beside[0]


def _chooses(module: nn.Module) -> bool:
    """Return whether the forward of a module calls `topk`."""
    return "topk" in inspect.unwrap(type(module).forward).__code__.co_names


class Replayed(TorchFunctionMode):
    """While active, `topk` over the scores of all experts of each token returns the recorded experts. routes: [tokens, chosen]
    int64."""

    def __init__(self, name: str, experts: int, routes: torch.Tensor) -> None:
        super().__init__()
        self.name, self.experts, self.routes = name, experts, routes
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK:
            return func(*args, **kwargs)
        scores = kwargs["input"] if "input" in kwargs else args[0]
        if scores.dim() != 2 or scores.shape[-1] != self.experts:
            return func(*args, **kwargs)  # of groups of experts
        self.calls += 1
        live = func(*args, **kwargs)
        if live.indices.shape != self.routes.shape:
            raise ValueError(
                f"{self.name} chooses {list(live.indices.shape)}, the routes are {list(self.routes.shape)}: give them for each "
                "position of input_ids, batch × tokens, padding included"
            )
        chosen = torch.where((self.routes < 0).any(-1, keepdim=True), live.indices, self.routes)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def _replaying(router: Any, mode: Replayed) -> Any:
    """Make the forward of a router that replays routes."""
    inner = router.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(*args: Any, **kwargs: Any) -> Any:
        mode.calls = 0
        with mode:
            out = inner(*args, **kwargs)
        if mode.calls != 1:
            raise NoRoutes(f"{mode.name} ({type(router).__name__}) chose experts by {mode.calls} calls of topk, not by one")
        return out

    return forward
