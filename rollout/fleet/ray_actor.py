"""What runs in a Ray actor: one replica as a child process, held as long as the actor lives. Imports neither Ray nor torch.

Ray carries the text of its configuration there, and its exit status back; groups, samples and weights go by the replica's link.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from rollout.process import Folder

STOP_S = 20.0
"""longest that a replica may take to stop in order"""


class ReplicaHolder:
    """Ray makes an actor of it, with two threads: `serve` waits in one, the others' calls come in the other.

    Args:
        toml: configuration of `rollout serve`, with [fleet] join and name."""

    def __init__(self, toml: str) -> None:
        self._toml = toml
        self._child: subprocess.Popen[bytes] | None = None

    def where(self) -> tuple[str, int]:
        """Return the host and the process of the actor."""
        return socket.gethostname(), os.getpid()

    def serve(self) -> int:
        """Run the replica until it ends. Returns its exit status, or minus the signal. It ends with this process, however that
        does: its standard input closes then."""
        with Folder("ray") as folder:
            (folder / "replica.toml").write_text(self._toml)
            words = ["serve", "--config", str(folder / "replica.toml"), "--exit-on-stdin-close"]
            command = [sys.executable, "-m", "rollout", *words]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
                self._child = child
                assert child.stdin is not None
                status = child.wait()
        return status

    def kill(self) -> None:
        """Kill the replica, which may be beyond hearing."""
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """Stop the replica in order; after STOP_S kill it."""
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
