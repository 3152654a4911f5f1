"""A service of the watermark model as a process:  python -m tests.support.watermark_service READY_FILE FAULT_FILE

While FAULT_FILE exists, a commit fails in the middle of the slice whose number stands in it. SIGUSR1: the time of a lease goes
by for the refresh that is staged.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rollout.config import ServiceConfig
from rollout.engine.weights.buffers import RefreshBuffers
from rollout.process import write_atomically
from rollout.service.build import open_service
from rollout.transport.weights import distributed
from tests.support.broken_commit import Failing
from tests.support.watermark import watermark_engine

LEASE_S = 100.0


def main() -> None:
    ready, fault = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    distributed.SLOT_BYTES = 500_000  # as the pushers
    slices = RefreshBuffers.slices

    def failing(self: RefreshBuffers, name: str) -> Iterator[Any]:
        for number, (live, staged, scratch) in enumerate(slices(self, name), 2 * int(name[1:])):  # two slices a tensor
            fails = fault.exists() and number == int(fault.read_text())
            yield Failing(live, 1) if fails else live, staged, scratch

    RefreshBuffers.slices = failing  # type: ignore[method-assign]
    config = ServiceConfig(endpoint="tcp://127.0.0.1:*", lease_s=LEASE_S, client_grace_s=60.0)
    engine = watermark_engine()
    step = engine.step
    engine.step = lambda: (time.sleep(0.002), step())[1]  # type: ignore[method-assign]  # leave the core to the pushers
    service = open_service(engine, config)

    def age(number: int, frame: Any) -> None:
        if (push := service._refreshes._open) is not None:
            push.last_received_at -= 2 * LEASE_S

    signal.signal(signal.SIGUSR1, age)
    signal.signal(signal.SIGTERM, lambda number, frame: service.stop("SIGTERM"))
    write_atomically(ready, service.endpoint)
    service.run()


if __name__ == "__main__":
    main()
