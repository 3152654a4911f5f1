"""What a sequence tracks beside its tokens, in groups that ask for it: logit adjustments, stop strings, top log-probs and
routes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollout.engine.scheduling.plan import LogitAdjustment, Penalties, TopLogprobs
from rollout.engine.values import FinishReason, Group, PartialSample, Sampling


class StopStrings(Protocol):
    """The stop strings of a group: `rollout.engine.scheduling.stops.Stops`."""

    strings: tuple[str, ...]

    def find(self, tail: bytes, token: int) -> tuple[bytes, tuple[int, int] | None]:
        """Search for stop strings that the next token after `tail` completes. Returns the tail after it, and the one that
        begins first as (its index, bytes from its beginning to the end of the token); None: the token completes none."""

    def completes(self, child: PartialSample, min_tokens: int) -> bool:
        """Return whether the last token of a partial child completes a stop string. Raises ValueError if an earlier one
        does."""

    def text_end(self, tokens: Iterable[int], cut: int) -> int:
        """Count the characters of a text without its last `cut` bytes."""


class StopTexts(Protocol):
    """What the tokens of a model stand for: `rollout.engine.scheduling.stops.TokenTexts`."""

    def stops_of(self, group: Group) -> StopStrings | None:
        """Return the stop strings of a group; None: it has none. Raises ValueError if the bytes of tokens are not known."""

    @property
    def digest(self) -> str:
        """Return the digest of the text in which stop strings are searched; "": there is none, and they are refused."""


class LogitRules(NamedTuple):
    """Changes of the logits that are the same for all draws of a group."""

    bias_ids: np.ndarray
    """[B] int32"""
    bias: np.ndarray
    """[B] float32"""
    allowed: np.ndarray
    """[A] int32; empty: all tokens are"""
    penalties: Penalties | None
    prompt_ids: np.ndarray
    """[P] int32, each once: tokens of the prompt if repetition is penalised, else none"""
    prompt: frozenset[int]
    """the same"""

    @classmethod
    def of(cls, group: Group) -> LogitRules | None:
        """Return the rules of a group; None: its logits are not changed."""
        sampling, penalties = group.sampling, penalties_of(group.sampling)
        if not (sampling.logit_bias or sampling.allowed_token_ids is not None or penalties):
            return None
        repeats = penalties is not None and penalties.repetition != 1
        prompt_ids = np.unique(group.prompt) if repeats else np.zeros(0, np.int32)
        return cls(
            bias_ids=np.array(list(sampling.logit_bias or ()), np.int32),
            bias=np.array(list((sampling.logit_bias or {}).values()), np.float32),
            allowed=np.array(sorted(set(sampling.allowed_token_ids or ())), np.int32),
            penalties=penalties,
            prompt_ids=prompt_ids,
            prompt=frozenset(prompt_ids.tolist()),
        )


def penalties_of(sampling: Sampling) -> Penalties | None:
    """Return the penalties; None: nothing is penalised."""
    penalties = Penalties(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return None if penalties == Penalties(1.0, 0.0, 0.0) else penalties


class TokenCounts:
    """Token counts, stop strings, top log-probs and routes of one sequence. They depend on its own tokens and draws only, so
    they survive preemption and can be made from a `PartialSample`."""

    __slots__ = ("k", "top_ids", "top_logprobs", "ranks", "rules", "counts", "new", "stops", "tail", "found", "routes", "route")

    def __init__(
        self, sampling: Sampling, rules: LogitRules | None, stops: StopStrings | None, partial: PartialSample | None
    ) -> None:
        self.k = sampling.top_logprobs
        self.top_ids, self.top_logprobs = bytearray(), bytearray()
        """[tokens, k] int32 and float32"""
        self.ranks: list[int] = []
        """of given tokens, see `Sample.ranks`"""
        self.rules = rules
        self.counts: dict[int, int] | None = None if rules is None or rules.penalties is None else {}
        """how often each token is in the output; None: nothing is penalised"""
        self.new: list[int] = []
        """tokens of the output that are not in the prompt, each once"""
        self.stops, self.tail = stops, b""
        """tail: last bytes of the text, in which a stop string may have begun"""
        self.found: tuple[int, int] | None = None
        """the stop string that the newest token completes: its index, and bytes from its beginning to the end of the text"""
        self.routes = bytearray() if sampling.routed_experts else None
        """[tokens, layers, chosen]: experts that were chosen at the positions of the draws; None: not wanted"""
        self.route: np.ndarray | None = None
        """[layers, chosen]: of one token"""
        if partial is None:
            return
        if self.routes is not None and partial.routed_experts is not None:
            self.routes += partial.routed_experts.tobytes()
            self.route = partial.routed_experts[0]
        if partial.top_ids is not None and partial.top_logprobs is not None:
            self.top_ids += partial.top_ids.tobytes()
            self.top_logprobs += partial.top_logprobs.tobytes()
        for token in partial.token_ids.tolist():
            self.append(token)

    @classmethod
    def of(
        cls, sampling: Sampling, rules: LogitRules | None, stops: StopStrings | None, partial: PartialSample | None
    ) -> TokenCounts | None:
        """Return the state of a sequence; None: its group needs none."""
        asks = sampling.top_logprobs or sampling.routed_experts or rules is not None or stops is not None
        return cls(sampling, rules, stops, partial) if asks else None

    def append(self, token: int) -> None:
        """Count a token of the output, and look for stop strings that it completes."""
        if self.stops is not None:
            self.tail, self.found = self.stops.find(self.tail, token)
        if self.counts is not None and self.rules is not None:
            before = self.counts.get(token, 0)
            self.counts[token] = before + 1
            if not before and token not in self.rules.prompt:
                self.new.append(token)

    def append_top(self, top: TopLogprobs, draw: int) -> None:
        """Append the most probable tokens of the newest token's draw, as many as the group wants."""
        self.top_ids += top.ids[draw, : self.k].tobytes()
        self.top_logprobs += top.logprobs[draw, : self.k].tobytes()

    def append_routes(self, routes: np.ndarray, draw: int) -> None:
        """Append the routes of the newest token's draw, [draws, layers, chosen]."""
        if self.routes is not None:
            self.route = routes[draw]
            self.routes += self.route.tobytes()

    def adjustment(self, first: int, draws: int, ahead: tuple[int, ...] = ()) -> LogitAdjustment:
        """Return the changes of the logits after the newest token and the expected tokens `ahead`, for the draws `first` to
        before `first + draws`."""
        assert self.rules is not None
        rules, counts, new = self.rules, self.counts or {}, self.new
        if ahead and self.counts is not None:
            counts = counts.copy()
            for token in ahead:
                counts[token] = counts.get(token, 0) + 1
            new = [token for token in counts if token not in rules.prompt]
        return LogitAdjustment(
            first=first,
            draws=draws,
            bias_ids=rules.bias_ids,
            bias=rules.bias,
            allowed=rules.allowed,
            penalties=rules.penalties,
            seen=np.concatenate([rules.prompt_ids, np.array(new, np.int32)]),
            counted=np.fromiter(counts.keys(), np.int32, len(counts)),
            counts=np.fromiter(counts.values(), np.int32, len(counts)),
        )

    def stopped(self, reason: FinishReason, output: list[int]) -> dict[str, Any]:
        """Return the fields of a `Sample` about the stop string that ended it."""
        if self.stops is None or self.found is None or reason not in ("stop", "scored"):
            return {}
        which, cut = self.found
        return {"stopped_by": self.stops.strings[which], "text_end": self.stops.text_end(output, cut)}

    def columns(self, first: int = 0, last: int | None = None) -> dict[str, Any]:
        """Return the fields of a `Sample` or a `TokenChunk` for the tokens `first` to before `last`."""
        routes = self._routes(first, last)
        if not self.k:
            return routes
        mine = slice(4 * self.k * first, None if last is None else 4 * self.k * last)
        ids, logprobs = bytes(self.top_ids[mine]), bytes(self.top_logprobs[mine])
        return {
            "top_ids": np.frombuffer(ids, np.int32).reshape(-1, self.k),
            "top_logprobs": np.frombuffer(logprobs, np.float32).reshape(-1, self.k),
            **routes,
        }

    def _routes(self, first: int, last: int | None) -> dict[str, Any]:
        if self.routes is None or self.route is None:
            return {}
        size = self.route.nbytes
        mine = bytes(self.routes[first * size : None if last is None else last * size])
        return {"routed_experts": np.frombuffer(mine, self.route.dtype).reshape(-1, *self.route.shape)}
