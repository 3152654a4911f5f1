"""The kernels of fused layers in a trainer's model: norms of heads with rotary positions, and silu(gate) · up.

A service with `exact` and fused layers computes them in kernels of its own, whose norms sum, and whose exp rounds, in another
way than torch's. The same kernels compute the forward of a trainer's module here:

    q_proj, k_proj ──► rope_store ──► q, k for attention           gate_proj, up_proj ──► silu_mul ──► down_proj
          └──────────► torch's norm and rotation, recomputed ◄── their gradients      (and so for silu · up)

The sums of residuals need no kernel: torch adds two numbers as `add_norm` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from rollout.engine.cuda.fused import HEAD_NORMS, SILU_WIDTH, TOLERANCE, NotFused, look_at
from rollout.engine.cuda.launches import power_of_two
from rollout.engine.forward.recurrence import names_in_forward, with_globals
from rollout.engine.forward.shaped import shaped

ROTARY = "apply_rotary_pos_emb"
"""transformers' function of q, k, cos and sin, [B, heads, L, D] and [B, L, D], as modeling files of Llama's kind have it"""
CHECKED_TOKENS = 7


def use_fused_layers(model: Any, block_size: int) -> Callable[[], None]:
    """Let the kernels of fused layers compute rotary positions, norms of heads and silu · up in the forward of a model, and
    torch their gradients. block_size: the service's, for which the kernel is compiled. Returns a function that restores the
    model. Raises NotFused, and changes nothing then, if the model has layers that a service does not fuse, or if its logits
    would differ from its own by more than rounding explains."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT calls that one
    look_at(inner, adapted=True)
    layers = inner.base_model.layers
    if any(ROTARY not in names_in_forward(layer.self_attn) for layer in layers):
        raise NotFused(f"attention that calls no {ROTARY}")
    own = _logits(inner)
    replaced: list[tuple[nn.Module, Any]] = []

    def replace(module: nn.Module, forward: Any) -> None:
        replaced.append((module, vars(module).get("forward")))
        module.forward = forward

    def undo() -> None:
        for module, before in replaced:
            del module.forward
            if before is not None:
                module.forward = before

    for layer in layers:
        replace(layer.self_attn, FusedAttention(layer.self_attn, block_size))
        replace(layer.mlp, MethodType(_mlp, layer.mlp))
        for norm in (getattr(layer.self_attn, name, None) for name in HEAD_NORMS):
            if norm is not None:
                replace(norm, MethodType(_waits, norm))
    try:
        apart = float((_logits(inner) - own).abs().max() / own.abs().max())
        if not apart <= TOLERANCE[inner.dtype]:
            raise NotFused(f"logits that differ from transformers' own by {apart:.1e}")
    except BaseException:
        undo()
        raise
    return undo


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    """Return the logits of some tokens, in fp32."""
    ids = torch.arange(CHECKED_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    made: torch.Tensor = model(input_ids=ids, use_cache=False).logits.float()
    return made


class FusedAttention:
    """The forward of an attention layer, with the kernel's norms and rotation. Copied with its layer, it works for the copy."""

    def __init__(self, layer: Any, block_size: int) -> None:
        self.layer, self.block_size = layer, block_size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the layer's class."""
        forward = with_globals(
            inspect.unwrap(type(self.layer).forward), {ROTARY: partial(rotated, self.layer, self.block_size)}
        )
        return forward(self.layer, *args, **kwargs)


def _waits(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Leave a head as it is: the kernel computes its norm before it rotates it."""
    return hidden_states


def rotated(
    layer: Any, block_size: int, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [B, q_heads, L, D] and k [B, kv_heads, L, D] of an attention layer after their norms, if it has some, and
    rotations. cos, sin: [B, L, D], or [1, L, D]."""
    norms = [getattr(layer, name, None) for name in ("q_norm", "k_norm")]
    weights = [None if norm is None else norm.weight for norm in norms]
    eps = [0.0 if norm is None else norm.variance_epsilon for norm in norms]
    apply: Any = _Rotated.apply
    turned, stored = apply(query, key, *weights, cos, sin, eps, block_size)
    return turned.transpose(1, 2), stored.transpose(1, 2)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: list[float],
        block: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `rope_store` with the constants of the service, over a pool of this batch's K, and without V. Returns q and k
        with tokens before heads."""
        from rollout.engine.cuda import fused_kernels

        ctx.save_for_backward(query, key, q_weight, k_weight, cos, sin)
        ctx.eps = eps
        (b, q_heads, length, dim), heads, tokens = query.shape, key.shape[1], query.shape[0] * query.shape[2]
        both = query.new_empty(tokens, (q_heads + 2 * heads) * dim)
        both[:, : q_heads * dim] = query.transpose(1, 2).reshape(tokens, -1)
        both[:, q_heads * dim : -heads * dim] = key.transpose(1, 2).reshape(tokens, -1)
        turns = [x.expand(b, length, dim).reshape(tokens, dim).contiguous() for x in (cos, sin)]
        out = query.new_empty(tokens, q_heads, dim)
        pool = query.new_empty(-(-tokens // block), heads, block, dim)
        slots = torch.arange(tokens, dtype=torch.int32, device=query.device)
        weights = (out, out) if q_weight is None else (q_weight, k_weight)
        fused_kernels.rope_store[(tokens, 2)](
            both, *turns, *weights, out, pool, pool, slots, 0, pool.stride(0), *eps,
            Q_HEADS=q_heads, HEADS=heads, DIM=dim, HALF_PAD=power_of_two(dim // 2), HEADS_PAD=power_of_two(max(q_heads, heads)),
            BLOCK=block, NORM=q_weight is not None, FP8=False, enable_fp_fusion=False,
        )  # fmt: skip
        stored = pool.transpose(1, 2).reshape(-1, heads, dim)[:tokens]
        return shaped(out, b, length, q_heads, dim), shaped(stored, b, length, heads, dim)

    @staticmethod
    def backward(ctx: Any, of_query: torch.Tensor, of_key: torch.Tensor) -> tuple[Any, ...]:
        query, key, q_weight, k_weight, cos, sin = ctx.saved_tensors
        turns = cos[:, None], sin[:, None]
        of_query, of_key = of_query.transpose(1, 2), of_key.transpose(1, 2)
        found = [
            _gradients(partial(_plain_rotation, cos=turns[0], sin=turns[1], eps=eps), (x, weight), grad)
            for x, weight, eps, grad in ((query, q_weight, ctx.eps[0], of_query), (key, k_weight, ctx.eps[1], of_key))
        ]
        (of_q, of_q_weight), (of_k, of_k_weight) = found
        return of_q, of_k, of_q_weight, of_k_weight, None, None, None, None


def _plain_rotation(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return [B, heads, L, D] as transformers' modules compute it."""
    if weight is not None:
        wide = x.float()
        x = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def _mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))
    return made


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up, [..., inner] each, by the service's kernel."""
    apply: Any = _SiluMul.apply
    made: torch.Tensor = apply(gate, up)
    return made


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        from rollout.engine.cuda import fused_kernels

        ctx.save_for_backward(gate, up)
        inner = gate.shape[-1]
        both = torch.cat([x.reshape(-1, inner) for x in (gate, up)], 1)
        out = both.new_empty(len(both), inner)
        grid = len(both), -(-inner // SILU_WIDTH)
        fused_kernels.silu_mul[grid](both, out, inner, WIDTH=SILU_WIDTH, enable_fp_fusion=False)
        return shaped(out, *gate.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gradients(lambda gate, up: silu(gate) * up, ctx.saved_tensors, grad)


def _gradients(
    function: Callable[..., torch.Tensor], given: tuple[torch.Tensor | None, ...], grad: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return torch's gradients of a function's arguments; None for those that are None."""
    inputs = [None if x is None else x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        found = iter(torch.autograd.grad(function(*inputs), [x for x in inputs if x is not None], grad))
    return tuple(None if x is None else next(found) for x in inputs)
