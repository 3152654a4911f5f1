"""Children as they come, for routes that stream: new tokens, their text, and the end.

    service --Chunk, Sample--> Upstream.parts --> pieces() --Piece--> a dialect's events

Text is told as far as it is certain: not the half of a character, nor what may turn out to be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from tokenizers.decoders import DecodeStream

from engine.types import Sample, TokenChunk
from rollout.http.text import Text
from rollout.http.upstream import Names, Upstream, Wanted


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are written as text; None as the dialects' default."""

    skip_special: bool | None = None
    keep_stop: bool | None = None
    marker: str | None = None
    """nothing from here on is told before the end"""


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a child."""

    group: int
    index: int
    tokens: TokenChunk
    """new ones; none where its last ones came before it ended"""
    text: str
    """new text"""
    sample: Sample | None = None
    """the whole child, which has ended"""

    @property
    def ids(self) -> list[int]:
        return list(self.tokens.token_ids.tolist())


class TextDecoder:
    """The text of one child as its tokens come."""

    def __init__(self, text: Text, spelling: TextOptions, stop: tuple[str, ...]) -> None:
        self._text, self._spelling = text, spelling
        self._stream = DecodeStream(skip_special_tokens=spelling.skip_special is not False)
        self._marks = (*stop, spelling.marker) if spelling.marker else stop
        self._backend = getattr(text.tokenizer, "backend_tokenizer", None)
        """None: the text comes at the end"""
        self._told: list[str] = []
        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """Take in tokens. Returns the text that is certain now."""
        try:
            for id in ids:
                self._held += (self._stream.step(self._backend, id) or "") if self._backend is not None else ""
        except Exception:  # the library's word for bytes that are no text
            self._backend = None
        return self._tell(certain(self._held, self._marks))

    def end(self, sample: Sample) -> str:
        """Return the rest of the text of a child that has ended."""
        whole = self._text.of(sample, self._spelling.skip_special, self._spelling.keep_stop)
        told = "".join(self._told)
        # a tokenizer that goes back on its word, over blanks before a comma say, is taken by the word that it gave
        return whole[len(told) :] if whole.startswith(told) or self._backend is None else self._held

    def _tell(self, length: int) -> str:
        new, self._held = self._held[:length], self._held[length:]
        self._told.append(new)
        return new


def certain(text: str, marks: Sequence[str]) -> int:
    """Return how many characters of a text come before the first mark, or before what may be the beginning of one."""
    most = len(text)
    for mark in marks:
        at = text.find(mark)
        if at < 0:
            begun = (i for i in range(max(0, len(text) - len(mark) + 1), len(text)) if mark.startswith(text[i:]))
            at = next(begun, len(text))
        most = min(most, at)
    return most


async def pieces(
    upstream: Upstream, groups: Sequence[Wanted], text: Text, spellings: Sequence[TextOptions | None], names: Names
) -> AsyncGenerator[TextChunk, None]:
    """Sample groups, and yield what is new of their children. `spellings`: of each group; None = without text. Raises as
    `Upstream.generate`."""
    words: dict[tuple[int, int], TextDecoder] = {}
    known: dict[tuple[int, int], int] = {}
    async with aclosing(upstream.parts(groups, names)) as parts:
        async for number, part in parts:
            child, spelling = (number, part.index), spellings[number]
            if spelling is not None and child not in words:
                words[child] = TextDecoder(text, spelling, groups[number][1].stop)
            new = beyond(part, known.get(child, 0))
            if isinstance(part, Sample):
                rest = words[child].end(part) if spelling is not None else ""
                yield TextChunk(group=number, index=part.index, tokens=new, text=rest, sample=part)
            elif len(new.token_ids) and new.first == known.get(child, 0):
                known[child] = new.first + len(new.token_ids)
                told = words[child].add(new.token_ids.tolist()) if spelling is not None else ""
                yield TextChunk(group=number, index=part.index, tokens=new, text=told)


def beyond(part: TokenChunk | Sample, known: int) -> TokenChunk:
    """Return the tokens of a part behind the first `known` of its child; none, if it begins later than that."""
    first = part.first if isinstance(part, TokenChunk) else 0
    skip = max(0, known - first)
    return TokenChunk(index=part.index, first=first + skip, seed=part.seed, **part.slice(skip).columns())
