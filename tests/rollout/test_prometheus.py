"""What Prometheus reads."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.config import InputError, TrackingConfig
from rollout.metrics.prometheus import TOTALS, PrometheusSink, metric_name
from rollout.metrics.sinks import open_sinks
from rollout.metrics.tracker import Tracker
from tests.support.fake_engine import FakeEngine
from tests.support.wire import Bench, submit

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    pytest.importorskip("prometheus_client", reason="not installed: pip install -e '.[metrics]'")
    (sink,) = open_sinks(TrackingConfig(metrics_port=0))
    assert isinstance(sink, PrometheusSink)
    yield sink
    sink.close()


def read(sink: PrometheusSink) -> dict[str, float]:
    with urllib.request.urlopen(sink.address, timeout=60) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}


def test_the_last_row_is_served(sink: PrometheusSink) -> None:
    assert read(sink) == {}
    bench = Bench(FakeEngine(), tracker=Tracker(TrackingConfig(interval_s=1e-6), [sink]))
    bench.client().send(submit(n=3, max_tokens=4))
    bench.settle()
    bench.turn()
    row, served = bench.service.status()["metrics"], read(sink)
    assert served["rollout_samples_total"] == 3 and served["rollout_sample_tokens_total"] == 12
    totals = {metric_name(key) + "_total" * (key in TOTALS) for key in row}
    assert served.keys() == totals and len(totals) == len(row) > 5


def test_it_is_loopback_and_says_when_it_cannot_be(sink: PrometheusSink) -> None:
    assert sink.address.startswith("http://127.0.0.1:")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="metrics_port"):
        PrometheusSink("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ValueError, match="metrics_port=70000"):
        TrackingConfig(metrics_port=70_000)


def test_totals_are_those_of_the_table() -> None:
    table = re.findall(r"^\| `([\w/]+)` \|[^|]*\| total \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert set(table) - {"loop/longest_turn_s"} == TOTALS  # which is a maximum


def test_without_the_package_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[metrics\]'"):
        open_sinks(TrackingConfig(metrics_port=0))
