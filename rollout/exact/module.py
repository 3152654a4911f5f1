"""`use_exact` for a trainer's model, and log-probs of tokens with the service's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from rollout.engine.cpu.exact_modules import plain_products, unreached, use_products
from rollout.engine.cpu.functions import Callers, callers, use_whole_vectors
from rollout.engine.cpu.int8_modules import plain_weights, use_int8
from rollout.engine.cpu.products import isas_for, products_of
from rollout.engine.forward.arithmetic import (
    INT8,
    LATENT,
    TREE,
    without_fp8,
    without_int8,
    without_latent,
    without_tree,
)
from rollout.engine.forward.latent import plain_kv, use_latent_kv
from rollout.engine.forward.summed import SLICES, Summed, sum_slices, whole_sums
from rollout.engine.weights.layer_cuts import summed_products
from rollout.exact.attention import use_exact_attention
from rollout.exact.recurrence import use_exact_recurrence


@dataclass(frozen=True)
class Exact:
    """Result of `use_exact`."""

    arithmetic: str
    """name of the products"""
    remove: Callable[[], None]
    """restores the model's own attention and torch's products"""


def use_exact(model: Any, arithmetic: str | None = None, block_size: int = 32, threads: int | None = None) -> Exact:
    """Make the forward of `model` compute the service's bits: its attention, its products in every nn.Linear (bf16 or fp32,
    with or without bias, lm_head and LoRA layers included), and element-wise functions on whole vectors. Parameters, names and
    state_dict stay as they are. The backward is torch's. On CUDA the norms are replaced too, with fused layers (`/fused` in the
    name) also rotary positions and silu · up, and the service needs `exact = true`.

    model: a transformers model on the CPU or on CUDA, in eval mode or without dropout. arithmetic: `client.info.arithmetic`;
    None = the best of this machine, which a service on the same machine also uses by default. block_size: the service's.
    threads: for attention on the CPU, None = torch's; products use torch's threads.

    Batches may be padded or packed, as for `use_exact_attention`. The bits of a token depend only on its own sequence.

    Raises ValueError where this machine does not have that arithmetic, for a service that keeps KV in fp8, which no trainer's
    forward does, or whose numbers depend on the batch (`/batch`), for reduced precision of fp32 products, for another device,
    and for products that are no plain nn.Linear's, router's or experts' (quantised); NativeUnavailable or TritonUnavailable
    if the attention is not available. The model is unchanged then. Under autocast, an exact model raises ValueError."""
    if arithmetic is not None and without_fp8(arithmetic) != arithmetic:
        raise ValueError(
            f"the service computes with arithmetic {arithmetic!r}, whose KV is in fp8, and a trainer's forward has none: start "
            'the service with kv_dtype="auto", or weigh its samples by their importance ratios instead'
        )
    if arithmetic is not None and "/batch" in arithmetic:
        raise ValueError(
            f"the service computes with arithmetic {arithmetic!r}, whose numbers depend on the batch (its status says why: "
            "computed_by_reason): no trainer can compute the same bits; weight its samples by their importance ratios"
        )
    if arithmetic is not None and arithmetic.endswith(TREE):
        return _use_exact_with_trees(model, without_tree(arithmetic), block_size, threads)
    if arithmetic is not None and arithmetic.endswith(LATENT):
        return _use_exact_with_latents(model, without_latent(arithmetic), block_size, threads)
    if arithmetic is not None and arithmetic.endswith(INT8):
        return _use_exact_in_int8(model, without_int8(arithmetic), block_size, threads)
    _check_precision(model.device)
    if model.device.type == "cuda":
        from rollout.exact.on_device import use_exact_on_device

        return Exact(*use_exact_on_device(model, arithmetic, block_size))
    products, attention = isas_for(arithmetic)  # before anything is changed
    undo = use_exact_attention(model, block_size, threads, attention)
    restore: list[Callable[[], None]] = []

    def remove() -> None:
        undo()
        plain_products(model)
        for each in restore:
            each()

    try:
        restore.append(use_exact_recurrence(model, threads, products))
        called = _probe(model)
        use_whole_vectors(called.found.values())
        use_products(model, products, {*unreached(model, called)})
    except BaseException:
        remove()
        raise
    return Exact(products_of(products).arithmetic, remove)


def _use_exact_with_latents(model: Any, arithmetic: str, block_size: int, threads: int | None) -> Exact:
    """Do the same for a service with `latent_kv`."""
    if model.device.type != "cpu":
        raise ValueError(f"the service has latent_kv, and the model is on {model.device}: latent KV needs the CPU")
    use_latent_kv(model)
    try:
        made = use_exact(model, arithmetic, block_size, threads)
    except BaseException:
        plain_kv(model)
        raise

    def remove() -> None:
        made.remove()
        plain_kv(model)

    return Exact(made.arithmetic + LATENT, remove)


def _use_exact_with_trees(model: Any, arithmetic: str, block_size: int, threads: int | None) -> Exact:
    """Do the same for a service with `tree_sums`, as each one with tensor parallelism is, unless it is on CUDA without
    `exact`."""
    sum_slices(summed_products(model), Summed(SLICES, None))
    try:
        made = use_exact(model, arithmetic, block_size, threads)
    except BaseException:
        whole_sums(model)
        raise

    def remove() -> None:
        made.remove()
        whole_sums(model)

    return Exact(made.arithmetic + TREE, remove)


def _use_exact_in_int8(model: Any, arithmetic: str, block_size: int, threads: int | None) -> Exact:
    """Do the same for a service with `weight_dtype = "int8"`: weights are encoded in each forward, and the gradient of both
    factors of a product is straight-through, as if encoding were the identity. Also raises ValueError for matrices that the
    service would refuse, and for adapters, whose product the service adds to the weight before it encodes it."""
    if model.device.type != "cpu":
        raise ValueError(f'the service has weight_dtype="int8", and the model is on {model.device}: it needs the CPU')
    made = use_exact(model, arithmetic, block_size, threads)
    try:
        use_int8(model, isas_for(arithmetic)[0], kept=False)
    except BaseException:
        made.remove()
        raise

    def remove() -> None:
        plain_weights(model)
        made.remove()

    return Exact(made.arithmetic + INT8, remove)


def _check_precision(device: torch.device) -> None:
    """Raise ValueError if torch may round fp32 products to fewer bits: rotary positions are one, and no product of ours."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = backend.matmul.fp32_precision
    if precision not in ("none", "ieee"):
        raise ValueError(
            f"torch computes fp32 products in {precision}, so rotary positions are rounded, and the service's are not: call "
            'torch.set_float32_matmul_precision("highest") before use_exact'
        )


def _probe(model: Any) -> Callers:
    """Return what a forward of two tokens calls: element-wise functions are to have the service's bits there."""
    with callers(model) as called, torch.no_grad(), torch.random.fork_rng(devices=[]):
        model(input_ids=torch.zeros((1, 2), dtype=torch.long), use_cache=False)
    return called


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs of tokens [...] under logits [..., V]: float32, the service's bits, with a gradient. Temperature 0,
    at which the service takes the likeliest token, has the log-probs of 1, as the service reports them. On CUDA they come from
    the service's own kernel, where Triton is there."""
    if logits.is_cuda:
        from rollout.exact import on_device

        if on_device.has_kernels():
            return on_device.token_logprobs(logits, tokens, temperature)
    return plain_logprobs(logits, tokens, temperature)


def plain_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return `token_logprobs` by torch's log_softmax."""
    scaled = logits.float() / temperature if temperature not in (0, 1) else logits.float()
    return scaled.log_softmax(-1).gather(-1, tokens[..., None].long())[..., 0]


def sample_logprobs(
    model: Any, sequences: Sequence[tuple[np.ndarray, np.ndarray]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Score tokens after their prompts in one forward of a transformers model, as a trainer does.

    sequences: (prompt [p], tokens [t]), integer token ids, p and t at least 1; padded on the right where lengths differ.
    Returns [t] float32 of each, on the model's device, with a gradient unless the caller turned gradients off. Logits are
    computed from the last token of the shortest prompt on, so memory grows with what is scored and not with the prompts.
    """
    whole = [torch.from_numpy(np.concatenate(pair).astype(np.int64)) for pair in sequences]
    ids = pad_sequence(whole, batch_first=True)[:, :-1].to(model.device)
    first = min(len(prompt) for prompt, _ in sequences) - 1
    mask = None
    if len({len(each) for each in whole}) > 1:
        mask = pad_sequence([torch.ones_like(each) for each in whole], batch_first=True)[:, :-1].to(model.device)
    kept = torch.arange(first, ids.shape[1], device=ids.device)  # a number would cut the tokens of layers that share KV
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=kept).logits
    return [
        token_logprobs(row[len(prompt) - 1 - first : len(each) - 1 - first], each[len(prompt) :].to(row.device), temperature)
        for row, (prompt, _), each in zip(logits, sequences, whole, strict=True)
    ]
