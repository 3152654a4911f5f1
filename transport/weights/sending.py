"""The trainer's ends of all weight transports."""

from __future__ import annotations

from rollout.transport.weights.automatic import Automatic
from rollout.transport.weights.cuda_ipc import CudaIpc
from rollout.transport.weights.delta import Delta
from rollout.transport.weights.distributed import Gloo, Nccl
from rollout.transport.weights.ends import WeightTransport
from rollout.transport.weights.files import Files
from rollout.transport.weights.inline import Inline
from rollout.transport.weights.shm import Shm


def transports(host: str) -> dict[str, WeightTransport]:
    """Make the trainer's ends of all transports, by their names. host: an address of this machine that the service can reach,
    for torch.distributed."""
    files, cuda_ipc, shm, inline = Files(), CudaIpc(), Shm(), Inline()
    automatic = Automatic(files, on_gpus=[cuda_ipc], shm=shm, inline=inline)
    return {each.via: each for each in (automatic, shm, inline, files, cuda_ipc, Gloo(host), Nccl(host), Delta(automatic))}
