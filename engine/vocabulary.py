"""The bytes of each token: what text is made of, also where a token ends inside a character.

`tokenizer.json` of a tokenizer of transformers defines how tokens become text. Two kinds are supported, nearly all that exist:
byte-level BPE (each letter of a piece represents a byte; Radford et al., GPT-2, 2019) and sentencepiece (▁ is a space and
<0x0A> a byte). Imports no torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np


class NoVocabulary(ValueError):
    """The bytes of a model's tokens cannot be determined; the message has the reason and the fix."""


class Vocabulary:
    """The bytes of each token id; empty for an id without a token."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def __getitem__(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    @property
    def digest(self) -> str:
        """Return the first 20 bytes, in hex, of the SHA-256 of the bytes of each token."""
        lengths = np.fromiter(map(len, self.pieces), "<u4", len(self.pieces))
        return hashlib.sha256(lengths.tobytes() + b"".join(self.pieces)).digest()[:20].hex()

    def text(self, tokens: Iterable[int]) -> bytes:
        """Join the bytes of tokens, special ones included."""
        return b"".join([self[token] for token in tokens])

    @classmethod
    def load(cls, folder: str | Path) -> Vocabulary:
        """Read the vocabulary from the tokenizer in a model's folder. Raises NoVocabulary."""
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
        """Make the vocabulary from the contents of a tokenizer.json. Raises NoVocabulary if the tokenizer is not supported."""
        parts = [*_parts(tokenizer.get("decoder")), *_parts(tokenizer.get("pre_tokenizer"))]
        kinds = {part["type"] for part in parts}
        spaces = any(part["type"] == "Replace" and part.get("pattern") == {"String": "▁"} for part in parts)
        if "ByteLevel" in kinds:
            to_bytes = _of_byte_level
        elif spaces or kinds & {"Metaspace", "ByteFallback"}:
            to_bytes = _of_sentencepiece
        else:
            raise NoVocabulary(f"a tokenizer of {sorted(kinds)}: stop strings need a byte-level or sentencepiece tokenizer")
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):
            vocabulary = {piece: at for at, (piece, _) in enumerate(vocabulary)}
        ids = {at: to_bytes(piece) for piece, at in vocabulary.items()}
        ids |= {added["id"]: added["content"].encode() for added in tokenizer.get("added_tokens") or ()}
        return cls([ids.get(at, b"") for at in range(max(ids, default=-1) + 1)])


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a step of a tokenizer and, recursively, the steps that it consists of."""
    if part is not None:
        yield part
        for inner in [*part.get("decoders", ()), *part.get("pretokenizers", ())]:
            yield from _parts(inner)


def _letters() -> dict[str, int]:
    """Map each letter of a byte-level piece to its byte: a printable byte is its own letter, the others have letters from
    U+0100 on."""
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
