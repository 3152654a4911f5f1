"""`rollout pause`, `resume`, `drain`, `sleep`, `wake`, `abort`, `refresh`: what they do, say and return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout.client.api import RolloutClient
from rollout.commands import control
from rollout.commands.arguments import (
    AbortArgs,
    ControlArgs,
    DrainArgs,
    PauseArgs,
    RefreshArgs,
    ResumeArgs,
    SleepArgs,
    WakeArgs,
    commands,
)
from rollout.commands.main import main
from rollout.config import Config
from rollout.engine.engine import Engine
from rollout.engine.values import Sampling
from tests.support.waiting import until
from tests.support.wire import serving

WAIT = 60.0
BUSY = Sampling(n=2, max_tokens=8000, ignore_eos=True)


@pytest.fixture(scope="module")
def address(tiny_config: Config) -> Iterator[str]:
    """Address of a service of these tests alone: they change its weights."""
    with serving(Engine(tiny_config.engine)) as service:
        yield service.endpoint


@pytest.fixture
def client(address: str) -> Iterator[RolloutClient]:
    with RolloutClient(address, connect_timeout_s=WAIT) as client:
        yield client


def state(client: RolloutClient) -> str:
    return str(client.status()["state"])


def interrupted_when(condition: Callable[[], object]) -> Callable[[float], None]:
    """In place of `time.sleep`: Ctrl-C comes once the condition is true."""

    def wait(seconds: float) -> None:
        until(condition, "the state to interrupt", WAIT)
        raise KeyboardInterrupt

    return wait


@pytest.mark.parametrize(
    ("args", "during", "said"),
    [
        (PauseArgs(), "paused", "paused: no sample runs; Ctrl-C"),
        (DrainArgs(), "draining", "drained: nothing runs"),
        (SleepArgs(), "asleep", "asleep: "),
    ],
)
def test_a_state_lasts_until_ctrl_c(
    args: ControlArgs, during: str, said: str, client: RolloutClient, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args.address = address
    assert control.run(args, interrupted_when(lambda: state(client) == during)) == 130
    out = capsys.readouterr().out
    assert said in out and "stopped; the service " in out
    until(lambda: state(client) == "running", "nobody holds the state any more", WAIT)


@pytest.mark.parametrize(
    ("holding", "during", "ending"), [(PauseArgs(), "paused", ResumeArgs()), (SleepArgs(level=1), "asleep", WakeArgs())]
)
def test_another_command_ends_a_state(
    holding: ControlArgs,
    during: str,
    ending: ControlArgs,
    client: RolloutClient,
    address: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    holding.address = ending.address = address
    ended: list[int] = []
    looked = threading.Event()
    thread = threading.Thread(target=lambda: ended.append(control.run(holding, lambda seconds: looked.wait(0.01))))
    thread.start()
    until(lambda: state(client) == during, during, WAIT)
    assert control.run(ending) == 0
    thread.join(WAIT)
    assert ended == [0]
    out = capsys.readouterr().out
    assert "the service is running\n" in out and "another client has changed the state: the service is running" in out


def test_drain_waits_for_what_runs_and_a_pause_does_not(
    client: RolloutClient, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = client.submit([5, 6, 7], Sampling(n=2, max_tokens=40, ignore_eos=True))
    until(lambda: client.status()["running"] == 2 or handle.done, "it runs", WAIT)
    assert control.run(DrainArgs(address=address), interrupted_when(lambda: True)) == 130
    assert [sample.finish_reason for sample in handle.result(WAIT)] == ["length", "length"]
    assert "draining: waiting for " in capsys.readouterr().out


def test_abort(client: RolloutClient, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    handle = client.submit([5, 6, 7], BUSY)
    until(lambda: client.status()["running"] == 2, "it runs", WAIT)
    assert main(["abort", "--address", address]) == 0
    assert [sample.finish_reason for sample in handle.result(WAIT)] == ["aborted", "aborted"]
    assert "2 samples aborted" in capsys.readouterr().out
    assert main(["abort", "--address", address]) == 0
    assert "0 samples aborted" in capsys.readouterr().out


def test_refresh(tiny_model: Path, client: RolloutClient, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = client.weights_status()
    assert main(["refresh", str(tiny_model), "--address", address]) == 0
    after = client.weights_status()
    assert after["version"] == before["version"] + 1
    said = capsys.readouterr().out
    assert said.startswith(f"version {after['version']} is live: ") and f"digest {after['digest']:.12}" in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["refresh", "/nowhere"], "/nowhere"),
        (["wake"], "not asleep"),
        (["pause", "--timeout", "0"], "--timeout 0.0: must be positive"),
    ],
)
def test_what_cannot_be_done_has_a_reason(
    words: list[str], reason: str, client: RolloutClient, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--address", address]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"rollout {words[0]}: ") and reason in captured.err and not captured.out
    assert state(client) == "running"


def test_each_verb_is_a_command_of_its_name() -> None:
    named = {name: each for name, each in commands(Config()).items() if isinstance(each, ControlArgs)}
    assert {name: each.verb for name, each in named.items()} == {name: name for name in named}
    assert {*map(type, named.values())} == {*ControlArgs.__subclasses__()} and AbortArgs in map(type, named.values())
    assert isinstance(named["refresh"], RefreshArgs)
