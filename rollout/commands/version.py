"""`rollout --version`: what computes samples here. Imports no torch."""

from __future__ import annotations

import platform
from importlib import metadata

from rollout import __version__
from rollout.engine.cpu import build, isa

PACKAGES = ("torch", "transformers")


def lines() -> list[str]:
    """Return the versions of the package, Python, torch and transformers, and the kernels of this CPU, best first."""
    kernels = [f"{name} ({state_of(name)})" for name in isa.here()]
    best = isa.best()
    return [
        f"rollout {__version__}",
        f"Python {platform.python_version()}",
        *(f"{name} {installed(name)}" for name in PACKAGES),
        f"kernels {', '.join(kernels)}",
        f"arithmetic {isa.isa_of(best).arithmetic} (of {best})",
    ]


def state_of(kernels: str) -> str:
    """Say where the kernels of an instruction set come from."""
    if kernels in build.installed_kernels():
        return "installed"
    try:
        build.find_compiler()
    except build.NativeUnavailable:
        return "no compiler"
    return "compiled" if build.is_built(kernels) else "compiled at first use"


def installed(package: str) -> str:
    """Return the version of a package without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"
