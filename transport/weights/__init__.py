"""How the tensors of a refresh travel. The messages around them (`transport.messages`: Begin, Commit …) are the same for all.

    trainer's end                            service's end
    ─────────────                            ─────────────
    ways(host)[via].offer_tensors → Sender
    Sender.offer   where the bytes are  ──→  open_payload(offer, manifest) → Payload
    Sender.before_commit, after_commit  ──→  Payload.read(memory) → staging

    inline     in messages, any host                                  transport.weights.inline
    shm        in memory that both ends see: one host, one user       transport.weights.shm
    files      in a folder of safetensors that both ends see          transport.weights.files
    cuda_ipc   in the trainer's memory on a GPU that both ends see    transport.weights.cuda_ipc
    gloo, nccl by torch.distributed, any host                         transport.weights.distributed
    delta      what has changed, in messages, any host                transport.weights.delta

A further way is one more file with both ends, an offer, a Way with its Sender and a Payload (`transport.weights.ends`), and a
line each in `Via`, `Offer` and `ways` below. The payload is always the same: the bytes of the tensors, one after the other as
the manifest lists them. Nothing here imports torch before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from engine.types import TensorInfo
from transport.weights.automatic import Automatic
from transport.weights.cuda_ipc import CudaIpc, CudaIpcOffer, gpu_keys
from transport.weights.delta import Delta, DeltaOffer
from transport.weights.distributed import DistributedOffer, Gloo, Nccl, backends
from transport.weights.ends import Channel, Expected, LiveWeights, Payload, Sender, WeightTransport
from transport.weights.files import Files, FilesOffer
from transport.weights.inline import Inline, InlineOffer
from transport.weights.shm import SegmentView, Shm, ShmOffer, host_key

__all__ = ["Channel", "Offer", "Payload", "Sender", "Via", "WeightTransport", "capabilities", "open_payload", "ways"]

Via = Literal["auto", "shm", "inline", "files", "cuda_ipc", "gloo", "nccl", "delta"]
"""what a trainer may name; "auto": see `transport.weights.automatic`"""
Offer = InlineOffer | ShmOffer | FilesOffer | CudaIpcOffer | DistributedOffer | DeltaOffer
"""what may stand in Begin"""


def ways(host: str) -> dict[str, WeightTransport]:
    """Make the trainer's ends of all ways, by the names of `Via`. `host`: an address of this machine that the service can
    reach, for torch.distributed."""
    files, cuda_ipc, shm, inline = Files(), CudaIpc(), Shm(), Inline()
    automatic = Automatic(files, on_gpus=[cuda_ipc], shm=shm, inline=inline)
    return {way.via: way for way in (automatic, shm, inline, files, cuda_ipc, Gloo(host), Nccl(host), Delta(automatic))}


def capabilities(device: Any) -> tuple[str, ...]:
    """List what a service says in Welcome of the ways that depend on where the two ends are: `host_key`, `gpu_key` of each GPU,
    names of backends. `device`: torch.device of its model; None: it is without torch."""
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
    """Open the service's end of what a trainer offers. `total`: bytes of the payload. `segment`: keeps shared memory mapped
    from one refresh to the next. `device`: torch.device of the model. `live`: the weights that serve, where they are here.

    Raises SourceUnreachable where this end does not see what is offered, InvalidRequest where it is not the manifest's,
    WrongBase where it is against other weights than the live ones."""
    return offer.open(Expected(manifest, total, segment, device, live))
