"""Sampling, streaming and scoring of prompts, for all HTTP APIs."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request

from rollout.client.handle import Handle
from rollout.engine.values import FinishReason, Group, Sample, Sampling, TokenChunk
from rollout.http.endpoints import unless_disconnected
from rollout.http.errors import HttpError, bad
from rollout.http.metrics import RequestMeter
from rollout.http.prompt_pool import PromptPool
from rollout.http.request_log import count_tokens
from rollout.http.requests import Part, PromptRequest, RequestQueue, Submit
from rollout.http.settings import Settings
from rollout.http.text import ChunkDecoder, Text, TextChunk, TextOptions
from rollout.http.upstream import Upstream, model_name
from rollout.transport.errors import InvalidRequest

MAX_NAME = 256
"""characters of a request id"""

ABORTED = 499
"""status of a request that was aborted before there was anything to return: clients do not repeat it"""


class PromptGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a request, and the options of its `sampling.n` samples. Made by `GenerationService.group`, which checks
    it."""

    prompt: np.ndarray
    """token ids, [prompt_tokens] int32"""
    sampling: Sampling
    full: bool = False
    """the prompt leaves no room for a token, and the samples are empty (`--overlong empty`)"""
    names: Collection[str] = ()
    """by which the request can be aborted"""
    text: TextOptions | None = None
    """of a stream; None = without text"""


class Arrival:
    """A request from the moment its body was read: its text may still be encoded, or its prompt scored.

    Args:
        names: by which it can be aborted.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self.aborted: frozenset[str] = frozenset()
        """those of the names that were aborted"""
        self.sent = False
        """its groups are in the queue, which aborts them"""

    def abort(self, names: frozenset[str] | None) -> bool:
        """Abort it, or what has one of these names. Returns whether there was anything."""
        found = self.names if names is None else self.names & names
        self.aborted |= found
        return bool(found) and not self.sent


class GenerationService:
    """Checks prompts, and samples, streams and scores them. For one event loop.

    Args:
        text: decodes tokens.
        prompts: encodes text.
    """

    def __init__(self, upstream: Upstream, text: Text, prompts: PromptPool, settings: Settings) -> None:
        self.upstream, self.text, self.prompts = upstream, text, prompts
        self.limits = settings.limits
        self.models = settings.names or (model_name(upstream.info),)
        """names of the model; responses use the first unless the request has another"""
        self.meter = RequestMeter()
        self._overlong = settings.overlong
        self._queue = RequestQueue(upstream.client, settings.limits)
        self._arrivals: set[Arrival] = set()
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(6)

    # requests

    def model(self, wanted: str | None) -> str:
        """Return the model name for a response. Raises HttpError 404 for an unknown one."""
        adapter = self.upstream.adapter
        if wanted is not None and wanted not in self.models and (adapter is None or wanted != adapter.name):
            raise HttpError(404, f"the model {wanted[:200]!r} is unknown: this gateway serves {self.models[0]!r}", "model")
        return wanted or self.models[0]

    @contextmanager
    def arrival(self, names: Collection[str]) -> Iterator[Arrival]:
        """Register a request while it is prepared and sampled. A stream leaves the block before its groups are sent, without
        giving way to another request in between."""
        arrival = Arrival(names)
        self._arrivals.add(arrival)
        try:
            yield arrival
        finally:
            self._arrivals.remove(arrival)

    def new_id(self, kind: str) -> str:
        return f"{kind}-{self._prefix}{next(self._numbers):x}"

    def max_tokens(self, wanted: int | None, default: int | None, prompt_tokens: int) -> int:
        """Return the maximum number of tokens of a sample. default: if the request has none; None = the rest of the context.
        Raises HttpError for a prompt that leaves no room."""
        info = self.upstream.info
        room = info.context - prompt_tokens
        if self._overlong == "empty" and room < (wanted or 1):
            return max(1, room)
        if wanted is not None:
            return wanted
        if room < 1:
            raise bad(
                f"prompt of {prompt_tokens} tokens: leaves no room for a token in the context of {info.context}", "max_tokens"
            )
        return min(room if default is None else default, room, info.limits.max_tokens)

    def group(
        self, ids: Sequence[int], sampling: Sampling, names: Collection[str], text: TextOptions | None = None
    ) -> PromptGroup:
        """Check a prompt and its options as the service does. Raises InvalidRequest."""
        full = self._overlong == "empty" and len(ids) >= self.upstream.info.context
        prompt = self._checked(ids[:1] if full else ids, sampling)
        if full:
            prompt = np.zeros(len(ids), np.int32)
        return PromptGroup(prompt=prompt, sampling=sampling, full=full, names=names, text=text)

    def check_samples(self, groups: Sequence[PromptGroup]) -> None:
        """Raise HttpError if one request has too many samples."""
        samples, most = sum(group.sampling.n for group in groups), self.limits.max_samples
        if samples > most:
            raise bad(f"{samples} samples, n of each prompt: at most {most} in one request (max_samples)", "n")

    def streaming(self, stream: bool | None) -> dict[str, int]:
        """Return the fields of `Sampling` for a request that may be a stream."""
        return {"stream_every": self.limits.stream_every} if stream else {}

    def _checked(self, prompt: Sequence[int] | np.ndarray, sampling: Sampling) -> np.ndarray:
        info = self.upstream.info
        most = info.limits.max_prompt_tokens
        if len(prompt) > most:  # before it is copied
            raise InvalidRequest(f"prompt of {len(prompt)} tokens: must be 1 to {most} (Limits.max_prompt_tokens)")
        try:
            array = np.array(prompt, np.int32)
        except OverflowError:
            raise InvalidRequest("the prompt has a token id that is not a 32-bit integer") from None
        try:
            Group("http", array, sampling).validate(info.limits, info.vocab_size, info.context)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        return array

    # samples

    async def sample(self, request: Request, arrival: Arrival, groups: Sequence[PromptGroup]) -> list[list[Sample]]:
        """Sample groups. Returns the samples of each, sorted by index.

        Raises the service's typed error of the first group that fails, HttpError for a failed sample, ClientDisconnect."""
        empty = [empty_samples(group, arrival) for group in groups]
        made = [
            PromptRequest(group.prompt, group.sampling, names=group.names)
            for group, none in zip(groups, empty, strict=True)
            if none is None
        ]
        arrival.sent = True
        await unless_disconnected(request, self._finish(made))
        self._count(request, made)
        finished = iter(made)
        return [next(finished).samples if none is None else none for none in empty]

    async def stream(
        self, request: Request, arrival: Arrival, groups: Sequence[PromptGroup]
    ) -> AsyncGenerator[TextChunk, None]:
        """Sample groups, and yield new tokens of each child; its last chunk has its sample. Raises as `sample`.

        A slow reader does not hold tokens back in memory: it misses chunks, and gets these tokens with the sample."""
        arrived: deque[tuple[int, Part | None]] = deque()
        ready = asyncio.Event()

        def arrive(number: int, part: Part | None) -> None:
            if not isinstance(part, TokenChunk) or len(arrived) < self.limits.max_waiting_chunks:
                arrived.append((number, part))
                ready.set()

        running: dict[int, PromptRequest] = {}
        began, silent = time.monotonic(), set(range(len(groups)))
        for i, group in enumerate(groups):
            none = empty_samples(group, arrival)
            if none is not None:
                arrived.extend((i, sample) for sample in none)
            else:
                running[i] = PromptRequest(group.prompt, group.sampling, partial(arrive, i), group.names)
        requests = list(running.values())
        decoders = [ChunkDecoder(i, self.text, group.text, group.sampling.stop) for i, group in enumerate(groups)]
        arrival.sent = True
        try:
            self._queue.open(requests)
            while running or arrived:
                while arrived:
                    number, part = arrived.popleft()
                    if part is None:
                        running.pop(number).done.result()  # raises the error of a failed group
                        continue
                    if isinstance(part, Sample):
                        self._check_sample(part)
                    if number in silent:
                        silent.remove(number)
                        self.meter.first_token_s.add(time.monotonic() - began)
                    chunk = decoders[number].decode(part)
                    if chunk is not None:
                        yield chunk
                if running:
                    await ready.wait()
                    ready.clear()
        finally:
            self._queue.close(requests)
            self._count(request, requests)

    async def score(
        self, request: Request, arrival: Arrival, groups: Sequence[PromptGroup], top_logprobs: int
    ) -> list[Sample | None]:
        """Score prompts at temperature 1. Returns for each a sample whose tokens are those after the first; None for a prompt
        of one token. Raises as `sample`, and HttpError for invalid `top_logprobs` and for a request that was aborted."""
        sampling = Sampling(top_logprobs=top_logprobs, max_tokens=max(1, *(len(group.prompt) - 1 for group in groups)))
        self._checked(groups[0].prompt[:1], sampling)

        def submit(prompt: np.ndarray, sampling: Sampling) -> Handle:
            return self.upstream.client.submit_score(prompt[:1], [prompt[1:]], sampling)

        if arrival.aborted:
            raise HttpError(ABORTED, "the request was aborted before its prompt was scored")
        made = [PromptRequest(group.prompt, sampling) for group in groups if len(group.prompt) > 1]
        await unless_disconnected(request, self._finish(made, submit))
        if any(sample.finish_reason != "scored" for each in made for sample in each.samples):
            raise HttpError(ABORTED, "all requests were aborted before this prompt was scored")
        count_tokens(request, sum(len(each.prompt) for each in made), 0)
        finished = iter(made)
        return [next(finished).samples[0] if len(group.prompt) > 1 else None for group in groups]

    async def _finish(self, requests: Sequence[PromptRequest], submit: Submit | None = None) -> None:
        """Send requests and wait for their samples; abort them if cancelled."""
        try:
            self._queue.open(requests, submit)
            for request in requests:
                await request.done
                for sample in request.samples:
                    self._check_sample(sample)
        finally:
            self._queue.close(requests)

    def _count(self, request: Request, requests: Sequence[PromptRequest]) -> None:
        """Count the prompts and the finished samples of a request, in the log and the metrics."""
        samples = [sample for each in requests for sample in each.samples]
        count_tokens(request, sum(len(each.prompt) for each in requests), sum(len(sample.token_ids) for sample in samples))
        for each in requests:
            self.meter.prompt_tokens.add(len(each.prompt))
        for sample in samples:
            self.meter.sample_s.add(sample.seconds)
            self.meter.sample_tokens.add(len(sample.token_ids))

    def _check_sample(self, sample: Sample) -> None:
        if sample.finish_reason == "error":
            raise HttpError(500, f"the service failed on sample {sample.index}: {sample.error}")
        if not np.isfinite(sample.logprobs).all():
            raise HttpError(500, f"sample {sample.index} has a log-probability that is not finite")
        if sample.weight_versions:
            self.upstream.saw(sample.weight_versions[-1][1])

    def abort(self, names: Collection[str] | None = None) -> int:
        """Abort all requests of this process, or those with one of these names. Unknown names are ignored. Returns the number
        of groups; a request whose text is still being encoded counts as one."""
        selected = None if names is None else frozenset(names)
        preparing = sum(arrival.abort(selected) for arrival in self._arrivals)
        if selected is None:
            return preparing + self._queue.abort()
        return preparing + self._queue.abort(lambda request: not selected.isdisjoint(request.names))

    def abort_unsent(self) -> None:
        """Abort the requests that the service has not seen, and send it those that wait for equal ones: what it aborts next
        are all that were received."""
        for arrival in self._arrivals:
            arrival.abort(None)
        self._queue.send_waiting()


def empty_samples(group: PromptGroup, arrival: Arrival) -> list[Sample] | None:
    """Return the samples of a prompt that leaves no room for a token, or was aborted before it was sent; None: it must be
    sent."""
    aborted = not arrival.aborted.isdisjoint(group.names)
    if not group.full and not aborted:
        return None
    empty: dict[str, Any] = {"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32), "weight_versions": []}
    prompt = len(group.prompt)
    reason: FinishReason = "aborted" if aborted else "length"
    return [Sample(group_id="", index=i, finish_reason=reason, prompt_tokens=prompt, **empty) for i in range(group.sampling.n)]


def checked_name(given: str | None, field: str = "request_id") -> str | None:
    """Return the id that a request has given itself. Raises HttpError for an empty or long one."""
    if given is not None and not 1 <= len(given) <= MAX_NAME:
        raise bad(f"{field} of {len(given)} characters: must be 1 to {MAX_NAME}", field)
    return given
