"""What a refresh sends, and what became of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

KVPolicy = Literal["keep", "recompute", "abort"]
"""what a refresh does with running groups: keep their KV, recompute it under the new weights, or abort them"""


class TensorInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of a manifest: a tensor whose bytes follow.

    Example:
        TensorInfo("model.norm.weight", "bfloat16", (576,), "5a1f…")
    """

    name: str
    dtype: str
    """dtype of the sent bytes, in torch's name, e.g. "bfloat16"; the model's may differ"""
    shape: tuple[int, ...]
    digest: str
    """xxh3-128, 32 hex digits, of the elements in C order, little-endian"""


def manifest_digest(tensors: Iterable[TensorInfo]) -> str:
    """Return the SHA-256 of a manifest in hex, independent of its order."""
    lines = sorted(f"{len(t.name)}:{t.name}\t{t.dtype}\t{t.shape}\t{t.digest}\n" for t in tensors)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class Served(NamedTuple):
    """Weights that are or were live: a version, and its digest."""

    version: int = 0
    digest: str = ""
    """`manifest_digest` of all tensors in the model's dtype; "": unknown"""

    def differ(self, other: Served) -> bool:
        """Return whether these are known to be different weights with the same version."""
        return self.version == other.version and "" not in (self.digest, other.digest) and self.digest != other.digest

    def follow(self, before: Served) -> bool:
        """Return whether groups of the weights `before` may continue under these: newer ones, or the same."""
        return self.version >= before.version and not self.differ(before)


NONE_SERVED = Served()


class LoraTarget(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor that an adapter changes to weight + scale · B A.

    Example:
        LoraTarget("model.layers.0.mlp.up_proj.weight", "….lora_A.weight", "….lora_B.weight", 2.0)
    """

    weight: str
    """name of the tensor in the model"""
    a: str
    """name in the manifest, [rank, in]"""
    b: str
    """name in the manifest, [out, rank]"""
    scale: float
    transposed: bool = False
    """the weight is [in, out], as in transformers' Conv1D (`fan_in_fan_out`)"""


class Adapter(msgspec.Struct, frozen=True):
    """Targets of a LoRA refresh. Tensors of the manifest that are not A or B of a target are sent whole."""

    base: str | None
    """`manifest_digest` of the weights that it was trained on; None = unknown, not compared"""
    targets: list[LoraTarget]


class WeightUpdate(msgspec.Struct, frozen=True):
    """What a refresh sends, and how it changes the live weights."""

    manifest: Sequence[TensorInfo]
    """the tensors that follow"""
    version: int | None = None
    """above all versions so far; None: the next one"""
    partial: bool = False
    """tensors that are not in the manifest stay unchanged"""
    adapter: Adapter | None = None
    """the new weights are base + adapter, and the manifest lists the adapter's tensors; None: it lists whole tensors"""
    on_device: bool = False
    """the payload is on the model's device; it is staged there if there is room"""
    stays: bool = False
    """the payload can be read once more at the commit, and a source that has returned its last byte begins again: without room,
    it replaces the live weights in place"""


class BaseMismatch(ValueError):
    """A delta or adapter was made for other weights than the live ones."""


class Refreshed(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a refresh that is live."""

    version: int
    """of the weights that are live now"""
    via: str
    """how the tensors were sent: memory, shm, inline, delta, files, cuda_ipc, gloo or nccl"""
    bytes: int
    """bytes of the new tensors; with an adapter, of the whole model"""
    seconds: float
    """from the call to its result"""
    staged_seconds: float
    """from the manifest to the last checked byte, while generation continues"""
    paused_seconds: float
    """for which generation stopped to exchange the weights"""
    digest: str
    """`manifest_digest` of all live weights in the model's dtype"""
    sent_bytes: int = 0
    """bytes sent: less than `bytes` for an adapter, and via delta"""
    reason: str = ""
    """why the client chose `via`"""
