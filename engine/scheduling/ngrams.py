"""N-gram index over the texts of one group: proposes drafts for speculative decoding, and measures their acceptance rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

LONGEST = 8
"""most tokens of a match that are compared"""
LOOKED_AT = 32
"""most earlier occurrences that are compared, the latest first"""


class NgramIndex:
    """Tokens of one group's texts, and where tokens and pairs of tokens occur.

    A *place* is the number of a token in the index. Each has links: the place before and after it in its text, and the last
    earlier places of the same pair of tokens and of the same token."""

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
        self._accepted = [0.4 + 0.32 * length for length in range(LONGEST + 1)]
        self._drafted = [4.0] * (LONGEST + 1)
        """draft tokens by length of their match: accepted ones, and all. The initial rates, 0.2 to 0.7 for matches of 1 to 8
        tokens, are near those of SmolLM2 at temperature 1, so that every group tries drafts"""

    def add(self, text: int, tokens: list[int] | np.ndarray, most: int, behind: int | None = None) -> int:
        """Index the new tokens of a text; of a new text the last `most`. Returns its last place, -1 for an empty text.

        tokens: the whole text. behind: the text that it continues."""
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
                self._after[place] = at  # each child follows the prompt's last token: the latest one counts
            place, known = at, known + 1
        self._ends[text] = place, known
        return place

    def __len__(self) -> int:
        return len(self.tokens)

    def end(self, text: int) -> int:
        """Return the last place of a text, -1 if it has none."""
        return self._ends[text][0]

    def clear(self) -> None:
        """Remove all texts; the acceptance rates stay."""
        for places in (self.tokens, self._before, self._after, self._pair_before, self._token_before):
            places.clear()
        for known in (self._latest_pair, self._latest_token, self._ends):
            known.clear()

    def draft(self, place: int, most: int) -> tuple[tuple[int, ...], int]:
        """Draft at most `most` tokens that may follow a place. Returns them and the length of the match.

        Token by token, the draft is the most frequent continuation of the longest matches, of equally frequent ones the latest.
        It is empty after a token that occurs nowhere else."""
        found, longest = self._matches(place, self._pair_before)
        if not found:
            found, longest = self._matches(place, self._token_before)
        drafted: list[int] = []
        while found and len(drafted) < most:
            following = [after for at in found if (after := self._after[at]) >= 0]
            if not following:
                break
            token = Counter(self.tokens[after] for after in following).most_common(1)[0][0]
            drafted.append(token)
            found = [after for after in following if self.tokens[after] == token]
        return tuple(drafted), longest

    def _matches(self, place: int, before: list[int]) -> tuple[list[int], int]:
        """Return the earlier occurrences with the longest match and a token after them, and the length of that match. before:
        the links to follow."""
        found: list[int] = []
        longest, at = 1, -1 if place < 0 else before[place]
        for _ in range(LOOKED_AT):
            if at < 0:
                break
            if self._after[at] >= 0 and (length := self._common(place, at)) >= longest:
                found = [*found, at] if length == longest else [at]
                longest = length
            at = before[at]
        return found, longest

    def _common(self, one: int, other: int) -> int:
        """Count the equal tokens of two texts up to these places, backwards."""
        length = 0
        while length < LONGEST and one >= 0 and other >= 0 and self.tokens[one] == self.tokens[other]:
            length += 1
            one, other = self._before[one], self._before[other]
        return length

    def acceptance(self, length: int, count: int) -> list[float]:
        """Return the probabilities that the first 1, 2 … `count` tokens of a draft are all accepted. length: of its match."""
        chance, chances = 1.0, []
        for at in range(count):
            known = min(length + at, LONGEST)
            chance *= self._accepted[known] / self._drafted[known]
            chances.append(chance)
        return chances

    def learn(self, length: int, accepted: Iterable[bool]) -> None:
        """Record which tokens of a draft were accepted, up to the first that was not. length: of its match."""
        for at, each in enumerate(accepted):
            known = min(length + at, LONGEST)
            self._accepted[known] += each
            self._drafted[known] += 1
            if self._drafted[known] > 128:
                self._accepted[known], self._drafted[known] = self._accepted[known] / 2, self._drafted[known] / 2
