"""What the tests' engines leave out at load: comparisons whose result is known from a model of the same shape."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.engine.cpu import isa, select_path
from rollout.engine.cpu.decoder import NativeDecoder
from rollout.engine.cpu.exact_modules import ExactLinear
from rollout.engine.engine import Engine
from tests.support import loads
from tests.support.tiny import tiny, tiny_engine

pytestmark = pytest.mark.skipif(bool(isa.lacking("avx2")), reason="no kernels for this CPU")


def compared(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Engine, int]:
    """Make an engine of a tiny model, and count the comparisons."""
    count, decide = list[str](), select_path.decide
    monkeypatch.setattr(select_path, "decide", lambda *given: (count.append(""), decide(*given))[1])
    return tiny_engine(model=tiny("llama", **{"head_dim": 32, **options})), len(count)


def test_models_of_one_shape_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights are no other shape; another width, and what a test has replaced, is compared."""
    monkeypatch.setattr(loads, "chosen", {})
    first, count = compared(monkeypatch)
    again, none = compared(monkeypatch, seed=1)
    assert (count, none) == (1, 0)
    ways = first.worker.kernels.path, again.worker.kernels.path
    assert ways[0] is not None and ways[1] is not None and ways[0][1:] == ways[1][1:]
    for engine in (first, again):
        assert isinstance(engine.model.decoder, NativeDecoder)
        assert type(engine.model.module.model.layers[1].mlp.up_proj) is ExactLinear
    for options, runs in (({"intermediate_size": 80}, NativeDecoder), ({"head_dim": 16}, type(None))):
        assert [compared(monkeypatch, **options, seed=seed)[1] for seed in (0, 1)] == [1, 0]
        assert isinstance(compared(monkeypatch, **options)[0].model.decoder, runs)
    monkeypatch.setattr(select_path, "why_not", lambda *_: "the results differ")
    for _ in range(2):
        broken, count = compared(monkeypatch, vocab_size=99)
        assert count == 1 and broken.model.decoder is None
