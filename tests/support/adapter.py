"""A LoRA adapter of the tiny model, as a folder."""

from __future__ import annotations

import json
from pathlib import Path


def adapter(folder: Path) -> Path:
    """Write what PEFT's save_pretrained writes, of an adapter of one layer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {"A": torch.randn(4, 32, generator=generator), "B": torch.randn(32, 4, generator=generator)}
    save_file(
        {f"{name}.lora_{which}.weight": factor for which, factor in factors.items()}, folder / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
