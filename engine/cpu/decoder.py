"""Runs all layers of a Llama-like decoder (Qwen 2 and 3, Mistral, …), including native attention, in one parallel region. Eager
torch takes about fifty small kernels and as many barriers per layer. bf16 and fp32, with the products of any instruction set.

The reference is the transformers module with our products (`rollout.engine.cpu.select_path`). `NativeDecoder` reads the
module's parameters in place, so it sees an in-place refresh. Before it is used, its logits must equal the module's in every
bit. So a trainer's module with our products and attention has exactly the engine's log-probs. Layers compiled by inductor do
not have this property: they keep fp32 where eager torch rounds, and reduce in another order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import nn

from rollout.engine.cpu.attention import NativeAttention
from rollout.engine.cpu.build import check_layout
from rollout.engine.cpu.kernels import Kernels, Linear, linear_struct
from rollout.engine.forward.attention import Backend, Scores, plain_scores
from rollout.engine.forward.batch import Batch
from rollout.engine.kv.pages import PagedKV

CHECKED_ROWS = (1, 2, 3, 5, 7, 17, 33, 130)
BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = {"q_norm", "k_norm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", *HEAD_NORMS}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class NotNative(Exception):
    """This model cannot use the native decoder; the message says why."""


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in ("norm_in", "norm_post", "q_norm", "k_norm")),
        *((name, c_float) for name in ("eps_in", "eps_post", "eps_q", "eps_k")),
    ]


class _Between(ctypes.Structure):
    _fields_ = [
        ("done", c_void_p), ("next", c_void_p),
        *((name, c_int64) for name in ("tokens", "hidden", "head_dim", "is_bf16")),
        *((name, c_void_p) for name in ("x", "normed", "inner", "attended", "q", "k", "v", "cos", "sin")),
        *((name, c_void_p) for name in ("packed", "head_norm", "head")),
        ("head_eps", c_float), ("logits", c_void_p),
    ]  # fmt: skip


class _Forward(ctypes.Structure):
    _fields_ = [
        ("step", _Between), ("layers", c_void_p), ("count", c_int64),
        ("attend", c_void_p), ("calls", c_void_p), ("call_bytes", c_int64),
    ]  # fmt: skip


class NativeDecoder:
    """Llama-like decoder in C. asked: attention arguments of each layer (scaling and window). Raises NotNative."""

    def __init__(self, module: Any, asked: dict[int, dict[str, Any]], kernels: Kernels) -> None:
        self.kernels = kernels
        check_layout(kernels.library, "rollout_layout_layers", Layer=_Layer, Between=_Between, Forward=_Forward)
        self.body, self.lm_head = module.base_model, module.get_output_embeddings()
        self.hidden, self.inner, self.head_dim, self.heads = look_at_module(module)
        for what, size in (("head_dim", self.head_dim), ("hidden_size", self.hidden)):
            _need(size % 32 == 0, f"{what} {size} is not a multiple of 32")
        dtypes = {parameter.dtype for parameter in module.parameters()}
        _need(dtypes in ({torch.bfloat16}, {torch.float32}), f"parameters in {', '.join(sorted(map(str, dtypes)))}")
        self.inputs = {self.hidden, self.inner, self.heads[0] * self.head_dim}
        scores = plain_scores(asked)
        _need(scores is not None, "attention with sinks or soft caps")
        self.attention: list[Scores] = scores or []
        self.parameters = list(module.parameters())
        self.addresses: list[int] = []
        self._structs: Any = None

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Return [S, vocabulary] logits of the tokens `batch.logits_at`."""
        n, dim, library = batch.num_tokens, self.head_dim, self.kernels.library
        team = ctypes.byref(self.kernels.team())
        layers = self._layers()
        x = self.body.embed_tokens(batch.input_ids[0, :n])
        cos, sin = (each[0].contiguous() for each in self.body.rotary_emb(x, batch.position_ids[:, :n]))
        _need(cos.shape == sin.shape == (n, dim) and cos.dtype == x.dtype, "unsupported rotary embeddings")
        q_heads, kv_heads = self.heads
        q, k, v = (x.new_empty(n, heads, dim) for heads in (q_heads, kv_heads, kv_heads))
        normed, inner = torch.empty_like(x), x.new_empty(n, self.inner)
        packed = self.kernels.packed(n, self.inputs, x.dtype)
        between = _Between(
            tokens=n, hidden=self.hidden, head_dim=dim, is_bf16=x.dtype == torch.bfloat16, x=x.data_ptr(),
            normed=normed.data_ptr(), inner=inner.data_ptr(), q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(),
            cos=cos.data_ptr(), sin=sin.data_ptr(), packed=packed.data_ptr(),
        )  # fmt: skip
        if isinstance(backend, NativeAttention):
            attended = torch.empty_like(q)
            between.attended = attended.data_ptr()
            calls = backend.layer_calls(self.attention, q, k, v, attended, batch, kv)
            forward = _Forward(
                step=between, layers=ctypes.addressof(layers), count=len(layers), attend=calls.function,
                calls=ctypes.addressof(calls.calls), call_bytes=calls.size,
            )  # fmt: skip
            library.rollout_forward(team, ctypes.byref(forward))
        else:
            self._layer_by_layer(between, layers, team, lambda i: backend.attend(i, q, k, v, batch, kv, self.attention[i]))
        return self._logits(x[batch.logits_at[: batch.num_logits]], team)

    def weights_moved(self) -> None:
        """Do nothing: each forward reads the addresses of the parameters."""

    def _layer_by_layer(self, between: _Between, layers: Any, team: Any, attend: Callable[[int], torch.Tensor]) -> None:
        """Run the layers with an attention backend that is called from Python."""
        run, size = self.kernels.library.rollout_between, ctypes.sizeof(_Layer)
        for i in range(len(layers)):
            between.next = ctypes.addressof(layers) + i * size
            run(team, ctypes.byref(between))
            attended = attend(i).contiguous()
            between.done, between.attended = between.next, attended.data_ptr()
        between.next = None
        run(team, ctypes.byref(between))

    def _logits(self, x: torch.Tensor, team: Any) -> torch.Tensor:
        normed, logits = torch.empty_like(x), x.new_empty(len(x), self.lm_head.out_features)
        head, packed = (
            linear_struct(self.lm_head.weight, self.lm_head.bias),
            self.kernels.packed(len(x), (self.hidden,), x.dtype),
        )
        work = _Between(
            tokens=len(x), hidden=self.hidden, is_bf16=x.dtype == torch.bfloat16, x=x.data_ptr(), normed=normed.data_ptr(),
            packed=packed.data_ptr(), head_norm=self.body.norm.weight.data_ptr(), head_eps=self.body.norm.variance_epsilon,
            logits=logits.data_ptr(), head=ctypes.addressof(head),
        )  # fmt: skip
        self.kernels.library.rollout_head(team, ctypes.byref(work))
        return logits

    def _layers(self) -> Any:
        """Return [layers] structs, rebuilt if a parameter moved."""
        addresses = [parameter.data_ptr() for parameter in self.parameters]
        if addresses != self.addresses:
            self._structs = (_Layer * len(self.body.layers))(*map(self._layer, self.body.layers))
            self.addresses = addresses
        return self._structs

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        norms = (layer.input_layernorm, layer.post_attention_layernorm, *(getattr(attention, f"{x}_norm", None) for x in "qk"))
        return _Layer(
            *(linear_struct(each.weight, each.bias) for each in (*linears, mlp.gate_proj, mlp.up_proj, mlp.down_proj)),
            *(None if norm is None else norm.weight.data_ptr() for norm in norms),
            *(0.0 if norm is None else norm.variance_epsilon for norm in norms),
        )


class EchoAttention:
    """Replaces attention in comparisons: its result depends on every bit of q, k and v."""

    name = "echo"

    def __init__(self) -> None:
        self._stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """K and V of each layer, for those that share them"""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, *_: Any
    ) -> torch.Tensor:
        if key is None or value is None:
            key, value = self._stored[layer]
        self._stored[layer] = key, value
        group, width = query.shape[1] // key.shape[1], value.shape[2]
        scores = query * 0.5 + key.repeat_interleave(group, 1) * 0.25
        return nn.functional.pad(scores, (0, max(0, width - scores.shape[2])))[..., :width] + value.repeat_interleave(group, 1)


def _need(ok: bool, what: str) -> None:
    if not ok:
        raise NotNative(what)


class DecoderSizes(NamedTuple):
    """Sizes of a Llama-like decoder."""

    hidden: int
    inner: int
    """outputs of gate and up projection"""
    head_dim: int
    heads: tuple[int, int]
    """query heads, KV heads"""


def look_at_module(module: Any) -> DecoderSizes:
    """Check that a module looks like a decoder that we compute, with the same sizes in all layers. Raises NotNative."""
    body, lm_head = module.base_model, module.get_output_embeddings()
    _need({name for name, _ in body.named_children()} == BODY, f"the model has other modules than {sorted(BODY)}")
    _need(type(body.embed_tokens) is nn.Embedding, "unsupported class of the embedding")
    first = body.layers[0]
    _need({name for name, _ in first.named_children()} == LAYER, "unsupported decoder layer")
    _need(hasattr(first.self_attn, "q_proj") and hasattr(first.mlp, "gate_proj"), "unsupported projections")
    dim, q, kv = first.self_attn.head_dim, first.self_attn.q_proj.out_features, first.self_attn.k_proj.out_features
    hidden, inner = first.input_layernorm.weight.numel(), first.mlp.gate_proj.out_features
    for layer in body.layers:
        _look_at(layer, hidden, inner, q, kv, dim)
    _look_at_norm(body.norm, hidden)
    _look_at_linear(lm_head, hidden, lm_head.out_features)
    for parameter in module.parameters():
        _need(parameter.device.type == "cpu" and parameter.is_contiguous(), f"a parameter on {parameter.device}")
    return DecoderSizes(hidden, inner, dim, (q // dim, kv // dim))


def _look_at(layer: Any, hidden: int, inner: int, q: int, kv: int, dim: int) -> None:
    _need({name for name, _ in layer.named_children()} == LAYER, "unsupported decoder layer")
    attention, mlp = layer.self_attn, layer.mlp
    names = {name for name, _ in attention.named_children()}
    _need(names <= ATTENTION and ATTENTION - names in (set(), HEAD_NORMS), "unsupported attention layer")
    _need({name for name, _ in mlp.named_children()} == MLP, "unsupported MLP")
    act = type(mlp.act_fn).__name__
    _need(act in ("SiLU", "SiLUActivation"), f"unsupported activation {act}")
    for linear, inputs, outputs in (
        (attention.q_proj, hidden, q), (attention.k_proj, hidden, kv), (attention.v_proj, hidden, kv),
        (attention.o_proj, q, hidden), (mlp.gate_proj, hidden, inner), (mlp.up_proj, hidden, inner),
        (mlp.down_proj, inner, hidden),
    ):  # fmt: skip
        _look_at_linear(linear, inputs, outputs)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        _look_at_norm(norm, hidden)
    for name in names & HEAD_NORMS:
        _look_at_norm(getattr(attention, name), dim)


def _look_at_linear(linear: Any, inputs: int, outputs: int) -> None:
    _need(type(linear) is nn.Linear, f"a {type(linear).__name__} instead of an nn.Linear")
    _need(
        tuple(linear.weight.shape) == (outputs, inputs), f"layers with different products, one of {tuple(linear.weight.shape)}"
    )


def _look_at_norm(norm: Any, size: int) -> None:
    names = [name for name, _ in norm.named_parameters()]
    _need(names == ["weight"] and hasattr(norm, "variance_epsilon"), "unsupported norm")
    _need(norm.weight.shape == (size,), f"a norm of {tuple(norm.weight.shape)}")
