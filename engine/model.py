"""A transformers causal language model, unmodified: load it, make sure that our attention can serve it, run a step.

Parameter names stay those of the trainer's model, and its arithmetic outside attention is the trainer's own.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.attention.seam import ATTENTION_NAME, Backend, Call, Probe
from engine.batch import Batch
from engine.compiled import compile_layers
from engine.config import EngineConfig
from engine.cpu.decoder import NativeDecoder, NotNative
from engine.cpu.kernels import kernels
from engine.exact import make_exact
from engine.fused import FusedDecoder, NotFused
from engine.kv import KVGeometry, PagedKV
from engine.memory import own_parameters
from engine.norms import fuse_norms
from engine.streaming import Streamed

log = logging.getLogger("rollout.engine")


class UnsupportedModel(ValueError):
    """The model asks for something that paged attention does not serve; the message names the model and the feature."""


def open_model(config: EngineConfig) -> Model:
    """The model that a configuration names. Raises ValueError if it cannot be had or served so."""
    dtype, device, offload = getattr(torch, config.dtype), torch.device(config.device), config.weight_offload
    module = load_model(config.model, dtype, device if offload is None else None)
    streamed = None if offload is None else Streamed(module, config.model, offload, device)
    return model_of(config, module, config.model, streamed)


def model_of(config: EngineConfig, module: PreTrainedModel, name: str, streamed: Streamed | None = None) -> Model:
    """A loaded module as the configuration wants it run. Raises ValueError if it cannot be."""
    cuda = torch.device(config.device).type == "cuda"
    if cuda and config.exact:
        make_exact(module)
    fused = cuda and config.fused_layers and not (config.exact or config.compile_layers)
    model = Model(module, name, streamed, native=not config.compile_layers, fused=fused)
    if config.compile_layers:
        compile_layers(model)
    return model


def load_model(folder: str, dtype: torch.dtype, device: torch.device | None) -> PreTrainedModel:
    """A model from a local folder; device None: it stays in the pages of its files. Raises ValueError if there is none."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"model folder {folder!r} has no config.json; give a folder that save_pretrained wrote")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    if device is None:
        return model
    if device.type == "cpu":
        own_parameters(model.parameters())
    return model.to(device)


class Model:
    """A transformers model behind the attention seam. `streamed`: the offload of its layers. `native`, `fused`: run it by the
    native decoder, or by that of `engine.fused`, where that can be. Raises UnsupportedModel for what the seam does not
    serve."""

    def __init__(
        self,
        module: PreTrainedModel,
        name: str,
        streamed: Streamed | None = None,
        native: bool = True,
        fused: bool = False,
    ) -> None:
        config = module.config.get_text_config()
        _refuse_config(config, name)
        if not getattr(module, "_supports_attention_backend", False):
            raise UnsupportedModel(f"{name} ({type(module).__name__}): does not support transformers' attention interface")
        self.module = module.eval().requires_grad_(False)
        self.module.set_attn_implementation(ATTENTION_NAME)
        self.name = name
        self.streamed = streamed
        self.vocab_size: int = module.get_input_embeddings().num_embeddings
        self.context: int = config.max_position_embeddings
        self.device = module.device
        asked = _probe(self.module, config, name)
        heads = {layer["q_heads"] for layer in asked.values()}
        self.q_heads: int = heads.pop() if len(heads) == 1 else 0
        """0 = not the same in all layers"""
        self.geometry = KVGeometry(len(asked), asked[0]["kv_heads"], asked[0]["head_dim"], module.dtype)
        self.eos_token_ids = _eos(module)
        self.native = self._native(asked) if native else None
        self.fused = self._fused(asked) if fused else None

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """[S, vocab] logits of the tokens `batch.logits_at`: by the native decoder where it has the bits of transformers, by
        the fused one where that was asked for."""
        decoder = self.native or self.fused
        if decoder is None or not hasattr(backend, "attend_stored") and decoder is self.fused:
            return self.forward_transformers(batch, kv, backend)
        return decoder.forward(batch, kv, backend)

    def forward_transformers(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """The same by the module's own forward."""
        output = self.module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logits_at,
            rollout=Call(backend, batch, kv),
        )
        return output.logits[0, : batch.num_logits]

    def _native(self, asked: dict[int, dict[str, Any]]) -> NativeDecoder | None:
        if self.device.type != "cpu" or self.module.dtype != torch.bfloat16:
            return None
        if self.streamed is not None:
            log.info(
                "%s runs through transformers: natively all layers are one call, and weight_offload streams them", self.name
            )
            return None
        try:
            with torch.inference_mode():
                decoder = NativeDecoder(self.module, asked, kernels())
                decoder.check(self.forward_transformers, self.vocab_size)
        except NotNative as error:
            log.info("%s runs through transformers, not natively: %s", self.name, error)
            return None
        return decoder

    def _fused(self, asked: dict[int, dict[str, Any]]) -> FusedDecoder | None:
        """The fused decoder; for models of another kind their norms are fused alone."""
        try:
            if self.streamed is not None:
                raise NotFused("weight_offload moves its layers")
            from engine import fused_kernels

            decoder = FusedDecoder(self.module, asked, fused_kernels)
            with torch.inference_mode():
                decoder.check(self.forward_transformers, self.vocab_size)
        except NotFused as error:
            log.info("%s runs through transformers, its layers are not fused: %s", self.name, error)
            fuse_norms(self.module)
            return None
        return decoder


def _refuse_config(config: Any, name: str) -> None:
    """What a probe of the attention function would not show."""

    def refuse(feature: str) -> None:
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
    """Run two tokens through the model and see what each layer asks of its attention, by layer."""
    probe = Probe()
    ids = torch.zeros((1, 2), dtype=torch.long, device=module.device)
    with torch.inference_mode():
        module(input_ids=ids, position_ids=torch.arange(2, device=module.device)[None], use_cache=False, rollout=probe)

    def refuse(feature: str) -> None:
        raise UnsupportedModel(f"{name} ({config.model_type}): {feature} is not supported")

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
        if len({asked["head_dim"], asked["value_dim"], asked["query_dim"]}) > 1:
            refuse(f"keys of {asked['head_dim']} and values of {asked['value_dim']} dimensions in layer {layer}")
        if (asked["kv_heads"], asked["head_dim"]) != (first["kv_heads"], first["head_dim"]):
            refuse("layers with KV of different shapes")
    return probe.layers


def _eos(module: PreTrainedModel) -> frozenset[int]:
    generation = getattr(module, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = module.config.get_text_config().eos_token_id
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
