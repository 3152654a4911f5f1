"""A transformers causal language model: load it, check that our attention supports it, and run a step.

Parameter names are those of the trainer's model. The device decides what runs the layers (`rollout.engine.devices`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from rollout.engine.config import EngineConfig
from rollout.engine.forward.attention import AttentionCall, Backend, KVPlace
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.configuration import configuration_digest
from rollout.engine.forward.experts import is_experts
from rollout.engine.forward.interface import NativeLayers
from rollout.engine.forward.latent import use_latent_kv
from rollout.engine.forward.load import BrokenModel as BrokenModel  # what loading a model raises is imported from here
from rollout.engine.forward.load import end_tokens, in_one_line, load_model
from rollout.engine.forward.paged import ATTENTION_NAME, AttentionProbe, NoCall
from rollout.engine.forward.recurrence import Recurrence
from rollout.engine.kv.pages import KVGeometry, LayerShape, PagedKV
from rollout.engine.kv.states import StateGeometry
from rollout.engine.memory import DeviceMemory
from rollout.engine.weights.offload import OffloadedModel


class UnsupportedModel(ValueError):
    """Paged attention does not support something that the model needs; the message names the model and the feature."""


def open_model(config: EngineConfig, memory: DeviceMemory) -> Model:
    """Load the model of a configuration. Raises ValueError if it cannot be loaded or is not supported."""
    dtype, offload = getattr(torch, config.dtype), config.weight_offload
    module = load_model(config.model, dtype, memory if offload is None else None)
    if config.latent_kv:
        use_latent_kv(module)
    streamed = None if offload is None else OffloadedModel(module, config.model, offload, memory)
    return Model(module, config.model, streamed)


class Model:
    """A transformers model with paged attention. The module runs it until `run_by` sets a decoder. streamed: weight offload of
    its layers. Raises UnsupportedModel if paged attention does not support it."""

    def __init__(self, module: PreTrainedModel, name: str, streamed: OffloadedModel | None = None) -> None:
        config = module.config.get_text_config()
        _refuse_config(config, name)
        self.module = module.eval().requires_grad_(False)
        self.name = name
        self.configuration = _digest(module.config, name)
        self.streamed = streamed
        self.device = module.device
        self.vocab_size, self.context = _sizes(module, config, name)
        _avoid_grouped_products(self.module)
        asked, recurrence = _probe(self.module, config, name)
        self.asked = dict(enumerate(asked.values()))
        """attention arguments of each layer with attention, counted from 0"""
        self.recurrence = recurrence
        self.states = _geometry_of_states(recurrence, config, name)
        """shapes of the recurrent state of a sequence; None: it has none"""
        self.geometry, self.places = geometry_of(asked, module.dtype)
        """places: of the KV of each decoder layer with attention"""
        self.windows = windows_in(asked, self.context)
        """window of each layer that stores KV, 0 where all tokens are held; (): everywhere"""
        self.heads: Sequence[tuple[int, int, int, int]] = [
            (each["q_heads"], each["kv_heads"], each["head_dim"], each["value_dim"]) for each in asked.values()
        ]
        self.eos_token_ids = end_tokens(module, self.vocab_size, name)
        self.decoder: NativeLayers | None = None
        """runs the layers; None: the module does"""

    @property
    def takes_drafts_back(self) -> bool:
        """Whether its recurrent layers keep the inputs of rows with drafts."""
        return self.recurrence.keeps_inputs

    def run_by(self, decoder: NativeLayers | None) -> None:
        """Let a decoder compute every later `forward`; None: the module."""
        self.decoder = decoder

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Return [S, vocabulary] logits of the tokens `batch.logits_at`."""
        drafted = self.takes_drafts_back and batch.states is not None and bool((batch.states.writes < 0).any())
        if self.decoder is None or drafted:  # a decoder keeps no inputs, and has the bits of the module
            return self.forward_transformers(batch, kv, backend)
        return self.decoder.forward(batch, kv, backend)

    def forward_transformers(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Do the same as `forward` with the module's own forward."""
        output = self.module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logits_at,
            rollout=AttentionCall(backend, batch, kv, self.places),
        )
        logits: torch.Tensor = output.logits[0, : batch.num_logits]
        return logits


WITHOUT_TOKENS = frozenset(("moe", "mlp"))
"""types of layers that mix no tokens"""
LAYER_TYPES = frozenset(
    ("full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", *WITHOUT_TOKENS)
)
"""types of layers that a probe and the self-check can judge; others mask what short texts do not reach"""


def _digest(config: Any, name: str) -> str:
    """Return the digest of a configuration. Raises UnsupportedModel."""
    try:
        return configuration_digest(config)
    except ValueError as error:
        raise UnsupportedModel(f"{name}: {error}") from None


def _refuse_config(config: Any, name: str) -> None:
    """Raise UnsupportedModel for features that a probe of the attention function would not show."""

    def refuse(feature: str) -> NoReturn:
        raise UnsupportedModel(f"{name} ({config.model_type}): {feature} is not supported")

    for kind in sorted(set(getattr(config, "layer_types", None) or []) - LAYER_TYPES):
        refuse(f"layer type {kind!r}")
    if getattr(config, "is_encoder_decoder", False):
        refuse("an encoder-decoder")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # that one is for images
        refuse("bidirectional attention")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]:
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            refuse(f"rope type {parameters['rope_type']!r}, whose frequencies depend on the longest sequence of a batch,")


GROUPED_BYTES = 16
"""a row of an expert's matrix must be a multiple of so many for torch's grouped product"""


def _avoid_grouped_products(module: PreTrainedModel) -> None:
    """Let transformers compute experts one by one where torch has no grouped product for them, such as those of 12 numbers in
    bf16, which the parts of ranks may be."""
    matrices = (each for part in module.modules() if is_experts(part) for each in part.parameters(recurse=False))
    if any(each.ndim == 3 and any(size * each.element_size() % GROUPED_BYTES for size in each.shape[1:]) for each in matrices):
        module.set_experts_implementation("eager")


def _probe(module: PreTrainedModel, config: Any, name: str) -> tuple[dict[int, dict[str, Any]], Recurrence]:
    """Install our attention and our recurrence, and run two tokens through the model. Returns the attention arguments of each
    layer that has attention, in order, and the recurrent mixers."""
    probe = AttentionProbe()
    ids = torch.zeros((1, 2), dtype=torch.long, device=module.device)
    try:
        recurrence = Recurrence(module)
    except ValueError as error:
        raise UnsupportedModel(f"{name} ({config.model_type}): {error} is not supported") from error
    try:
        module.set_attn_implementation(ATTENTION_NAME)
        with torch.inference_mode():
            module(input_ids=ids, position_ids=torch.arange(2, device=module.device)[None], use_cache=False, rollout=probe)
    except NoCall as error:
        at = mixer_of(module, error.layer, config)
        raise UnsupportedModel(
            f"{name} ({config.model_type}): attention that does not get the keyword arguments of the model, in {at}, is not "
            "supported"
        ) from error
    except Exception as error:
        raise UnsupportedModel(
            f"{name} ({config.model_type}): a forward of two tokens with our attention failed: {in_one_line(error)}"
        ) from error
    _refuse_layers(module, probe, recurrence, config, name)
    return dict(sorted(probe.layers.items())), recurrence


def _geometry_of_states(recurrence: Recurrence, config: Any, name: str) -> StateGeometry | None:
    """Return the shapes of recurrent state that a probe found. Raises UnsupportedModel."""
    try:
        return recurrence.geometry()
    except ValueError as error:
        raise UnsupportedModel(f"{name} ({config.model_type}): {error} is not supported") from error


def _refuse_layers(module: torch.nn.Module, probe: AttentionProbe, recurrence: Recurrence, config: Any, name: str) -> None:
    """Raise UnsupportedModel for attention or recurrence that is not supported."""

    def refuse(feature: str) -> NoReturn:
        raise UnsupportedModel(f"{name} ({config.model_type}): {feature} is not supported")

    if silent := sorted({layer for layer, shapes in recurrence.mixers if not shapes.convs}):
        at = mixer_of(module, silent[0], config)
        refuse(f"recurrence that does not get the keyword arguments of the model, in {len(silent)} layers, the first {at},")
    shared = [layer for layer in probe.calls if not isinstance(layer, int) or layer < 0]
    if shared:
        refuse(f"an attention module that several layers share, called {probe.calls[shared[0]]} times in a forward,")
    if often := sorted(layer for layer, calls in probe.calls.items() if calls > 1):
        refuse(f"attention with {probe.calls[often[0]]} calls in layer {often[0]}, which would overwrite each other's KV,")
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    mixing = {layer for layer, kind in enumerate(types) if kind not in WITHOUT_TOKENS}
    found = set(probe.layers) | recurrence.layers
    if left := sorted(mixing - found):
        at = mixer_of(module, left[0], config)
        refuse(
            f"mixing of tokens outside transformers' functions for it, in {len(left)} of {len(mixing)} layers, the first {at},"
        )
    if not probe.layers:
        refuse("a model of recurrent layers alone, without attention,")
    if found != mixing:
        refuse(f"attention or recurrence in {len(found)} layers, of which {len(mixing)} mix tokens,")
    for layer, asked in probe.layers.items():
        for feature in asked["other"]:
            refuse(f"attention feature {feature!r} of layer {layer}")
        if asked["sinks"] not in (None, (asked["q_heads"],)):
            refuse(f"attention sinks of shape {asked['sinks']} in layer {layer}")
        if asked["masked"]:
            refuse(f"an attention mask of its own in layer {layer}")
        if not asked["causal"]:
            refuse(f"non-causal attention in layer {layer}")
        if asked["query_dim"] != asked["head_dim"]:
            refuse(f"queries of {asked['query_dim']} and keys of {asked['head_dim']} dimensions in layer {layer}")
        if asked["q_heads"] % asked["kv_heads"] or asked["value_heads"] != asked["kv_heads"]:
            heads = asked["q_heads"], asked["kv_heads"], asked["value_heads"]
            refuse("{} query, {} key and {} value heads in a layer".format(*heads))


def geometry_of(asked: dict[int, dict[str, Any]], dtype: torch.dtype) -> tuple[KVGeometry, dict[int, KVPlace]]:
    """Return the geometry of the layers that store KV, and where the KV of each decoder layer is. A layer that was called with
    the same two tensors as an earlier one in the probe stores none."""
    own = [layer for layer in sorted(asked) if asked[layer]["stored_by"] == layer]
    shapes = [LayerShape(*(asked[layer][size] for size in ("kv_heads", "head_dim", "value_dim"))) for layer in own]
    places = {layer: KVPlace(own.index(each["stored_by"]), each["stored_by"] == layer) for layer, each in asked.items()}
    return KVGeometry.of(shapes, dtype), places


def windows_in(asked: dict[int, dict[str, Any]], context: int) -> tuple[int, ...]:
    """Return the window of each layer that stores KV, as wide as the widest of the layers that read it; 0 if one of them
    attends to all positions, or the window is not narrower than the context."""
    own = [layer for layer in sorted(asked) if asked[layer]["stored_by"] == layer]
    readers = [[each["window"] for each in asked.values() if each["stored_by"] == layer] for layer in own]
    return tuple(max(windows) if 0 < min(windows) <= max(windows) < context else 0 for windows in readers)


MIXERS = ("attention", "attn", "mixer", "recurrent", "lstm", "ssm", "mamba", "conv")
"""parts of the names of classes that mix tokens"""


def mixer_of(module: torch.nn.Module, layer: int, config: Any) -> str:
    """Return name and function of what mixes tokens in a decoder layer, as well as names of classes tell."""
    lists = ((name, each) for name, each in module.named_modules() if isinstance(each, torch.nn.ModuleList))
    of_text = (pair for pair in lists if len(pair[1]) == config.num_hidden_layers and "vision" not in pair[0])
    name, layers = next(of_text, ("", None))
    if layers is None:
        return f"layer {layer}"
    inside = [(path, each, type(each).__name__.lower()) for path, each in layers[layer].named_modules() if path]
    fits = ((path, each) for path, each, kind in inside if "norm" not in kind and any(part in kind for part in MIXERS))
    path, found = min(fits, key=lambda pair: pair[0].count("."), default=("", layers[layer]))
    return f"{name}.{layer}{'.' * bool(path)}{path} ({type(found).__name__}.forward)"


def _sizes(module: PreTrainedModel, config: Any, name: str) -> tuple[int, int]:
    """Return the size of the vocabulary and of the context."""
    try:
        vocabulary, context = module.get_input_embeddings().num_embeddings, config.max_position_embeddings
    except (AttributeError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{name} ({config.model_type}): its vocabulary or context length is unknown: {in_one_line(error)}"
        ) from error
    if not isinstance(context, int) or context < 2:
        raise UnsupportedModel(f"{name} ({config.model_type}): max_position_embeddings is {context!r}, not a number of tokens")
    return vocabulary, context
