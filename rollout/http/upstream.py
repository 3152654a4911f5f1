"""The service behind the facade, for one event loop.

Groups go through `RequestQueue`. Blocking calls (status, pause, refresh, sleep) run in two small thread pools, one of them for
reads alone, so that a drain of an hour does not hide the service's health.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from engine.types import Group, KVPolicy, Sample, Sampling, TokenChunk
from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.http.errors import HttpError
from rollout.http.requests import Part, PromptRequest, RequestQueue, Submit
from transport.errors import Busy, InvalidRequest
from transport.messages import Welcome

CONTROLS = 4
"""calls that may change the service at the same time"""
MAX_WAITING_PARTS = 256
"""of one stream, that whoever asked has not taken"""
STATUS_AGE_S = 0.25
"""a status so old is told again"""

T = TypeVar("T")
Wanted = tuple[np.ndarray, Sampling]
Names = Sequence[Collection[str]]


class Gone(Exception):
    """Whoever asked has hung up."""


class LoadedAdapter(msgspec.Struct, frozen=True):
    """The LoRA adapter that the live weights hold."""

    name: str
    path: str


class Upstream:
    """Asks one client. Methods are for the event loop."""

    def __init__(self, client: RolloutClient) -> None:
        self.client = client
        self.kv: KVPolicy = "keep"
        """of weights whose request does not say: what the last pause asked for. Read once, when the request comes"""
        self.adapter: LoadedAdapter | None = None
        """as far as it came through this process"""
        self._loop = asyncio.get_running_loop()
        self._asks = RequestQueue(client)
        self._live: dict[str, int] = {}
        """newest version seen, of the present incarnation"""
        self._looks = ThreadPoolExecutor(1, "rollout-http-look")
        self._controls = ThreadPoolExecutor(CONTROLS, "rollout-http-control")
        self._changing = False
        """new weights are on their way through this process"""
        self._asking: asyncio.Future[dict[str, Any]] | None = None
        self._asked_at = -STATUS_AGE_S

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
        most = self.info.limits.max_prompt_tokens
        if len(prompt) > most:  # before it is copied
            raise InvalidRequest(f"prompt of {len(prompt)} tokens: must be 1 to {most} (Limits.max_prompt_tokens)")
        try:
            array = np.array(prompt, np.int32)
        except OverflowError:
            raise InvalidRequest("the prompt holds a token id that is no 32-bit integer") from None
        try:
            Group("http", array, sampling).validate(self.info.limits, self.info.vocab_size, self.info.context)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        return array

    async def generate(self, groups: Sequence[Wanted], names: Names) -> list[list[Sample]]:
        """Sample groups that were checked; returns the children of each, sorted by index. Cancelled, it cancels the groups.
        `names`: of each group, by which `abort` finds it.

        Raises the service's typed error of the first group that fails, HttpError for a child that the service failed on."""
        return await self._children([PromptRequest(*group, names=own) for group, own in zip(groups, names, strict=True)])

    async def parts(self, groups: Sequence[Wanted], names: Names) -> AsyncGenerator[tuple[int, Part], None]:
        """Sample groups that were checked, and yield tokens of their children as they come, each with the number of its group;
        the last part of a child is its sample, which has all its tokens. Otherwise as `generate`.

        What a slow reader has not taken is bounded: it misses parts, and gets these tokens with the sample."""
        come: deque[tuple[int, Part | None]] = deque()
        fresh = asyncio.Event()

        def tell(number: int, part: Part | None) -> None:
            if not isinstance(part, TokenChunk) or len(come) < MAX_WAITING_PARTS:
                come.append((number, part))
                fresh.set()

        asks = [PromptRequest(*group, partial(tell, i), own) for i, (group, own) in enumerate(zip(groups, names, strict=True))]
        running = len(asks)
        try:
            self._asks.open(asks)
            while running:
                await fresh.wait()
                fresh.clear()
                while come:
                    number, part = come.popleft()
                    if isinstance(part, Sample):
                        self._finished([part])
                    if part is not None:
                        yield number, part
                    else:
                        asks[number].done.result()  # raises why it failed
                        running -= 1
        finally:
            self._asks.close(asks)

    async def score(self, prompts: Sequence[np.ndarray], sampling: Sampling) -> list[Sample | None]:
        """Score prompts that were checked; returns for each a sample whose tokens are those behind the first, None for a prompt
        of one token. `sampling`: which log-probs. Otherwise as `generate`."""

        def submit(prompt: np.ndarray, sampling: Sampling) -> Handle:
            return self.client.submit_score(prompt[:1], [prompt[1:]], sampling)

        asks = [PromptRequest(prompt, sampling) for prompt in prompts if len(prompt) > 1]
        scored = iter(await self._children(asks, submit))
        samples = [next(scored)[0] if len(prompt) > 1 else None for prompt in prompts]
        if any(sample is not None and sample.finish_reason != "scored" for sample in samples):
            raise HttpError(503, "somebody ended all requests before this prompt was scored; try again")
        return samples

    async def _children(self, asks: Sequence[PromptRequest], submit: Submit | None = None) -> list[list[Sample]]:
        """Await what is asked for; cancelled, cancel it."""
        try:
            self._asks.open(asks, submit)
            for ask in asks:
                await ask.done
            return [self._finished(ask.samples) for ask in asks]
        finally:
            self._asks.close(asks)

    def _finished(self, samples: list[Sample]) -> list[Sample]:
        for sample in samples:
            if sample.finish_reason == "error":
                raise HttpError(500, f"the service failed on sample {sample.index}: {sample.error}")
            if not np.isfinite(sample.logprobs).all():
                raise HttpError(500, f"sample {sample.index} has a log-probability that is not finite")
            if sample.weight_versions:
                self.saw(sample.weight_versions[-1][1])
        return samples

    def abort_own(self) -> int:
        """Ask for the end of all groups that came through this process. Returns how many requests wait for them."""
        return self._asks.abort()

    def abort(self, names: Collection[str]) -> int:
        """Ask for the end of those that go by one of these names; unknown ones may have ended. Returns how many there were."""
        wanted = frozenset(names)
        return self._asks.abort(lambda ask: not wanted.isdisjoint(ask.names))

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

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Change the weights, and what is known of them (`adapter`), in the block. Raises Busy while another request does."""
        if self._changing:
            raise Busy("another request is changing the weights: try again")
        self._changing = True
        try:
            yield
        finally:
            self._changing = False

    def close(self) -> None:
        """Let go of the threads; the client is its owner's."""
        self._looks.shutdown(wait=False, cancel_futures=True)
        self._controls.shutdown(wait=False, cancel_futures=True)


def _looked_at(asking: asyncio.Future[dict[str, Any]]) -> None:
    """Look at the error of a status that nobody waited for: asyncio complains of those."""
    if not asking.cancelled():
        asking.exception()
