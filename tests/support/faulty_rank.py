"""A rank other than 0 of `tests.support.rank_service`."""

from __future__ import annotations

import socket
import sys

from rollout.engine.parallel.follower import run
from tests.support.rank_service import fail_commits

if __name__ == "__main__":
    fail_commits("1")
    sys.exit(run(socket.socket(fileno=int(sys.argv[1]))))
