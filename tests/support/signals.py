"""Signals that a shell may have told the tests to ignore."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """Handle SIGINT as Python does by default, in this process and in those that it starts. A shell without job control starts
    what stands before an `&` with SIGINT ignored, and every process inherits that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
