"""The service's attention in a trainer's forward, so that its log-probs are the service's, bit for bit up to the logits.

transformers computes attention in one way for a full forward and in another for a cached one; in bf16 the two differ by some
0.04 in log-prob. The service does one arithmetic for each query and chunk of keys, and here a trainer does the same:

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=trainer_attention())
    use_exact_attention(model)        # or so, for a model that exists; positions are counted then, too

    q, k, v ──► native kernel, real tokens only ──► out          forward: the service's numbers
        └─────► torch's SDPA, recomputed ◄── grad of out         backward: an ordinary gradient

On the CPU, for any transformers model that the service runs with attention="native" and the same block_size, and for rows that
hold one sequence each: packed ones are not told apart. An importance ratio is exactly 1 on policy then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.attention import NativeAttention


def trainer_attention(block_size: int = 32, threads: int | None = None) -> str:
    """Register the attention and return its name, to be given as `attn_implementation`.

    block_size: the service's. threads: None = torch's. The rows of a batch may be padded on either side; position_ids must
    count from a row's first real token then, as they must for every attention. Raises NativeUnavailable where the kernel cannot
    be built; the model raises ValueError if it is asked to continue from a cache."""
    native = NativeAttention(threads)
    name = f"rollout_trainer_{block_size}_{threads or 'all'}"

    def rows(batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **_: Any) -> Rows:
        if q_length != kv_length:
            raise ValueError("the service's attention takes whole sequences: call the model with use_cache=False")
        real = torch.ones(batch_size, q_length, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        return Rows.of(real, block_size, native)

    AttentionMaskInterface.register(name, rows)
    AttentionInterface.register(name, _attend)
    return name


def use_exact_attention(model: Any, block_size: int = 32, threads: int | None = None) -> None:
    """From now on `model` attends as the service does, and counts positions from the first real token of each row, however the
    batch is padded: it takes input_ids with an attention_mask [B, L] (or none), without a cache.

    Raises NativeUnavailable where the kernel cannot be built, ValueError for a model on another device than the CPU."""
    if model.device.type != "cpu":
        raise ValueError(f"the model is on {model.device}: the native kernel runs on the CPU")

    def count(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        mask = kwargs.get("attention_mask")
        real = torch.ones_like(ids) if mask is None else mask.long()
        kwargs["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
        return args, kwargs

    model.set_attn_implementation(trainer_attention(block_size, threads))
    model.base_model.register_forward_pre_hook(count, with_kwargs=True)


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


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Rows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if not isinstance(attention_mask, Rows):
        raise ValueError("the service's attention takes an attention_mask [B, L], or none, and no mask of another shape")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _Attention.apply(query, key, value, attention_mask, scaling, sliding_window or 0), None
