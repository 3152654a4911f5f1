"""Text to token ids and back, for the routes that take or give text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.types import Sample
from rollout.client.texts import text_of
from rollout.http.errors import bad


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

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text; `special`: with the model's own tokens at its start, if it has any."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

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

    def render(self, messages: list[dict[str, Any]], **template: Any) -> str:
        """Write a conversation as the chat template does. Raises HttpError with the template's own words."""
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **template)
            return text
        except Exception as error:  # templates are programs of their own and raise what they like
            raise bad(f"the chat template refused the messages: {error}", "messages") from None


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens, by their text."""
    added = {str(token): id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
