"""The parts of `rollout.bench.gpu`: each takes a `Bench` and yields rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers

from rollout.bench.gpu_bench import Bench, Rows
from rollout.bench.gpu_memory import ipc, naps
from rollout.bench.gpu_runs import offload, workloads
from rollout.bench.gpu_steps import decode, exact, prefill, sharing
from rollout.bench.gpu_weights import refresh, weights


def machine(bench: Bench) -> Rows:
    """Describe the machine and the model: what everything else is compared with."""
    cuda = bench.device.type == "cuda"
    yield {
        "device": torch.cuda.get_device_name(bench.device) if cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": bench.dtype,
        "weight_bytes": sum(parameter.nbytes for parameter in bench.module.parameters()),
        "kv_dtype": bench.kv_dtype,
        "kv_bytes_per_token": bench.kv_bytes(1),
        **bench.rates,
    }


PARTS: dict[str, Callable[[Bench], Rows]] = {
    part.__name__: part for part in (machine, decode, prefill, exact, sharing, offload, weights, refresh, ipc, naps, workloads)
}
