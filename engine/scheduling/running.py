"""The running sequences, and what a step needs of each in arrays that are kept across steps: a plan is gathered from these by
one index. Persistent batch arrays: vLLM's input batch."""

from __future__ import annotations

from bisect import insort
from collections import Counter

import numpy as np

from engine.scheduling.plan import SAMPLING
from engine.scheduling.sequence import Sequence


class RunningTable:
    """One place for each sequence that runs.

        place        0             1             2          … places - 1
        table    [ 7 3 9 0 … ] [ 7 3 4 0 … ] [ 0 0 0 0 … ]    device slots of its blocks, 0 behind them
        sampling ( 17, 0, …  ) ( 17, 1, …  ) (    free   )    stays as it is while the sequence runs

    A sequence keeps its place until it stops, whoever else comes and goes. Written by the scheduler only: sequences here,
    blocks as they are appended through `Sequence.table`.
    """

    def __init__(self, places: int, max_blocks: int) -> None:
        self.table = np.zeros((places, max_blocks), np.int32)
        """[places, max_blocks] int32"""
        self.sampling = np.zeros(places, SAMPLING)
        """[places] SAMPLING"""
        self.sequences: list[Sequence] = []
        """those that run, oldest first"""
        self.of_client: Counter[str] = Counter()
        """how many of each client run; none without"""
        self._free = list(range(places - 1, -1, -1))

    @property
    def has_place(self) -> bool:
        """True if one more sequence can run."""
        return bool(self._free)

    def enter(self, seq: Sequence, least_run: int = 0) -> None:
        """Start a sequence whose blocks are on the device. `least_run`: tokens to sample before it may be preempted."""
        self._fill(seq, self._free.pop())
        seq.running = seq.started = True
        seq.held = False
        seq.num_output_at_start = len(seq.output)
        seq.least_run = least_run
        insort(self.sequences, seq, key=lambda s: s.age)
        self.of_client[seq.state.client] += 1

    def leave(self, seq: Sequence) -> None:
        """Stop a sequence."""
        seq.running = False
        self.sequences.remove(seq)
        self.of_client[seq.state.client] -= 1
        if not self.of_client[seq.state.client]:
            del self.of_client[seq.state.client]
        self._clear(seq)

    def _fill(self, seq: Sequence, place: int) -> None:
        seq.place, seq.table = place, self.table[place]
        seq.table[: len(seq.blocks)] = slots_of(seq)
        self.sampling[place] = sampling_of(seq)

    def _clear(self, seq: Sequence) -> None:
        assert seq.place is not None and seq.table is not None
        seq.table[: len(seq.blocks)] = 0
        self._free.append(seq.place)
        seq.place, seq.table = None, None

    def check(self) -> None:
        """Asserts that the arrays say what the sequences say."""
        places = [seq.place for seq in self.sequences if seq.place is not None]
        assert sorted([*self._free, *places]) == list(range(len(self.table))), "places are lost"
        assert sorted(self.sequences, key=lambda seq: seq.age) == self.sequences
        assert self.of_client == Counter(seq.state.client for seq in self.sequences)
        wanted = np.zeros_like(self.table)
        for place, seq in zip(places, self.sequences, strict=True):
            wanted[place, : len(seq.blocks)] = slots_of(seq)
        assert np.array_equal(self.table, wanted), "a table names other blocks than its sequence has, or goes on behind them"
        sampling = np.array([sampling_of(seq) for seq in self.sequences], SAMPLING)
        assert self.sampling[places].tobytes() == sampling.tobytes()


def slots_of(seq: Sequence) -> list[int]:
    """Return the device slots of the blocks of a sequence that runs."""
    return [block.device for block in seq.blocks if block.device is not None]


def sampling_of(seq: Sequence) -> tuple[object, ...]:
    """Return the record of a sequence, as SAMPLING."""
    state, sampling = seq.state, seq.state.group.sampling
    return (
        state.seed,
        seq.index,
        seq.num_prompt,
        sampling.min_tokens if state.stop_ids else 0,
        sampling.top_k,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.raw_logprobs,
        sampling.top_logprobs,
        state.rules is not None,
    )
