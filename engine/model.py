"""A transformers causal language model: load it, make sure that our attention can serve it, run a step.

Parameter names stay those of the trainer's model. On the CPU products are ours (`engine.cpu.products`), all else is its own.
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
from engine.cpu.judge import Computes, decide
from engine.cpu.kernels import Chosen, choose
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
    model = Model(module, config.model, streamed, native=not config.compile_layers, isa=config.isa)
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
    """A transformers model behind the attention seam; `streamed`: the offload of its layers; `native`: run it by the native
    decoder where that can be; `isa`: as in `EngineConfig`. Raises UnsupportedModel for what the seam does not serve, ValueError
    for an isa that this CPU lacks."""

    def __init__(
        self, module: PreTrainedModel, name: str, streamed: Streamed | None = None, native: bool = True, isa: str = "auto"
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
        if module.device.type == "cuda":
            fuse_norms(module)
        heads = {layer["q_heads"] for layer in asked.values()}
        self.q_heads: int = heads.pop() if len(heads) == 1 else 0
        """0 = not the same in all layers"""
        self.geometry = KVGeometry(len(asked), asked[0]["kv_heads"], asked[0]["head_dim"], module.dtype)
        self.eos_token_ids = _eos(module)
        self.chosen: Chosen | None = choose(isa) if module.device.type == "cpu" else None
        self.computes: Computes | None = None
        """who runs the layers on the CPU, decided here; None: the module as it comes"""
        if native and self.chosen is not None:
            self.computes = decide(module, name, asked, self.forward_transformers, self.chosen.isa, whole=streamed is None)
        self.native = None if self.computes is None else self.computes.decoder

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """[S, vocab] logits of the tokens `batch.logits_at`: by a decoder (`engine.cpu.judge`) or the module."""
        run = self.forward_transformers if self.native is None else self.native.forward
        return run(batch, kv, backend)

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
