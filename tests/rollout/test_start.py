"""What happens while `rollout serve` starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.commands import http, serve
from rollout.commands.arguments import HttpArgs, ServeArgs, parse
from rollout.config import InputError
from rollout.engine.values import Limits
from rollout.metrics.sinks import JsonlSink
from rollout.transport.sockets import ServiceEnd
from tests.support.fake_engine import FakeEngine


def serve_with(*flags: str) -> int:
    args = parse(["serve", *flags])
    assert isinstance(args, ServeArgs)
    return serve.run(args)


class Lost:
    """Is asked to stop where what a signal handler raises is lost."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def own_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_finalizer_is_not_forgotten(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeEngine):
        def __init__(self, *_: Any, **__: Any) -> None:
            Lost()
            super().__init__()

    monkeypatch.setattr("rollout.engine.engine.Engine", Slow)
    assert serve_with("--model", str(tiny_model), "--service.endpoint", "tcp://127.0.0.1:0") == 0


@pytest.mark.usefixtures("own_handlers")
def test_a_port_in_use_is_told_before_a_model_is_loaded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.engine.engine.Engine", None)  # would raise TypeError
    end = ServiceEnd("tcp://127.0.0.1:0", Limits())
    try:
        with pytest.raises(InputError, match="cannot listen at"):
            serve_with("--model", str(tiny_model), "--service.endpoint", end.endpoint)
    finally:
        end.close()


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize("restart", [[], ["--restart"], ["--replicas", "2"]])
def test_a_ready_file_that_cannot_be_is_told_before_a_model_is_loaded(
    restart: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.engine.engine.Engine", None)  # would raise TypeError
    for path, reason in (
        (tmp_path / "nowhere" / "ready", "No such file or directory; name a file in a folder that can be written"),
        (tmp_path, "is a folder"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(InputError, match=f"--ready-file .*{reason}"):
            serve_with("--ready-file", str(path), "--service.endpoint", "tcp://127.0.0.1:0", *restart)
    assert not list(tmp_path.iterdir()), "nothing is left of the check"
    with pytest.raises(InputError, match="--ready-file .*No such file"):
        http.run(HttpArgs(ready_file=str(tmp_path / "nowhere" / "ready")))


@pytest.mark.usefixtures("own_handlers")
def test_a_start_that_fails_closes_what_it_opened(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("no memory for that")

    monkeypatch.setattr("rollout.engine.engine.Engine", broken)

    def noted(kind: type) -> Any:
        close = kind.close  # type: ignore[attr-defined]
        return lambda self, *linger: (closed.append(kind.__name__), close(self, *linger))

    monkeypatch.setattr(JsonlSink, "close", noted(JsonlSink))
    monkeypatch.setattr(ServiceEnd, "close", noted(ServiceEnd))
    with pytest.raises(InputError, match="no memory for that"):
        serve_with(
            "--model", str(tiny_model), "--service.endpoint", "tcp://127.0.0.1:0", "--tracking.jsonl", str(tmp_path / "rows"),
        )  # fmt: skip
    assert closed == ["ServiceEnd", "JsonlSink"]
