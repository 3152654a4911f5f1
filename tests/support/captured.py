"""A stand-in for CUDA graphs: repeats a forward on the addresses it was captured with, and refuses if one of them has moved."""

from __future__ import annotations

import torch

from rollout.engine.cuda.graphs import Run
from rollout.engine.engine import Engine
from rollout.engine.forward.attention import StepCapacity


class Captured:
    """`Capture` without a GPU. `result`: what a replay makes of the forward."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.captures = self.replays = 0

    def addresses(self) -> list[int]:
        module, attention = self.engine.model.module, self.engine.worker.backend
        tensors = [*module.parameters(), self.engine.worker.kv.data, attention._arrays, attention.partial, attention.sums]
        return [tensor.data_ptr() for tensor in tensors]

    def __call__(self, forward: Run) -> Run:
        self.captures += 1
        captured = self.addresses()
        forward()  # as `cuda_capture` does, for what is compiled and allocated

        def replay() -> torch.Tensor:
            self.replays += 1
            assert self.addresses() == captured, "a graph was replayed on memory that has moved"
            return self.result(forward)

        return replay

    def result(self, forward: Run) -> torch.Tensor:
        return forward()


def largest(rows: int, tokens: int) -> StepCapacity:
    return StepCapacity(tokens, rows, columns=1, q_heads=1, kv_heads=1, head_dim=16, itemsize=4)
