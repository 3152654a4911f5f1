"""A service whose loop can be made to stand:  python -m tests.support.standing ENDPOINT READY_FILE JOURNAL [EXIT_STATUS]

SIGUSR1: the next step does not return. EXIT_STATUS: end with it at once.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from rollout.config import ServiceConfig
from rollout.engine.values import Sample
from rollout.process import write_atomically
from rollout.service.build import open_service
from rollout.service.journal import Journal
from rollout.service.watchdog import Watchdog
from tests.support.lasting import SeededEngine

EXIT_S = 1.0


class Standing(SeededEngine):
    def __init__(self) -> None:
        super().__init__(step_s=0.002)
        self.stands = False

    def step(self) -> list[Sample]:
        if self.stands:
            threading.Event().wait()
        return super().step()


def main() -> None:
    endpoint, ready, journal, *status = sys.argv[1:]
    if status:
        sys.exit(int(status[0]))
    engine = Standing()
    service = open_service(engine, ServiceConfig(endpoint=endpoint, stall_s=0.5), journal=Journal(journal, "seeded"))

    def stand(number: int, frame: object) -> None:
        engine.stands = True

    signal.signal(signal.SIGUSR1, stand)
    signal.signal(signal.SIGTERM, lambda number, frame: service.stop("SIGTERM"))
    watchdog = Watchdog(service.watch, EXIT_S)
    write_atomically(Path(ready), service.endpoint)
    service.run()
    watchdog.close()


if __name__ == "__main__":
    main()
