"""Handles of groups and refreshes for tasks of an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rollout.client.handle import Handle, OnChange
from rollout.client.refresh import RefreshHandle
from rollout.client.streams import CallGroups
from rollout.client.wakeups import Signal, Wakeups
from rollout.engine.values import Group, PartialSample, Refreshed, Sample, TokenChunk
from rollout.transport.errors import RequestTimeout

T = TypeVar("T")


class AsyncHandle:
    """One submitted group. Any task of any event loop may wait on it. Cancelling a task that waits on it, also by
    `asyncio.timeout`, aborts the group; `asyncio.shield(handle)` keeps it running.

    Example:
        handle = client.submit(prompt, Sampling(n=8))
        async for sample in handle: ...     # as they finish
        group = await handle                # all of them, sorted by index
    """

    def __init__(self, submit: Callable[[OnChange], Handle], wakeups: Wakeups) -> None:
        self._arrived, self._streamed, self._ended = Signal(wakeups), Signal(wakeups), Signal(wakeups)
        self.handle = submit(self._notify)
        """the state of the group, which the I/O thread writes"""

    def __repr__(self) -> str:
        """Describe the group in one line."""
        return f"Async{self.handle!r}"

    def _repr_html_(self) -> str:
        return self.handle._repr_html_()

    def __await__(self) -> Generator[Any, None, list[Sample]]:
        return self.result().__await__()

    def __aiter__(self) -> AsyncGenerator[Sample, None]:
        return self.samples()

    @property
    def group(self) -> Group:
        """Return the group as submitted."""
        return self.handle.group

    @property
    def group_id(self) -> str:
        """Return the id of the group."""
        return self.handle.group_id

    @property
    def n(self) -> int:
        """Return the number of samples."""
        return self.handle.n

    @property
    def done(self) -> bool:
        """Whether all samples have arrived, or the group failed."""
        return self.handle.done

    @property
    def seed(self) -> int | None:
        """Return the seed of the group; None until it is known, if the engine chose it."""
        return self.handle.seed

    @property
    def finished(self) -> list[Sample]:
        """Return the samples that have arrived, in that order; also of a failed group."""
        return self.handle.finished

    async def result(self, timeout: float | None = None) -> list[Sample]:
        """Wait for all samples, sorted by index. A failed child is among them, with finish_reason "error".

        Raises the error of the group; RequestTimeout after `timeout` seconds (the group stays live)."""
        await self._wait(self._ended, lambda: self.handle.done, timeout)
        return self.handle.result(0)

    async def samples(self, timeout: float | None = None) -> AsyncGenerator[Sample, None]:
        """Yield the samples in the order in which they finish; each call starts with the first. timeout: seconds for all of
        them. Leaving the iteration does not abort the group.

        Raises as `result`, after the samples that arrived before."""
        started = asyncio.get_running_loop().time()
        handle, taken = self.handle, 0
        while True:
            await self._wait(self._arrived, lambda: handle.done or handle.arrived > taken, timeout, started)  # noqa: B023
            fresh = handle.finished[taken:]
            if not fresh:
                handle.result(0)  # raises why the group failed
                return
            taken += len(fresh)
            for sample in fresh:
                yield sample

    async def tokens(self) -> AsyncGenerator[TokenChunk, None]:
        """Yield new tokens of running children (`Sampling.stream_every`), the known ones first, until the group ends. The last
        tokens of a child come only with its sample: `await handle` afterwards returns all. One iteration per group.

        Raises as `result`, after the chunks that arrived before."""
        chunks: deque[TokenChunk] = deque()

        def add(handle: Handle, chunk: TokenChunk) -> None:
            chunks.append(chunk)
            self._streamed.notify()

        self.handle.on_tokens(add)
        while not self.done or chunks:
            await self._wait(self._streamed, lambda: chunks or self.done)
            while chunks:
                yield chunks.popleft()
        self.handle.result(0)  # raises why the group failed

    def partial_samples(self) -> list[PartialSample]:
        """Return the known tokens of unfinished children, as `Handle.partial_samples`."""
        return self.handle.partial_samples()

    def cancel(self, indices: Iterable[int] | None = None) -> None:
        """Abort all children, or those at `indices`, as `Handle.cancel`; returns at once. They return as "aborted" with their
        tokens so far. Raises InvalidRequest for an index that the group does not have."""
        self.handle.cancel(indices)

    async def _wait(
        self, signal: Signal, condition: Callable[[], object], timeout: float | None = None, started: float | None = None
    ) -> None:
        """Wait for a condition. timeout: seconds since `started`, a time of the loop; None = now. Raises RequestTimeout."""
        started = asyncio.get_running_loop().time() if started is None else started
        try:
            async with asyncio.timeout_at(None if timeout is None else started + timeout):
                await signal.wait_for(condition)
        except TimeoutError:
            raise self.handle.late(timeout) from None
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _notify(self, handle: Handle, samples: Sequence[Sample] | None) -> None:
        self._arrived.notify()
        if handle.done:
            self._ended.notify()
            self._streamed.notify()


class AsyncGeneration(CallGroups):
    """Groups of one call that a task waits for.

    Example:
        with AsyncGeneration(submit, wakeups) as generation:
            generation.submit_all(groups)
            async for sample in generation.samples(timeout): ...
    """

    def __init__(self, submit: Callable[[Group, OnChange], Handle], wakeups: Wakeups) -> None:
        super().__init__(submit, self._arrive)
        self._changed = Signal(wakeups)
        self._arrived: deque[tuple[Handle, Sequence[Sample] | None]] = deque()

    async def samples(self, timeout: float | None) -> AsyncGenerator[Sample, None]:
        """Yield samples as they arrive. Raises the error of the first group that fails; RequestTimeout when none arrives for
        `timeout` seconds."""
        left = self.n
        while left:
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait_for(lambda: self._arrived)
            except TimeoutError:
                raise RequestTimeout(f"no sample in {timeout} s; {left} are missing") from None
            while self._arrived:
                handle, samples = self._arrived.popleft()
                if samples is None:
                    handle.result(0)  # raises why it failed
                for sample in samples or ():
                    left -= 1
                    yield sample

    async def groups(self, timeout: float | None) -> AsyncGenerator[list[Sample], None]:
        """Yield whole groups in the order of submission. timeout: seconds per group."""
        for handle in self.handles:
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait_for(lambda: handle.done)  # noqa: B023
            except TimeoutError:
                raise handle.late(timeout) from None
            yield handle.result(0)

    def _arrive(self, handle: Handle, samples: Sequence[Sample] | None) -> None:
        self._arrived.append((handle, samples))
        self._changed.notify()


class AsyncRefreshHandle:
    """A refresh in progress. `await handle` returns when the version is live. The refresh continues when the task is
    cancelled."""

    def __init__(self, handle: RefreshHandle) -> None:
        self._handle = handle

    def __await__(self) -> Generator[Any, None, Refreshed]:
        return self.result().__await__()

    @property
    def done(self) -> bool:
        """Whether the version is live, or the refresh failed."""
        return self._handle.done

    async def result(self, timeout: float | None = None) -> Refreshed:
        """Wait until the version is live. Raises as `AsyncRolloutClient.refresh`, and RequestTimeout after `timeout` seconds,
        while the refresh continues."""
        return await answer_async(self._handle.future, timeout, "end of the refresh")


async def answer_async(future: Future[T], timeout: float | None, what: str) -> T:
    """Wait for the answer to a request. Raises RequestTimeout after `timeout` seconds; the request is not repeated then, nor
    when the task is cancelled."""
    try:
        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(future)
    except RequestTimeout:
        raise
    except TimeoutError:
        raise RequestTimeout(f"no {what} within {timeout:.3g} s") from None
