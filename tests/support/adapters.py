"""LoRA adapters of tiny Llamas, as PEFT saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Q = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."


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
