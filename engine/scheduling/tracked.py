"""What is kept of a child's tokens beside the tokens themselves, for groups that ask for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.scheduling.plan import Top
from engine.types import Begun, Sampling


class Tracked:
    """Of one sequence. A function of its own tokens and draws, so it outlives preemption and goes on from `Begun`."""

    __slots__ = ("k", "top_ids", "top_logprobs")

    def __init__(self, sampling: Sampling, begun: Begun | None) -> None:
        self.k = sampling.top_logprobs
        self.top_ids, self.top_logprobs = bytearray(), bytearray()
        """[tokens, k] int32 and float32"""
        if begun is not None and begun.top_ids is not None and begun.top_logprobs is not None:
            self.top_ids += begun.top_ids.tobytes()
            self.top_logprobs += begun.top_logprobs.tobytes()

    @classmethod
    def of(cls, sampling: Sampling, begun: Begun | None) -> Tracked | None:
        """None: the group asks for nothing that must be kept."""
        return cls(sampling, begun) if sampling.top_logprobs else None

    def append_top(self, top: Top, draw: int) -> None:
        """Keep the most probable tokens of the newest one's draw, as many as the group asks for."""
        self.top_ids += top.ids[draw, : self.k].tobytes()
        self.top_logprobs += top.logprobs[draw, : self.k].tobytes()

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
