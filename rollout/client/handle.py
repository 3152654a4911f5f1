"""Handles of submitted groups, and the streamed tokens of their running children."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from rollout.engine.values import (
    Group,
    PartialSample,
    Sample,
    Sampling,
    Served,
    TokenChunk,
    TokenColumns,
    html_table,
    no_tokens,
)
from rollout.transport.checks import NOTHING, Bounds, check_chunk, check_goes_on, check_group, check_sample
from rollout.transport.errors import InvalidRequest, RequestTimeout, RolloutError
from rollout.transport.frames import Frame

OnSample = Callable[["Handle", Sample | None], None]
"""called in the I/O thread with each sample of a group; with None when the group failed"""
OnChange = Callable[["Handle", Sequence[Sample] | None], None]
"""the same, with the samples that arrived together"""
OnTokens = Callable[["Handle", TokenChunk], None]
"""called in the I/O thread with new tokens of a running child"""


class PartialOutputs:
    """Known tokens of the unfinished children of one group: partial samples that were submitted, and streamed chunks. `Handle`
    locks it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.seed = group.sampling.seed
        """None: chosen by the engine and not known yet"""
        self._pieces: dict[int, list[PartialSample]] = {}
        """consecutive tokens, by index"""
        self._known: dict[int, int] = {}
        """number of known tokens, by index"""
        self._ended: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Forget streamed tokens: the group is submitted again."""
        self.seed = self._group.sampling.seed
        self._pieces = {child.index: [child] for child in self._group.partials if child.index not in self._ended}
        self._known = {child.index: len(child.token_ids) for child in self._group.partials}

    def add(self, chunk: TokenChunk, bounds: Bounds) -> TokenChunk | None:
        """Add a chunk. Returns its new tokens, None if there are none. Raises ValueError for a chunk that is impossible for
        this group."""
        group, index = self._group, chunk.index
        if index not in group.wanted:
            raise ValueError(f"tokens of child {index} of a group that has {list(group.wanted[:20])}")
        chunk = _without_filler(chunk, group.sampling)
        check_chunk(chunk, group, bounds)
        if index in self._ended:  # a service that was killed in between runs it again
            return None
        known, end, most = self._known.get(index, 0), chunk.first + len(chunk.token_ids), group.sampling.max_tokens
        if chunk.first > known or end > most:
            raise ValueError(
                f"tokens from {chunk.first} to {end} of child {index}, of which {known} are known: must follow these, up to "
                f"max_tokens={most}"
            )
        if end <= known:
            return None
        tokens = TokenColumns.concat([chunk.slice(known - chunk.first)])  # a copy: views would hold the whole message
        new = TokenChunk(index=index, first=known, seed=chunk.seed, **tokens.columns())
        self.seed = chunk.seed
        self._pieces.setdefault(index, []).append(new)
        self._known[index] = end
        return new

    def streamed(self, index: int) -> PartialSample | None:
        """Return the known tokens of a child if some of them were streamed."""
        pieces = self._pieces.get(index, [])
        return _joined(index, pieces) if any(isinstance(piece, TokenChunk) for piece in pieces) else None

    def end(self, index: int) -> None:
        """Forget a child whose sample has arrived."""
        self._ended.add(index)
        self._pieces.pop(index, None)

    def partial_samples(self) -> list[PartialSample]:
        """Return the known tokens of all unfinished children, by index."""
        return [_joined(index, pieces) for index, pieces in sorted(self._pieces.items())]


def _joined(index: int, pieces: list[PartialSample]) -> PartialSample:
    return PartialSample(index=index, **TokenColumns.concat(pieces).columns())


def _without_filler(chunk: TokenChunk, sampling: Sampling) -> TokenChunk:
    """Drop columns that the group did not ask for: `pack_progress` adds them if other groups of the message did."""
    k, ids, logprobs = sampling.top_logprobs, chunk.top_ids, chunk.top_logprobs
    return msgspec.structs.replace(
        chunk,
        raw_logprobs=chunk.raw_logprobs if sampling.raw_logprobs else None,
        top_ids=ids[:, :k] if k and ids is not None else None,
        top_logprobs=logprobs[:, :k] if k and logprobs is not None else None,
        routed_experts=chunk.routed_experts if sampling.routed_experts else None,
    )


class Handle:
    """One submitted group. Any thread may wait on it; only the client's I/O thread changes it, as an `OpenHandle`.

    Example:
        handle = client.submit(prompt, Sampling(n=8))
        for sample in handle.samples(timeout=60): ...     # as they finish
        group = handle.result(timeout=600)                # all of them, sorted by index
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        """as submitted"""
        self.group_id = group.id
        self.n = group.sampling.n if group.indices is None else len(group.indices)
        """number of samples"""
        self.cancelled = False
        """the client has asked to abort it"""
        self.cancelled_children: set[int] = set()
        """indices of children that the client has asked to abort"""
        self.configuration = ""
        """of the service that it was sent to (`Welcome.configuration`); "": unsent"""
        self.on_cancel: Callable[[Any, frozenset[int] | None], None] | None = None
        """called by `cancel`, set by the client"""
        self.on_change: OnChange | None = None
        """set by `listen`, or by the client"""
        self._on_tokens: OnTokens | None = None
        self._outputs = PartialOutputs(group)
        self._partials = {child.index: child for child in group.partials}
        self._changed = threading.Condition()
        self._samples: list[Sample] = []
        self._indices: set[int] = set()
        self._in_flight = len(group.prompt) + max_tokens_of(group)
        self._prompt_routes: np.ndarray | None = None
        self._error: RolloutError | None = None
        self._ended = False

    def __repr__(self) -> str:
        """Describe the group in one line."""
        samples = f"{len(self._samples)} of {self.n} samples"
        failed = "" if self._error is None else f", {type(self._error).__name__}: {self._error.message!r}"
        return f"Handle({self.group_id!r} {samples}, {len(self.group.prompt)} prompt tokens{failed})"

    def _repr_html_(self) -> str:
        return html_table(sorted(self.finished, key=lambda sample: sample.index))

    @property
    def done(self) -> bool:
        """Whether all samples have arrived, or the group failed."""
        return self._ended

    @property
    def in_flight(self) -> int:
        """Return the maximum of tokens that the group may still need: its prompt, and max_tokens of each child whose sample has
        not arrived. The client's `budget` bounds their sum."""
        return self._in_flight

    @property
    def arrived(self) -> int:
        """Return the number of samples that have arrived."""
        return len(self._samples)

    @property
    def error(self) -> RolloutError | None:
        """Return why the group failed, None if it has not."""
        return self._error

    @property
    def prompt_routes(self) -> np.ndarray | None:
        """Return which experts the tokens of the prompt chose: see `Sample.prompt_routed_experts`. None until a sample has
        arrived, or if `Sampling.routed_experts` is off."""
        return self._prompt_routes

    @property
    def seed(self) -> int | None:
        """Return the seed of the group; None until it is known, if the engine chose it."""
        with self._changed:
            return self._samples[0].seed if self._samples else self._outputs.seed

    @property
    def finished(self) -> list[Sample]:
        """Return the samples that have arrived, in that order; also of a failed group."""
        with self._changed:
            return self._samples.copy()

    def result(self, timeout: float | None = None) -> list[Sample]:
        """Wait for all samples, sorted by index. A failed child is among them, with finish_reason "error".

        Raises the error of the group; RequestTimeout after `timeout` seconds (the group stays live)."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, timeout):
                raise self.late(timeout)
            if self._error is not None:
                raise self._error
            return sorted(self._samples, key=lambda sample: sample.index)

    def samples(self, timeout: float | None = None) -> Iterator[Sample]:
        """Yield the samples in the order in which they finish; each call starts with the first. timeout: seconds for all of
        them.

        Raises as `result`, after the samples that arrived before."""
        deadline = None if timeout is None else time.monotonic() + timeout
        taken = 0
        while True:
            with self._changed:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._changed.wait_for(lambda: self._ended or len(self._samples) > taken, left):  # noqa: B023
                    raise self.late(timeout)
                fresh = self._samples[taken:]
                if not fresh:
                    if self._error is not None:
                        raise self._error
                    return
            taken += len(fresh)
            yield from fresh

    def late(self, timeout: float | None) -> RequestTimeout:
        """Return the error for a wait of `timeout` seconds that was too short."""
        return RequestTimeout(f"{self.arrived} of {self.n} samples after {timeout} s", self.group_id)

    def cancel(self, indices: Iterable[int] | None = None) -> None:
        """Abort all children, or those at `indices`. Unfinished ones return as "aborted" with their tokens so far; pinned KV of
        finished ones (`Sampling.kv_ttl_s`) is released. Raises InvalidRequest for an index that the group does not have."""
        try:
            some = None if indices is None else frozenset(map(operator.index, indices))
        except TypeError:
            raise InvalidRequest(f"indices={indices!r:.60}: must be the indices of children", self.group_id) from None
        wrong = sorted(index for index in some or () if index not in self.group.wanted)
        if wrong:
            raise InvalidRequest(f"no child {wrong[0]}: the group has {list(self.group.wanted[:20])}", self.group_id)
        if self.on_cancel is not None:
            self.on_cancel(self, some)

    def on_tokens(self, callback: OnTokens) -> None:
        """Call `callback` with new tokens of running children (`Sampling.stream_every`): now, in this thread, with the known
        ones, later in the client's I/O thread. One callback per group; it must return quickly."""
        with self._changed:
            assert self._on_tokens is None, "on_tokens was called before"
            self._on_tokens = callback
            known = self._outputs.partial_samples()
            seed = self._outputs.seed or 0
            for child in known:  # under the lock: newer tokens come after these
                callback(self, TokenChunk(index=child.index, first=0, seed=seed, **child.columns()))

    def partial_samples(self) -> list[PartialSample]:
        """Return the known tokens of unfinished children: those they were submitted with and those streamed since. Also of a
        failed group; `client.continue_samples(handle)` continues from there."""
        with self._changed:
            known = self._outputs.partial_samples()
        return [msgspec.structs.replace(child, configuration=child.configuration or self.configuration) for child in known]

    def listen(self, callback: OnSample) -> None:
        """Call `callback` with each sample, and with None if the group fails: now, in this thread, for those that have arrived,
        later in the client's I/O thread. One callback per group; it must return quickly."""
        on_change = one_by_one(callback)
        with self._changed:
            assert self.on_change is None, "listen was called before"
            self.on_change = None if self._ended else on_change
            samples, failed = self._samples.copy(), self._error is not None
        on_change(self, samples)
        if failed:
            on_change(self, None)


class OpenHandle(Handle):
    """A handle as the client's I/O thread sees it, which alone calls these methods."""

    def __init__(self, group: Group, frames: list[Frame], digest: bytes) -> None:
        super().__init__(group)
        self.frames = frames
        """the Submit message, kept for repeats"""
        self.digest = digest
        self.needs = Served()
        """oldest weights of the service under which it may be sent; set after a restart of the service"""
        self.sent_at: float | None = None
        """time.monotonic of sending; None: unsent"""
        self.bounds = NOTHING
        """bounds of its samples as far as the caller knows them; those of the model are added when it is sent"""
        self.on_arrival: Callable[[OpenHandle, list[Sample]], None] | None = None
        """called with new samples before any caller gets them, under the lock of the handle"""

    @property
    def may_pin_kv(self) -> bool:
        """Whether KV of finished children may be pinned."""
        return self.group.sampling.kv_ttl_s > 0

    def add_sample(self, sample: Sample) -> None:
        """Add one sample, as `add_samples` does."""
        self.add_samples([sample])

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Add samples that arrived together; repeated ones are ignored. Raises ValueError, and adds none, if one is impossible
        for this group."""
        most = self.group.sampling.max_tokens
        for sample in samples:
            if sample.index not in self._indices and sample.index not in self.group.wanted:
                raise ValueError(f"sample {sample.index} of a group of {self.n}")
        with self._changed:
            fresh: dict[int, Sample] = {}
            for sample in () if self._ended else samples:
                if sample.index not in self._indices:
                    fresh.setdefault(sample.index, sample)
            if fresh and len(self._samples) + len(fresh) == self.n:
                check_group([*self._samples, *fresh.values()], self.group)
            new = [self._completed(each) for each in fresh.values()]
            for sample in new:
                self._indices.add(sample.index)
                self._in_flight -= most
                self._outputs.end(sample.index)
            self._samples += new
            self._ended = self._ended or len(self._samples) == self.n
            if self.on_arrival is not None and new:
                self.on_arrival(self, new)
            self._changed.notify_all()
            callback = self._take_callback()
        if callback is not None and new:
            callback(self, new)

    def _completed(self, sample: Sample) -> Sample:
        """Give a sample the routes of its prompt, which the service sends once a group, and the configuration."""
        if self._prompt_routes is None:
            self._prompt_routes = sample.prompt_routed_experts
        routes, configuration = self._prompt_routes, sample.configuration or self.configuration
        if sample.prompt_routed_experts is routes and sample.configuration == configuration:
            return sample
        return msgspec.structs.replace(sample, prompt_routed_experts=routes, configuration=configuration)

    def check(self, sample: Sample) -> None:
        """Compare a sample with the request and with its streamed tokens. Raises ValueError naming the field; repeated samples
        are not checked."""
        if sample.index in self._indices:
            return
        check_sample(sample, self.group, self._partials.get(sample.index), self.bounds)
        with self._changed:
            streamed = self._outputs.streamed(sample.index)
        if streamed is not None:
            check_goes_on(sample, streamed)

    def add_chunk(self, chunk: TokenChunk) -> None:
        """Add tokens of a running child; known ones are ignored. Raises ValueError if they are impossible for this group."""
        with self._changed:
            new = self._outputs.add(chunk, self.bounds)
            callback = self._on_tokens
        if callback is not None and new is not None:
            callback(self, new)

    def restart(self) -> None:
        """Forget streamed tokens: the service lost the group and gets it again."""
        with self._changed:
            self._outputs.restart()

    def fail(self, error: RolloutError) -> None:
        """Raise `error` in all waiting callers. Ignored if the group has ended."""
        with self._changed:
            if self._ended:
                return
            self._error, self._ended = error, True
            self._changed.notify_all()
            callback = self._take_callback()
        if callback is not None:
            callback(self, None)

    def abort_unsent(self, max_n: int) -> None:
        """End a group that was never sent, as the service would: aborted samples with the tokens of their partial samples."""
        n = self.group.sampling.n
        if n > max_n:
            self.fail(InvalidRequest(f"n={n}: must be between 1 and {max_n} (Limits.max_n)", self.group_id))
            return
        known: dict[int, PartialSample] = {} if self.group.score else self._partials
        for index in self.group.wanted:
            sample = Sample(
                group_id=self.group_id,
                index=index,
                finish_reason="aborted",
                prompt_tokens=len(self.group.prompt),
                seed=self.group.sampling.seed or 0,
                configuration=known[index].configuration if index in known else "",
                **(known[index] if index in known else no_tokens()).columns(),
            )
            self.add_sample(sample)

    def _take_callback(self) -> OnChange | None:
        """Return the callback. An ended group drops its callbacks: they may refer to it, which would keep all its samples alive
        until the next garbage collection."""
        callback = self.on_change
        if self._ended:
            self.on_change = self._on_tokens = None
        return callback


def answered(group: Group, samples: Sequence[Sample], on_change: OnChange | None) -> Handle:
    """Return the handle of a group whose samples are known, and hand them to the caller."""
    handle = OpenHandle(group, [], b"")
    handle.on_change = on_change
    handle.add_samples(samples)
    return handle


def refused(group: Group, error: RolloutError, on_change: OnChange | None) -> Handle:
    """Return the handle of a group that fails at once, and tell the caller."""
    handle = OpenHandle(group, [], b"")
    handle.on_change = on_change
    handle.fail(error)
    return handle


def max_tokens_of(group: Group) -> int:
    """Return the maximum of tokens that the children of a group generate."""
    return group.sampling.max_tokens * (group.sampling.n if group.indices is None else len(group.indices))


def one_by_one(callback: OnSample) -> OnChange:
    """Adapt a callback for single samples to samples that arrive together."""

    def each(handle: Handle, samples: Sequence[Sample] | None) -> None:
        for sample in [None] if samples is None else samples:
            callback(handle, sample)

    return each
