"""Weight transports: how the tensors of a refresh reach the service. The messages (Begin, Commit …) are the same for all.

    trainer's end                            service's end
    ─────────────                            ─────────────
    transports(host)[via].offer_tensors → Sender
    Sender.offer   where the bytes are  ──→  open_payload(offer, manifest) → Payload
    Sender.before_commit, after_commit  ──→  Payload.read(memory) → staging

    inline     messages, any host                                     rollout.transport.weights.inline
    shm        shared memory: one host, one user                      rollout.transport.weights.shm
    files      a folder of safetensors that both ends can read        rollout.transport.weights.files
    cuda_ipc   the trainer's memory on a GPU that both ends see       rollout.transport.weights.cuda_ipc
    gloo, nccl torch.distributed, any host                            rollout.transport.weights.distributed
    delta      changes in messages, any host                          rollout.transport.weights.delta

Another transport is one file with both ends (an offer, a WeightTransport with its Sender, a Payload:
`rollout.transport.weights.ends`) and a line each in `Via`, `Offer` and `transports` below. The payload is the same for all: the
bytes of the tensors, in the manifest's order. Nothing here imports torch before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rollout.engine.values import TensorInfo
from rollout.transport.weights.automatic import Automatic
from rollout.transport.weights.cuda_ipc import CudaIpc, CudaIpcOffer, gpu_keys
from rollout.transport.weights.delta import Delta, DeltaOffer
from rollout.transport.weights.distributed import DistributedOffer, Gloo, Nccl, backends
from rollout.transport.weights.ends import Channel, Expected, LiveWeights, Payload, Sender, WeightTransport
from rollout.transport.weights.files import Files, FilesOffer
from rollout.transport.weights.inline import Inline, InlineOffer
from rollout.transport.weights.shm import SegmentView, Shm, ShmOffer, host_key

__all__ = ["Channel", "Offer", "Payload", "Sender", "Via", "WeightTransport", "capabilities", "open_payload", "transports"]

Via = Literal["auto", "shm", "inline", "files", "cuda_ipc", "gloo", "nccl", "delta"]
"""names of the transports; "auto": see `rollout.transport.weights.automatic`"""
Offer = InlineOffer | ShmOffer | FilesOffer | CudaIpcOffer | DistributedOffer | DeltaOffer
"""offers in Begin"""


def transports(host: str) -> dict[str, WeightTransport]:
    """Make the trainer's ends of all transports, by their names. host: an address of this machine that the service can reach,
    for torch.distributed."""
    files, cuda_ipc, shm, inline = Files(), CudaIpc(), Shm(), Inline()
    automatic = Automatic(files, on_gpus=[cuda_ipc], shm=shm, inline=inline)
    return {each.via: each for each in (automatic, shm, inline, files, cuda_ipc, Gloo(host), Nccl(host), Delta(automatic))}


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
    return offer.open(Expected(manifest, total, segment, device, live))
