"""The live weights: parameters and their version. A refresh is a transaction.

    staging = weights.stage(update)      checks names, shapes, dtypes and version; writes nothing
    staging.feed(source) …               see `rollout.engine.weights.staging`; generation continues
    weights.commit(staging)              between two steps: exchanges live ⇄ staged, then sets the version; or changes nothing

    live       parameters of the module     every refresh keeps their storage; after `release_memory` it may be another one
    staged     ┌ embed ──────┬ q ──┬ k ─┬ … ┐   one buffer in the model's dtypes, each tensor at a multiple of 64 bytes;
               allocated by the first refresh and used again
    scratch    one slice, on the device of the live tensors

The exchange works slice by slice: scratch ← live, live ← staged, staged ← scratch. So the staging buffer ends up with the old
weights, and a failure at tensor k restores tensors 0 … k from it. Undo needs one slice of memory, for a model of any size.

On a device without room for a second copy, a payload that stays readable is checked first and then copied straight into the
live tensors (`rollout.engine.weights.in_place`).

After a sleep dropped the weights, there is nothing to undo: a refresh is staged directly into the live tensors, and no step
runs until it is complete and checked (`dropped`).

For a parameter of an offloaded layer (`rollout.engine.weights.offload`), "live" is its master in host memory; the same
transaction fills the slots on the device from the masters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from rollout.engine.memory import DeviceMemory, HostMemory, storage_bytes
from rollout.engine.values import Served, TensorInfo, WeightUpdate
from rollout.engine.weights.buffers import RefreshBuffers
from rollout.engine.weights.inventory import SKIPPED, Digests, Inventory
from rollout.engine.weights.parts import PLAIN, InOnePlace, StagedTensors, WeightParts
from rollout.engine.weights.resident import ResidentTensors
from rollout.engine.weights.rounding import RoundingLog
from rollout.engine.weights.staging import StagedTensor, Staging
from rollout.engine.weights.tensors import InvalidWeights
from rollout.engine.weights.versions import check_named, next_version

log = logging.getLogger(__name__)


class WeightsTorn(RuntimeError):
    """A refresh failed and could not be undone: the weights belong to no version, so the engine refuses to sample."""


class Weights:
    """Parameters and persistent buffers of a module, and their version.

    Args:
        module: None: a model without tensors, which has only a version.
        parts: what they have besides.
        lay_out: called after tensors moved; places some of them side by side.
        memory: where the tensors are; None: host memory.
        inventory: of the module's tensors; None: made here.
    """

    def __init__(
        self,
        module: torch.nn.Module | None,
        parts: WeightParts = PLAIN,
        lay_out: Callable[[], None] = lambda: None,
        memory: DeviceMemory | None = None,
        inventory: Inventory | None = None,
    ) -> None:
        self._memory = HostMemory() if memory is None else memory
        self.version = 0
        self.before = Served()
        """newest weights served before a restart"""
        self.torn = False
        self._module = module
        self._streamed, self._stage_on_device = parts.streamed, parts.on_device
        self._lay_out = lay_out
        self.inventory = self.own = inventory or Inventory(module, {} if parts.streamed is None else parts.streamed.masters)
        self._digests = Digests(self.inventory, self._memory.hashes)
        self.base = parts.adapters(self.inventory, self._digests)
        self._tensors = self.inventory.tensors
        self._twins = parts.twins(module, self._tensors)
        self._all = {**self._tensors, **self._twins.tensors}
        """the tensors and their twins"""
        here = {name: tensor for name, tensor in self._all.items() if name not in self.inventory.offloaded}
        self._resident = ResidentTensors(here, self._memory)
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._all.items()}
        self._buffers = RefreshBuffers(self._all, self.inventory.offloaded, self._memory, self._resident.size)
        self._staging: Staging | None = None
        self._roundings = RoundingLog()
        self._buffer_names = frozenset(
            name for name, tensor in self._tensors.items() if not isinstance(tensor, torch.nn.Parameter)
        )
        self.dropped = False
        """the weights were dropped by a sleep, and no refresh of all tensors has completed since"""

    @property
    def names(self) -> int:
        """Number of names that a manifest may list, including those of tied tensors."""
        return len(self.inventory.first_name)

    @property
    def staging(self) -> bool:
        """Whether a refresh is being staged."""
        return self._staging is not None

    @property
    def resident_bytes(self) -> int:
        """Bytes of the parameters on the model's device, including slots and twins."""
        asleep = self._module is None or (self._resident.stays and self._resident.asleep)
        if asleep or self._module is None:
            return 0
        return storage_bytes([*self._module.parameters(), *self._twins.tensors.values()])

    @property
    def stays(self) -> bool:
        """Whether parameters keep their addresses over a sleep."""
        return self._resident.stays and self._streamed is None

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the decoder layers in host memory."""
        return 0 if self._streamed is None else self._streamed.offloaded_bytes

    def release_memory(self, keep: bool) -> None:
        """Release the memory of the tensors and of staging until `restore_memory`. keep: copy the contents to host memory
        (tensors of the CPU stay in place); otherwise they are lost."""
        assert self._staging is None
        self._buffers.release(host=not keep or self._memory.is_host)
        if not keep or not self._memory.is_host:
            self._digests.learn(self._tensors)  # while they can be read
        if not keep:
            self.base.clear()
        if self._streamed is not None:
            self._streamed.release_memory(keep)
        self._resident.release(keep, self._buffers.host_memory)
        self.dropped |= not keep

    def restore_memory(self) -> None:
        """Re-allocate the memory of the tensors, at new addresses unless `stays`."""
        self._resident.restore()
        if self._streamed is not None:
            self._streamed.restore_memory()
        self._lay_out()
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._all.items()}

    def stage(self, update: WeightUpdate) -> Staging:
        """Check an update and open the staging for it.

        Raises:
            InvalidWeights, WrongBase: the manifest does not fit.
            RuntimeError: another staging is open.
        """
        if self.torn:
            raise WeightsTorn("the weights are torn; restart the engine")
        if self._staging is not None:
            raise RuntimeError("another refresh is being staged; close it first")
        update = replace(update, version=next_version(self.version, self.before, update.version))
        manifest, partial, adapter = update.manifest, update.partial, update.adapter
        if self.dropped and (partial or adapter is not None):
            raise InvalidWeights("the weights were dropped by sleep(level=2): a refresh of all tensors must come first")
        targets = self.inventory.targets(manifest, partial) if adapter is None else []
        if skipped := targets.count(SKIPPED):
            first = manifest[targets.index(SKIPPED)].name
            log.info(
                "refresh skips tensors that the class declares as not its own tensors=%d of=%d first=%s",
                skipped,
                len(targets),
                first,
            )
        if partial:
            self._digests.learn(self._tensors.keys() - {*targets})  # not at the exchange, which pauses generation
        on_device = update.on_device and adapter is None and self._streamed is None and self._stage_on_device is not None
        crowded = on_device and not self.dropped and not self._buffers.open_on_device()
        in_place, on_device = crowded and update.stays, on_device and (update.stays or not crowded)
        if in_place:
            self._digests.learn(self._tensors)  # before they are overwritten
        elif not on_device:
            self._open_in_host_memory()
        merging = None if adapter is None else self.base.merging(adapter, manifest, self._staged_tensors())
        place = self._live if self.dropped or in_place else self._buffers.place
        parts = self._parts(manifest, targets, place) if merging is None else merging.parts
        if on_device and self._stage_on_device is not None:
            self._staging = self._stage_on_device(update, parts, self._memory, self._close_staging, in_place)
        else:
            making = self._twins.staging(parts, place, merging)
            self._staging = Staging(update, parts, self._buffers.scratch.numpy(), self._close_staging, making)
        return self._staging

    def _open_in_host_memory(self) -> None:
        """Allocate what staging in host memory writes."""
        if not self.dropped:
            self._buffers.open_in_host_memory()

    def _parts(
        self, manifest: Sequence[TensorInfo], targets: Sequence[str | None], place: Callable[[str], torch.Tensor]
    ) -> list[StagedTensor]:
        """Return the parts of a payload of whole tensors. place: returns what staging writes for a name."""
        return parts_of(manifest, targets, place)

    def _staged_tensors(self) -> StagedTensors:
        """Return where merged tensors are staged."""
        return InOnePlace(self._buffers.place)

    def _live(self, name: str) -> torch.Tensor:
        return self._all[name].detach()

    def commit(self, staging: Staging) -> None:
        """Exchange staged and live tensors, then set the version. Call it between two steps.

        Raises the error that occurred, after everything is restored; WeightsTorn if it cannot be restored. Dropped weights stay
        dropped until this succeeds."""
        assert staging is self._staging and staging.complete
        if staging.version == self.before.version:
            check_named(Served(staging.version, self._digests.with_others(staging.digests)), self.before)
        self._check_addresses()
        if self._streamed is not None:
            self._streamed.ring.settle()
        if staging.in_place:
            self._write(staging)
        else:
            self._land(staging.names)
        self.base.commit(staging.digests, staging.bases)
        self._digests.commit(staging.digests)
        self.dropped = False
        self.version = staging.version
        staging.close()
        self._roundings.say(f"refresh version={staging.version}", staging.rounded.found, self._buffer_names)

    def _land(self, names: Sequence[str]) -> None:
        """Make staged tensors live, all or none."""
        if self.dropped:
            self._fill_slots()
        else:
            self.exchange(names)

    def _write(self, staging: Staging) -> None:
        """Overwrite the live tensors. If that fails, the weights are dropped."""
        self.dropped = True
        self.base.clear()
        staging.write()
        self._check_addresses()

    def exchange(self, names: Sequence[str]) -> None:
        """Swap staged tensors with the live ones, slice by slice, all or none. A second call undoes the first. Call it between
        two steps, for what `stage` or another process has staged. Raises as `commit`."""
        done: list[tuple[Any, Any]] = []
        saved: tuple[Any, Any] | None = None
        try:
            names = [*names, *self._twins.beside(names)]
            for live, staged, scratch in (views for name in names for views in self._buffers.slices(name)):
                saved = None
                scratch[...] = live
                saved = live, scratch  # from here on the scratch has the old bytes of this slice
                live[...] = staged
                staged[...] = scratch
                done.append((live, staged))
            self._fill_slots()
            self._check_addresses()
        except BaseException as error:
            self._undo([*done, saved] if saved else done, error)
            raise

    def open_staged(self) -> Callable[[str], torch.Tensor]:
        """Allocate host memory for what another process sends, until `exchange`. Returns the staged tensor of a name."""
        self._buffers.open_in_host_memory()
        return self._buffers.place

    def exchange_with(self, staged: torch.Tensor, names: Sequence[str]) -> None:
        """`exchange` with what another process has staged in [bytes] uint8."""
        self._buffers.use(staged)
        try:
            self.exchange(names)
        finally:
            self._buffers.close()

    def _undo(self, done: list[tuple[Any, Any]], error: BaseException) -> None:
        try:
            for live, old in done:
                live[...] = old
            self._fill_slots()
        except BaseException as failure:
            self.torn = True
            raise WeightsTorn(f"undoing a refresh that failed with {error!r} failed as well: {failure!r}") from error

    def _fill_slots(self) -> None:
        if self._streamed is not None:
            self._streamed.ring.fill()

    def _close_staging(self) -> None:
        self._staging = None
        self._buffers.close()

    @property
    def digest(self) -> str:
        """`manifest_digest` of all tensors as committed."""
        return self._digests.committed

    def live_manifest(self) -> list[TensorInfo]:
        """List all tensors in the model's dtype, with their digests as committed."""
        return self._digests.manifest()

    def live_digest(self) -> str:
        """Return the `manifest_digest` of the bytes in memory now. Reads every tensor."""
        *_, digest = self.read_live()
        assert digest is not None
        return digest

    def read_live(self) -> Iterator[str | None]:
        """Compute `live_digest` in small portions; see `Digests.read_live`. Raises ValueError while the weights are asleep."""
        if self._resident.asleep and not self._memory.is_host:
            raise ValueError("the weights are asleep, so their digest cannot be computed: wake them first")
        return self._digests.read_live()

    def _check_addresses(self) -> None:
        for name, tensor in self._all.items():
            assert tensor.data_ptr() == self._addresses[name], f"{name} has another storage than at the start"
        if self._streamed is not None:
            self._streamed.check()


def unstaged(info: TensorInfo, target: str | None) -> StagedTensor:
    """Return a part of a payload that is read and written nowhere. target: None, or SKIPPED."""
    part = StagedTensor(info, getattr(torch, info.dtype), None, None)
    part.checked = target is None
    return part


def parts_of(
    manifest: Sequence[TensorInfo], targets: Sequence[str | None], destination: Callable[[str], torch.Tensor]
) -> list[StagedTensor]:
    """Return the parts of a payload of whole tensors. destination: returns the staged tensor of a name."""
    return [
        StagedTensor(info, getattr(torch, info.dtype), target, destination(target).view(-1))
        if target
        else unstaged(info, target)
        for info, target in zip(manifest, targets, strict=True)
    ]
