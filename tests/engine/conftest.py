"""Models here are tiny: a second thread costs more than it brings, above all beside other processes."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
