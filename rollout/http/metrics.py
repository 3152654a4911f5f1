"""`GET /metrics`: the service's status and this process's requests, under the metric names of vLLM, which the autoscaling of
prime-rl reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rollout.http.endpoints import Handler
from rollout.http.upstream import Upstream
from rollout.metrics.histogram import SECONDS, TOKENS, Buckets, Histogram

Line = tuple[str, str, str, dict[str, str], float]
"""(name, kind, help, additional labels, value)"""


class RequestMeter:
    """Durations and lengths of the prompts and samples of this process's requests. For one event loop."""

    def __init__(self) -> None:
        self.first_token_s, self.sample_s = Histogram(SECONDS), Histogram(SECONDS)
        self.prompt_tokens, self.sample_tokens = Histogram(TOKENS), Histogram(TOKENS)
        self.turns = dict.fromkeys(("exact", "template", "unknown"), 0)
        """requests that continue a conversation, by how the ids of its last turn were found"""

    def lines(self) -> Iterator[Line]:
        """Yield the counters of this process."""
        about = "chats with an earlier turn, by its ids: exact, or encoded again and why"
        for ids, count in self.turns.items():
            yield "rollout:http_turns_total", "counter", about, {"ids": ids}, count

    def histograms(self) -> dict[str, tuple[str, Buckets]]:
        """Return help and counts by name."""
        return {
            "vllm:time_to_first_token_seconds": (
                "from a streamed prompt to its first tokens, which arrive in groups of stream_every",
                self.first_token_s.buckets(),
            ),
            "vllm:e2e_request_latency_seconds": ("from a group's arrival to a sample's end", self.sample_s.buckets()),
            "vllm:request_prompt_tokens": ("tokens of a prompt", self.prompt_tokens.buckets()),
            "vllm:request_generation_tokens": ("tokens of a sample", self.sample_tokens.buckets()),
        }


def metrics_handler(upstream: Upstream, meter: RequestMeter, name: str) -> Handler:
    """Make the handler. name: of the model, the label `model_name`."""

    async def metrics(request: Request) -> Response:
        """Report metrics for Prometheus, under the names of vLLM."""
        text = exposition([*lines(await upstream.status()), *meter.lines()], meter.histograms(), name)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return metrics


def lines(status: dict[str, Any]) -> Iterator[Line]:
    """Yield the metrics of a status."""
    kv = status.get("kv", {})
    size, total, used = kv.get("block_size", 0), kv.get("device_blocks", 0), kv.get("device_used", 0)
    waiting = status.get("waiting", 0)
    yield "vllm:num_requests_running", "gauge", "running sequences", {}, status.get("running", 0)
    yield "vllm:num_requests_waiting", "gauge", "waiting sequences", {}, waiting
    yield "vllm:num_requests_waiting_by_reason", "gauge", "waiting sequences", {"reason": "capacity"}, waiting
    yield "vllm:kv_cache_usage_perc", "gauge", "fraction of the KV pool in use, 0 to 1", {}, used / total if total else 0.0
    preempted = status.get("offloads", 0) + status.get("recompute_preemptions", 0)
    yield "vllm:num_preemptions_total", "counter", "preemptions, by offload and by recompute", {}, preempted
    hits, prefilled = status.get("prefix_hit_tokens", 0), status.get("prefill_tokens", 0)
    yield "vllm:prefix_cache_hits_total", "counter", "prompt tokens reused from the prefix index", {}, hits
    yield "vllm:prefix_cache_queries_total", "counter", "prompt tokens looked up in the prefix index", {}, hits + prefilled
    yield "vllm:prompt_tokens_total", "counter", "prompt tokens, reused ones included", {}, hits + prefilled
    yield "vllm:generation_tokens_total", "counter", "sampled tokens", {}, status.get("generated_tokens", 0)
    labels = {"block_size": str(size), "num_gpu_blocks": str(total), "kv_cache_size_tokens": str(size * total)}
    yield "vllm:cache_config_info", "gauge", "size of the KV pool, as labels", labels, 1


def exposition(metrics: Iterable[Line], histograms: Mapping[str, tuple[str, Buckets]], model: str) -> str:
    """Write metrics in Prometheus' text format. The gateway reports one engine, `engine="0"`."""
    labels = {"model_name": model, "engine": "0"}
    written, begun = [], ""
    for name, kind, about, more, value in metrics:
        written += [head(name, kind, about)] if name != begun else []
        written.append(sample(name, labels | more, value))
        begun = name
    for name, (about, buckets) in histograms.items():
        written.append(head(name, "histogram", about))
        for bound, count in buckets.counts:
            written.append(sample(f"{name}_bucket", labels | {"le": "+Inf" if bound == float("inf") else f"{bound:g}"}, count))
        written += [sample(f"{name}_sum", labels, buckets.total), sample(f"{name}_count", labels, buckets.counts[-1][1])]
    return "".join(written)


def head(name: str, kind: str, about: str) -> str:
    return f"# HELP {name} {about}\n# TYPE {name} {kind}\n"


def sample(name: str, labels: dict[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {float(value)!r}\n"


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
