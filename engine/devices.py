"""Attention over paged KV: the seam to transformers, and backends behind it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine.cpu.attention import NativeAttention
from engine.cpu.build import NativeUnavailable
from engine.cuda.attention import Capacity, TritonAttention, TritonUnavailable
from engine.forward.attention import Backend
from engine.forward.reference import ReferenceAttention

__all__ = [
    "Backend", "CannotAttend", "Capacity", "NativeAttention", "NativeUnavailable", "ReferenceAttention", "TritonAttention",
    "TritonUnavailable", "choose_backend",
]  # fmt: skip

log = logging.getLogger("rollout.engine")


class CannotAttend(Exception):
    """A backend does not serve the shapes of a model; the message says which."""


def choose_backend(
    name: str,
    device: torch.device,
    threads: int | None,
    capacity: Capacity,
    isa: str | None = None,
    try_out: Callable[[Backend], None] = lambda backend: None,
) -> Backend:
    """The backend of `EngineConfig.attention`. "auto" takes the device's fast one where it can be had, and says why if not.
    isa: of `engine.cpu.isa`, "torch" = no kernel of ours, None = the best that the CPU has.

    `try_out` attends with a backend as the model will, and raises CannotAttend with the reason where it cannot.
    Raises ValueError if a backend is asked for by name and cannot be had, or cannot serve the model."""
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
        backend = NativeAttention(threads, isa) if kind == "native" else TritonAttention(device, capacity)
        try_out(backend)
        return backend
    except (NativeUnavailable, TritonUnavailable, CannotAttend) as error:
        if name == kind:
            raise ValueError(f'attention="{name}": {error}; "auto" falls back to the torch reference') from error
        log.warning("attention in plain torch, which is slow: %s", error)
        return ReferenceAttention()
