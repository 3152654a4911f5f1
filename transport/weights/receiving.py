"""The service's ends of all weight transports."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rollout.engine.values import TensorInfo
from rollout.transport.weights import Offer, offers
from rollout.transport.weights.capabilities import backends, gpu_keys
from rollout.transport.weights.ends import Expected, LiveWeights, Payload
from rollout.transport.weights.shm import SegmentView, host_key

OPENED: dict[type[Offer], str] = {
    offers.InlineOffer: "inline",
    offers.ShmOffer: "shm",
    offers.FilesOffer: "files",
    offers.CudaIpcOffer: "cuda_ipc",
    offers.DistributedOffer: "distributed",
    offers.DeltaOffer: "delta",
}
"""file of this folder whose `opened` opens an offer, imported with the first one of its kind"""


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
    way = import_module(f"rollout.transport.weights.{OPENED[type(offer)]}")
    payload: Payload = way.opened(offer, Expected(manifest, total, segment, device, live))
    return payload
