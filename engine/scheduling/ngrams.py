"""N-gram index over the tokens of one group, from which drafts are proposed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

LONGEST = 8
"""tokens of a match that are compared"""
LOOKED_AT = 32
"""places where the last two tokens stood before, or where these never did the last one; the latest first"""


class NgramIndex:
    """The texts of one group as an index of tokens and of pairs of them: each place knows the one before it in its text, the
    one after it, and the last earlier places of the same pair and of the same token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._before: list[int] = []
        self._after: list[int] = []
        self._pair_before: list[int] = []
        self._token_before: list[int] = []
        self._latest_pair: dict[tuple[int, int], int] = {}
        self._latest_token: dict[int, int] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        """of each text: its last place, and how many of its tokens are indexed"""
        self._right = [0.4 + 0.32 * length for length in range(LONGEST + 1)]
        self._tried = [4.0] * (LONGEST + 1)
        """drafted tokens by the length of the match behind which they stood: those that were right, and all. They begin as
        SmolLM2's answers at temperature 1 have it (0.2 to 0.7), so that each group tries"""

    def add(self, text: int, tokens: list[int] | np.ndarray, most: int, behind: int | None = None) -> int:
        """Index what is new of a text, all of whose tokens are given; of one that is new itself the last `most`. behind: the
        text that it continues. Returns its last place, -1 if it has none."""
        place, known = self._ends.get(text, (-1, max(0, len(tokens) - most)))
        if not known and behind is not None and text not in self._ends:
            place = self._ends[behind][0]
        fresh = tokens[known:]
        for token in fresh if isinstance(fresh, list) else fresh.tolist():
            at = len(self.tokens)
            self.tokens.append(token)
            self._before.append(place)
            self._after.append(-1)
            pair = (self.tokens[place], token) if place >= 0 else (-1, token)
            self._pair_before.append(self._latest_pair.get(pair, -1))
            self._token_before.append(self._latest_token.get(token, -1))
            self._latest_pair[pair] = self._latest_token[token] = at
            if place >= 0:
                self._after[place] = at  # of the prompt's last token there are as many as children: the latest
            place, known = at, known + 1
        self._ends[text] = place, known
        return place

    def __len__(self) -> int:
        return len(self.tokens)

    def end(self, text: int) -> int:
        """Return the last place of a text, -1 if it has none."""
        return self._ends[text][0]

    def forget(self) -> None:
        """Begin anew; what was learned of drafts stays."""
        for places in (self.tokens, self._before, self._after, self._pair_before, self._token_before):
            places.clear()
        for known in (self._latest_pair, self._latest_token, self._ends):
            known.clear()

    def guess(self, place: int, most: int) -> tuple[tuple[int, ...], int]:
        """Guess at most `most` tokens behind a place, and say how long the match is that they stand behind: of the longest
        matches the continuation that most have, token by token, of equal ones the latest. Nothing is guessed behind a token
        that never stood anywhere else."""
        found, longest = self._matches(place, self._pair_before)
        if not found:
            found, longest = self._matches(place, self._token_before)
        guessed: list[int] = []
        while found and len(guessed) < most:
            following = [after for at in found if (after := self._after[at]) >= 0]
            if not following:
                break
            token = Counter(self.tokens[after] for after in following).most_common(1)[0][0]
            guessed.append(token)
            found = [after for after in following if self.tokens[after] == token]
        return tuple(guessed), longest

    def _matches(self, place: int, before: list[int]) -> tuple[list[int], int]:
        """Return the places along a chain of earlier ones that something follows and whose texts up to there match longest,
        and how many tokens that is."""
        found: list[int] = []
        longest, at = 1, -1 if place < 0 else before[place]
        for _ in range(LOOKED_AT):
            if at < 0:
                break
            if self._after[at] >= 0 and (length := self._alike(place, at)) >= longest:
                found = [*found, at] if length == longest else [at]
                longest = length
            at = before[at]
        return found, longest

    def _alike(self, one: int, other: int) -> int:
        """Count the tokens up to these places that are the same in both texts."""
        length = 0
        while length < LONGEST and one >= 0 and other >= 0 and self.tokens[one] == self.tokens[other]:
            length += 1
            one, other = self._before[one], self._before[other]
        return length

    def chances(self, length: int, count: int) -> list[float]:
        """Return how likely the first 1, 2 … `count` tokens of a draft behind a match of `length` are all right."""
        chance, chances = 1.0, []
        for at in range(count):
            known = min(length + at, LONGEST)
            chance *= self._right[known] / self._tried[known]
            chances.append(chance)
        return chances

    def learn(self, length: int, right: Iterable[bool]) -> None:
        """Note which tokens of a draft behind a match of `length` were right, up to the first that was not."""
        for at, each in enumerate(right):
            known = min(length + at, LONGEST)
            self._right[known] += each
            self._tried[known] += 1
            if self._tried[known] > 128:
                self._right[known], self._tried[known] = self._right[known] / 2, self._tried[known] / 2
