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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from engine.memory import HostMemory, Memory, host_buffer, placed, side_by_side, storage_bytes
from engine.types import Adapter, TensorInfo
from engine.weights.inventory import Digests, Inventory
from engine.weights.lora import Base, Merging
from engine.weights.offload import Streamed
from engine.weights.staging import SLICE_BYTES, Part, Staging
from engine.weights.tensors import InvalidWeights

VERSION_LIMIT = 2**63
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
        streamed: Streamed | None = None,
        lay_out: Callable[[], None] = lambda: None,
        memory: Memory | None = None,
    ) -> None:
        """memory: where the module's tensors lie; None = host memory."""
        self._memory = HostMemory() if memory is None else memory
        self.version = 0
        self.torn = False
        self._module = module
        self._streamed = streamed
        self._lay_out = lay_out
        self.inventory = Inventory(module, {} if streamed is None else streamed.masters)
        self._digests = Digests(self.inventory)
        self.base = Base(self.inventory, self._digests)
        self._tensors = self.inventory.tensors
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        starts, self._size = side_by_side(self._tensors.values())
        self._places = dict(zip(self._tensors, starts, strict=True))
        """first byte of each in the staging buffer"""
        self._buffer: torch.Tensor | None = None
        self._scratch = torch.empty(SLICE_BYTES, dtype=torch.uint8)
        self._device_scratch: torch.Tensor | None = None
        self._staging: Staging | None = None
        self.dropped = False
        """they were given away and hold nothing until a whole refresh has come"""
        self._away: dict[str, torch.Tensor] = {}

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
        return 0 if self._module is None else storage_bytes(self._module.parameters())

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the decoder layers that live in host memory."""
        return 0 if self._streamed is None else self._streamed.offloaded_bytes

    def release_memory(self, keep: bool) -> None:
        """Give the memory of the tensors back, and that for staging, until `restore_memory`. `keep`: what they hold moves to
        host memory, where tensors of the CPU are already; otherwise it is gone."""
        assert self._staging is None and not self._away
        self._buffer = self._device_scratch = None
        if not keep:
            self._digests.learn(self._tensors)  # while they can be read
            self.base.clear()
        if self._streamed is not None:
            self._streamed.release_memory(keep)
        away = None if self._memory.is_host or not keep else self._allocate()
        for name, tensor in self._tensors.items():
            if name in self.inventory.offloaded:
                continue
            if not keep:
                self._away[name] = tensor.data.new_empty(0)
            elif away is not None:
                self._away[name] = placed(away, self._places[name], tensor).copy_(tensor.data)
        self.dropped |= not keep
        for name in self._away:
            self._tensors[name].data = self._tensors[name].data.new_empty(0)

    def restore_memory(self) -> None:
        """Undo `release_memory`. The tensors lie elsewhere than before."""
        dropped = {}
        for name, kept in self._away.items():
            tensor = self._tensors[name]
            if kept.numel():
                tensor.data = kept.to(tensor.device)
            elif not self._memory.is_host:
                tensor.data = tensor.data.new_zeros(self.inventory.shapes[name])
            else:
                dropped[name] = tensor.data.new_empty(self.inventory.shapes[name], device="meta")
        starts, size = side_by_side(dropped.values())
        memory = host_buffer(size, pin=False)  # in huge pages, as they were
        for (name, like), start in zip(dropped.items(), starts, strict=True):
            self._tensors[name].data = placed(memory, start, like)
        self._away.clear()
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
    ) -> Staging:
        """Check a manifest and open the staging for it. `version` must be above the live one; None = the next. `partial`:
        tensors that are not in the manifest stay as they are. `adapter`: the weights are to be base + adapter, and the manifest
        lists what it is made of.

        Raises InvalidWeights, WrongBase; RuntimeError while another staging is open."""
        if self.torn:
            raise WeightsTorn("the weights are torn; restart the engine")
        if self._staging is not None:
            raise RuntimeError("another refresh is being staged; close it first")
        version = self.version + 1 if version is None else version
        if not self.version < version < VERSION_LIMIT:
            raise InvalidWeights(f"version {version} is not above the live one, {self.version}: versions only grow")
        if self.dropped and (partial or adapter is not None):
            raise InvalidWeights("the weights were dropped by sleep(level=2): a refresh of all tensors must come first")
        targets = self.inventory.targets(manifest, partial) if adapter is None else []
        if partial:
            self._digests.learn(self._tensors.keys() - set(targets))  # at the exchange it would lengthen the pause
        if self._buffer is None and not self.dropped:
            self._buffer = self._allocate()
        merging = None if adapter is None else Merging(adapter, manifest, self.inventory, self.base, self._place)
        parts = self._parts(manifest, targets) if merging is None else merging.parts
        self._staging = Staging(version, manifest, parts, self._scratch.numpy(), self._close_staging, merging)
        return self._staging

    def _parts(self, manifest: Sequence[TensorInfo], targets: Sequence[str | None]) -> list[Part]:
        return [
            Part(info, getattr(torch, info.dtype), target, None if target is None else self._destination(target).view(-1))
            for info, target in zip(manifest, targets, strict=True)
        ]

    def _destination(self, name: str) -> torch.Tensor:
        """Return the tensor that staging writes: the staged twin, or the live one where that holds nothing to be kept."""
        return self._tensors[name].detach() if self.dropped else self._place(name)

    def _allocate(self) -> torch.Tensor:
        """Allocate [bytes] uint8 to stage in, pinned beside a GPU."""
        return host_buffer(self._size, pin=not self._memory.is_host)

    def commit(self, staging: Staging) -> None:
        """Exchange what is staged with what is live, then change the version. For the time between two steps.

        Raises what went wrong, after everything is as it was; WeightsTorn if that cannot be. Weights that were dropped stay
        so until all of this is done."""
        assert staging is self._staging and staging.complete
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
        self._staging = None

    def _place(self, name: str) -> torch.Tensor:
        """Return the staged twin of a live tensor."""
        assert self._buffer is not None
        return placed(self._buffer, self._places[name], self._tensors[name])

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
        """Take `live_digest` in small portions; see `Digests.read_live`."""
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
