"""A Ray actor that runs one replica, or one rank of a replica, as a child process. Imports neither Ray nor torch.

Ray transfers the text of the replica's configuration and its exit status; groups, samples and weights use the replica's link.
"""

from __future__ import annotations

import os
import socket
import subprocess

from rollout.engine.processes import run_module
from rollout.process import Folder

STOP_S = 20.0
"""longest time that a replica may take to stop in order"""


class ReplicaHolder:
    """A Ray actor with two threads: `serve` waits in one, the other runs the other calls.

    Args:
        toml: configuration of `rollout serve`, with [fleet] join and name."""

    def __init__(self, toml: str) -> None:
        self._toml = toml
        self._child: subprocess.Popen[bytes] | None = None

    def where(self) -> tuple[str, int]:
        """Return the host and the process of the actor."""
        return socket.gethostname(), os.getpid()

    def free_port(self) -> int:
        """Return a port of loopback that is free now."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return int(listener.getsockname()[1])

    def serve(self, rank: dict[str, str]) -> int:
        """Run the replica until it ends. Returns its exit status, or minus the signal. It also ends with this process, which
        closes its standard input. rank: variables of one of several ranks (`rollout.fleet.ray_launcher.rank_variables`); {}:
        there is one."""
        with Folder("ray") as folder:
            (folder / "replica.toml").write_text(self._toml)
            words = ["serve", "--config", str(folder / "replica.toml"), "--exit-on-stdin-close", "--quiet"]
            command = run_module("rollout", *words)
            environment = {**os.environ, **rank}
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment) as child:
                self._child = child
                assert child.stdin is not None
                status = child.wait()
        return status

    def kill(self) -> None:
        """Kill the replica."""
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """Stop the replica in order; kill it after STOP_S."""
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
