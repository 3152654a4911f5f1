"""Where metrics go: the console, a JSONL file, Prometheus, wandb. A sink takes a row and is closed; it knows of no service.

What is configured and cannot start raises InputError at once. What fails later is the Tracker's to bear.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, runtime_checkable

from rollout.config import InputError, TrackingConfig
from rollout.metrics.histogram import Histograms

TIME_AXIS = "engine/time_s"
TIME_INDEXED = ("rollout/*", "engine/*", "kv/*", "weights/*", "off_policy/*", "mismatch/*", "fleet/*", "loop/*")

FINISH_S = 10.0
"""longest that closing waits for wandb to upload; what is left stays in its folder, for `wandb sync`"""


class Sink(Protocol):
    name: str

    def write(self, row: dict[str, float]) -> None:
        """Write a row. May raise anything: the row is lost then, the service goes on."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class HistogramSink(Protocol):
    """A sink that shows histograms beside the rows."""

    histograms: Histograms
    """the last ones; the tracker sets them before it writes a row"""


def open_sinks(config: TrackingConfig, model: str = "") -> list[Sink]:
    """Start all sinks that are configured. Raises InputError with the reason.

    Args:
        model: its name, the label `model_name` in Prometheus."""
    sinks: list[Sink] = []
    try:
        if config.jsonl is not None:
            sinks.append(JsonlSink(config.jsonl))
        if config.metrics_port is not None:
            from rollout.metrics.prometheus import PrometheusSink

            sinks.append(PrometheusSink(config.metrics_host, config.metrics_port, model))
        if config.wandb_project is not None:
            sinks.append(WandbSink(config))
        if config.console:
            sinks.append(ConsoleSink(sys.stderr))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


class ConsoleSink:
    """One line an interval while samples run, one when the service becomes idle, and then none."""

    name = "console"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._idle_at: tuple[float, ...] | None = None
        """figures of the last line, if the service was idle then; None: it was not"""

    def write(self, row: dict[str, float]) -> None:
        busy = row.get("engine/running", 0) + row.get("engine/waiting", 0) > 0
        now = row["rollout/samples"], row.get("weights/version", 0.0)
        if not busy and now == self._idle_at:
            return
        self._idle_at = None if busy else now
        parts = [time.strftime("%H:%M:%S")]
        if "rollout/tokens_per_s" in row:
            parts.append(f"{row['rollout/tokens_per_s']:.0f} tokens/s")
        parts.append(f"{row['rollout/samples']:.0f} samples")
        for label, key, form in (
            ("running", "engine/running", ".0f"),
            ("waiting", "engine/waiting", ".0f"),
            ("KV", "kv/device_used_ratio", ".0%"),
            ("host KV", "kv/host_used_ratio", ".0%"),
            ("version", "weights/version", ".0f"),
            ("length", "rollout/length_mean", ".0f"),
            ("lag", "off_policy/lag_mean", ".2f"),
        ):
            if key in row:
                parts.append(f"{label} {row[key]:{form}}")
        print("  ".join(parts if busy else [*parts, "idle"]), file=self._stream, flush=True)

    def close(self) -> None:
        pass


class JsonlSink:
    """One JSON object a line: the row and `time`, seconds since 1970. Appends, so a restarted service goes on in its file."""

    name = "jsonl"

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).expanduser().open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"tracking.jsonl {path!r}: {error.strerror}") from error

    def write(self, row: dict[str, float]) -> None:
        self._file.write(json.dumps({"time": round(time.time(), 3), **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """A wandb run of its own, or the trainer's, if that hands over its run id.

    Two processes write into one run in wandb's shared mode: the trainer starts it with `mode="shared"` and passes `run.id` to
    `tracking.wandb_run_id`. There, the step numbers of both processes are unrelated. So engine figures are drawn against
    `engine/time_s`, and the trainer's against its own step metric (`run.define_metric("train/*", step_metric="train/step")`).
    """

    name = "wandb"

    def __init__(self, config: TrackingConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise InputError(
                "tracking.wandb_project is set but wandb is not installed: pip install 'rl-rollout[wandb]'"
            ) from error
        mode = wandb_mode(config)
        shared = {"x_primary": False, "x_label": "rollout", "x_update_finish_state": False} if mode == "shared" else {}
        try:
            self._run: Any = wandb.init(
                project=config.wandb_project,
                id=config.wandb_run_id,
                dir=config.wandb_dir,
                mode=mode,
                settings=wandb.Settings(console="off", silent=True, finish_timeout=FINISH_S, **shared),
            )
        except Exception as error:  # its own errors, network errors, pydantic's
            raise InputError(f"tracking: wandb could not start ({mode}): {error}") from error
        define_metrics(self._run)
        print(f"rollout: {described_run(self._run)}", file=sys.stderr, flush=True)

    def write(self, row: dict[str, float]) -> None:
        self._run.log(row)

    def close(self) -> None:
        self._run.finish()


def described_run(run: Any) -> str:
    """Say where a wandb run lies, and how an offline one is uploaded."""
    folder = Path(run.dir).parent  # wandb names the folder of the files in it
    if run.offline:
        return f"wandb run of project {run.project} in {folder}, offline; upload it with: wandb sync {shlex.quote(str(folder))}"
    where = f" at {run.url}" if run.url else ""  # none with WANDB_MODE=disabled
    return f"wandb run of project {run.project}{where}, files in {folder}"


def define_metrics(run: Any) -> None:
    """Tell a wandb run that the service's metrics go along the time of the service, not along the trainer's step."""
    run.define_metric(TIME_AXIS, hidden=True)
    for pattern in TIME_INDEXED:
        run.define_metric(pattern, step_metric=TIME_AXIS, step_sync=False)


def wandb_mode(config: TrackingConfig) -> Literal["online", "offline", "shared"] | None:
    """Choose the mode: auto is shared if there is a run to share, else online, and offline without WANDB_API_KEY. None:
    WANDB_MODE decides."""
    if config.wandb_mode != "auto":
        return config.wandb_mode
    if os.environ.get("WANDB_MODE"):
        return None
    if not os.environ.get("WANDB_API_KEY"):
        return "offline"
    return "shared" if config.wandb_run_id is not None else "online"
