"""Numbers of a service: what its samples were, and what its engine did. No sinks, no sockets, no clock of their own.

    each sample that ends      -> SampleMeter ┐
                                              ├-> row: {name: number}; docs/metrics.md has every name
    engine status, now and then -> EngineMeter ┘

Rates are sums over the window, Σ numerator / Σ denominator, never means of ratios (the reduction rule of TRL's asynchronous
GRPO). Totals count from the start. A figure without data is left out of the row, so it does not look like a zero.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.engine.values import Group, Sample
from rollout.metrics.histogram import SECONDS, TOKENS, Histogram, Histograms

Row = dict[str, float]
Counts = Mapping[str, Any]

GRAIN_S = 0.1
"""of the window: samples that end within it of each other are counted together, and leave the window together"""

HOST_PARTS = ("plan", "build", "commit")
STEP_PARTS = (*HOST_PARTS, "model", "sample")
"""what the host does in a step, one after the other"""


def seconds_of(grown: Counts, parts: Sequence[str]) -> float:
    """Sum the seconds of parts of a step."""
    return float(sum(grown[f"{part}_seconds"] for part in parts))


RATES: dict[str, Callable[[Counts], tuple[float, float]]] = {
    "rollout/tokens_per_s": lambda d: (d["generated_tokens"], d["elapsed"]),
    "rollout/first_token_s": lambda d: (d["first_token_seconds"], d["first_tokens"]),
    "engine/prefill_tokens_per_s": lambda d: (d["prefill_tokens"], d["elapsed"]),
    "engine/batch_size": lambda d: (d["generated_tokens"], d["steps"]),
    "engine/step_s": lambda d: (d["step_seconds"], d["steps"]),
    # a step that was in flight when the window began counts whole, so its seconds may exceed those of the window
    "engine/busy_ratio": lambda d: (min(d["step_seconds"], d["uptime_seconds"]), d["uptime_seconds"]),
    "engine/host_ratio": lambda d: (seconds_of(d, HOST_PARTS), seconds_of(d, STEP_PARTS)),
    "engine/tokens_per_row": lambda d: (d["generated_tokens"], d["generated_tokens"] - d.get("accepted_tokens", 0)),
    "engine/accepted_ratio": lambda d: (d.get("accepted_tokens", 0), d.get("drafted_tokens", 0)),
    "engine/recomputed_ratio": lambda d: (d["recomputed_tokens"], d["prefill_tokens"] + d["generated_tokens"]),
    "kv/stall_ratio": lambda d: (d["move_seconds"], d["move_seconds"] + seconds_of(d, STEP_PARTS)),
    "kv/prefix_hit_ratio": lambda d: (
        d["prefix_hit_tokens"] + d["kept_tokens"],
        d["prefix_hit_tokens"] + d["kept_tokens"] + d["prefill_tokens"],
    ),
}
"""numerator and denominator from what the engine's counters grew by in the window; `elapsed` is its length in seconds"""

TOTALS: dict[str, str] = {
    "engine/steps": "steps",
    "engine/failed_steps": "failed_steps",
    "engine/unused_draws": "unused_draws",
    "engine/generated_tokens": "generated_tokens",
    "engine/drafted_tokens": "drafted_tokens",
    "engine/accepted_tokens": "accepted_tokens",
    "engine/scored_tokens": "scored_tokens",
    "engine/prefill_tokens": "prefill_tokens",
    "engine/recomputed_tokens": "recomputed_tokens",
    "engine/fork_saved_tokens": "fork_saved_tokens",
    "kv/prefix_hit_tokens": "prefix_hit_tokens",
    "kv/kept_tokens": "kept_tokens",
    "kv/offloads": "offloads",
    "kv/recompute_preemptions": "recompute_preemptions",
    "kv/offloaded_blocks": "offloaded_blocks",
    "kv/states_offloaded": "offloaded_states",
    "kv/states_restored": "restored_states",
    "kv/restored_blocks": "restored_blocks",
    "kv/bytes_to_host": "bytes_to_host",
    "kv/bytes_to_device": "bytes_to_device",
    "kv/stall_s": "move_seconds",
    "kv/failed_moves": "failed_moves",
}
"""counters of the engine's status, as they stand"""

GAUGES: dict[str, Callable[[Counts], float]] = {
    "engine/running": lambda s: s["running"],
    "engine/waiting": lambda s: s["waiting"],
    "engine/offloaded": lambda s: s["offloaded"],
    "engine/groups": lambda s: s["groups"],
    "kv/device_blocks": lambda s: s["kv"]["device_blocks"],
    "kv/host_blocks": lambda s: s["kv"]["host_blocks"],
    "kv/device_free": lambda s: s["kv"]["device_free"],
    "kv/host_free": lambda s: s["kv"]["host_free"],
    "kv/device_used_ratio": lambda s: s["kv"]["device_used"] / s["kv"]["device_blocks"],
    "kv/device_cached_ratio": lambda s: s["kv"]["device_cached"] / s["kv"]["device_blocks"],
    "kv/host_used_ratio": lambda s: s["kv"]["host_used"] / s["kv"]["host_blocks"],
    "kv/host_cached_ratio": lambda s: s["kv"]["host_cached"] / s["kv"]["host_blocks"],
    "kv/mirrored_blocks": lambda s: s["kv"]["mirrored"],
    "kv/stale_token_ratio": lambda s: s["kv"]["stale_token_ratio"],
    "kv/held_bytes": lambda s: s["kv"]["held_bytes"],
    "kv/windows_used_ratio": lambda s: (
        s["windows"]["device_used"] / s["windows"]["device_blocks"] if s["windows"]["device_blocks"] else 0.0
    ),
    "kv/states_used_ratio": lambda s: s["states"]["used"] / s["states"]["slots"] if s["states"]["slots"] else 0.0,
    "weights/version": lambda s: s["version"],
    "weights/refreshes": lambda s: s["weights"]["refreshes"],
    "weights/pause_s": lambda s: s["weights"]["pause_s"],
    "weights/stage_s": lambda s: s["weights"]["stage_s"],
    "weights/bytes": lambda s: s["weights"]["bytes"],
    "weights/resident_bytes": lambda s: s["weights"]["resident_bytes"],
    "weights/offloaded_bytes": lambda s: s["weights"]["offloaded_bytes"],
    "fleet/replicas": lambda s: s["fleet"]["replicas"],
    "fleet/serving": lambda s: s["fleet"]["serving"],
    "fleet/waiting": lambda s: s["fleet"]["waiting"],
    "fleet/deaths": lambda s: s["fleet"]["deaths"],
    "fleet/moved": lambda s: s["fleet"]["moved"],
    "fleet/repeats": lambda s: s["fleet"]["repeats"],
    "fleet/verified": lambda s: s["fleet"]["verified"],
    "fleet/lies": lambda s: s["fleet"]["lies"],
    "fleet/unverifiable": lambda s: s["fleet"]["unverifiable"],
    "fleet/verify_skipped": lambda s: s["fleet"]["verify_skipped"],
    "fleet/verifying": lambda s: s["fleet"]["verifying"],
    "fleet/banned": lambda s: len(s["fleet"]["bans"]),
    "loop/stalled_s": lambda s: s["loop"]["stalled_s"],
    "loop/longest_turn_s": lambda s: s["loop"]["longest_turn_s"],
}
"""values of the moment"""


class EngineMeter:
    """Rates over the last `window_s` seconds of engine statuses, gauges and totals of the last one."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, Counts]] = deque()

    def add(self, status: Counts, now: float) -> None:
        """Record an engine's status. The oldest one kept is just outside the window, so that it is covered whole."""
        self._seen.append((now, status))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()

    @property
    def empty(self) -> bool:
        """Whether no status has been recorded."""
        return not self._seen

    def row(self) -> Row:
        """Return the figures; an engine that does not count something (a smaller one than ours) has no figure for it."""
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        row: Row = {}
        for name, key in TOTALS.items():
            if key in last:
                row[name] = float(last[key])
        for name, gauge in GAUGES.items():
            try:
                row[name] = float(gauge(last))
            except (KeyError, ZeroDivisionError):  # not reported, or a pool that does not exist
                continue
        grown = {key: last[key] - first[key] for key in last.keys() & first.keys() if type(last[key]) in (int, float)}
        grown["elapsed"] = ended - began
        for name, rate in RATES.items():
            try:
                numerator, denominator = rate(grown)
            except KeyError:
                continue
            if denominator > 0:
                row[name] = numerator / denominator
        return row


@dataclass(slots=True)
class _Ended:
    """Sums over the samples that ended in the GRAIN_S from `at` on."""

    at: float
    samples: int = 0
    cut: int = 0
    mixed: int = 0
    """samples whose tokens are of several versions"""
    tokens: int = 0
    sampled: int = 0
    """tokens without those of partial samples, which clients submitted"""
    logprobs: float = 0.0
    """sum over the sampled tokens"""
    lag: int = 0
    """sum over the tokens of the versions between the weights that made it and those live at its end"""
    lag_max: int = 0
    whole: int = 0
    """samples that ended by themselves"""
    clipped: int = 0
    whole_tokens: int = 0
    whole_seconds: float = 0.0
    shortest: float = math.inf
    longest: int = 0
    """tokens of one that ended by itself"""

    def add(self, samples: Sequence[Sample], submitted: Sequence[int], version: int) -> None:
        """Add samples; `submitted`: how many of its first tokens each one's client submitted."""
        logprobs = np.concatenate([sample.logprobs[given:] for sample, given in zip(samples, submitted, strict=True)])
        self.sampled += len(logprobs)
        self.logprobs += float(np.add.reduce(logprobs, dtype=np.float64))  # np.sum takes twice as long for few
        self.samples += len(samples)
        for sample in samples:
            count, spans = len(sample.token_ids), sample.weight_versions
            self.tokens += count
            self.mixed += len(spans) > 1
            end = count
            for start, made in reversed(spans):
                self.lag += (version - made) * (end - start)
                self.lag_max = max(self.lag_max, version - made)
                end = start
            if sample.finish_reason in ("stop", "length"):
                self.whole += 1
                self.clipped += sample.finish_reason == "length"
                self.whole_tokens += count
                self.whole_seconds += sample.seconds
                self.shortest, self.longest = min(self.shortest, count), max(self.longest, count)
            else:
                self.cut += sample.finish_reason in ("cut", "deadline")


@dataclass(slots=True)
class _Live:
    n: int
    submitted: dict[int, int]
    """tokens of the partial samples, by index"""
    seconds: list[float] = field(default_factory=list)
    """of the children that have ended"""


class SampleMeter:
    """What the samples of the last `window_s` seconds were like."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._ended: deque[_Ended] = deque()
        self._groups: deque[tuple[float, float, float | None]] = deque()
        """when it was whole, seconds of its slowest child, spread of all"""
        self._live: dict[str, _Live] = {}
        self._samples = self._tokens = self._whole_groups = 0
        self._seconds, self._lengths, self._prompts = Histogram(SECONDS), Histogram(TOKENS), Histogram(TOKENS)

    def begin(self, group: Group) -> None:
        if not group.score:
            submitted = {partial.index: len(partial.token_ids) for partial in group.partials}
            self._live[group.id] = _Live(len(group.wanted), submitted)

    def forget(self, group_id: str) -> None:
        """Drop a group for which no client waits any more. Does nothing for an unknown id."""
        self._live.pop(group_id, None)

    def is_live(self, group_id: str) -> bool:
        """Whether some children of this group have not been seen."""
        return group_id in self._live

    def add(self, samples: Sequence[Sample], version: int, now: float) -> None:
        """Record children that have ended while the weights were at `version`. What was scored is no rollout."""
        drawn = [sample for sample in samples if sample.finish_reason != "scored"]
        if not drawn:
            return
        if not self._ended or now - self._ended[-1].at >= GRAIN_S:
            self._ended.append(_Ended(now))
        self._ended[-1].add(drawn, [self._submitted(sample) for sample in drawn], version)
        self._samples += len(drawn)
        self._tokens += sum(len(sample.token_ids) for sample in drawn)
        for sample in drawn:
            if sample.finish_reason in ("stop", "length"):
                self._seconds.add(sample.seconds)
                self._lengths.add(len(sample.token_ids))
                self._prompts.add(sample.prompt_tokens)
            live = self._live.get(sample.group_id)
            if live is None:
                continue
            live.seconds.append(sample.seconds)
            if len(live.seconds) == live.n:
                self._groups.append((now, max(live.seconds), spread(live.seconds)))
                self._whole_groups += 1
                del self._live[sample.group_id]

    def _submitted(self, sample: Sample) -> int:
        live = self._live.get(sample.group_id)
        return 0 if live is None else live.submitted.get(sample.index, 0)

    def histograms(self) -> Histograms:
        """Return all samples since the start that ended by themselves, by duration and length."""
        return {
            "rollout/sample_seconds": self._seconds.buckets(),
            "rollout/length_tokens": self._lengths.buckets(),
            "rollout/prompt_tokens": self._prompts.buckets(),
        }

    def row(self, now: float) -> Row:
        while self._ended and self._ended[0].at < now - self._window_s:
            self._ended.popleft()
        while self._groups and self._groups[0][0] < now - self._window_s:
            self._groups.popleft()
        totals = {"samples": self._samples, "sample_tokens": self._tokens, "groups": self._whole_groups}
        row = {f"rollout/{name}": float(total) for name, total in totals.items()}
        return row | self._sample_row() | self._group_row()

    def _sample_row(self) -> Row:
        row: Row = {}
        ended = self._ended
        samples, whole = sum(one.samples for one in ended), sum(one.whole for one in ended)
        if samples:
            row["rollout/unfinished_ratio"] = 1 - whole / samples
            row["rollout/cut_ratio"] = sum(one.cut for one in ended) / samples
            row["off_policy/mixed_ratio"] = sum(one.mixed for one in ended) / samples
            row["off_policy/lag_max"] = float(max(one.lag_max for one in ended))
        if whole:
            row["rollout/length_mean"] = sum(one.whole_tokens for one in ended) / whole
            row["rollout/length_min"] = float(min(one.shortest for one in ended))
            row["rollout/length_max"] = float(max(one.longest for one in ended))
            row["rollout/clipped_ratio"] = sum(one.clipped for one in ended) / whole
            row["rollout/sample_s"] = sum(one.whole_seconds for one in ended) / whole
        tokens, sampled = sum(one.tokens for one in ended), sum(one.sampled for one in ended)
        if sampled:
            row["rollout/logprob_mean"] = sum(one.logprobs for one in ended) / sampled
        if tokens:
            row["off_policy/lag_mean"] = sum(one.lag for one in ended) / tokens
        return row

    def _group_row(self) -> Row:
        if not self._groups:
            return {}
        longest = [seconds for _, seconds, _ in self._groups]
        spreads = [ratio for _, _, ratio in self._groups if ratio is not None]
        row: Row = {"rollout/group_s_mean": sum(longest) / len(longest), "rollout/group_s_max": max(longest)}
        if spreads:
            row["rollout/group_spread"] = sum(spreads) / len(spreads)
        return row


def spread(seconds: list[float]) -> float | None:
    """Return the standard deviation over the mean of end times; None if all are 0."""
    mean = sum(seconds) / len(seconds)
    return math.sqrt(sum((one - mean) ** 2 for one in seconds) / len(seconds)) / mean if mean else None
