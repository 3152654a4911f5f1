"""The service behind the facade, for one event loop.

    event loop --submit--> client's I/O thread --Handle.listen--> deque --call_soon_threadsafe, once a batch--> futures

No thread waits for a sample. What blocks (status, pause, refresh, sleep) runs in two small pools: looks have one of their own,
so that a drain of an hour does not hide the service's health.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from engine.types import Group, KVPolicy, Sample, Sampling
from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.client.scoring import scored_group
from rollout.http.errors import HttpError
from transport.errors import InvalidRequest
from transport.messages import Welcome

CONTROLS = 4
"""calls that may change the service at the same time"""
STATUS_AGE_S = 0.25
"""a status so old is told again"""
MAX_OPEN = 65_536
"""groups that may be open at a time"""

T = TypeVar("T")


class Gone(Exception):
    """Whoever asked has hung up."""


class Arrivals:
    """Wakes the event loop for the groups that are done; `tell` is for the client's I/O thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done: deque[asyncio.Future[None]] = deque()
        self._woken = False

    def tell(self, future: asyncio.Future[None], handle: Handle, sample: Sample | None) -> None:
        """Have a future answered in the event loop once its group is done. One wake-up serves all until it is looked at."""
        if not handle.done:
            return
        self._done.append(future)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._woken = False  # before the deque is read: what comes after wakes again
        while self._done:
            future = self._done.popleft()
            if not future.done():
                future.set_result(None)


class Upstream:
    """Asks one client. Methods are for the event loop."""

    def __init__(self, client: RolloutClient) -> None:
        self.client = client
        self.kv: KVPolicy = "keep"
        """of the next refresh: what the last pause asked for"""
        self._loop = asyncio.get_running_loop()
        self._arrivals = Arrivals(self._loop)
        self._live: dict[str, int] = {}
        """newest version seen, of the present incarnation"""
        self._looks = ThreadPoolExecutor(1, "rollout-http-look")
        self._controls = ThreadPoolExecutor(CONTROLS, "rollout-http-control")
        self._asking: asyncio.Future[dict[str, Any]] | None = None
        self._asked_at = -STATUS_AGE_S
        self._open: set[Handle] = set()

    @property
    def info(self) -> Welcome:
        return self.client.info

    @property
    def version(self) -> int:
        """Newest version of the weights that this process has seen."""
        return max(self.info.version, self._live.get(self.info.incarnation, 0))

    def saw(self, version: int) -> None:
        """Note a version of the weights."""
        if version > self._live.get(self.info.incarnation, -1):
            self._live = {self.info.incarnation: version}

    def check(self, prompt: Sequence[int] | np.ndarray, sampling: Sampling) -> np.ndarray:
        """Check a group as the service would, which then never sees a bad one. Returns the prompt: [prompt_tokens] int32.
        Raises InvalidRequest."""
        try:
            array = np.array(prompt, np.int32)
        except OverflowError:
            raise InvalidRequest("the prompt holds a token id that is no 32-bit integer") from None
        try:
            Group("http", array, sampling).validate(self.info.limits, self.info.vocab_size, self.info.context)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        return array

    async def generate(self, groups: Sequence[tuple[np.ndarray, Sampling]]) -> list[list[Sample]]:
        """Sample groups that were checked; returns the children of each, sorted by index. Cancelled, it cancels the groups.

        Raises the service's typed error of the first group that fails, HttpError for a child that the service failed on."""
        if len(self._open) + len(groups) > MAX_OPEN:
            raise HttpError(503, f"{len(self._open)} groups are open: at most {MAX_OPEN}; try again")
        return await self._children(partial(self.client.submit, prompt, sampling) for prompt, sampling in groups)

    async def score(self, prompts: Sequence[np.ndarray], sampling: Sampling) -> list[Sample | None]:
        """Score prompts that were checked; returns for each a sample whose tokens are those behind the first, None for a prompt
        of one token. `sampling`: which log-probs. Otherwise as `generate`."""
        long = [prompt for prompt in prompts if len(prompt) > 1]
        submit = self.client._submit
        made = (scored_group(self.client._id(None), prompt[:1], [prompt[1:]], sampling) for prompt in long)
        scored = iter(await self._children(partial(submit, group) for group in made))
        samples = [next(scored)[0] if len(prompt) > 1 else None for prompt in prompts]
        if any(sample is not None and sample.finish_reason != "scored" for sample in samples):
            raise HttpError(503, "somebody ended all requests before this prompt was scored; try again")
        return samples

    async def _children(self, submits: Iterable[Callable[[], Handle]]) -> list[list[Sample]]:
        """Submit groups and await them; cancelled, cancel them."""
        handles, futures = [], []
        try:
            for submit in submits:
                handle = submit()
                future: asyncio.Future[None] = self._loop.create_future()
                handles.append(handle)
                futures.append(future)
                self._open.add(handle)
                handle.listen(partial(self._arrivals.tell, future))
            for future in futures:
                await future
            return [self._finished(handle) for handle in handles]
        finally:
            for handle in handles:
                self._open.discard(handle)
                if not handle.done:
                    handle.cancel()

    def _finished(self, handle: Handle) -> list[Sample]:
        samples = handle.result(0)
        for sample in samples:
            if sample.finish_reason == "error":
                raise HttpError(500, f"the service failed on sample {sample.index}: {sample.error}")
            if not np.isfinite(sample.logprobs).all():
                raise HttpError(500, f"sample {sample.index} has a log-probability that is not finite")
            if sample.weight_versions:
                self.saw(sample.weight_versions[-1][1])
        return samples

    def abort_own(self) -> int:
        """Ask for the end of all groups that came through this process. Returns how many there are."""
        open_now = [handle for handle in self._open if not handle.done]
        for handle in open_now:
            handle.cancel()
        return len(open_now)

    async def status(self) -> dict[str, Any]:
        """Ask for the service's status, once for all who ask at the same time. Raises RolloutError."""
        if self._asking is None or (self._asking.done() and time.monotonic() - self._asked_at > STATUS_AGE_S):
            self._asked_at = time.monotonic()
            self._asking = asyncio.ensure_future(self._loop.run_in_executor(self._looks, self.client.status))
            self._asking.add_done_callback(_looked_at)
        status: dict[str, Any] = await asyncio.shield(self._asking)
        self.saw(int(status["version"]))
        return status

    async def control(self, call: Callable[[], T]) -> T:
        """Run what changes the service, and blocks. What was known of its state is forgotten."""
        try:
            return await self._loop.run_in_executor(self._controls, call)
        finally:
            self._asking = None

    def close(self) -> None:
        """Let go of the threads; the client is its owner's."""
        self._looks.shutdown(wait=False, cancel_futures=True)
        self._controls.shutdown(wait=False, cancel_futures=True)


def _looked_at(asking: asyncio.Future[dict[str, Any]]) -> None:
    """Look at the error of a status that nobody waited for: asyncio complains of those."""
    if not asking.cancelled():
        asking.exception()
