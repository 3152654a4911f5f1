"""Drafts: what a child will probably draw next, guessed from what its group has said already.

    siblings    … the sum of 12 and 30 is 42 , so …
    child       … because the sum of 12 | and 30 is 42       ← a row of 1 + 4 tokens with 5 draws
                                        |  ✓  ✓  ✓  ✗          draws: "and" "30" "is" "forty": these four are kept

Where few rows run, a step costs hardly more with some tokens more in it. So a row that has one token to compute carries
the likeliest continuation behind it, found where the last tokens stood before: in siblings, finished or running, in the prompt,
in the child itself. Each position draws with its own counter, and a drafted token stays if it is the one that is drawn: the
sample is the same to the bit, at any temperature.

How many tokens a step drafts is what gives most tokens a second, by two tables: how often tokens behind a match of that length
were right in this group, and what steps of so many tokens took. What that may lose, until both are known, is bounded by an
account of what it has gained. Ideas: prompt lookup decoding (Saxena 2023), grouped speculative decoding among siblings (Seer,
arXiv 2511.14617)."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from statistics import median
from weakref import WeakKeyDictionary

import numpy as np

from rollout.engine.scheduling.ngrams import NgramIndex
from rollout.engine.scheduling.sequence import GroupState, Row, Sequence
from rollout.engine.scheduling.state import SchedulerState

MOST_ROWS = 32
"""of a step that drafts: with more, looking for drafts takes longer than they save"""
MOST_TOKENS = 65_536
"""of one group's texts in the index; with more it begins anew with the latest of each text"""
SIZES = (*range(1, 17), *range(20, 65, 4), *range(72, 257, 8))
"""numbers of tokens of a step whose seconds are kept apart"""
ENOUGH, NEWEST = 3, 9
"""steps of a size before what it takes counts as known, so that a pause of the machine is no price; and of how many of the
newest it is the median"""
REMEMBERED = 1024
"""steps after which a size that was not seen again is forgotten, so that it is tried again"""
PLAIN_EVERY, PLAIN_AT_FIRST = 64, 4
"""one step in so many drafts nothing, so that it is known what that takes; and of so many as long as it is not"""
TRIED = 4
"""tokens beyond the largest size that is known which are tried, or a part of that size"""
FIRST, SHARE, MOST_LEFT = 0.05, 0.005, 0.2
"""seconds that drafts may lose at first, the share of all time by which that grows, and at most"""


class StepSeconds:
    """What steps took that did nothing but draw, by their number of tokens: of each size the median of the newest, and over the
    sizes what rises and is nearest to these (isotonic regression, by pooling adjacent violators: Ayer et al. 1955)."""

    def __init__(self) -> None:
        self._newest: dict[int, deque[float]] = {}
        """seconds by index of SIZES"""
        self._seen: dict[int, int] = {}
        self._steps = 0
        self._table: tuple[list[int], list[float]] | None = None
        """of the sizes that are known, tokens and seconds; None: to be made"""

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step."""
        if tokens > SIZES[-1] or seconds <= 0:
            return
        size, self._steps, self._table = bisect_right(SIZES, tokens) - 1, self._steps + 1, None
        self._newest.setdefault(size, deque(maxlen=NEWEST)).append(seconds)
        self._seen[size] = self._steps
        if self._steps % 64 == 0:
            for old in [size for size, step in self._seen.items() if step < self._steps - REMEMBERED]:
                del self._newest[old], self._seen[old]

    def knows(self, tokens: int) -> bool:
        """True if enough steps of that size were seen."""
        return len(self._newest.get(bisect_right(SIZES, tokens) - 1, ())) >= ENOUGH

    @property
    def table(self) -> tuple[list[int], list[float]]:
        """tokens of the sizes that are known, ascending, and their seconds, which never fall"""
        if self._table is None:
            known = {size: each for size, each in sorted(self._newest.items()) if len(each) >= ENOUGH}
            rising = never_falling([median(each) for each in known.values()], [len(each) for each in known.values()])
            self._table = [SIZES[size] for size in known], rising
        return self._table

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Return the seconds of steps of so many tokens: between sizes that are known in proportion; some beyond the largest
        as long as that, so that they are tried, and from there on as if each token cost its share; below the smallest likewise,
        so that nothing is drafted before it is known what a step takes as it is. [T] float64 for [T] ascending numbers."""
        sizes, known = self.table
        if not sizes:
            return np.ones(len(tokens))
        tried, far = sizes[-1] + max(TRIED, sizes[-1] // TRIED), 1000 * sizes[-1]
        seconds: np.ndarray = np.interp(tokens, [0, *sizes, tried, far], [0.0, *known, known[-1], known[-1] * far / tried])
        return seconds


def never_falling(values: list[float], weights: list[int]) -> list[float]:
    """Return the values that never fall and whose weighted squared distance from those given is least: where some fall, their
    mean."""
    pools: list[tuple[float, int, int]] = []
    """mean, weight and number of values that are pooled"""
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (mean, before, some), (other, after, more) = pools[-2:]
            total = before + after
            pools[-2:] = [((mean * before + other * after) / total, total, some + more)]
    return [mean for mean, _, count in pools for _ in range(count)]


class DraftBudget:
    """What drafts may still lose, in seconds: little at first, a share of all time, and what they have gained, up to a bound.
    So steps take at most `FIRST` + `SHARE` × their seconds longer than without drafts, however little can be guessed."""

    def __init__(self) -> None:
        self.left = FIRST
        self._open: tuple[int, int, int, float] | None = None
        """of the newest step that was read: its rows, its tokens, how many of them were right guesses, and what it took"""

    def note(self, rows: int, tokens: int, seconds: float) -> None:
        """Note a step that was read."""
        self._open = rows, tokens, 0, seconds

    def right(self, tokens: int) -> None:
        """Note that so many of its guesses were right."""
        if self._open is not None:
            rows, all_of_them, before, seconds = self._open
            self._open = rows, all_of_them, before + tokens, seconds

    def close(self, prices: StepSeconds) -> None:
        """Count that step: the seconds that its right guesses save others, less those that all its guesses took."""
        if self._open is None:
            return
        rows, tokens, right, seconds = self._open
        self._open, gained = None, SHARE * seconds
        if tokens > rows and prices.table[0]:
            plain, longer = prices.of(np.array([rows, tokens])).tolist()
            if not prices.knows(tokens):  # at most its share, so that a pause of the machine is no price
                longer = plain + min(max(0.0, seconds - plain), plain * (tokens - rows) / rows)
            gained += right * plain / rows - (longer - plain)
        self.left = min(MOST_LEFT, self.left + gained)


class Drafts:
    """Adds draft tokens to rows of one token. Owns the n-gram indexes of groups and the measured seconds of steps."""

    def __init__(self, most: int, state: SchedulerState) -> None:
        """most: tokens drafted for a row, 0 = off."""
        self.most = most
        self.indexes: WeakKeyDictionary[GroupState, NgramIndex] = WeakKeyDictionary()
        self.seconds = StepSeconds()
        self.account = DraftBudget()
        self._state = state
        self._matched: dict[Sequence, int] = {}
        """length of the match behind each draft of the newest step"""
        self._timed = 0, 0, 0, 0.0
        """the newest step that did nothing but draw: its number, its rows, its tokens and when it began"""
        self._steps = 0

    def wanted(self, running: list[Sequence]) -> bool:
        """True if the next step may draft, once all that was drawn is known."""
        return 0 < len(running) <= MOST_ROWS and self.most > 0

    def extend(self, rows: list[Row], budget: int, step: int, now: float) -> list[Row]:
        """Return the rows of a step, all of which have one token to compute, with drafts where these pay: at most `budget`
        tokens, in blocks that nobody owns. step: its number, now: seconds, when it began."""
        self._matched.clear()
        self.account.close(self.seconds)
        if not rows or not self.most:
            return rows
        self._timed = step, len(rows), len(rows), now
        if len(rows) > MOST_ROWS or self.account.left <= 0:
            return rows  # timed as well, so that prices of steps with more tokens are known before any is drafted
        self._steps += 1
        self._state.counters.draft_rows += len(rows)
        if self._steps % (PLAIN_EVERY if self.seconds.knows(len(rows)) else PLAIN_AT_FIRST):
            for group in {row.seq.state.number: row.seq.state for row in rows if may_draft(row.seq)}.values():
                self._index(group)
            guesses = [self._guess(row.seq) for row in rows]
            counts = self._counts(rows, guesses, budget)
            rows = [
                self._longer(row, guess[:count], length) if count else row
                for row, (guess, length), count in zip(rows, guesses, counts, strict=True)
            ]
        self._timed = step, len(rows), sum(row.count for row in rows), now
        return rows

    def ended(self, step: int, now: float) -> None:
        """Note that the step of that number was read, at `now` seconds."""
        number, rows, tokens, began = self._timed
        if step == number:
            self.seconds.add(tokens, now - began)
            self.account.note(rows, tokens, now - began)

    def learn(self, seq: Sequence, expected: tuple[int, ...], drawn: list[int]) -> None:
        """Note what became of a draft. drawn: the tokens that were appended to the sequence, one more than were right unless
        one of these ended it."""
        right = [token == guess for token, guess in zip(drawn, expected, strict=False)]
        self._state.counters.drafted_tokens += len(expected)
        accepted = len(drawn) - 1 if drawn else 0
        self._state.counters.accepted_tokens += accepted
        self.account.right(accepted)
        if seq.state in self.indexes:
            self.indexes[seq.state].learn(self._matched[seq], right)

    def _guess(self, seq: Sequence) -> tuple[tuple[int, ...], int]:
        """Guess the next tokens of a sequence, and say how long the match is."""
        texts, most = self.indexes.get(seq.state), min(self.most, seq.limit - seq.length - 1)
        if texts is None or most <= 0 or not may_draft(seq):
            return (), 0
        return texts.guess(texts.end(seq.index), most)

    def _counts(self, rows: list[Row], guesses: list[tuple[tuple[int, ...], int]], budget: int) -> list[int]:
        """Choose how many tokens of each guess are computed: together as many as give most tokens a second, of those that the
        account could bear if all were wrong."""
        chances = []
        for i, (row, (guess, length)) in enumerate(zip(rows, guesses, strict=True)):
            if guess:
                texts = self.indexes[row.seq.state]
                chances += [(-chance, at, i) for at, chance in enumerate(texts.chances(length, len(guess)))]
        counts = [0] * len(rows)
        chances = sorted(chances)[: max(0, budget)]
        if not chances:
            return counts
        kept = len(rows) + np.cumsum([0.0, *(-chance for chance, _, _ in chances)])
        seconds = self.seconds.of(len(rows) + np.arange(len(kept)))
        borne = np.searchsorted(seconds - seconds[0], self.account.left, side="right")
        for _, _, i in chances[: int(np.argmax((kept / seconds)[: max(1, borne)]))]:
            counts[i] += 1
        return counts

    def _longer(self, row: Row, draft: tuple[int, ...], length: int) -> Row:
        """Return a row with as much of a draft behind it as there is room for."""
        seq, state, end = row.seq, self._state, row.start + row.count
        room = (len(seq.blocks) + state.store.available) * state.config.block_size - end
        draft = draft[: max(0, room)]
        if not draft:
            return row
        state.tables.extend(seq, end + len(draft), state.version)
        self._matched[seq] = length
        return Row(seq, row.start, row.count + len(draft), row.draws + len(draft), draft)

    def _index(self, group: GroupState) -> None:
        """Bring the index of a group up to the output of its children."""
        texts = self.indexes.setdefault(group, NgramIndex())
        if len(texts) > MOST_TOKENS:
            texts.forget()
        most = MOST_TOKENS // (2 + 2 * len(group.finished_outputs) + 2 * len(group.sequences))
        texts.add(PROMPT, group.group.prompt, most)
        for number, tokens in group.finished_outputs.items():
            texts.add(number, tokens, most, behind=PROMPT)
        for number, sibling in group.sequences.items():
            texts.add(number, sibling.output, most, behind=PROMPT)


PROMPT = -1
"""number of the prompt among a group's texts; those of its children are their indices"""


def may_draft(seq: Sequence) -> bool:
    """True if a sequence that has one token to compute may have drafts behind it: not before its group forks; not while its
    group ends with its first `finish_after` children, since which these are must not depend on what was guessed; and not where
    its logits are changed, which takes longer than a draft saves."""
    state = seq.state
    return state.forked and not state.first_k_pending and state.rules is None and seq.given is None and not seq.pending
