"""What two ends need to have in common for a weight transport: the service lists it in Welcome, the trainer compares."""

from __future__ import annotations

from typing import Any

from rollout.transport.weights.offers import Backend


def gpu_key(device: Any) -> str:
    """Return the key that two ends that see this CUDA device have in common."""
    import torch

    return f"cuda_ipc:{torch.cuda.get_device_properties(device).uuid}"


def gpu_keys() -> list[str]:
    """Return `gpu_key` of every GPU that this process sees."""
    import torch

    return [gpu_key(index) for index in range(torch.cuda.device_count())]


def backends(device: Any) -> list[Backend]:
    """List the backends that a process with its model on `device` (torch.device) can use."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    gloo, nccl = dist.is_gloo_available(), device.type == "cuda" and dist.is_nccl_available()
    return [*(["gloo"] if gloo else []), *(["nccl"] if nccl else [])]  # type: ignore[list-item]
