"""Weights: the one writer of the parameters and of their version. A refresh is a transaction.

    staging = weights.begin(manifest)    names, shapes, dtypes and version are checked; nothing is written yet
    staging.feed(source) …               see `engine.weights.staging`; generation goes on
    weights.commit(staging)              between two steps: live ⇄ staged, then the version; or nothing at all

    live       [parameters of the module]   same storage, whatever is refreshed; another one after `release_memory`
    staged     ┌ embed ──────┬ q ──┬ k ─┬ … ┐   one buffer in the model's dtypes, each tensor at a multiple of 64 bytes;
               the first refresh allocates it, all others use it again
    scratch    one slice, where the live tensors are

The exchange goes slice by slice: scratch ← live, live ← staged, staged ← scratch. So the staging buffer ends up with the old
weights, and a failure at tensor k restores tensors 0 … k from there: undo costs a slice of memory, whatever the model's size.

After a sleep that dropped the weights there is nothing to undo: what comes is staged where it is live at once, without a second
copy, and no step runs before all of it has come and was checked (`dropped`).

Of a parameter in a layer that is offloaded (`engine.weights.offload`), "live" is the master in host memory; the slots on the
device are filled from the masters again, inside the same transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from engine.memory import DeviceMemory, HostMemory, host_buffer, placed, side_by_side, storage_bytes
from engine.types import Adapter, Served, TensorInfo
from engine.weights.device_staging import DeviceStaging
from engine.weights.inventory import Digests, Inventory
from engine.weights.lora import AdapterBase, AdapterMerge
from engine.weights.offload import OffloadedModel
from engine.weights.resident import ResidentTensors
from engine.weights.staging import SLICE_BYTES, StagedTensor, Staging
from engine.weights.tensors import InvalidWeights
from engine.weights.versions import check_named, next_version

log = logging.getLogger("rollout.engine")

DEVICE_SLICE_BYTES = 64 << 20
"""of the exchange with tensors on a device: a copy over its bus costs some ten microseconds to begin"""


class WeightsTorn(RuntimeError):
    """Undoing a failed refresh failed: the weights are of no version any more, and nothing may be sampled from them."""


class Weights:
    """Parameters and persistent buffers of a module. `module=None` (a model without tensors) only has a version. `streamed`:
    the offload of its layers, if it is on. `lay_out`: called when tensors have moved, lays some of them side by side."""

    def __init__(
        self,
        module: torch.nn.Module | None,
        streamed: OffloadedModel | None = None,
        lay_out: Callable[[], None] = lambda: None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """memory: where the module's tensors lie; None = host memory."""
        self._memory = HostMemory() if memory is None else memory
        self.version = 0
        self.before = Served()
        """the newest that were served before a restart"""
        self.torn = False
        self._module = module
        self._streamed = streamed
        self._lay_out = lay_out
        self.inventory = self.own = Inventory(module, {} if streamed is None else streamed.masters)
        self._digests = Digests(self.inventory, self._memory.hashes)
        self.base = AdapterBase(self.inventory, self._digests)
        self._tensors = self.inventory.tensors
        here = {name: tensor for name, tensor in self._tensors.items() if name not in self.inventory.offloaded}
        self._resident = ResidentTensors(here, self._memory)
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        starts, self._size = side_by_side(self._tensors.values())
        self._places = dict(zip(self._tensors, starts, strict=True))
        """first byte of each in the staging buffer"""
        self._buffer: torch.Tensor | None = None
        """kept from one refresh to the next"""
        self._staged_in: torch.Tensor | None = None
        """of the staging that is open: the buffer, or a room on the device for as long as that lasts"""
        self._scratch = torch.empty(SLICE_BYTES, dtype=torch.uint8)
        self._device_scratch: torch.Tensor | None = None
        self._staging: Staging | None = None
        self.dropped = False
        """they were given away and hold nothing until a whole refresh has come"""

    @property
    def names(self) -> int:
        """How many names a manifest may list: those of tied parameters all count."""
        return len(self.inventory.first_name)

    @property
    def staging(self) -> bool:
        """Whether a refresh is being staged."""
        return self._staging is not None

    @property
    def resident_bytes(self) -> int:
        """Bytes of the parameters on the model's device, slots included."""
        asleep = self._module is None or (self._resident.stays and self._resident.asleep)
        return 0 if asleep or self._module is None else storage_bytes(self._module.parameters())

    @property
    def stays(self) -> bool:
        """Parameters have the same addresses after a sleep."""
        return self._resident.stays and self._streamed is None

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the decoder layers that live in host memory."""
        return 0 if self._streamed is None else self._streamed.offloaded_bytes

    def release_memory(self, keep: bool) -> None:
        """Give the memory of the tensors back, and that for staging, until `restore_memory`. `keep`: what they hold moves to
        host memory, where tensors of the CPU are already; otherwise it is gone."""
        assert self._staging is None
        self._device_scratch = None
        if not keep or self._memory.is_host:
            self._buffer = None
        if not keep or not self._memory.is_host:
            self._digests.learn(self._tensors)  # while they can be read
        if not keep:
            self.base.clear()
        if self._streamed is not None:
            self._streamed.release_memory(keep)
        self._resident.release(keep, self._host_buffer)
        self.dropped |= not keep

    def restore_memory(self) -> None:
        """Undo `release_memory`. The tensors lie elsewhere than before, unless they stay (`stays`)."""
        self._resident.restore()
        if self._streamed is not None:
            self._streamed.restore_memory()
        self._lay_out()
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}

    def begin(
        self,
        manifest: Sequence[TensorInfo],
        *,
        version: int | None = None,
        partial: bool = False,
        adapter: Adapter | None = None,
        on_device: bool = False,
    ) -> Staging:
        """Check a manifest and open the staging for it. `version` must be above all there were; None = the next. `partial`:
        tensors that are not in the manifest stay as they are. `adapter`: the weights are to be base + adapter, and the manifest
        lists what it is made of. `on_device`: the payload lies where the model does; it is staged there if there is room.

        Raises InvalidWeights, WrongBase; RuntimeError while another staging is open."""
        if self.torn:
            raise WeightsTorn("the weights are torn; restart the engine")
        if self._staging is not None:
            raise RuntimeError("another refresh is being staged; close it first")
        version = next_version(self.version, self.before, version)
        if self.dropped and (partial or adapter is not None):
            raise InvalidWeights("the weights were dropped by sleep(level=2): a refresh of all tensors must come first")
        targets = self.inventory.targets(manifest, partial) if adapter is None else []
        if partial:
            self._digests.learn(self._tensors.keys() - set(targets))  # at the exchange it would lengthen the pause
        on_device = on_device and adapter is None and self._streamed is None and self._memory.hashes is not None
        on_device = self._take_room(on_device)
        merging = None if adapter is None else AdapterMerge(adapter, manifest, self.inventory, self.base, self._place)
        parts = parts_of(manifest, targets, self._destination) if merging is None else merging.parts
        if on_device:
            self._staging = DeviceStaging(version, manifest, parts, self._memory, self._close_staging)
        else:
            self._staging = Staging(version, manifest, parts, self._scratch.numpy(), self._close_staging, merging)
        return self._staging

    def _take_room(self, on_device: bool) -> bool:
        """Take the memory to stage in, on the device if that is wanted and there is room. Returns whether it is there. Weights
        that were dropped need none."""
        if self.dropped:
            return on_device
        self._staged_in = self._memory.room(self._size) if on_device else None
        if on_device and self._staged_in is None:
            log.info("refresh is staged in host memory, the device has no room mib=%.0f", self._size / 2**20)
        if self._staged_in is not None:
            return True
        self._staged_in = self._host_buffer()
        return False

    def _destination(self, name: str) -> torch.Tensor:
        """Return the tensor that staging writes: the staged twin, or the live one where that holds nothing to be kept."""
        return self._tensors[name].detach() if self.dropped else self._place(name)

    def _host_buffer(self) -> torch.Tensor:
        """Return the [bytes] uint8 to stage in, and to keep tensors in for a sleep; pinned beside a GPU."""
        if self._buffer is None:
            self._buffer = host_buffer(max(self._size, self._resident.size), pin=not self._memory.is_host)
        return self._buffer

    def commit(self, staging: Staging) -> None:
        """Exchange what is staged with what is live, then change the version. For the time between two steps.

        Raises what went wrong, after everything is as it was; WeightsTorn if that cannot be. Weights that were dropped stay
        so until all of this is done."""
        assert staging is self._staging and staging.complete
        if staging.version == self.before.version:
            check_named(Served(staging.version, self._digests.with_others(staging.digests)), self.before)
        self._check_addresses()
        if self._streamed is not None:
            self._streamed.ring.settle()
        if self.dropped:
            self._fill_slots()
        else:
            self._exchange(staging)
        self.base.commit(staging.digests, staging.bases)
        self._digests.commit(staging.digests)
        self.dropped = False
        self.version = staging.version
        staging.close()

    def _exchange(self, staging: Staging) -> None:
        """Swap the staged tensors with the live ones, slice by slice; all of them, or none."""
        done: list[tuple[Any, Any]] = []
        saved: tuple[Any, Any] | None = None
        try:
            for live, staged, scratch in (views for name in staging.names for views in self._slices(name)):
                saved = None
                scratch[...] = live
                saved = live, scratch  # from here on, whatever happens, the old bytes of this slice are in the scratch
                live[...] = staged
                staged[...] = scratch
                done.append((live, staged))
            self._fill_slots()
            self._check_addresses()
        except BaseException as error:
            self._undo([*done, saved] if saved else done, error)
            raise

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
        roomy, self._staging, self._staged_in = self._staged_in is not self._buffer, None, None
        if roomy:
            self._memory.trim()

    def _place(self, name: str) -> torch.Tensor:
        """Return the staged twin of a live tensor."""
        assert self._staged_in is not None
        return placed(self._staged_in, self._places[name], self._tensors[name])

    def _slices(self, name: str) -> Iterator[tuple[Any, Any, Any]]:
        """Cut a live tensor, its staged twin and the scratch into [slice] uint8 views. On the CPU they are numpy's, whose
        memcpy has no other threads to wait for."""
        scratch: Any
        live: Any = self._tensors[name].detach().view(-1).view(torch.uint8)
        staged: Any = self._place(name).view(-1).view(torch.uint8)
        if self._memory.is_host or name in self.inventory.offloaded:
            live, staged, scratch = live.numpy(), staged.numpy(), self._scratch.numpy()
        else:
            scratch = self._scratch_on_device()
        for start in range(0, len(live), len(scratch)):
            end = min(start + len(scratch), len(live))
            yield live[start:end], staged[start:end], scratch[: end - start]

    @property
    def digest(self) -> str:
        """`manifest_digest` of all tensors as they were committed; of those never refreshed, as they are."""
        return self._digests.committed

    def live_digest(self) -> str:
        """Take the `manifest_digest` of the bytes that lie there at the moment. Reads every tensor."""
        *_, digest = self.read_live()
        assert digest is not None
        return digest

    def read_live(self) -> Iterator[str | None]:
        """Take `live_digest` in small portions; see `Digests.read_live`. Raises ValueError while they cannot be read."""
        if self._resident.asleep and not self._memory.is_host:
            raise ValueError("the weights are asleep, and no digest of them can be taken: wake them first")
        return self._digests.read_live()

    def _scratch_on_device(self) -> torch.Tensor:
        if self._device_scratch is None:
            self._device_scratch = torch.empty(DEVICE_SLICE_BYTES, dtype=torch.uint8, device=self._memory.device)
        return self._device_scratch

    def _check_addresses(self) -> None:
        for name, tensor in self._tensors.items():
            assert tensor.data_ptr() == self._addresses[name], f"{name} has another storage than at the start"
        if self._streamed is not None:
            self._streamed.check()


def parts_of(
    manifest: Sequence[TensorInfo], targets: Sequence[str | None], destination: Callable[[str], torch.Tensor]
) -> list[StagedTensor]:
    """The parts of a payload of whole tensors; `destination`: of a target, where it is staged."""
    return [
        StagedTensor(info, getattr(torch, info.dtype), target, None if target is None else destination(target).view(-1))
        for info, target in zip(manifest, targets, strict=True)
    ]
