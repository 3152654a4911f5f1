"""What processes hold, seen over time, and whether that grows."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

MOST_POINTS = 120
"""of a series, for the slope: all pairs of them are looked at"""
LEAST_POINTS = 30


class Held(NamedTuple):
    """By one process at one time."""

    rss_mib: float
    fds: int
    threads: int
    pinned_mib: float


GROWTH = Held(rss_mib=8.0, fds=20, threads=2, pinned_mib=1.0)
"""More than that at the end of the second half than at its beginning is a leak, by the Theil-Sen slope (the median of all
pairs of looks, so that a quarter of them may be anything), if the peak has grown by as much as well: what holds staged
weights at times has two levels, and which one is seen more often says nothing. MiB: an allocator that keeps what a burst has
taken moves a process by a few, once; 8 of them in half an hour's phase are 25 bytes for each broken message. Descriptors: of
connections that come and go; a leak of one for each client that is killed would be three times as many."""
LEFT_FDS = 12
"""more than before its first client may be open in a service whose clients have all gone, with as many replicas as then: shared
memory of pushes and connections that have just been refused"""


def held(pid: int) -> Held | None:
    """Read what a process holds; None if it is gone."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        kib = lambda name: int(status.get(name, "0 kB").split()[0])  # noqa: E731
        fds = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    if "VmRSS" not in status:
        return None
    return Held(kib("VmRSS") / 1024, fds, int(status["Threads"]), (kib("VmPin") + kib("VmLck")) / 1024)


def descriptors(pid: int) -> Counter[str]:
    """Count the open descriptors of a process by what they are: sockets, pipes, memory, paths without their numbers."""
    found = Counter[str]()
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found[re.sub(r"[0-9]+", "#", os.readlink(each))] += 1
    return found


def slope(points: list[tuple[float, float]]) -> float:
    """Return the median slope of all pairs (Theil-Sen), per second."""
    step = max(1, len(points) // MOST_POINTS)
    points = points[::step]
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x2 > x1)


class Growth(NamedTuple):
    who: str
    what: str
    more: float
    """in the second half"""
    per_hour: float
    leaks: bool


def growths(who: str, series: list[tuple[float, Held]]) -> list[Growth]:
    """Judge one process by the second half of what was seen of it; nothing where that are too few looks."""
    half = [(at, each) for at, each in series if at >= (series[0][0] + series[-1][0]) / 2] if series else []
    if len(half) < LEAST_POINTS:
        return []
    seconds = half[-1][0] - half[0][0]
    found = []
    for what in Held._fields:
        points = [(at, float(getattr(each, what))) for at, each in half]
        rate, third, most = slope(points), len(points) // 3, getattr(GROWTH, what)
        peaks = max(value for _, value in points[-third:]) - max(value for _, value in points[:third])
        found.append(Growth(who, what, rate * seconds, rate * 3600, rate * seconds > most and peaks > most))
    return found


class Watcher:
    """Looks at processes, and keeps what was seen."""

    def __init__(self) -> None:
        self.series: dict[str, list[tuple[float, Held]]] = defaultdict(list)
        """by the name that `look` was given, and the pid"""
        self._lock = threading.Lock()

    def look(self, pids: dict[str, int]) -> None:
        """Note what each process holds now, of those that are there. pids: by name."""
        now = time.monotonic()
        for name, pid in pids.items():
            if (one := held(pid)) is not None:
                with self._lock:  # `judge` runs in another thread
                    self.series[f"{name} {pid}"].append((now, one))

    def judge(self) -> list[Growth]:
        """Judge the processes that lived for most of the time that was watched."""
        with self._lock:
            seen = {who: list(series) for who, series in self.series.items()}
        ends = [series[-1][0] - series[0][0] for series in seen.values()]
        longest = max(ends, default=0.0)
        found = []
        for who, series in seen.items():
            if series[-1][0] - series[0][0] >= 0.8 * longest:
                found += growths(who, series)
        return found


def shared_memory() -> set[str]:
    """List the names in /dev/shm."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def mapped(names: set[str]) -> set[str]:
    """Return those of the names in /dev/shm that a process has mapped: programs of others use /dev/shm too."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            text = maps.read_text()
            found |= {name for name in names - found if f"/dev/shm/{name}" in text}
    return found
