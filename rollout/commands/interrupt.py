"""Ctrl-C during imports, which may take seconds: the process exits at once, since nothing has been started.

A KeyboardInterrupt would be raised inside third-party imports, some of which print it or continue.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130
"""exit status after Ctrl-C"""


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """Say so and exit."""
    os.write(2, b"rollout: stopped\n")
    os._exit(INTERRUPTED)


def imports_begin() -> None:
    """Let Ctrl-C exit at once, unless the parent process had it ignored. Call from the main thread."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)


def imports_end() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, if `imports_begin` changed that."""
    if signal.getsignal(signal.SIGINT) is leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
