"""What the README shows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def readme_example() -> str:
    """The first program, as printed."""
    found = re.findall(r"<!-- example -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(found) == 1
    return found[0]
