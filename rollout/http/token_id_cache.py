"""Exact ids of earlier turns, so that a conversation is never tokenised again.

    turn k:      prompt ids + completion ids            kept under (session, conversation up to the assistant's message)
    turn k + 1:  kept ids + encode(what the template writes behind that message)

Text to ids is no inverse of ids to text: a conversation that is encoded anew has other ids here and there, and a trainer would
learn from tokens that were never drawn. What the template writes behind a turn begins after the turn's last special token, so
encoding it alone gives the ids that it has in the whole.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np

from rollout.http.prompts import Messages

MAX_KEPT_TOKENS = 16 << 20
"""token ids of all conversations together, 4 bytes each; the least recently used go first"""


class TokenIdCache:
    """Keeps the ids of conversations, by session and content. For one event loop."""

    def __init__(self, most_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._most = most_tokens
        self._kept: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._tokens = 0

    def keep(self, session: str, messages: Messages, template: dict[str, Any], ids: np.ndarray) -> None:
        """Keep the ids of a conversation whose last message is the assistant's."""
        key = key_of(session, messages, template)
        self._drop(key)
        self._kept[key] = ids
        self._tokens += len(ids)
        while self._tokens > self._most:
            self._drop(next(iter(self._kept)))

    def find(self, session: str, messages: Messages, template: dict[str, Any]) -> np.ndarray | None:
        """Return the ids kept of a conversation."""
        key = key_of(session, messages, template)
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def _drop(self, key: bytes) -> None:
        ids = self._kept.pop(key, None)
        self._tokens -= 0 if ids is None else len(ids)


def key_of(session: str, messages: Messages, template: dict[str, Any]) -> bytes:
    """Take a digest of a conversation, as far as it decides what the template writes."""
    content = session, [plain(message) for message in messages], template
    return hashlib.blake2b(msgspec.json.encode(content, order="deterministic"), digest_size=16).digest()


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what clients add on its way back: nulls, empty lists, ids of calls, exact ids."""
    added = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "refusal", "annotations", "audio", "id")
    kept = {name: value for name, value in message.items() if name not in added and value not in (None, [], "")}
    if "tool_calls" in kept:
        kept["tool_calls"] = [call.get("function") if isinstance(call, dict) else call for call in kept["tool_calls"]]
    return kept


def last_turn(messages: Messages) -> int:
    """Return how many messages there are up to the assistant's last one, 0 if it has none."""
    return next((i + 1 for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") == "assistant"), 0)


def told_ids(message: dict[str, Any]) -> np.ndarray | None:
    """Return the exact ids that a message brings along (NeMo-Gym), None if it does not."""
    prompt, drawn = message.get("prompt_token_ids"), message.get("generation_token_ids")
    if not (isinstance(prompt, list) and isinstance(drawn, list)):
        return None
    ids = [*prompt, *drawn]
    fits = all(type(id) is int and 0 <= id < 2**31 for id in ids)
    return np.array(ids, np.int32) if fits else None
