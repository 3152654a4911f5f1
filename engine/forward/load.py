"""Loads a transformers model from a folder, and checks what is in it: one rule for every number of ranks.

config.json, generation_config.json     valid; the folder's own code is never run, an adapter beside the model is not its
the files (`rollout.engine.model_files`)      the index or the single file, which must not contradict each other
from_pretrained                         transformers' names, stacked experts, dequantised weights
the tensors                             all that the class has, no codes without scales, no NaN; logs what a cast rounds
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollout.engine.forward.random_weights import load_module
from rollout.engine.forward.saved_parts import TIED_DIFFER, SavedTensors, check_codes
from rollout.engine.forward.shapes import is_random
from rollout.engine.memory import DeviceMemory
from rollout.engine.model_files import INDEX, SINGLE
from rollout.engine.weights.rounding import MEASURED, RoundingLog, Roundings, loses
from rollout.engine.weights.staging import finite
from rollout.engine.weights.tensors import checkpoint_tensors, dtype_name, persistent_buffers

ADAPTER = "adapter_config.json"


class BrokenModel(ValueError):
    """A model folder cannot be loaded; the message names the folder and the reason."""


def load_model(folder: str, dtype: torch.dtype, memory: DeviceMemory | None) -> PreTrainedModel:
    """Load a model from a local folder. Raises BrokenModel.

    Args:
        memory: where to move it; None: it stays in the mapped pages of its files, for the weight offload to move.
    """
    look_at_config(folder)
    try:
        with _reports_held_back():
            model = load_module(folder, dtype=dtype) if is_random(folder) else _read(folder, dtype)
    except BrokenModel:
        raise
    except Exception as error:  # a dozen unrelated types, all for invalid models
        beside = "; move away adapter_config.json, which it may have loaded" if (Path(folder) / ADAPTER).is_file() else ""
        raise BrokenModel(f"model folder {folder!r} cannot be loaded: {in_one_line(error)}{beside}") from error
    if getattr(model, "_hf_peft_config_loaded", False):
        raise BrokenModel(
            f"model folder {folder!r}: transformers {transformers.__version__} loads the adapter of {ADAPTER}, too: move "
            "it away, and send it with refresh_lora"
        )
    refuse_not_finite(model, folder)
    if memory is None:
        return model
    memory.own(checkpoint_tensors(model)[0].values())
    try:
        return model.to(memory.device)
    except (RuntimeError, ValueError) as error:  # out of memory, or quantised weights that cannot move
        raise BrokenModel(f"model folder {folder!r} cannot be moved to {memory.device}: {in_one_line(error)}") from error


def _read(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the module of a folder, and check it against the tensors in its files. Raises BrokenModel, and what transformers
    raises."""
    config = configuration(folder)
    quantised = any(getattr(each, "quantization_config", None) for each in (config, config.get_text_config()))
    with ExitStack() as opened:
        saved = SavedTensors(Path(folder), opened)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,  # True runs the folder's code, None asks on standard input
            use_safetensors=True,
            adapter_kwargs={"subfolder": "config.json"},  # where no adapter can be: one beside the model is not served
            ignore_mismatched_sizes=True,  # rejected below, by name
            output_loading_info=True,
        )
        _look_at_report(folder, report)
        if quantised:
            _widen(model, dtype)
        _look_at_saved(folder, model, saved, quantised)
    return model


def configuration(folder: str | Path) -> Any:
    """Read the configuration of a folder, without what it says of implementations: ours take their place, and those may not be
    installed. Raises what transformers raises."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config._attn_implementation = "eager"
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        if getattr(each, "_experts_implementation_internal", None) is not None:
            each._experts_implementation_internal = None
    return config


def generation_configuration(folder: str | Path) -> GenerationConfig | None:
    """Read generation_config.json, if there is one."""
    if not (Path(folder) / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(folder, local_files_only=True)


def _widen(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what dequantising leaves in a narrower dtype than the model's, which loses nothing."""
    for tensor in checkpoint_tensors(model)[0].values():
        if tensor.is_floating_point() and not loses(tensor.dtype, dtype):
            tensor.data = tensor.data.to(dtype)


def _look_at_saved(folder: str, model: PreTrainedModel, saved: SavedTensors, quantised: bool) -> None:
    """Raise BrokenModel for codes in place of numbers, and for tied tensors that differ. Log what was rounded. A tensor that
    is dequantised, or not of floats, is not looked at."""
    for other, name in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(other) is not model.get_parameter_or_buffer(name):
            raise BrokenModel(f"model folder {folder!r}: {TIED_DIFFER.format(other, name)}")
    (tensors, first_name), rounded = checkpoint_tensors(model), Roundings()
    for name, source in saved.sources(model).items():
        first = first_name.get(name, name)
        live, parts = tensors.get(first), [saved.by_name[each] for block in source.names for each in block]
        if live is None or not live.is_floating_point() or (quantised and any(each.is_codes for each in parts)):
            continue
        try:
            check_codes(name, live, parts)
        except ValueError as error:
            raise BrokenModel(f"model folder {folder!r} cannot be loaded: {error}") from None
        if not source.stacked and live.numel() <= MEASURED:
            rounded.add(first, live.numel(), parts[0].read(), live)
        else:
            for each in parts:
                rounded.note(first, each.torch_dtype, live.dtype)
    RoundingLog().say("load", rounded.found, frozenset(persistent_buffers(model)))


def refuse_not_finite(model: nn.Module, folder: str) -> None:
    """Raise BrokenModel naming a tensor that holds NaN or infinity, as a refresh does."""
    for name, tensor in checkpoint_tensors(model)[0].items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            continue
        values = tensor.detach()
        good = finite(values.reshape(-1)) if values.is_cpu else bool(torch.isfinite(values).all())
        if not good:
            raise BrokenModel(
                f"model folder {folder!r}: tensor {name!r} holds NaN or infinity as {dtype_name(tensor)}: "
                'save the model again; a value that only overflows this dtype needs engine.dtype = "float32" or "bfloat16"'
            )


def look_at_config(folder: str) -> None:
    """Raise BrokenModel for a folder whose configuration is missing, invalid, or asks for something that is never done."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        fix = "pass a folder written by save_pretrained"
        if (path / ADAPTER).is_file():
            fix = "it holds an adapter (adapter_config.json): serve its base model, and send the adapter with refresh_lora"
        raise BrokenModel(f"model folder {folder!r} has no config.json; {fix}")
    config = _json(path / "config.json", "a model's configuration")
    kind = config.get("model_type")
    if config.get("auto_map") and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise BrokenModel(
            f"model folder {folder!r} has its own code for model type {kind!r} (auto_map in config.json), which is never run; "
            f"if the weights fit a model_type of transformers {transformers.__version__}, set that one"
        )
    if config.get("transformers_weights") not in (None, SINGLE, INDEX):
        raise BrokenModel(
            f"model folder {folder!r}: config.json names other weights (transformers_weights = "
            f"{config['transformers_weights']!r:.100}), which are not read: name the file {SINGLE}"
        )
    if (path / "generation_config.json").is_file():
        _json(path / "generation_config.json", "a generation configuration")


def _json(file: Path, what: str) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text())
        if not isinstance(read, dict):
            raise ValueError(f"a {type(read).__name__}, not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"{str(file)!r} is not {what}: {in_one_line(error)}") from error
    return read


def _look_at_report(folder: str, report: dict[str, Any]) -> None:
    """Raise BrokenModel if weights are missing or unexpected: transformers would fill missing ones with random numbers. Ties,
    and weights that a model class ignores, are not in its report."""
    kinds = ("missing", "unexpected", "mismatched")
    found = {kind: sorted(str(key[0] if isinstance(key, tuple) else key) for key in report[f"{kind}_keys"]) for kind in kinds}
    if wrong := [f"{len(names)} {kind} ({_few(names)})" for kind, names in found.items() if names]:
        raise BrokenModel(
            f"model folder {folder!r}: its weights do not match its config.json: {', '.join(wrong)}; "
            "save the model again with save_pretrained"
        )


def _few(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def _reports_held_back() -> Iterator[None]:
    """Silence two log messages of transformers: a table of invalid weights, which the error that follows reports, and then a
    warning about layers that tensor parallelism would not split."""
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
    """Return the type of an error and the beginning of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def end_tokens(module: PreTrainedModel, vocab_size: int, name: str) -> frozenset[int]:
    """Return the tokens that end a text, of generation_config.json, or of config.json if that names none. Raises BrokenModel
    naming file and field for anything but integers of the vocabulary."""
    file, found = "generation_config.json", getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    if found is None:
        file, found = "config.json", getattr(module.config.get_text_config(), "eos_token_id", None)
    ids = [] if found is None else list(found) if isinstance(found, list | tuple | set) else [found]
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < vocab_size:
            raise BrokenModel(
                f"{name}: eos_token_id in {file} is {found!r:.100}: must be a token, 0 to {vocab_size - 1}, or a list of some"
            )
    return frozenset(ids)
