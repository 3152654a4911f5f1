"""What a step needs of the running sequences, in arrays that outlive the step: gathered by index, not asked of one object after
the other. Persistent batch arrays: vLLM's input batch."""

from __future__ import annotations

import numpy as np

from engine.sequence import Sequence

DRAWING = np.dtype(
    [
        ("seed", np.uint64),
        ("index", np.uint64),
        ("prompt", np.int64),
        ("min_tokens", np.int64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("raw", np.bool_),
    ]
)
"""How a sequence draws: seed and `Sampling` of its group, its index, tokens of its prompt. `min_tokens` is 0 where nothing can
end it."""


class Columns:
    """One place for each sequence that runs.

        place        0             1             2          … places - 1
        table    [ 7 3 9 0 … ] [ 7 3 4 0 … ] [ 0 0 0 0 … ]    device slots of its blocks, 0 behind them
        drawing  ( 17, 0, …  ) ( 17, 1, …  ) (    free   )    stays as it is while the sequence runs

    A sequence keeps its place until it stops, whoever else comes and goes. Written by the scheduler only: places here, blocks
    as they are appended through `Sequence.table`.
    """

    def __init__(self, places: int, max_blocks: int) -> None:
        self.table = np.zeros((places, max_blocks), np.int32)
        """[places, max_blocks] int32"""
        self.drawing = np.zeros(places, DRAWING)
        """[places] DRAWING"""
        self._free = list(range(places - 1, -1, -1))

    def enter(self, seq: Sequence) -> None:
        """A sequence, whose blocks are on the device, starts to run."""
        place = self._free.pop()
        seq.place, seq.table = place, self.table[place]
        seq.table[: len(seq.blocks)] = [block.device for block in seq.blocks]
        self.drawing[place] = drawing_of(seq)

    def leave(self, seq: Sequence) -> None:
        """It stops."""
        assert seq.table is not None
        seq.table[: len(seq.blocks)] = 0
        self._free.append(seq.place)
        seq.place, seq.table = -1, None

    def check(self, running: list[Sequence]) -> None:
        """Asserts that the arrays say what the sequences say."""
        assert sorted([*self._free, *(seq.place for seq in running)]) == list(range(len(self.table))), "places are lost"
        wanted = np.zeros_like(self.table)
        for seq in running:
            wanted[seq.place, : len(seq.blocks)] = [block.device for block in seq.blocks]
        assert np.array_equal(self.table, wanted), "a table names other blocks than its sequence has, or goes on behind them"
        drawing = np.array([drawing_of(seq) for seq in running], DRAWING)
        assert self.drawing[[seq.place for seq in running]].tobytes() == drawing.tobytes()


def drawing_of(seq: Sequence) -> tuple[object, ...]:
    """As DRAWING."""
    state, sampling = seq.state, seq.state.group.sampling
    return (
        state.seed,
        seq.index,
        seq.num_prompt,
        sampling.min_tokens if state.eos else 0,
        sampling.top_k,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.raw_logprobs,
    )
