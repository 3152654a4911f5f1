"""Runs the recurrent layers of a trainer's model with the service's kernels.

Recurrent mixers compute whole sequences with the service's kernels, token by token. The backward is torch's, through the
module's own functions in chunks, sequence by sequence:

    x, q, k, v, … ──► service's kernels, real tokens only ──► out       forward: the service's numbers
          └─────────► the module's function, recomputed ◄── grad of out
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from rollout.engine.cpu.recurrence import RecurrenceKernels
from rollout.engine.forward.batch import StateRows
from rollout.engine.forward.recurrence import CONV, OF_TOKENS, SCANS, TokenMixers, names_in_forward, rebind, run_kernel
from rollout.engine.forward.shaped import shaped
from rollout.exact.layout import BatchLayout

ROWS = "exact_rows"
"""keyword argument that passes the `BatchLayout` to each layer"""


def use_exact_recurrence(model: nn.Module, threads: int | None, isa: str) -> Callable[[], None]:
    """Let the recurrent mixers of a model compute with the service's kernels. Returns a function that restores them. Raises
    ValueError if the model has mixers and isa is "torch", whose numbers depend on where a sequence is cut."""
    mixers = [each for each in model.modules() if CONV in names_in_forward(each)]
    if mixers and isa == "torch":
        raise ValueError(
            "the bits of torch's recurrent layers depend on the batch: start the service with an isa that has kernels"
        )
    return compute_by(RecurrenceKernels(isa, threads), mixers) if mixers else lambda: None


def compute_by(kernels: TokenMixers, mixers: list[nn.Module]) -> Callable[[], None]:
    """Let kernels compute mixers. Returns a function that restores them."""
    for mixer in mixers:
        inner = inspect.unwrap(type(mixer).forward)
        found = {name: inner.__globals__[name] for name in (CONV, *SCANS) if name in names_in_forward(mixer)}
        rebind(mixer, inner, {name: exact(kernels, name, original) for name, original in found.items()})

    def undo() -> None:
        for mixer in mixers:
            vars(mixer).pop("forward", None)

    return undo


def exact(kernels: TokenMixers, name: str, original: Any) -> Any:
    """Make the function that a mixer calls in place of `original`: kernels compute the batch. It raises ValueError without the
    layout of the batch, which a forward of the whole model passes, and with a cache."""
    signature = inspect.signature(original)

    def function(*args: Any, **kwargs: Any) -> Any:
        layout = kwargs.get(ROWS)
        if not isinstance(layout, BatchLayout):
            raise ValueError("a recurrent layer was called on its own: call the whole model that use_exact was given")
        given = dict(signature.bind(*args, **kwargs).arguments)
        given.update(given.pop("kwargs", {}))
        del given[ROWS]
        if name != CONV and (given.get(SCANS[name].first) is not None or given.get(SCANS[name].wanted)):
            raise ValueError("the service's recurrence takes whole sequences: call the model with use_cache=False")
        tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in given.items() if key not in tensors}
        apply: Any = _Mixed.apply
        out = apply((kernels, name, original, layout, tuple(tensors), others), *tensors.values())
        if name == CONV:
            return out.transpose(1, 2)
        return (out, None) if SCANS[name].always_pairs else out

    return function


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: tuple[Any, ...], *tensors: torch.Tensor) -> torch.Tensor:
        """Return [B, L, …]. what: kernels, name, the module's function, the layout, names of the tensors, other arguments."""
        kernels, name, _, layout, keys, others = what
        ctx.what = what
        ctx.save_for_backward(*tensors)
        given = dict(zip(keys, tensors, strict=True))
        paths = layout.paths
        at = torch.from_numpy(np.concatenate(paths)).to(tensors[0].device)
        starts = np.cumsum([0, *map(len, paths)]).astype(np.int32)
        none = np.full(len(paths), -1, np.int32)
        chosen = {key: _tokens(name, key, value, at) for key, value in given.items()}
        out = run_kernel(kernels, name, {**chosen, **others}, None, StateRows(starts, none, none))
        flat = out[0].T if name == CONV else out[0]  # [T, …]
        batch, length = layout.shape
        result = flat.new_zeros(batch * length, *flat.shape[1:])
        result[at] = flat
        return shaped(result, batch, length, *flat.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        _, name, original, layout, keys, others = ctx.what
        given = dict(zip(keys, ctx.saved_tensors, strict=True))
        grads = {key: torch.zeros_like(value) for key, value in given.items()}
        flat_grad = grad.flatten(0, 1)
        if layout.shares_tokens:  # each path has them: their own part of the gradient is that of the path that they end
            raise NotImplementedError("a tree of sequences has no gradient through recurrent layers: give each sequence a row")
        for path in layout.paths:
            at = torch.from_numpy(path).to(grad.device)
            part = {
                key: _tokens(name, key, value, at).detach().requires_grad_(value.is_floating_point())
                for key, value in given.items()
            }
            with torch.enable_grad():
                out = original(**part, **others)
            out = out[0] if isinstance(out, tuple) else out
            wanted = flat_grad[at].T[None] if name == CONV else flat_grad[at][None]
            leaves = [key for key, value in part.items() if value.requires_grad]
            made = torch.autograd.grad(out, [part[key] for key in leaves], wanted.to(out.dtype), allow_unused=True)
            for key, each in zip(leaves, made, strict=True):
                if each is not None:
                    _add(name, key, grads[key], each, at)
        return None, *(grads[key] for key in keys)


def _of_tokens(name: str, key: str) -> bool:
    """Return whether an argument of a function has a number for each token."""
    return key == "hidden_states" if name == CONV else key in OF_TOKENS


def _tokens(name: str, key: str, value: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return an argument for the tokens `at` of the flattened batch alone, as one row; others as they are."""
    if not _of_tokens(name, key):
        return value
    flat = (value.transpose(1, 2) if name == CONV else value).flatten(0, 1)[at]
    return flat.T[None] if name == CONV else flat[None]


def _add(name: str, key: str, total: torch.Tensor, grad: torch.Tensor, at: torch.Tensor) -> None:
    """Add the gradient of an argument of `_tokens` to that of the whole argument."""
    if not _of_tokens(name, key):
        total += grad
        return
    flat = (total.transpose(1, 2) if name == CONV else total).flatten(0, 1)
    flat.index_add_(0, at, grad[0].T if name == CONV else grad[0])
    whole = flat.view(total.shape[0], -1, *flat.shape[1:])
    total.copy_(whole.transpose(1, 2) if name == CONV else whole)
