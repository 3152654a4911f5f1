"""A service in a process of its own that may be killed and started again, with an engine whose tokens depend on the seed.

    python -m tests.support.lasting ENDPOINT READY_FILE JOURNAL STEP_SECONDS VERSION

JOURNAL "-": none. SIGUSR1 raises the version of the weights by one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from rollout.engine.values import Group, Sample
from tests.support.fake_engine import VOCAB, FakeEngine
from tests.support.ports import free_port
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


class SeededEngine(FakeEngine):
    """Draws a seed where the group has none, as the real one does; a child's tokens are shifted by it."""

    def __init__(self, step_s: float = 0.0, version: int = 0) -> None:
        super().__init__(step_s=step_s)
        self.version = version
        self.drawn = 0

    def submit(self, group: Group, client: str = "") -> None:
        if group.sampling.seed is None:
            self.drawn += 1
            seed = time.monotonic_ns()  # another one in each process
            group = msgspec.structs.replace(group, sampling=msgspec.structs.replace(group.sampling, seed=seed))
        super().submit(group, client)

    def _end(self, child: object, reason: str) -> Sample:
        sample = super()._end(child, reason)  # type: ignore[arg-type]
        seed = child.group.sampling.seed  # type: ignore[attr-defined]
        tokens = (sample.token_ids + seed % VOCAB) % VOCAB
        return msgspec.structs.replace(sample, token_ids=tokens.astype("int32"), seed=seed)


def expected(prompt: int, index: int, count: int, seed: int) -> list[int]:
    return [(prompt + 7 * index + k + seed) % VOCAB for k in range(count)]


class Process:
    """One life of the service after the other, at one address."""

    def __init__(self, folder: Path, journal: Path | None, step_s: float = 0.002) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._folder = folder
        self._journal = "-" if journal is None else str(journal)
        self._step_s = step_s
        self.lives = 0

    def start(self, version: int = 0) -> Process:
        self.lives += 1
        ready = self._folder / f"ready{self.lives}"
        words = [self.endpoint, str(ready), self._journal, str(self._step_s), str(version)]
        self._popen = subprocess.Popen([sys.executable, "-m", "tests.support.lasting", *words], cwd=ROOT)
        until(lambda: ready.exists() or self._popen.poll() is not None, "the service listens")
        assert self._popen.poll() is None
        return self

    def refresh(self) -> None:
        self._popen.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(60)


def main() -> None:
    from rollout.config import ServiceConfig
    from rollout.process import write_atomically
    from rollout.service.build import open_service
    from rollout.service.journal import Journal

    endpoint, ready, journal, step_s, version = sys.argv[1:]
    engine = SeededEngine(float(step_s), int(version))

    def refresh(number: int, frame: object) -> None:
        engine.version += 1

    signal.signal(signal.SIGUSR1, refresh)
    opened = None if journal == "-" else Journal(journal, "seeded")
    service = open_service(engine, ServiceConfig(endpoint=endpoint), journal=opened)
    write_atomically(Path(ready), service.endpoint)
    service.run()


if __name__ == "__main__":
    main()
