"""Launch parameters of the attention kernels on a device: rows and keys of a tile, warps, stages, programs. Integers only, no
torch.

The keys of a tile are copied into shared memory while the previous ones are used, so its size decides. The first entry of
PREFERRED and KEYS for which a device has room is used; if there is none, attention is rejected when the model is loaded.
"""

from __future__ import annotations

from typing import NamedTuple

PROGRAM_BYTES = 1024
"""shared memory that CUDA reserves per program"""
REGISTERS_OF_A_THREAD = 256


class LaunchLimits(NamedTuple):
    """Limits of a device."""

    capability: int
    """10 · major + minor"""
    program_bytes: int
    """shared memory of one program"""
    processor_bytes: int
    """shared memory of a streaming multiprocessor"""
    registers: int = 65536
    """registers of a streaming multiprocessor"""


KNOWN = {
    80: LaunchLimits(80, 163 << 10, 164 << 10),
    89: LaunchLimits(89, 99 << 10, 100 << 10),
    90: LaunchLimits(90, 227 << 10, 228 << 10),
    100: LaunchLimits(100, 227 << 10, 228 << 10),
    120: LaunchLimits(120, 99 << 10, 100 << 10),
}
"""A100 · L4, L40S, RTX 4090 · H100, H200 · B200 · RTX 5090, RTX PRO 6000: CUDA C++ Programming Guide, compute capabilities"""


class Launch(NamedTuple):
    """Launch parameters for one kind of tile."""

    rows: int
    """rows of a tile: tokens × query heads of one KV head"""
    keys: int
    """keys that a tile processes at a time"""
    warps: int
    stages: int
    """stages of Triton's pipeline: the block table, the addresses and the copies of K and V count as one each, so with fewer
    than 5 no copy overlaps with the products"""
    shared_bytes: int
    """upper bound; a test that compiles compares it with Triton's actual use"""
    programs: int
    """programs that a streaming multiprocessor runs at a time; 0 = it has no room for one"""


class Launches(NamedTuple):
    small: Launch
    large: Launch


def tile_rows(group: int, dim: int, itemsize: int, capability: int) -> tuple[int, int]:
    """Return the rows of a small and of a large tile: powers of two that hold at least one token of `group` query heads. Tensor
    cores need at least 16 rows, those of Hopper and data-center Blackwell 64. Wider heads, and fp32 products, which do not use
    tensor cores, leave registers for fewer rows."""
    least = 1 << (group - 1).bit_length()
    large = 16 if itemsize == 4 or dim > 256 else 64 if capability in (90, 100, 103) and dim <= 128 else 32
    return max(16, least), max(large, least)


def choose(group: int, dim: int, itemsize: int, limits: LaunchLimits) -> Launches:
    """Return the launches for `group` query heads per KV head and heads of `dim` numbers of `itemsize` bytes. Both kinds of
    tile process the same keys at a time, so that a query's numbers do not depend on the kind. Raises ValueError if the device
    has too little shared memory."""
    width = power_of_two(max(dim, 16))
    rows = tile_rows(group, width, itemsize, limits.capability)
    for programs, *stages in PREFERRED[itemsize]:
        for keys in FEWER.get((limits.capability, itemsize), KEYS[itemsize]):
            made = [_launch(each, keys, depth, width, itemsize, limits) for each, depth in zip(rows, stages, strict=True)]
            if made[0].programs >= programs and made[1].programs >= 1:
                return Launches(*made)
    least = max(each.shared_bytes for each in made)
    raise ValueError(
        f"attention with heads of {dim} numbers of {itemsize} bytes, {group} per KV head, needs {least >> 10} KiB of shared "
        f"memory per program, but this device (compute capability {limits.capability / 10}) has {limits.program_bytes >> 10}"
    )


def with_codes(launches: Launches, dim: int) -> Launches:
    """Return the launches over KV in fp8, with the same keys at a time. They use less shared memory than `shared_bytes`. Large
    tiles have fewer rows where codes and numbers would not fit into the registers of a thread."""
    small, large = launches
    if dim > 128:
        return Launches(small, small)
    return Launches(small, large._replace(rows=32, warps=8) if large.rows == 64 and small.rows <= 32 else large)


def over_blocks(launches: Launches, block: int, dim: int, capability: int) -> Launches:
    """Return the launches over blocks of `block` tokens: results are the same, and they use less shared memory than
    `shared_bytes`. If a turn of the loop reads several blocks, each key has an address of its own. Data-center Blackwell has no
    registers left for these beside a large tile of heads of more than 64 numbers and five stages: with four, one copy is under
    way in place of five."""
    small, large = launches
    crowded = capability in (100, 103) and large.rows >= 64 and block < large.keys and dim > 64
    return Launches(small, large._replace(stages=min(large.stages, 4))) if crowded else launches


KEYS = {2: (64, 32, 16), 4: (32, 16)}
"""keys that a tile processes at a time, by element size in bytes"""
FEWER = {(89, 4): (16,)}
"""by compute capability, times 10, and element size: fp32 with 32 keys spills 520 bytes per thread on sm_89 only"""
PREFERRED = {2: ((2, 5, 5), (1, 5, 5), (1, 5, 4), (1, 4, 4)), 4: ((2, 4, 4), (1, 4, 4))}
"""(programs of small tiles at a time, stages of small and of large tiles), best first, by element size in bytes. In fp32 the
numbers of a step fill the registers: with more keys, or copies in flight, thousands of bytes per thread spill"""


def _launch(rows: int, keys: int, stages: int, width: int, itemsize: int, limits: LaunchLimits) -> Launch:
    warps = 4 if rows == 16 and width <= 256 else 8
    asynchronous = (
        limits.capability == 90 and rows >= 64 and itemsize == 2
    )  # Hopper's asynchronous products keep one copy longer
    copies = max(1, stages - 3 + asynchronous) * 2 * keys * width * itemsize
    needed = copies + rows * width * (itemsize + 4) + 1024  # queries, and results exchanged between threads
    by_registers = limits.registers // (REGISTERS_OF_A_THREAD * 32 * warps)
    by_memory = limits.processor_bytes // (needed + PROGRAM_BYTES) if needed <= limits.program_bytes else 0
    return Launch(rows, keys, warps, stages, needed, min(by_registers, by_memory))


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
