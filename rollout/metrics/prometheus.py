"""Metrics for Prometheus: the last row, as text, at http://HOST:PORT/metrics. `prometheus_client` writes and serves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollout.config import InputError

TOTALS = frozenset(
    (
        "rollout/samples rollout/sample_tokens rollout/groups engine/steps engine/failed_steps engine/unused_draws "
        "engine/generated_tokens engine/prefill_tokens engine/recomputed_tokens engine/fork_saved_tokens engine/drafted_tokens "
        "engine/accepted_tokens engine/scored_tokens kv/kept_tokens kv/offloads "
        "kv/soft_resets kv/offloaded_blocks kv/restored_blocks kv/bytes_to_host kv/bytes_to_device kv/stall_s kv/failed_moves "
        "kv/prefix_hit_tokens weights/refreshes loop/stalled_s mismatch/audited_tokens mismatch/skipped_samples "
        "mismatch/audit_s fleet/deaths fleet/moved fleet/repeats fleet/hedged fleet/hedge_wins fleet/mismatch"
    ).split()
)
"""figures that only grow while the service lives: counters; all others are gauges"""


class PrometheusSink:
    """Serves `host` alone; nobody is asked for a key there, so anything but loopback shows the figures to whoever reaches it.

    Raises InputError where the port cannot be had, or the package is not installed."""

    name = "prometheus"

    def __init__(self, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise InputError(
                "metrics_port is set but prometheus_client is not installed: pip install -e '.[metrics]'"
            ) from error
        self._row: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise InputError(f"tracking.metrics_port {port} at {host}: {error.strerror}") from error
        self.address = f"http://{host}:{self._server.server_port}/metrics"

    def write(self, row: dict[str, float]) -> None:
        self._row = row

    def collect(self) -> Iterator[Any]:
        """Yield the families of the last row; for the thread that serves."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for key, value in self._row.items():
            family = CounterMetricFamily if key in TOTALS else GaugeMetricFamily
            yield family(metric_name(key), f"{key} of docs/metrics.md", value=value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metric_name(key: str) -> str:
    """Name a figure as Prometheus may call it: rollout/samples → rollout_samples, kv/host_used → rollout_kv_host_used."""
    flat = "".join(c if c.isalnum() and c.isascii() else "_" for c in key)
    return flat if flat.startswith("rollout_") else f"rollout_{flat}"
