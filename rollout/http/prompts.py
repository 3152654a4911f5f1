"""Text and conversations to token ids: the jobs of the prompt processes, and what does them there.

    PromptPool --job--> prompt_process: Prompts.answer --> Ids, or Refused with the reason

A template is a program, and a tokenizer takes a second and 300 MB for a megabyte or two. Both run over what a request brings,
so both run in processes of their own, which can be ended (prompt_pool.py).
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

Messages = list[dict[str, Any]]


class Texts(msgspec.Struct, frozen=True, tag=True):
    """Encode texts, one by one; `special`: with the model's own tokens at their start, if it has any."""

    texts: list[str]
    special: bool


class Conversation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Encode what the chat template writes, or only what it writes behind a turn whose exact ids are known."""

    messages: Messages
    template: dict[str, Any]
    """what the template gets besides the messages"""
    generate: bool = True
    """with the beginning of the assistant's next message"""
    upto: int = 0
    """messages whose exact ids are known; 0 = none"""
    last: int | None = None
    """the last one of these ids"""


Job = Texts | Conversation


class Ids(msgspec.Struct, frozen=True, tag=True):
    """Token ids of each text, or of the conversation; `behind`: those behind the known ones alone."""

    ids: list[list[int]]
    behind: bool = False


class PromptRefused(msgspec.Struct, frozen=True, tag=True):
    """The job cannot be done; the reason is for whoever asked."""

    message: str


Answer = Ids | PromptRefused


class Refusal(ValueError):
    """A job is refused in words of our own."""


def reserved_names(tokenizer: Any) -> frozenset[str]:
    """Return what `chat_template_kwargs` may not hold: all that says which template is used, and how it is called."""
    from transformers.utils.chat_template_utils import render_jinja_template

    of_library = {
        *inspect.signature(tokenizer.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
    }
    return frozenset(of_library - {"documents", "kwargs"} | {"self", "messages", "conversation", "chat_template"})


def longest_token(tokenizer: Any) -> int:
    """Return the most characters that one token can stand for. A byte-level vocabulary writes a byte as one character, so this
    is no less than a text's."""
    return max(map(len, tokenizer.get_vocab()))


class Prompts:
    """Does the jobs, for a tokenizer of transformers.

    Args:
        most_chars: of what a template may write.
    """

    def __init__(self, tokenizer: Any, most_chars: int) -> None:
        self._tokenizer, self._most_chars = tokenizer, most_chars

    def answer(self, job: Job) -> Answer:
        """Do a job. What a template or a tokenizer raises is the answer."""
        try:
            if isinstance(job, Texts):
                return Ids([self._encode(text, job.special) for text in job.texts])
            behind = self._behind(job) if job.upto else None
            if behind is not None:
                return Ids([self._encode(behind, False)], behind=True)
            return Ids([self._encode(self._render(job.messages, job.template, job.generate), False)])
        except MemoryError:
            return PromptRefused("the prompt needs more memory than it may have")
        except Refusal as error:
            return PromptRefused(str(error))
        except Exception as error:  # templates are programs of their own and raise what they like
            by = "tokenizer refused the text" if isinstance(job, Texts) else "chat template refused the messages"
            return PromptRefused(f"the {by}: {str(error)[:1000] or type(error).__name__}")

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _render(self, messages: Messages, template: dict[str, Any], generate: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate, **template)
        if len(text) > self._most_chars:
            raise Refusal(f"the chat template writes {len(text)} characters: at most {self._most_chars} can fit the context")
        return text

    def _behind(self, job: Conversation) -> str | None:
        """Return what the template writes behind the ids that are known; None if it does not write a turn as a prefix of what
        comes after it."""
        whole = self._render(job.messages, job.template, True)
        turn = self._render(job.messages[: job.upto], job.template, False)
        end = self._tokenizer.eos_token or ""
        at = turn.rfind(end)
        if not end or at < 0 or not whole.startswith(turn) or turn[at + len(end) :].strip():
            return None
        ended = job.last is not None and job.last == self._tokenizer.eos_token_id
        return turn[at + len(end) if ended else at :] + whole[len(turn) :]
