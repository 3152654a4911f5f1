"""Reads LoRA adapters: a PeftModel, or a folder that PEFT saved. Finds the tensors to send and their targets.

    PEFT's name of a factor            base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight
    in the manifest                    model.layers.0.self_attn.q_proj.lora_A.weight
    the tensor that it changes         model.layers.0.self_attn.q_proj.weight

Adapters that the service cannot merge are refused here, with the fix. torch and peft are imported with the first adapter.
"""

from __future__ import annotations

import json
import math
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Union

import msgspec

from rollout.engine.values import Adapter, LoraTarget, manifest_digest
from rollout.transport.errors import InvalidRequest, SourceUnreachable, WeightsRefused
from rollout.transport.weights.tensors import digest

if TYPE_CHECKING:
    import torch

AdapterSource = Union["torch.nn.Module", str, os.PathLike[str]]
Pairs = list[tuple[str, Any]]

PREFIX = "base_model.model."
MERGED = "; or refresh(model.merge_and_unload()) sends whole weights"
UNSERVED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "lora_bias",
    "alora_invocation_tokens": "aLoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "trainable_token_indices": "trainable_token_indices",
    "target_parameters": "target_parameters",
    "layer_replication": "layer_replication",
    "megatron_config": "megatron_config",
}
"""fields of a LoraConfig that change the formula W + scale · B A, and their names for messages"""
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "lora_alpha": ((int, float), "a number"),
    "use_rslora": ((bool, NoneType), "true or false"),
    "fan_in_fan_out": ((bool, NoneType), "true or false"),
    "alpha_pattern": ((dict, NoneType), "an object"),
    "rank_pattern": ((dict, NoneType), "an object"),
}
"""fields of a LoraConfig that the merge reads, with what they may be"""
INIT_KEEPS_BASE = (True, False, "gaussian", "eva")
"""values of init_lora_weights that do not change the base weights"""


class Adapters:
    """Reads the adapters of one client, and caches the digests of their base weights."""

    def __init__(self) -> None:
        self._bases: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()

    def read(self, source: AdapterSource, scale: float, base: str | None) -> tuple[Pairs, Adapter]:
        """Return the tensors to send, and their targets. Raises WeightsRefused, InvalidRequest, SourceUnreachable."""
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
            raise InvalidRequest(f"scale={scale!r}: must be a finite number; 1.0 is the adapter's own scale")
        if base is not None and not (isinstance(base, str) and re.fullmatch("[0-9a-f]{64}", base)):
            raise InvalidRequest(f'base={base!r:.100}: must be 64 hex digits, as weights_status()["base_digest"] has them')
        if isinstance(source, str | os.PathLike):
            pairs, targets = read_folder(Path(source), scale)
        elif hasattr(source, "peft_config") and hasattr(source, "get_base_model"):
            pairs, targets = read_model(source, scale)
            base = self._digest_under(source) if base is None else base
        else:
            raise WeightsRefused(
                f"a {type(source).__name__} is no adapter: give a PeftModel or the folder that its save_pretrained wrote; "
                "refresh(model) sends a whole model"
            )
        return pairs, Adapter(base, targets)

    def _digest_under(self, model: Any) -> str:
        """Return the `manifest_digest` of the frozen weights under the adapters. Cached until one of them moves or is written;
        torch does not count writes through `.data`."""
        tensors = base_tensors(model.get_base_model())
        state = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in tensors.values()]
        known = self._bases.get(model)
        if known is None or known[0] != state:
            known = self._bases[model] = state, digest_of_tensors(tensors)
        return known[1]


def check_config(config: Mapping[str, Any]) -> None:
    """Check the fields of a LoraConfig. Raises WeightsRefused."""
    if not isinstance(config, Mapping):
        raise WeightsRefused(f"adapter_config.json holds a {type(config).__name__}, not an object: save the adapter again")
    kind = getattr(config.get("peft_type"), "value", config.get("peft_type"))
    if kind != "LORA":
        raise WeightsRefused(f"the adapter is {kind}: only LORA is supported; merge it and use refresh(model)")
    for field, name in UNSERVED.items():
        if config.get(field):
            raise WeightsRefused(f"{name} is not plain LoRA: train without {field}{MERGED}")
    for field, (types, wanted) in TYPES.items():
        value = config.get(field)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types) or not _is_finite(value):
            raise WeightsRefused(f"{field}={value!r:.100} in the adapter's configuration: must be {wanted}")
    for field in ("alpha_pattern", "rank_pattern"):
        for key, value in (config.get(field) or {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
                raise WeightsRefused(f"{field}={{{key!r}: {value!r:.40}}} in the adapter's configuration: must be numbers")
            if not _is_pattern(key):
                raise WeightsRefused(
                    f"{field} has the key {key!r:.100} in the adapter's configuration: must be a regular expression of names"
                )
    if config.get("bias", "none") != "none":
        raise WeightsRefused(f"bias={config['bias']!r} trains biases of the base: train with bias='none'{MERGED}")


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _is_pattern(key: Any) -> bool:
    try:
        return isinstance(key, str) and re.compile(key) is not None
    except re.error:
        return False


# a PeftModel


def read_model(model: Any, scale: float) -> tuple[Pairs, list[LoraTarget]]:
    """List the tensors of the active adapter, and its targets. Raises WeightsRefused."""
    from peft.tuners.lora import Linear, LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    if len(model.active_adapters) != 1:
        raise WeightsRefused(f"active adapters: {model.active_adapters}; choose one by model.set_adapter(name)")
    name = model.active_adapters[0]
    config = vars(model.peft_config[name])
    check_config(config)
    pairs: Pairs = []
    targets: list[LoraTarget] = []
    for path, module in model.get_base_model().named_modules():
        if isinstance(module, BaseTunerLayer) and (module.merged or module.disable_adapters):
            raise WeightsRefused(f"{path}: its adapter is merged or disabled; call unmerge_adapter(), or enable it")
        if isinstance(module, LoraLayer) and name in (*module.lora_A, *module.lora_embedding_A):
            if type(module) is not Linear or name in module.lora_variant or module.lora_bias.get(name):
                raise unserved(path, f"{type(module).__module__}.{type(module).__qualname__}")
            a, b, own = f"{path}.lora_A.weight", f"{path}.lora_B.weight", float(module.scaling[name]) * scale
            pairs += [(a, module.lora_A[name].weight), (b, module.lora_B[name].weight)]
            targets.append(LoraTarget(f"{path}.weight", a, b, own, module.fan_in_fan_out))
        elif isinstance(module, ModulesToSaveWrapper) and name in module.modules_to_save:
            pairs += [(f"{path}.{key}", tensor) for key, tensor in module.modules_to_save[name].state_dict().items()]
        elif isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            raise unserved(path, type(module).__name__)
    return pairs, targets


def unserved(path: str, kind: str) -> WeightsRefused:
    """Return the error for a layer other than a plain LoRA layer."""
    fix = f"leave it out of target_modules{MERGED}"
    if "bnb" in kind or "4bit" in kind or "8bit" in kind or "gptq" in kind or "awq" in kind:
        fix = "its base is quantised, the service's is not: save_pretrained the adapter and give its folder"
    return WeightsRefused(f"{path}: an adapter of kind {kind} is not supported, only plain LoRA on Linear layers; {fix}")


def digest_of_tensors(tensors: Mapping[str, Any]) -> str:
    """Return the `manifest_digest` of tensors on any device."""
    from rollout.engine.weights.tensors import flat_bytes, info_of

    data = {name: flat_bytes(tensor) for name, tensor in tensors.items()}
    digests = {name: digest(each if each.is_cuda else each.numpy()) for name, each in data.items()}
    infos = [info_of(name, tensor) for name, tensor in tensors.items()]
    return manifest_digest(msgspec.structs.replace(info, digest=digests[info.name]) for info in infos)


def base_tensors(module: Any) -> dict[str, Any]:
    """List the tensors of a model without its adapters, under their names in the checkpoint."""
    from rollout.engine.weights.tensors import checkpoint_tensors

    own = {}
    for name, tensor in checkpoint_tensors(module)[0].items():
        if not re.search(r"\.(lora_[A-Za-z_]+|modules_to_save|trainable_tokens_\w+)\.", name):
            own[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = tensor
    return own


# a folder


def read_folder(folder: Path, scale: float) -> tuple[Pairs, list[LoraTarget]]:
    """Read a folder that PEFT's `save_pretrained` wrote. Raises SourceUnreachable, WeightsRefused."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load((folder / "adapter_model.safetensors").read_bytes())  # not mapped: the file may become shorter
    except (OSError, ValueError, SafetensorError) as error:
        raise SourceUnreachable(
            f"{folder} is not a readable adapter folder (adapter_config.json, adapter_model.safetensors): {error}"
        ) from None
    check_config(config)
    if config.get("init_lora_weights", True) not in INIT_KEEPS_BASE:
        raise WeightsRefused(
            f"init_lora_weights={config['init_lora_weights']!r} changes the base, which the service does not have: save the "
            "adapter with path_initial_model_for_weight_conversion, which makes it one of the original base, and give its "
            "folder; or refresh(model.merge_and_unload()) sends whole weights"
        )
    # with an adapter on an embedding, PEFT also saves the frozen embeddings
    names = {key: key.removeprefix(PREFIX).replace(".base_layer.", ".") for key in sorted(tensors)}
    pairs = [(name, tensors[key]) for key, name in names.items()]
    targets = []
    for key, tensor in pairs:
        if key.endswith(".lora_A.weight"):
            path = key.removesuffix(".lora_A.weight")
            own = scaling_of(config, path, len(tensor)) * scale
            targets.append(
                LoraTarget(f"{path}.weight", key, f"{path}.lora_B.weight", own, bool(config.get("fan_in_fan_out", False)))
            )
        elif not key.endswith(".lora_B.weight") and ".lora_" in key:
            raise unserved(key.split(".lora_")[0], key.rpartition(".lora_")[2])
    return pairs, targets


def scaling_of(config: Mapping[str, Any], path: str, rank: int) -> float:
    """Return PEFT's factor of B A for the layer at `path`."""
    patterns = config.get("alpha_pattern") or {}
    mine = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", path)), None)
    alpha = config["lora_alpha"] if mine is None else patterns[mine]
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)
