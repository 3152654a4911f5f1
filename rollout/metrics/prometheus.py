"""Metrics for Prometheus: the last row and the histograms, as text, at http://HOST:PORT/metrics. `prometheus_client` writes it.

Its own server has a thread for each connection, for as long as that lasts: a peer that never ends its request, or never reads
the answer, would keep both for ever. Ours bounds how many there are, and for how long."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Any

from rollout.config import InputError
from rollout.metrics.catalog import METRICS, TOTALS
from rollout.metrics.histogram import Histograms

MOST_CONNECTIONS = 16
"""for one more the oldest is ended"""
CONNECTION_S = 5.0
"""from the first byte of a request to the last one of its answer"""
TEND_S = 0.5
LABELS = ("model_name",)


class BoundedServer(socketserver.ThreadingTCPServer):
    """A thread for each connection, MOST_CONNECTIONS of them, each for CONNECTION_S at most."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 32

    def __init__(self, host: str, port: int, handler: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[socket.socket, float] = {}
        """since when, the oldest first"""
        self._lock = threading.Lock()
        super().__init__((host, port), handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for a connection; those that were ended before are there until their threads have seen it."""
        with self._lock:
            over = len(self._open) - MOST_CONNECTIONS + 1
            for oldest in list(self._open)[: max(0, over)]:
                _end(oldest)
            if over > MOST_CONNECTIONS:
                return False
            self._open[request] = time.monotonic()
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End what lasts too long; called every TEND_S."""
        with self._lock:
            late = time.monotonic() - CONNECTION_S
            for request in [request for request, since in self._open.items() if since < late]:
                _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that has ended before its answer."""


def _end(connection: socket.socket) -> None:
    """Wake the thread of a connection up: it reads its end, or cannot write on."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended already


class PrometheusSink:
    """Serves on `host` only, without keys: except on loopback, every process that reaches this address can read the figures.

    Raises InputError if the port is not available, or the package is not installed."""

    name = "prometheus"

    def __init__(self, host: str, port: int, model: str = "") -> None:
        try:
            from prometheus_client import CollectorRegistry, MetricsHandler
        except ImportError as error:
            raise InputError(
                "metrics_port is set but prometheus_client is not installed: pip install 'rl-rollout[metrics]'"
            ) from error
        self._model = model
        self._row: dict[str, float] = {}
        self.histograms: Histograms = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = BoundedServer(host, port, MetricsHandler.factory(registry))
        except OSError as error:
            raise InputError(f"tracking.metrics_port {port} at {host}: {error.strerror}") from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(TEND_S,), name="rollout-prometheus", daemon=True
        )
        self._thread.start()

    def write(self, row: dict[str, float]) -> None:
        self._row = row

    def collect(self) -> Iterator[Any]:
        """Yield the families of the last row; for the thread that serves."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for key, value in self._row.items():
            kind = CounterMetricFamily if key in TOTALS else GaugeMetricFamily
            family = kind(metric_name(key), help_of(key), labels=LABELS)
            family.add_metric([self._model], value)
            yield family
        for key, buckets in self.histograms.items():
            family = HistogramMetricFamily(metric_name(key), help_of(key), labels=LABELS)
            bounds = [("+Inf" if bound == float("inf") else f"{bound:g}", count) for bound, count in buckets.counts]
            family.add_metric([self._model], bounds, sum_value=buckets.total)
            yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def help_of(key: str) -> str:
    return METRICS[key].help if key in METRICS else key


def metric_name(key: str) -> str:
    """Name a figure as Prometheus may call it: rollout/samples → rollout_samples, kv/offloads → rollout_kv_offloads."""
    flat = "".join(c if c.isalnum() and c.isascii() else "_" for c in key)
    return flat if flat.startswith("rollout_") else f"rollout_{flat}"
