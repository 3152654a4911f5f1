"""LoRA refresh: computes staged weights = base + scale · B A from the A and B that the trainer sends.

    base      the checkpoint, or the tensors that refreshes of whole tensors wrote
    kept      bases of the tensors that the live adapter changed, in host memory; for all other tensors, live = base
    merging   for each target, once its A and B arrived:       staged ← base, staged += (B A) · scale
              a target that is also sent whole:                staged ← sent, staged += (B A) · scale
              tensors that only the previous adapter changed:  staged ← base

The sum is that of PEFT's merge on a CPU, in the order and rounding of peft 0.21's `Linear.merge` (`safe_merge=False`): one
product and one addition by torch over the whole matrix. It is not split into row blocks, because the product would have other
bits. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from rollout.engine.values import Adapter, BaseMismatch, LoraTarget, TensorInfo
from rollout.engine.weights.inventory import Digests, Inventory
from rollout.engine.weights.parts import StagedTensors
from rollout.engine.weights.staging import StagedTensor, finite
from rollout.engine.weights.tensors import InvalidWeights, digest_of, dtype_name, tensor_bytes

FACTORS = ("float64", "float32", "float16", "bfloat16")
"""dtypes of A and B, and of the tensors to which B A is added"""


class AdapterBase:
    """The weights to which adapters are added. Only `commit` changes it, after the exchange."""

    def __init__(self, inventory: Inventory, digests: Digests) -> None:
        self._inventory = inventory
        self._live = digests
        self._kept: dict[str, torch.Tensor] = {}
        self._digests: dict[str, str] = {}
        """digests of the kept tensors"""

    @property
    def digest(self) -> str:
        """`manifest_digest` of all tensors without the live adapter."""
        return self._live.with_others(self._digests)

    @property
    def nbytes(self) -> int:
        """Host memory of the kept tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    @property
    def changed(self) -> Collection[str]:
        """Names of the tensors that the live adapter changed."""
        return self._kept.keys()

    def read(self, name: str) -> torch.Tensor:
        """Return the base of a tensor in host memory; the caller may keep it. Call it before the exchange."""
        kept = self._kept.get(name)
        if kept is None:
            self._live.learn([name])  # after the exchange it cannot be computed any more
        return self._inventory.read(name) if kept is None else kept

    def check(self, digest: str | None) -> None:
        """Compare the base with the digest of the weights that an adapter was trained on; None: unknown. Raises WrongBase."""
        if digest is not None and digest != self.digest:
            raise BaseMismatch(
                f"the adapter was trained on weights with digest {digest:.12}…, the base here has {self.digest:.12}… (the "
                "checkpoint, or the last refresh of whole tensors): load the same checkpoint in the same dtype at both ends, "
                "or refresh with the merged model"
            )

    def commit(self, written: Collection[str], bases: Mapping[str, torch.Tensor]) -> None:
        """Record that these tensors were written. bases: those that an adapter changed. Call it before the live digests are
        committed."""
        for name in written:
            if name in bases:
                self._digests.setdefault(name, self._live.of(name))
                self._kept[name] = bases[name]
            else:
                self._digests.pop(name, None)
                self._kept.pop(name, None)

    def merging(self, adapter: Adapter, manifest: Sequence[TensorInfo], staged: StagedTensors) -> AdapterMerge:
        """Begin the refresh of an adapter. Raises InvalidWeights naming the tensor, BaseMismatch."""
        return AdapterMerge(adapter, manifest, self._inventory, self, staged)

    def clear(self) -> None:
        """Forget all bases, when the weights are dropped."""
        self._kept.clear()
        self._digests.clear()


class AdapterMerge:
    """One refresh of an adapter. Raises WrongBase; InvalidWeights naming the tensor if the adapter does not fit."""

    def __init__(
        self,
        adapter: Adapter,
        manifest: Sequence[TensorInfo],
        inventory: Inventory,
        base: AdapterBase,
        staged: StagedTensors,
    ) -> None:
        self.bases: dict[str, torch.Tensor] = {}
        """base of each tensor that this adapter changes"""
        self.stands_for = inventory.nbytes
        """bytes of the model's tensors after the merge: all of them"""
        self._inventory, self._base, self._staged = inventory, base, staged
        self._factors: dict[str, torch.Tensor] = {}
        """A and B that arrived and wait for the other"""
        self._sent: dict[str, torch.Tensor] = {}
        """tensors that are sent whole, and get A and B added"""
        infos = {info.name: info for info in manifest}
        named = [replace(each, weight=inventory.own_name(each.weight) or each.weight) for each in adapter.targets]
        adapter = replace(adapter, targets=named)
        if not adapter.targets:
            raise InvalidWeights("the adapter has no targets: train one with LoRA layers, or refresh with whole tensors")
        if len(infos) < len(manifest):
            raise InvalidWeights("a tensor is listed more than once")
        self._targets = {factor: target for target in adapter.targets for factor in (target.a, target.b)}
        for target in adapter.targets:
            self._check(target, infos)
        whole = {info.name: inventory.check(info) for info in manifest if info.name not in self._targets}
        self._target_of = {target.weight: target for target in adapter.targets}
        self._check_written([target.weight for target in adapter.targets])
        self._check_written(whole.values())
        self._awaited = set(whole.values()) & self._target_of.keys()
        """tensors that are sent whole, have not arrived, and get A and B added"""
        base.check(adapter.base)
        self.parts = [self._part(info, whole.get(info.name)) for info in manifest]
        self._left = len(self.parts)
        self._back = base.changed - self._target_of.keys() - set(whole.values())
        """tensors of the previous adapter that return to their base"""

    def landed(self, part: StagedTensor, end: int) -> None:
        """Do nothing: a part is used when all of it has arrived."""

    def arrived(self, part: StagedTensor) -> dict[str, str]:
        """Merge everything that this part completes. Returns the digests of the staged tensors that it wrote."""
        self._left -= 1
        digests: dict[str, str] = {}
        if part.target is None:
            assert part.place is not None
            self._factors[part.info.name] = part.place.view(part.info.shape)
            target = self._targets.get(part.info.name)
        else:
            self.bases[part.target] = self._base.read(part.target)
            self._awaited.discard(part.target)
            target = self._target_of.get(part.target)
        if target and {target.a, target.b} <= self._factors.keys() and target.weight not in self._awaited:
            digests[target.weight] = self._merge(target)
        if not self._left:
            digests |= {name: self._restore(name) for name in self._back}
        return digests

    def _merge(self, target: LoraTarget) -> str:
        a, b = self._factors.pop(target.a), self._factors.pop(target.b)
        staged = self._staged.room(target.weight)
        base = self._sent.pop(target.weight, None)
        if base is None:
            base = self.bases[target.weight] = self._base.read(target.weight)
        merge_into(staged, base, a, b, target)
        if not finite(staged):
            raise InvalidWeights("base + scale · B A overflows its dtype", target.weight)
        self._staged.wrote(target.weight, staged)
        return digest_of(tensor_bytes(staged))

    def _restore(self, name: str) -> str:
        staged = self._staged.room(name).copy_(self._base.read(name))
        self._staged.wrote(name, staged)
        return digest_of(tensor_bytes(staged))

    def _part(self, info: TensorInfo, whole: str | None) -> StagedTensor:
        if whole is not None and whole not in self._target_of:
            return self._staged.part(info, whole)
        dtype = getattr(torch, info.dtype)
        kept = dtype if whole is None else self._inventory.tensors[whole].dtype
        place = torch.empty(info.shape, dtype=kept)
        if whole is not None:
            self._sent[whole] = place
        return StagedTensor(info, dtype, whole, place.view(-1))

    def _check(self, target: LoraTarget, infos: Mapping[str, TensorInfo]) -> None:
        """Check that the manifest lists A and B and that B A has the shape of the weight."""
        name, first = target.weight, self._inventory.first_name.get(target.weight)  # its name in the module
        if first is None:
            raise InvalidWeights("the model has no tensor of this name", name)
        live = self._inventory.tensors[first]
        if dtype_name(live) not in FACTORS:
            raise InvalidWeights(f"its dtype is {dtype_name(live)}: adapters can change {', '.join(FACTORS)}", name)
        if self._targets[target.a] is not target or self._targets[target.b] is not target or target.a == target.b:
            raise InvalidWeights("its A or B belongs to another tensor as well: each must be for one weight", name)
        a, b = infos.get(target.a), infos.get(target.b)
        if a is None or b is None:
            raise InvalidWeights(f"its A or B is missing: {target.a!r} and {target.b!r} must be in the manifest", name)
        if a.dtype != b.dtype or a.dtype not in FACTORS:
            raise InvalidWeights(
                f"A is {a.dtype}, B is {b.dtype}: both must have the same dtype, one of {', '.join(FACTORS)}", name
            )
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise InvalidWeights(f"A is {a.shape}, B is {b.shape}: must be [rank, in] and [out, rank]", name)
        product = (a.shape[1], b.shape[0]) if target.transposed else (b.shape[0], a.shape[1])
        if product != tuple(shape := self._inventory.shapes[first]):
            raise InvalidWeights(f"B A is {product}, the model's is {tuple(shape)}", name)
        if a.shape[0] > min(product):
            raise InvalidWeights(f"rank {a.shape[0]} is above that of any {product} matrix: send the merged weight", name)
        if not math.isfinite(target.scale):
            raise InvalidWeights(f"its scale is {target.scale}: must be finite", name)

    def _check_written(self, names: Iterable[str]) -> None:
        for name, times in Counter(names).items():
            if times > 1:
                raise InvalidWeights("the adapter changes it more than once: merge the parts into one", name)
            tied = [other for other, first in self._inventory.first_name.items() if first == self._inventory.first_name[name]]
            if len(tied) > 1:
                raise InvalidWeights(
                    f"the model ties {' and '.join(tied)}: an adapter on one would change both. Leave it out of target_modules "
                    "and modules_to_save, or refresh with the merged model",
                    name,
                )
            if not self._inventory.tensors[name].is_contiguous():
                raise InvalidWeights("not contiguous in this engine, so it cannot be refreshed", name)


def merge_into(staged: torch.Tensor, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, target: LoraTarget) -> torch.Tensor:
    """Write base + scale · B A into `staged`, [out, in] or, if transposed, [in, out]; returns it. a: [rank, in], b: [out,
    rank]. Factors of two bytes are multiplied in fp32 and the product is rounded to their dtype. A product wider than the
    weight is added before it is rounded once."""
    narrow: Any = b.dtype if b.dtype.itemsize == 2 else None
    if narrow is not None:
        a, b = a.float(), b.float()
    change = b @ a
    change = (change.T if target.transposed else change) * target.scale
    if narrow is not None:
        change = change.to(narrow)
    staged.copy_(base)
    staged += change
    return staged
