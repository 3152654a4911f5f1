"""Credit of each client: a client that was idle gets priority over clients that keep the engine busy.

    credit   most ┤‾‾╲            ╱‾‾‾‾        less by the seconds of each step, times the client's part of its tokens;
                  │    ╲        ╱              REFILL s more for each second without an unfinished group
                0 ┤      ╲────╱
                    works  done   idle

Clients that run without a pause spend their credit once and share the engine from then on (docs/decisions/fairness.md). Idea:
multilevel feedback queues (Corbató 1962), which serve first whoever got least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from rollout.engine.scheduling.counters import Rate

LEVELS = 4
"""levels of credit above none: a client has priority over clients on a lower level, so that they change places a few times and
not with every step"""
REFILL = 4.0
"""seconds of credit for each second without work: a client that asks for less than four fifths of the time keeps its own"""
RESERVE = 10
"""times `foreground_s`: longest time for which others are held back at once"""
EXPECTED_S = 60.0
"""a client that had work so recently is expected back"""
SHORT_STEP_S = 0.1
"""seconds of a step while a client is expected, which would wait for the end of that step"""
SHORT_STEP_TOKENS = 32
"""least tokens of such a step: fewer would mostly pay for reading the weights"""
MOST_IDLE = 4096
"""idle clients that are remembered: the latest"""


class ClientCredit:
    """Credit of each client in seconds, all times of the scheduler's clock. Between a commit and the next plan it changes in
    `arrived` and `left` only."""

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
        """seconds for which others may be held back; each second in which no client is held back adds one"""
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
        """Count a group that finished. Forgets clients that were idle so long that they have full credit and are not
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
        """Return the clients that are computed now, of those with work: those on the highest level of credit."""
        if not self.most:
            return working
        level = {client: math.ceil(LEVELS * self._credit[client] / self.most) for client in working}
        highest = max(level.values(), default=0)
        return {client for client in working if level[client] == highest}

    def computed(self, tokens: Mapping[str, int], seconds: float, held: bool) -> None:
        """Charge clients for a step that computed so many tokens of each: its seconds in these proportions. held: other clients
        had work and were held back. Once others were held back for long enough in all, the computed clients lose their
        credit."""
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
        """Note that a step was planned while none was in flight. The time of the last commit counts to it."""
        self._since = now - self._committing

    def step_ended(self, tokens: Mapping[str, int], now: float, held: bool) -> None:
        """Charge for the oldest step in flight, which ends now, when the next one begins."""
        self.computed(tokens, now - self._since, held)
        self._since = now

    def committed(self, seconds: float) -> None:
        """Note how long the commit of a step took."""
        self._committing = seconds

    def most_tokens(self, most: int, now: float) -> int:
        """Return the token budget of the next step: `most`, or what SHORT_STEP_S computes while a client with credit waits for
        the end of the step or is likely to come."""
        if not self._tokens_per_second or not self._short_steps(now):
            return most
        return min(most, max(SHORT_STEP_TOKENS, int(SHORT_STEP_S * self._tokens_per_second)))

    def _short_steps(self, now: float) -> bool:
        """Return whether a client was idle a while ago, or one of several clients with work has credit."""
        last_left = next(reversed(self._idle.values()), None)
        if self.most and last_left is not None and now - last_left < EXPECTED_S:
            return True
        return len(self._groups) > 1 and any(self._credit[client] > 0 for client in self._groups)

    def credits(self) -> dict[str, float]:
        """Return the seconds of credit of each client that has unfinished groups."""
        return {client: self._credit[client] for client in self._groups}
