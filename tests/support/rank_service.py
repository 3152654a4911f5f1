"""A service of several ranks as a process, whose commits fail on demand:

    python -m tests.support.rank_service CONFIG READY_FILE FAULT_FILE

As `rollout serve`. While FAULT_FILE exists, rank 0, or every other one, fails in the middle of a tensor of a refresh:
the file says which, "0" or "1". The other ranks are processes, too: `tests.support.faulty_rank`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.__main__ import main
from rollout.engine.parallel import followers
from rollout.engine.weights.buffers import RefreshBuffers
from tests.support.broken_commit import Failing

FAULT_FILE = "TESTS_FAULT_FILE"
"""variable of the environment that names it"""
FAILS_AT = "layers.1.mlp"
"""tensors, some of which have been swapped before"""


def fail_commits(rank: str) -> None:
    """Let commits of this process fail while its rank stands in the file."""
    fault, slices = Path(os.environ[FAULT_FILE]), RefreshBuffers.slices

    def failing(self: RefreshBuffers, name: str) -> Iterator[Any]:
        fails = FAILS_AT in name and fault.exists() and fault.read_text() == rank
        for live, staged, scratch in slices(self, name):
            yield Failing(live, 1) if fails else live, staged, scratch

    RefreshBuffers.slices = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    config, ready, fault_file = sys.argv[1:]
    os.environ[FAULT_FILE] = fault_file
    fail_commits("0")
    followers.FOLLOWER = "tests.support.faulty_rank"
    sys.argv = ["rollout", "serve", "--config", config, "--ready-file", ready, "--quiet"]
    sys.exit(main())
