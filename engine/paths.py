"""Folders in which rollout caches compiled kernels and converted models. The build of a wheel imports it: the standard library
alone."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return `ROLLOUT_CACHE`, or ~/.cache/rollout. Does not create it."""
    return Path(os.environ.get("ROLLOUT_CACHE") or Path.home() / ".cache" / "rollout")
