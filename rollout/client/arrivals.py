"""Samples of several groups, whichever comes first."""

from __future__ import annotations

import queue

from engine.types import Sample
from rollout.client.handle import Handle
from transport.errors import RequestTimeout


class SampleStream:
    """Waits for the samples of several groups at once. Groups may be added at any time, those that have samples already
    included.

    Example:
        stream = SampleStream()
        stream.add(client.submit(prompt, Sampling(n=8)))
        handle, sample = stream.get(timeout=60)     # handle.n of each group; it may be `done` before its last one is got
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Handle, Sample | None]] = queue.SimpleQueue()

    def add(self, handle: Handle) -> None:
        """Wait for the samples of this group as well."""
        handle.listen(lambda handle, sample: self._queue.put((handle, sample)))

    def get(self, timeout: float | None = None) -> tuple[Handle, Sample]:
        """Wait for the next sample; each comes once. Raises the typed error of a group that failed, RequestTimeout after
        `timeout` seconds."""
        try:
            handle, sample = self._queue.get(timeout=timeout)
        except queue.Empty:
            raise RequestTimeout(f"no sample in {timeout} s") from None
        if sample is None:
            handle.result(0)  # raises why it failed
        assert sample is not None
        return handle, sample
