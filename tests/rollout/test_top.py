"""`rollout top`: what it draws for a status, and that it finds a service."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from rollout.commands.main import main
from rollout.commands.top import SPARKS, View, bar, run, sparkline


def client(name: str, number: int, **fields: Any) -> dict[str, Any]:
    idle = {"connected": True, "groups": 0, "running_samples": 0, "unacked_bytes": 0, "silent_s": 0.1}
    return {"name": name, "number": number, **idle, **fields}


STATUS: dict[str, Any] = {
    "model": "/models/tiny",
    "version": 7,
    "state": "running",
    "running": 48,
    "waiting": 12,
    "offloaded": 9,
    "generated_tokens": 1000,
    "steps": 50,
    "offloads": 9,
    "recompute_preemptions": 0,
    "recomputed_tokens": 0,
    "ended": {"length": 3, "stop": 2},
    "weights": {"version": 7, "refreshes": 7, "pause_s": 0.0213, "stage_s": 0.4, "bytes": 10**8},
    "kv": {
        "block_bytes": 2**20,
        "device_blocks": 1024,
        "device_used": 1000,
        "device_cached": 24,
        "host_blocks": 2048,
        "host_used": 512,
        "host_cached": 512,
    },
    "service": {
        "uptime_s": 3725.0,
        "clients": [
            client("eval", 2, connected=False, groups=1, running_samples=15, silent_s=3.5),
            client("grpo", 1, groups=6, running_samples=45, unacked_bytes=2048),
        ],
    },
}


def drawn(view: View, width: int = 110) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(view.render())
    return console.export_text()


def changed(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(STATUS), **fields}


def test_everything_is_there() -> None:
    view = View("tcp://127.0.0.1:5655")
    view.add(STATUS, 10.0)
    view.add(changed(generated_tokens=1500), 12.0)
    text = drawn(view)
    lines = text.splitlines()
    assert "tiny · tcp://127.0.0.1:5655 · up 1:02:05" in lines[0]
    assert "250 tokens/s" in text and "1,500 tokens in 50 steps" in text
    assert "running 48   waiting 12   of these offloaded 9   ended 5" in text
    assert "98% 0.98 + 0.02 cached of 1.00 GiB" in text and "25% 0.50 + 0.50 cached of 2.00 GiB" in text
    assert "version 7   7 refreshes, the last one paused 21.3 ms" in text
    rows = [line.split() for line in lines if "grpo" in line or "eval" in line]
    assert rows[0][1:7] == ["1", "grpo", "6", "45", "75%", "2"] and rows[1][1:7] == ["2", "eval", "(gone)", "1", "15", "25%"]


def test_verification_and_bans_are_shown() -> None:
    view = View("tcp://here")
    fleet = {"trusting": True, "verified": 1200, "lies": 1, "unverifiable": 3, "verify_skipped": 2, "verifying": 4}
    view.add(changed(fleet={**fleet, "bans": [{"owner": "key gpu", "why": "\x1b[31m first_bad=7"}]}), 0.0)
    text = drawn(view)
    assert "verified 1,200   lies 1   no verdict 3   skipped 2   wait 4" in text
    assert "banned key gpu:" in text and "first_bad=7" in text and "\x1b" not in text
    view.add(changed(fleet={**fleet, "trusting": False}), 1.0)
    assert "verified" not in drawn(view)


def test_replicas_are_shown_with_what_is_wrong_with_them() -> None:
    view = View("x")
    kv = {"device_blocks": 100, "device_used": 42}
    fine = {"name": "0", "state": "serving", "why": "", "version": 7, "running": 31, "waiting": 0, "kv": kv, "deaths": 0}
    dead = {"name": "1", "state": "dead", "why": "signal 9\x1b[2J", "version": 6, "deaths": 3}
    view.add(changed(replicas=[fine, dead]), 0.0)
    text = drawn(view)
    assert "serving" in text and "42%" in text and "dead: signal 9\\x1b[2J" in text
    none = changed(replicas=[dead])
    del none["kv"]
    view.add(none, 1.0)
    assert "dead" in drawn(view)


def test_names_are_shown_and_not_obeyed() -> None:
    view = View("tcp://x")
    hostile = client("\x1b[2J[/red]\u202e", 1)
    view.add(changed(model="\x1b[2Jm", service={"uptime_s": 1.0, "clients": [hostile]}), 0.0)
    text = drawn(view)
    assert "\\x1b[2J[/red]\\u202e" in text and "\x1b[2J" not in text and "\u202e" not in text


def test_the_sparkline_is_the_history() -> None:
    view = View("x")
    for second, tokens in enumerate((0, 100, 300, 300, 1000)):
        view.add(changed(generated_tokens=tokens), float(second))
    assert list(view.speeds) == [100, 200, 0, 700]
    assert sparkline(view.speeds) == "▂▃▁█" and "▂▃▁█" in drawn(view)
    for second in range(5, 300):
        view.add(changed(generated_tokens=1000 + second), float(second))
    assert len(view.speeds) == 60


def test_a_restarted_service_starts_a_new_history() -> None:
    view = View("x")
    view.add(changed(generated_tokens=5000), 0.0)
    view.add(changed(generated_tokens=6000), 1.0)
    view.add(changed(generated_tokens=10), 2.0)
    assert not view.speeds
    assert "0 tokens/s" in drawn(view)


def test_idle_empty_and_narrow() -> None:
    view = View("x")
    kv = {**STATUS["kv"], "host_blocks": 0, "host_used": 0, "host_cached": 0, "device_used": 0, "device_cached": 0}
    view.add(changed(kv=kv, running=0, waiting=0, weights={}, state="paused", service={"uptime_s": 1.0, "clients": []}), 0.0)
    for width in (40, 110):
        assert "host KV" in drawn(view, width)
    text = drawn(view)
    assert "none" in text and "paused" in text and SPARKS[-1] not in text


@pytest.mark.parametrize(
    ("pool", "cells"),
    [((0, 0, 10), "░" * 24), ((10, 0, 10), "█" * 24), ((5, 5, 10), "█" * 12 + "▒" * 12), ((1, 0, 10_000), "█" + "░" * 23)],
)
def test_bar(pool: tuple[int, int, int], cells: str) -> None:
    assert bar(*pool).plain == cells


def test_once_against_a_service(tiny_service: str) -> None:
    console = Console(record=True, width=110, file=io.StringIO())
    assert run(tiny_service, interval_s=0.1, timeout_s=60, once=True, console=console) == 0
    text = console.export_text()
    assert "running 0" in text and "rollout top" in text  # it sees itself among the clients


def test_the_command(tiny_service: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--address", tiny_service, "--once", "--interval", "0.1"]) == 0
    assert "tokens/s" in capfd.readouterr().out
    assert main(["top", "--address", "tcp://127.0.0.1:9", "--once", "--timeout", "0.3"]) == 1
    assert "127.0.0.1:9" in capfd.readouterr().err
