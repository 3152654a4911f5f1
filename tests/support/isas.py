"""Instruction sets as parameters of tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def best_first(names: Iterable[str]) -> list[Any]:
    """Return parameters: the best instruction set for the default tier, the others for the nightly one.

    `make test-arithmetic` runs each of them as the best of some machine."""
    best, *others = names
    return [best, *(pytest.param(name, marks=pytest.mark.long) for name in others)]
