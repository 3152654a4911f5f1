"""Devices of ranks: which one each has, and by what they exchange what layers compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout.engine.config import EngineConfig
from rollout.engine.cpu.sums import Exchange
from rollout.engine.cuda.reduce import DeviceExchange, check_apart, process_group
from rollout.engine.forward.summed import RankExchange


def device_of_rank(config: EngineConfig, local_rank: int, local_ranks: int, placed: bool) -> str:
    """Return the device of a rank: of CUDA's, the one of its number on its host.

    Args:
        local_rank: of the ranks of its host.
        placed: whether something else has started it, which may let it see one device alone.

    Raises ValueError if there are too few."""
    kind, _, number = config.device.partition(":")
    if kind == "cpu":
        return config.device
    if number:
        raise ValueError(
            f"device={config.device} with tp={config.tp}: each rank has a device of its own; set device=cuda, and "
            "CUDA_VISIBLE_DEVICES to choose among them"
        )
    count = torch.cuda.device_count()
    if placed and count == 1:
        return "cuda:0"
    if count < local_ranks:
        raise ValueError(f"tp={config.tp}: {local_ranks} ranks of this host and {count} CUDA devices; lower tp")
    return f"cuda:{local_rank}"


def exchanges_itself(config: EngineConfig) -> bool:
    """Return whether the devices of several ranks exchange what layers compute, and need torch's store to meet."""
    return torch.device(config.device).type != "cpu"


def exchange_on(device: torch.device, host: Exchange, store: Callable[[], Any]) -> RankExchange:
    """Return the exchange of what the layers compute on a device. host: of the same ranks, in host memory. store: returns
    torch's, which all ranks have. Raises ValueError if two ranks have one device; RankLost."""
    if device.type == "cpu":
        return host
    if not torch.distributed.is_nccl_available():
        raise ValueError(f"several ranks with device={device}: torch {torch.__version__} has no NCCL; install one that has")
    torch.cuda.set_device(device)  # NCCL takes the current one
    check_apart(host, str(torch.cuda.get_device_properties(device).uuid))
    return DeviceExchange(host, process_group(store(), host.rank, host.ranks, device))
