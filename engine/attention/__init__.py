"""Attention over paged KV: the seam to transformers, and backends behind it."""

from __future__ import annotations

import logging

import torch

from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.attention.seam import Backend
from engine.native.build import NativeUnavailable

__all__ = ["Backend", "NativeAttention", "NativeUnavailable", "ReferenceAttention", "choose_backend"]

log = logging.getLogger("rollout.engine")


def choose_backend(name: str, device: torch.device, threads: int | None) -> Backend:
    """The backend of `EngineConfig.attention`. "auto" takes the native kernel where it can be built, and says why if not.

    Raises ValueError if "native" is asked for and cannot be had."""
    if name == "reference" or (name == "auto" and device.type != "cpu"):
        return ReferenceAttention()
    if device.type != "cpu":
        raise ValueError(f'attention="native" runs on the CPU only, not on {device}: use "auto"')
    try:
        return NativeAttention(threads)
    except NativeUnavailable as error:
        if name == "native":
            raise ValueError(f'attention="native": {error}; "auto" falls back to the torch reference') from error
        log.warning("attention in plain torch, which is slow: %s", error)
        return ReferenceAttention()
