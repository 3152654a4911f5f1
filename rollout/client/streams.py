"""Samples of several groups at once: iteration and streams."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from rollout.client.handle import Handle, OnChange
from rollout.engine.values import Group, Sample
from rollout.transport.errors import RequestTimeout


class SampleStream:
    """Waits for the samples of several groups at once. Groups may be added at any time, also those that have samples already.

    Example:
        stream = SampleStream()
        stream.add(client.submit(prompt, Sampling(n=8)))
        handle, sample = stream.get(timeout=60)     # handle.n times per group; `handle.done` may be true before the last time
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Handle, Sample | None]] = queue.SimpleQueue()

    def add(self, handle: Handle) -> None:
        """Add a group."""
        handle.listen(lambda handle, sample: self._queue.put((handle, sample)))

    def get(self, timeout: float | None = None) -> tuple[Handle, Sample]:
        """Wait for the next sample; each comes once. Raises the error of a failed group, RequestTimeout after `timeout`
        seconds."""
        try:
            handle, sample = self._queue.get(timeout=timeout)
        except queue.Empty:
            raise RequestTimeout(f"no sample in {timeout} s") from None
        if sample is None:
            handle.result(0)  # raises why it failed
        assert sample is not None
        return handle, sample


class CallGroups:
    """Groups that belong to one call: leaving the block cancels those that are not done.

    Args:
        submit: sends a group.
        on_change: gets the samples and failures of all of them, in the I/O thread."""

    def __init__(self, submit: Callable[[Group, OnChange], Handle], on_change: OnChange) -> None:
        self.handles: list[Handle] = []
        self._submit, self._on_change = submit, on_change

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self.handles:
            if not handle.done:
                handle.cancel()

    @property
    def n(self) -> int:
        """Return the number of samples of all groups."""
        return sum(handle.n for handle in self.handles)

    def submit_all(self, groups: Iterable[Group]) -> None:
        """Send the groups. Raises what `submit` raises."""
        for group in groups:
            self.handles.append(self._submit(group, self._on_change))


class Generation(CallGroups):
    """Groups of one call that a thread waits for.

    Example:
        with Generation(submit) as generation:
            generation.submit_all(groups)
            yield from generation.samples(timeout)
    """

    def __init__(self, submit: Callable[[Group, OnChange], Handle]) -> None:
        super().__init__(submit, self._arrive)
        self._arrived: queue.SimpleQueue[tuple[Handle, Sample | None]] = queue.SimpleQueue()

    def samples(self, timeout: float | None) -> Iterator[Sample]:
        """Yield samples as they arrive. Raises the error of the first group that fails; RequestTimeout when none arrives for
        `timeout` seconds."""
        left = self.n
        while left:
            try:
                handle, sample = self._arrived.get(timeout=timeout)
            except queue.Empty:
                raise RequestTimeout(f"no sample in {timeout} s; {left} are missing") from None
            if sample is None:
                handle.result(0)  # raises why it failed
            else:
                left -= 1
                yield sample

    def groups(self, timeout: float | None) -> Iterator[list[Sample]]:
        """Yield whole groups in the order of submission. timeout: seconds per group."""
        for handle in self.handles:
            yield handle.result(timeout)

    def _arrive(self, handle: Handle, samples: Sequence[Sample] | None) -> None:
        for sample in [None] if samples is None else samples:
            self._arrived.put((handle, sample))


def finished(submit: Callable[[Group, OnChange], Handle], groups: Iterable[Group], timeout: float | None) -> list[Sample]:
    """Send groups and wait for all of them. timeout: seconds per group. Returns the samples."""
    with Generation(submit) as generation:
        generation.submit_all(groups)
        return [sample for group in generation.groups(timeout) for sample in group]
