"""`rollout pause`, `resume`, `drain`, `sleep`, `wake`, `abort`, `refresh`: the client's verbs for a running service.

A service resumes and wakes when the client that paused it or put it to sleep disconnects, so that no other client waits for a
request that cannot come. So `pause`, `drain` and `sleep` last until they are interrupted, or another client ends the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollout.client.api import RolloutClient
from rollout.commands.arguments import (
    AbortArgs,
    ControlArgs,
    DrainArgs,
    PauseArgs,
    RefreshArgs,
    ResumeArgs,
    SleepArgs,
    WakeArgs,
)
from rollout.commands.connecting import connected
from rollout.commands.interrupt import INTERRUPTED
from rollout.commands.lines import bytes_of, counted
from rollout.config import InputError
from rollout.transport.errors import Forbidden

LOOK_S = 0.5
"""seconds between two looks at whether another client has ended the state"""


def run(args: ControlArgs, wait: Callable[[float], Any] = time.sleep) -> int:
    """Do what was asked for and say so. Returns the exit status: 0; 130 if Ctrl-C ended a pause, a drain or a sleep. wait:
    takes seconds. Raises InputError and the client's errors."""
    check_timeout(args)
    with connected(args.address, f"rollout {args.verb}", min(args.timeout, 10.0)) as client:
        match args:
            case PauseArgs():
                client.pause(args.timeout)
                return hold(client, "paused: no sample runs", "resumes", ("paused",), wait)
            case DrainArgs():
                tell(f"draining: waiting for {counted(unfinished(client), 'sample')}")
                client.drain(args.timeout)
                return hold(client, "drained: nothing runs and nothing starts", "resumes", ("draining",), wait)
            case SleepArgs():
                freed = client.sleep(args.level, args.timeout)
                what = f"asleep: {bytes_of(freed)} of memory released"
                return hold(client, what, "wakes", ("asleep",), wait)
            case ResumeArgs():
                client.resume(args.timeout)
                tell(f"the service is {state(client)}")
            case WakeArgs():
                client.wake(args.timeout, tags=args.tags or None)
                tell(f"the service is {state(client)}")
            case AbortArgs():
                count = unfinished(client)
                client.abort_all(args.timeout)
                tell(f"{counted(count, 'sample')} aborted; their clients have the tokens so far")
            case RefreshArgs():
                refresh(client, args)
    return 0


def check_timeout(args: ControlArgs) -> None:
    if not args.timeout > 0:
        raise InputError(f"--timeout {args.timeout}: must be positive")


def refresh(client: RolloutClient, args: RefreshArgs) -> None:
    """Replace the weights by those of a folder that the service can read."""
    done = client.refresh(args.folder, version=args.version, kv=args.kv, partial=args.partial, timeout=args.timeout)
    size, paused = bytes_of(done.bytes), 1000 * done.paused_seconds
    tell(f"version {done.version} is live: {size} in {done.seconds:.1f} s, paused {paused:.1f} ms, digest {done.digest:.12}")


def hold(client: RolloutClient, what: str, undone: str, states: tuple[str, ...], wait: Callable[[float], Any]) -> int:
    """Stay connected until Ctrl-C, or until the service has left the state. Returns the exit status."""
    try:
        tell(f"{what}; Ctrl-C, or a request of any client, {undone} it")
        while True:
            with suppress(Forbidden):  # a key without the role read: only Ctrl-C ends it
                if (now := client.status()["state"]) not in states:
                    tell(f"another client has changed the state: the service is {now}")
                    return 0
            wait(LOOK_S)
    except KeyboardInterrupt:
        tell(f"stopped; the service {undone}, unless another client holds it")
        return INTERRUPTED


def state(client: RolloutClient) -> str:
    """Return the state of the service."""
    try:
        return str(client.status()["state"])
    except Forbidden:
        return "in a state that this key may not read"


def unfinished(client: RolloutClient) -> int:
    """Return the number of samples that have not ended; 0 for a key that may not read the status."""
    try:
        return sum(one["running_samples"] for one in client.status()["service"]["clients"])
    except Forbidden:
        return 0


def tell(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
