"""Speculative decoding: drafts the next tokens of a sequence from its group's texts, without a draft model.

    sibling     … the sum of 12 and 30 is 42 , so …
    child       … because the sum of 12 | and 30 is 42       ← a row of 1 + 4 tokens with 5 draws
                                        |  ✓  ✓  ✓  ✗          draws: "and" "30" "is" "forty": these four are kept

With few rows, a step takes hardly longer with some more tokens in it. So a row that decodes one token may carry a draft: the
likeliest continuation of its last tokens in the group's texts (siblings, finished or running; the prompt; the child itself),
found by `NgramIndex`. The draw at each position has its own random counter, and a draft token is accepted if it equals the
draw. So samples have the same bits with and without drafts, at any temperature.

The number of draft tokens in a step maximises the expected tokens per second, from the acceptance rate by length of the match
(`NgramIndex`) and the duration of a step by number of tokens (`StepSeconds`). `DraftBudget` bounds the time that rejected
drafts cost. Where steps overlap, a step with drafts does not, since the next one needs its results, and the budget pays for
that too; once it is spent, steps overlap without drafts until there is some again. Ideas: prompt lookup decoding (Saxena 2023),
grouped speculative decoding among siblings (Seer, arXiv 2511.14617)."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from rollout.engine.scheduling.ngrams import NgramIndex
from rollout.engine.scheduling.sequence import GroupState, Row, Sequence
from rollout.engine.scheduling.state import SchedulerState
from rollout.engine.scheduling.step_seconds import ENOUGH, StepSeconds

MOST_ROWS = 32
"""of a step with drafts; with more rows, looking for drafts takes longer than they save"""
MOST_ROWS_OVERLAPPED = 16
"""the same where steps overlap otherwise: a step with drafts does not, since the next one needs its results"""
MOST_TOKENS = 65_536
"""tokens in the index of one group; when exceeded, the index is built again from the end of each text"""
PLAIN_EVERY, PLAIN_AT_FIRST = 64, 4
"""one step in so many has no drafts, to measure its duration; the second number as long as that is not known"""
FIRST, SHARE, MOST_LEFT = 0.05, 0.005, 0.2
"""of the budget: seconds at first, fraction of all time that is added, and most seconds"""
PROMPT = -1
"""number of the prompt among a group's texts; the texts of the children have their indices"""


class DraftBudget:
    """Seconds that rejected drafts may still cost: a first amount, a fraction of all time, and the time that accepted drafts
    saved, up to a bound. So steps take at most `FIRST` + `SHARE` × their seconds longer than without drafts, however few drafts
    are accepted."""

    def __init__(self) -> None:
        self.left = FIRST
        self.accepted = 0
        """accepted draft tokens of the newest step that was read"""
        self._step: tuple[int, int, float] | None = None
        """its rows, tokens and seconds; None: it is accounted for"""

    def note(self, rows: int, tokens: int, seconds: float) -> None:
        """Record a step that was read."""
        self._step, self.accepted = (rows, tokens, seconds), 0

    def close(self, times: StepSeconds, overlapped: StepSeconds | None = None) -> None:
        """Account for that step: add the time that its accepted tokens save, subtract the time that it took longer than a step
        without drafts. overlapped: durations of such steps where steps overlap."""
        if self._step is None:
            return
        rows, tokens, seconds = self._step
        self._step, gained = None, SHARE * seconds
        if overlapped is not None and overlapped.table[0]:
            usual = float(np.interp(rows, *overlapped.table))
            if times.knows(rows):
                usual = min(usual, float(times.of(np.array([rows]))[0]))
            longer = float(times.of(np.array([tokens]))[0]) if times.knows(tokens) else min(seconds, 2 * usual)
            gained += self.accepted * usual / rows - max(0.0, longer - usual)
        elif tokens > rows and times.table[0]:
            plain, longer = times.of(np.array([rows, tokens])).tolist()
            if not times.knows(tokens):  # in proportion to the tokens at most: the machine may have paused
                longer = plain + min(max(0.0, seconds - plain), plain * (tokens - rows) / rows)
            gained += self.accepted * plain / rows - (longer - plain)
        self.add(gained)

    def add(self, seconds: float) -> None:
        self.left = min(MOST_LEFT, self.left + seconds)


class Drafts:
    """Adds draft tokens to decode rows. Owns the n-gram indexes of groups and the measured durations of steps."""

    def __init__(self, most: int, state: SchedulerState, overlap: bool = False) -> None:
        """most: draft tokens of a row, 0 = off. overlap: steps without drafts overlap."""
        self.most = most
        self.overlapped = StepSeconds() if overlap else None
        """durations of steps that overlap; None: no step does"""
        self._most_rows = MOST_ROWS_OVERLAPPED if overlap else MOST_ROWS
        self.indexes: WeakKeyDictionary[GroupState, NgramIndex] = WeakKeyDictionary()
        self.seconds = StepSeconds()
        self.budget = DraftBudget()
        self._state = state
        self._matched: dict[Sequence, int] = {}
        """length of the match of each draft of the newest step"""
        self._timed = 0, 0, 0, 0.0
        """the newest decode step: its number, rows, tokens and start"""
        self._steps = 0
        self._chained: dict[int, int] = {}
        """rows of the decode steps in flight that were planned with another in flight, by number"""
        self._read_at = 0.0
        """seconds when the newest step was read"""
        self._drafted = False
        """the newest step has drafts"""
        self._resumed = False
        """the next plan begins when the step in flight is read"""
        self._undrafted = 0
        """steps to run overlapped, to measure their duration"""

    def wanted(self, running: list[Sequence]) -> bool:
        """Return whether the next step needs the results of the step in flight: that one has drafts, or the next one may have
        some."""
        self._resumed = self._drafted or (0 < len(running) <= self._most_rows and self.most > 0 and self._may_cost())
        self._drafted = False
        return self._resumed

    def _may_cost(self) -> bool:
        """Return whether the budget pays drafts, and the end of an overlap, once it is known what that costs."""
        self.budget.close(self.seconds, self.overlapped)
        known = self.overlapped is None or (bool(self.overlapped.table[0]) and not self._undrafted)
        return known and self.budget.left > 0

    def overlap(self, rows: list[Row], step: int) -> None:
        """Record the decode rows of a step that is planned with another in flight."""
        self._chained = {number: count for number, count in self._chained.items() if number == step - 1} | {step: len(rows)}
        self._undrafted = max(0, self._undrafted - 1)

    def extend(self, rows: list[Row], budget: int, step: int, now: float) -> list[Row]:
        """Return the decode rows of a step, with drafts of at most `budget` tokens in all, in unused blocks. step: its number;
        now: seconds, its start."""
        self._matched.clear()
        self.budget.close(self.seconds, self.overlapped)
        began, self._resumed = self._read_at if self._resumed else now, False
        if not rows or not self.most:
            return rows
        self._timed = step, len(rows), len(rows), began
        if len(rows) > self._most_rows or not self._may_cost():
            return rows  # timed as well, so that the durations of larger steps are known before any has drafts
        self._steps += 1
        self._state.counters.draft_rows += len(rows)
        if self._steps % PLAIN_EVERY == 0 and self.overlapped is not None:
            self._undrafted = ENOUGH
        if self._steps % (PLAIN_EVERY if self.seconds.knows(len(rows)) else PLAIN_AT_FIRST):
            for group in {row.seq.state.number: row.seq.state for row in rows if may_draft(row.seq)}.values():
                self._index(group)
            drafts = [self._draft(row.seq) for row in rows]
            counts = self._counts(rows, drafts, budget)
            rows = [
                self._longer(row, draft[:count], length) if count else row
                for row, (draft, length), count in zip(rows, drafts, counts, strict=True)
            ]
        self._timed = step, len(rows), sum(row.count for row in rows), began
        self._drafted = self._timed[2] > len(rows)
        return rows

    def ended(self, step: int, now: float) -> None:
        """Record that the step of this number was read at `now` seconds."""
        number, rows, tokens, began = self._timed
        if step == number:
            self.seconds.add(tokens, now - began)
            self.budget.note(rows, tokens, now - began)
        elif self.overlapped is not None and step in self._chained:
            self.overlapped.add(self._chained.pop(step), now - self._read_at)
            self.budget.add(SHARE * (now - self._read_at))
        self._read_at = now

    def advanced(self, seconds: float) -> None:
        """Record how long the newest step had to advance recurrent states by drafts of the step before. A step with drafts
        leaves as much to the next one; one without does not pay for it."""
        step, rows, tokens, began = self._timed
        if tokens == rows:
            self._timed = step, rows, tokens, began + seconds

    def learn(self, seq: Sequence, expected: tuple[int, ...], drawn: list[int]) -> None:
        """Record which tokens of a draft were accepted. drawn: the tokens that were appended to the sequence, one more than
        were accepted unless an accepted one ended it."""
        matches = [token == guess for token, guess in zip(drawn, expected, strict=False)]
        self._state.counters.drafted_tokens += len(expected)
        accepted = len(drawn) - 1 if drawn else 0
        self._state.counters.accepted_tokens += accepted
        self.budget.accepted += accepted
        if seq.state in self.indexes:
            self.indexes[seq.state].learn(self._matched[seq], matches)

    def _draft(self, seq: Sequence) -> tuple[tuple[int, ...], int]:
        """Return the draft for a sequence and the length of its match; ((), 0) without one."""
        index, most = self.indexes.get(seq.state), min(self.most, seq.limit - seq.length - 1)
        if index is None or most <= 0 or not may_draft(seq):
            return (), 0
        return index.draft(index.end(seq.index), most)

    def _counts(self, rows: list[Row], drafts: list[tuple[tuple[int, ...], int]], budget: int) -> list[int]:
        """Choose how many tokens of each draft are computed: the number that maximises the expected tokens per second, among
        those that the budget can pay if all are rejected."""
        chances = []
        for i, (row, (draft, length)) in enumerate(zip(rows, drafts, strict=True)):
            if draft:
                rates = self.indexes[row.seq.state].acceptance(length, len(draft))
                chances += [(-chance, at, i) for at, chance in enumerate(rates)]
        counts = [0] * len(rows)
        chances = sorted(chances)[: max(0, budget)]
        if not chances:
            return counts
        kept = len(rows) + np.cumsum([0.0, *(-chance for chance, _, _ in chances)])
        seconds = self.seconds.of(len(rows) + np.arange(len(kept)))
        payable = np.searchsorted(seconds - seconds[0], self.budget.left, side="right")
        for _, _, i in chances[: int(np.argmax((kept / seconds)[: max(1, payable)]))]:
            counts[i] += 1
        return counts

    def _longer(self, row: Row, draft: tuple[int, ...], length: int) -> Row:
        """Return a row with as much of a draft as there are blocks for."""
        seq, state, end = row.seq, self._state, row.start + row.count
        room = (len(seq.blocks) + state.available) * state.config.block_tokens - end
        draft = draft[: max(0, room)]
        if not draft:
            return row
        state.tables.extend(seq, end + len(draft), state.version)
        self._matched[seq] = length
        return Row(seq, row.start, row.count + len(draft), row.draws + len(draft), draft)

    def _index(self, group: GroupState) -> None:
        """Add the new tokens of a group's children to its index."""
        index = self.indexes.setdefault(group, NgramIndex())
        if len(index) > MOST_TOKENS:
            index.clear()
        most = MOST_TOKENS // (2 + 2 * len(group.finished_outputs) + 2 * len(group.sequences))
        index.add(PROMPT, group.group.prompt, most)
        for number, tokens in group.finished_outputs.items():
            index.add(number, tokens, most, behind=PROMPT)
        for number, sibling in group.sequences.items():
            index.add(number, sibling.output, most, behind=PROMPT)


def may_draft(seq: Sequence) -> bool:
    """Return whether a sequence that decodes may have a draft. Not before its group forks; not while its group ends with its
    first `finish_after` children, because which children these are must not depend on drafts; and not if its logits are
    adjusted, which takes longer than a draft saves."""
    state = seq.state
    return state.forked and not state.first_k_pending and state.rules is None and seq.given is None and not seq.pending
