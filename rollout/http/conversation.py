"""Messages of a conversation: as chat templates expect them, and the exact token ids of earlier turns.

    turn k:      prompt ids + completion ids            stored under (session, conversation up to the assistant's message)
    turn k + 1:  stored ids + encode(text that the template writes after that message)

Encoding is not the inverse of decoding: a conversation that is encoded again has other ids here and there, and a trainer would
learn from tokens that were never sampled. With most templates the text after a turn begins at or after a special token, so
encoding it alone gives the ids that it has in the whole.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, Literal

import msgspec
import numpy as np

from rollout.http.errors import NO_JSON, bad, not_served
from rollout.http.json_cost import check_cost
from rollout.http.prompts import Messages
from rollout.http.settings import RequestLimits

MAX_CACHED_TOKENS = 16 << 20
"""token ids of all conversations, 4 bytes each; the least recently used are evicted first"""
EXACT_IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""fields of a message with its exact ids (NeMo-Gym)"""


class Function(msgspec.Struct):
    """Name and arguments of a tool. Other fields are for the template."""

    name: str
    arguments: Any = None


class Tool(msgspec.Struct):
    """A tool, or a call of one."""

    function: Function


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message's content. A field beside the text would not reach the template."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str


class Message(msgspec.Struct):
    """Fields that every message must have; the template may read others."""

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Tool] | None = None


def check_shape(given: list[dict[str, Any]], kind: type[Any], param: str) -> None:
    """Raise HttpError for a list whose entries do not have the fields of `kind`."""
    try:
        msgspec.convert(given, list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise bad(f"{param}: {error}", param) from None


def check_messages(messages: Messages, limits: RequestLimits) -> None:
    """Raise HttpError for messages without the fields of every message, and for arguments that cost too much to decode."""
    if not messages:
        raise bad("messages is empty", "messages")
    check_shape(messages, Message, "messages")
    arguments = [call["function"].get("arguments") for message in messages for call in message.get("tool_calls") or ()]
    written = ",".join(each for each in arguments if isinstance(each, str))
    check_cost(written.encode(errors="replace"), limits, "the arguments of all tool_calls", "messages")


def template_messages(messages: Messages) -> Messages:
    """Return messages as templates expect them: contents as text, arguments of calls as objects. Raises HttpError."""
    return [_template_message(message) for message in messages]


def _template_message(message: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if name not in EXACT_IDS}
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(part.text for part in _text_parts(content))
    elif content is None:  # a template would write it as None
        message["content"] = ""
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return message


def _text_parts(content: list[Any]) -> list[TextPart]:
    """Return the parts of a content. Raises HttpError for anything but text."""
    try:
        return msgspec.convert(content, list[TextPart])
    except msgspec.ValidationError as error:
        raise not_served(f"content other than text ({error})", "the service samples text only", "messages") from None


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates expect it. Raises HttpError."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except NO_JSON:
            raise bad(f"tool_calls: the arguments of {function['name'][:100]!r} are not JSON", "messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


class TokenIdCache:
    """Token ids of conversations, by session and content. For one event loop."""

    def __init__(self, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._ids: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._tokens = 0

    def add(self, session: str, messages: Messages, template: dict[str, Any], ids: np.ndarray) -> None:
        """Store the ids of a conversation whose last message is the assistant's."""
        key = _digest(session, messages, template)
        self._evict(key)
        self._ids[key] = ids
        self._tokens += len(ids)
        while self._tokens > self._max_tokens:
            self._evict(next(iter(self._ids)))

    def find(self, session: str, messages: Messages, template: dict[str, Any]) -> np.ndarray | None:
        """Return the ids of a conversation; None if they are not stored."""
        key = _digest(session, messages, template)
        if key in self._ids:
            self._ids.move_to_end(key)
        return self._ids.get(key)

    def _evict(self, key: bytes) -> None:
        ids = self._ids.pop(key, None)
        self._tokens -= 0 if ids is None else len(ids)


def _digest(session: str, messages: Messages, template: dict[str, Any]) -> bytes:
    """Hash the parts of a conversation that determine the template's text."""
    content = session, [_plain(message) for message in messages], template
    return hashlib.blake2b(msgspec.json.encode(content, order="deterministic"), digest_size=16).digest()


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without the fields that clients add when they send it back: nulls, empty lists, ids of calls, exact
    ids."""
    added = (*EXACT_IDS, "refusal", "annotations", "audio", "id")
    plain = {name: value for name, value in message.items() if name not in added and value not in (None, [], "")}
    if "tool_calls" in plain:
        plain["tool_calls"] = [call.get("function") if isinstance(call, dict) else call for call in plain["tool_calls"]]
    return plain


def last_turn(messages: Messages) -> int:
    """Return the number of messages up to the last one of the assistant; 0 if it has none."""
    return next((i + 1 for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") == "assistant"), 0)


def exact_ids(message: dict[str, Any]) -> np.ndarray | None:
    """Return the exact ids in a message's own fields (NeMo-Gym); None if it has none."""
    prompt, sampled = message.get("prompt_token_ids"), message.get("generation_token_ids")
    if not (isinstance(prompt, list) and isinstance(sampled, list)):
        return None
    ids = [*prompt, *sampled]
    return np.array(ids, np.int32) if all(type(id) is int and 0 <= id < 2**31 for id in ids) else None
