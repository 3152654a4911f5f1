"""An environment of verifiers: sums of two digits, and a harness that asks once.

It is imported by its name, as an installed environment is. verifiers' own `null` harness starts a program with uv for each
rollout, which brings packages from the network; this one asks in the same process, as its contract allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["Ask", "Sums"]

TASKS = 20


class SumData(vf.TaskData):
    """A sum."""

    answer: int


class Sum(vf.Task[SumData]):
    """Judged by the last number of the reply; a short one is worth a little, so that siblings differ."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        numbers = re.findall(r"-?\d+", trace.last_reply)
        return float(bool(numbers) and int(numbers[-1]) == self.data.answer)

    @vf.reward(weight=0.1)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / (1.0 + len(trace.last_reply))


class Sums(vf.Taskset[Sum]):
    """a + b for digits a and b."""

    def load(self) -> Iterator[Sum]:
        for i in range(TASKS):
            a, b = 1 + i % 9, 1 + (5 * i + 2) % 9
            yield Sum(SumData(prompt=f"What is {a} + {b}? Answer with the number only.", answer=a + b))


class Ask(vf.Harness[vf.HarnessConfig]):
    """Sends the prompt once."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: vf.TaskData
    ) -> vf.ProgramResult:
        _, prompt = self.resolve_text_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient(timeout=120) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"})
        answer.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
