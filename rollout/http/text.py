"""Token ids to text, whole and while a sample runs. prompts.py encodes text.

A stream sends text only once it is final: not half a character, and nothing that may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from tokenizers.decoders import DecodeStream

from rollout.client.text import text_of
from rollout.engine.types import Sample, TokenChunk


class Text:
    """Decodes tokens, and stores the text of single ones.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._tokens: dict[int, str] = {}
        """at most one entry per id of the vocabulary"""

    def special(self, text: str) -> int | None:
        """Return the id of the special token with this text, None if there is none."""
        return self._special.get(text)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def of(self, sample: Sample, skip_special: bool | None = None, keep_stop: bool | None = None) -> str:
        """Return the text of a sample without its stop string, unless `keep_stop`. None = default of the APIs: neither special
        tokens nor stop string."""
        return text_of(self.tokenizer, sample, skip_special=skip_special is not False, keep_stop=bool(keep_stop))

    def token(self, id: int) -> str:
        """Return the text of one token."""
        text = self._tokens.get(id)
        if text is None:
            text = self._tokens[id] = self.decode([id], skip_special=False)
        return text


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens, by their text."""
    added = {str(token): id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of decoding; None = default of the APIs."""

    skip_special: bool | None = None
    keep_stop: bool | None = None
    marker: str | None = None
    """text from here on is sent only at the end"""


class TextDecoder:
    """Decodes one child while it runs.

    Args:
        stop: stop strings of its group.
    """

    def __init__(self, text: Text, options: TextOptions, stop: tuple[str, ...]) -> None:
        self._text, self._options = text, options
        self._stream = DecodeStream(skip_special_tokens=options.skip_special is not False)
        self._marks = (*stop, options.marker) if options.marker else stop
        self._backend = getattr(text.tokenizer, "backend_tokenizer", None)
        """None: all text comes at the end"""
        self._sent: list[str] = []
        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """Take new tokens. Returns new text that is final."""
        try:
            for id in ids:
                self._held += (self._stream.step(self._backend, id) or "") if self._backend is not None else ""
        except Exception:  # raised by tokenizers for bytes that are not text
            self._backend = None
        length = final_length(self._held, self._marks)
        new, self._held = self._held[:length], self._held[length:]
        self._sent.append(new)
        return new

    def end(self, sample: Sample) -> str:
        """Return the remaining text of a finished child."""
        whole = self._text.of(sample, self._options.skip_special, self._options.keep_stop)
        sent = "".join(self._sent)
        # some tokenizers decode a whole text differently (blanks before a comma, say); then the streamed text is continued
        return whole[len(sent) :] if whole.startswith(sent) or self._backend is None else self._held


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
