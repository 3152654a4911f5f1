"""State of each child for stop strings and logit adjustments, in groups that use them.

Stop strings are found in the bytes of tokens, across the borders of tokens and of characters. A tokenizer of transformers says
in `tokenizer.json` how tokens become text. Two kinds are read, which are nearly all: byte-level BPE (each letter of a piece
stands for a byte; Radford et al., GPT-2, 2019) and sentencepiece (▁ is a space and <0x0A> a byte). Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.engine.scheduling.plan import LogitAdjustment, Penalties, TopLogprobs
from rollout.engine.types import FinishReason, Group, PartialSample, Sampling


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


class LogitRules(NamedTuple):
    """How the logits of a group's draws are changed, as far as that is the same for all of them."""

    bias_ids: np.ndarray
    """[B] int32"""
    bias: np.ndarray
    """[B] float32"""
    allowed: np.ndarray
    """[A] int32; none: all tokens are"""
    penalties: Penalties | None
    prompt_ids: np.ndarray
    """[P] int32, each once: tokens of the prompt, where repetition is penalised"""
    prompt: frozenset[int]
    """the same"""

    @classmethod
    def of(cls, group: Group) -> LogitRules | None:
        """None: the logits stay as they are."""
        sampling, penalties = group.sampling, penalties_of(group.sampling)
        if not (sampling.logit_bias or sampling.allowed_token_ids is not None or penalties):
            return None
        repeats = penalties is not None and penalties.repetition != 1
        prompt_ids = np.unique(group.prompt) if repeats else np.zeros(0, np.int32)
        return cls(
            bias_ids=np.array(list(sampling.logit_bias or ()), np.int32),
            bias=np.array(list((sampling.logit_bias or {}).values()), np.float32),
            allowed=np.array(sorted(set(sampling.allowed_token_ids or ())), np.int32),
            penalties=penalties,
            prompt_ids=prompt_ids,
            prompt=frozenset(prompt_ids.tolist()),
        )


def penalties_of(sampling: Sampling) -> Penalties | None:
    """None: nothing is penalised."""
    penalties = Penalties(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return None if penalties == Penalties(1.0, 0.0, 0.0) else penalties


class TokenCounts:
    """Of one sequence. A function of its own tokens and draws, so it outlives preemption and goes on from `PartialSample`."""

    __slots__ = ("k", "top_ids", "top_logprobs", "rules", "counts", "new", "stops", "tail", "found")

    def __init__(
        self, sampling: Sampling, rules: LogitRules | None, stops: Stops | None, partial: PartialSample | None
    ) -> None:
        self.k = sampling.top_logprobs
        self.top_ids, self.top_logprobs = bytearray(), bytearray()
        """[tokens, k] int32 and float32"""
        self.rules = rules
        self.counts: dict[int, int] | None = None if rules is None or rules.penalties is None else {}
        """how often each token is in the output; None: nothing is penalised"""
        self.new: list[int] = []
        """tokens of the output that are not in the prompt, each once"""
        self.stops, self.tail = stops, b""
        """tail: the last bytes of the text, in which a stop string may have begun"""
        self.found: tuple[int, int] | None = None
        """of the stop string that the newest token completes: which, and bytes from its first to the last of the text"""
        if partial is None:
            return
        if partial.top_ids is not None and partial.top_logprobs is not None:
            self.top_ids += partial.top_ids.tobytes()
            self.top_logprobs += partial.top_logprobs.tobytes()
        for token in partial.token_ids.tolist():
            self.append(token)

    @classmethod
    def of(
        cls, sampling: Sampling, rules: LogitRules | None, stops: Stops | None, partial: PartialSample | None
    ) -> TokenCounts | None:
        """None: the group asks for nothing that must be kept."""
        asks = sampling.top_logprobs or rules is not None or stops is not None
        return cls(sampling, rules, stops, partial) if asks else None

    def append(self, token: int) -> None:
        """Count a token of the output, and look for stop strings that it completes."""
        if self.stops is not None:
            self.tail, self.found = self.stops.find(self.tail, token)
        if self.counts is not None and self.rules is not None:
            before = self.counts.get(token, 0)
            self.counts[token] = before + 1
            if not before and token not in self.rules.prompt:
                self.new.append(token)

    def append_top(self, top: TopLogprobs, draw: int) -> None:
        """Keep the most probable tokens of the newest one's draw, as many as the group asks for."""
        self.top_ids += top.ids[draw, : self.k].tobytes()
        self.top_logprobs += top.logprobs[draw, : self.k].tobytes()

    def adjustment(self, first: int, draws: int, ahead: tuple[int, ...] = ()) -> LogitAdjustment:
        """Tell how the logits are changed that follow the newest token and those `ahead` of it, for the draws `first` to before
        `first + draws`."""
        assert self.rules is not None
        rules, counts, new = self.rules, self.counts or {}, self.new
        if ahead and self.counts is not None:
            counts = counts.copy()
            for token in ahead:
                counts[token] = counts.get(token, 0) + 1
            new = [token for token in counts if token not in rules.prompt]
        return LogitAdjustment(
            first=first,
            draws=draws,
            bias_ids=rules.bias_ids,
            bias=rules.bias,
            allowed=rules.allowed,
            penalties=rules.penalties,
            seen=np.concatenate([rules.prompt_ids, np.array(new, np.int32)]),
            counted=np.fromiter(counts.keys(), np.int32, len(counts)),
            counts=np.fromiter(counts.values(), np.int32, len(counts)),
        )

    def stopped(self, reason: FinishReason, output: list[int]) -> dict[str, Any]:
        """Make the fields of a `Sample` that tell of the stop string that ended it."""
        if self.stops is None or self.found is None or reason != "stop":
            return {}
        which, cut = self.found
        return {"stopped_by": self.stops.strings[which], "text_end": self.stops.text_end(output, cut)}

    def columns(self, first: int = 0, last: int | None = None) -> dict[str, Any]:
        """Make the fields of a `Sample` or a `Chunk`, of the tokens `first` to before `last`."""
        if not self.k:
            return {}
        mine = slice(4 * self.k * first, None if last is None else 4 * self.k * last)
        ids, logprobs = bytes(self.top_ids[mine]), bytes(self.top_logprobs[mine])
        return {
            "top_ids": np.frombuffer(ids, np.int32).reshape(-1, self.k),
            "top_logprobs": np.frombuffer(logprobs, np.float32).reshape(-1, self.k),
        }
