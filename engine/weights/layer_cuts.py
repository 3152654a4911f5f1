"""How the layers of a model are divided among ranks. `cuts_of` finds it in the tree of modules:

    attention            q, k, v by heads; the output's columns by the same heads
    MLP                  gate and up by their outputs; down's columns by the same numbers
    experts              as an MLP, each of them; the router, and all else of a mixture, is whole
    gated delta net      projections, convolution, decay and state by heads; the output's columns by the same heads
    short convolution    its two gates, its input and its channels by numbers; the output's columns by the same numbers
    embedding, head      by tokens of the vocabulary
    norms                whole

Every product whose inputs are cut is a sum over SLICES slices in a tree (`rollout.engine.cpu.sums`); all else is computed by
whole heads or numbers, or by all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from rollout.engine.weights.cuts import COLUMNS, ROWS, WHOLE, Cut, NotCut

RANKS = (1, 2, 4, 8)
"""numbers of ranks whose sums have the same bits"""
SLICES = 8
"""of the inputs of a product that is cut"""
NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm", "operator_norm",
    "ffn_norm",
)  # fmt: skip
LAST_NORMS = ("norm", "embedding_norm")
OUTPUTS = ("o_proj", "out_proj")
HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
MLPS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
GATED = frozenset(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"))
"""types of models whose q has a gate behind the query of each head"""
EXPERTS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
"""of modules that transformers' `use_experts_implementation` decorates: those whose weights are [experts, outputs, inputs], the
gates before the others"""
SERVED = (
    "models of Llama's kind (llama, mistral, qwen2, qwen3), mixtures of that kind (mixtral, qwen3_moe), and hybrids with gated "
    "delta nets or short convolutions (qwen3_5, lfm2): serve this one whole (tp = 1), several with --replicas"
)


class Shared(NamedTuple):
    """What ranks must have equally many of."""

    what: str
    number: int
    repeated: bool = False
    """whether several ranks may have the same one, where there are fewer than ranks"""


class Division(NamedTuple):
    """How a mixer or an MLP is divided."""

    cuts: dict[int, Cut]
    """by the ids of parameters"""
    shared: tuple[Shared, ...]
    summed: tuple[nn.Module, str, int]
    """the product whose inputs are cut, what these are and how many: an nn.Linear, or experts"""
    fit: Callable[[int], None] = lambda ranks: None
    """sets the numbers of the module that follow from the shapes of its parameters, when these are a rank's"""


def _same(modules: list[nn.Module], cut: Cut) -> dict[int, Cut]:
    """Cut all parameters of these modules in the same way."""
    return {id(each): cut for module in modules for each in module.parameters(recurse=False)}


def _output(linear: nn.Module, units: int) -> dict[int, Cut]:
    """Cut the columns of a product; its bias is whole."""
    return {id(each): Cut(COLUMNS, units) if each.ndim == 2 else WHOLE for each in linear.parameters(recurse=False)}


def _children(module: nn.Module, *names: str) -> list[Any] | None:
    """Return the children of these names, which must be plain products; None: they are not."""
    found = [getattr(module, name, None) for name in names]
    return found if all(type(each) is nn.Linear for each in found) else None


def _attention(attention: Any, kind: str) -> Division | None:
    output = next((name for name in OUTPUTS if hasattr(attention, name)), "")
    products, dim = _children(attention, "q_proj", "k_proj", "v_proj", output), getattr(attention, "head_dim", None)
    if products is None or not isinstance(dim, int):
        return None
    q, k, v, out = products
    width = out.in_features
    heads, kv_heads = width // dim, k.out_features // dim
    if width % dim or k.out_features % dim or q.out_features != width * (2 if kind in GATED else 1):
        return None
    cuts = _same([q], Cut(ROWS, heads)) | _same([k, v], Cut(ROWS, kv_heads)) | _output(out, heads)
    for norm in (getattr(attention, name) for name in HEAD_NORMS if hasattr(attention, name)):
        # of each head; of all heads together it is not known
        cuts |= {id(each): WHOLE for each in norm.parameters() if each.numel() == dim}

    def fit(ranks: int) -> None:
        attention.num_key_value_groups = out.in_features // k.out_features

    shared = Shared("query heads", heads), Shared("KV heads", kv_heads, repeated=True)
    return Division(cuts, shared, (out, "numbers in its heads", width), fit)


def _mlp(mlp: Any) -> Division | None:
    children = {name for name, _ in mlp.named_children()} - {"act_fn"}
    names = next((each for each in MLPS if {*each} == children), None)
    products = None if names is None else _children(mlp, *names)
    if products is None:
        return None
    gate, up, down = products
    inner = down.in_features
    if not gate.out_features == up.out_features == inner:
        return None
    cuts = _same([gate, up], Cut(ROWS, inner)) | _output(down, inner)
    return Division(cuts, (), (down, "numbers in its MLP", inner))


def _experts(experts: Any) -> Division | None:
    if any(getattr(experts, name, None) is not wanted for name, wanted in EXPERTS.items()):
        return None
    named = dict(experts.named_parameters())
    if named.keys() != {"gate_up_proj", "down_proj"} or getattr(experts, "has_post_expert_norm", False):
        return None
    inner = named["down_proj"].shape[2]
    if named["gate_up_proj"].shape[1] != 2 * inner:
        return None
    cuts = {id(named["gate_up_proj"]): Cut(1, inner, (inner, inner)), id(named["down_proj"]): Cut(2, inner)}

    def fit(ranks: int) -> None:
        experts.intermediate_dim = named["down_proj"].shape[2]

    return Division(cuts, (), (experts, "numbers in each of its experts", inner), fit)


DELTA_NETS = (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba"))
"""names of the projections of a gated delta net: by kind, or those of each head together"""
OF_HEADS = ("num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim")


def _delta_net(mixer: Any) -> Division | None:
    """Divide a gated delta net by its key heads, each with the value heads that it serves."""
    projections = next((each for each in DELTA_NETS if all(hasattr(mixer, name) for name in each)), ())
    names = {name for name, _ in mixer.named_children()}
    if not projections or names != {*projections, "conv1d", "norm", "out_proj"}:
        return None
    products = _children(mixer, *projections, "out_proj")
    if products is None or not all(isinstance(getattr(mixer, name, None), int) for name in OF_HEADS):
        return None
    heads, keys, values = mixer.num_k_heads, mixer.key_dim, mixer.value_dim
    by_kind = Cut(ROWS, heads, (keys, keys, values))
    cuts = _same(products[:-1], Cut(ROWS, heads)) | _same([mixer.conv1d], by_kind) | _output(products[-1], heads)
    if hasattr(mixer, "in_proj_qkv"):
        cuts |= _same([mixer.in_proj_qkv], by_kind)
    cuts |= {id(each): Cut(ROWS, heads) for each in (mixer.A_log, mixer.dt_bias)} | _same([mixer.norm], WHOLE)

    def fit(ranks: int) -> None:
        for name in OF_HEADS:
            setattr(mixer, name, getattr(mixer, name) // ranks)
        _fit_convolution(mixer.conv1d)

    return Division(cuts, (Shared("key heads", heads),), (products[-1], "numbers in its heads", values), fit)


def _short_convolution(mixer: Any) -> Division | None:
    if {name for name, _ in mixer.named_children()} != {"conv", "in_proj", "out_proj"}:
        return None
    products = _children(mixer, "in_proj", "out_proj")
    if products is None or not isinstance(mixer.conv, nn.Conv1d):
        return None
    channels = mixer.conv.in_channels
    if products[0].out_features != 3 * channels or mixer.conv.groups != channels:
        return None
    cuts = _same([products[0]], Cut(ROWS, channels, (channels,) * 3)) | _same([mixer.conv], Cut(ROWS, channels))
    cuts |= _output(products[1], channels)
    return Division(
        cuts, (), (products[1], "channels in its convolution", channels), lambda ranks: _fit_convolution(mixer.conv)
    )


def _fit_convolution(conv: nn.Conv1d) -> None:
    conv.in_channels = conv.out_channels = conv.groups = len(conv.weight)


def divisions_of(layer: nn.Module, kind: str) -> list[Division]:
    """Return how the mixer of a layer and its MLP, or the parts of its mixture, are divided: those that are known."""
    found: list[Division | None] = []
    for name, child in layer.named_children():
        match name:
            case "self_attn":
                found.append(_attention(child, kind))
            case "linear_attn":
                found.append(_delta_net(child))
            case "conv":
                found.append(_short_convolution(child))
            case "mlp" | "feed_forward":
                experts = [each for each in map(_experts, child.modules()) if each is not None]
                found += [*map(_mlp, child.modules() if experts else [child]), *experts]
    return [each for each in found if each is not None]


def _cuts_of_layer(layer: nn.Module, kind: str) -> dict[int, Cut]:
    """Return the cuts of the parameters of a layer that are known, by their ids."""
    of: dict[int, Cut] = {}
    for name in NORMS:
        if hasattr(layer, name):
            of |= {id(each): WHOLE for each in layer.get_submodule(name).parameters()}
    for name, child in layer.named_children():
        if name in ("mlp", "feed_forward") and any(_experts(each) is not None for each in child.modules()):
            of |= {id(each): WHOLE for _, each in tensors_of(child)}
    for each in divisions_of(layer, kind):
        of |= each.cuts
    return of


def cuts_of(module: Any) -> dict[str, Cut]:
    """Return the cut of each parameter and persistent buffer of a whole model, by its name. Raises NotCut."""
    kind, head, body = module.config.model_type, module.get_output_embeddings(), module.base_model
    embedding = getattr(body, "embed_tokens", None)
    layers = getattr(body, "layers", None)
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear or not isinstance(layers, nn.ModuleList):
        raise NotCut(f"{kind} cannot be divided among ranks: tensor parallelism serves {SERVED}")
    vocabulary = Cut(ROWS, embedding.num_embeddings)
    of: dict[int, Cut] = {id(each): vocabulary for each in (embedding.weight, *head.parameters(recurse=False))}
    norms = (getattr(body, name, None) for name in LAST_NORMS)
    of |= {id(each): WHOLE for norm in norms if norm is not None for each in norm.parameters()}
    for layer in layers:
        of |= _cuts_of_layer(layer, kind)
    found = {}
    for name, tensor in tensors_of(module):
        if id(tensor) not in of:
            raise NotCut(f"{kind} has {name}, which cannot be divided among ranks: tensor parallelism serves {SERVED}")
        found[name] = of[id(tensor)]
    return found


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a module by all their names, then its persistent buffers."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, each in module.named_modules():
        for name, buffer in each.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in each._non_persistent_buffers_set:
                yield name, buffer


def check_ranks(module: Any, ranks: int) -> None:
    """Raise NotCut if a model of `cuts_of` cannot be divided among so many ranks, or its sums not into eight slices."""
    assert ranks in RANKS
    kind = module.config.model_type
    for number, layer in enumerate(module.base_model.layers):
        where = f"{kind}: layer {number} has"
        for division in divisions_of(layer, kind):
            for what, count, repeated in division.shared:
                if count % ranks and not (repeated and ranks % count == 0):
                    fix = "of which {} ranks cannot have equally many" if repeated else "which {} ranks cannot share evenly"
                    raise NotCut(f"{where} {count} {what}, {fix.format(ranks)}: lower tp")
            _, what, size = division.summed
            if size % (2 * SLICES):
                raise NotCut(f"{where} {size} {what}, which are no multiple of {2 * SLICES}: its sums have no eight slices")


def summed_products(module: Any) -> list[nn.Module]:
    """Return the products of a whole model whose inputs are cut: nn.Linear, and experts for the second one. Raises NotCut."""
    cuts_of(module)
    check_ranks(module, 1)
    return summed_products_of(module)


def summed_products_of(module: Any) -> list[nn.Module]:
    """Return the same of a whole model, or of a rank's part of one, that is known to be of the kind of `cuts_of`."""
    return [each.summed[0] for layer in module.base_model.layers for each in divisions_of(layer, module.config.model_type)]
