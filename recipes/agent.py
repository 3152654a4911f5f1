"""An agent: a model that answers with a calculator, turn by turn. Copy it, then change `Calculator` and the questions.

    turn 1   12 + 30 - 5                                  ─ model ─→  <<12 + 30>>      asks the calculator
    turn 2   12 + 30 - 5 <<12 + 30>> = 42.                ─ model ─→  <<42 - 5>>
             └─── KV of turn 1 ────┘└new─┘
    turn 3   12 + 30 - 5 <<12 + 30>> = 42. <<42 - 5>> = 37.  ─ model ─→  #### 37
             └───────────── KV of turn 2 ───────────┘└new─┘

    python -m rollout.recipes.agent              # sums with SmolLM2-135M, a minute on 2 cores
    python -m rollout.recipes.agent --keep-s 0   # the control: KV between turns is a cache like any other

Each conversation is an asyncio task of its own (`rollout.AsyncRolloutClient`), so all run at once, and a tool may await. While
the calculator works, the service keeps the turn's KV for `kv_ttl_s` seconds, so the next turn prefills only the tool's answer.
The recipe prints how many tokens were prefilled. For training, `Conversation.written` tells the model's tokens from the tool's.

Tool calls inside the text: Schick et al., "Toolformer" (2023).
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import operator
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout import AsyncRolloutClient, Sample, Sampling, models
from rollout.config import Config
from rollout.engine.config import EngineConfig
from rollout.process import service_process
from rollout.recipes import program
from rollout.recipes.program import say

EXAMPLES = """\
Q: 12 + 30 - 5
A: <<12 + 30>> = 42. <<42 - 5>> = 37. #### 37

Q: 8 - 20 - 4 + 61
A: <<8 - 20>> = -12. <<-12 - 4>> = -16. <<-16 + 61>> = 45. #### 45

Q: 7 + 5
A: <<7 + 5>> = 12. #### 12

Q: {question}
A:"""
"""The prompt: how the calculator is asked, one step after the other."""


@dataclass(frozen=True)
class Options:
    """Whom to ask, and how often."""

    model: str = "smollm2"
    """smollm2, a folder, or a hub id"""
    questions: int = 16
    """sums and differences of 2 to 5 numbers with 1 to 3 digits"""
    turns: int = 8
    """most turns of a conversation"""
    max_tokens: int = 24
    """most tokens of a turn"""
    temperature: float = 0.0
    """0 = greedy"""
    kv_ttl_s: float = 60.0
    """seconds for which KV is kept between turns"""
    seed: int = 0
    """of questions and samples"""


@dataclass
class Conversation:
    """One question, and the conversation about it."""

    tokens: list[int]
    """all there is: the prompt of the next turn"""
    written: list[bool] = field(default_factory=list)
    """for each token whether the model wrote it: what a trainer's loss is over"""
    turns: int = 0
    said: str = ""
    """by the model, in its last turn"""

    def add(self, tokens: Sequence[int], written: bool) -> None:
        """Append tokens of the model or of a tool."""
        self.written += [False] * (len(self.tokens) - len(self.written)) + [written] * len(tokens)
        self.tokens += tokens


Tool = Callable[[str], Awaitable[str | None]]
"""takes the model's text, returns the text to append after it; None: no tool was called"""


CALL = re.compile(r"<<([^<>]*)>>\s*$")


async def calculator(said: str) -> str | None:
    """Answer a call <<12 + 30>> at the end of the text."""
    call = CALL.search(said)
    return None if call is None else f" = {calculate(call[1])}."


OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(text: str) -> str:
    """Return the value of numbers with + - * / and parentheses, of at most 200 characters; "an error" for anything else."""
    try:
        if len(text) > 200:
            raise ValueError("too long")
        value = value_of(ast.parse(text.strip(), mode="eval").body)
        return str(int(value)) if value == int(value) else f"{value:.4f}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "an error"


def value_of(node: ast.AST) -> float:
    """Compute an expression. Raises ValueError for what is not arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            result: float = OPERATORS[type(op)](value_of(left), value_of(right))
            return result
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            turned: float = OPERATORS[type(op)](value_of(operand))
            return turned
    raise ValueError(f"no arithmetic: {ast.dump(node)[:50]}")


class Agents:
    """Takes conversations through their turns."""

    def __init__(self, client: AsyncRolloutClient, tokenizer: Any, tool: Tool, options: Options) -> None:
        self.client, self.tokenizer, self.tool, self.options = client, tokenizer, tool, options
        self.stop_ids = ends(tokenizer)
        self.asked = 0
        """tokens of all prompts of all turns: what would be prefilled without KV of earlier turns"""
        self._seeds = itertools.count(options.seed)

    async def converse(self, conversation: Conversation) -> Conversation:
        """Take one through its turns. Raises RuntimeError for a turn that failed."""
        handle = self.client.submit(conversation.tokens, self._sampling(conversation))
        while True:
            self.asked += len(handle.group.prompt)
            (sample,) = await handle.result(timeout=600)
            answer = await self._answer(conversation, sample)
            if answer is None:
                handle.cancel()  # no turn follows: its KV is not kept any longer
                return conversation
            more = self.tokenizer.encode(answer, add_special_tokens=False)
            conversation.add(more, written=False)
            handle = self.client.next_turn(sample, handle.group.prompt, self._sampling(conversation), append=more)

    async def _answer(self, conversation: Conversation, sample: Sample) -> str | None:
        """Add a turn of the model, and ask the tool; None where no turn follows."""
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"a turn ended as {sample.finish_reason}: {sample.error or ''}")
        conversation.add(sample.token_ids.tolist(), written=True)
        conversation.turns += 1
        conversation.said = self.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        return None if conversation.turns == self.options.turns else await self.tool(conversation.said)

    def _sampling(self, conversation: Conversation) -> Sampling:
        """Make the sampling of the next turn. Each turn has a seed of its own: with that of another turn it would draw by the
        same random numbers."""
        options, last = self.options, conversation.turns + 1 == self.options.turns
        return Sampling(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            stop_token_ids=self.stop_ids,
            seed=next(self._seeds),
            kv_ttl_s=0.0 if last else options.kv_ttl_s,
        )


def ends(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a turn: those that close a call, and those that end the line."""
    texts = {number: tokenizer.decode([number]) for number in range(len(tokenizer))}
    return tuple(sorted(number for number, text in texts.items() if text.endswith(">>") or text == "\n"))


def sums(options: Options) -> list[str]:
    """Draw the questions: "12 + 305 - 7"."""
    rng = random.Random(options.seed)

    def number() -> str:
        digits = rng.randint(1, 3)
        return str(rng.randrange(10 ** (digits - 1), 10**digits))

    def question() -> str:
        return number() + "".join(f" {rng.choice('+-')} {number()}" for _ in range(rng.randint(1, 4)))

    return [question() for _ in range(options.questions)]


def main(options: Options) -> list[Conversation]:
    """Ask all questions, and print a conversation, how many answers are right, and what was prefilled."""
    folder = models.resolve(options.model)
    tokenizer = models.load_tokenizer(folder)
    questions = sums(options)
    conversations = [Conversation(tokenizer.encode(EXAMPLES.format(question=each))) for each in questions]
    say("starting the service")
    engine = EngineConfig(model=str(folder), kv_tokens=65_536, block_size=16)
    with service_process(Config(engine=engine)) as service:
        asked, status = asyncio.run(ask(service.endpoint, tokenizer, conversations, options))
    right = sum(answer_of(each) == calculate(question) for question, each in zip(questions, conversations, strict=True))
    longest = max(conversations, key=lambda each: each.turns)
    print(tokenizer.decode(longest.tokens).rsplit("\n\n", 1)[-1].strip())
    print(f"{right} of {len(conversations)} right, in {sum(each.turns for each in conversations)} turns")
    share = 100 * status["prefill_tokens"] / asked
    print(
        f"{status['prefill_tokens']} of {asked} prompt tokens prefilled ({share:.0f} %): {status['kept_tokens']} were "
        f"kept from the turn before, {status['prefix_hit_tokens']} found in the prefix index"
    )
    return conversations


async def ask(
    address: str, tokenizer: Any, conversations: Sequence[Conversation], options: Options
) -> tuple[int, dict[str, Any]]:
    """Run all conversations at once. Returns the tokens of all prompts, and the status of the service."""
    async with AsyncRolloutClient(address, name="agent") as client:
        agents = Agents(client, tokenizer, calculator, options)
        running = [asyncio.ensure_future(agents.converse(each)) for each in conversations]
        for done, one in enumerate(asyncio.as_completed(running), 1):
            say(f"conversation {done} of {len(running)}: {(await one).turns} turns")
        return agents.asked, await client.status()


def answer_of(conversation: Conversation) -> str:
    """Return the text after #### in the last message; "" if there is none."""
    return conversation.said.rpartition("####")[2].strip() if "####" in conversation.said else ""


if __name__ == "__main__":
    raise SystemExit(program.run("agent", main, Options))
