"""A model whose weights of version v emit only the token that encodes v: a torn or mislabelled token is exact.

Every tensor is filled with one number, the version it belongs to. The forward reads all of them, the first and the last one
pushed included, so a model put together from two versions emits MIXED.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from rollout.engine.values import Sample

if TYPE_CHECKING:  # pushers need no engine, which takes seconds to import
    from rollout.engine.engine import Engine
    from rollout.engine.forward.batch import Batch
    from rollout.engine.kv.pages import PagedKV

VOCAB = 4096
MIXED = VOCAB - 1
TENSORS = 6
BUFFERS = 2  # the last ones of these are persistent buffers
ROWS, COLUMNS = 300, 1000  # a tensor is longer than a slice of staging


class WatermarkModel:
    name = "watermark"
    vocab_size = VOCAB
    heads: Sequence[tuple[int, int, int, int]] = ((1, 1, 1, 1),)
    device = torch.device("cpu")
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, context: int) -> None:
        from rollout.engine.kv.pages import KVGeometry

        self.geometry = KVGeometry(1, 1, 1, torch.float32)
        self.context = context
        self.module = torch.nn.Module()
        for i in range(TENSORS):
            tensor = torch.zeros(ROWS, COLUMNS)
            if i < TENSORS - BUFFERS:
                self.module.register_parameter(f"w{i}", torch.nn.Parameter(tensor, requires_grad=False))
            else:
                self.module.register_buffer(f"w{i}", tensor)

    def forward(self, batch: Batch, kv: PagedKV, backend: object) -> torch.Tensor:
        logits = torch.zeros(batch.num_logits, VOCAB)
        logits[:, self.read()] = 100.0
        return logits

    def read(self) -> int:
        """Return the token of the weights as they are: corners and middle of each tensor."""
        at = torch.tensor([0, ROWS * COLUMNS // 2, -1])
        seen = {value for tensor in self.module.state_dict().values() for value in tensor.view(-1)[at].tolist()}
        return token_of(int(seen.pop())) if len(seen) == 1 else MIXED


def token_of(version: int) -> int:
    return version % MIXED


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((ROWS, COLUMNS), float(version)) for i in range(TENSORS)}


def watermark_engine(context: int = 4096, **config: object) -> Engine:
    from rollout.engine.engine import Engine
    from tests.support.configs import engine_config

    options = {
        "block_size": 16,
        "kv_tokens": 65_536,
        "max_num_seqs": 64,
        "max_batch_tokens": 256,
        "cpu_offload_gib": 0,
        **config,
    }
    return Engine(engine_config(dtype="float32", **options), WatermarkModel(context))  # type: ignore[arg-type]


def check_marks(samples: Iterable[Sample]) -> int:
    """Assert that every token is the one of the version that its span names. Returns how many tokens there were."""
    tokens = 0
    for sample in samples:
        starts = [start for start, _ in sample.weight_versions]
        assert starts == sorted(set(starts)) and (not len(sample.token_ids) or starts[0] == 0)
        ends = [*starts[1:], len(sample.token_ids)][: len(starts)]  # none of a sample that was aborted before its first token
        for (start, version), end in zip(sample.weight_versions, ends, strict=True):
            assert end > start
            emitted = set(sample.token_ids[start:end].tolist())
            assert emitted == {token_of(version)}, f"tokens {start} to {end} are {emitted}, labelled version {version}"
        tokens += len(sample.token_ids)
    return tokens
