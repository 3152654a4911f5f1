"""`rollout bench turns`: conversations with a tool, and new weights in the middle of each turn; how much is prefilled.

    turn 1   p p p p o o|o o           | new weights: the service is paused at half of a turn's tokens, refreshed and resumed
    turn 2   p p p p o o|o o t t o o|o o
             └─ not again ─┘ └ new

Then the same conversations without the hint: each turn is a prompt like any other, whose history older weights computed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.types import Sampling
from rollout.bench.errors import BenchFailed
from rollout.bench.inputs import PromptText
from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.config import Config
from rollout.process import service_process

NAME = "turns"
CONVERSATIONS, TURNS = 8, 10
PROMPT_TOKENS, TOOL_TOKENS, NEW_TOKENS = 256, 48, 64
KV_TTL_S = 600.0
WAIT_S = 600.0


@dataclass(frozen=True)
class TurnSizes:
    """Tokens of a prompt, of a tool's answer and of what is drawn in a turn; and the text that they are of."""

    prompt: int
    tool: int
    new: int
    text: PromptText

    @classmethod
    def scaled(cls, factor: float, text: PromptText) -> TurnSizes:
        """Scale the sizes by `factor`, to at least 8 tokens each."""
        prompt, tool, new = (max(8, round(each * factor)) for each in (PROMPT_TOKENS, TOOL_TOKENS, NEW_TOKENS))
        return cls(prompt, tool, new, text)

    def prompts(self) -> list[np.ndarray]:
        return self.text.slices(0, CONVERSATIONS, self.prompt)

    def answers(self, turn: int) -> list[np.ndarray]:
        """Return the answers of the tools before this turn."""
        return self.text.slices(CONVERSATIONS * (self.prompt + turn * self.tool), CONVERSATIONS, self.tool)


def measure(folder: Path, engine: EngineConfig, text: PromptText, scale: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each turn of each way, and the summary. Raises BenchFailed if a refresh missed its turn."""
    from safetensors.torch import load_file

    weights = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    sizes = TurnSizes.scaled(scale, text)
    longest = sizes.prompt + TURNS * (sizes.tool + sizes.new) + 2 * engine.block_size
    serving = EngineConfig(
        model=str(folder), dtype=engine.dtype, threads=engine.threads, isa=engine.isa,
        kv_tokens=4 * CONVERSATIONS * longest, cpu_offload_gib=0,
        drafts=0,  # all conversations are at the same token when the refresh comes
    )  # fmt: skip
    rows: dict[str, list[dict[str, Any]]] = {}
    status: dict[str, Any] = {}
    for way in ("turns", "plain"):
        with (
            service_process(Config(engine=serving)) as service,
            RolloutClient(service.endpoint, name="rollout bench") as client,
        ):
            rows[way] = []
            for row in converse(client, weights, sizes, hint=way == "turns"):
                rows[way].append({"workload": NAME, "way": way, **row})
                yield rows[way][-1]
            status = client.status()
    yield summarise(rows, status, serving)


def converse(client: RolloutClient, weights: dict[str, Any], sizes: TurnSizes, hint: bool) -> Iterator[dict[str, Any]]:
    """Run all turns of all conversations, side by side. `hint`: a turn says what it continues. Yields a row a turn."""
    sampling = Sampling(max_tokens=sizes.new, ignore_eos=True, seed=0, kv_ttl_s=KV_TTL_S if hint else 0.0)
    handles: list[Handle] = []
    for turn in range(TURNS):
        before, started = client.status(), time.perf_counter()
        if not turn:
            added = sizes.prompts()
            handles = [client.submit(prompt, sampling) for prompt in added]
        else:
            added = sizes.answers(turn)
            handles = [go_on(client, handle, more, sampling, hint) for handle, more in zip(handles, added, strict=True)]
        refresh_in_the_middle(client, weights, before["generated_tokens"] + CONVERSATIONS * sizes.new // 2)
        samples = [sample for handle in handles for sample in handle.result(WAIT_S)]
        seconds = time.perf_counter() - started
        if any(len(sample.weight_versions) != 2 or sample.finish_reason != "length" for sample in samples):
            raise BenchFailed(f"turn {turn}: a sample did not run over the refresh: {samples[0].weight_versions}")
        after = client.status()
        yield {
            "turn": turn,
            "prefilled_tokens": after["prefill_tokens"] - before["prefill_tokens"],
            "new_tokens": sum(map(len, added)),
            "history_tokens": sum(len(handle.group.prompt) for handle in handles) - sum(map(len, added)),
            "seconds": round(seconds, 4),
        }


def go_on(client: RolloutClient, handle: Handle, more: np.ndarray, sampling: Sampling, hint: bool) -> Handle:
    """Submit the turn behind the only sample of a group."""
    (sample,) = handle.result(WAIT_S)
    if hint:
        return client.next_turn(sample, handle.group.prompt, sampling, append=more)
    return client.submit(np.concatenate([handle.group.prompt, sample.token_ids, more]), sampling)


def refresh_in_the_middle(client: RolloutClient, weights: dict[str, Any], generated: int) -> None:
    """Refresh once so many tokens were generated, while the service is paused: no turn ends in the meantime."""
    until = time.monotonic() + WAIT_S
    while client.status()["generated_tokens"] < generated:
        if time.monotonic() > until:
            raise BenchFailed(f"not {generated} tokens in {WAIT_S} s")
        time.sleep(0.005)
    client.pause()
    client.refresh(weights)
    client.resume()


def summarise(rows: dict[str, list[dict[str, Any]]], status: dict[str, Any], engine: EngineConfig) -> dict[str, Any]:
    """Join the rows; what has the suffix `_plain` is without the hint."""

    def total(way: str, name: str) -> Any:
        return round(sum(row[name] for row in rows[way]), 4)

    return {
        "workload": NAME,
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
        "model": engine.model,
        "dtype": engine.dtype,
        "threads": engine.threads,
        "arithmetic": status["arithmetic"],
    }
