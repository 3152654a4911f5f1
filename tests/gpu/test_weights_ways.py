"""Tensors that travel from GPU memory: CUDA IPC between two processes on one GPU, NCCL between two GPUs.

The trainer is a process of its own, since CUDA does not open memory in the process that exported it, nor NCCL a GPU twice:

    python -m tests.gpu.test_weights_ways VIA DEVICE     prints its Begin, frames in hex; stays until a line comes
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from rollout.client.refresh import WeightSender
from rollout.engine.cuda.digests import device_hashes
from rollout.engine.cuda.memory import CudaMemory
from rollout.engine.cuda.regions import open_driver
from rollout.engine.memory import HostMemory
from rollout.engine.values import Limits, TensorInfo, WeightUpdate
from rollout.engine.weights.device_staging import DeviceStaging
from rollout.engine.weights.live import Weights
from rollout.transport.errors import SourceUnreachable
from rollout.transport.frames import Decoder, pack
from rollout.transport.messages import Begin
from rollout.transport.weights import cuda_ipc
from rollout.transport.weights.capabilities import gpu_key
from rollout.transport.weights.ends import Payload
from rollout.transport.weights.manifest import pack_manifest, unpack_manifest
from rollout.transport.weights.receiving import capabilities, open_payload
from rollout.transport.weights.shm import SegmentView
from tests.bench.by_hand import release
from tests.support.weights import ON_DEVICE

ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda", 0)


Test = TypeVar("Test", bound=Callable[..., None])


def on_gpus(count: int) -> Callable[[Test], Test]:
    def mark(test: Test) -> Test:
        few = torch.cuda.device_count() < count
        skip = pytest.mark.skipif(few, reason=f"{torch.cuda.device_count()} CUDA devices, {count} wanted")
        marked: Test = pytest.mark.gpu(skip(test))
        return marked

    return mark


needs_nccl = pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch is built without NCCL")


def new_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """One as it was allocated, one in columns of another, one in the middle of a storage."""
    r = torch.Generator().manual_seed(7)
    return {
        "big": torch.randn(1500, 1000, generator=r).to(torch.bfloat16).to(device),
        "both": torch.randn(777, 5, generator=r).to(device)[:, 1:3].t(),
        "small": torch.randn(10, generator=r).to(device)[4:7],
    }


def trainer(via: Any, device: torch.device) -> None:
    pusher = WeightSender(SimpleNamespace(welcome=SimpleNamespace(capabilities=capabilities(device))))  # type: ignore[arg-type]
    sender = pusher._offer(new_tensors(device), via)
    print(
        *(bytes(frame).hex() for frame in pack(Begin(1, "0" * 32, pack_manifest(sender.manifest), sender.offer))),
        flush=True,
    )
    try:
        sender.after_commit(lambda: False, time.monotonic() + 60)
    except SourceUnreachable as error:
        print("the trainer's end:", error, file=sys.stderr)
    sys.stdin.readline()
    sender.close()


@contextmanager
def offered(via: str, theirs: str, ours: torch.device) -> Iterator[tuple[Payload, list[TensorInfo]]]:
    """A payload of a trainer on the device `theirs`, for a service on `ours`."""
    command = [sys.executable, "-m", "tests.gpu.test_weights_ways", via, theirs]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        frames = [bytes.fromhex(word) for word in child.stdout.readline().split()]
        begin = Decoder[Begin](Begin, Limits()).unpack(frames)
        total = sum(tensor.nbytes for tensor in new_tensors(torch.device("cpu")).values())
        manifest = unpack_manifest(begin.manifest, 10_000)
        payload = open_payload(begin.offer, manifest, total, SegmentView(), ours)
        try:
            assert payload.via == via
            yield payload, manifest
            assert child.poll() is None, "the trainer lives on"
        finally:
            payload.close()
    finally:
        try:
            child.communicate("go\n", timeout=60)
        finally:
            child.kill()


def refresh(payload: Payload, manifest: list[TensorInfo], device: torch.device, on_device: bool = False) -> None:
    """As the service does it: staged, in host memory or on the device, then exchanged."""
    module = torch.nn.Module()
    for name, tensor in new_tensors(device).items():
        module.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor, memory_format=torch.contiguous_format)))
    memory = HostMemory() if device.type == "cpu" else CudaMemory(device, device_hashes(device), open_driver(device))
    weights = Weights(module, ON_DEVICE, memory=memory)
    staging = weights.stage(WeightUpdate(manifest, on_device=on_device))
    assert isinstance(staging, DeviceStaging) == on_device
    end = time.monotonic() + 60
    while not staging.complete:
        assert time.monotonic() < end
        if not staging.feed(payload.read):
            time.sleep(0.001)
    weights.commit(staging)
    for name, tensor in new_tensors(torch.device("cpu")).items():
        assert torch.equal(module.get_parameter(name).detach().cpu(), tensor), name


def test_this_file_itself_without_a_gpu() -> None:
    with offered("gloo", "cpu", torch.device("cpu")) as (payload, manifest):
        refresh(payload, manifest, torch.device("cpu"))


@on_gpus(1)
@pytest.mark.parametrize("on_device", [True, False], ids=["on the device", "in host memory"])
def test_cuda_ipc_again_and_again_leaves_no_memory_open(on_device: bool) -> None:
    free = []
    for _ in range(3):
        with offered("cuda_ipc", "cuda:0", GPU) as (payload, manifest):
            refresh(payload, manifest, GPU, on_device)
        release(GPU)  # of what this process keeps for itself
        free.append(torch.cuda.mem_get_info(GPU)[0])
    assert max(free) - min(free) < 64 << 20


@on_gpus(1)
def test_gloo_from_a_gpu_to_a_gpu() -> None:
    with offered("gloo", "cuda:0", GPU) as (payload, manifest):
        refresh(payload, manifest, GPU)


@on_gpus(1)
def test_a_handle_that_is_none_is_typed() -> None:
    uuid = str(torch.cuda.get_device_properties(GPU).uuid)
    with pytest.raises(SourceUnreachable, match="cannot be opened"):
        cuda_ipc.open_memory(cuda_ipc.TrainerStorage(uuid, bytes(64), 1000, 0))
    with pytest.raises(SourceUnreachable, match="does not see the trainer's GPU"):
        cuda_ipc.open_memory(cuda_ipc.TrainerStorage("another", bytes(64), 1000, 0))
    assert torch.ones(3, device=GPU).sum().item() == 3, "the device still works"


@on_gpus(1)
def test_what_a_service_on_a_gpu_says() -> None:
    assert gpu_key(GPU) in capabilities(GPU)
    assert gpu_key(GPU) not in capabilities(torch.device("cpu"))


@needs_nccl
@on_gpus(2)
def test_nccl_between_two_gpus() -> None:
    with offered("nccl", "cuda:1", GPU) as (payload, manifest):
        refresh(payload, manifest, GPU, on_device=True)


@needs_nccl
@on_gpus(1)
def test_nccl_on_one_gpu_is_refused_and_the_process_lives() -> None:
    with offered("nccl", "cuda:0", GPU) as (payload, manifest), pytest.raises(SourceUnreachable):
        refresh(payload, manifest, GPU)
    assert torch.ones(3, device=GPU).sum().item() == 3


if __name__ == "__main__":
    trainer(sys.argv[1], torch.device(sys.argv[2]))
