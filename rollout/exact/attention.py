"""Registers the service's attention for a trainer's transformers model.

transformers computes attention differently in a full forward and in a cached one; in bf16 the log-probs differ by about 0.04.
The service uses one arithmetic for each query and chunk of keys, and this module gives a trainer the same:

    q, k, v ──► service's kernel, real tokens only ──► out       forward: the service's numbers
        └─────► torch's SDPA, recomputed ◄── grad of out         backward: an ordinary gradient, in fp32 if this CPU
                                                                 is slow in bf16

SDPA has no soft caps and no sinks: for layers with them, the backward computes plain attention in fp32, one KV head at a time.

It works for every transformers model that the service runs, on the CPU and on CUDA, with the same block_size. A batch may have
padded rows, packed rows or trees (`rollout.exact.layout`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rollout.engine.cpu.attention import NativeAttention
from rollout.engine.cpu.backward import fast_in_bf16
from rollout.engine.forward.attention import Scores
from rollout.engine.forward.latent import OURS, latent_heads_of
from rollout.engine.forward.reference import ReferenceAttention
from rollout.engine.forward.shaped import shaped
from rollout.engine.kv.pages import KVGeometry
from rollout.exact.layout import BatchLayout, rows_of
from rollout.exact.recurrence import ROWS

TEXT = frozenset(
    ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache_position", "labels",
     "shift_labels", "num_items_in_batch", "logits_to_keep", "per_layer_inputs", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
)  # fmt: skip
"""arguments of a forward of text that may be tensors"""
CACHES = ("past_key_values", "cache")
"""names of a cache among the arguments of a forward; since transformers 5.24 the second one"""
KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
"""0 for a token of text"""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Any, Any, Scores], torch.Tensor]
"""signature of `rollout.engine.forward.attention.Backend.attend`"""


def trainer_attention(block_size: int = 32, threads: int | None = None, isa: str | None = None) -> str:
    """Register the attention and return its name for `attn_implementation`. Each row must be one sequence, since transformers
    does not pass position_ids to an attention; `use_exact_attention` also accepts packed rows.

    block_size: the service's. threads: None = torch's. isa: None = the best of this CPU, "torch" = the reference in torch,
    which a service without kernels uses. Rows may be padded on either side; position_ids then count from a row's first real
    token, as for every attention. Raises NativeUnavailable if the kernel cannot be built. The model raises ValueError if called
    with a cache."""
    backend = ReferenceAttention() if isa == "torch" else NativeAttention(threads, isa)
    return register(f"{OURS}_trainer_{block_size}_{threads or 'all'}_{isa or 'best'}", backend.attend, block_size)


def register(name: str, attend: Attend, block_size: int) -> str:
    """Register a backend's `attend` as an attention of transformers, and return the name."""

    def rows(
        batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> BatchLayout:
        if q_length != kv_length:
            raise ValueError("the service's attention takes whole sequences: call the model with use_cache=False")
        return rows_of((batch_size, q_length), attention_mask, None, block_size)

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        found = kwargs.get(ROWS, attention_mask)
        if not isinstance(found, BatchLayout):
            raise ValueError("the service's attention takes a mask [B, L], or none; for others call use_exact_attention(model)")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        apply: Any = _Attention.apply
        scores = Scores(scaling, sliding_window or 0, softcap or 0.0)
        latent = latent_heads_of(module)
        if latent is None:
            return apply(query, key, value, s_aux, found, attend, scores), None
        return latent.expand(apply(latent.absorb(query), key, value, s_aux, found, attend, scores)), None

    AttentionMaskInterface.register(name, rows)
    AttentionInterface.register(name, attention)
    return name


def use_exact_attention(
    model: Any, block_size: int = 32, threads: int | None = None, isa: str | None = None
) -> Callable[[], None]:
    """Install the service's attention in `model`. The model then accepts whole sequences (use_cache=False) with

        attention_mask   none, [B, L] or [B, 1, L, L] (`rollout.exact.layout`)
        position_ids     none: positions count from each sequence's first token, with any padding; or [B, L]: a new sequence
                         begins wherever they restart at 0

    and with text alone: ValueError names any other tensor, such as `pixel_values`.

    On a GPU it uses the service's Triton kernels; threads and isa apply to the CPU. Returns a function that restores the model.
    Raises NativeUnavailable if the kernel cannot be built, TritonUnavailable without Triton, ValueError for another device."""
    before = model.config._attn_implementation
    if model.device.type == "cpu":
        name = trainer_attention(block_size, threads, isa)
    elif model.device.type == "cuda" and threads is None and isa is None:
        from rollout.exact.attention_on_device import DeviceAttention

        name = register(f"{OURS}_trainer_{block_size}_{model.device}", DeviceAttention(model.device).attend, block_size)
    else:
        raise ValueError(f"the model is on {model.device}: the kernels run on the CPU, and on CUDA without threads and isa")
    return _attending(model, name, block_size, before)


def _attending(model: Any, name: str, block_size: int, before: str) -> Callable[[], None]:
    """Set the attention `name`, with a hook that passes it the layout of each batch. Returns a function that restores the
    model."""
    model.set_attn_implementation(name)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT calls that one
    hooks = [inner.base_model.register_forward_pre_hook(PassLayout(block_size), with_kwargs=True)]
    if inner.base_model is not inner:  # whose forward may call a tower itself
        hooks.append(inner.register_forward_pre_hook(_refuse_all_but_text, with_kwargs=True))

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)

    return undo


def _refuse_all_but_text(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError naming an argument that is not of text, such as pictures: our attention is causal, and has one position
    a token."""
    given = kwargs if len(args) < 2 else {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    for name, value in given.items():
        if name in TEXT or not _holds_tensors(value):
            continue
        if name in KINDS_OF_TOKENS and not value.any():
            continue
        raise ValueError(
            f"{type(module).__name__} was called with {name}: an exact model computes text alone, as the service does. Leave "
            f"{name} out, or call remove() of what use_exact returned first"
        )


def _holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or a container or an output with one in it."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_holds_tensors, value)))


def _one_position(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Return position ids [B, L], given these or [axes, B, L] as of models for pictures. Raises ValueError where the axes
    differ."""
    if position_ids is None or position_ids.ndim < 3:
        return position_ids
    if not bool((position_ids == position_ids[:1]).all()):
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} differ between their axes, as positions in a picture do: an exact model "
            "computes text alone"
        )
    return position_ids[0]


class PassLayout:
    """A hook that passes the layout of each batch to the layers. Copied with its model, it works for the copy."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def __call__(self, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for `inner`, the model without its head. Raises ValueError for a cache, and for pictures."""
        _refuse_all_but_text(inner, args, kwargs)
        given = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        batch, length = (args[0] if given is None else given).shape[:2]
        if any(kwargs.get(name) is not None for name in CACHES):
            raise ValueError("the service's attention takes whole sequences: call the model with use_cache=False")
        positions = _one_position(kwargs.get("position_ids"))
        rows = rows_of((batch, length), kwargs.get("attention_mask"), positions, self.block_size)
        depth = rows.on(inner.device).depth
        return args, {**kwargs, "position_ids": depth, "attention_mask": None, ROWS: rows}

    def __deepcopy__(self, memo: dict[int, Any]) -> PassLayout:
        return PassLayout(self.block_size)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: what is read back would compute with plain layers under an exact model's name."""
        raise TypeError(
            "an exact model cannot be pickled whole: save its state_dict(), or call remove() of what use_exact returned first; "
            "copy.deepcopy works"
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        rows: BatchLayout,
        attend: Attend,
        scores: Scores,
    ) -> torch.Tensor:
        """Compute attention: query [B, q_heads, L, D], key [B, kv_heads, L, D], value [B, kv_heads, L, E], sinks [q_heads] →
        [B, L, q_heads, E], zero for padding."""
        ctx.save_for_backward(query, key, value, sinks)
        ctx.rows, ctx.scores = rows, scores
        b, q_heads, length, dim = query.shape
        tokens, width = rows.on(query.device).tokens, value.shape[3]
        q, k, v = (x.transpose(1, 2).reshape(b * length, x.shape[1], x.shape[3])[tokens] for x in (query, key, value))
        geometry = KVGeometry(1, key.shape[1], dim, query.dtype, None if width == dim else width)
        data = query.new_empty((rows.blocks, *geometry.block_shape(rows.block_size)))
        pool = SimpleNamespace(data=data, block_size=rows.block_size, geometry=geometry)
        out = query.new_zeros(b * length, q_heads, width)
        out[tokens] = attend(0, q, k, v, rows.batch, pool, scores._replace(sinks=sinks))
        return shaped(out, b, length, q_heads, width)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        *saved, sinks = ctx.saved_tensors  # read once: with checkpointing, each access recomputes them
        dtype = saved[0].dtype
        wide = grad.device.type == "cpu" and dtype == torch.bfloat16 and not fast_in_bf16()
        among = torch.float32 if wide else dtype
        query, key, value = (x.detach().to(among).requires_grad_() for x in saved)
        there = ctx.rows.on(grad.device)
        seen = there.seen
        if ctx.scores.window:
            depth = there.depth
            seen = seen & (depth[:, :, None] - depth[:, None, :] < ctx.scores.window)
        if ctx.scores.softcap or sinks is not None:
            return *_plain_gradients(saved, sinks, grad.transpose(1, 2), seen, ctx.scores), None, None, None
        with torch.enable_grad():
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=seen[:, None], scale=ctx.scores.scaling, enable_gqa=True
            )
            grads = torch.autograd.grad(out, (query, key, value), grad.transpose(1, 2).to(among))
        return *(each.to(dtype) for each in grads), None, None, None, None


def _plain_gradients(
    tensors: list[torch.Tensor], sinks: torch.Tensor | None, grad: torch.Tensor, seen: torch.Tensor, scores: Scores
) -> list[torch.Tensor | None]:
    """Return the gradients of query, key, value (`tensors`, as in `_Attention.forward`) and sinks, for that of the output,
    [B, q_heads, L, E]. seen: [B, L, L] bool. Memory: a few [B, group, L, L] in fp32."""
    heads = tensors[1].shape[1]
    inputs = tensors if sinks is None else [*tensors, sinks[None]]
    found = []
    for head in range(heads):
        part = [x.chunk(heads, 1)[head].detach().float().requires_grad_() for x in inputs]
        with torch.enable_grad():
            asked = scores._replace(sinks=None if sinks is None else part[3][0])
            out = plain_attention(part[0], part[1], part[2], seen, asked)
        found.append(torch.autograd.grad(out, part, grad.chunk(heads, 1)[head].float()))
    grads = [torch.cat(parts, 1).to(like.dtype) for parts, like in zip(zip(*found, strict=True), inputs, strict=True)]
    return [*grads[:3], None if sinks is None else grads[3][0]]


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Return [B, group, L, E] attention of one KV head by its definition: query [B, group, L, D], key [B, 1, L, D], value
    [B, 1, L, E], seen [B, L, L] bool, `scores.sinks` [group]; the window is in `seen`."""
    products = query @ key.transpose(2, 3) * scores.scaling
    if scores.softcap:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    products = products.masked_fill(~seen[:, None], -torch.inf)
    if scores.sinks is not None:
        products = torch.cat([products, scores.sinks[:, None, None].expand(*products.shape[:3], 1)], 3)
    return products.softmax(3)[..., : key.shape[2]] @ value
