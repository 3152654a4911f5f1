"""Finds torch's OpenMP library, so that our kernels use it: a second one would compete for the same cores."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def symbols(*names: str) -> tuple[int | None, ...]:
    """Return the addresses of functions that torch uses: from a preloaded library (for example an OpenMP) or from libtorch_cpu
    and its dependencies. libgomp, libomp and libiomp5 all export GOMP's names. All None if one is missing."""
    libraries: list[str | None] = [None, *map(str, Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))]
    for library in libraries:
        try:
            handle = ctypes.CDLL(library)
            return tuple(ctypes.cast(getattr(handle, name), ctypes.c_void_p).value for name in names)
        except (OSError, AttributeError):
            continue
    return (None,) * len(names)
