"""LoRA adapters of tiny models: as PEFT saves them, and as an engine takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from rollout.engine.engine import Engine
from rollout.engine.values import Adapter, LoraTarget, WeightUpdate
from rollout.engine.weights.staging import Staging, source_of
from rollout.engine.weights.tensors import describe, with_digest

Q = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."
Named = dict[str, torch.Tensor]


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, width: int = 64, **config: Any) -> Path:
    """Write a folder as PEFT's save_pretrained does, and return it: by itself an adapter of rank 4 on Q, which is [width,
    width].

    tensors: other ones. config: fields of adapter_config.json."""
    if tensors is None:
        generator = torch.Generator().manual_seed(7)
        a, b = torch.randn(4, width, generator=generator), torch.randn(width, 4, generator=generator).mul(0.1)
        tensors = {f"{PREFIX}{Q}.lora_A.weight": a, f"{PREFIX}{Q}.lora_B.weight": b}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def factors(model: PreTrainedModel, names: list[str], seed: int = 0, dtype: torch.dtype = torch.float32) -> Named:
    """A and B of rank 4 for each weight."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in names:
        out, into = dict(model.named_parameters())[name].shape
        tensors[name + ".A"] = torch.randn(4, into, generator=generator).to(dtype)
        tensors[name + ".B"] = torch.randn(out, 4, generator=generator).mul(0.05).to(dtype)
    return tensors


def adapter(names: list[str], scale: float = 0.5, base: str | None = None) -> Adapter:
    """What `factors` are for."""
    return Adapter(base, [LoraTarget(name, name + ".A", name + ".B", scale) for name in names])


def staged(engine: Engine, tensors: Named, what: Adapter) -> tuple[Staging, Any]:
    """Open the staging of an adapter. Returns it and its source."""
    described = [describe(name, tensor) for name, tensor in tensors.items()]
    update = WeightUpdate([with_digest(*each) for each in described], adapter=what)
    return engine.stage(update), source_of(data for _, data in described)


def refresh(engine: Engine, tensors: Named, what: Adapter) -> Any:
    """Merge an adapter into the live weights."""
    staging, source = staged(engine, tensors, what)
    try:
        staging.feed_all(source)
        return engine.commit(staging)
    finally:
        staging.close()
