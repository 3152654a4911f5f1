"""`use_exact` for a trainer's model, and log-probs of tokens with the service's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from rollout.engine.cpu.exact_modules import plain_products, unreached, use_products
from rollout.engine.cpu.functions import Callers, callers, use_whole_vectors
from rollout.engine.cpu.int8_modules import plain_weights, use_int8
from rollout.engine.cpu.products import isas_for, products_of
from rollout.engine.forward.latent import plain_kv, use_latent_kv
from rollout.engine.forward.summed import SLICES, Summed, sum_slices, whole_sums
from rollout.engine.values.arithmetic import TREE, Arithmetic
from rollout.engine.weights.layer_cuts import summed_products
from rollout.exact.attention import use_exact_attention
from rollout.exact.recurrence import use_exact_recurrence


@dataclass(frozen=True)
class Exact:
    """Result of `use_exact`."""

    arithmetic: str
    """name of what the model's forward computes now"""
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
    wanted, base = Arithmetic(""), None
    if arithmetic is not None:
        wanted = _computable(arithmetic, model)
        base = str(wanted._replace(int8=False, latent=False, sums="" if wanted.sums == TREE else wanted.sums))
    _check_precision(model.device)
    with ExitStack() as undo:  # in reverse, here if anything fails
        if wanted.latent:
            use_latent_kv(model)
            undo.callback(plain_kv, model)
        if wanted.sums == TREE:
            sum_slices(summed_products(model), Summed(SLICES, None))
            undo.callback(whole_sums, model)
        made = _use_base(model, base, block_size, threads, undo)
        if wanted.int8:
            use_int8(model, isas_for(base)[0], kept=False)
            undo.callback(plain_weights, model)
        return Exact(str(wanted._replace(base=made)), undo.pop_all().close)


def _computable(arithmetic: str, model: Any) -> Arithmetic:
    """Read the name of a service's arithmetic. Raises ValueError for one that no trainer can have, or not on this device."""
    wanted = Arithmetic.parse(arithmetic)
    if wanted.fp8:
        raise ValueError(
            f"the service computes with arithmetic {arithmetic!r}, whose KV is in fp8, and a trainer's forward has none: start "
            'the service with kv_dtype="auto", or weigh its samples by their importance ratios instead'
        )
    if wanted.by_batch:
        raise ValueError(
            f"the service computes with arithmetic {arithmetic!r}, whose numbers depend on the batch (its status says why: "
            "computed_by_reason): no trainer can compute the same bits; weight its samples by their importance ratios"
        )
    if wanted.latent and model.device.type != "cpu":
        raise ValueError(f"the service has latent_kv, and the model is on {model.device}: latent KV needs the CPU")
    if wanted.int8 and model.device.type != "cpu":
        raise ValueError(f'the service has weight_dtype="int8", and the model is on {model.device}: it needs the CPU')
    return wanted


def _use_base(model: Any, arithmetic: str | None, block_size: int, threads: int | None, undo: ExitStack) -> str:
    """Give the forward the service's attention, products and functions. Returns the name of the products."""
    if model.device.type == "cuda":
        from rollout.exact.on_device import use_exact_on_device

        name, remove = use_exact_on_device(model, arithmetic, block_size)
        undo.callback(remove)
        return name
    products, attention = isas_for(arithmetic)  # before anything is changed
    undo.callback(use_exact_attention(model, block_size, threads, attention))
    undo.callback(use_exact_recurrence(model, threads, products))
    called = _probe(model)
    use_whole_vectors(called.found.values())
    undo.callback(plain_products, model)
    use_products(model, products, {*unreached(model, called)})
    return products_of(products).arithmetic


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
