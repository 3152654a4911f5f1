"""Tiny models for text and pictures, and a batch with a picture."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

PICTURE = 190
"""id of a placeholder"""
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 199, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
              "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
QWEN = {"image_token_id": PICTURE, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193}


def _rope(section: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **more}}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"text_config": {**TEXT, **_rope([2, 3, 3])},
                   "vision_config": {**QWEN_TOWER, "window_size": 32, "fullatt_block_indexes": [1]}, **QWEN},
    "qwen3_5": {"text_config": {**TEXT, "head_dim": 32, "layer_types": [*["linear_attention"] * 3, "full_attention"],
                                "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
                                "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
                                **_rope([4, 2, 2], partial_rotary_factor=0.5)},
                "vision_config": {**QWEN_TOWER, "num_position_embeddings": 64}, **QWEN},
    "llava": {"text_config": {"model_type": "llama", **TEXT, "head_dim": 16}, "image_token_index": PICTURE,
              "vision_config": {"model_type": "siglip_vision_model", **TOWER, "image_size": 16, "patch_size": 4},
              "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
}  # fmt: skip


def composite(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make a tiny model for text and pictures."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **copy.deepcopy(CONFIGS[kind]))
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for each in model.parameters():
            if each.ndim > 1:
                each.mul_(3)
    return model


def with_picture(kind: str) -> dict[str, torch.Tensor]:
    """Return arguments of a forward of 8 tokens, 4 of a picture, in front of them and behind."""
    torch.manual_seed(1)
    if kind == "llava":
        tokens, given = 16, {"pixel_values": torch.randn(1, 3, 16, 16)}
    else:
        tokens, given = 4, {"pixel_values": torch.randn(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    ids = torch.tensor([[5, 6, 192, *[PICTURE] * tokens, 193, 7, 8, 9]])
    kinds = {} if kind == "llava" else {"mm_token_type_ids": (ids == PICTURE).long()}
    return {"input_ids": ids, **given, **kinds}
