"""`rollout top`: a live view of a service. `View` keeps the history, `render` draws one status; neither knows of sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollout.client.api import RolloutClient
from rollout.commands.connecting import connected
from rollout.commands.lines import duration, model_name
from rollout.config import InputError
from rollout.transport.errors import shown

SPARKS = "▁▂▃▄▅▆▇█"
BAR = 24
HISTORY = 60


class View:
    """Looks at statuses one after the other. `add` takes one, `render` shows the last."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.speeds: deque[float] = deque(maxlen=HISTORY)
        """tokens/s between each two looks"""
        self._last: tuple[float, dict[str, Any]] | None = None

    def add(self, status: dict[str, Any], now: float) -> None:
        """Record a status. `now`: seconds, monotonic. A service that restarted (its counters fell) starts a new history."""
        if self._last is not None:
            then, before = self._last
            made = status["generated_tokens"] - before["generated_tokens"]
            if made < 0:
                self.speeds.clear()
            elif now > then:
                self.speeds.append(made / (now - then))
        self._last = (now, status)

    def render(self) -> RenderableType:
        assert self._last is not None, "add a status first"
        status = self._last[1]
        service = status.get("service", {})
        model = shown(model_name(status))
        title = f"rollout · {model} · {self.address} · up {duration(service.get('uptime_s', 0.0))}"
        return Panel(
            Group(
                self._speed(status),
                _samples(status),
                _pools(status.get("kv")),
                _weights(status),
                _verification(status.get("fleet", {})),
                _replicas(status),
                _clients(service),
            ),
            title=Text(title),
            title_align="left",
            border_style="blue",
        )

    def _speed(self, status: dict[str, Any]) -> RenderableType:
        rate = self.speeds[-1] if self.speeds else status.get("metrics", {}).get("rollout/tokens_per_s", 0.0)
        line = Text.assemble((f"{rate:8.0f}", "bold green"), " tokens/s  ", (sparkline(self.speeds), "green"))
        return line.append(f"\n{status['generated_tokens']:8,} tokens in {status['steps']:,} steps\n", "dim")


def sparkline(values: deque[float]) -> str:
    top = max(values, default=0.0)
    return "".join(SPARKS[round(value / top * (len(SPARKS) - 1)) if top else 0] for value in values)


def bar(used: int, cached: int, size: int) -> Text:
    """Draw a pool: █ held by sequences, ▒ prefix cache only, ░ free. A part above zero gets at least one cell."""

    def cells(blocks: int) -> int:
        return max(round(BAR * blocks / size), int(blocks > 0)) if size else 0

    held = min(cells(used), BAR)
    kept = min(cells(cached), BAR - held)
    color = "red" if size and used > 0.95 * size else "yellow" if size and used > 0.8 * size else "green"
    return Text.assemble(("█" * held, color), ("▒" * kept, "blue"), ("░" * (BAR - held - kept), "dim"))


def _samples(status: dict[str, Any]) -> RenderableType:
    ended = status.get("ended", {})
    line = Text.assemble(
        ("running ", "dim"),
        (f"{status['running']}", "bold"),
        ("   waiting ", "dim"),
        (f"{status['waiting']}", "bold"),
        ("   of these offloaded ", "dim"),
        (f"{status.get('offloaded', 0)}", "bold"),
        ("   ended ", "dim"),
        (f"{sum(ended.values())}", "bold"),
    )
    if status.get("state", "running") != "running":
        line.append(f"   {shown(status['state'])}", "bold red")
    return line


def _pools(kv: dict[str, Any] | None) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    if kv is None:  # of a fleet without a replica
        return table
    for pool in ("device", "host"):
        size = kv[f"{pool}_blocks"]
        if not size:
            table.add_row(Text(f"{pool} KV", "dim"), Text("none", "dim"))
            continue
        used, cached = kv[f"{pool}_used"], kv[f"{pool}_cached"]
        gib = kv["block_bytes"] / 2**30
        table.add_row(
            Text(f"{pool} KV", "dim"),
            bar(used, cached, size),
            f"{used / size:4.0%}",
            Text(f"{used * gib:.2f} + {cached * gib:.2f} cached of {size * gib:.2f} GiB", "dim"),
        )
    return table


def _weights(status: dict[str, Any]) -> RenderableType:
    weights = status.get("weights", {})
    line = Text.assemble(("version ", "dim"), (f"{status['version']}", "bold"))
    if weights.get("refreshes"):
        line.append(f"   {weights['refreshes']} refreshes, the last one paused {1000 * weights['pause_s']:.1f} ms", "dim")
    preempted = f"{status['offloads']} offloads, {status['recompute_preemptions']} preemptions by recompute"
    return line.append(f"   {preempted}, {status['recomputed_tokens']:,} tokens recomputed\n", "dim")


def _verification(fleet: dict[str, Any]) -> RenderableType:
    """Draw what was verified of untrusted replicas, and who is banned; nothing if no replica is trusted."""
    if not fleet.get("trusting"):
        return Text()
    line = Text.assemble(("verified ", "dim"), (f"{fleet['verified']:,}", "bold"), ("   lies ", "dim"))
    line.append(f"{fleet['lies']:,}", "bold red" if fleet["lies"] else "bold")
    line.append(
        f"   no verdict {fleet['unverifiable']:,}   skipped {fleet['verify_skipped']:,}   wait {fleet['verifying']:,}", "dim"
    )
    for ban in fleet["bans"]:
        line.append(f"\nbanned {shown(ban['owner'])}: {shown(ban['why'])}", "bold red")
    return line.append("\n")


def _replicas(status: dict[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header="replicas" in status)
    table.add_column("replica")
    table.add_column("state")
    for name in ("version", "running", "waiting", "KV", "deaths"):
        table.add_column(name, justify="right")
    for one in status.get("replicas", []):
        kv = one.get("kv", {})
        used = f"{kv['device_used'] / kv['device_blocks']:.0%}" if kv.get("device_blocks") else ""
        fine = one["state"] == "serving"
        state = Text(one["state"] if fine else f"{one['state']}: {shown(one['why'])}", "green" if fine else "bold red")
        counts = [str(one.get(name, "")) for name in ("version", "running", "waiting")]
        table.add_row(shown(one["name"]), state, *counts, used, str(one["deaths"]))
    return table


def _clients(service: dict[str, Any]) -> RenderableType:
    clients = service.get("clients", [])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("client")
    for name in ("groups", "samples", "share", "unread KiB", "silent s"):
        table.add_column(name, justify="right")
    total = sum(client["running_samples"] for client in clients)
    for client in sorted(clients, key=lambda client: -client["running_samples"]):
        table.add_row(
            Text(f"{client['number']} {shown(client['name'])}" + ("" if client["connected"] else " (gone)")),
            str(client["groups"]),
            str(client["running_samples"]),
            f"{client['running_samples'] / total:.0%}" if total else "",
            f"{client['unacked_bytes'] / 1024:.0f}",
            f"{client['silent_s']:.1f}",
        )
    return table


def looks(client: RolloutClient, interval_s: float, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield a status every `interval_s`, as the service answers."""
    while True:
        began = time.monotonic()
        yield client.status(timeout=timeout_s)
        time.sleep(max(0.0, interval_s - (time.monotonic() - began)))


def run(
    address: str,
    *,
    interval_s: float,
    timeout_s: float,
    once: bool,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Draw until Ctrl-C, or with `once` two looks and one picture. Raises ServiceLost, RequestTimeout, InputError."""
    if not interval_s > 0:
        raise InputError(f"--interval {interval_s}: must be positive")
    console = console or Console()
    view = View(address)
    with connected(address, "rollout top", timeout_s) as client:
        statuses = looks(client, interval_s, timeout_s)
        view.add(next(statuses), clock())
        if once:
            view.add(next(statuses), clock())
            console.print(view.render())
            return 0
        with Live(view.render(), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            for status in statuses:
                view.add(status, clock())
                live.update(view.render(), refresh=True)
    return 0
