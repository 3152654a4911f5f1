"""Handle: one submitted group, seen from the trainer's side."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from engine.types import Group, PartialSample, Sample, Served, TokenChunk
from rollout.client.partials import PartialOutputs
from transport.checks import NOTHING, any_version, check_goes_on, check_sample
from transport.errors import InvalidRequest, RequestTimeout, RolloutError
from transport.frames import Frame

OnSample = Callable[["Handle", Sample | None], None]
"""called in the I/O thread with each sample of a group, with None when the group failed"""
OnChange = Callable[["Handle", Sequence[Sample] | None], None]
"""the same, called once with the samples that came together"""
OnTokens = Callable[["Handle", TokenChunk], None]
"""called in the I/O thread with new tokens of a child that runs"""


class Handle:
    """One submitted group. Any thread may wait on it; only the client's I/O thread changes it.

    Example:
        handle = client.submit(prompt, Sampling(n=8))
        for sample in handle.samples(timeout=60): ...     # as they finish
        group = handle.result(timeout=600)                # all of them, sorted by index
    """

    def __init__(self, group: Group, frames: list[Frame], digest: bytes) -> None:
        self.group = group
        """as it was submitted"""
        self.group_id = group.id
        self.n = group.sampling.n if group.indices is None else len(group.indices)
        """samples that come"""
        self.frames = frames
        """its Submit, kept so that it can be repeated"""
        self.digest = digest
        self.needs = Served()
        """the service's weights, or newer ones, before it is sent: those of before the service was started again"""
        self.cancelled = False
        """the client has asked for its end"""
        self.cancelled_children: set[int] = set()
        """indices of children whose end the client has asked for"""
        self.sent_at: float | None = None
        """time.monotonic when it was sent; None: it waits for room"""
        self.bounds = NOTHING
        """of what may come of it, from when it is sent on"""
        self.was_live: Callable[[int], bool] = any_version
        """whether weights of a version were live, for whoever knows"""
        self.on_cancel: Callable[[Handle, frozenset[int] | None], None] | None = None
        self.on_change: OnChange | None = None
        self._on_tokens: OnTokens | None = None
        self._partials = PartialOutputs(group)
        self._begun = {child.index: child for child in group.partials}
        self._changed = threading.Condition()
        self._samples: list[Sample] = []
        self._indices: set[int] = set()
        self._in_flight = len(group.prompt) + most_of(group)
        self._error: RolloutError | None = None
        self._ended = False

    @property
    def keeps(self) -> bool:
        """Whether KV of the group's children may be kept after their end."""
        return self.group.sampling.kv_ttl_s > 0

    @property
    def done(self) -> bool:
        """Whether all samples are here, or the group failed."""
        return self._ended

    @property
    def in_flight(self) -> int:
        """Return the tokens that the group may take in an engine: its prompt, and the most of each child that has not come
        back; see the client's `budget`."""
        return self._in_flight

    @property
    def error(self) -> RolloutError | None:
        """Return why the group failed, None if it has not."""
        return self._error

    def result(self, timeout: float | None = None) -> list[Sample]:
        """Wait for all samples, sorted by index. A child that failed is among them, with finish_reason "error".

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

    def cancel(self, indices: Iterable[int] | None = None) -> None:
        """Ask for the early end of all children, or of those at `indices`: what is not finished of them comes back as "aborted"
        with the tokens it has, and KV that is kept of those that are (`Sampling.kv_ttl_s`) is given up. Raises InvalidRequest for
        an index that the group does not have."""
        try:
            some = None if indices is None else frozenset(map(operator.index, indices))
        except TypeError:
            raise InvalidRequest(f"indices={indices!r:.60}: must be the indices of children", self.group_id) from None
        wrong = sorted(index for index in some or () if index not in self.group.wanted)
        if wrong:
            raise InvalidRequest(f"no child {wrong[0]}: the group has {list(self.group.wanted[:20])}", self.group_id)
        if self.on_cancel is not None:
            self.on_cancel(self, some)

    def on_tokens(self, tell: OnTokens) -> None:
        """Call `tell` with tokens of children that run, as they come (`Sampling.stream_every`): in this thread now with what is
        known of them already, in the client's I/O thread later. One listener a group; it must return at once."""
        with self._changed:
            assert self._on_tokens is None, "somebody listens already"
            self._on_tokens = tell
            known = self._partials.partial_samples()
            seed = self._partials.seed or 0
            for child in known:  # under the lock: what comes later is told later
                tell(self, TokenChunk(**msgspec.structs.asdict(child), first=0, seed=seed))

    def partial_samples(self) -> list[PartialSample]:
        """Return what the unfinished children have as far as this client knows: what they began with and what was streamed
        since. Also of a group that failed. `client.continue_samples(handle)` goes on from there."""
        with self._changed:
            return self._partials.partial_samples()

    @property
    def seed(self) -> int | None:
        """Return the seed of the group; None as long as only the engine knows it."""
        with self._changed:
            return self._samples[0].seed if self._samples else self._partials.seed

    @property
    def finished(self) -> list[Sample]:
        """Return the samples that are here, in the order in which they came; also of a group that failed."""
        with self._changed:
            return self._samples.copy()

    def listen(self, tell: OnSample) -> None:
        """Call `tell` with each sample, those that are here already included, and with None if the group fails: in this thread
        now, in the client's I/O thread later. One listener a group; it must return at once."""
        on_change = one_by_one(tell)
        with self._changed:
            assert self.on_change is None, "somebody listens already"
            self.on_change = None if self._ended else on_change
            samples, failed = self._samples.copy(), self._error is not None
        on_change(self, samples)
        if failed:
            on_change(self, None)

    # called by the I/O thread only

    def add_sample(self, sample: Sample) -> None:
        """Hand out one sample, as `add_samples` does."""
        self.add_samples([sample])

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Hand out samples that have come together; a repeated one changes nothing. Raises ValueError for one that this group
        cannot have, and hands out none then."""
        most = self.group.sampling.max_tokens
        for sample in samples:
            if sample.index not in self._indices and sample.index not in self.group.wanted:
                raise ValueError(f"sample {sample.index} of a group of {self.n}")
        with self._changed:
            new = []
            for sample in samples:
                if self._ended or sample.index in self._indices:
                    continue
                self._indices.add(sample.index)
                self._in_flight -= most
                self._partials.end(sample.index)
                new.append(sample)
            self._samples += new
            self._ended = self._ended or len(self._samples) == self.n
            self._changed.notify_all()
            tell = self._listener()
        if tell is not None and new:
            tell(self, new)

    def check(self, sample: Sample) -> None:
        """Compare a sample that has come with what was asked, and with what was streamed of it. Raises ValueError naming the
        field; a repeated one is not looked at."""
        if sample.index in self._indices:
            return
        check_sample(sample, self.group, self._begun.get(sample.index), self.bounds)
        with self._changed:
            streamed = self._partials.streamed(sample.index)
        if streamed is not None:
            check_goes_on(sample, streamed)

    def add_chunk(self, chunk: TokenChunk) -> None:
        """Hand out tokens of a child that runs; those that are known change nothing. Raises ValueError for tokens that this
        group cannot have."""
        with self._changed:
            new = self._partials.add(chunk, self.bounds)
            tell = self._on_tokens
        if tell is not None and new is not None:
            tell(self, new)

    def restart(self) -> None:
        """Forget what was streamed: the service has lost the group, and gets it again."""
        with self._changed:
            self._partials.restart()

    def fail(self, error: RolloutError) -> None:
        """Raise `error` for everybody who waits. Nothing to do for a group that has ended."""
        with self._changed:
            if self._ended:
                return
            self._error, self._ended = error, True
            self._changed.notify_all()
            tell = self._listener()
        if tell is not None:
            tell(self, None)

    def _listener(self) -> OnChange | None:
        """Return who is told. A group that has ended lets go of its listeners: they may hold it, and all its samples with it,
        until garbage is looked for."""
        tell = self.on_change
        if self._ended:
            self.on_change = self._on_tokens = None
        return tell

    def abort_unsent(self, max_n: int) -> None:
        """End a group that the service never got, if it would have been served: aborted samples with the tokens that their
        children had already."""
        n = self.group.sampling.n
        if not 1 <= n <= max_n:
            self.fail(InvalidRequest(f"n={n}: must be between 1 and {max_n} (Limits.max_n)", self.group_id))
            return
        partials = {} if self.group.score else {child.index: child for child in self.group.partials}
        none = np.zeros(0, np.int32), np.zeros(0, np.float32)
        for index in self.group.wanted:
            fresh = PartialSample(index=index, token_ids=none[0], logprobs=none[1], weight_versions=[])
            self.add_sample(self._aborted(partials.get(index, fresh)))

    def _aborted(self, child: PartialSample) -> Sample:
        return Sample(
            group_id=self.group_id,
            finish_reason="aborted",
            prompt_tokens=len(self.group.prompt),
            seed=self.group.sampling.seed or 0,
            **{name: getattr(child, name) for name in child.__struct_fields__},
        )


def most_of(group: Group) -> int:
    """Return the tokens that the children of a group make at most."""
    return group.sampling.max_tokens * (group.sampling.n if group.indices is None else len(group.indices))


def one_by_one(tell: OnSample) -> OnChange:
    """Have samples that come together told one after the other."""

    def told(handle: Handle, samples: Sequence[Sample] | None) -> None:
        for sample in [None] if samples is None else samples:
            tell(handle, sample)

    return told
