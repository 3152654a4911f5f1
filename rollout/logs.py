"""Loggers that show what a peer has sent without obeying it, and few lines in place of many that say the same."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable

from rollout.transport.errors import shown

PERIOD_S = 60.0
"""between two lines that say the same, at least"""
MOST_LINES = 64


def logger(name: str) -> logging.Logger:
    """Return the logger of this name. Control characters in what it is given, tracebacks included, are escaped."""
    log = logging.getLogger(name)
    if not any(isinstance(each, _Shown) for each in log.filters):
        log.addFilter(_Shown())
    return log


class _Shown(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = shown(record.getMessage()), ()
        if record.exc_info and record.exc_info[0] is not None:
            lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
            record.exc_text = "\n".join(map(shown, lines))
        return True


class Repeats:
    """Logs the first of the lines that say the same, and one in PERIOD_S with how many it stands for. For one thread.

    Example:
        refusals = Repeats(log.error)
        refusals.say("message refused kind=busy")   # message refused kind=busy times=1
    """

    def __init__(self, tell: Callable[[str, str, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._told: dict[str, tuple[float, int]] = {}
        """line: when it was logged last, how many times it has come since"""

    def say(self, line: str) -> None:
        """Log a line, or count it."""
        now = self._clock()
        at, untold = self._told.pop(line, (float("-inf"), 0))
        due = now - at >= PERIOD_S
        self._told[line] = (now, 0) if due else (at, untold + 1)
        if due:
            self._tell("%s times=%d", line, untold + 1)
        if len(self._told) > MOST_LINES:
            self._end(next(iter(self._told)))  # the one that came longest ago

    def end(self) -> None:
        """Log what was counted and not logged since."""
        for line in list(self._told):
            self._end(line)

    def _end(self, line: str) -> None:
        _, untold = self._told.pop(line)
        if untold:
            self._tell("%s times=%d", line, untold)


TRANSPORT = tuple(
    f"rollout.transport.{name}" for name in ("keys.authenticator", "keys.cookie", "keys.ring", "receive_limit", "weights.group")
)
"""loggers of `transport`, which does not import this module"""
for name in TRANSPORT:
    logger(name)
