"""Both ends of CUDA IPC without a GPU: a handle is a name under which bytes lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollout.engine.values import TensorInfo
from rollout.transport.errors import SourceUnreachable
from rollout.transport.weights.cuda_ipc import CudaIpcOffer, CudaIpcPayload, TrainerStorage

BOTH = torch.arange(6000, dtype=torch.float32)
"""one storage with two tensors"""

TENSORS = {
    "second": BOTH[1000:6000].view(50, 100),
    "alone": torch.randn(999).to(torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "first": BOTH[:1000],
    "scalar": torch.tensor(2.5, dtype=torch.float64),
}

WHOLE = b"".join(t.view(-1).view(torch.uint8).numpy().tobytes() for t in TENSORS.values())

MANIFEST = [TensorInfo(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), "") for name, t in TENSORS.items()]


class FakeGPU:
    """Exports storages, opens what was exported, and keeps a list of both. `live`: what is opened is the trainer's memory,
    no copy of it, and is kept."""

    def __init__(self, live: bool = False) -> None:
        self.live = live
        self.storages: dict[bytes, Any] = {}
        self.opened: list[bytes] = []
        self.refuse: bytes | None = None

    def export(self, storage: torch.UntypedStorage) -> TrainerStorage:
        handle = f"handle {len(self.storages)}".encode()
        view = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        self.storages[handle] = view.numpy() if self.live else np.array(view.tolist(), np.uint8)
        return TrainerStorage("GPU-1", handle, storage.nbytes(), 0)

    def open(self, memory: TrainerStorage) -> np.ndarray:
        self.opened.append(memory.handle)
        if self.refuse in (memory.handle, b"all"):
            raise SourceUnreachable("the trainer's CUDA memory cannot be opened here: invalid argument")
        whole: np.ndarray = self.storages[memory.handle][: memory.size]
        return whole

    def copy(self, memory: Any, data: np.ndarray) -> None:
        assert len(memory) == len(data), "nothing is read past the end of a storage"
        memory[:] = data if isinstance(memory, np.ndarray) else torch.from_numpy(data)

    def payload(self, offer: CudaIpcOffer, manifest: list[TensorInfo] = MANIFEST, total: int = len(WHOLE)) -> CudaIpcPayload:
        return CudaIpcPayload(offer, manifest, total, self.open, self.copy)
