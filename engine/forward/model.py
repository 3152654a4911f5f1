"""A transformers causal language model: load it, make sure that our attention can serve it, run a step.

Parameter names stay those of the trainer's model. Who computes its layers is the device's choice (`engine.devices`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.config import EngineConfig
from engine.forward.attention import ATTENTION_NAME, AttentionCall, AttentionProbe, Backend
from engine.forward.batch import Batch
from engine.kv.pages import KVGeometry, PagedKV
from engine.memory import DeviceMemory
from engine.weights.offload import OffloadedModel

log = logging.getLogger("rollout.engine")


class UnsupportedModel(ValueError):
    """The model asks for something that paged attention does not serve; the message names the model and the feature."""


class BrokenModel(ValueError):
    """The files of a model cannot be loaded as what they say they are; the message names the folder and what is wrong."""


class NativeLayers(Protocol):
    """Runs the layers of a model in place of its module."""

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Compute [S, vocabulary] logits of the tokens `batch.logits_at`."""

    def weights_moved(self) -> None:
        """Take note that parameters lie elsewhere than before."""


class ExecutionPath(NamedTuple):
    """Who computes a model, and what: a device's decision."""

    decoder: NativeLayers | None
    """None: the module"""
    arithmetic: str
    """name of the products"""
    torch_bits: bool | None
    """plain torch has the same bits, at every number of rows that was tried; None: nobody looked"""
    why: str
    """why not a better one, or why numbers depend on the batch; empty for the best there is"""
    batch_invariant: bool | None = None
    """the layers gave a token the same bits alone and among others, at every number of rows that was tried; None: nobody
    looked"""


class ModelLike(Protocol):
    """What an engine needs of a model. `Model` is one; tests and benchmarks have smaller ones."""

    name: str
    vocab_size: int
    context: int
    """tokens of the longest sequence"""
    q_heads: int
    """0 = not the same in all layers"""
    device: torch.device
    geometry: KVGeometry
    eos_token_ids: frozenset[int]

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Compute [S, vocabulary] logits of the tokens `batch.logits_at`."""


def open_model(config: EngineConfig, memory: DeviceMemory) -> Model:
    """Load the model that a configuration names. Raises ValueError if it cannot be had or served so."""
    dtype, offload = getattr(torch, config.dtype), config.weight_offload
    module = load_model(config.model, dtype, memory if offload is None else None)
    streamed = None if offload is None else OffloadedModel(module, config.model, offload, memory)
    return Model(module, config.model, streamed)


def load_model(folder: str, dtype: torch.dtype, memory: DeviceMemory | None) -> PreTrainedModel:
    """Load a model from a local folder; memory None: it stays in the pages of its files. Raises BrokenModel."""
    _look_at_config(folder)
    try:
        with _reports_held_back():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,  # True runs what the folder brings, None asks on standard input
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
            )
    except Exception as error:  # a dozen unrelated types; each says that this is no model
        raise BrokenModel(f"model folder {folder!r} cannot be loaded: {in_one_line(error)}") from error
    _look_at_report(folder, report)
    if memory is None:
        return model
    memory.own(model.parameters())
    try:
        return model.to(memory.device)
    except (RuntimeError, ValueError) as error:  # no room for it, or quantised weights that stay where they are
        raise BrokenModel(f"model folder {folder!r} cannot be moved to {memory.device}: {in_one_line(error)}") from error


def _look_at_config(folder: str) -> None:
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise BrokenModel(f"model folder {folder!r} has no config.json; give a folder that save_pretrained wrote")
    try:
        config = json.loads(file.read_text())
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise BrokenModel(f"{str(file)!r} is not a model's configuration: {in_one_line(error)}") from error
    if config.get("auto_map") and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise BrokenModel(
            f"model folder {folder!r} brings code of its own for model type {kind!r} (auto_map in config.json), which is not "
            f"run; set model_type to one of transformers {transformers.__version__}, if the weights fit it"
        )


def _look_at_report(folder: str, report: dict[str, Any]) -> None:
    """Refuse weights that are not this model's, all of them: transformers would fill what is missing with random numbers. Ties
    and what a model class declares to be ignored are no longer in its report."""
    kinds = ("missing", "unexpected", "mismatched")
    found = {kind: sorted(str(key[0] if isinstance(key, tuple) else key) for key in report[f"{kind}_keys"]) for kind in kinds}
    if wrong := [f"{len(names)} {kind} ({_few(names)})" for kind, names in found.items() if names]:
        raise BrokenModel(
            f"model folder {folder!r}: its weights are not those that its config.json describes: {', '.join(wrong)}; "
            "save the model again with save_pretrained"
        )


def _few(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def _reports_held_back() -> Iterator[None]:
    """transformers prints a table of what is wrong with weights; the error that follows says it. With that table held back, it
    warns of layers that tensor parallelism would leave whole, which nobody asked for."""
    loggers = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "distributed.tensor_parallel")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def in_one_line(error: Exception) -> str:
    """The kind of an error and the beginning of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def module_of(model: ModelLike) -> torch.nn.Module | None:
    """Return the module whose tensors are the model's weights; None: it has none."""
    return getattr(model, "module", None)


def weights_moved(model: ModelLike) -> None:
    """Tell the decoder of a model, if it has one, that parameters lie elsewhere than before."""
    if isinstance(model, Model) and model.decoder is not None:
        model.decoder.weights_moved()


def streamed_of(model: ModelLike) -> OffloadedModel | None:
    """Return the offload of the model's layers; None: all are on the device."""
    return getattr(model, "streamed", None)


class Model:
    """A transformers model behind the attention seam. `streamed`: the offload of its layers. The module runs it until a device
    says otherwise. Raises UnsupportedModel for what the seam does not serve."""

    def __init__(self, module: PreTrainedModel, name: str, streamed: OffloadedModel | None = None) -> None:
        config = module.config.get_text_config()
        _refuse_config(config, name)
        if not getattr(module, "_supports_attention_backend", False):
            raise UnsupportedModel(f"{name} ({type(module).__name__}): does not support transformers' attention interface")
        self.module = module.eval().requires_grad_(False)
        self.name = name
        self.streamed = streamed
        self.device = module.device
        self.vocab_size, self.context = _sizes(module, config, name)
        self.asked = _probe(self.module, config, name)
        """what each layer asks of its attention, by layer"""
        heads = {layer["q_heads"] for layer in self.asked.values()}
        self.q_heads: int = heads.pop() if len(heads) == 1 else 0
        """0 = not the same in all layers"""
        first = self.asked[0]
        widths = first["head_dim"], first["value_dim"]
        self.geometry = KVGeometry(
            len(self.asked), first["kv_heads"], widths[0], module.dtype, widths[1] if widths[0] != widths[1] else None
        )
        self.eos_token_ids = _eos(module)
        self.decoder: NativeLayers | None = None
        """runs the layers; None: the module does"""

    def run_by(self, decoder: NativeLayers | None) -> None:
        """Let a decoder compute every later `forward`; None: the module."""
        self.decoder = decoder

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Compute [S, vocabulary] logits of the tokens `batch.logits_at`, by the decoder if there is one."""
        if self.decoder is None:
            return self.forward_transformers(batch, kv, backend)
        return self.decoder.forward(batch, kv, backend)

    def forward_transformers(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Compute what `forward` does by the module's own forward."""
        output = self.module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logits_at,
            rollout=AttentionCall(backend, batch, kv),
        )
        logits: torch.Tensor = output.logits[0, : batch.num_logits]
        return logits


def _refuse_config(config: Any, name: str) -> None:
    """Raise UnsupportedModel for what a probe of the attention function would not show."""

    def refuse(feature: str) -> NoReturn:
        raise UnsupportedModel(f"{name} ({config.model_type}): {feature} is not supported")

    for kind in set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}:
        refuse(f"layer type {kind!r}")
    if getattr(config, "is_encoder_decoder", False):
        refuse("an encoder-decoder")
    if getattr(config, "use_bidirectional_attention", False):
        refuse("bidirectional attention")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]:
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            refuse(f"rope type {parameters['rope_type']!r}, whose frequencies depend on the longest sequence of a batch,")


def _probe(module: PreTrainedModel, config: Any, name: str) -> dict[int, dict[str, Any]]:
    """Put our attention in place, run two tokens through the model and return what each layer asks of it, by layer."""
    probe = AttentionProbe()
    ids = torch.zeros((1, 2), dtype=torch.long, device=module.device)
    try:
        module.set_attn_implementation(ATTENTION_NAME)
        with torch.inference_mode():
            module(input_ids=ids, position_ids=torch.arange(2, device=module.device)[None], use_cache=False, rollout=probe)
    except Exception as error:
        raise UnsupportedModel(
            f"{name} ({config.model_type}): two tokens do not come through it with attention of our own: {in_one_line(error)}"
        ) from error
    _refuse_layers(probe, config, name)
    return probe.layers


def _refuse_layers(probe: AttentionProbe, config: Any, name: str) -> None:
    """Raise UnsupportedModel for attention that the seam does not serve."""

    def refuse(feature: str) -> NoReturn:
        raise UnsupportedModel(f"{name} ({config.model_type}): {feature} is not supported")

    if often := sorted(layer for layer, calls in probe.calls.items() if calls > 1):
        refuse(
            f"attention of {probe.calls[often[0]]} calls in layer {often[0]}, of which one would overwrite the KV of another,"
        )
    if sorted(probe.layers) != list(range(config.num_hidden_layers)):
        refuse(f"attention in {len(probe.layers)} of {config.num_hidden_layers} layers")
    first = probe.layers[0]
    for layer, asked in probe.layers.items():
        for feature in asked["other"]:
            refuse(f"attention feature {feature!r} of layer {layer}")
        if asked["masked"]:
            refuse(f"an attention mask of its own in layer {layer}")
        if not asked["causal"]:
            refuse(f"attention without causality in layer {layer}")
        if asked["query_dim"] != asked["head_dim"]:
            refuse(f"queries of {asked['query_dim']} and keys of {asked['head_dim']} dimensions in layer {layer}")
        if asked["q_heads"] % asked["kv_heads"] or asked["value_heads"] != asked["kv_heads"]:
            heads = asked["q_heads"], asked["kv_heads"], asked["value_heads"]
            refuse("{} query, {} key and {} value heads in a layer".format(*heads))
        if any(asked[size] != first[size] for size in ("kv_heads", "head_dim", "value_dim")):
            refuse("layers with KV of different shapes")


def _sizes(module: PreTrainedModel, config: Any, name: str) -> tuple[int, int]:
    """Ids in the vocabulary, and positions of the context."""
    try:
        vocabulary, context = module.get_input_embeddings().num_embeddings, config.max_position_embeddings
    except (AttributeError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{name} ({config.model_type}): no vocabulary or length of context: {in_one_line(error)}"
        ) from error
    if not isinstance(context, int) or context < 2:
        raise UnsupportedModel(f"{name} ({config.model_type}): max_position_embeddings is {context!r}, not a number of tokens")
    return vocabulary, context


def _eos(module: PreTrainedModel) -> frozenset[int]:
    generation = getattr(module, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = module.config.get_text_config().eos_token_id
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
