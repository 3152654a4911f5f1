"""Text and conversations to token ids, and samples to text, with the tokenizer of the service's model.

    prompt ──→ TextCodec.ids ──→ [prompt_tokens] token ids ──→ submission.py
    sample ──→ TextCodec.decode ──→ text

A prompt of token ids needs no tokenizer, and none is loaded for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from rollout.client.parts import token_text
from rollout.client.submission import TokenIds
from rollout.engine.values import Sample
from rollout.transport.errors import InvalidRequest, NoTokenizer

if TYPE_CHECKING:
    from rollout.client.token_text import TokenText

Messages = Sequence[Mapping[str, Any]]
"""a conversation as chat templates take it: [{"role": "user", "content": "…"}, …]"""
Prompt = TokenIds | str | Messages
"""token ids, a text that is tokenized as it stands, or messages for the model's chat template"""
REPLY = "rolloutREPLYrollout"
"""stands for a sample's text where the template is rendered to find what it writes after one"""


class TextCodec:
    """Encodes prompts and decodes samples. Thread-safe. Loads the tokenizer when it is first needed.

    Args:
        tokenizer: a transformers tokenizer, or where to load one from: a folder, a hub id or smollm2. None = from `model`.
        model: returns the name of the service's model."""

    def __init__(self, tokenizer: Any, model: Callable[[], str]) -> None:
        self._given, self._model = tokenizer, model
        self._loaded: Any = None
        self._texts: TokenText | None = None
        self._lock = threading.RLock()
        """held while the tokenizer is loaded and while it encodes: one at a time may"""

    @property
    def tokenizer(self) -> Any:
        """Return the transformers tokenizer. Raises NoTokenizer."""
        with self._lock:
            if self._loaded is None:
                given = self._model() if self._given is None else self._given
                self._loaded = load(str(given)) if isinstance(given, str | Path) else given
            return self._loaded

    def ids(self, prompt: Prompt, **template: Any) -> TokenIds:
        """Return the token ids of a prompt; token ids stay as they are.

        A text is encoded with the special tokens that the model puts at the start, messages as the chat template writes them,
        up to the beginning of the assistant's next message. template: arguments of the chat template, e.g. tools=[…].

        Raises InvalidRequest, NoTokenizer."""
        if isinstance(prompt, Mapping):
            raise InvalidRequest(f"prompt={dict(prompt)!r:.80}: one message; give a list of messages: [{{'role': …}}]")
        if is_messages(prompt):
            return self._encoded(self._rendered(prompt, **template), special=False)
        if template:
            raise InvalidRequest(
                f"{next(iter(template))}=…: leave it out, or give the prompt as a list of messages for the chat template"
            )
        return self._encoded(prompt, special=True) if isinstance(prompt, str) else cast(TokenIds, prompt)

    def all_ids(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenIds]:
        """Return the token ids of several prompts, or of one text or conversation. Raises InvalidRequest, NoTokenizer."""
        one = isinstance(prompts, str) or is_messages(prompts)
        return [self.ids(prompt) for prompt in cast(Sequence[Prompt], [prompts] if one else prompts)]

    async def all_ids_async(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenIds]:
        """Return the token ids of several prompts as `all_ids` does. A thread encodes texts, so that the event loop runs on."""
        return await asyncio.to_thread(self.all_ids, prompts) if has_text(prompts) else self.all_ids(prompts)

    def completion_ids(self, completions: Iterable[TokenIds | str]) -> list[TokenIds]:
        """Return the token ids of texts that follow a prompt. Raises InvalidRequest, NoTokenizer."""
        if isinstance(completions, str):
            raise InvalidRequest(f"completions={completions!r:.60}: give a list for each prompt, [[…], …]")
        return [self._encoded(each, special=False) if isinstance(each, str) else each for each in completions]

    def next_ids(self, sample: Sample, append: Prompt) -> TokenIds:
        """Return the token ids that follow a sample: a text as it stands, or what the chat template writes for messages after
        the assistant's. Raises InvalidRequest, NoTokenizer."""
        if isinstance(append, str):
            return self._encoded(append, special=False)
        if not is_messages(append):
            return cast(TokenIds, append)
        # the template need not know the sample's text, which may not encode to the sample's tokens
        start = [{"role": "user", "content": "?"}, {"role": "assistant", "content": REPLY}]
        _, found, rest = self._rendered([*start, *append]).partition(REPLY)
        if not found:
            raise InvalidRequest("the chat template does not write an assistant's content as it is: give append as token ids")
        if isinstance(sample, Sample) and sample.finish_reason == "stop" and sample.stopped_by is None:
            rest = rest.removeprefix(self.tokenizer.decode(sample.token_ids[-1:].tolist()))  # it ended the message already
        return self._encoded(rest, special=False)

    def decode(self, sample: Sample, *, skip_special: bool = True, keep_stop: bool = False) -> str:
        """Return the text of a sample (`TokenText.sample_text`). Raises InvalidRequest for what is no sample, NoTokenizer."""
        if not isinstance(sample, Sample):
            raise InvalidRequest(
                f"a {type(sample).__name__} is not a Sample: decode token ids with client.tokenizer.decode(ids)"
            )
        with self._lock:
            if self._texts is None:
                self._texts = token_text(self.tokenizer)
        return self._texts.sample_text(sample, skip_special=skip_special, keep_stop=keep_stop)

    def _encoded(self, text: str, special: bool) -> list[int]:
        with self._lock:
            ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
            return ids

    def _rendered(self, messages: Messages, **template: Any) -> str:
        tokenizer, arguments = self.tokenizer, {"add_generation_prompt": True, **template, "tokenize": False}
        try:
            text: str = tokenizer.apply_chat_template(list(messages), **arguments)
        except Exception as error:  # a template may raise anything
            raise InvalidRequest(f"the chat template refused the messages: {error}") from error
        return text


def is_messages(prompt: Any) -> TypeGuard[Messages]:
    """Return whether a prompt is a conversation."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def has_text(prompts: Any) -> bool:
    """Return whether a prompt, or one of several, must be tokenized."""
    several = [] if isinstance(prompts, str) else prompts
    return any(isinstance(each, str) or is_messages(each) for each in (prompts, *several))


def load(name: str) -> Any:
    """Load the tokenizer of a model: a folder, a hub id or smollm2. Raises NoTokenizer with the fix."""
    try:
        import transformers  # noqa: F401

        from rollout import models
    except ImportError as error:
        raise NoTokenizer(f"{error.name} is not installed: pip install 'rl-rollout[text]', or give token ids") from error
    try:
        return models.tokenizer_of(name)
    except (models.ModelNotFound, ImportError) as error:
        raise NoTokenizer(
            f"no tokenizer for the model {name!r} on this host: {error}; give RolloutClient(tokenizer=…) its folder or hub id, "
            "or give token ids"
        ) from error
