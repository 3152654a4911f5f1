"""Samples of several groups at once: iteration, streams, scores."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from rollout.client.handle import Handle, OnChange
from rollout.client.submission import TokenIds, group_of, scored_group
from rollout.engine.types import Group, Sample, Sampling
from rollout.transport.errors import GroupFailed, InvalidRequest, RequestTimeout


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


class Generation:
    """Groups that belong to one call: leaving the block cancels those that are not done.

    Args:
        submit: sends a group.
        group_id: makes an id for a group that has none.

    Example:
        with Generation(submit, group_id) as generation:
            generation.submit_all(prompts, sampling, None)
            yield from generation.samples(timeout)
    """

    def __init__(self, submit: Callable[[Group, OnChange], Handle], group_id: Callable[[str | None], str]) -> None:
        self._submit = submit
        self._group_id = group_id
        self._handles: list[Handle] = []
        self._arrived: queue.SimpleQueue[tuple[Handle, Sample | None]] = queue.SimpleQueue()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            if not handle.done:
                handle.cancel()

    def submit_all(
        self,
        prompts: Sequence[TokenIds],
        sampling: Sampling | Sequence[Sampling] | None,
        group_ids: Sequence[str] | None,
    ) -> None:
        """Send a group for each prompt. sampling: for all of them, or one each. Raises ValueError for lists of different
        lengths, and what `submit` raises."""
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling | None) else list(sampling)
        ids: list[str | None] = [None] * len(prompts) if group_ids is None else list(group_ids)
        if not len(prompts) == len(samplings) == len(ids):
            raise ValueError(f"{len(prompts)} prompts, {len(samplings)} samplings, {len(ids)} group_ids: must be as many")
        for prompt, one, group_id in zip(prompts, samplings, ids, strict=True):
            self._add(group_of(self._group_id(group_id), prompt, one))

    def samples(self, timeout: float | None) -> Iterator[Sample]:
        """Yield samples as they arrive. Raises the error of the first group that fails; RequestTimeout when none arrives for
        `timeout` seconds."""
        left = sum(handle.n for handle in self._handles)
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
        """Yield whole groups in the order of the prompts. timeout: seconds per group."""
        for handle in self._handles:
            yield handle.result(timeout)

    def scores(
        self,
        prompts: Sequence[TokenIds],
        completions: Sequence[Sequence[TokenIds]],
        sampling: Sampling | None,
        timeout: float | None,
    ) -> list[list[Sample]]:
        """Score the completions of each prompt, see `RolloutClient.score`."""
        if len(prompts) != len(completions):
            raise InvalidRequest(f"{len(prompts)} prompts, {len(completions)} lists of completions: must be as many")
        for prompt, mine in zip(prompts, completions, strict=True):
            self._add(scored_group(self._group_id(None), prompt, mine, sampling))
        groups = list(self.groups(timeout))
        for sample in itertools.chain.from_iterable(groups):
            if sample.finish_reason != "scored":
                why = sample.error or "it was aborted"
                raise GroupFailed(f"completion {sample.index} ended as {sample.finish_reason!r}: {why}", sample.group_id)
        return groups

    def _add(self, group: Group) -> None:
        self._handles.append(self._submit(group, self._arrive))

    def _arrive(self, handle: Handle, samples: Sequence[Sample] | None) -> None:
        for sample in [None] if samples is None else samples:
            self._arrived.put((handle, sample))
