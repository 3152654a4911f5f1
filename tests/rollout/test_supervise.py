"""A service that dies, or stands, is started again at its address; one that was asked to stop, or cannot start, is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout.client.api import RolloutClient
from rollout.commands import supervise
from rollout.commands.arguments import ServeArgs, parse
from rollout.commands.supervise import STALLS, Supervisor, serving
from rollout.config import Config, ServiceConfig, load
from rollout.engine.values import Sampling
from tests.support.lasting import ROOT, expected
from tests.support.waiting import until

WAIT = 60.0
"""for what comes: a bound for hangs only"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "FIRST_PAUSE_S", 0.01)
    monkeypatch.chdir(ROOT)


def standing(journal: Path, *more: str) -> supervise.Command:
    return lambda ready, address: [
        sys.executable, "-m", "tests.support.standing", address or "tcp://127.0.0.1:*", str(ready), str(journal), *more,
    ]  # fmt: skip


@contextmanager
def supervised(folder: Path) -> Iterator[tuple[Supervisor, str, Callable[[], int]]]:
    """A supervisor that runs, the address of its service, and its exit status when it has ended."""
    ready, ended = folder / "ready", []
    supervisor = Supervisor(standing(folder / "journal"), str(ready))
    thread = threading.Thread(target=lambda: ended.append(supervisor.run()))
    thread.start()

    def status() -> int:
        thread.join(WAIT)
        assert ended, "the supervisor does not end"
        return ended[0]

    try:
        until(ready.exists, "the service listens", WAIT)
        yield supervisor, ready.read_text(), status
    finally:
        supervisor.stop()
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGUSR1, id="its loop stands"),
        pytest.param(signal.SIGKILL, id="it is killed", marks=pytest.mark.long),
    ],
)
def test_a_service_that_stands_or_dies_goes_on_with_what_it_had(tmp_path: Path, how: signal.Signals) -> None:
    with supervised(tmp_path) as (supervisor, address, status), RolloutClient(address, restart_timeout_s=WAIT) as client:
        handle = client.submit([5], Sampling(n=2, max_tokens=1500, seed=3))
        assert supervisor.pid is not None
        os.kill(supervisor.pid, how)
        samples = handle.result(WAIT)
        assert [sample.token_ids.tolist() for sample in samples] == [expected(5, i, 1500, 3) for i in range(2)]
        assert supervisor.starts == 2 and client.info.starts == 2
        supervisor.stop()
        assert status() == 0


def test_one_that_was_asked_to_stop_is_not_started_again(tmp_path: Path) -> None:
    with supervised(tmp_path) as (supervisor, _, status):
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGTERM)
        assert status() == 0 and supervisor.starts == 1


@pytest.mark.parametrize("exit_status", [0, 1, 2])
def test_one_that_never_listened_is_not_started_again(tmp_path: Path, exit_status: int) -> None:
    supervisor = Supervisor(standing(tmp_path / "journal", str(exit_status)))
    assert supervisor.run() == exit_status and supervisor.starts == 1


def test_pauses_grow_while_lives_are_short() -> None:
    """A program that listens and dies, again and again, until it is asked to stop."""
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('tcp://127.0.0.1:1'); sys.exit(3)"
    supervisor = Supervisor(lambda ready, address: [sys.executable, "-c", program, str(ready)])
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 4

    supervisor._asked.wait = wait  # type: ignore[method-assign, assignment]
    assert supervisor.run() == 0 and supervisor.starts == 4
    assert pauses == [0.01, 0.02, 0.04, 0.08]


def test_the_words_of_the_command_line(tmp_path: Path) -> None:
    args = parse(["serve", "--restart", "--journal", "j"])
    assert isinstance(args, ServeArgs) and args.restart
    command = serving(Config(service=ServiceConfig(stall_s=3.0, journal="j")), tmp_path)
    words = command(tmp_path / "ready", "tcp://127.0.0.1:7")
    config = load(words[words.index("--config") + 1])
    assert config.service.endpoint == "tcp://127.0.0.1:7" and config.service.exit_when_stalled_s == STALLS * 3.0
    assert config.service.journal == "j" and "--restart" not in words
    command = serving(Config(service=ServiceConfig(exit_when_stalled_s=5.0)), tmp_path)
    words = command(tmp_path / "ready", None)
    assert load(words[words.index("--config") + 1]).service.exit_when_stalled_s == 5.0


def test_the_command_says_why_it_cannot_serve_and_ends() -> None:
    words = ["-m", "rollout", "serve", "--restart", "--service.keys", "/nowhere"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode != 0 and "/nowhere" in done.stderr
