"""Other engines on the same prompts: each in a process of its own, run in turn with ours; `peers` has the drivers."""

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

from rollout.bench.errors import PeerFailed
from rollout.config import InputError

DRIVERS = Path(__file__).with_name("peers")
SCRIPTS = {"vllm": "vllm_peer.py", "transformers_cb": "transformers_cb_peer.py", "transformers": "transformers_peer.py"}


def parse(text: str) -> dict[str, str]:
    """Return name -> interpreter, of "vllm=PYTHON,transformers_cb". Raises InputError listing the names."""
    peers = {}
    for part in filter(None, text.split(",")):
        name, _, python = part.partition("=")
        if name not in SCRIPTS:
            raise InputError(f"--against {name!r}: must be one of {', '.join(SCRIPTS)}, as NAME or NAME=PYTHON")
        if not (DRIVERS / SCRIPTS[name]).is_file():
            raise InputError(f"--against needs the drivers of a checkout; {DRIVERS} has no {SCRIPTS[name]}")
        peers[name] = python or sys.executable
    return peers


class Peer:
    """One engine, started and warm."""

    def __init__(self, name: str, version: str, to: IO[str], back: IO[str]) -> None:
        self.name = name
        self.version = version
        self._to, self._back = to, back

    def run(
        self, prompts: list[np.ndarray], n: int, new_tokens: int | list[int], seed: int, limit_s: float | None = None
    ) -> dict[str, Any]:
        """Return {"seconds", "generated_tokens"} of one run. new_tokens: of all children, or of those of each prompt. Raises
        PeerFailed, after `limit_s` seconds as well."""
        request = {"prompts": [prompt.tolist() for prompt in prompts], "n": n, "new_tokens": new_tokens, "seed": seed}
        tell(self.name, self._to, request)
        return read(self.name, self._back, limit_s)


def tell(name: str, to: IO[str], what: dict[str, Any]) -> None:
    try:
        to.write(json.dumps(what) + "\n")
        to.flush()
    except OSError:
        raise PeerFailed(f"{name} ended; what it said is on standard error") from None


def read(name: str, back: IO[str], limit_s: float | None = None) -> dict[str, Any]:
    if not select.select([back], [], [], limit_s)[0]:
        raise PeerFailed(f"{name} did not answer within {limit_s:.0f} s")
    line = back.readline()
    if not line:
        raise PeerFailed(f"{name} ended; what it said is on standard error")
    row = json.loads(line)
    if not isinstance(row, dict):
        raise PeerFailed(f"{name} answered {line[:200]!r}")
    return row


@contextmanager
def peer(name: str, python: str, setup: dict[str, Any], limit_s: float | None = None) -> Iterator[Peer]:
    """Start a peer, within `limit_s` seconds, and end it with the block. Raises PeerFailed."""
    theirs, back = os.pipe()[::-1]
    command = [python, str(DRIVERS / SCRIPTS[name])]
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}  # ours, not theirs
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sys.stderr, pass_fds=[theirs], text=True, cwd=DRIVERS,
            env={**inherited, "RESULTS_FD": str(theirs)},
        )  # fmt: skip
    except OSError as error:
        os.close(back)
        raise PeerFailed(f"{name}: {python} does not start ({error.strerror}); name its interpreter, {name}=PYTHON") from None
    finally:
        os.close(theirs)
    assert child.stdin is not None
    try:
        with os.fdopen(back) as results:
            tell(name, child.stdin, setup)
            yield Peer(name, str(read(name, results, limit_s)["ready"]), child.stdin, results)
    except BaseException:
        child.kill()
        raise
    finally:
        with suppress(OSError):  # what it did not take any more
            child.stdin.close()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
