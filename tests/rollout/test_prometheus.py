"""What Prometheus reads."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollout.config import InputError, TrackingConfig
from rollout.metrics import prometheus
from rollout.metrics.prometheus import MOST_CONNECTIONS, TOTALS, PrometheusSink, metric_name
from rollout.metrics.sinks import open_sinks
from rollout.metrics.tracker import Tracker
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import until
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


def half(sink: PrometheusSink, count: int) -> list[socket.socket]:
    """Connections that have sent half a request."""
    where = sink._server.server_address
    found = [socket.create_connection((where[0], where[1]), timeout=60) for _ in range(count)]
    for one in found:
        try:
            one.sendall(b"GET /met")
        except OSError:
            pass  # it had to go already
    return found


def ours() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_half_requests_hold_a_bounded_number_of_threads(sink: PrometheusSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes for one more, so whoever asks properly is always answered."""
    monkeypatch.setattr(prometheus, "CONNECTION_S", 1e6)
    connections = half(sink, 5 * MOST_CONNECTIONS)
    until(lambda: len(sink._server._open) == MOST_CONNECTIONS)
    assert ours() <= 2 * MOST_CONNECTIONS
    assert read(sink) == {}
    connections[0].settimeout(60)
    with suppress(ConnectionError):
        assert connections[0].recv(100) == b"", "it was ended"
    for one in connections:
        one.close()
    until(lambda: ours() == 0)


@pytest.mark.parametrize("reads", [True, False], ids=["half a request", "never reads"])
def test_a_connection_that_lasts_is_ended(sink: PrometheusSink, monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    monkeypatch.setattr(prometheus, "CONNECTION_S", 0.05)
    if not reads:  # 30 MB
        sink.write({f"engine/{'x' * 10_000}{i}": 1.0 for i in range(1000)})
    (one,) = half(sink, 1)
    if not reads:
        one.sendall(b"rics HTTP/1.0\r\n\r\n")
    until(lambda: ours() == 0)
    assert not sink._server._open
    one.close()


def test_totals_are_those_of_the_table() -> None:
    table = re.findall(r"^\| `([\w/]+)` \|[^|]*\| total \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert set(table) - {"loop/longest_turn_s"} == TOTALS  # which is a maximum


def test_fractions_have_one_suffix() -> None:
    rows = re.findall(r"^\| `([\w/]+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    ratios = {name for name, unit in rows if unit == "fraction"}
    assert len(ratios) > 12
    assert {name for name, _ in rows if name.endswith("_ratio")} == ratios
    assert not [name for name, _ in rows if re.search(r"_(share|frac|fraction|percent)$", name)]


def test_without_the_package_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InputError, match=r"pip install 'rl-rollout\[metrics\]'"):
        open_sinks(TrackingConfig(metrics_port=0))
