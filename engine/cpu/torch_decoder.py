"""A decoder of Llama's kind in plain torch, for CPUs and installations without our C: the same few steps that `NativeDecoder`
does, each one or two torch calls, in place of the fifty small kernels that a layer's modules make.

What a layer is, is said once, in `engine.cpu.decoder`: this one reads the same modules under the same conditions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.cpu.decoder import look_at_module
from engine.cpu.products import TorchProducts
from engine.forward.attention import Backend
from engine.forward.batch import Batch
from engine.kv.pages import PagedKV


class TorchDecoder:
    """`asked`: what each layer asks of its attention (scaling and window), by layer. Raises NotNative."""

    def __init__(self, module: Any, asked: dict[int, dict[str, Any]], products: TorchProducts) -> None:
        look_at_module(module)
        self.body, self.lm_head, self.products = module.base_model, module.get_output_embeddings(), products
        self.head_dim = self.body.layers[0].self_attn.head_dim
        self.attention = [(asked[i]["scaling"], asked[i]["window"]) for i in range(len(self.body.layers))]

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """[S, vocabulary] logits of the tokens `batch.logits_at`. Rows of padding are computed like the others."""
        x = self.body.embed_tokens(batch.input_ids[0])
        cos, sin = (each[0][:, None] for each in self.body.rotary_emb(x, batch.position_ids))
        half = self.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)  # the sign of rotate_half, once for all layers
        for i, layer in enumerate(self.body.layers):
            attention, mlp = layer.self_attn, layer.mlp
            normed = _norm(layer.input_layernorm, x)
            q, k, v = (
                self._linear(linear, normed).view(len(x), -1, self.head_dim)
                for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if hasattr(attention, "q_norm"):
                q, k = _norm(attention.q_norm, q), _norm(attention.k_norm, k)
            q, k = _rope(q, cos, sin), _rope(k, cos, sin)
            attended = backend.attend(i, q, k, v, batch, kv, *self.attention[i])
            x = self._linear(attention.o_proj, attended.reshape(len(x), -1)).add_(x)
            normed = _norm(layer.post_attention_layernorm, x)
            inner = self.products.silu(self._linear(mlp.gate_proj, normed)).mul_(self._linear(mlp.up_proj, normed))
            x = self._linear(mlp.down_proj, inner).add_(x)
        return self._linear(self.lm_head, _norm(self.body.norm, x[batch.logits_at]))[: batch.num_logits]

    def weights_moved(self) -> None:
        """Do nothing: each forward reads the module's parameters."""

    def _linear(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return self.products.linear(x, linear.weight, linear.bias)


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """With the module's rounding: before the weight is multiplied."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(norm.variance_epsilon).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(norm.weight)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim]; sin with the sign of the half that it meets."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))
