"""Weight transports: how the tensors of a refresh reach the service. The messages (Begin, Commit …) are the same for all.

    trainer's end                            service's end
    ─────────────                            ─────────────
    sending.transports(host)[via].offer_tensors → Sender
    Sender.offer   where the bytes are  ──→  receiving.open_payload(offer, …) → Payload
    Sender.before_commit, after_commit  ──→  Payload.read(memory) → staging

    inline     messages, any host                                     rollout.transport.weights.inline
    shm        shared memory: one host, one user                      rollout.transport.weights.shm
    files      a folder of safetensors that both ends can read        rollout.transport.weights.files
    cuda_ipc   the trainer's memory on a GPU that both ends see       rollout.transport.weights.cuda_ipc
    gloo, nccl torch.distributed, any host                            rollout.transport.weights.distributed
    delta      changes in messages, any host                          rollout.transport.weights.delta

Another transport is one file with both ends (a WeightTransport with its Sender, a Payload: `rollout.transport.weights.ends`),
its offer in `offers`, and a line each in `Via` below, `sending.transports` and `receiving.OPENED`. The payload is the same for
all: the bytes of the tensors, in the manifest's order. Nothing here imports torch before it is used."""

from __future__ import annotations

from typing import Literal

from rollout.transport.weights.offers import Offer

__all__ = ["Offer", "Via"]

Via = Literal["auto", "shm", "inline", "files", "cuda_ipc", "gloo", "nccl", "delta"]
"""names of the transports; "auto": see `rollout.transport.weights.automatic`"""
