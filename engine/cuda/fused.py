"""Llama-like decoder layers (Qwen 2 and 3, Mistral, …) on CUDA in about ten launches each: four products, attention, and the
kernels of `rollout.engine.cuda.fused_kernels` between them.

    normed ─ q|k|v ─ rope_store ─ attend ─ o ─ add_norm ─ gate|up ─ silu_mul ─ down ─ add_norm ─ normed of the next layer

The weights of q, k and v, and those of gate and up, are views of one tensor, under their own names: an in-place refresh updates
them, and each group is one product. Rounding is as in torch, but norms are summed in another order, so the logits differ from
the module's by rounding. They are compared at load; if they differ by more, the module runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from rollout.engine.cuda.launches import power_of_two
from rollout.engine.cuda.memory import CudaMemory
from rollout.engine.cuda.proofs import Linear
from rollout.engine.cuda.reduce import sum_of_ranks
from rollout.engine.forward.attention import Backend, Scores, located, plain_scores
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.shards import EmbeddingPart, parts_of_head
from rollout.engine.forward.summed import Summed, summed_of
from rollout.engine.kv.fp8 import is_fp8, scales_as
from rollout.engine.kv.pages import PagedKV
from rollout.engine.scheduling.plan import plan_by_hand

CHECKED_ROWS = (2, 37)
BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = {"q_norm", "k_norm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
SILU_WIDTH = 1024
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""largest accepted difference, relative to the largest logit"""


class StoredAttention(Protocol):
    """Attention whose K and V the fused layers store themselves (`rollout.engine.cuda.attention.TritonAttention`)."""

    def slots_of(self, batch: Batch) -> torch.Tensor: ...

    def attend_stored(self, layer: int, query: torch.Tensor, batch: Batch, kv: PagedKV, scores: Scores) -> torch.Tensor: ...


class SummedProduct(Protocol):
    """A product that is added up over slices or ranks."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, summed: Summed) -> torch.Tensor: ...


class NotFused(Exception):
    """The layers of this model cannot be fused; the message says why."""


class FusedDecoder:
    """Runs fused layers. Raises NotFused.

    Args:
        asked: attention arguments of each layer (scaling and window).
        kernels: `rollout.engine.cuda.fused_kernels`, or a stand-in for tests.
        product: of rows and a weight [out, in]: `torch.nn.functional.linear`, or one that does not depend on the number of
            rows.
        summed: of those that are marked as summed (`rollout.engine.forward.summed`).
    """

    def __init__(
        self,
        module: Any,
        asked: dict[int, dict[str, Any]],
        kernels: Any,
        product: Linear = linear,
        summed: SummedProduct = sum_of_ranks,
    ) -> None:
        look_at(module)
        self.body, self.lm_head = module.base_model, module.get_output_embeddings()
        first = self.body.layers[0].self_attn
        self.dim = first.head_dim
        self.q_heads, self.kv_heads = (each.out_features // self.dim for each in (first.q_proj, first.k_proj))
        self.norms_heads = hasattr(first, "q_norm")
        scores = plain_scores(asked)
        _need(scores is not None, "attention with sinks or soft caps")
        self.attention: list[Scores] = scores or []
        self.kernels, self.product, self.summed = kernels, product, summed
        self.stack()

    def weights_moved(self) -> None:
        self.stack()

    def stack(self) -> None:
        """Make weights that are multiplied together adjacent. Called again after they moved."""
        for layer in self.body.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linears in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
                _stack([each.weight for each in linears])
                if linears[0].bias is not None:
                    _stack([each.bias for each in linears])

    def check(self, eager: Callable[[Any, Any, Any], torch.Tensor], vocabulary: int) -> None:
        """Compare the logits with `eager`, the transformers model with the same signature. Raises NotFused if they differ by
        more than rounding explains."""
        generator = torch.Generator().manual_seed(0)
        device, dtype = self.body.norm.weight.device, self.body.norm.weight.dtype
        for rows in CHECKED_ROWS:
            ids = torch.randint(vocabulary, (rows, 1), generator=generator).numpy()
            plan = plan_by_hand(ids, np.arange(rows) * 7, np.zeros((rows, 1)))
            batch = Batch.build(plan, 7 * rows, CudaMemory(device), dtype)
            echo: Any = FusedEcho(batch.input_ids.shape[1], self.kv_heads, self.dim, dtype, device)
            mine, theirs = (forward(batch, echo.kv, echo).float() for forward in (self.forward, eager))
            apart = (mine - theirs).abs().max() / theirs.abs().max()
            _need(bool(apart <= TOLERANCE[dtype]), f"logits that differ from transformers' own by {float(apart):.1e}")

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Return [S, vocabulary] logits of the tokens `batch.logits_at`."""
        ids, layers, attention = batch.input_ids[0], self.body.layers, cast(StoredAttention, backend)
        residual = self.body.embed_tokens(ids)
        cos, sin = (each[0].contiguous() for each in self.body.rotary_emb(residual, batch.position_ids))
        normed = self._norm(None, residual, layers[0].input_layernorm)
        for i, layer in enumerate(layers):
            at, of, pools = located(i, batch, kv)
            query = self._query(at, layer.self_attn, normed, cos, sin, of, pools, attention)
            attended = attention.attend_stored(at, query, of, pools, self.attention[i])
            made = self._sum(layer.self_attn.o_proj, attended.flatten(1))
            normed = self._norm(made, residual, layer.post_attention_layernorm)
            made = self._mlp(layer.mlp, normed)
            last = i + 1 == len(layers)
            normed = self._norm(made, residual, self.body.norm if last else layers[i + 1].input_layernorm)
        wanted = normed[batch.logits_at]
        logits = self.product(wanted, self.lm_head.weight, self.lm_head.bias)
        parts = parts_of_head(self.lm_head)
        return (logits if parts is None else parts.joined(logits))[: batch.num_logits]

    def _sum(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the product of a layer whose inputs may be cut."""
        summed = summed_of(layer)
        if summed is None:
            return self.product(x, layer.weight, layer.bias)
        return self.summed(x, layer.weight, layer.bias, summed=summed)

    def _norm(self, x: torch.Tensor | None, residual: torch.Tensor, norm: Any) -> torch.Tensor:
        """Add x to the residual in place and return the norm of it; x None: the norm of the residual."""
        out, (rows, size) = torch.empty_like(residual), residual.shape
        self.kernels.add_norm[(rows,)](
            residual if x is None else x, residual, norm.weight, out, size, norm.variance_epsilon, ADD=x is not None,
            WIDTH=power_of_two(size), num_warps=8 if size > 1024 else 4, enable_fp_fusion=False,
        )  # fmt: skip
        return out

    def _query(
        self,
        layer: int,
        attention: Any,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        kv: PagedKV,
        backend: StoredAttention,
    ) -> torch.Tensor:
        """Return [P, q_heads, head_dim] for attention; store K and V in the pool."""
        linears = attention.q_proj, attention.k_proj, attention.v_proj
        qkv = self.product(normed, _stacked([each.weight for each in linears]), _biases(linears))
        query = qkv.new_empty(len(qkv), self.q_heads, self.dim)
        data, slots = kv.data, backend.slots_of(batch)
        norms: Any = (attention.q_norm, attention.k_norm) if self.norms_heads else (None, None)
        q_norm, k_norm = norms
        weights = (query, query) if q_norm is None else (q_norm.weight, k_norm.weight)
        eps = (0.0, 0.0) if q_norm is None else (q_norm.variance_epsilon, k_norm.variance_epsilon)
        self.kernels.rope_store[(len(qkv), 3)](
            qkv, cos, sin, *weights, query, data, scales_as(data, torch.int16), slots, layer * data.stride(1), data.stride(0),
            *eps,
            Q_HEADS=self.q_heads, HEADS=self.kv_heads, DIM=self.dim, HALF_PAD=power_of_two(self.dim // 2),
            HEADS_PAD=power_of_two(max(self.q_heads, self.kv_heads)), BLOCK=kv.block_size, NORM=self.norms_heads,
            FP8=is_fp8(data), enable_fp_fusion=False,
        )  # fmt: skip
        return query

    def _mlp(self, mlp: Any, normed: torch.Tensor) -> torch.Tensor:
        linears = mlp.gate_proj, mlp.up_proj
        both = self.product(normed, _stacked([each.weight for each in linears]), _biases(linears))
        rows, inner = len(both), both.shape[1] // 2
        out = both.new_empty(rows, inner)
        self.kernels.silu_mul[(rows, -(-inner // SILU_WIDTH))](both, out, inner, WIDTH=SILU_WIDTH, enable_fp_fusion=False)
        return self._sum(mlp.down_proj, out)


class EchoKV(NamedTuple):
    """One block that replaces the pool: every layer writes to it."""

    data: torch.Tensor
    block_size: int


class FusedEcho:
    """Replaces attention in comparisons: its result depends on every bit of q, k and v."""

    name = "echo"

    def __init__(self, tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        data = torch.zeros((1, 1, 2, heads, tokens, dim), dtype=dtype, device=device)
        self.kv: Any = EchoKV(data.expand(1, 1 << 10, *data.shape[2:]), tokens)
        self._slots = torch.arange(tokens, dtype=torch.int32, device=device)

    def slots_of(self, batch: Batch) -> torch.Tensor:
        return self._slots

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        return query * 0.5 + key.repeat_interleave(group, 1) * 0.25 + value.repeat_interleave(group, 1)

    def attend_stored(self, layer: int, query: torch.Tensor, *_: Any) -> torch.Tensor:
        key, value = (x.transpose(0, 1) for x in self.kv.data[0, 0])
        return self.attend(layer, query, key, value)


def _stack(tensors: Sequence[torch.Tensor]) -> None:
    """Make parameters adjacent views of one tensor along their first dimension, unless they are."""
    if _side_by_side(tensors):
        return
    whole = torch.cat([each.data for each in tensors])
    at = 0
    for each in tensors:
        each.data = whole[at : at + len(each)]
        at += len(each)


def _side_by_side(tensors: Sequence[torch.Tensor]) -> bool:
    ends = [each.data_ptr() + each.nbytes for each in tensors]
    one = len({each.untyped_storage().data_ptr() for each in tensors}) == 1
    return one and all(each.is_contiguous() for each in tensors) and [each.data_ptr() for each in tensors[1:]] == ends[:-1]


def _biases(linears: Sequence[Any]) -> torch.Tensor | None:
    """Return [all outputs] biases of stacked layers; None if they have none."""
    return None if linears[0].bias is None else _stacked([each.bias for each in linears])


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensor of which stacked parameters are views, as a new view."""
    first = tensors[0]
    rows = sum(map(len, tensors))
    return torch.as_strided(first, (rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _need(ok: bool, what: str) -> None:
    if not ok:
        raise NotFused(what)


def look_at(module: Any, adapted: bool = False) -> None:
    """Check that a model looks like those that we fuse. adapted: linear layers may have an adapter. Raises NotFused."""
    body, head = module.base_model, module.get_output_embeddings()
    _need({name for name, _ in body.named_children()} == BODY, f"the model has other modules than {sorted(BODY)}")
    _need(type(body.embed_tokens) in (nn.Embedding, EmbeddingPart), "unsupported class of the embedding")
    _need(type(_inner(head, adapted)) is nn.Linear, "unsupported class of the head")
    for layer in body.layers:
        _look_at(layer, adapted)
    _look_at_norm(body.norm)


def _inner(linear: Any, adapted: bool) -> Any:
    """Return the layer itself, or the one that an adapter is added to."""
    return getattr(linear, "base_layer", linear) if adapted else linear


def _look_at(layer: Any, adapted: bool) -> None:
    """Check that a layer looks like those that we fuse. Raises NotFused."""
    _need({name for name, _ in layer.named_children()} == LAYER, "unsupported decoder layer")
    attention, mlp = layer.self_attn, layer.mlp
    names = {name for name, _ in attention.named_children()}
    _need(names - PROJECTIONS in (set(), HEAD_NORMS) and names >= PROJECTIONS, "unsupported attention layer")
    _need(getattr(attention, "use_rope", True), "a layer without rotary positions")
    _need(not hasattr(layer, "residual_multiplier"), "a factor of the residual")
    _need({name for name, _ in mlp.named_children()} == MLP, "unsupported MLP")
    act = type(mlp.act_fn).__name__
    _need(act in ("SiLU", "SiLUActivation"), f"unsupported activation {act}")
    linears = [getattr(attention, name) for name in sorted(PROJECTIONS)] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    for each in (_inner(each, adapted) for each in linears):
        _need(type(each) is nn.Linear, f"a {type(each).__name__} instead of an nn.Linear")
    _need(attention.head_dim % 2 == 0, f"heads of an odd size, {attention.head_dim}")
    biases = {each.bias is None for each in (attention.q_proj, attention.k_proj, attention.v_proj)}
    _need(len(biases) == 1, "a bias in only some of q, k and v")
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, *(getattr(attention, x) for x in names & HEAD_NORMS)):
        _look_at_norm(norm)


def _look_at_norm(norm: Any) -> None:
    names = [name for name, _ in norm.named_parameters()]
    _need(names == ["weight"] and hasattr(norm, "variance_epsilon"), "unsupported norm")
