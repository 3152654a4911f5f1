"""State of groups and sequences. A sequence is one child of a group (or the group's prompt before the fork), with its tokens
and KV blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from rollout.engine.kv.block import Block
from rollout.engine.kv.versions import KVVersions, Versions
from rollout.engine.scheduling.stopping import LogitRules, StopStrings, TokenCounts
from rollout.engine.values import FinishReason, Group, KVSpans, PartialSample, Sample, TokenChunk, slice_kv_spans, slice_spans


class Submission(NamedTuple):
    """A group, and when and by which client it was submitted."""

    group: Group
    client: str
    number: int
    """counts submissions: a smaller one is older"""
    seed: int
    """of its draws, also where the group has none of its own"""
    arrived: float
    """seconds of the scheduler's clock"""


class GroupState:
    """A group that is not finished. Written by `SchedulerState` and `rollout.engine.scheduling.output` only."""

    __slots__ = (
        "group",
        "client",
        "number",
        "age",
        "own",
        "seed",
        "arrived",
        "sequences",
        "forked",
        "eos",
        "stop_ids",
        "rules",
        "stops",
        "oldest_kv",
        "complete",
        "resumed",
        "fresh",
        "finished",
        "cut_at",
        "cancelled",
        "started",
        "finished_outputs",
        "prompt_routes",
        "routes_returned",
        "__weakref__",
    )

    def __init__(self, submission: Submission, eos: frozenset[int], stops: StopStrings | None = None) -> None:
        """eos: tokens that end a child. Raises ValueError for a partial child with tokens after a stop string."""
        self.group, self.client, self.number, self.seed, self.arrived = submission
        group, number = self.group, self.number
        self.age = number, number
        """sorts oldest first: (number of the group that its conversation began with, its own)"""
        self.own: KVVersions | None = None
        """weight versions that computed the KV of the turn that it continues: it may reuse that KV, however old"""
        self.eos = frozenset[int]() if group.score and not group.redraw else eos
        """tokens that end a child; none where tokens are only scored"""
        self.stop_ids = tuple(sorted(eos))
        """tokens that `min_tokens` forbids, ascending"""
        self.stops, self.rules = stops, LogitRules.of(group)
        """stops: strings that end a child with "stop"; rules: changes of the logits; None: there are none"""
        self.sequences: dict[int, Sequence] = {}
        """the unfinished children by index; before the fork only the one that prefills the prompt for all"""
        self._know_children(group, eos, stops)
        self.cancelled: set[int] = set()
        """children that finish as "aborted" when the group forks"""
        self.started = False
        """one of its sequences has run"""
        self.finished = 0
        """children that finished with "stop" or "length" """
        self.finished_outputs: dict[int, np.ndarray] = {}
        """[tokens] int32 of the children that finished, by index: drafts for their siblings are taken from these"""
        self.prompt_routes: np.ndarray | None = None
        """[prompt - 1, layers, chosen]: experts that the tokens of the prompt chose; None: not known yet, or not wanted"""
        self.routes_returned = False
        """a sample has `prompt_routes`"""
        self.cut_at: int | None = None
        """tokens at which its children are cut; None: fewer than `finish_after` children have finished"""
        self.forked = not self.fresh
        """every child that is not finished has a sequence. A group of partial children alone samples nothing from its prompt
        and does not fork: each child prefills for itself, and the prefix index shares the prompt"""
        self.oldest_kv = 0
        """version of the last refresh with kv="recompute": KV of older weights is not read any more"""

    def _know_children(self, group: Group, eos: frozenset[int], stops: StopStrings | None) -> None:
        """Divide the children into complete, partial and fresh ones."""
        partials = {child.index: child for child in group.partials}
        self.complete = {index: how for index, child in partials.items() if (how := _ended_as(child, group, eos, stops))}
        """finish reasons of the children that were complete when the group was submitted, by index"""
        self.resumed: dict[int, PartialSample] = {
            index: child for index, child in partials.items() if index not in self.complete
        }
        """the other partial children, by index"""
        self.fresh = [index for index in group.wanted if index not in partials]
        """indices of the children that sample their first token from the prompt; the sequence of the prompt becomes the first
        of them at the fork"""

    @property
    def uncancelled(self) -> int:
        """Return how many children do not finish at the fork, before it."""
        return len(self.fresh) + len(self.resumed) - len(self.cancelled)

    def leave_out(self, indices: Collection[int]) -> None:
        """Remove partial children, before the fork."""
        for index in indices:
            del self.resumed[index]
        self.cancelled -= set(indices)

    @property
    def first_k_pending(self) -> bool:
        """Return whether the group ends with its first `finish_after` children and fewer have finished."""
        enough = self.group.sampling.finish_after
        return enough is not None and self.finished < enough

    def take_prompt_routes(self) -> np.ndarray | None:
        """Return `prompt_routes` once."""
        if self.routes_returned or self.prompt_routes is None:
            return None
        self.routes_returned = True
        return self.prompt_routes

    def readable_from(self, version: int) -> int:
        """Return the oldest version whose KV it may reuse while `version` is live: as old as `max_kv_lag` allows a new sample,
        but not older than the last refresh with kv="recompute"."""
        return max(self.oldest_kv, version - self.group.sampling.max_kv_lag)


def _ended_as(child: PartialSample, group: Group, eos: frozenset[int], stops: StopStrings | None) -> FinishReason | None:
    """Return the finish reason of a partial child that is complete, else None. Raises ValueError if it has tokens after a stop
    string."""
    if group.score:
        return None
    if stops is not None and stops.completes(child, group.sampling.min_tokens):
        return "stop"
    return child.ended_as(group.sampling, eos)


class Sequence:
    """Tokens of one child and the KV computed for them.

        tokens   p p p p p p o o o o o ?         p prompt, o output, ? the token that the next step samples
                 └───── cached ────┘ └ to compute
        blocks   [ 0  ][ 1  ][ 2  ][             ceil(cached / block_size) blocks

    `cached` tokens have their KV in `blocks`; a sequence that decodes has exactly one token more than that. From the launch of
    a step until it is read, that token is pending: it counts in `length`, and `pending_draw` is its number in the step. While
    the sequence runs it has a place in the `RunningTable`, where `table` repeats the device slots of `blocks`.
    """

    __slots__ = (
        "state",
        "index",
        "age",
        "num_prompt",
        "length",
        "limit",
        "num_next_samples",
        "given",
        "last_token",
        "pending",
        "pending_draw",
        "output",
        "logprobs",
        "raw_logprobs",
        "tracked",
        "spans",
        "kv_versions",
        "version",
        "blocks",
        "cached",
        "computed",
        "started",
        "running",
        "held",
        "ended",
        "num_output_at_start",
        "least_run",
        "offloads",
        "mirrored",
        "place",
        "table",
        "state_in",
        "state_out",
        "junction",
        "window",
        "window_first",
        "window_table",
    )

    def __init__(self, state: GroupState, index: int, partial: PartialSample | None = None) -> None:
        """partial: tokens that the child has already; None: those of its group's partial child of this index, if any."""
        self.state = state
        self.index = index
        self.age = state.number, index
        """sorts oldest first; children of a group are adjacent"""
        self.num_prompt = len(state.group.prompt)
        self.length = self.num_prompt
        """tokens of prompt and output, pending ones included"""
        self.limit = self.num_prompt + state.group.sampling.max_tokens
        """the length that ends it"""
        self.given: np.ndarray | None = None
        """[tokens] int32 to score; None: it samples"""
        self.num_next_samples = 1 if state.forked else len(state.fresh)
        """tokens to sample once all its tokens are cached: at the fork one for each fresh child"""
        self.last_token = int(state.group.prompt[-1])
        """the newest token that is known"""
        self.pending = 0
        """tokens that are sampled and not read yet"""
        self.pending_draw: int | None = None
        """number of the newest token among the draws of the step in flight; None: it is known"""
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.spans: list[tuple[int, int]] = []
        """(first output token, weight version)"""
        self.kv_versions: list[tuple[int, int, int]] = []
        """see `Sample.kv_versions`"""
        self.version: int | None = None
        """weight version of the last span"""
        self._take_over(partial or state.resumed.get(index))
        self.blocks: list[Block] = []
        self.cached = 0
        self.computed = 0
        """most tokens that were cached when some were released; those that are not cached now are computed a second time"""
        self.started = self.running = False
        """started: it ran before"""
        self.held = False
        """it was stopped because other clients have priority"""
        self.ended = False
        """its sample was made"""
        self.num_output_at_start = 0
        """tokens of output when it last started to run"""
        self.least_run = 0
        """tokens to sample from then on before it is preempted, unless nothing else frees memory"""
        self.offloads = self.mirrored = 0
        """mirrored: leading full blocks known to have a copy in host memory"""
        self.place: int | None = None
        """its place in the `RunningTable` while it runs"""
        self.table: np.ndarray | None = None
        """[max_blocks] int32, a view of that place"""
        self.state_in: Block | None = None
        """slot of recurrent state that its next row reads, unless it is the slot that it writes"""
        self.state_out: Block | None = None
        """slot of recurrent state that its rows write, while it runs; `rollout.engine.scheduling.states` writes both"""
        self.junction = 0
        """tokens after which its recurrent state is kept for other prompts; 0: nowhere"""
        self.window: list[Block] = []
        """blocks of the layers with a sliding window, from block `window_first` on; `rollout.engine.scheduling.windows` writes
        both"""
        self.window_first = 0
        self.window_table: np.ndarray | None = None
        """[max_blocks] int32, a view of its place in the `RunningTable`: device slots of `window`, at the same columns as those
        of `blocks`; 0 elsewhere"""

    @property
    def rank(self) -> tuple[int, ...]:
        """Return the key that sorts sequences of one client when slots or KV are scarce: the first one starts first and is
        preempted last. By priority, then the one with the fewest tokens of output (least attained service, Kleinrock 1976), so
        that none starts late and runs alone at the end; then by age, where a turn is as old as its conversation."""
        return -self.state.group.sampling.priority, len(self.output), *self.state.age, self.index

    @property
    def drew(self) -> bool:
        """Return whether this engine has sampled a token of it."""
        resumed = None if self.given is not None else self.state.resumed.get(self.index)
        return len(self.output) > (0 if resumed is None else len(resumed.token_ids))

    @property
    def ran(self) -> int:
        """Return the tokens sampled since it started to run."""
        return len(self.output) - self.num_output_at_start

    @property
    def uncached(self) -> int:
        """Return the tokens to compute before the next one can be sampled."""
        return self.length - self.cached

    def add_block(self, block: Block) -> None:
        """Append a block that is on the device to a running sequence."""
        assert block.device is not None and self.table is not None
        self.table[len(self.blocks)] = block.device
        self.blocks.append(block)

    def put_block(self, at: int, block: Block) -> None:
        """Replace a block of a running sequence by one that is on the device."""
        assert block.device is not None and self.table is not None
        at %= len(self.blocks)
        self.table[at] = block.device
        self.blocks[at] = block

    def cut_blocks(self, blocks: int) -> None:
        """Keep the first `blocks`."""
        if self.table is not None:
            self.table[blocks : len(self.blocks)] = 0
        del self.blocks[blocks:]

    def tokens(self, start: int, count: int) -> np.ndarray:
        """Return [count] int32 token ids from position `start` on."""
        prompt = self.state.group.prompt
        if start >= len(prompt):
            first = start - len(prompt)
            return np.array(self.output[first : first + count], np.int32)
        head = prompt[start : start + count]
        if len(head) == count:
            return head
        return np.concatenate([head, np.array(self.output[: count - len(head)], np.int32)])

    @property
    def given_left(self) -> int:
        """Return the given tokens that are not scored, without the last one, whose KV is not needed."""
        return 0 if self.given is None else len(self.given) - len(self.output) - 1

    def _take_over(self, partial: PartialSample | None) -> None:
        """Take over the tokens of a partial child, which are computed and not sampled again; or the tokens to score."""
        score = self.state.group.score
        self.tracked = TokenCounts.of(self.state.group.sampling, self.state.rules, self.state.stops, None if score else partial)
        if partial is not None and score:
            self.given = partial.token_ids
            self.limit = self.num_prompt + len(partial.token_ids)
        if partial is None or score:
            return
        self.output = partial.token_ids.tolist()
        self.logprobs = partial.logprobs.tolist()
        self.raw_logprobs = [] if partial.raw_logprobs is None else partial.raw_logprobs.tolist()
        self.spans = [(first, version) for first, version in partial.weight_versions]
        self.version = self.spans[-1][1]
        self.kv_versions = list(partial.kv_versions)
        self.length += len(self.output)
        self.last_token = self.output[-1]

    def fork(self) -> Iterator[Sequence]:
        """Yield the other children of a sequence whose whole prompt is cached: fresh ones first, then partial ones. They hold
        its blocks; the caller counts the owners."""
        for index in [*self.state.fresh[1:], *self.state.resumed]:
            child = Sequence(self.state, index)
            child.blocks = self.blocks.copy()
            child.window, child.window_first = self.window.copy(), self.window_first
            child.cached = self.cached
            child.started = True
            yield child

    def expect(self, draw: int) -> None:
        """Count the pending token that a launched step samples as its draw number `draw`."""
        self.pending += 1
        self.length += 1
        self.pending_draw = draw

    def append(self, token: int, logprob: float, raw_logprob: float | None, version: int) -> None:
        """Append the oldest pending token, which is known now, or the first token of a child that was just forked.
        `raw_logprob` is stored if the group asks for it."""
        if version != self.version:
            self.version = version
            self.spans.append((len(self.output), version))
        self.output.append(token)
        self.logprobs.append(logprob)
        if raw_logprob is not None and self.state.group.sampling.raw_logprobs:
            self.raw_logprobs.append(raw_logprob)
        self.last_token = token
        if not self.pending:
            self.length += 1
            return
        self.pending -= 1
        if not self.pending:
            self.pending_draw = None

    def chunk(self, first: int, count: int) -> TokenChunk:
        """Return `count` known tokens of its output, from token `first` on."""
        last = first + count
        raw = np.array(self.raw_logprobs[first:last], np.float32) if self.state.group.sampling.raw_logprobs else None
        return TokenChunk(
            index=self.index,
            first=first,
            token_ids=np.array(self.output[first:last], np.int32),
            logprobs=np.array(self.logprobs[first:last], np.float32),
            weight_versions=slice_spans(self.spans, first, last),
            kv_versions=slice_kv_spans(self.kv_versions, first, last),
            raw_logprobs=raw,
            seed=self.state.seed,
            **({} if self.tracked is None else self.tracked.columns(first, last)),
        )

    def note_kv(self, spans: Versions, version: int) -> None:
        """Record that the next token, which `version` generates, attends to KV of these spans, unless that follows from what
        is recorded."""
        before = kv_at_end(self.kv_versions) or ((0, version),)
        same = next((i for i, (a, b) in enumerate(zip(before, spans, strict=False)) if a != b), min(len(before), len(spans)))
        if same == len(before) == len(spans):
            return
        if same == len(spans) or (same < len(before) and spans[same][0] > before[same][0]):
            same -= 1  # so that the first new span replaces all that follow it
        self.kv_versions += [(len(self.output), position, by) for position, by in spans[same:]]

    def not_finite(self) -> str:
        """Return the error text for logits that are not finite."""
        at = len(self.output)
        token = f"token {at}" if self.given is None else f"given token {at} (id {int(self.given[at])})"
        reason = f"the logits of {token} hold NaN or infinity: the weights or the KV are not finite"
        if self.state.eos and len(self.output) < self.state.group.sampling.min_tokens:
            reason += ", or min_tokens forbids every token that could be drawn"
        return reason

    def sample(self, reason: FinishReason, seconds: float, error: str | None = None) -> Sample:
        return Sample(
            group_id=self.state.group.id,
            index=self.index,
            token_ids=np.array(self.output, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            raw_logprobs=np.array(self.raw_logprobs, np.float32) if self.state.group.sampling.raw_logprobs else None,
            finish_reason=reason,
            weight_versions=list(self.spans),
            kv_versions=list(self.kv_versions),
            prompt_tokens=self.num_prompt,
            error=error,
            seconds=seconds,
            offloads=self.offloads,
            seed=self.state.seed,
            prompt_routed_experts=self.state.take_prompt_routes(),
            ranks=np.array(self.tracked.ranks, np.int32) if self.tracked is not None and self.tracked.ranks else None,
            **({} if self.tracked is None else self.tracked.columns() | self.tracked.stopped(reason, self.output)),
        )


def kv_at_end(spans: KVSpans) -> Versions:
    """Return which versions computed the KV that the last token attended to; () without spans."""
    found: list[tuple[int, int]] = []
    for _, position, version in spans:
        while found and found[-1][0] >= position:
            found.pop()
        found.append((position, version))
    return tuple(found)


class Row(msgspec.Struct, gc=False):
    """A row of a plan that is not committed, and its sequence; see `Plan`. A struct without garbage collection: one is made for
    each sequence in each step."""

    seq: Sequence
    start: int
    count: int
    draws: int
    expected: tuple[int, ...]
    """expected tokens of its draws, in order: all of them where tokens are given, all but the last where they are drafted. The
    row computes draws - 1 of these after the tokens that it has"""

    @property
    def drafted(self) -> bool:
        """Whether it has draft tokens, which may be rejected."""
        return bool(self.expected) and self.seq.given is None
