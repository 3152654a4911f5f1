"""Merges the statuses of replicas into the fleet's status."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.fleet.groups import FleetGroups
from rollout.fleet.replica import Replica
from rollout.fleet.replica_set import ReplicaSet
from rollout.fleet.verifier import Verifier

SAME = ("version", "block_size", "block_bytes", "window_tokens", "window_layers")
"""equal in all replicas"""
LARGEST = ("pause_s", "stage_s", "bytes", "refreshes", "stale_token_ratio")
"""the largest value is reported"""


def merged(statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge statuses: numbers are added up, lists of names united, other values kept if equal, and joined as text if not."""
    names = dict.fromkeys(name for status in statuses for name in status)
    return {name: _merged(name, [status[name] for status in statuses if name in status]) for name in names}


def _merged(name: str, values: list[Any]) -> Any:
    first = values[0]
    if all(isinstance(value, dict) for value in values):
        return merged(values)
    if all(map(is_count, values)):
        return first if name in SAME else max(values) if name in LARGEST else sum(values)
    if all(value == first for value in values):
        return first
    if all(isinstance(value, list | tuple) and all(isinstance(one, str) for one in value) for value in values):
        return list(dict.fromkeys(one for value in values for one in value))
    return " / ".join(dict.fromkeys(map(str, values)))


def counters(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters of a status, which are still reported after its replica is lost: those that its `counted` names."""
    found: dict[str, Any] = {}
    names = status.get("counted")
    for path in names if isinstance(names, list | tuple) else ():
        outer, _, name = str(path).rpartition(".")
        source, target = (status.get(outer), found.setdefault(outer, {})) if outer else (status, found)
        value = source.get(name) if isinstance(source, Mapping) else None
        counts = is_count(value) or (isinstance(value, Mapping) and all(map(is_count, value.values())))
        if counts and isinstance(target, dict):  # what a replica says need not make sense
            target[name] = value
    return found


def is_count(value: Any) -> bool:
    """Whether a value of a status is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


SHOWN = ("running", "waiting", "generated_tokens", "kv", "loop")
"""fields of a replica's own status"""


def described(replica: Replica, pid: int | None, parts: int) -> dict[str, Any]:
    """Describe one replica for `rollout status`. `parts`: parts of groups that run there."""
    return {
        "name": replica.name,
        "state": replica.state.value,
        "why": replica.why,
        "version": replica.version,
        "pid": pid,
        "trusted": replica.owner.trusted,
        **{name: replica.owner.counts[name] for name in ("verified", "unverifiable", "skipped")},
        "outstanding_tokens": replica.load,
        "parts": parts,
        "deaths": replica.deaths,
        **{name: replica.status[name] for name in SHOWN if name in replica.status},
    }


def totals(replicas: ReplicaSet, groups: FleetGroups, verifier: Verifier) -> dict[str, Any]:
    """Count replicas, losses, and children that were moved or verified."""
    since = replicas.none_since
    return {
        "replicas": len(replicas.by_name),
        "serving": len(replicas.serving()),
        "deaths": replicas.deaths,
        "moved": groups.moved,
        "repeats": groups.repeats,
        "waiting": len(groups.waiting) + len(groups.unjudged),
        "trusting": verifier.on,
        "verified": verifier.counts["verified"],
        "lies": verifier.counts["lies"],
        "unverifiable": verifier.counts["unverifiable"],
        "verify_skipped": verifier.counts["skipped"],
        "verifying": verifier.holding,
        "without_replica_s": 0.0 if since is None else round(time.monotonic() - since, 3),
    }
