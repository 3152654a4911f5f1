"""An engine of scripts, without torch: what the service needs of one, with tokens that name their maker.

Token k of child i of a prompt is (last prompt token + 7 * i + k) mod the vocabulary, so a test can tell every sample without
asking the engine. Run as a program, it serves until SIGTERM:

    python -m tests.support.fake_engine ENDPOINT READY_FILE [STEP_SECONDS [GRACE_SECONDS]]
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from rollout.engine.values import Group, Limits, PartialSample, Routing, Sample, Served, TokenChunk

VOCAB = 1000


@dataclass
class Child:
    group: Group
    index: int
    tokens: list[int] = field(default_factory=list)
    partial: PartialSample | None = None


def token(prompt: np.ndarray, index: int, position: int) -> int:
    return (int(prompt[-1]) + 7 * index + position) % VOCAB


def expected(prompt: list[int], index: int, count: int) -> list[int]:
    return [token(np.array(prompt), index, k) for k in range(count)]


def fake_routes(routing: Routing, first: int, positions: int) -> np.ndarray:
    """Routes that tell the position they are of."""
    layers, chosen = routing.shape
    at = np.arange(first, first + positions)[:, None, None] + 3 * np.arange(layers)[:, None] + np.arange(chosen)
    routes: np.ndarray = (at % routing.experts).astype(routing.dtype)
    return routes


class FakeEngine:
    """One token a child a step. `crash_on`: a step raises while a child of a prompt that starts with it runs."""

    def __init__(self, limits: Limits | None = None, context: int = 100_000, step_s: float = 0.0) -> None:
        self.limits = limits or Limits()
        self.vocab_size = VOCAB
        self.context = context
        self.version = 3
        self.arithmetic, self.block_size, self.kv_dtype = "fake/1", 16, "float32"
        self.configuration, self.tokenizer = "c1" * 20, "71" * 20
        self.routing: Routing | None = None
        self.routed: set[str] = set()
        """groups whose prompt's routes were returned"""
        self.model = SimpleNamespace(name="fake", eos_token_ids=frozenset({2, 1}), device=None)
        self.step_s = step_s
        self.crash_on: int | None = None
        self.frozen = False
        """steps make nothing"""
        self.aborted: list[str] = []
        self.clients: Counter[str] = Counter()
        self.groups: dict[str, list[Child]] = {}
        self.before = Served()
        self.weights = self
        """what the service asks of weights is here as well"""
        self.folder = "folder"
        """which weights are version 0"""

    @property
    def digest(self) -> str:
        return f"weights {self.version or self.folder}"

    @property
    def has_work(self) -> bool:
        return bool(self.groups)

    def submit(self, group: Group, client: str = "") -> None:
        group.validate(self.limits, self.vocab_size, self.context)
        if group.id in self.groups:
            raise ValueError(f"group id {group.id} is live")
        if len(group.prompt) + group.sampling.max_tokens > 50_000:
            raise ValueError("it can never fit the KV pool of 50000 tokens")
        self.clients[client] += 1
        partials = {child.index: child for child in group.partials}
        self.groups[group.id] = [
            Child(group, i, partials[i].token_ids.tolist() if i in partials else [], partials.get(i)) for i in group.wanted
        ]

    def step(self) -> list[Sample]:
        time.sleep(self.step_s)
        if self.frozen:
            return []
        if any(children[0].group.prompt[0] == self.crash_on for children in self.groups.values()):
            raise RuntimeError("scripted crash")
        ended = []
        for children in list(self.groups.values()):
            for child in list(children):
                child.tokens.append(token(child.group.prompt, child.index, len(child.tokens)))
                if len(child.tokens) == child.group.sampling.max_tokens:
                    ended.append(self._end(child, "length"))
        return ended

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        children = [child for child in self.groups.get(group_id, []) if index in (None, child.index)]
        if children:
            self.aborted.append(group_id)
        return [self._end(child, "aborted") for child in children]

    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
        chunks = []
        children = self.groups.get(group_id, [])
        for child in sorted(children, key=lambda child: since.get(child.index, 0) - len(child.tokens)):
            first = since.get(child.index, 0)
            new = child.tokens[first : first + most]
            if new and len(new) >= min(least, most):
                most -= len(new)
                values = np.full(len(new), -0.5, np.float32)
                raw = values if child.group.sampling.raw_logprobs else None
                spans = [(0, self.version)]
                numbers = np.array(new, np.int32)
                chunks.append(
                    TokenChunk(index=child.index, first=first, token_ids=numbers, logprobs=values, weight_versions=spans,
                          raw_logprobs=raw, seed=child.group.sampling.seed or 0,
                          routed_experts=self._routes(child, first, len(new)))
                )  # fmt: skip
        return chunks

    def status(self) -> dict[str, object]:
        return {"running": sum(map(len, self.groups.values())), "version": np.int64(self.version), "kv": {"used": 0}}

    def _routes(self, child: Child, first: int, tokens: int) -> np.ndarray | None:
        """Return the routes of some tokens of a child, if it wants any."""
        if self.routing is None or not child.group.sampling.routed_experts or not tokens:
            return None
        return fake_routes(self.routing, len(child.group.prompt) - 1 + first, tokens)

    def _prompt_routes(self, child: Child) -> np.ndarray | None:
        if self.routing is None or not child.group.sampling.routed_experts or child.group.id in self.routed:
            return None
        self.routed.add(child.group.id)
        return fake_routes(self.routing, 0, len(child.group.prompt) - 1)

    def _end(self, child: Child, reason: str) -> Sample:
        siblings = self.groups[child.group.id]
        siblings.remove(child)
        if not siblings:
            del self.groups[child.group.id]
        count, partial = len(child.tokens), child.partial
        logprobs, spans = np.full(count, -0.5, np.float32), [(0, self.version)] if count else []
        if partial is not None:
            known = len(partial.token_ids)
            logprobs[:known] = partial.logprobs
            spans = partial.weight_versions + ([(known, self.version)] if count > known else [])
        return Sample(
            group_id=child.group.id,
            index=child.index,
            token_ids=np.array(child.tokens, np.int32),
            logprobs=logprobs,
            raw_logprobs=logprobs if child.group.sampling.raw_logprobs else None,
            finish_reason=reason,  # type: ignore[arg-type]
            weight_versions=spans,
            prompt_tokens=len(child.group.prompt),
            seed=child.group.sampling.seed or 0,
            routed_experts=self._routes(child, 0, count),
            prompt_routed_experts=self._prompt_routes(child),
        )


def main() -> None:
    from rollout.config import ServiceConfig
    from rollout.process import write_atomically
    from rollout.service.build import open_service

    endpoint, ready, *rest = sys.argv[1:]
    step_s, grace_s = [float(text) for text in rest] + [0.0, 10.0][len(rest) :]
    service = open_service(FakeEngine(step_s=step_s), ServiceConfig(endpoint=endpoint, client_grace_s=grace_s))
    signal.signal(signal.SIGTERM, lambda number, frame: service.stop("SIGTERM"))
    write_atomically(Path(ready), service.endpoint)
    service.run()


if __name__ == "__main__":
    main()
