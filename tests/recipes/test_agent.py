"""recipes/agent.py: the calculator, and conversations whose turns prefill what is new."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout import AsyncRolloutClient
from rollout.models import load_tokenizer
from rollout.recipes.agent import Agents, Conversation, Options, Tool, answer_of, calculate, calculator, ends

OPTIONS = Options(turns=4, max_tokens=40, temperature=1.0, seed=11)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 + 30", "42"),
        ("-3 * (4 - 6)", "6"),
        ("7 / 2", "3.5000"),
        ("6 / 3", "2"),
        ("1 / 0", "an error"),
        ("2 ** 9", "an error"),
        ("9" * 200, str(int("9" * 200))),
        ("9" * 201, "an error"),
        ("1e999", "an error"),
        ("__import__('os').getcwd()", "an error"),
        ("True + 1", "an error"),
        ("(" * 150, "an error"),
        ("", "an error"),
    ],
)
def test_the_calculator_computes_sums_and_nothing_else(text: str, value: str) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(("said", "answer"), [(" <<1 + 1>>", " = 2."), ("<<2>> and so", None), ("#### 4", None), ("", None)])
def test_it_answers_a_call_at_the_end(said: str, answer: str | None) -> None:
    assert asyncio.run(calculator(said)) == answer


def test_the_answer_stands_behind_the_mark() -> None:
    assert answer_of(Conversation([1], said=" 37. #### 37\n")) == "37"
    assert answer_of(Conversation([1], said="37")) == ""


def conversations(seed: int) -> list[Conversation]:
    rng = np.random.default_rng(seed)
    return [Conversation([int(token) for token in rng.integers(3, 250, 70)]) for _ in range(3)]


def says(answer: str | None) -> Tool:
    """A tool that says the same every time."""

    async def tool(said: str) -> str | None:
        return answer

    return tool


async def prefilled(address: str, tokenizer: Any, options: Options, seed: int) -> tuple[Agents, list[Conversation], int, int]:
    """Run three conversations with a tool that always answers. Returns them, and the tokens prefilled and kept for them."""
    async with AsyncRolloutClient(address) as client:
        before = await client.status()
        agents = Agents(client, tokenizer, says(" = 42."), options)
        some = conversations(seed)
        assert await asyncio.gather(*map(agents.converse, some)) == some
        after = await client.status()
        assert after["kv"]["kept_children"] == 0, "the last turn is not kept"
    return agents, some, *(after[name] - before[name] for name in ("prefill_tokens", "kept_tokens"))


def test_a_turn_prefills_what_the_tool_said(tiny_service: str, tiny_model: Path) -> None:
    """And the last token of the turn before. The control keeps nothing: a partial block of each turn is prefilled again."""
    tokenizer = load_tokenizer(tiny_model)
    answer = len(tokenizer.encode(" = 42.", add_special_tokens=False))
    agents, some, computed, kept = asyncio.run(prefilled(tiny_service, tokenizer, OPTIONS, seed=1))
    assert all(each.turns == 4 for each in some)
    assert computed == 3 * 70 + 3 * 3 * (answer + 1) and kept == agents.asked - computed
    for each in some:
        assert len(each.written) == len(each.tokens) and not any(each.written[:70])
        assert each.written.count(False) == 70 + 3 * answer
    nothing_kept = dataclasses.replace(OPTIONS, kv_ttl_s=0.0)
    _, _, again, kept = asyncio.run(prefilled(tiny_service, tokenizer, nothing_kept, seed=2))
    assert again > computed and kept == 0


def test_nobody_asked_is_the_end(tiny_service: str, tiny_model: Path) -> None:
    async def main() -> Conversation:
        async with AsyncRolloutClient(tiny_service) as client:
            return await Agents(client, load_tokenizer(tiny_model), says(None), OPTIONS).converse(Conversation([5, 6, 7]))

    only = asyncio.run(main())
    assert only.turns == 1 and only.written[:3] == [False] * 3 and all(only.written[3:])


def test_a_turn_ends_where_a_call_or_the_line_does(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    assert [tokenizer.decode([number]) for number in ends(tokenizer)] == ["\n"], "no token of it closes a call"
