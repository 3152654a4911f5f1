"""The bytes of tokens, and stop strings that are looked for in them, across the borders of tokens and of characters.

A tokenizer of transformers says in `tokenizer.json` how tokens become text. Two kinds are read, which are nearly all: those of
byte-level BPE (each letter of a piece stands for a byte; Radford et al., GPT-2, 2019), and those of sentencepiece (▁ is a space
and <0x0A> a byte). Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.types import Group, PartialSample


class NoVocabulary(ValueError):
    """The bytes of a model's tokens are not known; the message says why, and what would help."""


class Vocabulary:
    """The bytes of each token id; none where an id has no token."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def __getitem__(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    def text(self, tokens: Iterable[int]) -> bytes:
        """Join the bytes of tokens, special ones included."""
        return b"".join([self[token] for token in tokens])

    @classmethod
    def load(cls, folder: str | Path) -> Vocabulary:
        """Read it off the tokenizer of a model's folder. Raises NoVocabulary."""
        file = Path(folder) / "tokenizer.json"
        try:
            return cls.of(msgspec.json.decode(file.read_bytes()))
        except OSError:
            raise NoVocabulary(f"{file} cannot be read: stop strings need the model's tokenizer; copy it there") from None
        except (msgspec.MsgspecError, UnicodeError, KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, NoVocabulary):
                raise
            raise NoVocabulary(f"{file} is no tokenizer: {type(error).__name__}: {error}") from None

    @classmethod
    def of(cls, tokenizer: dict[str, Any]) -> Vocabulary:
        """Take it from the contents of a tokenizer.json. Raises NoVocabulary for a tokenizer of another kind."""
        parts = [*_parts(tokenizer.get("decoder")), *_parts(tokenizer.get("pre_tokenizer"))]
        kinds = {part["type"] for part in parts}
        spaces = any(part["type"] == "Replace" and part.get("pattern") == {"String": "▁"} for part in parts)
        if "ByteLevel" in kinds:
            to_bytes = _of_byte_level
        elif spaces or kinds & {"Metaspace", "ByteFallback"}:
            to_bytes = _of_sentencepiece
        else:
            raise NoVocabulary(f"a tokenizer of {sorted(kinds)}: stop strings need one that is byte-level or of sentencepiece")
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):
            vocabulary = {piece: at for at, (piece, _) in enumerate(vocabulary)}
        ids = {at: to_bytes(piece) for piece, at in vocabulary.items()}
        ids |= {added["id"]: added["content"].encode() for added in tokenizer.get("added_tokens") or ()}
        return cls([ids.get(at, b"") for at in range(max(ids, default=-1) + 1)])


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a step of a tokenizer, and those that it is made of."""
    if part is not None:
        yield part
        for inner in [*part.get("decoders", ()), *part.get("pretokenizers", ())]:
            yield from _parts(inner)


def _letters() -> dict[str, int]:
    """Which byte each letter of a byte-level piece stands for: itself where it can be printed, else one from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


LETTERS = _letters()
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _of_byte_level(piece: str) -> bytes:
    known = [LETTERS.get(letter) for letter in piece]
    return piece.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _of_sentencepiece(piece: str) -> bytes:
    byte = BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


class Stops:
    """The stop strings of a group. A child is looked at token by token, with as many bytes of its text as a stop string may
    have begun in.

    Example, of the stop string "\\n\\nQ":

        text      … e . \\n | \\n Q : | A       | border of tokens
        tail            ───   piece          looked at together: found, 3 + 1 bytes before the end of the token
    """

    def __init__(self, strings: tuple[str, ...], vocabulary: Vocabulary) -> None:
        self.strings = strings
        self.vocabulary = vocabulary
        self._bytes = [string.encode() for string in strings]
        self._keep = max(map(len, self._bytes)) - 1

    def find(self, tail: bytes, token: int) -> tuple[bytes, tuple[int, int] | None]:
        """Look at the next token behind `tail`. Returns the tail behind it, and of the stop string that begins first among
        those that it completes: (which, bytes from its first to the last of the token)."""
        piece = self.vocabulary[token]
        window, known, found = tail + piece, len(tail), None
        for which, string in enumerate(self._bytes):
            at = window.find(string, max(0, known - len(string) + 1))
            if at >= 0 and (found is None or len(window) - at > found[1]):
                found = which, len(window) - at
        return window[max(0, len(window) - self._keep) :], found

    def ending(self, tokens: Iterable[int], min_tokens: int) -> int | None:
        """Return the first token, behind `min_tokens` others, that completes a stop string; None: none does."""
        tail = b""
        for at, token in enumerate(tokens):
            tail, found = self.find(tail, token)
            if found is not None and at >= min_tokens:
                return at
        return None

    def completes(self, child: PartialSample, min_tokens: int) -> bool:
        """Tell whether the last token that a child has ends it. Raises ValueError if an earlier one does."""
        at = self.ending(child.token_ids.tolist(), min_tokens)
        if at is not None and at < len(child.token_ids) - 1:
            raise ValueError(f"partial sample {child.index} goes on behind its token {at}, which completes a stop string")
        return at is not None

    def text_end(self, tokens: Iterable[int], cut: int) -> int:
        """Count the characters of a text without its last `cut` bytes; what is no UTF-8 counts as it is replaced."""
        text = self.vocabulary.text(tokens)
        return len(text[: len(text) - cut].decode("utf-8", "replace"))


def stops_of(group: Group, load: Callable[[], Vocabulary]) -> Stops | None:
    """Return the stop strings of a group; None: it has none, or is scored. Raises what `load` raises."""
    return None if group.score or not group.sampling.stop else Stops(group.sampling.stop, load())
