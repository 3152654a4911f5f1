"""Who is computed where several clients have work: a client that was idle goes before those that keep the engine busy.

    credit   most ┤‾‾╲            ╱‾‾‾‾        less by the seconds of each step, times the client's part of its tokens;
                  │    ╲        ╱              REFILL s more for each second without an unfinished group
                0 ┤      ╲────╱
                    works  done   idle

The *foreground* are the clients with work and the most credit, in LEVELS. While others have work, it alone is computed. Clients
that run without a pause spend their credit once and share the engine from then on (docs/decisions/fairness.md).

Idea: multilevel feedback queues (Corbató 1962), which serve first whoever got least.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping

from engine.scheduling.counters import Rate
from engine.scheduling.sequence import Row, Sequence

LEVELS = 4
"""of credit above none: one client goes before another where its credit is on a higher level, so that they change places a few
times and not with every step"""
REFILL = 4.0
"""seconds of credit for each second without work: a client that asks for less than four fifths of the time keeps its own"""
RESERVE = 10
"""times `foreground_s`: longest that others are held back at once, whoever comes"""
EXPECTED_S = 60.0
"""a client that had work so recently may come back at any time"""
SHORT_STEP_S = 0.1
"""of a step while one may come back, which then waits for the end of that step"""
SHORT_STEP_TOKENS = 32
"""in such a step at least: fewer would mostly pay for reading the weights"""
MOST_IDLE = 4096
"""idle clients that are remembered; the one that was idle longest is forgotten"""


class Fairness:
    """Credit of each client, in seconds. Written by the scheduler, at events: nothing changes between a commit and the plan
    that follows but through `arrived` and `left`. All times are of the scheduler's clock, in seconds."""

    def __init__(self, most: float) -> None:
        """most: `EngineConfig.foreground_s`; 0 = nobody is ever in the foreground."""
        self.most = most
        self._credit: dict[str, float] = {}
        """of clients with unfinished groups, and of those in `_idle`"""
        self._groups: Counter[str] = Counter()
        """unfinished ones by client"""
        self._idle: dict[str, float] = {}
        """when the last group of a client without any ended, ascending"""
        self._reserve = RESERVE * most
        """seconds for which others may be held back; each second in which they are not adds one"""
        self._since = 0.0
        """when the oldest step in flight began"""
        self._committing = 0.0
        """seconds of the last commit"""
        self._rate = Rate(512)
        self._tokens_per_second = 0.0

    def arrived(self, client: str, now: float) -> None:
        """Count a group that was submitted."""
        since = self._idle.pop(client, None)
        if since is not None:
            self._credit[client] = min(self.most, self._credit[client] + REFILL * (now - since))
        self._credit.setdefault(client, self.most)
        self._groups[client] += 1

    def left(self, client: str, now: float) -> None:
        """Count a group that ended. Forgets clients that were idle so long that they have full credit and are not expected."""
        self._groups[client] -= 1
        if self._groups[client]:
            return
        del self._groups[client]
        self._idle[client] = now
        for other, since in list(self._idle.items()):
            if len(self._idle) <= MOST_IDLE and now - since < max(EXPECTED_S, self.most / REFILL):
                break
            del self._idle[other], self._credit[other]

    def foreground(self, working: Collection[str]) -> Collection[str]:
        """Choose which of the clients with work are computed now: those on the highest level of credit that there is."""
        if not self.most:
            return working
        level = {client: math.ceil(LEVELS * self._credit[client] / self.most) for client in working}
        highest = max(level.values(), default=0)
        return {client for client in working if level[client] == highest}

    def computed(self, tokens: Mapping[str, int], seconds: float, held: bool) -> None:
        """Charge clients for a step that computed so many tokens of each: its seconds in these proportions. held: others had
        work and were not computed. When others were held back long enough in all, the credit of the foreground ends."""
        total = sum(tokens.values())
        self._tokens_per_second = self._rate.add(total, seconds)
        self._reserve = min(RESERVE * self.most, self._reserve + (-seconds if held else seconds))
        for client, count in tokens.items():
            if client in self._groups:
                left = self._credit[client] - seconds * count / total
                self._credit[client] = max(0.0, left) if self._reserve > 0 or not held else 0.0

    @property
    def only_client(self) -> str | None:
        """the client that has unfinished groups, if it is one"""
        return next(iter(self._groups)) if len(self._groups) == 1 else None

    def step_began(self, now: float) -> None:
        """Note that a step was planned while none was in flight. The time of the last commit is part of it."""
        self._since = now - self._committing

    def step_ended(self, tokens: Mapping[str, int], now: float, held: bool) -> None:
        """Charge for the oldest step in flight, which ends now; the next one, if that is in flight, begins."""
        self.computed(tokens, now - self._since, held)
        self._since = now

    def committed(self, seconds: float) -> None:
        """Note what it took to record a step."""
        self._committing = seconds

    def most_tokens(self, most: int, now: float) -> int:
        """Return the tokens of the next step: `most`, or what SHORT_STEP_S computes where a client with credit waits for its
        end or may come and wait."""
        if not self._tokens_per_second or not self._short_steps(now):
            return most
        return min(most, max(SHORT_STEP_TOKENS, int(SHORT_STEP_S * self._tokens_per_second)))

    def _short_steps(self, now: float) -> bool:
        """True if a client was idle a while ago, or one of several that have work has credit."""
        last_left = next(reversed(self._idle.values()), None)
        if self.most and last_left is not None and now - last_left < EXPECTED_S:
            return True
        return len(self._groups) > 1 and any(self._credit[client] > 0 for client in self._groups)

    def credits(self) -> dict[str, float]:
        """Return the seconds of credit of each client that has unfinished groups."""
        return {client: self._credit[client] for client in self._groups}


def tokens_by_client(rows: list[Row], total: int, only_client: str | None) -> Mapping[str, int]:
    """Count the tokens of a step by client. only_client: the one that has all of them, if that is known."""
    if only_client is not None:
        return {only_client: total}
    tokens = Counter[str]()
    for seq, _, count, *_ in rows:
        tokens[seq.state.client] += count
    return tokens


class RoundRobin:
    """Which sequences decode in a step that is too short for all: each client's in turn, in equal parts of the step."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        """by client, age of the sequence that its last turn ended with"""

    def take(self, decoding: list[Sequence], most: int) -> list[Sequence]:
        """Choose at most so many of the sequences, which are sorted by age and stay so."""
        if len(decoding) <= most:
            return decoding
        of_client: dict[str, list[Sequence]] = {}
        for seq in decoding:
            of_client.setdefault(seq.state.client, []).append(seq)
        self._last = {client: age for client, age in self._last.items() if client in of_client}
        turn: list[Sequence] = []
        clients = sorted(of_client, key=lambda client: len(of_client[client]))
        for i, client in enumerate(clients):
            sequences = of_client[client]
            part = min(len(sequences), (most - len(turn)) // (len(clients) - i))
            first = bisect_right(sequences, self._last.get(client, (-1, -1)), key=lambda seq: seq.age)
            mine = [*sequences[first:], *sequences[:first]][:part]
            if mine:
                self._last[client] = mine[-1].age
            turn += mine
        return sorted(turn, key=lambda seq: seq.age)
