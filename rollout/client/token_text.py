"""Token ids to text, whole and piece by piece, so that both are the same text.

    ids ──→ TokenStream.add ──→ TextPiece, TextPiece, … (a special token is a part of its own) ──→ TokenStream.end ──→ TextPiece

A decoder of tokenizers reads a run of bytes as one: where the last one is missing, it replaces the whole run (byte fallback),
which a stream cannot know. Here a character is text once its bytes are complete, and other bytes become U+FFFD one by one.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from rollout.engine.values import Sample
from rollout.engine.vocabulary import NoVocabulary, Vocabulary

REPLACEMENT = "\ufffd"
COMPARED = 256
"""tokens whose text is compared with the tokenizer's own when a vocabulary is read"""
MAX_PENDING = 8
"""tokens that may be part of one character, of a tokenizer whose bytes are unknown"""


class TextPiece(NamedTuple):
    """A piece of text: that of ordinary tokens, or of one special token."""

    text: str
    special: bool


class TokenStream(Protocol):
    """Decodes tokens one after the other."""

    def add(self, id: int) -> list[TextPiece]:
        """Take the next token. Returns the text that is complete with it."""

    def end(self) -> list[TextPiece]:
        """Return the text of bytes that no character was made of."""


class ByteStream:
    """Decodes tokens whose bytes are known."""

    def __init__(self, vocabulary: Vocabulary, special: dict[int, str]) -> None:
        self._vocabulary, self._special = vocabulary, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, id: int) -> list[TextPiece]:
        if id in self._special:
            return [*self.end(), TextPiece(self._special[id], True)]
        text = self._decoder.decode(self._vocabulary[id])
        return [TextPiece(text, False)] if text else []

    def end(self) -> list[TextPiece]:
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return [TextPiece(text, False)] if text else []


class WindowStream:
    """Decodes tokens of a tokenizer whose bytes are unknown: the text of a token is what it adds to that of the tokens before
    it."""

    def __init__(self, tokenizer: Any, special: dict[int, str]) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._told: list[int] = []
        """the last tokens whose text was returned"""
        self._pending: list[int] = []

    def add(self, id: int) -> list[TextPiece]:
        if id in self._special:
            parts = [*self.end(), TextPiece(self._special[id], True)]
            self._told = []
            return parts
        self._pending.append(id)
        if len(self._pending) < MAX_PENDING and decoded(self._tokenizer, self._pending).endswith(REPLACEMENT):
            return []
        return self.end()

    def end(self) -> list[TextPiece]:
        if not self._pending:
            return []
        before, whole = decoded(self._tokenizer, self._told), decoded(self._tokenizer, [*self._told, *self._pending])
        text = whole[len(before) :] if whole.startswith(before) else decoded(self._tokenizer, self._pending)
        self._told, self._pending = self._pending, []
        return [TextPiece(text, False)] if text else []


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the tokenizer's text of ids, special tokens included."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
    return text


class TokenText:
    """The text of a tokenizer's tokens.

    Args:
        tokenizer: of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = special_tokens(tokenizer)
        """text of the special tokens, by id"""
        self._vocabulary = vocabulary_of(tokenizer, self.special)
        self._strips = self._vocabulary is not None and strips(tokenizer, self._vocabulary)

    def stream(self) -> TokenStream:
        """Begin to decode."""
        if self._vocabulary is None:
            return WindowStream(self.tokenizer, self.special)
        return ByteStream(self._vocabulary, self.special)

    def parts(self, ids: Sequence[int]) -> list[TextPiece]:
        """Return the text of ids: what a stream returns of them, one after the other."""
        if self._vocabulary is not None and self.special.keys().isdisjoint(ids):
            return [TextPiece(self._vocabulary.text(ids).decode("utf-8", "replace"), False)]
        stream = self.stream()
        return [part for id in ids for part in stream.add(id)] + stream.end()

    def text(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of ids with which a text begins: without the space that the tokenizer puts before the first word."""
        return self.begun(visible(self.parts(ids), skip_special), ids)

    def begun(self, text: str, ids: Sequence[int]) -> str:
        """Remove the space that the tokenizer puts before the first word of a text that begins with these ids."""
        return text.removeprefix(" ") if self._strips and len(ids) and ids[0] not in self.special else text

    def token_bytes(self, id: int) -> bytes | None:
        """Return the bytes of a token; None if the tokenizer does not tell them."""
        if id in self.special:
            return self.special[id].encode()
        if self._vocabulary is not None:
            return self._vocabulary[id]
        text = decoded(self.tokenizer, [id])
        return None if REPLACEMENT in text else text.encode()

    def sample_parts(self, sample: Sample, keep_stop: bool = False) -> list[TextPiece]:
        """Return the text of a sample, up to the stop string that ended it."""
        parts = self.parts(sample.token_ids.tolist())
        if sample.text_end is None or sample.stopped_by is None:
            return parts
        return cut(parts, sample.text_end + (len(sample.stopped_by) if keep_stop else 0))

    def sample_text(self, sample: Sample, *, skip_special: bool = True, keep_stop: bool = False) -> str:
        """Return the text of a sample, without the stop string that ended it.

        Args:
            skip_special: without special tokens.
            keep_stop: keep the stop string."""
        return self.begun(visible(self.sample_parts(sample, keep_stop), skip_special), sample.token_ids.tolist())


def visible(parts: Iterable[TextPiece], skip_special: bool) -> str:
    """Join parts, without those of special tokens if `skip_special`."""
    return "".join([part.text for part in parts if not (skip_special and part.special)])


def cut(parts: Iterable[TextPiece], length: int) -> list[TextPiece]:
    """Return the first `length` characters of parts."""
    kept: list[TextPiece] = []
    for part in parts:
        if length <= 0:
            break
        kept.append(part._replace(text=part.text[:length]))
        length -= len(part.text)
    return kept


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the text of a tokenizer's special tokens, by id."""
    added = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def vocabulary_of(tokenizer: Any, special: dict[int, str]) -> Vocabulary | None:
    """Return the bytes of a tokenizer's tokens; None if they cannot be determined, or the tokenizer makes another text of some
    of them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    try:
        vocabulary = Vocabulary.of(msgspec.json.decode(backend.to_str()))
    except (NoVocabulary, KeyError, TypeError, AttributeError, ValueError):
        return None
    count = len(vocabulary.pieces)
    for id in range(0, count, max(1, count // COMPARED)):
        ours, theirs = vocabulary[id].decode("utf-8", "replace"), decoded(tokenizer, [id])
        if id not in special and ours.removeprefix(" ") != theirs.removeprefix(" "):
            return None
    return vocabulary


def strips(tokenizer: Any, vocabulary: Vocabulary) -> bool:
    """Whether the tokenizer removes the space with which the first token of a text begins."""
    spaced = next((id for id, piece in enumerate(vocabulary.pieces) if len(piece) > 1 and piece[:1] == b" "), None)
    return spaced is not None and not decoded(tokenizer, [spaced]).startswith(" ")
