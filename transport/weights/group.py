"""Process groups of two members, without `init_process_group`: join, leave, error handling."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rollout.transport.weights.offers import Backend

log = logging.getLogger(__name__)

LEAVE_S = 5.0
"""maximum time that a trainer waits for a group to end"""


def listen(host: str) -> socket.socket:
    """Listen at a free port of an address of this machine. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def own_address(address: str) -> str:
    """Return the address of this machine by which it reaches tcp://HOST:PORT; loopback for other addresses. Sends nothing."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://"):
        return "127.0.0.1"
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"  # it cannot be reached, and says so itself


def join(backend: Backend, store: Any, rank: int, own_address: str, device: Any, seconds: float) -> Any:
    """Make the group; returns when both members have joined. own_address: where gloo listens. device: torch.device of NCCL.
    Raises RuntimeError, with gloo after `seconds`."""
    import torch.distributed as dist

    options: Any
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=seconds)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]  # it would listen on another by itself
        return dist.ProcessGroupGloo(store, rank, 2, options)
    if not dist.is_nccl_available():
        raise RuntimeError("this torch is built without NCCL")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    with without_nccl_watchdog():
        group = dist.ProcessGroupNCCL(store, rank, 2, options)
        group.eager_connect_single_device(device)
    return group


@contextmanager
def without_nccl_watchdog() -> Iterator[None]:
    """Disable NCCL's watchdog for a group made in this block: it ends the process when the other end dies, and a service must
    outlive its trainers."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def leave(group: Any, backend: Backend) -> None:
    """Break the group off: pending operations end now at both ends, and its threads can stop."""
    import torch

    if backend == "nccl":
        group.abort()
        return
    try:
        # gloo has no abort; a wait that times out makes it close all its connections
        group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], 1 - group.rank(), 0).wait(timedelta(milliseconds=1))
    except RuntimeError:
        pass


def leave_aside(holder: list[Any], backend: Backend, seconds: float = LEAVE_S) -> None:
    """Leave the group that `holder` holds alone, and destroy it, in a thread of its own; wait for that for so long at most.
    Destroying joins gloo's threads, and one of them may have missed that the group was broken off: it ends with the time-out of
    what it waits for."""
    thread = threading.Thread(target=lambda: leave(holder.pop(), backend), name="rollout-weights-leave", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        log.warning("process group ends late backend=%s waited_s=%.1f", backend, seconds)
