"""The OpenMP that torch runs on, for kernels of ours: a second one beside it would fight for the same cores."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def symbols(*names: str) -> tuple[int | None, ...]:
    """Addresses of functions that torch runs on: a preloaded library's (an OpenMP, say), else of libtorch_cpu and what it is
    linked with. libgomp, libomp and libiomp5 all offer GOMP's names. All None if one is missing."""
    libraries: list[str | None] = [None, *map(str, Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))]
    for library in libraries:
        try:
            handle = ctypes.CDLL(library)
            return tuple(ctypes.cast(getattr(handle, name), ctypes.c_void_p).value for name in names)
        except (OSError, AttributeError):
            continue
    return (None,) * len(names)
