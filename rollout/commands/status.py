"""`rollout status`: a running service in some ten lines, or all of its status as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rollout.commands.arguments import StatusArgs
from rollout.commands.connecting import connected
from rollout.commands.lines import bytes_of, counted, duration, model_name
from rollout.transport.errors import RequestTimeout, ServiceLost, shown

MOST_CLIENTS = 4
"""clients that are named; the others are counted"""
DIGEST = 12
"""digits of a digest that are printed"""


def run(args: StatusArgs) -> int:
    """Print the status of a running service. Retry for `args.wait` seconds and print the reason of each failure. Returns the
    exit status. Raises InputError, ServiceLost, RequestTimeout."""
    until, reported = time.monotonic() + args.wait, ""
    while True:
        try:
            with connected(args.address, "rollout status", args.timeout) as client:
                status = client.status(timeout=args.timeout)
            print(json.dumps(status, indent=2) if args.json else "\n".join(report(status)))
            return 0
        except (RequestTimeout, ServiceLost) as error:
            if time.monotonic() >= until:
                raise
            if reported != error.message:
                reported = error.message
                print(f"rollout status: {reported}; asking again", file=sys.stderr, flush=True)


def report(status: Mapping[str, Any]) -> list[str]:
    """Describe a service in some ten lines."""
    rows = [
        ("model", _model(status)),
        ("weights", _weights(status)),
        ("service", _service(status)),
        ("groups", f"{status.get('groups', 0):,} open, {status['running']:,} samples running, {status['waiting']:,} waiting"),
        ("ended", _ended(status)),
        *(("KV", line) for line in _pools(status.get("kv", {}))),
        *(("states", line) for line in _states(status.get("states", {}))),
        *(("replicas", line) for line in _replicas(status)),
        *(("clients", line) for line in _clients(status["service"].get("clients", []))),
    ]
    labels = [label if index == 0 or rows[index - 1][0] != label else "" for index, (label, _) in enumerate(rows)]
    return [f"{label:9} {shown(line)}" for label, (_, line) in zip(labels, rows, strict=True)]


def _model(status: Mapping[str, Any]) -> str:
    parts = [model_name(status), *(str(status[name]) for name in ("dtype", "isa", "arithmetic") if name in status)]
    return ", ".join(parts)


def _weights(status: Mapping[str, Any]) -> str:
    line = f"version {status['version']}, digest {status['digest'][:DIGEST] or 'not computed'}"
    weights = status.get("weights", {})
    if weights.get("refreshes"):
        line += (
            f", {counted(weights['refreshes'], 'refresh', 'refreshes')}, the last one paused {1000 * weights['pause_s']:.1f} ms"
        )
    return line


def _service(status: Mapping[str, Any]) -> str:
    service = status["service"]
    return f"{service['endpoint']}, {status.get('state', 'running')}, up {duration(service['uptime_s'])}"


def _ended(status: Mapping[str, Any]) -> str:
    row, uptime_s = status.get("metrics", {}), status["service"]["uptime_s"]
    samples = sum(status.get("ended", {}).values())
    line = f"{counted(samples, 'sample')}, {samples / max(uptime_s, 1e-3):.3g} per second since the start"
    if "rollout/tokens_per_s" in row:
        line += f"; {row['rollout/tokens_per_s']:,.0f} tokens/s lately"
    return line


def _pools(kv: Mapping[str, Any]) -> Iterator[str]:
    for pool in ("device", "host"):
        if blocks := kv.get(f"{pool}_blocks", 0):
            used, cached = kv[f"{pool}_used"] / blocks, kv[f"{pool}_cached"] / blocks
            yield f"{pool}: {used:.0%} of {blocks * kv['block_size']:,} tokens in use, {cached:.0%} cached"


def _states(states: Mapping[str, Any]) -> Iterator[str]:
    if slots := states.get("slots", 0):
        yield f"{states['used']} of {slots} slots in use, {bytes_of(states['bytes'])} each"


def _replicas(status: Mapping[str, Any]) -> Iterator[str]:
    if (fleet := status.get("fleet")) is not None:
        yield f"{fleet['serving']} of {fleet['replicas']} serving, {counted(fleet['deaths'], 'death')}"
        if fleet.get("trusting"):
            counts = [
                f"{fleet['verified']:,} verified",
                counted(fleet["lies"], "lie"),
                f"{fleet['unverifiable']:,} without a verdict",
            ]
            waiting = [f"{fleet['verifying']:,} waiting"] if fleet["verifying"] else []
            yield "samples of others: " + ", ".join([*counts, f"{fleet['verify_skipped']:,} skipped", *waiting])
        for ban in fleet.get("bans", ()):
            samples = sum(len(each["samples"]) for each in ban["groups"])
            yield f"banned: {ban['owner']}, {ban['why']}; {counted(samples, 'sample')} delivered unverified before"
        for one in status["replicas"]:
            if one["state"] != "serving":
                yield f"{one['name']}: {one['state']}, {one['why']}"


def _clients(clients: list[Mapping[str, Any]]) -> Iterator[str]:
    others = [one for one in clients if one["name"] != "rollout status"]
    busy = sorted(others, key=lambda one: -one["running_samples"])
    for one in busy[:MOST_CLIENTS]:
        gone = "" if one["connected"] else ", not connected"
        name = one["name"] or f"number {one['number']}"
        yield f"{name}: {counted(one['groups'], 'group')}, {counted(one['running_samples'], 'sample')} running{gone}"
    if len(busy) > MOST_CLIENTS:
        yield f"and {len(busy) - MOST_CLIENTS} more; rollout top shows all"
    if not busy:
        yield "none"
