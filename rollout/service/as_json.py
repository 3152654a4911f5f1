"""A status as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def to_json(status: dict[str, Any]) -> bytes:
    """Encode a status; numpy scalars and arrays become numbers and lists. Raises TypeError for anything else that is not
    JSON."""
    return json.dumps(status, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a status holds a {type(value).__name__}, which is not JSON")
