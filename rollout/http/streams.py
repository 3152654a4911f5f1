"""What the streams of all dialects have in common.

OpenAI's and vLLM's events hold what is new; SGLang's hold all that there is, so its parts become rarer as a child grows.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from engine.types import Sample
from rollout.http.answers import usage
from rollout.http.upstream import Wanted

Contents = AsyncGenerator[dict[str, Any], None]


def wants_usage(options: dict[str, Any] | None) -> bool:
    return bool((options or {}).get("include_usage"))


def counted(groups: Sequence[Wanted], ended: list[Sample]) -> dict[str, Any]:
    """Make the content of the last event, which counts tokens."""
    return {"choices": [], "usage": usage([prompt for prompt, _ in groups], [ended])}


async def one_event(content: dict[str, Any]) -> Contents:
    """Yield an answer that is there."""
    yield content


async def whole_events(
    choices: list[dict[str, Any]], head: dict[str, Any], tokens: dict[str, int], options: dict[str, Any] | None
) -> Contents:
    """Yield choices that are there, each in an event."""
    for choice in choices:
        yield head | {"choices": [choice]}
    if wants_usage(options):
        yield head | {"choices": [], "usage": tokens}
