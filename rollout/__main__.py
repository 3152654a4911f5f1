"""`python -m rollout …` is `rollout …`. Nothing is imported here that takes time before Ctrl-C is provided for."""

import os
import signal
import sys

from rollout.commands.interrupt import INTERRUPTED, imports_begin
from rollout.commands.progress import write_line

SILENT = {"--quiet", "--help", "-h"}


def main() -> int:
    """Run one command; returns its exit status."""
    imports_begin()
    words = sys.argv[1:]
    if words[:1] == ["serve"] and not SILENT.intersection(words):
        write_line(f"rollout serve: starting, process {os.getpid()}")
    from rollout.commands.main import main as run

    status = run()
    if status == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C while threads end prints no traceback
    return status


if __name__ == "__main__":
    sys.exit(main())
