"""Text and conversations to token ids: the jobs of prompt processes, and their execution.

    PromptPool --job--> prompt_process: Prompts.answer --> Ids, or PromptRefused with the reason

A chat template is a program, and a tokenizer takes a second and 300 MB for a megabyte or two. Their input comes from requests,
so both run in separate processes, which can be killed (prompt_pool.py).
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

Messages = list[dict[str, Any]]


class Texts(msgspec.Struct, frozen=True, tag=True):
    """Encode texts one by one. special: with the special tokens that the model puts at the start."""

    texts: list[str]
    special: bool


class Conversation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Encode the chat template's text, or only the text after a turn whose exact ids are known."""

    messages: Messages
    template: dict[str, Any]
    """arguments of the template besides the messages"""
    generate: bool = True
    """including the beginning of the assistant's next message"""
    known: int = 0
    """number of messages whose exact ids are known"""
    last: int | None = None
    """the last one of these ids"""


Job = Texts | Conversation


class Ids(msgspec.Struct, frozen=True, tag=True):
    """Token ids of each text, or of the conversation. rest: only those after the known ones."""

    ids: list[list[int]]
    rest: bool = False


class PromptRefused(msgspec.Struct, frozen=True, tag=True):
    """The job is invalid. message: the reason, for the client."""

    message: str


Answer = Ids | PromptRefused


class Refusal(ValueError):
    """A job is invalid; the message is for the client."""


def reserved_names(tokenizer: Any) -> frozenset[str]:
    """Return the names refused in `chat_template_kwargs`: those that select the template or control its call."""
    from transformers.utils.chat_template_utils import render_jinja_template

    of_library = {
        *inspect.signature(tokenizer.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
    }
    return frozenset(of_library - {"documents", "kwargs"} | {"self", "messages", "conversation", "chat_template"})


def longest_token(tokenizer: Any) -> int:
    """Return the maximum number of characters of one token. A byte-level vocabulary has one character per byte, so this is an
    upper bound."""
    return max(map(len, tokenizer.get_vocab()))


class Prompts:
    """Executes jobs.

    Args:
        tokenizer: a transformers tokenizer.
        max_chars: of the text that a template may write.
    """

    def __init__(self, tokenizer: Any, max_chars: int) -> None:
        self._tokenizer, self._max_chars = tokenizer, max_chars

    def answer(self, job: Job) -> Answer:
        """Execute a job. An exception of the template or the tokenizer becomes the answer."""
        try:
            if isinstance(job, Texts):
                return Ids([self._encode(text, job.special) for text in job.texts])
            rest = self._rest(job) if job.known else None
            if rest is not None:
                return Ids([self._encode(rest, False)], rest=True)
            return Ids([self._encode(self._render(job.messages, job.template, job.generate), False)])
        except MemoryError:
            return PromptRefused("the prompt needs more memory than it may have")
        except Refusal as error:
            return PromptRefused(str(error))
        except Exception as error:  # a template may raise anything
            by = "tokenizer refused the text" if isinstance(job, Texts) else "chat template refused the messages"
            return PromptRefused(f"the {by}: {str(error)[:1000] or type(error).__name__}")

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _render(self, messages: Messages, template: dict[str, Any], generate: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate, **template)
        if len(text) > self._max_chars:
            raise Refusal(f"the chat template writes {len(text)} characters: at most {self._max_chars} can fit the context")
        return text

    def _rest(self, job: Conversation) -> str | None:
        """Return the template's text after the known ids; None if the template does not render a turn as a prefix of the next
        one."""
        whole = self._render(job.messages, job.template, True)
        turn = self._render(job.messages[: job.known], job.template, False)
        end = self._tokenizer.eos_token or ""
        at = turn.rfind(end)
        if not end or at < 0 or not whole.startswith(turn) or turn[at + len(end) :].strip():
            return None
        ended = job.last is not None and job.last == self._tokenizer.eos_token_id
        return turn[at + len(end) if ended else at :] + whole[len(turn) :]
