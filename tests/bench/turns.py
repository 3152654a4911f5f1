"""`python -m tests.bench turns`: prefilled tokens of conversations with a tool, with new weights in the middle of each turn.

    turn 1   p p p p o o|o o           | a refresh: the service is paused halfway through a turn's tokens, refreshed and resumed
    turn 2   p p p p o o|o o t t o o|o o
             └─ KV is reused┘└ prefilled

Then the same conversations without the hint (`…_plain`): each turn is a prompt like any other, and older weights computed the
KV of its history. `--trace FILE` replays recorded lengths instead (`trace.py`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import PromptSource, stored_weights
from rollout.bench.target import connected
from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.config import Config
from rollout.engine.config import EngineConfig
from rollout.engine.values import Sampling
from tests.bench import trace
from tests.bench.options import options_of

CONVERSATIONS, TURNS = 8, 10
PROMPT_TOKENS, TOOL_TOKENS, NEW_TOKENS = 256, 48, 64
KV_TTL_S = 600.0
WAIT_S = 600.0


class TurnSizes(NamedTuple):
    """Tokens of a prompt, of a tool's answer and of a turn, and the text that they come from."""

    prompt: int
    tool: int
    new: int
    text: PromptSource

    def prompts(self) -> list[np.ndarray]:
        return self.text.slices(0, CONVERSATIONS, self.prompt)

    def answers(self, turn: int) -> list[np.ndarray]:
        """Return the tools' answers before a turn."""
        return self.text.slices(CONVERSATIONS * (self.prompt + turn * self.tool), CONVERSATIONS, self.tool)


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per turn, with the hint and without it, then the summary; with --trace those of a replay (`trace.measure`).
    Raises BenchFailed if a turn missed its refresh."""
    if options_of(setup).trace:
        yield from trace.measure(setup)
        return
    weights = stored_weights(setup.folder)
    prompt, tool, new = (setup.scaled(tokens, 8) for tokens in (PROMPT_TOKENS, TOOL_TOKENS, NEW_TOKENS))
    sizes = TurnSizes(prompt, tool, new, setup.text)
    longest = prompt + TURNS * (tool + new) + 2 * setup.config().block_tokens
    # without drafts, all conversations are at the same token when the refresh comes
    engine = setup.config(kv_tokens=4 * CONVERSATIONS * longest, cpu_offload_gib=0, drafts=0)
    rows: dict[str, list[Row]] = {}
    status: dict[str, Any] = {}
    for way in ("turns", "plain"):
        with connected(Config(engine=engine)) as (_, client):
            rows[way] = []
            for row in converse(client, weights, sizes, hint=way == "turns"):
                rows[way].append({"way": way, **row})
                yield rows[way][-1]
            status = client.status()
    yield summarise(rows, status, engine)


def converse(client: RolloutClient, weights: dict[str, Any], sizes: TurnSizes, hint: bool) -> Iterator[Row]:
    """Run all conversations at once, turn by turn, and yield a row per turn. hint: a turn names the sample that it
    continues."""
    sampling = Sampling(max_tokens=sizes.new, ignore_eos=True, seed=0, kv_ttl_s=KV_TTL_S if hint else 0.0)
    handles: list[Handle] = []
    for turn in range(TURNS):
        before, started = client.status(), time.perf_counter()
        if not turn:
            added = sizes.prompts()
            handles = [client.submit(prompt, sampling) for prompt in added]
        else:
            added = sizes.answers(turn)
            handles = [next_turn(client, handle, more, sampling, hint) for handle, more in zip(handles, added, strict=True)]
        refresh_at(client, weights, before["generated_tokens"] + CONVERSATIONS * sizes.new // 2)
        samples = [sample for handle in handles for sample in handle.result(WAIT_S)]
        seconds = time.perf_counter() - started
        if any(len(sample.weight_versions) != 2 or sample.finish_reason != "length" for sample in samples):
            raise BenchFailed(f"turn {turn}: a sample did not run across the refresh: {samples[0].weight_versions}")
        after = client.status()
        new_tokens = sum(map(len, added))
        yield {
            "turn": turn,
            "prefilled_tokens": after["prefill_tokens"] - before["prefill_tokens"],
            "new_tokens": new_tokens,
            "history_tokens": sum(len(handle.group.prompt) for handle in handles) - new_tokens,
            "seconds": seconds,
        }


def next_turn(client: RolloutClient, handle: Handle, more: np.ndarray, sampling: Sampling, hint: bool) -> Handle:
    """Submit the turn after a group with one sample."""
    (sample,) = handle.result(WAIT_S)
    if hint:
        return client.next_turn(sample, handle.group.prompt, sampling, append=more)
    return client.submit(np.concatenate([handle.group.prompt, sample.token_ids, more]), sampling)


def refresh_at(client: RolloutClient, weights: dict[str, Any], generated: int) -> None:
    """Refresh when `generated` tokens exist. The service is paused meanwhile, so no turn ends."""
    until = time.monotonic() + WAIT_S
    while client.status()["generated_tokens"] < generated:
        if time.monotonic() > until:
            raise BenchFailed(f"fewer than {generated} tokens after {WAIT_S} s")
        time.sleep(0.005)
    client.pause()
    client.refresh(weights)
    client.resume()


def summarise(rows: dict[str, list[Row]], status: dict[str, Any], engine: EngineConfig) -> Row:
    def total(way: str, name: str) -> Any:
        return sum(row[name] for row in rows[way])

    return {
        "summary": True,
        "prefilled_tokens": total("turns", "prefilled_tokens"),
        "prefilled_tokens_plain": total("plain", "prefilled_tokens"),
        "new_tokens": total("turns", "new_tokens"),
        "turns": CONVERSATIONS * TURNS,
        "conversations": CONVERSATIONS,
        "block_size": status["kv"]["block_size"],
        "seconds": total("turns", "seconds"),
        "seconds_plain": total("plain", "seconds"),
        "seconds_of_a_turn": statistics.median(row["seconds"] for row in rows["turns"]),
        **{name: getattr(engine, name) for name in ("model", "dtype", "threads")},
        "arithmetic": status["arithmetic"],
    }
