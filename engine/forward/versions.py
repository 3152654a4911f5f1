"""The versions of torch and transformers that the engine is tested with; others are refused before a model is loaded. Those of
Triton are in `rollout.engine.cuda.compiled`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

SUPPORTED: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 11), (2, 13)),
    "transformers": ((5, 17), (5, 24)),
}
"""oldest and newest minor version; `python -m tests.support.version_ends` tests both ends"""


def check_versions() -> None:
    """Raise ValueError for a version of torch or transformers that is not supported."""
    for name, (oldest, newest) in SUPPORTED.items():
        found = version(name)
        if not oldest <= tuple(map(int, found.split(".")[:2])) <= newest:
            known = " to ".join(".".join(map(str, each)) for each in (oldest, newest))
            raise ValueError(f"{name} {found} is not supported, {known} are: pip install '{requirement(name)}'")


def requirement(name: str) -> str:
    """Return the supported range as pip takes it, such as "torch>=2.11,<2.14"."""
    (*oldest,), (major, minor) = SUPPORTED[name]
    return f"{name}>={'.'.join(map(str, oldest))},<{major}.{minor + 1}"
