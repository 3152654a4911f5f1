"""How attention's kernels are launched on a device: rows and keys of a tile, warps, stages, programs. Plain ints, no torch.

A tile's keys are copied into shared memory while those before them are computed with, so the room there decides. The first of
PREFERRED and KEYS that a device has room for is taken; where there is none, attention is refused when the model is loaded.
"""

from __future__ import annotations

from typing import NamedTuple

PROGRAM_BYTES = 1024
"""of shared memory that a program takes beside its own"""
REGISTERS_OF_A_THREAD = 256


class LaunchLimits(NamedTuple):
    """Of a device."""

    capability: int
    """10 · major + minor"""
    program_bytes: int
    """of shared memory that one program can have"""
    processor_bytes: int
    """of shared memory that a streaming multiprocessor has"""
    registers: int = 65536
    """of a streaming multiprocessor"""


KNOWN = {
    80: LaunchLimits(80, 163 << 10, 164 << 10),
    89: LaunchLimits(89, 99 << 10, 100 << 10),
    90: LaunchLimits(90, 227 << 10, 228 << 10),
    100: LaunchLimits(100, 227 << 10, 228 << 10),
    120: LaunchLimits(120, 99 << 10, 100 << 10),
}
"""A100 · L4, L40S, RTX 4090 · H100, H200 · B200 · RTX 5090, RTX PRO 6000: CUDA C++ Programming Guide, compute capabilities"""


class Launch(NamedTuple):
    """One kind of tiles."""

    rows: int
    """of a tile: tokens × query heads of one KV head"""
    keys: int
    """that a tile meets at once"""
    warps: int
    stages: int
    """of Triton's pipeline: it counts the block table, the addresses and the copies of K and V as one each, so that with fewer
    than 5 no copy is under way while products run"""
    shared_bytes: int
    """at most; what Triton takes is compared with it by a test that compiles"""
    programs: int
    """that a streaming multiprocessor holds at once; 0 = it has no room for one"""


class Launches(NamedTuple):
    small: Launch
    large: Launch


def tile_rows(group: int, dim: int, itemsize: int, capability: int) -> tuple[int, int]:
    """Rows of a small and of a large tile: powers of two that hold at least one token of `group` query heads. Tensor cores take
    16 rows and more, those of Hopper and of data center Blackwell 64 at once. Wider heads, and products in fp32, which do
    without tensor cores, leave registers for fewer."""
    least = 1 << (group - 1).bit_length()
    large = 16 if itemsize == 4 else 64 if capability in (90, 100, 103) and dim <= 128 else 32
    return max(16, least), max(large, least)


def choose(group: int, dim: int, itemsize: int, limits: LaunchLimits) -> Launches:
    """For `group` query heads of a KV head, and heads of `dim` numbers of `itemsize` bytes. Both kinds of tiles meet the same
    keys at once, so that a query's numbers do not depend on the kind. Raises ValueError where the device has room for none."""
    width = power_of_two(max(dim, 16))
    rows = tile_rows(group, width, itemsize, limits.capability)
    for programs, *stages in PREFERRED[itemsize]:
        for keys in FEWER.get((limits.capability, itemsize), KEYS[itemsize]):
            made = [_launch(each, keys, depth, width, itemsize, limits) for each, depth in zip(rows, stages, strict=True)]
            if made[0].programs >= programs and made[1].programs >= 1:
                return Launches(*made)
    least = max(each.shared_bytes for each in made)
    raise ValueError(
        f"attention with heads of {dim} numbers of {itemsize} bytes, {group} of them to a KV head, takes {least >> 10} KiB of "
        f"shared memory in a program, and this device (compute capability {limits.capability / 10}) gives it "
        f"{limits.program_bytes >> 10}"
    )


def with_codes(launches: Launches, dim: int, capability: int) -> Launches:
    """Those of the same tiles over KV in fp8: half the keys at once, since a thread holds codes beside numbers. They take less
    shared memory than `shared_bytes`. Where small tiles of heads of more than 128 numbers would spill still, on Blackwell, they
    have eight warps, and two programs take turns on a processor."""
    small, large = (each._replace(keys=max(16, each.keys // 2)) for each in launches)
    return Launches(small._replace(warps=8) if dim > 128 and capability >= 100 else small, large)


KEYS = {2: (64, 32, 16), 4: (32, 16)}
"""that a tile meets at once, by the bytes of a number"""
FEWER = {(89, 4): (16,)}
"""by compute capability, times 10, and the bytes of a number: fp32 with 32 keys spills 520 bytes of a thread on sm_89 alone"""
PREFERRED = {2: ((2, 5, 5), (1, 5, 5), (1, 5, 4), (1, 4, 4)), 4: ((2, 4, 4), (1, 4, 4))}
"""(programs of small tiles at once, stages of small and of large tiles), the best first, by the bytes of a number. In fp32 the
numbers of a step fill the registers: with more keys, or copies under way, thousands of bytes of a thread spill"""


def _launch(rows: int, keys: int, stages: int, width: int, itemsize: int, limits: LaunchLimits) -> Launch:
    warps = 4 if rows == 16 else 8
    asynchronous = limits.capability == 90 and rows >= 64 and itemsize == 2  # products of Hopper, which hold one copy longer
    copies = max(1, stages - 3 + asynchronous) * 2 * keys * width * itemsize
    needed = copies + rows * width * (itemsize + 4) + 1024  # the queries, and results that change hands between threads
    by_registers = limits.registers // (REGISTERS_OF_A_THREAD * 32 * warps)
    by_memory = limits.processor_bytes // (needed + PROGRAM_BYTES) if needed <= limits.program_bytes else 0
    return Launch(rows, keys, warps, stages, needed, min(by_registers, by_memory))


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
