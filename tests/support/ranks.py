"""Ranks of a replica as threads of this process: the same code as in processes, without their start."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.forward.random_weights import blank
from rollout.engine.parallel.follower import follow
from rollout.engine.parallel.leader import Followers
from rollout.engine.parallel.messages import Failed, Order, RankChannel, Reply, Start
from rollout.engine.types import Sample
from tests.support.configs import engine_config
from tests.support.tiny import tiny


class ThreadFollowers(Followers):
    """The other ranks, each a thread."""

    def start(self, order: Start) -> RankChannel:
        ours, theirs = socket.socketpair()
        of_its_own = Start(order.config, order.rank, order.width, os.dup(order.shared_fd), os.dup(order.staged_fd))
        channel = RankChannel(ours, Reply)
        threading.Thread(target=self._follow, args=(RankChannel(theirs, Order),), daemon=True).start()
        channel.send(of_its_own)
        return channel

    @property
    def pids(self) -> list[int]:
        return [os.getpid()] * len(self.channels)

    def status_of(self, rank: int) -> str:
        return "a thread"

    def _follow(self, channel: RankChannel) -> None:
        try:
            follow(channel)
        except Exception as error:
            with suppress(OSError):
                channel.send(Failed(f"{type(error).__name__}: {error}"))
        finally:
            channel.close()


class Turns:
    """Lets threads make modules one after the other, while none does anything else: torch's default dtype and transformers'
    initialisation are those of the process meanwhile."""

    def __init__(self, threads: int) -> None:
        self._all, self._one = threading.Barrier(threads, timeout=60), threading.Lock()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._all.wait()
        with self._one:
            module = blank(*args, **options)
        self._all.wait()
        return module


@contextmanager
def ranks_in_threads() -> Iterator[None]:
    """Let engines that are made in the block run their ranks in threads."""

    def made(config: EngineConfig, width: int) -> ThreadFollowers:
        turns = Turns(config.tp)
        patch.setattr("rollout.engine.forward.shards.blank", turns)
        return ThreadFollowers(config, width)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout.engine.parallel.leader.Followers", made)
        yield


LINEAR = ["linear_attention", "linear_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
DELTA_NET = {
    "num_hidden_layers": 3, "layer_types": LINEAR, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 24, "linear_value_head_dim": 32, "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
SHAPES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen3_moe": {**EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "mixtral": {},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA_NET},
    "qwen3_next": {**EXPERTS, **DELTA_NET, "mlp_only_layers": [1]},
    "lfm2": {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "hidden_size": 128,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        **EXPERTS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "hidden_size": 128,
        "num_dense_layers": 1,
    },
}  # fmt: skip
"""tiny models that four ranks can share, most of whose layers the native decoder runs; some mixtures have dense layers, too"""


def tiny_shared(name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Make a tiny model of SHAPES."""
    head_dim = {} if name.startswith("lfm2") else {"head_dim": 32}
    return tiny(name, dtype, seed, **{**head_dim, **SHAPES[name]})


def saved(folder: Path, dtype: str, name: str = "llama") -> str:
    """Save a tiny model of SHAPES."""
    tiny_shared(name, getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


def ranked_engine(folder: str, tp: int, dtype: str, **options: object) -> Engine:
    """Make an engine whose pools are small; its samples are those of all numbers of ranks."""
    small = {
        "block_size": 8,
        "kv_tokens": 256,
        "max_num_seqs": 12,
        "max_batch_tokens": 64,
        "cpu_offload_gib": 0.001,
        "drafts": 0,
    }
    return Engine(engine_config(model=folder, dtype=dtype, tp=tp, threads=1, **({"tree_sums": True} | small | options)))


def bits(samples: dict[tuple[str, int], Sample]) -> dict[tuple[str, int], tuple[object, ...]]:
    """Return what must be equal of samples."""
    return {
        key: (each.token_ids.tobytes(), each.logprobs.tobytes(), tuple(each.weight_versions), each.finish_reason, each.error)
        for key, each in samples.items()
    }
