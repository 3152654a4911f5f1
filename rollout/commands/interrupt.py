"""Ctrl-C while modules are imported, which takes up to seconds: nothing has been started, so the process just ends.

An exception there would come up inside other people's imports, some of which print it, and some of which go on.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

STATUS = 130
"""exit status of a process that Ctrl-C has ended"""


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """End the process, without a word."""
    os._exit(STATUS)


def imports_begin() -> None:
    """Let Ctrl-C end the process at once, unless whoever started it had it ignored. For the main thread."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)


def imports_end() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, if it was this module that changed that."""
    if signal.getsignal(signal.SIGINT) is leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
