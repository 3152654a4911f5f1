"""xxh3-128 of tensors on a GPU: the same digests as xxhash computes of the same bytes on a CPU.

    data     │ block 0 │ block 1 │ … │ rest │      blocks of 1 KiB = 16 stripes of 8 lanes, 64 bits each
    sums     │ 8 lanes │ 8 lanes │ … │             `sum_blocks`: all blocks in parallel, at memory bandwidth
    states   ● ──────→ ● ──────→ … ●               `chain`: lanes + sums, scrambled after each block, sequentially
    host     the rest (at most 1 KiB), the last stripe, the merge of the lanes

The chain of a tensor is sequential, but it reads a sixteenth of the bytes, and the chains of all tensors of a batch run in
parallel. Specification of xxh3: github.com/Cyan4973/xxHash, doc/xxhash_spec.md. Data of at most 240 bytes uses another
algorithm; it is copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xxhash

from rollout.engine.cuda.memory import to_device, to_host

BLOCK = 1024
STRIPE = 64
SHORT = 240
"""bytes up to which xxh3 uses another algorithm"""
TAIL = BLOCK + STRIPE
"""bytes of the end of the data that the host needs: the rest, and the bytes that the last stripe shares with earlier blocks"""
BATCH_BYTES = 512 << 20
"""bytes whose sums are stored at the same time; the sums take a sixteenth of that"""
SLICE_BYTES = 64 << 20
BLOCKS = 16
"""per program"""
UNROLL = 32
MASK = (1 << 64) - 1
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a"
    "51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8f"
    "f8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""xxh3's default secret, 192 bytes"""
PRIMES_32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIMES_64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
START = np.array([PRIMES_32[2], *PRIMES_64[:4], PRIMES_32[1], PRIMES_64[4], PRIMES_32[0]], np.uint64)
"""[8] lanes before the first block"""


class DeviceHashes:
    """Digests (`rollout.engine.memory.Hashes`) of `rows` pieces of data on `device`, each updated slice by slice on the current
    stream.

    Example:
        hashes = DeviceHashes(2, device)
        hashes.update(0, first_half, last=False); hashes.update(0, second_half, last=True); hashes.update(1, other, last=True)
        digests = hashes.read()()
    """

    def __init__(self, rows: int, device: torch.device, batch_bytes: int = BATCH_BYTES) -> None:
        from rollout.engine.cuda import digest_kernels

        self._kernels = digest_kernels
        self._device = device
        self._lengths = [0] * rows
        self._secret = to_device([np.frombuffer(SECRET, np.int64)], device)[0]
        self._states = to_device([np.tile(START, rows).view(np.int64)], device)[0]
        self._tails = torch.zeros((rows, TAIL), dtype=torch.uint8, device=device)
        """last bytes of each row, right-aligned"""
        self._most = batch_bytes // BLOCK
        self._sums = torch.empty((self._most, 8), dtype=torch.int64, device=device)
        self._pieces: list[tuple[int, int, int]] = []
        """(first sum, blocks, row) for the next chain"""
        self._taken = 0
        """number of sums in use"""

    def cuts(self, size: int) -> Iterator[tuple[int, int]]:
        """Cut `size` bytes into (begin, end) slices for `update`, of SLICE_BYTES and at most one block more."""
        begin = 0
        while size - begin > SLICE_BYTES + BLOCK:
            yield begin, begin + SLICE_BYTES
            begin += SLICE_BYTES
        yield begin, size

    def add(self, row: int, data: torch.Tensor) -> None:
        """Add the whole data of a row."""
        for begin, end in self.cuts(len(data)):
            self.update(row, data[begin:end], end == len(data))

    def update(self, row: int, data: torch.Tensor, last: bool) -> None:
        """Add [bytes] uint8 on the device to a row. Every slice but the last consists of whole blocks; a last slice that is not
        the first has at least one stripe. The data may change once the stream has run this."""
        assert last or len(data) % BLOCK == 0
        assert not last or not self._lengths[row] or len(data) >= STRIPE
        self._lengths[row] += len(data)
        blocks = max(0, len(data) - 1) // BLOCK if last else len(data) // BLOCK
        if last and len(data):
            rest = data[max(0, blocks * BLOCK - STRIPE) :]
            self._tails[row, TAIL - len(rest) :] = rest
        for begin, end in pairwise([*range(0, blocks, self._most), blocks]):
            self._sum(row, data[begin * BLOCK : end * BLOCK], end - begin)

    def _sum(self, row: int, data: torch.Tensor, blocks: int) -> None:
        if self._taken + blocks > self._most or any(piece[2] == row for piece in self._pieces[:-1]):
            self._chain()  # two pieces of a row in one chain would run in parallel
        if data.data_ptr() % 8:
            data = data.clone()
        sums = self._sums[self._taken :]
        self._kernels.sum_blocks[(-(-blocks // BLOCKS),)](data.view(torch.int64), self._secret, sums, blocks, BLOCKS=BLOCKS)
        first, before = self._taken, 0
        if self._pieces and self._pieces[-1][2] == row:
            first, before, _ = self._pieces.pop()
        self._pieces.append((first, before + blocks, row))
        self._taken += blocks

    def _chain(self) -> None:
        if self._pieces:
            pieces = to_device([np.array(self._pieces, np.int64).ravel()], self._device)[0]
            self._kernels.chain[(len(self._pieces),)](
                self._sums, self._secret, pieces, self._states, UNROLL=UNROLL, num_warps=1
            )
        self._pieces, self._taken = [], 0

    def read(self) -> Callable[[], list[str]]:
        """Start copying the states to the host. Returns a function that waits for them and returns the digests (hex) of all
        rows."""
        self._chain()
        states, tails = to_host(self._states), to_host(self._tails)

        def digests() -> list[str]:
            lanes, ends = states().view(np.uint64).reshape(-1, 8), tails()
            return [_digest(*each) for each in zip(lanes, ends, self._lengths, strict=True)]

        return digests


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


def device_hashes(device: torch.device) -> Callable[[int], DeviceHashes] | None:
    """Return what makes `DeviceHashes` of a number of rows on a device; None without Triton."""
    return partial(DeviceHashes, device=device) if has_triton() else None


def digests_of(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the digests of [bytes] uint8 tensors on GPUs, computed there. Raises ImportError without Triton."""
    found: dict[int, str] = {}
    for device in {each.device for each in tensors}:
        rows = [i for i, each in enumerate(tensors) if each.device == device]
        with on_device(device):
            hashes = DeviceHashes(len(rows), device, _batch(sum(tensors[i].nbytes for i in rows)))
            for row, i in enumerate(rows):
                hashes.add(row, tensors[i])
            found |= dict(zip(rows, hashes.read()(), strict=True))
    return [found[i] for i in range(len(tensors))]


def on_device(device: torch.device) -> Any:
    """Return a context manager that makes a CUDA device the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.device(device)


def _batch(size: int) -> int:
    return min(BATCH_BYTES, max(BLOCK, size))


def _digest(lanes: np.ndarray, end: np.ndarray, length: int) -> str:
    """Finish a digest on the host. lanes: [8] uint64 after all blocks but the last; end: [TAIL] uint8, the last bytes of the
    data at its end."""
    if length <= SHORT:
        return xxhash.xxh3_128_hexdigest(end[TAIL - length :].data)
    lanes, rest = lanes.copy(), (length - 1) % BLOCK + 1
    for i in range((rest - 1) // STRIPE):
        at = TAIL - rest + i * STRIPE
        _add(lanes, end[at : at + STRIPE], 8 * i)
    _add(lanes, end[-STRIPE:], len(SECRET) - STRIPE - 7)
    low = _merge(lanes, 11, length * PRIMES_64[0])
    high = _merge(lanes, len(SECRET) - STRIPE - 11, ~(length * PRIMES_64[1]))
    return f"{high:016x}{low:016x}"


def _add(lanes: np.ndarray, stripe: np.ndarray, at: int) -> None:
    """Add a stripe, [64] uint8, with the secret from byte `at` on."""
    words = np.frombuffer(stripe.tobytes(), np.uint64)
    keyed = words ^ _secret(at, 8)
    lanes += (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32)) + words.reshape(4, 2)[:, ::-1].ravel()


def _merge(lanes: np.ndarray, at: int, start: int) -> int:
    folded = start
    for one, other in (lanes ^ _secret(at, 8)).reshape(4, 2).tolist():
        folded += (product := one * other) & MASK ^ product >> 64
    folded &= MASK
    folded ^= folded >> 37
    folded = folded * 0x165667919E3779F9 & MASK
    return folded ^ folded >> 32


@cache
def _secret(at: int, words: int) -> np.ndarray:
    return np.frombuffer(SECRET[at : at + 8 * words], np.uint64)
