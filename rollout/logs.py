"""Loggers that show what a peer has sent without obeying it."""

from __future__ import annotations

import logging
import traceback

from transport.errors import shown


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
