"""The service's ends of all weight transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout.engine.values import TensorInfo
from rollout.transport.weights import Offer, cuda_ipc, delta, distributed, files, inline, offers, shm
from rollout.transport.weights.cuda_ipc import gpu_keys
from rollout.transport.weights.distributed import backends
from rollout.transport.weights.ends import Expected, LiveWeights, Payload
from rollout.transport.weights.shm import SegmentView, host_key

OPENED: dict[type[Offer], Callable[[Any, Expected], Payload]] = {
    offers.InlineOffer: inline.opened,
    offers.ShmOffer: shm.opened,
    offers.FilesOffer: files.opened,
    offers.CudaIpcOffer: cuda_ipc.opened,
    offers.DistributedOffer: distributed.opened,
    offers.DeltaOffer: delta.opened,
}


def capabilities(device: Any) -> tuple[str, ...]:
    """List the capabilities of a service for Welcome: `host_key`, `gpu_key` of each GPU, names of backends. device:
    torch.device of its model; None: a service without torch."""
    keys = [key] if (key := host_key()) is not None else []
    if device is not None:
        keys += backends(device)
        keys += gpu_keys() if device.type == "cuda" else []
    return tuple(keys)


def open_payload(
    offer: Offer,
    manifest: Sequence[TensorInfo],
    total: int,
    segment: SegmentView,
    device: Any = None,
    live: LiveWeights | None = None,
) -> Payload:
    """Open the service's end of an offer.

    Args:
        total: bytes of the payload.
        segment: keeps shared memory mapped between refreshes.
        device: torch.device of the model.
        live: the live weights, if this process has them.

    Raises SourceUnreachable if this end cannot read the source, InvalidRequest if it does not match the manifest, WrongBase if
    it is a change of other weights than the live ones."""
    return OPENED[type(offer)](offer, Expected(manifest, total, segment, device, live))
