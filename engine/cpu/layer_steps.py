"""Translates the layers of a transformers decoder into the steps of `c/layers.c`.

A layer is made of parts, each of a few kinds, which are recognised by the names of its modules:

    norms    plain, or with 1 + weight; before the mixer and the MLP, and perhaps after each
    mixer    attention (norms of heads; rotary embeddings of all, of the first or of no numbers of a head; a gate of its
             output), gated delta net, short convolution
    MLP      gated by SiLU, or by GELU approximated by tanh; any other one, such as a router and its experts, is called as the
             module that it is, between two runs of the steps

    model_steps(module)    steps of all layers, then those of the last norm and the LM head

The names say nothing about the arithmetic. So a decoder made of these steps is used only where its logits have the bits of the
module's (`rollout.engine.cpu.select_path`).
"""

from __future__ import annotations

import ctypes
import inspect
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rollout.engine.cpu.exact_modules import SILU, ExactLinear, ExactSiLU, is_depthwise
from rollout.engine.cpu.int8 import Int8Linear, int8_struct
from rollout.engine.cpu.kernels import Linear, linear_struct
from rollout.engine.cpu.recurrence import EPS, MOST, MOST_TAPS, RowsStruct
from rollout.engine.cpu.sums import ROWS, Exchange, exchange_of
from rollout.engine.forward.summed import Summed, summed_of

NONE = -1
NORM, MULTIPLY, HEADS, ATTEND, GATE, CONVOLVE, DECAY, DELTA, GATED_NORM, SUM = range(10)
"""kinds of steps, as in c/layers.c"""
BY_SILU, BY_GELU = 1, 2
MOST_PRODUCTS = 4
"""products of the same input in one step"""
BODY = {"embed_tokens", "layers", "rotary_emb"}
LAST_NORMS = ("norm", "embedding_norm")
NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("operator_norm", None, "ffn_norm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
"""names of a layer's norms: before and after the mixer, before and after the MLP"""
MLPS = {"mlp": ("gate_proj", "up_proj", "down_proj"), "feed_forward": ("w1", "w3", "w2")}
"""names of an MLP and of its products"""
ATTENTION = {"q_proj", "k_proj", "v_proj"}
OUTPUTS = ("o_proj", "out_proj")
HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
DELTA_NET = {"conv1d", "norm", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
SHORT_CONV = {"conv", "in_proj", "out_proj"}


class NotNative(Exception):
    """This model cannot use the native decoder; the message says why."""


def need(ok: bool, what: str) -> None:
    if not ok:
        raise NotNative(what)


def need_vectors(function: str) -> None:
    """Raise NotNative where torch computes a function with libm: the steps have the bits of its vectors. In bf16 most results
    are equal after rounding, so that a comparison of a few rows can miss the others."""
    need(torch.backends.cpu.get_cpu_capability() != "DEFAULT", f"torch computes {function} without vectors on this CPU")


class NormStruct(ctypes.Structure):
    """`Norm` of c/layers.c."""

    _fields_ = [("weight", c_void_p), ("eps", c_float), ("plus_one", c_int32)]


def _integers(names: str) -> list[tuple[str, Any]]:
    return [(name, c_int64) for name in names.split()]


class NormStep(ctypes.Structure):
    _fields_ = [("norm", NormStruct), *_integers("source residual to width")]


class MultiplyStep(ctypes.Structure):
    _fields_ = [("l", Linear * MOST_PRODUCTS), *_integers("count gated source residual"), ("to", c_int64 * MOST_PRODUCTS)]


class SumStep(ctypes.Structure):
    _fields_ = [("l", Linear), *_integers("slices source residual to"), ("exchange", c_void_p)]


class HeadsOf(ctypes.Structure):
    _fields_ = [*_integers("tensor width heads apart"), ("norm", NormStruct)]


class HeadsStep(ctypes.Structure):
    _fields_ = [("q", HeadsOf), ("k", HeadsOf), *_integers("dim turned cos sin")]


class AttendStep(ctypes.Structure):
    _fields_ = _integers("layer")


class GateStep(ctypes.Structure):
    _fields_ = _integers("attended tensor width first apart heads dim")


class ConvolveStep(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p), ("bias", c_void_p), *_integers("layer source width x before after to channels taps silu"),
    ]  # fmt: skip


class DecayStep(ctypes.Structure):
    _fields_ = [("dt_bias", c_void_p), *_integers("layer rates a b g heads")]


class DeltaStep(ctypes.Structure):
    _fields_ = [
        *_integers("layer mixed b g to heads key_heads keys columns"), ("scale", c_float), ("eps", c_float),
    ]  # fmt: skip


class GatedNormStep(ctypes.Structure):
    _fields_ = [("norm", NormStruct), *_integers("tensor gate heads dim")]


class StepStruct(ctypes.Structure):
    """`Step` of c/layers.c."""

    _fields_ = [("kind", c_int64), ("what", c_void_p)]


class ForwardStruct(ctypes.Structure):
    """`Forward` of c/layers.c."""

    _fields_ = [
        ("steps", c_void_p), *_integers("count tokens is_bf16"),
        *((name, c_void_p) for name in ("buffers", "packed", "attend", "calls")), ("call_bytes", c_int64),
        ("rows", RowsStruct), ("columns", c_void_p), ("states", c_void_p), *_integers("columns_slot states_slot"),
    ]  # fmt: skip


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "Norm": NormStruct, "NormStep": NormStep, "MultiplyStep": MultiplyStep, "SumStep": SumStep, "HeadsOf": HeadsOf,
    "HeadsStep": HeadsStep,
    "AttendStep": AttendStep, "GateStep": GateStep, "ConvolveStep": ConvolveStep, "DecayStep": DecayStep,
    "DeltaStep": DeltaStep, "GatedNormStep": GatedNormStep, "Step": StepStruct, "Forward": ForwardStruct,
}  # fmt: skip
"""by their names in C"""


class Steps:
    """Steps, and the tensors that they use. The parameters must outlive them."""

    def __init__(self) -> None:
        self.widths: dict[str, int] = {}
        """numbers per token of each tensor of a forward, in order of their numbers, for the layer that needs most"""
        self.inputs: set[int] = set()
        """inputs of the products"""
        self.summed: set[tuple[int, int]] = set()
        """inputs and slices of those that are summed over slices"""
        self.exchange: Exchange | None = None
        """with other ranks, or with none; None: nothing is summed over slices"""
        self.int8 = False
        """whether there are products in eight bits"""
        self.made: list[tuple[int, ctypes.Structure]] = []
        """kind and arguments of each"""
        self.head = 0
        """the first step after all layers"""
        self.heads: tuple[int, int, int, int] | None = None
        """query heads, KV heads, numbers of a head, and from a query's head to the next, in all layers with attention"""
        self.attends: list[int] = []
        """steps that attend"""
        self.modules: dict[int, Any] = {}
        """modules that are called before a step: each maps "normed" [1, T, hidden] to what "x" gets added"""
        self.rotary: dict[str, str | None] = {}
        """names of the tensors of cosines, and for which type of layer the module makes them; None: for all"""
        self.decays: list[torch.Tensor] = []
        """logarithms of the decay rates [heads] of each scan; "rates" is minus e to the power of them"""
        self.recurrent = self.scans = 0
        """layers with recurrent state, and those of them with a scan"""

    def tensor(self, name: str, width: int) -> int:
        """Return the number of a tensor of at least this width."""
        self.widths[name] = max(self.widths.get(name, 0), width)
        return list(self.widths).index(name)

    def add(self, kind: int, what: ctypes.Structure) -> None:
        self.made.append((kind, what))

    def norm(self, norm: Any, source: str, to: str, residual: str | None = None) -> None:
        """to = norm(source), plus residual if there is one."""
        width = norm.weight.numel()
        other = NONE if residual is None else self.tensor(residual, width)
        tensors = self.tensor(source, width), other, self.tensor(to, width)
        self.add(NORM, NormStep(norm_struct(norm, width), *tensors, width))

    def multiply(
        self, linears: list[Any], source: str, inputs: int, to: list[str], gated: int = 0, residual: str | None = None
    ) -> None:
        """Multiply a tensor by one to four matrices: to[i], or to[0] = act(first) · second if gated."""
        for linear in linears:
            need(type(linear) in (nn.Linear, ExactLinear, Int8Linear), f"a {type(linear).__name__} instead of an nn.Linear")
            need(type(linear) is type(linears[0]), "products of the same input, some in eight bits")
            need(linear.weight.shape[1] == inputs, f"layers with different products, one of {tuple(linear.weight.shape)}")
        outputs = [self.tensor(name, len(each.weight)) for name, each in zip(to, linears, strict=False)]
        other = NONE if residual is None else self.tensor(residual, len(linears[0].weight))
        structs = (Linear * MOST_PRODUCTS)(*(struct_of(each) for each in linears))
        places = (c_int64 * MOST_PRODUCTS)(*outputs, *[NONE] * (MOST_PRODUCTS - len(outputs)))
        self.inputs.add(inputs)
        self.int8 |= isinstance(linears[0], Int8Linear)
        self.add(MULTIPLY, MultiplyStep(structs, len(linears), gated, self.tensor(source, inputs), other, places))

    def sum(self, linear: Any, summed: Summed, source: str, to: str, residual: str | None) -> None:
        """Multiply a tensor by a matrix, summed over slices: to = the product, plus residual if there is one."""
        need(type(linear) in (nn.Linear, ExactLinear), f"a {type(linear).__name__} instead of an nn.Linear")
        outputs, inputs = linear.weight.shape
        if self.exchange is None:
            self.exchange = exchange_of(summed, outputs)
        need(summed.exchange in (None, self.exchange), "products of several replicas")
        need(self.exchange.struct.room == ROWS * outputs, "sums of different widths")
        self.summed.add((inputs, summed.slices))
        other = NONE if residual is None else self.tensor(residual, outputs)
        tensors = self.tensor(source, inputs), other, self.tensor(to, outputs)
        exchange = ctypes.addressof(self.exchange.struct)
        self.add(SUM, SumStep(linear_struct(linear.weight, linear.bias), summed.slices, *tensors, exchange))

    @cached_property
    def array(self) -> ctypes.Array[StepStruct]:
        """The steps for C, after the last one was added; this object must outlive them."""
        return (StepStruct * len(self.made))(*(StepStruct(kind, ctypes.addressof(what)) for kind, what in self.made))


def struct_of(linear: Any) -> Linear:
    """Describe the weight that a product reads. Raises NotNative for codes that are made in each forward."""
    if not isinstance(linear, Int8Linear):
        return linear_struct(linear.weight, linear.bias)
    need(linear.twin is not None, "codes of eight bits that are not kept")
    assert linear.twin is not None
    return int8_struct(linear.weight, linear.twin.data, linear.bias)


def model_steps(module: Any) -> Steps:
    """Return the steps of a model: all layers, from "x" (tensor 0) to "x"; then, from `Steps.head` on, the last norm and the LM
    head, from "x" to "logits". Raises NotNative."""
    body, steps = module.base_model, Steps()
    names = {name for name, _ in body.named_children()}
    need(any(names == {*BODY, norm} for norm in LAST_NORMS), f"the model has other modules than {sorted(BODY)} and a norm")
    need(isinstance(body.embed_tokens, nn.Embedding), "unsupported class of the embedding")
    hidden = body.embed_tokens.embedding_dim
    need(hidden % 32 == 0, f"hidden_size {hidden} is not a multiple of 32")
    for parameter in module.parameters():
        need(parameter.device.type == "cpu" and parameter.is_contiguous(), f"a parameter on {parameter.device}")
    steps.tensor("x", hidden)
    for layer in body.layers:
        add_layer(steps, layer, hidden, body.rotary_emb)
    steps.head = len(steps.made)
    (norm,) = (getattr(body, name) for name in LAST_NORMS if hasattr(body, name))
    steps.norm(norm, "x", "normed")
    steps.multiply([module.get_output_embeddings()], "normed", norm.weight.numel(), ["logits"])
    return steps


def add_layer(steps: Steps, layer: Any, hidden: int, rotary: Any) -> None:
    """Add a layer. Raises NotNative."""
    names = {name for name, _ in layer.named_children()}
    mixer = next((name for name in MIXERS if name in names), "")
    mlp = next((name for name in MLPS if name in names), "")
    roles = next((each for each in NORMS if {mixer, mlp, *filter(None, each)} == names), None)
    need(roles is not None, "unsupported decoder layer")
    before, after, before_mlp, after_mlp = (None if name is None else getattr(layer, name) for name in roles or ())
    steps.norm(before, "x", "normed")
    mixed, width, out = MIXERS[mixer](steps, getattr(layer, mixer), hidden, rotary)
    add_residual(steps, out, mixed, width, after)
    steps.norm(before_mlp, "x", "normed")
    module = getattr(layer, mlp)
    children = {name for name, _ in module.named_children()}
    if children - {"act_fn"} != set(MLPS[mlp]):
        need(after_mlp is None, "a norm after an MLP that is called as a module")
        steps.modules[len(steps.made)] = module
        return
    gate, up, down = (getattr(module, name) for name in MLPS[mlp])
    need(gate.weight.shape == up.weight.shape, "a gate of another width")
    steps.multiply([gate, up], "normed", hidden, ["inner"], gated=activation_of(module))
    add_residual(steps, down, "inner", len(up.weight), after_mlp)


def add_residual(steps: Steps, linear: Any, source: str, inputs: int, norm: Any) -> None:
    """x += the product, or its norm."""
    to, residual = ("x", "x") if norm is None else ("normed", None)
    if (summed := summed_of(linear)) is not None:
        need(linear.weight.shape[1] == inputs, f"layers with different products, one of {tuple(linear.weight.shape)}")
        steps.sum(linear, summed, source, to, residual)
    else:
        steps.multiply([linear], source, inputs, [to], residual=residual)
    if norm is not None:
        steps.norm(norm, "normed", "x", residual="x")


def activation_of(mlp: Any) -> int:
    """Return how an MLP is gated; one without a module for it calls silu itself. Raises NotNative."""
    if (act := getattr(mlp, "act_fn", None)) is None:
        need("silu" in inspect.unwrap(type(mlp).forward).__code__.co_names, "unsupported activation")
        need_vectors("silu")
        return BY_SILU
    name = type(act).__name__
    need(name in (*SILU, ExactSiLU.__name__, "GELUTanh"), f"unsupported activation {name}")
    if name == "GELUTanh":
        need_vectors("gelu")
        return BY_GELU
    return BY_SILU


def norm_struct(norm: Any, size: int) -> NormStruct:
    """Describe a norm. Modules whose epsilon is named `eps` add one to the weight. Raises NotNative."""
    names = [name for name, _ in norm.named_parameters()]
    plain = hasattr(norm, "variance_epsilon")
    need(names == ["weight"] and (plain or hasattr(norm, "eps")), "unsupported norm")
    need(norm.weight.shape == (size,), f"a norm of {tuple(norm.weight.shape)}")
    return NormStruct(norm.weight.data_ptr(), norm.variance_epsilon if plain else norm.eps, not plain)


def add_attention(steps: Steps, attention: Any, hidden: int, rotary: Any) -> tuple[str, int, Any]:
    """Add the steps of attention but for the last product. Returns the tensor that this one multiplies, its width, and the
    module of the product."""
    names = {name for name, _ in attention.named_children()}
    output = next((name for name in OUTPUTS if name in names), "")
    norms = next((each for each in HEAD_NORMS if set(each) <= names), ())
    need(names == {*ATTENTION, output, *norms}, "unsupported attention layer")
    out, dim = getattr(attention, output), attention.head_dim
    width, q_width, kv_width = out.weight.shape[1], len(attention.q_proj.weight), len(attention.k_proj.weight)
    apart = dim * q_width // width
    need(dim % 32 == 0, f"head_dim {dim} is not a multiple of 32")
    need(apart in (dim, 2 * dim) and len(attention.v_proj.weight) == kv_width, "unsupported projections")
    heads = width // dim, kv_width // dim, dim, apart
    need(steps.heads in (None, heads), "attention layers of different shapes")
    steps.heads = heads
    steps.multiply([attention.q_proj, attention.k_proj, attention.v_proj], "normed", hidden, ["q", "k", "v"])
    of_heads = [getattr(attention, name) for name in norms]
    if any(norm.weight.numel() != dim for norm in of_heads):  # of all heads together
        for norm, tensor in zip(of_heads, ("q", "k"), strict=True):
            steps.norm(norm, tensor, tensor)
        of_heads = []
    structs = [norm_struct(norm, dim) for norm in of_heads] or [NormStruct(), NormStruct()]
    q, k = steps.tensor("q", q_width), steps.tensor("k", kv_width)
    turned, cos, sin = add_rotary(steps, attention, rotary)
    need(turned % 32 == 0 and turned <= dim, f"rotary embeddings of {turned} numbers")
    of = HeadsOf(q, q_width, heads[0], apart, structs[0]), HeadsOf(k, kv_width, heads[1], dim, structs[1])
    steps.add(HEADS, HeadsStep(*of, dim, turned, cos, sin))
    attended = steps.tensor("attended", width)
    steps.attends.append(len(steps.made))
    steps.add(ATTEND, AttendStep(len(steps.attends) - 1))
    if apart > dim:
        need_vectors("sigmoid")
        steps.add(GATE, GateStep(attended, q, q_width, dim, apart, heads[0], dim))
    return "attended", width, out


def add_rotary(steps: Steps, attention: Any, rotary: Any) -> tuple[int, int, int]:
    """Return how many numbers of a head are turned, and the tensors of cosines and sines."""
    if not getattr(attention, "use_rope", True):
        return 0, NONE, NONE
    by_type = "layer_type" in inspect.signature(type(rotary).forward).parameters
    kind = attention.layer_type if by_type else None
    weight = attention.q_proj.weight
    cos, _ = rotary(weight.new_zeros(1, 1, 1), torch.zeros((1, 1), dtype=torch.long), *filter(None, [kind]))
    name = f"cos {kind or ''}"
    steps.rotary[name] = kind
    return cos.shape[-1], steps.tensor(name, 0), steps.tensor(name.replace("cos", "sin"), 0)


def add_delta_net(steps: Steps, mixer: Any, hidden: int, rotary: Any) -> tuple[str, int, Any]:
    """Add the steps of a gated delta net, as `add_attention`."""
    need_vectors("softplus")
    need({name for name, _ in mixer.named_children()} == DELTA_NET, "unsupported recurrent layer")
    heads, key_heads, keys, columns = mixer.num_v_heads, mixer.num_k_heads, mixer.head_k_dim, mixer.head_v_dim
    channels, width = 2 * key_heads * keys + heads * columns, heads * columns
    need(heads % key_heads == 0 and keys <= MOST and columns % 32 == 0, f"a delta rule of heads of {keys} × {columns}")
    products = [mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a]
    need([len(each.weight) for each in products] == [channels, width, heads, heads], "unsupported projections")
    need(mixer.A_log.shape == mixer.dt_bias.shape == (heads,), "unsupported decay")
    steps.multiply(products, "normed", hidden, ["raw", "z", "b", "a"])
    add_convolution(steps, mixer.conv1d, "raw", (channels, 0, NONE, NONE), mixer.activation)
    b, g = steps.tensor("b", heads), steps.tensor("g", 2 * heads)  # g is in fp32
    rates = steps.tensor("rates", 0)
    need(steps.scans == sum(len(each) == heads for each in steps.decays), "delta nets with different numbers of heads")
    steps.decays.append(mixer.A_log)
    steps.add(DECAY, DecayStep(mixer.dt_bias.data_ptr(), steps.scans, rates, steps.tensor("a", heads), b, g, heads))
    out, mixed = steps.tensor("recalled", width), steps.tensor("convolved", channels)
    sizes = heads, key_heads, keys, columns
    steps.add(DELTA, DeltaStep(steps.scans, mixed, b, g, out, *sizes, keys**-0.5, EPS))
    steps.add(GATED_NORM, GatedNormStep(norm_struct(mixer.norm, columns), out, steps.tensor("z", width), heads, columns))
    steps.scans += 1
    return "recalled", width, mixer.out_proj


def add_short_conv(steps: Steps, mixer: Any, hidden: int, rotary: Any) -> tuple[str, int, Any]:
    """Add the steps of a short convolution, as `add_attention`: its product has two gates and the input side by side."""
    need({name for name, _ in mixer.named_children()} == SHORT_CONV, "unsupported recurrent layer")
    channels = mixer.conv.in_channels
    need(len(mixer.in_proj.weight) == 3 * channels, "unsupported projections")
    steps.multiply([mixer.in_proj], "normed", hidden, ["raw"])
    add_convolution(steps, mixer.conv, "raw", (3 * channels, 2 * channels, 0, channels), None)
    return "convolved", channels, mixer.out_proj


def add_convolution(steps: Steps, conv: Any, source: str, places: tuple[int, int, int, int], activation: str | None) -> None:
    """Add a convolution. places: width of the tensor, first number of the input and of the gates before and after it."""
    channels, taps = conv.in_channels, conv.kernel_size[0]
    need(is_depthwise(conv) and 2 <= taps <= MOST_TAPS, f"a convolution of {taps} taps")
    need(activation in ("silu", "swish", None), f"unsupported activation {activation}")
    tensors = steps.tensor(source, places[0]), steps.tensor("convolved", channels)
    bias = None if conv.bias is None else conv.bias.data_ptr()
    steps.add(
        CONVOLVE,
        ConvolveStep(
            conv.weight.data_ptr(), bias, steps.recurrent, tensors[0], *places, tensors[1], channels, taps,
            activation is not None,
        ),
    )  # fmt: skip
    steps.recurrent += 1


MIXERS = {"self_attn": add_attention, "linear_attn": add_delta_net, "conv": add_short_conv}
"""by their names in a layer"""
