"""Groups that are submitted together, and end together."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from engine.types import Group, Sample, Sampling
from rollout.client.handle import Handle, OnChange
from rollout.client.submission import Prompt, group_of
from transport.errors import RequestTimeout


class Generation:
    """Groups of which those that are not done are cancelled when the block is left, for whatever reason. `submit` sends one;
    `name` makes up an id where there is none.

    Example:
        with Generation(submit, name) as generation:
            generation.submit_all(prompts, sampling, None)
            yield from generation.samples(timeout)
    """

    def __init__(self, submit: Callable[[Group, OnChange], Handle], name: Callable[[str | None], str]) -> None:
        self._submit = submit
        self._name = name
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
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        group_ids: Sequence[str] | None,
    ) -> None:
        """Send a group for each prompt; `sampling` is for all of them, or one for each. Raises ValueError for lists that are
        not of one length, and what `submit` raises."""
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling | None) else list(sampling)
        ids: list[str | None] = [None] * len(prompts) if group_ids is None else list(group_ids)
        if not len(prompts) == len(samplings) == len(ids):
            raise ValueError(f"{len(prompts)} prompts, {len(samplings)} samplings, {len(ids)} group_ids: must be as many")
        for prompt, one, group_id in zip(prompts, samplings, ids, strict=True):
            self.submit(group_of(self._name(group_id), prompt, one))

    def submit(self, group: Group) -> None:
        """Send one more group. Raises InvalidRequest or LimitExceeded for what cannot even be sent."""
        self._handles.append(self._submit(group, self._arrive))

    def samples(self, timeout: float | None) -> Iterator[Sample]:
        """Yield samples as they arrive. Raises the typed error of the first group that fails; RequestTimeout when none arrives
        for `timeout` seconds."""
        left = sum(max(handle.n, 1) for handle in self._handles)  # n < 1 is refused, which is one event as well
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
        """Yield whole groups in the order of the prompts. `timeout`: seconds, longest wait for one group."""
        for handle in self._handles:
            yield handle.result(timeout)

    def _arrive(self, handle: Handle, samples: Sequence[Sample] | None) -> None:
        for sample in [None] if samples is None else samples:
            self._arrived.put((handle, sample))
