"""`rollout bench --against`: other engines, each in a process of its own, on the same prompts and in turn with this one.

The scripts in `peers` start the engines. They exchange JSON lines with this process (`peers/lines.py`).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from rollout.bench.harness import PeerFailed, Row
from rollout.config import InputError

DRIVERS = Path(__file__).with_name("peers")
SCRIPTS = {"vllm": "vllm_peer.py", "transformers_cb": "transformers_cb_peer.py", "transformers": "transformers_peer.py"}


def parse(text: str) -> tuple[dict[str, str], Path | None]:
    """Split the value of `--against`: peers as name -> interpreter, as in "vllm=PYTHON,transformers_cb", or one checkout of
    this project. Raises InputError."""
    if os.sep in text.partition("=")[0]:
        checkout = Path(text).resolve()
        if not (checkout / "rollout/__main__.py").is_file():
            raise InputError(f"--against {text}: no checkout of this project; {checkout} has no rollout/__main__.py")
        return {}, checkout
    peers = {}
    for part in filter(None, text.split(",")):
        name, _, python = part.partition("=")
        if name not in SCRIPTS:
            names = ", ".join(SCRIPTS)
            raise InputError(f"--against {name!r}: must be one of {names}, as NAME or NAME=PYTHON, or the path of a checkout")
        if not (DRIVERS / SCRIPTS[name]).is_file():
            raise InputError(f"--against needs a checkout of the sources: {DRIVERS} has no {SCRIPTS[name]}")
        peers[name] = python or sys.executable
    return peers, None


class Peer:
    """An engine that is started and warm."""

    def __init__(self, name: str, version: str, requests: IO[str], results: IO[str]) -> None:
        self.name = name
        self.version = version
        self._requests, self._results = requests, results

    def run(
        self, prompts: list[np.ndarray], n: int, new_tokens: int | list[int], seed: int, limit_s: float | None = None
    ) -> Row:
        """Run once. new_tokens: of every child, or of the children of each prompt. Returns {"seconds", "generated_tokens"}.
        Raises PeerFailed, also after `limit_s` seconds."""
        request = {"prompts": [prompt.tolist() for prompt in prompts], "n": n, "new_tokens": new_tokens, "seed": seed}
        write(self.name, self._requests, request)
        return read(self.name, self._results, limit_s)


def write(name: str, requests: IO[str], request: dict[str, Any]) -> None:
    try:
        requests.write(json.dumps(request) + "\n")
        requests.flush()
    except OSError:
        raise PeerFailed(f"{name} exited; standard error has its messages") from None


def read(name: str, results: IO[str], limit_s: float | None = None) -> Row:
    """Read a line of results. Raises PeerFailed."""
    if not select.select([results], [], [], limit_s)[0]:
        raise PeerFailed(f"{name} did not answer within {limit_s:.0f} s")
    line = results.readline()
    if not line:
        raise PeerFailed(f"{name} exited; standard error has its messages")
    row = json.loads(line)
    if not isinstance(row, dict):
        raise PeerFailed(f"{name} answered {line[:200]!r}")
    return row


@contextmanager
def peer(name: str, python: str, setup: dict[str, Any], limit_s: float | None = None) -> Iterator[Peer]:
    """Start a peer, within `limit_s` seconds, and stop it when the block ends. Raises PeerFailed."""
    theirs, ours = os.pipe()[::-1]
    command = [python, str(DRIVERS / SCRIPTS[name])]
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}  # set for this engine only
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sys.stderr, pass_fds=[theirs], text=True, cwd=DRIVERS,
            env={**inherited, "RESULTS_FD": str(theirs)},
        )  # fmt: skip
    except OSError as error:
        os.close(ours)
        raise PeerFailed(f"{name}: {python} does not start ({error.strerror}); name its interpreter, {name}=PYTHON") from None
    finally:
        os.close(theirs)
    assert child.stdin is not None
    try:
        with os.fdopen(ours) as results:
            write(name, child.stdin, setup)
            yield Peer(name, str(read(name, results, limit_s)["ready"]), child.stdin, results)
    except BaseException:
        child.kill()
        raise
    finally:
        with suppress(OSError):  # the peer may have exited with input unread
            child.stdin.close()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
