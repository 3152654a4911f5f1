"""Log lines are a message and then key=value, so that they can be searched and cut by a program."""

from __future__ import annotations

import ast
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.logs import MOST_LINES, TRANSPORT, Repeats

ROOT = Path(__file__).parents[2]
FOLDERS = ("transport", "rollout/client", "rollout/service", "engine/weights")
LINE = re.compile(r"[^%=]+( \w+=%[.\d]*[a-z])+")


def test_what_is_said_again_and_again_is_counted() -> None:
    told: list[str] = []
    now = [0.0]
    lines = Repeats(lambda text, line, times: told.append(text % (line, times)), clock=lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        lines.say("refused kind=x")
    lines.say("refused kind=y")
    assert told == ["refused kind=x times=1", "refused kind=x times=60", "refused kind=y times=1"]
    lines.end()
    assert told[3:] == ["refused kind=x times=39"]
    lines.end()
    assert len(told) == 4


def test_however_many_different_lines_come_none_is_lost() -> None:
    counts: Counter[str] = Counter()
    lines = Repeats(lambda text, line, times: counts.update({line: times}), clock=lambda: 0.0)
    for i in range(1000):
        lines.say(f"kind={i % 100}")
        assert len(lines._told) <= MOST_LINES
    lines.end()
    assert counts == {f"kind={i}": 10 for i in range(100)}


def log_lines(source: str) -> Iterator[str]:
    """First arguments of all calls of `log.…`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "log":
            if node.func.attr in ("debug", "info", "warning", "error", "exception"):
                yield ast.literal_eval(node.args[0])


def well_formed(line: str) -> bool:
    return bool(LINE.fullmatch(line)) if "%" in line else "=" not in line


def test_log_lines_are_a_message_and_key_value() -> None:
    seen = 0
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for line in log_lines(path.read_text()):
            seen += 1
            assert well_formed(line), f"{path.relative_to(ROOT)}: {line!r}: write a message, then key=%s for each value"
    assert seen > 15


def unnamed_loggers(source: str) -> list[str]:
    """List the calls of `logger` whose name is not the module's."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and ast.unparse(node.func) == "logger"]
    return [ast.unparse(call) for call in calls if ast.unparse(call.args[0]) != "__name__"]


def test_a_module_logs_under_its_own_name() -> None:
    paths = [path for path in sorted((ROOT / "rollout").rglob("*.py")) if path.name != "logs.py"]
    assert sum("logger(__name__)" in path.read_text() for path in paths) > 20
    assert not {path: found for path in paths if (found := unnamed_loggers(path.read_text()))}
    assert unnamed_loggers('log = logger("rollout.service.loop")') == ["logger('rollout.service.loop')"]


def test_the_transport_logs_under_its_own_names() -> None:
    """And what peers have sent is escaped there, as in all that `rollout.logs.logger` makes."""
    made = {
        ".".join(("rollout", *path.relative_to(ROOT).with_suffix("").parts))
        for path in sorted((ROOT / "transport").rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "log" and isinstance(node.value, ast.Call)
    }
    assert made == set(TRANSPORT)
    assert all(logging.getLogger(name).filters for name in made)


@pytest.mark.parametrize(
    "line", ["client %d (%s) connected", "asleep (level %d)", "%s: it failed", "refresh failed version=%d: %s", "version=%d"]
)
def test_other_lines_would_be_seen(line: str) -> None:
    assert list(log_lines(f"log.info({line!r}, 1)")) == [line] and not well_formed(line)
