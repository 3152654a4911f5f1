"""A sequence: one child of a group (or the group's prompt before the fork), its tokens and its blocks of KV."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from engine.kv.block import Block
from engine.kv.versions import KVVersions
from engine.scheduling.ngrams import NgramIndex
from engine.scheduling.order import Candidate, Order, Rank, first_come, longest_last
from engine.scheduling.stops import Stops
from engine.scheduling.tracked import LogitRules, TokenCounts
from engine.types import FinishReason, Group, PartialSample, Sample, TokenChunk


class GroupState:
    """A group while the engine works on it. Written by the scheduler only."""

    __slots__ = (
        "group",
        "client",
        "number",
        "order",
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
        "ranks",
        "longest",
        "last",
        "line",
        "work",
        "lead",
        "said",
        "texts",
    )

    def __init__(
        self, group: Group, client: str, number: int, seed: int, arrived: float, eos: frozenset[int], stops: Stops | None = None
    ) -> None:
        """Raises ValueError for a child that goes on behind a stop string."""
        self.group = group
        self.client = client
        self.number = number
        """counts up with submission: a smaller one is older"""
        self.order = number, number
        """sorts oldest first: (number of the group that its conversation began with, its own)"""
        self.own: KVVersions | None = None
        """what computed the KV of the turn that it continues: it may take that over, however old"""
        self.seed = seed
        self.arrived = arrived
        self.eos = frozenset[int]() if group.score else eos
        """tokens that end a child with "stop" """
        self.stop_ids = tuple(sorted(eos))
        """those that `min_tokens` forbids, in order"""
        self.stops, self.rules = stops, LogitRules.of(group)
        """strings that end a child with "stop", and how its logits are changed; None: there are none, and they are not"""
        self.sequences: dict[int, Sequence] = {}
        """the children not yet finished by index; before the fork only the one that prefills the prompt for all"""
        self._know_children(group, eos, stops)
        self.cancelled: set[int] = set()
        """children that are to end as "aborted" where the group forks"""
        self.started = False
        """one of its sequences has run"""
        self.finished = 0
        """children that ended by themselves"""
        self.said: dict[int, np.ndarray] = {}
        """[tokens] int32 of children that have ended: their siblings are drafted from these"""
        self.texts: NgramIndex | None = None
        """index of what its children have said; None: nobody has drafted"""
        self.cut_at: int | None = None
        """tokens at which its children are cut; None: not enough of them have ended for that"""
        self.forked = not self.fresh
        """every child that is not finished has a sequence. Where all have started there is no first token in common: each
        prefills for itself, and the prefix index shares the prompt"""
        self.oldest_kv = 0
        """version of the last refresh that had its KV computed again: what older weights computed is not read any more"""
        self.ranks: Order = first_come
        """ranks its sequences; see `engine.scheduling.order`"""
        self.line = client, -group.sampling.priority, 0
        """sorts lines of a client, the first one first: by priority, then by wave (`engine.scheduling.cohorts`)"""
        self.longest: int | None = None
        """tokens of the longest child that has ended by itself"""

    def _know_children(self, group: Group, eos: frozenset[int], stops: Stops | None) -> None:
        """Note which children there are, and how much each may draw."""
        partials = {child.index: child for child in group.partials}
        self.complete = {index: how for index, child in partials.items() if (how := _ended_as(child, group, eos, stops))}
        """how children ended that were complete when the group came"""
        self.resumed: dict[int, PartialSample] = {
            index: child for index, child in partials.items() if index not in self.complete
        }
        """what the other children had that had started"""
        left = _tokens_left(group, partials, self.complete)
        self.last = _beyond_most(group, left, len(self.complete))
        """the children that may draw more than each of those that are waited for; without those that had to start in time"""
        self.fresh = _in_turn(group, {index: tokens for index, tokens in left.items() if index not in partials}, self.last)
        """the children that draw their first token where the prompt ends, in order; the first one runs on where the group
        forks"""
        self.work, self.lead = sum(left.values()), max(left.values(), default=0)
        """tokens that all its children may draw, and the one that may draw most"""

    @property
    def expected(self) -> int:
        """tokens that its children are expected to get: as many as the longest of them that has ended by itself, all that they
        may as long as none has"""
        return self.group.sampling.max_tokens if self.longest is None else self.longest

    @property
    def by_length(self) -> bool:
        """Each child waits for its own turn, since its length is known and the engine's order goes by that."""
        return self.ranks is longest_last and self.group.sampling.lengths is not None

    def late(self, index: int) -> bool:
        """True if a child starts when nobody else of its line waits, fresh prompts included, and is preempted first: one of
        `last`, where the engine's order has these last."""
        return self.by_length and self.forked and index in self.last

    @property
    def uncancelled(self) -> int:
        """children that are not to end where the group forks, before it has"""
        return len(self.fresh) + len(self.resumed) - len(self.cancelled)

    def leave_out(self, indices: Collection[int]) -> None:
        """Forget children that go on, before the group has forked."""
        for index in indices:
            del self.resumed[index]
        self.cancelled -= set(indices)
        lengths = _tokens_left(self.group, self.resumed, self.complete)
        left = [lengths[child] for child in (*self.fresh, *self.resumed)]
        self.work, self.lead = sum(left), max(left)

    @property
    def races(self) -> bool:
        """The group ends with its first `finish_after` children, and not so many have ended."""
        enough = self.group.sampling.finish_after
        return enough is not None and self.finished < enough

    def heard(self, sample: Sample) -> Sample:
        """Remember what a child has said that has ended. Returns its sample."""
        self.said[sample.index] = sample.token_ids
        return sample

    def readable_from(self, version: int) -> int:
        """The oldest version whose KV it may take over while `version` is live: as old as its `max_kv_lag` allows a new sample,
        but none from before its KV was to be computed again."""
        return max(self.oldest_kv, version - self.group.sampling.max_kv_lag)


def _tokens_left(group: Group, partials: Mapping[int, PartialSample], complete: Collection[int]) -> dict[int, int]:
    """Return the tokens that each wanted child may still draw which is not complete."""
    had = {index: len(child.token_ids) for index, child in partials.items()}
    return {index: group.sampling.most_tokens(index) - had.get(index, 0) for index in group.wanted if index not in complete}


def _beyond_most(group: Group, left: dict[int, int], complete: int) -> frozenset[int]:
    """Return the children that may draw more tokens than each of those that are waited for: `finish_after`, so many of which
    were complete when the group came, else all but one. Of two that are longest neither may."""
    if group.sampling.lengths is None or group.score or len(left) < 2:
        return frozenset()
    enough = group.sampling.finish_after
    most = len(left) - 1 if enough is None else max(1, enough - complete)
    bound = sorted(left.values())[most - 1]
    return frozenset(index for index, tokens in left.items() if tokens > bound)


def _in_turn(group: Group, fresh: dict[int, int], last: Collection[int]) -> list[int]:
    """Return the fresh children, with the tokens that each may draw: where lengths are known the longest first, but those that
    go last behind the others."""
    if group.sampling.lengths is None or group.score:
        return list(fresh)
    return sorted(fresh, key=lambda index: (index in last, -fresh[index]))


def _ended_as(child: PartialSample, group: Group, eos: frozenset[int], stops: Stops | None) -> FinishReason | None:
    """How a child had ended when its group came, if it had. Raises ValueError if it goes on behind a stop string."""
    if stops is not None and stops.completes(child, group.sampling.min_tokens):
        return "stop"
    return None if group.score else child.ended_as(group.sampling, eos)


class Sequence:
    """Tokens of one child and the KV computed for them.

        tokens   p p p p p p o o o o o ?         p prompt, o output, ? the one that the next step draws
                 └───── cached ────┘ └ to compute
        blocks   [ 0  ][ 1  ][ 2  ][             ceil(cached / block_size) blocks

    `cached` tokens have their KV in `blocks`; a sequence that decodes has exactly one token more than that. From the launch of
    a step until its draws are read, that token is pending: it counts in `length`, and `pending_draw` says where it will be.
    While the sequence runs it has a place in the `RunningTable`, where `table` repeats the device slots of `blocks`.
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
    )

    def __init__(self, state: GroupState, index: int, partial: PartialSample | None = None) -> None:
        """`partial`: what the child has, if that is not what its group says."""
        self.state = state
        self.index = index
        self.age = state.number, index
        """sorts oldest first; children of a group stand together"""
        self.num_prompt = len(state.group.prompt)
        self.length = self.num_prompt
        """tokens it has, prompt and output, pending ones included"""
        self.limit = self.num_prompt + state.group.sampling.most_tokens(index)
        """the length that ends it"""
        self.given: np.ndarray | None = None
        """[tokens] int32 to score; None: it draws"""
        self.num_next_samples = 1 if state.forked else len(state.fresh)
        """tokens to draw once everything it has is cached: one for each fresh child where the group forks"""
        self.last_token = int(state.group.prompt[-1])
        """the newest token that is known"""
        self.pending = 0
        """tokens whose draws are not read yet"""
        self.pending_draw: int | None = None
        """which draw of the step in flight the newest token is; None: it is known"""
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.spans: list[tuple[int, int]] = []
        """(first output token, weight version)"""
        self.version: int | None = None
        """of the last span"""
        self._take_over(partial or state.resumed.get(index))
        self.blocks: list[Block] = []
        self.cached = 0
        self.computed = 0
        """most tokens that were ever cached: what lies below is computed a second time"""
        self.started = self.running = False
        """started: ran before"""
        self.held = False
        """it waits because other clients go first: it would run"""
        self.ended = False
        """its sample was made"""
        self.num_output_at_start = 0
        """tokens drawn when it last started to run"""
        self.least_run = 0
        """tokens to draw from there on before it is preempted, unless nothing else can make room"""
        self.offloads = self.mirrored = 0
        """mirrored: leading full blocks known to have a copy in host memory"""
        self.place: int | None = None
        """its place in the `RunningTable` while it runs"""
        self.table: np.ndarray | None = None
        """[max_blocks] int32, a view of that place"""

    @property
    def rank(self) -> Rank:
        """Who goes first where slots or KV are scarce: the first line, whoever is not late, then as the engine's order says. A
        turn is as old as its conversation."""
        state, drawn = self.state, len(self.output)
        standing = Candidate(state.order, drawn, self.index, state.expected, lead_of(self))
        return *state.line[1:], state.late(self.index), *state.ranks(standing)

    @property
    def drew(self) -> bool:
        """A token of it was drawn here."""
        resumed = None if self.given is not None else self.state.resumed.get(self.index)
        return len(self.output) > (0 if resumed is None else len(resumed.token_ids))

    @property
    def ran(self) -> int:
        """tokens drawn since it started to run"""
        return len(self.output) - self.num_output_at_start

    @property
    def uncached(self) -> int:
        """tokens to compute before the next one can be drawn"""
        return self.length - self.cached

    def add_block(self, block: Block) -> None:
        """Append a block that is on the device, to a running sequence."""
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
        """given tokens that are not scored and whose KV is of use: all but the last"""
        return 0 if self.given is None else len(self.given) - len(self.output) - 1

    def _take_over(self, partial: PartialSample | None) -> None:
        """Start from the partial sample of the child, if it has one: its tokens are prefilled or scored, not sampled again."""
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
        self.length += len(self.output)
        self.last_token = self.output[-1]

    def fork(self) -> Iterator[Sequence]:
        """Yield the other children of a sequence that has the whole prompt cached: fresh ones first, each part by index. They
        hold its blocks; the caller counts."""
        for index in [*self.state.fresh[1:], *self.state.resumed]:
            child = Sequence(self.state, index)
            child.blocks = self.blocks.copy()
            child.cached = child.computed = self.cached
            child.started = True
            yield child

    def expect(self, draw: int) -> None:
        """Count the token that a launched step samples, as its draw number `draw`."""
        self.pending += 1
        self.length += 1
        self.pending_draw = draw

    def append(self, token: int, logprob: float, raw_logprob: float | None, version: int) -> None:
        """Append the oldest pending token, now known, or the first one of a child that was just forked. `raw_logprob` is kept
        if the group asks for it."""
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
        """Return `count` of its tokens that are known, from output token `first` on."""
        last = first + count
        ends = [*(start for start, _ in self.spans[1:]), len(self.output)]
        spans = [
            (max(start, first) - first, version)
            for (start, version), end in zip(self.spans, ends, strict=True)
            if start < last and end > first
        ]
        raw = np.array(self.raw_logprobs[first:last], np.float32) if self.state.group.sampling.raw_logprobs else None
        return TokenChunk(
            index=self.index,
            first=first,
            token_ids=np.array(self.output[first:last], np.int32),
            logprobs=np.array(self.logprobs[first:last], np.float32),
            weight_versions=spans,
            raw_logprobs=raw,
            seed=self.state.seed,
            **({} if self.tracked is None else self.tracked.columns(first, last)),
        )

    def not_finite(self) -> str:
        """Explain why nothing can be drawn where the largest logit that is left is no number."""
        reason = f"the logits of token {len(self.output)} hold NaN or infinity: the weights or the KV are not finite"
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
            prompt_tokens=self.num_prompt,
            error=error,
            seconds=seconds,
            offloads=self.offloads,
            seed=self.state.seed,
            **({} if self.tracked is None else self.tracked.columns() | self.tracked.stopped(reason, self.output)),
        )


def lead_of(seq: Sequence) -> int:
    """Return how many tokens a sequence may still draw; of a prompt whose children go by their lengths, the longest of them."""
    state = seq.state
    return state.lead if state.by_length and not state.forked else seq.limit - seq.num_prompt - len(seq.output)


def work_of(seq: Sequence) -> int:
    """Return how many tokens a sequence, and the children that are to fork from it, may still draw."""
    return seq.limit - seq.num_prompt - len(seq.output) if seq.state.forked else seq.state.work


Row = tuple[Sequence, int, int, int, tuple[int, ...]]
"""(sequence, start, count, samples, expected): a row of a plan and its sequence, kept by the scheduler; see `Plan`. `expected`:
what its draws are expected to be, one after the other: all of them where tokens are given, all but the last where they are
drafted. The row computes samples - 1 of these behind the tokens that it has. A bare tuple: one is made for each sequence in
each step."""
