"""Latent KV: layers of latent attention store one latent per token, instead of K and V of every head (DeepSeek-V2, arXiv
2405.04434; the products are moved to the side of the queries as its §2.1.2 describes).

    c [rank], r [rope]: latent and rotated key of a token           W_h, U_h: the two parts of head h in `kv_b_proj`

    module's own     stores k_h = (W_h c, r) and v_h = U_h c         scores q_h · k_h            out_h = Σ p v_h
    here             stores (c, r) and c                             scores (q_h W_h, q_r) · (c, r)    out_h = U_h Σ p c

Both are equal up to rounding. `use_latent_kv` replaces the method `expand_kv` of transformers' attention modules, so that they
call the attention function with the stored tensors; that function calls `absorb` before and `expand` after it. Parameters stay
where they are: a refresh in place changes both products.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

OURS = "rollout"
"""with this begin the names of our attention functions, of the engine and for trainers"""
HeadProducts = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]
"""takes x [H, N, inputs], the weight [H, outputs, inputs], or [H, inputs, outputs] if the third argument is true → [H, N,
outputs]: each head's rows times its matrix"""


def torch_heads(x: torch.Tensor, weight: torch.Tensor, by_input: bool) -> torch.Tensor:
    """`HeadProducts` by torch's own product."""
    return torch.matmul(x, weight if by_input else weight.transpose(1, 2))


class LatentHeads:
    """The two products of an attention module that stores latents."""

    def __init__(self, attention: Any) -> None:
        """Raises ValueError if `kv_b_proj` is no plain nn.Linear without bias."""
        self.attention = attention
        self.products: HeadProducts = torch_heads
        """set by the code that chooses the products of a model"""
        self.plain, self.width = attention.qk_nope_head_dim, attention.qk_nope_head_dim + attention.v_head_dim
        self.weight()

    def weight(self) -> torch.Tensor:
        """Return [H, plain + value, rank], a view of `kv_b_proj`: what multiplies latents to keys, then to values, of a head.
        Raises ValueError."""
        linear = self.attention.kv_b_proj
        if not isinstance(linear, nn.Linear) or getattr(linear, "bias", None) is not None:
            raise ValueError(
                f"latent KV needs kv_b_proj to be a plain nn.Linear without bias, not a {type(linear).__name__}: merge its "
                "adapter, or do without latent KV"
            )
        return linear.weight.view(-1, self.width, linear.weight.shape[1])

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries [B, H, T, rank + rope] for latents, of [B, H, T, plain + rope]."""
        weight, (b, h, t, _) = self.weight(), query.shape
        plain, rotated = query[..., : self.plain], query[..., self.plain :]
        # the matrix of a head also has the rows of its values: they meet zeros, and no copy of the weights is needed
        padded = nn.functional.pad(plain.transpose(0, 1).reshape(h, b * t, self.plain), (0, self.width - self.plain))
        made = self.products(padded, weight, True).view(h, b, t, -1).transpose(0, 1)
        return torch.cat((made, rotated), -1)

    def expand(self, attended: torch.Tensor) -> torch.Tensor:
        """Return results [B, T, H, value] of attended latents [B, T, H, rank]."""
        weight, (b, t, h, rank) = self.weight(), attended.shape
        rows = attended.permute(2, 0, 1, 3).reshape(h, b * t, rank)
        made = self.products(rows, weight, False)[..., self.plain :]
        return made.view(h, b, t, -1).permute(1, 2, 0, 3)


def use_latent_kv(module: nn.Module) -> None:
    """Let every layer of latent attention in `module` store latents, while the name of its attention implementation begins with
    `OURS`; with others, the layer stays transformers' own. Raises ValueError if there is no such layer."""
    found: list[Any] = [each for each in module.modules() if hasattr(each, "expand_kv") and hasattr(each, "kv_b_proj")]
    if not found:
        raise ValueError(
            f"latent_kv=True: {type(module).__name__} has no latent attention (kv_b_proj and expand_kv); leave it out"
        )
    for each in found:
        each.latent_heads = LatentHeads(each)
        each.expand_kv = MethodType(keep_latent, each)


def keep_latent(self: Any, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`expand_kv` of a module that stores latents: return [B, 1, T, rank + rope] and [B, 1, T, rank], what attention stores as
    K and V, for latents [B, 1, T, rank] and rotated keys [B, 1, T, rope]."""
    if not self.config._attn_implementation.startswith(OURS):
        made: tuple[torch.Tensor, torch.Tensor] = type(self).expand_kv(self, latent, rotated)
        return made
    return torch.cat((latent, rotated), -1), latent


def plain_kv(module: nn.Module) -> None:
    """Undo `use_latent_kv`."""
    for each in module.modules():
        if latent_heads_of(each) is not None:
            del each.expand_kv, each.latent_heads


def latent_heads_of(module: nn.Module) -> LatentHeads | None:
    """Return the products of an attention module that stores latents; None: it stores K and V of every head."""
    return vars(module).get("latent_heads")


def stores_latents(module: nn.Module | None) -> bool:
    """Return whether `use_latent_kv` was called for a module."""
    return module is not None and any(latent_heads_of(each) is not None for each in module.modules())
