"""Names, shapes and digests of a model's tensors: checks manifests against them, and digests the live weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import xxhash
from msgspec.structs import replace

from rollout.engine.memory import Hashes
from rollout.engine.values import TensorInfo, manifest_digest
from rollout.engine.weights.published import published_names
from rollout.engine.weights.tensors import (
    DTYPES,
    InvalidWeights,
    checkpoint_tensors,
    digest_of,
    dtype_name,
    flat_bytes,
    tensor_bytes,
)

READ_BYTES = 8 << 20
"""bytes that `Digests.read_live` reads at a time"""
SKIPPED = ""
"""in place of the name of a tensor: the model's class declares it as not its own"""
MAX_SKIPPED_BYTES = 4 << 30
"""of all skipped tensors of a manifest, beyond the bytes of the model"""
OWN_NAMES = "save_pretrained(…, save_original_format=False) writes a folder with the module's names"


class Inventory:
    """Parameters and persistent buffers of a module, each under its first name; `first_name` maps the other names of tied
    tensors.

    Args:
        module: None: a model without tensors. masters: maps the id of an offloaded parameter to the host tensor that a refresh
        writes (`rollout.engine.weights.offload`).
    """

    def __init__(self, module: torch.nn.Module | None, masters: Mapping[int, torch.nn.Parameter]) -> None:
        own, self.first_name = ({}, {}) if module is None else checkpoint_tensors(module)
        self.offloaded = {name for name, tensor in own.items() if id(tensor) in masters}
        self.tensors: dict[str, torch.Tensor] = {name: masters.get(id(tensor), tensor) for name, tensor in own.items()}
        self._published = published_names(module, self.first_name)
        """rules for other names than the module's; None: there are none"""
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        """known also while the tensors are released"""
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def own_name(self, name: str) -> str | None:
        """Return a name of a tensor in the module, given this one or one of a checkpoint or of a composite model with it; None:
        the module has no such tensor."""
        if name in self.first_name or self._published is None:
            return name if name in self.first_name else None
        found = self._published.find(name)
        return found.target if found.converter is None and found.target in self.first_name else None

    def first(self, name: str) -> str:
        """Return the first name of a tensor of the model, given any name that `own_name` knows."""
        own = self.own_name(name)
        assert own is not None
        return self.first_name[own]

    def skips(self, name: str) -> bool:
        """Return whether the model's class declares a tensor as not its own, such as those of a tower for images."""
        return name not in self.first_name and self._published is not None and self._published.skipped(name)

    def dtype(self, name: str) -> str:
        """Return the dtype name of a tensor, given any of its names."""
        return dtype_name(self.tensors[self.first(name)])

    def size(self, name: str) -> tuple[int, int]:
        """Return the size of a tensor and of one element, in bytes."""
        tensor = self.tensors[self.first(name)]
        return tensor.nbytes, tensor.element_size()

    def manifest(self) -> list[TensorInfo]:
        """List all tensors as in a refresh of all tensors, with empty digests."""
        return [TensorInfo(name, self.dtype(name), tuple(shape), "") for name, shape in self.shapes.items()]

    def read_slice(self, name: str, start: int, size: int) -> np.ndarray:
        """Copy `size` live bytes of a tensor, from byte `start` on, to host memory: [bytes] uint8."""
        live, (_, itemsize) = self.tensors[self.first(name)], self.size(name)
        return tensor_bytes(live.detach().reshape(-1)[start // itemsize : (start + size) // itemsize]).copy()

    def read(self, name: str) -> torch.Tensor:
        """Copy a live tensor to host memory, given its first name."""
        return self.tensors[name].detach().to("cpu", copy=True)

    def digest(self, name: str) -> str:
        """Return the xxh3-128 (hex) of a live tensor, given its first name."""
        return digest_of(tensor_bytes(self.tensors[name]))

    def targets(self, manifest: Sequence[TensorInfo], partial: bool) -> list[str | None]:
        """Return the tensor that each entry writes; None: the entry repeats a tied tensor under another name. SKIPPED: it is
        not the model's.

        Raises InvalidWeights naming the tensor if the manifest does not fit the model."""
        if self.tensors and not manifest:
            raise InvalidWeights("no tensors at all: was the iterator already consumed?")
        others = [info.name for info in manifest if info.name not in self.first_name]
        if others and self._published is not None:
            self._published.resolve(others)
        listed: set[str] = set()
        writes: dict[str, TensorInfo] = {}
        targets: list[str | None] = []
        room = self.nbytes + MAX_SKIPPED_BYTES
        for info in manifest:
            if info.name in listed:
                raise InvalidWeights("listed more than once", info.name)
            listed.add(info.name)
            if self.skips(info.name):
                room -= _skipped_bytes(info, room)
                targets.append(SKIPPED)
                continue
            name = self.check(info)
            twin = writes.setdefault(name, info)
            if (twin.dtype, twin.digest) != (info.dtype, info.digest):
                raise InvalidWeights(self._differ(info.name, twin.name), info.name)
            targets.append(name if twin is info else None)
        if manifest and not writes:
            raise InvalidWeights("the model's class declares it, and all others here, as not its own", manifest[0].name)
        missing = [name for name in self.tensors if name not in writes]
        if missing and not partial:
            raise self._missing(missing)
        return targets

    def _differ(self, name: str, twin: str) -> str:
        """Return why two entries of a manifest for one tensor must be equal."""
        if self.own_name(name) == self.own_name(twin):
            return f"it is also listed as {twin!r}, with other bytes: send one of them"
        return f"the model ties it to {twin!r}, which has other bytes in this refresh"

    def check(self, info: TensorInfo) -> str:
        """Return the first name of an entry's tensor. Raises InvalidWeights if the entry does not fit the tensor."""
        own = self.own_name(info.name)
        if own is None:
            raise InvalidWeights(f"the model has no tensor of this name{self._instead_of(info.name)}", info.name)
        name = self.first_name[own]
        live = self.tensors[name]
        if info.shape != tuple(self.shapes[name]):
            fix = "" if own == info.name else f"; {OWN_NAMES}"
            raise InvalidWeights(f"has shape {info.shape}, but {tuple(self.shapes[name])} in the model{fix}", info.name)
        if info.dtype != dtype_name(live) and not (live.is_floating_point() and info.dtype in DTYPES):
            raise InvalidWeights(f"dtype {info.dtype!r:.40} cannot be cast to {dtype_name(live)}", info.name)
        if not live.is_contiguous():
            raise InvalidWeights("not contiguous in this engine, so it cannot be refreshed", info.name)
        return name

    def _instead_of(self, name: str) -> str:
        """Return what to send instead of a tensor that the model has not; "" for a model of another library."""
        if re.search(r"\.(lora_[A-Za-z]\w*|base_layer|modules_to_save)\.|^base_model\.model\.", name):
            return ": it is part of an adapter; send that with refresh_lora(model), or whole weights with merge_and_unload()"
        if name.endswith("_flat_param"):
            return ": FSDP has flattened the parameters; give its full state dict (StateDictType.FULL_STATE_DICT)"
        whole = next((each for each, shape in self.shapes.items() if ".experts." in each and len(shape) == 3), None)
        if whole is not None and re.search(r"\.experts\.\d+\.", name):
            return (
                f": it has all experts in one, such as {whole!r} {tuple(self.shapes[whole])}; send "
                "rollout.models.stacked_experts(tensors, model_type), or a folder of save_pretrained(…, "
                "save_original_format=False)"
            )
        if self._published is None:
            return ""
        found = self._published.find(name)
        if found.converter is not None and found.target in self.first_name:
            return f": transformers makes {found.target!r} of it when it loads a checkpoint; {OWN_NAMES}"
        return f"; {OWN_NAMES}"

    def _missing(self, names: list[str]) -> InvalidWeights:
        buffers = [name for name in names if not isinstance(self.tensors[name], torch.nn.Parameter)]
        reason = f"it is missing ({len(names)} are): pass partial=True to refresh only some tensors"
        if not buffers:
            return InvalidWeights(reason, names[0])
        some = ", ".join(buffers[:4]) + ", …" * (len(buffers) > 4)
        fix = "named_parameters() does not list buffers: give the model itself, or its state_dict()"
        return InvalidWeights(f"{reason}. The missing tensors include the buffers {some}; {fix}", names[0])


def _skipped_bytes(info: TensorInfo, most: int) -> int:
    """Return the bytes of a tensor of which the model knows neither shape nor dtype. Raises InvalidWeights."""
    dtype = getattr(torch, info.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidWeights(f"dtype {info.dtype!r:.40} is none of torch", info.name)
    size = math.prod(info.shape) * dtype.itemsize
    if size > most:
        raise InvalidWeights(
            f"shape {info.shape} makes the tensors that the model's class declares as not its own too large: at most "
            "the model's bytes and 4 GiB in all; leave them out",
            info.name,
        )
    return size


class Digests:
    """Digests of the live tensors: as committed (`committed`) and as read from memory (`read_live`)."""

    def __init__(self, inventory: Inventory, hashes: Callable[[int], Hashes] | None = None) -> None:
        """hashes: computes digests of tensors on a device there; None: tensors are copied to the host."""
        self._inventory = inventory
        self._hashes = hashes
        self._committed: dict[str, str] = {}
        """digests of refreshed tensors, and of others once they were asked for"""
        self._whole: str | None = None

    @property
    def committed(self) -> str:
        """`manifest_digest` of all tensors as committed; tensors that were never refreshed are read once. Cached."""
        if self._whole is None:
            self._whole = self.with_others({})
        return self._whole

    def learn(self, names: Iterable[str]) -> None:
        """Compute the digests of these tensors that are not known yet."""
        tensors = {name: self._inventory.tensors[name] for name in names if name not in self._committed}
        if self._hashes is not None and (there := {name: each for name, each in tensors.items() if not each.is_cpu}):
            hashes = self._hashes(len(there))
            for row, tensor in enumerate(there.values()):
                hashes.add(row, flat_bytes(tensor))
            self._committed |= zip(there, hashes.read()(), strict=True)
        for name in tensors:
            if name not in self._committed:
                self._committed[name] = self._inventory.digest(name)

    def of(self, name: str) -> str:
        """Return the digest of a tensor as committed."""
        self.learn([name])
        return self._committed[name]

    def manifest(self) -> list[TensorInfo]:
        """List all tensors with their digests as committed."""
        self.learn(self._inventory.tensors.keys())
        return [replace(info, digest=self._committed[info.name]) for info in self._inventory.manifest()]

    def with_others(self, others: Mapping[str, str]) -> str:
        """Return what `committed` would be if some tensors had these digests."""
        self.learn(self._inventory.tensors.keys() - others.keys())
        return self._manifest_digest({**self._committed, **others})

    def commit(self, digests: Mapping[str, str]) -> None:
        """Set the digests of tensors that were refreshed."""
        self._committed.update(digests)
        self._whole = None

    def read_live(self) -> Iterator[str | None]:
        """Read every tensor in portions: yields None after each READ_BYTES and finally the `manifest_digest`. Call it between
        steps; a refresh meanwhile makes the result meaningless."""
        digests: dict[str, str] = {}
        for name in self._inventory.tensors:
            state, size = xxhash.xxh3_128(), self._inventory.size(name)[0]
            for start in range(0, size, READ_BYTES):
                state.update(self._inventory.read_slice(name, start, min(READ_BYTES, size - start)).data)
                yield None
            digests[name] = state.hexdigest()
        yield self._manifest_digest(digests)

    def _manifest_digest(self, digests: Mapping[str, str]) -> str:
        shapes = self._inventory.shapes
        return manifest_digest(
            TensorInfo(name, dtype_name(tensor), tuple(shapes[name]), digests[name])
            for name, tensor in self._inventory.tensors.items()
        )
