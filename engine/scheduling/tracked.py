"""What is kept of a child's tokens beside the tokens themselves, and how a group changes logits; both for groups that ask."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from engine.scheduling.plan import LogitAdjustment, Penalties, TopLogprobs
from engine.scheduling.stops import Stops
from engine.types import FinishReason, Group, PartialSample, Sampling


class LogitRules(NamedTuple):
    """How the logits of a group's draws are changed, as far as that is the same for all of them."""

    bias_ids: np.ndarray
    """[B] int32"""
    bias: np.ndarray
    """[B] float32"""
    allowed: np.ndarray
    """[A] int32; none: all tokens are"""
    penalties: Penalties | None
    prompt_ids: np.ndarray
    """[P] int32, each once: tokens of the prompt, where repetition is penalised"""
    prompt: frozenset[int]
    """the same"""

    @classmethod
    def of(cls, group: Group) -> LogitRules | None:
        """None: the logits stay as they are."""
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
    """None: nothing is penalised."""
    penalties = Penalties(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return None if penalties == Penalties(1.0, 0.0, 0.0) else penalties


class TokenCounts:
    """Of one sequence. A function of its own tokens and draws, so it outlives preemption and goes on from `PartialSample`."""

    __slots__ = ("k", "top_ids", "top_logprobs", "rules", "counts", "new", "stops", "tail", "found")

    def __init__(
        self, sampling: Sampling, rules: LogitRules | None, stops: Stops | None, partial: PartialSample | None
    ) -> None:
        self.k = sampling.top_logprobs
        self.top_ids, self.top_logprobs = bytearray(), bytearray()
        """[tokens, k] int32 and float32"""
        self.rules = rules
        self.counts: dict[int, int] | None = None if rules is None or rules.penalties is None else {}
        """how often each token is in the output; None: nothing is penalised"""
        self.new: list[int] = []
        """tokens of the output that are not in the prompt, each once"""
        self.stops, self.tail = stops, b""
        """tail: the last bytes of the text, in which a stop string may have begun"""
        self.found: tuple[int, int] | None = None
        """of the stop string that the newest token completes: which, and bytes from its first to the last of the text"""
        if partial is None:
            return
        if partial.top_ids is not None and partial.top_logprobs is not None:
            self.top_ids += partial.top_ids.tobytes()
            self.top_logprobs += partial.top_logprobs.tobytes()
        for token in partial.token_ids.tolist():
            self.append(token)

    @classmethod
    def of(
        cls, sampling: Sampling, rules: LogitRules | None, stops: Stops | None, partial: PartialSample | None
    ) -> TokenCounts | None:
        """None: the group asks for nothing that must be kept."""
        asks = sampling.top_logprobs or rules is not None or stops is not None
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
        """Keep the most probable tokens of the newest one's draw, as many as the group asks for."""
        self.top_ids += top.ids[draw, : self.k].tobytes()
        self.top_logprobs += top.logprobs[draw, : self.k].tobytes()

    def adjustment(self, first: int, draws: int, ahead: tuple[int, ...] = ()) -> LogitAdjustment:
        """Tell how the logits are changed that follow the newest token and those `ahead` of it, for the draws `first` to before
        `first + draws`."""
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
        """Make the fields of a `Sample` that tell of the stop string that ended it."""
        if self.stops is None or self.found is None or reason != "stop":
            return {}
        which, cut = self.found
        return {"stopped_by": self.stops.strings[which], "text_end": self.stops.text_end(output, cut)}

    def columns(self, first: int = 0, last: int | None = None) -> dict[str, Any]:
        """Make the fields of a `Sample` or a `Chunk`, of the tokens `first` to before `last`."""
        if not self.k:
            return {}
        mine = slice(4 * self.k * first, None if last is None else 4 * self.k * last)
        ids, logprobs = bytes(self.top_ids[mine]), bytes(self.top_logprobs[mine])
        return {
            "top_ids": np.frombuffer(ids, np.int32).reshape(-1, self.k),
            "top_logprobs": np.frombuffer(logprobs, np.float32).reshape(-1, self.k),
        }
