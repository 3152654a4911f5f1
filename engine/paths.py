"""Where this software keeps what it made once: compiled kernels, converted models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`ROLLOUT_CACHE`, else ~/.cache/rollout. Not created here."""
    return Path(os.environ.get("ROLLOUT_CACHE") or Path.home() / ".cache" / "rollout")
