"""What compiles the Triton kernels: the supported versions of Triton, and the part of an arithmetic's name that says which one
compiles for which device. Both decide the order of sums within a program, and which exp and which product it calls."""

from __future__ import annotations

from typing import NamedTuple

import torch

SUPPORTED = ((3, 6), (3, 9))
"""oldest and newest minor version of Triton"""


class Version(NamedTuple):
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def triton_version() -> Version:
    """Return the version of Triton. Raises ImportError where there is none, or one that is not supported."""
    import triton

    found = Version(*map(int, triton.__version__.split(".")[:2]))
    if not SUPPORTED[0] <= found <= SUPPORTED[1]:
        oldest, newest = (Version(*each) for each in SUPPORTED)
        raise ImportError(f"Triton {triton.__version__} is not supported, {oldest} to {newest} are: install one of these")
    return found


def compiled_by(device: torch.device) -> str:
    """Name Triton's minor version and what it compiles for, such as "t3.9/sm90"."""
    if device.type == "cpu":
        return f"t{triton_version()}/interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"t{triton_version()}/sm{10 * major + minor}"
