"""Kernels that one decoder layer of a decode step launches, counted on the CPU: aten operators that would launch one, and our
own kernels, which stand-ins count and do not run. A layer's share is what one layer more adds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.engine.cuda.attention import TritonAttention
from rollout.engine.cuda.fused import FusedDecoder
from rollout.engine.forward.attention import StepCapacity
from rollout.engine.forward.model import Model

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 199, "max_position_embeddings": 4096,
}  # fmt: skip
ROWS, CONTEXT, BLOCK = 16, 2049, 32
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "_reshape_alias"}
"""operators that launch nothing, beside views"""


class Counted:
    """Stands in for a module of Triton kernels: `kernels.name[grid](…)` counts."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        def launch(*_: Any, **__: Any) -> None:
            self._seen.append(name)

        return _Grid(launch)


class _Grid:
    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch


class Operators(TorchDispatchMode):
    """Names of the aten operators that would launch a kernel."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            self._seen.append(name)
        return func(*args, **(kwargs or {}))


def launches_per_layer() -> dict[str, Any]:
    """Count the kernels that one layer of a decode step launches: `launches_per_layer` where rows have a prefix in common, so
    that none can be left out; `unshared` without; `transformers` with the module's own operators around our attention."""
    shared, unshared, plain = (_of_a_layer(fused, share) for fused, share in ((True, True), (True, False), (False, True)))
    return {
        "launches_per_layer": len(shared), "kernels": shared, "unshared": len(unshared), "transformers": len(plain),
    }  # fmt: skip


def _of_a_layer(fused: bool, share: bool) -> list[str]:
    fewer, more = (_of_a_step(layers, fused, share) for layers in (1, 2))
    for name in fewer:
        more.remove(name)
    return more


def _of_a_step(layers: int, fused: bool, share: bool) -> list[str]:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", num_hidden_layers=layers, **SHAPE)
    model = Model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval(), "counted")
    seen: list[str] = []
    heads, dim = model.geometry.kv_heads, model.geometry.head_dim
    capacity = StepCapacity(64, ROWS, -(-CONTEXT // BLOCK), model.heads[0][0], heads, dim, 2)
    backend = TritonAttention(torch.device("cpu"), capacity, 64, Counted(seen))
    kv: Any = SimpleNamespace(
        data=torch.zeros((1, layers, 2, heads, BLOCK, dim), dtype=torch.bfloat16), block_size=BLOCK, geometry=model.geometry
    )
    batch = _decode(capacity.columns, share)
    batch.attention = backend.prepare(batch, kv)
    asked = {i: {"scaling": dim**-0.5, "window": 0} for i in range(layers)}
    run = FusedDecoder(model.module, asked, Counted(seen)).forward if fused else model.forward_transformers
    with torch.inference_mode(), Operators(seen):
        seen.clear()
        run(batch, kv, backend)
    return seen


def _decode(columns: int, share: bool) -> Any:
    """Make as much of a `Batch` as that takes: ROWS rows that decode, all of whose blocks but the last are the same if
    `share`."""
    own = np.arange(ROWS * columns, dtype=np.int32).reshape(ROWS, columns)
    table = np.concatenate([own[:1, :-1].repeat(ROWS, 0), own[:, -1:]], 1) if share else own
    return SimpleNamespace(
        input_ids=torch.zeros((1, ROWS), dtype=torch.int64), position_ids=torch.full((1, ROWS), CONTEXT - 1),
        num_tokens=ROWS, slots=torch.zeros(ROWS, dtype=torch.int64), query_starts=np.arange(ROWS + 1, dtype=np.int32),
        context_lens=np.full(ROWS, CONTEXT, np.int32), block_table=table, logits_at=torch.arange(ROWS), num_logits=ROWS,
        shared=np.array([[0, ROWS, columns - 1]] if share else np.zeros((0, 3)), np.int32), windowed=None,
    )  # fmt: skip
