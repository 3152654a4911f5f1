"""Token ids to text, for the routes that give text. The other way is a process's work (prompts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.types import Sample
from rollout.client.text import text_of


class Text:
    """A tokenizer, and the text of single tokens once they were asked for.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._tokens: dict[int, str] = {}
        """at most one for each id of the vocabulary"""

    def special(self, text: str) -> int | None:
        """Return the id of the special token that is written so, None if there is none."""
        return self._special.get(text)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def of(self, sample: Sample, skip_special: bool | None = None, keep_stop: bool | None = None) -> str:
        """Return the text of a sample, cut at the stop string that ended it unless `keep_stop`. None is the dialects' default:
        no special tokens, no stop string."""
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
