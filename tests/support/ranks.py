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
from torch._C._distributed_c10d import HashStore
from transformers import PreTrainedModel

from rollout.engine.config import EngineConfig
from rollout.engine.cpu import select_path
from rollout.engine.engine import Engine
from rollout.engine.forward.random_weights import blank
from rollout.engine.parallel.follower import Placed, follow
from rollout.engine.parallel.followers import Followers, PlacedFollowers, RankProcess
from rollout.engine.parallel.messages import Failed, Order, RankChannel, Reply
from rollout.engine.parallel.placement import RankPosition, connect
from rollout.engine.values import Sample
from tests.support.configs import engine_config
from tests.support.tiny import tiny


class ThreadFollowers(Followers):
    """The other ranks, each a thread."""

    def start(self, rank: int) -> RankChannel:
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._follow, args=(RankChannel(theirs, Order),), daemon=True).start()
        return RankChannel(ours, Reply)

    @property
    def processes_of_ranks(self) -> list[RankProcess]:
        return [RankProcess("here", os.getpid())] * len(self.channels)

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


class FollowersOnHosts(PlacedFollowers):
    """The other ranks, each a thread, as if it were on a host of its own: nothing is in memory that they share."""

    def __init__(self, config: EngineConfig, width: int) -> None:
        self.store = HashStore()
        for rank in range(1, config.tp):
            placed = Placed(self.position(rank, config.tp), self.store, config.model)
            threading.Thread(target=self._follow, args=(placed,), daemon=True).start()
        super().__init__(config, width, self.position(0, config.tp))

    def position(self, rank: int, ranks: int) -> RankPosition:
        """Make the position of a rank, which has the store of all."""

        class Position(RankPosition):
            open_store = lambda _: self.store  # noqa: E731

        return Position(rank, ranks, 1, ("127.0.0.1", 9))

    def _follow(self, placed: Placed) -> None:
        channel = RankChannel(connect(placed.position, self.store), Order)
        try:
            follow(channel, placed=placed)
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
def ranks_in_threads(hosts: bool = False) -> Iterator[None]:
    """Let engines that are made in the block run their ranks in threads. hosts: as if each were on a host of its own."""

    def made(config: EngineConfig, width: int) -> Followers:
        turns = Turns(config.tp)
        patch.setattr("rollout.engine.forward.shards.blank", turns)
        return FollowersOnHosts(config, width) if hosts else ThreadFollowers(config, width)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout.engine.parallel.leader.Followers", made)
        patch.setattr("rollout.engine.cpu.device.decide", select_path.decide)  # in step: none leaves out what another computes
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
