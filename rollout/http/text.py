"""Token ids to text, whole and while a sample runs. prompts.py encodes text.

A stream sends text only once it is final: not half a character, and nothing that may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rollout.client.token_text import REPLACEMENT, TextPiece, TokenText, cut, visible
from rollout.engine.values import Sample, TokenChunk


class Text:
    """Decodes tokens, and stores the text of single ones.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.texts = TokenText(tokenizer)
        self._special = {text: id for id, text in self.texts.special.items()}
        self._tokens: dict[int, str] = {}
        """at most one entry per id of the vocabulary"""

    def special(self, text: str) -> int | None:
        """Return the id of the special token with this text, None if there is none."""
        return self._special.get(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self.texts.text(ids)

    def parts(self, sample: Sample, keep_stop: bool | None = None) -> list[TextPiece]:
        """Return the text of a sample. Without `keep_stop` it ends before the stop string or the token that ended it, as in the
        APIs."""
        if not keep_stop and ended_by_token(sample):
            return self.texts.parts(sample.token_ids[:-1].tolist())
        return self.texts.sample_parts(sample, bool(keep_stop))

    def of(self, sample: Sample, skip_special: bool | None = None, keep_stop: bool | None = None) -> str:
        """Return the text of a sample. None = default of the APIs: neither special tokens nor what ended it."""
        return visible(self.parts(sample, keep_stop), skip_special is not False)

    def token(self, id: int) -> str:
        """Return the text of one token."""
        text = self._tokens.get(id)
        if text is None:
            text = self._tokens[id] = visible(self.texts.parts([id]), False)
        return text

    def token_bytes(self, id: int) -> bytes | None:
        """Return the bytes of one token; None if the tokenizer does not tell them."""
        return self.texts.token_bytes(id)

    def distinct_name(self, id: int) -> str:
        """Name a token whose text is the name of another one: by its bytes, as OpenAI does."""
        data = self.token_bytes(id)
        if not data or id in self.texts.special:
            return f"token_id:{id}"
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def ended_by_token(sample: Sample) -> bool:
    """Whether a sample ended with a stop token or the end of sequence, which is its last token."""
    return sample.finish_reason == "stop" and sample.stopped_by is None and len(sample.token_ids) > 0


def characters(parts: Sequence[TextPiece]) -> int:
    """Count the characters of parts, special tokens included."""
    return sum(len(part.text) for part in parts)


class Offsets:
    """Where tokens begin in the text that they make, one after the other."""

    def __init__(self, texts: TokenText) -> None:
        self._stream, self._special = texts.stream(), texts.special
        self._at, self._pending = 0, False

    def add(self, ids: Sequence[int], skip_special: bool) -> list[int]:
        """Return, for each of the next tokens, the characters before the one that its first byte is part of."""
        offsets = []
        for id in ids:
            text = visible(self._stream.add(id), skip_special)
            # the bytes before it were no character after all
            offsets.append(self._at + (self._pending and text.startswith(REPLACEMENT)))
            self._at += len(text)
            self._pending = not text and id not in self._special
        return offsets


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of decoding; None = default of the APIs."""

    skip_special: bool | None = None
    keep_stop: bool | None = None
    marker: str | None = None
    """text from here on is sent only at the end"""


class TextDecoder:
    """Decodes one child while it runs. What it returns is, in the end, the text of the sample.

    Args:
        stop: stop strings of its group.
    """

    def __init__(self, text: Text, options: TextOptions, stop: tuple[str, ...]) -> None:
        self._text, self._options = text, options
        self._stream = text.texts.stream()
        self._marks = (*stop, options.marker) if options.marker else stop
        self._held: list[TextPiece] = []
        self._sent = 0
        """characters"""
        self._marked = False
        """a mark was seen: the rest is sent at the end"""

    def add(self, ids: Sequence[int]) -> str:
        """Take new tokens. Returns new text that is final."""
        if self._marked:
            return ""
        for id in ids:
            self._held += self._stream.add(id)
        held = visible(self._held, False)
        length = final_length(held, self._marks)
        final, rest = cut(self._held, length), held[length:]
        self._marked = any(mark in rest for mark in self._marks)
        self._held = after(self._held, length)
        new = visible(final, self._options.skip_special is not False)
        self._sent += len(new)
        return new

    def end(self, sample: Sample) -> str:
        """Return the remaining text of a finished child."""
        return self._text.of(sample, self._options.skip_special, self._options.keep_stop)[self._sent :]


def between(parts: Sequence[TextPiece], start: int, end: int) -> list[TextPiece]:
    """Return the characters `start` to `end` of parts."""
    return cut(after(parts, start), end - start)


def after(parts: Sequence[TextPiece], length: int) -> list[TextPiece]:
    """Return parts without their first `length` characters."""
    left = []
    for part in parts:
        left += [part._replace(text=part.text[length:])] if length < len(part.text) else []
        length = max(0, length - len(part.text))
    return left


def final_length(text: str, marks: Sequence[str]) -> int:
    """Return the number of characters before the first mark, or before a possible beginning of one at the end."""
    most = len(text)
    for mark in marks:
        at = text.find(mark)
        if at < 0:
            beginnings = (i for i in range(max(0, len(text) - len(mark) + 1), len(text)) if mark.startswith(text[i:]))
            at = next(beginnings, len(text))
        most = min(most, at)
    return most


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one child, and new text."""

    group: int
    """its prompt in the request"""
    index: int
    first: int
    """number of earlier tokens"""
    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    text: str
    sample: Sample | None = None
    """set in the last chunk: the finished child"""

    @property
    def ids(self) -> list[int]:
        return list(self.token_ids.tolist())


class ChunkDecoder:
    """Decodes the children of one prompt while they run. A reader that is slow misses chunks; it gets these tokens with the
    sample.

    Args:
        group: number of the prompt in the request.
        options: None = without text.
    """

    def __init__(self, group: int, text: Text, options: TextOptions | None, stop: tuple[str, ...]) -> None:
        self._group, self._text, self._options, self._stop = group, text, options, stop
        self._lengths: dict[int, int] = {}
        """tokens that were sent, by child"""
        self._decoders: dict[int, TextDecoder] = {}

    def decode(self, part: TokenChunk | Sample) -> TextChunk | None:
        """Return what is new of a child; None if a chunk is not the continuation of the tokens that were sent."""
        index, sent = part.index, self._lengths.get(part.index, 0)
        sample = part if isinstance(part, Sample) else None
        skip = sent if isinstance(part, Sample) else sent - part.first
        if sample is None and not 0 <= skip < len(part.token_ids):
            return None
        ids = part.token_ids[skip:]
        self._lengths[index] = sent + len(ids)
        return TextChunk(
            group=self._group,
            index=index,
            first=sent,
            token_ids=ids,
            logprobs=part.logprobs[skip:],
            top_ids=None if part.top_ids is None else part.top_ids[skip:],
            top_logprobs=None if part.top_logprobs is None else part.top_logprobs[skip:],
            text=self._new_text(index, ids, sample),
            sample=sample,
        )

    def _new_text(self, index: int, ids: np.ndarray, sample: Sample | None) -> str:
        if self._options is None:
            return ""
        if index not in self._decoders:
            self._decoders[index] = TextDecoder(self._text, self._options, self._stop)
        decoder = self._decoders[index]
        return decoder.add(ids.tolist()) if sample is None else decoder.end(sample)
