"""Part of the suite in a second pytest, beside this one: `-p tests.support.beside --beside=tests/engine`.

The reports of the child are told here as they come. So progress, failures, counts, exit status and the closing line are those
of one run of all tests. With paths on the command line there is no child: what was named runs here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

TAIL = 4000
"""characters of the child's output that are shown when it did not end as a run of tests does"""
ORDERLY = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
POLL_S = 0.2


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("beside")
    group.addoption("--beside", metavar="FOLDER", help="tests of this folder run in a second process, beside the others")
    group.addoption("--tell", metavar="FILE", help="append each report to this file, as one line of JSON: of the child")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.tell:
        config.pluginmanager.register(Child(config, open(config.option.tell, "w", buffering=1)))
    elif config.option.beside and config.args_source != pytest.Config.ArgsSource.ARGS and not config.option.collectonly:
        config.option.ignore = [*(config.option.ignore or []), config.option.beside]
        config.pluginmanager.register(Parent(config))


class Child:
    """Writes what it reports to a file."""

    def __init__(self, config: pytest.Config, sink: TextIO) -> None:
        self._config, self._sink = config, sink

    def _write(self, kind: str, data: object) -> None:
        self._sink.write(json.dumps([kind, data], default=str) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write("collected", len(session.items))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_sessionfinish(self) -> None:
        self._write("finished", None)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._write("deselected", len(items))


class Parent:
    """Starts the child before the first test of its own, tells what it reports after each, and waits for its end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._unread = ""
        self._finished = False
        self._seconds: dict[str, float] = {}
        """that each half took, by its name"""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="beside-") as folder:
            told, output = Path(folder) / "told", Path(folder) / "output"
            told.touch()
            mine = [word for word in self._config.invocation_params.args if not str(word).startswith("--beside")]
            words = [sys.executable, "-m", "pytest", *mine, f"--tell={told}", self._config.option.beside]
            with output.open("w") as out, told.open() as self._told:
                self._child = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
                self._started = time.monotonic()
                try:
                    result = yield
                    self._seconds["the others"] = time.monotonic() - self._started
                    while self._child.poll() is None and not (session.shouldstop or session.shouldfail):
                        self._tell(session)
                        try:
                            self._child.wait(POLL_S)
                        except subprocess.TimeoutExpired:
                            pass
                    self._tell(session)
                    ended = self._child.poll()
                    if ended is not None and not (self._finished and ended in ORDERLY):
                        self._say_how_it_ended(output.read_text()[-TAIL:])
                finally:
                    self._child.kill()
                    self._child.wait()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        self._tell(item.session)
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say which half was waited for."""
        halves = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self._seconds.items())
        terminalreporter.write_line(f"side by side: {halves}")

    def _tell(self, session: pytest.Session) -> None:
        """Hand on the lines that are there; a last one may be half written."""
        *lines, self._unread = (self._unread + self._told.read()).split("\n")
        for kind, data in map(json.loads, lines):
            self._hand_on(session, kind, data)

    def _hand_on(self, session: pytest.Session, kind: str, data: Any) -> None:
        if kind == "collected":
            session.testscollected += data
        elif kind == "finished":
            self._finished = True
            self._seconds[self._config.option.beside] = time.monotonic() - self._started
        elif kind == "deselected":
            self._config.hook.pytest_deselected(items=[SimpleNamespace() for _ in range(data)])
        else:
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
            if isinstance(report.longrepr, list):  # why it was skipped: a tuple, which JSON does not know
                report.longrepr = tuple(report.longrepr)
            self._config.hook.pytest_runtest_logreport(report=report)

    def _say_how_it_ended(self, output: str) -> None:
        """Report a test that failed: the run is red, and the end of the child's output is shown."""
        text = f"the tests beside ended with exit status {self._child.returncode}:\n{output}"
        name = f"beside: {self._config.option.beside}"
        report = pytest.TestReport(name, (name, 0, name), {}, "failed", text, "call")
        self._config.hook.pytest_runtest_logreport(report=report)
