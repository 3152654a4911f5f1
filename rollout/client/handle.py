"""Handle: one submitted group, seen from the trainer's side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from engine.types import Sample
from transport.errors import InvalidRequest, RequestTimeout, RolloutError
from transport.frames import Frame

OnChange = Callable[["Handle", Sample | None], None]
"""called in the I/O thread with each sample of a group, with None when the group failed"""


class Handle:
    """One submitted group. Any thread may wait on it; only the client's I/O thread changes it.

    Example:
        handle = client.submit(prompt, Sampling(n=8))
        for sample in handle.samples(timeout=60): ...     # as they finish
        group = handle.result(timeout=600)                # all n, sorted by index
    """

    def __init__(self, group_id: str, n: int, prompt_tokens: int, frames: list[Frame], digest: bytes) -> None:
        self.group_id = group_id
        self.n = n
        self.prompt_tokens = prompt_tokens
        self.frames = frames
        """its Submit, kept so that it can be repeated"""
        self.digest = digest
        self.cancelled = False
        """the client has asked for its end"""
        self.on_cancel: Callable[[Handle], None] | None = None
        self.on_change: OnChange | None = None
        self._changed = threading.Condition()
        self._samples: list[Sample] = []
        self._indices: set[int] = set()
        self._error: RolloutError | None = None
        self._ended = False

    @property
    def done(self) -> bool:
        """All n samples are here, or it failed."""
        return self._ended

    def result(self, timeout: float | None = None) -> list[Sample]:
        """Wait for the n samples, sorted by index. A child that failed is among them, with finish_reason "error".

        Raises the typed error of a refusal or a lost service, RequestTimeout after `timeout` seconds (the group stays live)."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, timeout):
                raise RequestTimeout(f"{len(self._samples)} of {self.n} samples after {timeout} s", self.group_id)
            if self._error is not None:
                raise self._error
            return sorted(self._samples, key=lambda sample: sample.index)

    def samples(self, timeout: float | None = None) -> Iterator[Sample]:
        """Yield each sample when it ends, in that order; every call starts with the first. `timeout`: seconds for all of them.

        Raises as `result`, after the samples that came before."""
        deadline = None if timeout is None else time.monotonic() + timeout
        taken = 0
        while True:
            with self._changed:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._changed.wait_for(lambda: self._ended or len(self._samples) > taken, left):  # noqa: B023
                    raise RequestTimeout(f"{len(self._samples)} of {self.n} samples after {timeout} s", self.group_id)
                fresh = self._samples[taken:]
                if not fresh:
                    if self._error is not None:
                        raise self._error
                    return
            taken += len(fresh)
            yield from fresh

    def cancel(self) -> None:
        """Ask for an early end: the children not finished come back as "aborted" with the tokens they have."""
        if self.on_cancel is not None:
            self.on_cancel(self)

    # called by the I/O thread only

    def add_sample(self, sample: Sample) -> None:
        """Hand out a sample that has come; a repeated one changes nothing. Raises ValueError for one this group cannot have."""
        if not 0 <= sample.index < self.n:
            raise ValueError(f"sample {sample.index} of a group of {self.n}")
        with self._changed:
            if self._ended or sample.index in self._indices:
                return
            self._indices.add(sample.index)
            self._samples.append(sample)
            self._ended = len(self._samples) == self.n
            self._changed.notify_all()
        if self.on_change is not None:
            self.on_change(self, sample)

    def fail(self, error: RolloutError) -> None:
        """Raise `error` for everybody who waits. Nothing to do for a group that has ended."""
        with self._changed:
            if self._ended:
                return
            self._error, self._ended = error, True
            self._changed.notify_all()
        if self.on_change is not None:
            self.on_change(self, None)

    def abort_unsent(self, max_n: int) -> None:
        """End a group that the service never got: n aborted samples without tokens, if it would have been served."""
        if not 1 <= self.n <= max_n:
            self.fail(InvalidRequest(f"n={self.n}: must be between 1 and {max_n} (Limits.max_n)", self.group_id))
            return
        for index in range(self.n):
            self.add_sample(
                Sample(
                    group_id=self.group_id,
                    index=index,
                    token_ids=np.zeros(0, np.int32),
                    logprobs=np.zeros(0, np.float32),
                    finish_reason="aborted",
                    weight_versions=[],
                    prompt_tokens=self.prompt_tokens,
                )
            )
