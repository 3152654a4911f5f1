"""Attention over paged KV: the seam to transformers, and backends behind it."""

from __future__ import annotations

import logging

import torch

from engine.attention.paged_triton import Capacity, TritonAttention, TritonUnavailable
from engine.attention.reference import ReferenceAttention
from engine.attention.seam import Backend
from engine.cpu.attention import NativeAttention
from engine.cpu.build import NativeUnavailable

__all__ = [
    "Backend", "Capacity", "NativeAttention", "NativeUnavailable", "ReferenceAttention", "TritonAttention", "TritonUnavailable",
    "choose_backend",
]  # fmt: skip

log = logging.getLogger("rollout.engine")


def choose_backend(name: str, device: torch.device, threads: int | None, capacity: Capacity, isa: str | None = None) -> Backend:
    """The backend of `EngineConfig.attention`. "auto" takes the device's fast one where it can be had, and says why if not.
    isa: of `engine.cpu.isa`, "torch" = no kernel of ours, None = the best that the CPU has.

    Raises ValueError if a backend is asked for by name and cannot be had."""
    kind = {"auto": "native" if device.type == "cpu" else "triton"}.get(name, name)
    if kind == "native" and device.type != "cpu":
        raise ValueError(f'attention="native" runs on the CPU only, not on {device}: use "auto"')
    if kind == "reference":
        return ReferenceAttention()
    if kind == "native" and isa == "torch":
        if name == kind:
            raise ValueError(
                'attention="native": with isa="torch" there are no kernels; attention="auto" takes the torch reference'
            )
        return ReferenceAttention()
    try:
        return NativeAttention(threads, isa) if kind == "native" else TritonAttention(device, capacity)
    except (NativeUnavailable, TritonUnavailable) as error:
        if name == kind:
            raise ValueError(f'attention="{name}": {error}; "auto" falls back to the torch reference') from error
        log.warning("attention in plain torch, which is slow: %s", error)
        return ReferenceAttention()
