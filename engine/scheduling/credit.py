"""Credit of each client, in seconds: a client that was idle gets priority over clients that keep the engine busy.

    credit   most ┤‾‾╲            ╱‾‾‾‾        − seconds of each step × the client's fraction of its tokens
                  │    ╲        ╱              + REFILL s for each second without an unfinished group
                0 ┤      ╲────╱
                    works  done   idle

A client without pauses spends its credit once and shares the engine from then on (docs/decisions/fairness.md). Idea: multilevel
feedback queues (Corbató 1962), in which jobs with the least service have the highest priority.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from rollout.engine.scheduling.counters import Rate

LEVELS = 4
"""levels of credit above zero. A client has priority over clients on lower levels; with few levels, priority changes a few
times and not with every step"""
REFILL = 4.0
"""seconds of credit for each second without work: a client that uses less than four fifths of the time keeps its credit"""
RESERVE = 10
"""times `foreground_s`: longest time for which clients without priority are held back"""
EXPECTED_S = 60.0
"""for so long after its last group, a client is expected to submit again"""
SHORT_STEP_S = 0.1
"""longest step while a client is expected: its first group waits for the end of the step"""
SHORT_STEP_TOKENS = 32
"""least tokens of such a step: with fewer, most of its time would go into reading the weights"""
MOST_IDLE = 4096
"""idle clients whose credit is stored, the most recent ones"""


class ClientCredit:
    """Credit of each client. All times are of the scheduler's clock. Between a commit and the next plan only `arrived` and
    `left` change it."""

    def __init__(self, most: float) -> None:
        """most: largest credit, `EngineConfig.foreground_s`; 0 = no client ever has priority."""
        self.most = most
        self._credit: dict[str, float] = {}
        """by client, of those with unfinished groups and of those in `_idle`"""
        self._groups: Counter[str] = Counter()
        """unfinished groups by client"""
        self._idle: dict[str, float] = {}
        """when the last group of an idle client finished, ascending"""
        self._reserve = RESERVE * most
        """seconds for which clients may still be held back; each second in which none is adds one"""
        self._since = 0.0
        """when the oldest step in flight began"""
        self._committing = 0.0
        """seconds of the last commit"""
        self._rate = Rate(512)
        self._tokens_per_second = 0.0

    def arrived(self, client: str, now: float) -> None:
        """Count a group that was submitted, and credit the idle time of its client."""
        since = self._idle.pop(client, None)
        if since is not None:
            self._credit[client] = min(self.most, self._credit[client] + REFILL * (now - since))
        self._credit.setdefault(client, self.most)
        self._groups[client] += 1

    def left(self, client: str, now: float) -> None:
        """Count a group that finished. Drops clients that were idle for so long that they have full credit and are not
        expected."""
        self._groups[client] -= 1
        if self._groups[client]:
            return
        del self._groups[client]
        self._idle[client] = now
        for other, since in list(self._idle.items()):
            if len(self._idle) <= MOST_IDLE and now - since < max(EXPECTED_S, self.most / REFILL):
                break
            del self._idle[other], self._credit[other]

    def priority(self, working: Collection[str]) -> Collection[str]:
        """Return the clients with priority among those with work: those on the highest level of credit."""
        if not self.most or len(working) <= 1:
            return working
        level = {client: math.ceil(LEVELS * self._credit[client] / self.most) for client in working}
        highest = max(level.values(), default=0)
        return {client for client in working if level[client] == highest}

    def computed(self, tokens: Mapping[str, int], seconds: float, held: bool) -> None:
        """Charge clients the seconds of a step in proportion to their `tokens` in it. held: other clients had work and were
        held back. Once the time for which clients may be held back is used up, the charged clients lose their credit."""
        total = sum(tokens.values())
        self._tokens_per_second = self._rate.add(total, seconds)
        self._reserve = min(RESERVE * self.most, self._reserve + (-seconds if held else seconds))
        for client, count in tokens.items():
            if client in self._groups:
                left = self._credit[client] - seconds * count / total
                self._credit[client] = max(0.0, left) if self._reserve > 0 or not held else 0.0

    @property
    def only_client(self) -> str | None:
        """Return the client that has all unfinished groups, if one has."""
        return next(iter(self._groups)) if len(self._groups) == 1 else None

    def step_began(self, now: float) -> None:
        """Record that a step was planned while none was in flight. It is charged for the last commit too."""
        self._since = now - self._committing

    def step_ended(self, tokens: Mapping[str, int], now: float, held: bool) -> None:
        """Charge for the oldest step in flight, which ends now, when the next one begins."""
        self.computed(tokens, now - self._since, held)
        self._since = now

    def committed(self, seconds: float) -> None:
        """Record the duration of a commit."""
        self._committing = seconds

    def most_tokens(self, most: int, now: float) -> int:
        """Return the token budget of the next step: `most`, or fewer for a step of SHORT_STEP_S if a client with credit waits
        for the end of the step or is expected."""
        if not self._tokens_per_second or not self._short_steps(now):
            return most
        return min(most, max(SHORT_STEP_TOKENS, int(SHORT_STEP_S * self._tokens_per_second)))

    def _short_steps(self, now: float) -> bool:
        """Return whether a client is expected, or one of several clients with work has credit."""
        last_left = next(reversed(self._idle.values()), None)
        if self.most and last_left is not None and now - last_left < EXPECTED_S:
            return True
        return len(self._groups) > 1 and any(self._credit[client] > 0 for client in self._groups)

    def credits(self) -> dict[str, float]:
        """Return the seconds of credit of each client that has unfinished groups."""
        return {client: self._credit[client] for client in self._groups}
