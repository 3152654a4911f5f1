"""Names and bytes of a model's tensors, for the engine that refreshes them and the trainer that sends them.

Imports torch and `rollout.engine.values` only, so that a trainer can import it: both sides agree on which tensors a model has
and which bytes a tensor is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rollout.engine.values import TensorInfo

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
}
"""dtypes in which a tensor may be sent: floats, which the engine can cast to the model's dtype"""

NamedTensors = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class InvalidWeights(ValueError):
    """A refresh cannot be applied; the weights are unchanged. `tensor`: name of the tensor at fault, if it is one."""

    def __init__(self, message: str, tensor: str | None = None) -> None:
        super().__init__(message if tensor is None else f"tensor {tensor!r}: {message}")
        self.tensor = tensor


def dtype_name(tensor: torch.Tensor) -> str:
    """Name the dtype of a tensor as manifests do, for example "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return [bytes] uint8 on the tensor's device: its elements in C order. A view if the tensor is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return [bytes] uint8 in host memory: the elements in C order. A view of a contiguous CPU tensor, else a copy."""
    array: np.ndarray = flat_bytes(tensor.detach().cpu()).numpy()
    return array


def info_of(name: str, tensor: torch.Tensor) -> TensorInfo:
    """Describe a tensor for a manifest, without a digest. Raises InvalidWeights if it is not a dense tensor with data."""
    if hasattr(tensor, "full_tensor") or hasattr(tensor, "local_shards"):
        raise InvalidWeights(
            f"it is a {type(tensor).__name__}, of which this process has a part: send its full_tensor(), or gather all by "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
            name,
        )
    if hasattr(tensor, "ds_id") and not tensor.numel():
        raise InvalidWeights("ZeRO has its elements elsewhere: call refresh inside deepspeed.zero.GatheredParameters", name)
    if is_wrapper(tensor):
        raise InvalidWeights(f"it is a {type(tensor).__name__}, not a plain tensor: send a state_dict() of plain ones", name)
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise InvalidWeights(f"cannot be sent: pass a dense tensor with data, not this {type(tensor).__name__}", name)
    return TensorInfo(name, dtype_name(tensor), tuple(tensor.shape), "")


def is_wrapper(tensor: object) -> bool:
    """Return whether a tensor wraps others, such as quantised ones, and has no bytes of its own."""
    return isinstance(tensor, torch.Tensor) and is_traceable_wrapper_subclass(tensor)


def describe(name: str, tensor: torch.Tensor) -> tuple[TensorInfo, np.ndarray]:
    """Return `info_of` and `tensor_bytes` of a tensor."""
    return info_of(name, tensor), tensor_bytes(tensor)


def digest_of(data: np.ndarray) -> str:
    """Return the xxh3-128 (hex) of [bytes] uint8."""
    return xxhash.xxh3_128_hexdigest(data.data)


def with_digest(info: TensorInfo, data: np.ndarray) -> TensorInfo:
    """Set the digest to that of `data`, [bytes] uint8."""
    return msgspec.structs.replace(info, digest=digest_of(data))


def named_pairs(named_tensors: NamedTensors) -> list[tuple[str, torch.Tensor]]:
    """List the (name, tensor) pairs of a module (its `checkpoint_tensors`), a state dict or any iterable of pairs. Raises
    InvalidWeights for other arguments."""
    wanted = "a refresh takes the model, its state_dict(), or (name, tensor) pairs as from model.named_parameters()"
    if isinstance(named_tensors, torch.nn.Module):
        named_tensors, _ = checkpoint_tensors(named_tensors)
    if not isinstance(named_tensors, Iterable):
        raise InvalidWeights(f"{wanted}, not a {type(named_tensors).__name__}")
    pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidWeights(f"{wanted}, not {type(pair).__name__}")
    return unwrapped([(str(name), tensor) for name, tensor in pairs])  # numpy.str_ cannot be encoded


WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""parts of names that torch.compile, checkpoint wrappers and FSDP insert"""


def unwrapped(pairs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Remove from names what wrappers have added: WRAPPERS anywhere, and `module.` (DistributedDataParallel) in front if all
    names have it. Two names that become one stay as they are."""
    names = [WRAPPERS.sub("", name) for name, _ in pairs]
    while names and all(name.startswith("module.") for name in names):
        names = [WRAPPERS.sub("", name.removeprefix("module.")) for name in names]
    return list(zip(names, (tensor for _, tensor in pairs), strict=True)) if len({*names}) == len(pairs) else pairs


def checkpoint_tensors(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors that a checkpoint of a module contains (parameters and persistent buffers), each once under its first
    name; and a map from every name to that first name, since tied tensors have several."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= persistent_buffers(module)
    owner: dict[int, str] = {}
    first_name = {name: owner.setdefault(id(tensor), name) for name, tensor in named.items()}
    return {name: tensor for name, tensor in named.items() if first_name[name] == name}, first_name


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module's state dict, without building the state dict, which would gather shards."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules(remove_duplicate=False)
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
        if name not in part._non_persistent_buffers_set
    }
