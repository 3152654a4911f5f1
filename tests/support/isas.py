"""Instruction sets as parameters of tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def best_first(names: Iterable[str]) -> list[Any]:
    """Return parameters: the best instruction set for the default tier, the others for the nightly one; none of none.

    `make test-arithmetic` runs each of them as the best of some machine."""
    return [name if i == 0 else pytest.param(name, marks=pytest.mark.long) for i, name in enumerate(names)]
