"""Stop strings: found in the bytes of tokens, across the borders of tokens and of characters. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, cached_property, partial

from rollout.engine.values import Group, PartialSample
from rollout.engine.vocabulary import NoVocabulary, Vocabulary


class Stops:
    """The stop strings of a group. Each token is searched together with the last bytes before it, in which a stop string may
    have begun.

    Example, of the stop string "\\n\\nQ":

        text      … e . \\n | \\n Q : | A       | border of tokens
        tail            ───   piece          searched together: found, 3 + 1 bytes before the end of the token
    """

    def __init__(self, strings: tuple[str, ...], vocabulary: Vocabulary) -> None:
        self.strings = strings
        self.vocabulary = vocabulary
        self._bytes = [string.encode() for string in strings]
        self._keep = max(map(len, self._bytes)) - 1

    def find(self, tail: bytes, token: int) -> tuple[bytes, tuple[int, int] | None]:
        """Search for stop strings that the next token after `tail` completes. Returns the tail after it, and the one that
        begins first as (its index, bytes from its beginning to the end of the token); None: the token completes none."""
        piece = self.vocabulary[token]
        window, known, found = tail + piece, len(tail), None
        for which, string in enumerate(self._bytes):
            at = window.find(string, max(0, known - len(string) + 1))
            if at >= 0 and (found is None or len(window) - at > found[1]):
                found = which, len(window) - at
        return window[max(0, len(window) - self._keep) :], found

    def ending(self, tokens: Iterable[int], min_tokens: int) -> int | None:
        """Return the index of the first token that completes a stop string and has at least `min_tokens` before it; None: none
        does."""
        tail = b""
        for at, token in enumerate(tokens):
            tail, found = self.find(tail, token)
            if found is not None and at >= min_tokens:
                return at
        return None

    def completes(self, child: PartialSample, min_tokens: int) -> bool:
        """Return whether the last token of a partial child completes a stop string. Raises ValueError if an earlier one
        does."""
        at = self.ending(child.token_ids.tolist(), min_tokens)
        if at is not None and at < len(child.token_ids) - 1:
            raise ValueError(f"partial sample {child.index} has tokens after token {at}, which completes a stop string")
        return at is not None

    def text_end(self, tokens: Iterable[int], cut: int) -> int:
        """Count the characters of a text without its last `cut` bytes; invalid UTF-8 counts as its replacement characters."""
        text = self.vocabulary.text(tokens)
        return len(text[: len(text) - cut].decode("utf-8", "replace"))


def stops_of(group: Group, load: Callable[[], Vocabulary]) -> Stops | None:
    """Return the stop strings of a group; None: it has none, or is scored without being drawn again. Raises what `load`
    raises."""
    if not group.sampling.stop or (group.score and not group.redraw):
        return None
    return Stops(group.sampling.stop, load())


class TokenTexts:
    """The texts that the tokens of a model stand for, read from its folder when they are first needed."""

    def __init__(self, folder: str) -> None:
        self.vocabulary = cache(partial(Vocabulary.load, folder))
        """loads the bytes of the tokens once"""

    def stops_of(self, group: Group) -> Stops | None:
        """Return the stop strings of a group; None: it has none. Raises NoVocabulary (a ValueError) if the bytes of tokens are
        not known."""
        return stops_of(group, self.vocabulary)

    @cached_property
    def digest(self) -> str:
        """Return the digest of the text in which stop strings are searched; "": there is none, and they are refused."""
        try:
            return self.vocabulary().digest
        except NoVocabulary:
            return ""
