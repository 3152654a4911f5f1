"""How another Python process is started: the only place that says so.

`python -m` looks for modules in the current folder first, so a file `numpy.py` or `types.py` there would be run in the place of
the library. `-P` keeps the current folder out of the path.
"""

from __future__ import annotations

import sys


def interpreter(python: str | None = None) -> list[str]:
    """Return the first words of a command that starts Python. python: that of another environment; None: this one."""
    return [python or sys.executable, "-P"]


def run_module(module: str, *words: object, python: str | None = None) -> list[str]:
    """Return the command that runs a module with arguments in another process."""
    return [*interpreter(python), "-m", module, *map(str, words)]
