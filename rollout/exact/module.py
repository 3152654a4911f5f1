"""A trainer's model with the service's numbers, and the log-probs of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.cpu.products import isas_for, plain_products, products_of, use_products
from rollout.exact.attention import use_exact_attention


@dataclass(frozen=True)
class Exact:
    """What `use_exact` did."""

    arithmetic: str
    """name of the products"""
    remove: Callable[[], None]
    """gives the model its own attention and torch's products again"""


def use_exact(model: Any, arithmetic: str | None = None, block_size: int = 32, threads: int | None = None) -> Exact:
    """From now on the forward of `model` has the service's bits: our attention, and our products in every nn.Linear (bf16 or
    fp32, with bias, lm_head and tied ones, the inner layers of LoRA included). Parameters stay where they are, names and
    state_dict too, and the backward is torch's own.

    model: a transformers model on the CPU, in eval mode or without dropout. arithmetic: `client.info.arithmetic`;
    None = the best that this machine has, which is what a service on the same machine takes. block_size: the service's.
    threads: of the attention, None = torch's; products take torch's.

    Batches may be padded or packed (`use_exact_attention` says how): a token's bits depend on its own sequence alone.

    Raises ValueError where this machine does not have that arithmetic, for another device than the CPU, and for products that
    are no plain nn.Linear's (quantised, experts); NativeUnavailable where the attention cannot be built. The model is as it was
    then. Called under autocast, an exact model raises ValueError."""
    products, attention = isas_for(arithmetic)  # before anything is changed
    undo = use_exact_attention(model, block_size, threads, attention)
    try:
        use_products(model, products)
    except ValueError:
        undo()
        raise

    def remove() -> None:
        undo()
        plain_products(model)

    return Exact(products_of(products).arithmetic, remove)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of tokens [...] under logits [..., V]: float32, the service's bits, with a gradient. Temperature 0, at which
    the service takes the likeliest token, has the log-probs of 1, as the service reports them."""
    scaled = logits.float() / temperature if temperature not in (0, 1) else logits.float()
    return scaled.log_softmax(-1).gather(-1, tokens[..., None].long())[..., 0]
