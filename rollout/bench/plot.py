"""Pictures of runs: tokens/s above, both KV pools below, offloads and refreshes marked. Needs matplotlib (`rollout[plot]`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.bench.record import Point, Recording
from rollout.config import InputError

SMOOTH_S = 1.0
"""tokens/s are taken over this long"""
TOKENS, DEVICE, HOST, OFFLOAD, RESET, REFRESH = "#1f6feb", "#2da44e", "#bf8700", "#cf222e", "#8250df", "#24292f"


def check(path: str | Path) -> None:
    """Raise InputError, before a minute of measuring, for a picture that could not be drawn or written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("--plot needs matplotlib: pip install -e '.[plot]'") from error
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"--plot {path}: its folder does not exist")


def draw(recordings: Sequence[Recording], path: str | Path) -> None:
    """Draw one row of two panels for each recording, in a picture whose suffix names the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.4 + 3.6 * len(recordings)), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 * len(recordings), 1, squeeze=False, height_ratios=[1.1, 1.0] * len(recordings))[:, 0]
    for index, recording in enumerate(recordings):
        speed, pools = axes[2 * index], axes[2 * index + 1]
        pools.sharex(speed)
        speed.tick_params(labelbottom=False)
        _draw_speed(speed, recording)
        _draw_pools(pools, recording.points)
        end = recording.points[-1].seconds
        speed.set_xlim(0, end)
        pools.set_xlabel("seconds")
    figure.savefig(path)


def speeds(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Return (seconds, tokens/s), each [points - 1]: tokens of the last SMOOTH_S, or a little more, over that time."""
    at = np.array([point.seconds for point in points])
    tokens = np.array([point.generated_tokens for point in points])
    last = np.arange(1, len(points))
    first = np.maximum(np.searchsorted(at, at[1:] - SMOOTH_S, side="right") - 1, 0)
    return at[1:], (tokens[last] - tokens[first]) / (at[last] - at[first])


def grown(points: Sequence[Point], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (seconds, growth) of the points where a counter grew."""
    values = np.array([getattr(point, name) for point in points])
    rises = np.diff(values)
    seconds = np.array([point.seconds for point in points])[1:]
    return seconds[rises > 0], rises[rises > 0]


def _draw_speed(axis: Any, recording: Recording) -> None:
    points = recording.points
    at, speed = speeds(points)
    axis.plot(at, speed, color=TOKENS, linewidth=1.6)
    axis.fill_between(at, speed, color=TOKENS, alpha=0.12, linewidth=0)
    first, last = points[0], points[-1]
    mean = (last.generated_tokens - first.generated_tokens) / (last.seconds - first.seconds)
    axis.axhline(mean, color=TOKENS, linewidth=1, linestyle=(0, (4, 3)))
    axis.set_title(recording.title, loc="left", fontsize=11, fontweight="bold")
    axis.set_title(f"{mean:.0f} tokens/s in the mean", loc="right", fontsize=9, color=TOKENS)
    axis.set_ylim(0, max(float(speed.max()), mean) * 1.15 or 1)
    axis.set_ylabel("tokens/s")
    _tidy(axis)
    for seconds, _ in zip(*grown(points, "version"), strict=True):
        axis.axvline(seconds, color=REFRESH, linewidth=1, linestyle=":")


def _draw_pools(axis: Any, points: Sequence[Point]) -> None:
    at = np.array([point.seconds for point in points])
    gib = points[0].block_bytes / 2**30

    def held(name: str) -> np.ndarray:
        return gib * np.array([getattr(point, name) for point in points])

    capacity, top = gib * points[0].device_blocks, 0.0
    axis.axhline(capacity, color=DEVICE, linewidth=1, linestyle=(0, (4, 3)), label=f"device pool, {_size(capacity)}")
    for pool, color, blocks in (("device", DEVICE, points[0].device_blocks), ("host", HOST, points[0].host_blocks)):
        if blocks:
            used = held(f"{pool}_used")
            whole = used + held(f"{pool}_cached")
            axis.plot(at, used, color=color, linewidth=1.6, label=f"{pool}: sequences")
            if (whole > used).any():
                axis.fill_between(at, used, whole, color=color, alpha=0.18, linewidth=0, label=f"{pool}: prefix cache")
            top = max(top, float(whole.max()))
    top = max(top, capacity if capacity < 2 * top else 0.0)
    marks = [("offloads", OFFLOAD, "v", "sequences offloaded", 1.08), ("soft_resets", RESET, "x", "soft resets", 1.16)]
    for name, color, marker, label, height in marks:
        seconds, count = grown(points, name)
        if len(seconds):
            size = 10 + 3 * np.minimum(count, 20)
            label = f"{label} ({count.sum():,})"
            axis.scatter(
                seconds, np.full(len(seconds), top * height), s=size, color=color, marker=marker, linewidths=1.2, label=label
            )
    for index, seconds in enumerate(grown(points, "version")[0]):
        axis.axvline(seconds, color=REFRESH, linewidth=1, linestyle=":", label=None if index else "refresh")
    axis.set_ylim(0, top * 1.24 or 1)
    axis.set_ylabel("KV held, GiB")
    _tidy(axis)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def _tidy(axis: Any) -> None:
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
