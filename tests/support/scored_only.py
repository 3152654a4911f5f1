"""Takes drawing again away from an engine, for negative controls: given tokens are scored alone."""

from __future__ import annotations

import pytest

from rollout.engine.scheduling import queue
from rollout.engine.scheduling.plan import SAMPLING
from rollout.engine.scheduling.sequence import Sequence


def score_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no plan of this process draw given tokens again."""
    record, names = queue.sampling_of, SAMPLING.names or ()

    def scored(seq: Sequence) -> tuple[object, ...]:
        return tuple(False if name == "redraw" else value for name, value in zip(names, record(seq), strict=True))

    monkeypatch.setattr(queue, "sampling_of", scored)
