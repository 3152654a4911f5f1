"""The service's attention in a trainer's forward, so that its log-probs are the service's, bit for bit up to the logits.

transformers computes attention in one way for a full forward and in another for a cached one; in bf16 the two differ by some
0.04 in log-prob. The service does one arithmetic for each (query, block), and here a trainer does the same:

    use_exact_attention(model)        # any transformers model that the service runs; CPU, attention="native", same block_size

    q, k, v ──► native kernel, real tokens only ──► out          forward: the service's numbers
        └─────► torch's SDPA, recomputed ◄── grad of out         backward: an ordinary gradient

Positions are counted from the first real token of each row, as the service counts them, however the batch is padded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.attention import NativeAttention

NAME = "rollout_exact"


class Rows(NamedTuple):
    """The real tokens of one padded batch [B, L], the same for all layers."""

    mask: torch.Tensor
    """[B, L] bool"""
    tokens: torch.Tensor
    """[T] int64: where they stand in the flattened batch"""
    starts: np.ndarray
    """[B + 1] int32: tokens of row b are starts[b] … starts[b + 1] - 1"""
    table: np.ndarray
    """[B, M] int32: blocks of a row"""
    slots: np.ndarray
    """[T] int64: block · block_size + offset"""
    block_size: int
    native: NativeAttention

    @staticmethod
    def of(mask: torch.Tensor, block_size: int, native: NativeAttention) -> Rows:
        lens = mask.sum(1).numpy()
        most = -(-int(lens.max()) // block_size)
        table = np.arange(len(lens) * most, dtype=np.int32).reshape(len(lens), most)
        row = np.repeat(np.arange(len(lens)), lens)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        position = np.arange(starts[-1]) - starts[row]
        slots = table[row, position // block_size].astype(np.int64) * block_size + position % block_size
        return Rows(mask, mask.flatten().nonzero()[:, 0], starts, table, slots, block_size, native)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, scaling: float, window: int
    ) -> torch.Tensor:
        """query [B, q_heads, L, D], key and value [B, kv_heads, L, D] → [B, L, q_heads, D], zero for padding."""
        ctx.save_for_backward(query, key, value)
        ctx.rows, ctx.scaling, ctx.window = rows, scaling, window
        b, q_heads, length, dim = query.shape
        q, k, v = (x.transpose(1, 2).reshape(b * length, x.shape[1], dim)[rows.tokens] for x in (query, key, value))
        pool = torch.empty((rows.table.size, 1, 2, key.shape[1], rows.block_size, dim), dtype=query.dtype)
        step = rows.native.step(pool, rows.starts, np.diff(rows.starts), rows.table, rows.slots, q_heads)
        out = query.new_zeros(b * length, q_heads, dim)
        out[rows.tokens] = rows.native.run(step, 0, q, k, v, scaling, window)
        return out.view(b, length, q_heads, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        length = query.shape[2]
        at = torch.arange(length)
        seen = (at <= at[:, None]) & ctx.rows.mask[:, None, :]
        if ctx.window:
            seen = seen & (at > at[:, None] - ctx.window)
        seen = seen | torch.eye(length, dtype=torch.bool)  # a padding query sees itself, or its softmax would be NaN
        with torch.enable_grad():
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=seen[:, None], scale=ctx.scaling, enable_gqa=True
            )
            grads = torch.autograd.grad(out, (query, key, value), grad.transpose(1, 2))
        return *grads, None, None, None


def exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    rollout_rows: Rows | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    assert rollout_rows is not None, "use_exact_attention(model) was not called on this model"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _Attention.apply(query, key, value, rollout_rows, scaling, sliding_window or 0), None


def use_exact_attention(model: Any, block_size: int = 32, threads: int | None = None) -> None:
    """From now on `model` (on the CPU, of a kind that the service runs) attends as the service does.

    block_size: the service's. threads: None = torch's. The model then takes input_ids with an attention_mask [B, L] (or none),
    without a cache. Raises NativeUnavailable where the kernel cannot be built, ValueError for a model on another device."""
    if model.device.type != "cpu":
        raise ValueError(f"the model is on {model.device}: the native kernel runs on the CPU")
    native = NativeAttention(threads)

    def prepare(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        mask = kwargs.get("attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        kwargs["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)
        kwargs["rollout_rows"] = Rows.of(real, block_size, native)
        return args, kwargs

    model.base_model.register_forward_pre_hook(prepare, with_kwargs=True)
    model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, exact_attention)
AttentionMaskInterface.register(NAME, lambda **_: None)  # masks travel as Rows
