"""`GET /metrics`: the service's status under the metric names of vLLM, which prime-rl's autoscaling reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rollout.http.endpoints import Handler
from rollout.http.upstream import Upstream

Line = tuple[str, str, dict[str, str], float]
"""(name, kind, additional labels, value)"""


def metrics_handler(upstream: Upstream, name: str) -> Handler:
    """Make the handler. name: of the model, the label `model_name`."""

    async def metrics(request: Request) -> Response:
        text = exposition(lines(await upstream.status()), name)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return metrics


def lines(status: dict[str, Any]) -> Iterator[Line]:
    """Yield the metrics of a status."""
    kv = status.get("kv", {})
    size, total, used = kv.get("block_size", 0), kv.get("device_blocks", 0), kv.get("device_used", 0)
    waiting = status.get("waiting", 0)
    yield "vllm:num_requests_running", "gauge", {}, status.get("running", 0)
    yield "vllm:num_requests_waiting", "gauge", {}, waiting
    yield "vllm:num_requests_waiting_by_reason", "gauge", {"reason": "capacity"}, waiting
    yield "vllm:kv_cache_usage_perc", "gauge", {}, used / total if total else 0.0
    yield "vllm:num_preemptions_total", "counter", {}, status.get("offloads", 0) + status.get("recompute_preemptions", 0)
    hits, prefilled = status.get("prefix_hit_tokens", 0), status.get("prefill_tokens", 0)
    yield "vllm:prefix_cache_hits_total", "counter", {}, hits
    yield "vllm:prefix_cache_queries_total", "counter", {}, hits + prefilled
    yield "vllm:prompt_tokens_total", "counter", {}, hits + prefilled
    yield "vllm:generation_tokens_total", "counter", {}, status.get("generated_tokens", 0)
    labels = {"block_size": str(size), "num_gpu_blocks": str(total), "kv_cache_size_tokens": str(size * total)}
    yield "vllm:cache_config_info", "gauge", labels, 1


def exposition(metrics: Iterator[Line], model: str) -> str:
    """Write metrics in Prometheus' text format. The gateway reports one engine, `engine="0"`."""
    written = []
    for name, kind, more, value in metrics:
        labels = {"model_name": model, "engine": "0", **more}
        inside = ",".join(f'{label}="{escaped(text)}"' for label, text in labels.items())
        written.append(f"# TYPE {name} {kind}\n{name}{{{inside}}} {float(value)!r}\n")
    return "".join(written)


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
