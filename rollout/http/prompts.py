"""Text and conversations to token ids: the jobs of prompt processes, and their execution.

    PromptPool --job--> prompt_process: Prompts.answer --> Ids, or PromptRefused with the reason

A chat template is a program, and a tokenizer takes a second and 300 MB for a megabyte or two. Their input comes from requests,
so both run in separate processes, which can be killed (prompt_pool.py).
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from rollout.client.token_text import special_tokens

Messages = list[dict[str, Any]]
MARK = "rolloutMARKrollout"
"""put after a message's text where the template is rendered to find what it writes there"""


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
    """the last one of these ids, which may have ended the turn"""


Job = Texts | Conversation


class Ids(msgspec.Struct, frozen=True, tag=True):
    """Token ids of each text, or of the conversation.

    rest: only those after the known ones.
    tools_unseen: the template writes the same text without the tools."""

    ids: list[list[int]]
    rest: bool = False
    tools_unseen: bool = False


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
        self._special = special_tokens(tokenizer)

    def answer(self, job: Job) -> Answer:
        """Execute a job. An exception of the template or the tokenizer becomes the answer."""
        try:
            if isinstance(job, Texts):
                return Ids([self._encode(text, job.special) for text in job.texts])
            return self._conversation(job)
        except MemoryError:
            return PromptRefused("the prompt needs more memory than it may have")
        except Refusal as error:
            return PromptRefused(str(error))
        except Exception as error:  # a template may raise anything
            by = "tokenizer refused the text" if isinstance(job, Texts) else "chat template refused the messages"
            return PromptRefused(f"the {by}: {str(error)[:1000] or type(error).__name__}")

    def _conversation(self, job: Conversation) -> Ids:
        whole = self._render(job.messages, job.template, job.generate)
        others = {name: value for name, value in job.template.items() if name != "tools"}
        unseen = bool(job.template.get("tools")) and self._render(job.messages, others, job.generate) == whole
        rest = self._rest(job, whole) if job.known else None
        ids = self._encode(whole, False) if rest is None else rest
        return Ids([ids], rest=rest is not None, tools_unseen=unseen)

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _render(self, messages: Messages, template: dict[str, Any], generate: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate, **template)
        if len(text) > self._max_chars:
            raise Refusal(f"the chat template writes {len(text)} characters: at most {self._max_chars} can fit the context")
        return text

    def _rest(self, job: Conversation, whole: str) -> list[int] | None:
        """Return the ids after the known ones; None if the template does not render a turn as a prefix of the next one."""
        messages, said = job.messages[: job.known], job.messages[job.known - 1]
        turn = self._render(messages, job.template, False)
        if not whole.startswith(turn):
            return None
        # what the template writes behind the message's text is found behind a mark, which it can neither trim nor know
        marked = {**said, "content": f"{said.get('content') or ''}{MARK}"}
        _, found, behind = self._render([*messages[:-1], marked], job.template, False).rpartition(MARK)
        if not found or not turn.endswith(behind):
            return None
        if said.get("tool_calls"):  # written behind the text; the known ids have them
            behind = self._ending(behind)
        rest = behind + whole[len(turn) :]
        last = None if job.last is None else self._special.get(job.last)
        if last is None or not rest.startswith(last):
            return self._encode(rest, False)
        # with the token before it: some tokenizers begin a text with a space
        ids = self._encode(rest, False)
        return ids[1:] if ids[:1] == [job.last] else self._encode(rest.removeprefix(last), False)

    def _ending(self, text: str) -> str:
        """Return the special token that ends a text, and the blanks after it; "" if none does."""
        places = (text.rfind(special) for special in self._special.values())
        at = max(places, default=-1)
        ends = at >= 0 and any(not text[at:].removeprefix(special).strip() for special in self._special.values() if special)
        return text[at:] if ends else ""
