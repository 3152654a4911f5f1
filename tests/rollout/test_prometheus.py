"""What Prometheus reads."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.config import InputError, TrackingConfig
from rollout.engine.values import Sample
from rollout.metrics import prometheus
from rollout.metrics.catalog import METRICS, TOTALS
from rollout.metrics.meters import SampleMeter
from rollout.metrics.prometheus import MOST_CONNECTIONS, PrometheusSink, metric_name
from rollout.metrics.sinks import open_sinks
from rollout.metrics.tracker import Tracker
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import until
from tests.support.wire import Bench, submit

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    pytest.importorskip("prometheus_client", reason="not installed: pip install 'rl-rollout[metrics]'")
    (sink,) = open_sinks(TrackingConfig(metrics_port=0), './models/a "policy"')
    assert isinstance(sink, PrometheusSink)
    yield sink
    sink.close()


def families(sink: PrometheusSink) -> dict[str, Any]:
    """What Prometheus' own parser finds."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(sink.address, timeout=60) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def read(sink: PrometheusSink) -> dict[str, float]:
    """The values of counters and gauges."""
    samples = [one for family in families(sink).values() if family.type != "histogram" for one in family.samples]
    return {one.name: one.value for one in samples}


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
    assert families(sink)["rollout_length_tokens"].samples[-1].value == 12, "the sum of the lengths"


def test_each_family_says_what_it_is(sink: PrometheusSink) -> None:
    row = {name: 1.0 for name, metric in METRICS.items() if metric.over != "histogram"}
    meter = SampleMeter(30.0)
    sink.histograms = meter.histograms()
    sink.write(row)
    served = families(sink)
    assert len(served) == len(METRICS) > 70
    kinds = {"total": "counter", "histogram": "histogram"}
    for key, metric in METRICS.items():
        family = served[metric_name(key)]
        assert family.type == kinds.get(metric.over, "gauge") and family.documentation == metric.help
        assert {one.labels["model_name"] for one in family.samples} == {'./models/a "policy"'}
    assert "`" not in "".join(family.documentation for family in served.values())


def test_histograms_count_samples_that_ended_by_themselves(sink: PrometheusSink) -> None:
    meter = SampleMeter(30.0)
    ended = [("stop", 3, 0.02), ("length", 5, 2.0), ("aborted", 7, 9.0), ("length", 10**6, 1e9)]
    for reason, tokens, seconds in ended:
        sample = Sample(
            group_id="g",
            index=0,
            token_ids=np.zeros(min(tokens, 1 << 18), np.int32),
            logprobs=np.zeros(min(tokens, 1 << 18), np.float32),
            finish_reason=reason,  # type: ignore[arg-type]
            weight_versions=[(0, 0)],
            prompt_tokens=4,
            seconds=seconds,
        )
        meter.add([sample], 0, now=0.0)
    sink.histograms = meter.histograms()
    served = families(sink)

    def counts(name: str) -> dict[str, float]:
        return {one.labels.get("le", one.name.rsplit("_", 1)[1]): one.value for one in served[name].samples}

    seconds, lengths = counts("rollout_sample_seconds"), counts("rollout_length_tokens")
    assert [seconds[le] for le in ("0.01", "0.03", "1", "3", "3000", "+Inf", "count")] == [0, 1, 1, 2, 2, 3, 3]
    assert seconds["sum"] == 0.02 + 2.0 + 1e9 and lengths["sum"] == 3 + 5 + (1 << 18)
    assert [lengths[le] for le in ("2", "4", "8", "131072", "+Inf")] == [0, 1, 2, 2, 3]
    assert counts("rollout_prompt_tokens")["4"] == 3, "a bound belongs to its bucket"


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


def test_the_table_in_the_docs_is_the_one_in_the_code() -> None:
    written = [line for line in (DOCS / "metrics.md").read_text().splitlines() if line.startswith("| `")]
    bar = "\\|"
    assert written == [
        f"| `{name}` | {metric.unit} | {metric.over} | {metric.meaning.replace('|', bar)} |" for name, metric in METRICS.items()
    ]
    assert all(metric.unit and metric.meaning for metric in METRICS.values())


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
