"""The CUDA path without a GPU: how evenly programs share the work, and what the compiler makes of each kernel for each known
architecture (nightly: `-m long`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.bench.inputs import lognormal  # noqa: E402
from rollout.engine.cuda import tiles  # noqa: E402
from rollout.engine.cuda.attention import parts_for  # noqa: E402
from rollout.engine.cuda.launches import KNOWN, PROGRAM_BYTES, LaunchLimits, choose, over_blocks  # noqa: E402
from rollout.engine.forward.attention import StepCapacity  # noqa: E402
from tests.support import cuda_compile  # noqa: E402

PROCESSORS = 132
OF_HEADS = cuda_compile.Heads._fields
MIXTURES = {
    "256 x 640": np.full(256, 640, np.int32),
    "256 x 2,048": np.full(256, 2048, np.int32),
    "200 x 640": np.full(200, 640, np.int32),
    "256 x lognormal, median 1k, max 8k": lognormal(256, 1000, 8192),
    "128 x lognormal, median 2k, max 16k": lognormal(128, 2000, 16384),
    "64 x uniform 1k-16k": np.random.default_rng(0).integers(1024, 16384, 64).astype(np.int32),
    "48 x lognormal, median 4k, max 16k": lognormal(48, 4000, 16384),
}
"""contexts of the rows of a decode step"""
MOST_INSTRUCTIONS = {False: 480, True: 760}
"""of a warp for 64 keys of Qwen3-8B's heads, KV in bf16 and in fp8, small tiles, in blocks of CUDA's default size"""
MOST_SPILLED = {"small": 48, "large": 64, "other": 64}
"""bytes of stack of a thread; of large tiles those of sums that are touched once in a chunk or in a span, not with each key"""


def cut(contexts: np.ndarray) -> tiles.Tiles:
    """Cut the tiles of a decode step with such contexts, for an H100 and Qwen3-8B's heads."""
    heads, rows = cuda_compile.PRODUCTION, len(contexts)
    launches = choose(heads.group, heads.dim, heads.itemsize, KNOWN[90])
    table = np.arange(rows * -(-int(contexts.max()) // 32), dtype=np.int32).reshape(rows, -1)
    small, large = (launch.rows // heads.group for launch in launches)
    groups = tuple(PROCESSORS * launch.programs // heads.kv_heads for launch in launches)
    return tiles.cut(
        np.arange(rows + 1, dtype=np.int32), contexts, table, False, block_size=32, sizes=(small, large), groups=groups,
        max_parts=1 << 15,
    )  # fmt: skip


def in_turn(contexts: np.ndarray) -> float:
    """Return the balance of whole rows that programs take in turn, the longest first: what `tiles.deal` is compared with."""
    heads, programs = cuda_compile.PRODUCTION.kv_heads, 2 * PROCESSORS
    whole = np.sort(-(-contexts // tiles.STEP_KEYS))[::-1].repeat(heads)
    return tiles.balance([np.array([whole[first::programs].sum() for first in range(programs)])])


@pytest.mark.parametrize("name", MIXTURES)
def test_programs_have_nearly_the_same_work(name: str) -> None:
    contexts = MIXTURES[name]
    ours, whole_rows = tiles.balance(cut(contexts).loads), in_turn(contexts)
    print(f"{name}: {ours:.3f}, whole rows in turn {whole_rows:.3f}")
    assert ours >= 0.95
    if "x lognormal" in name or "uniform" in name:
        assert whole_rows < 0.8, "the control is balanced as well"


def held(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        limits, kind = KNOWN[row["capability"]], row.get("tile", "other")
        print(f"sm_{limits.capability} {row}")
        assert row["spill_bytes"] <= MOST_SPILLED[kind], row
        if kind != "other":
            assert row["shared_bytes"] <= row["shared_estimate"] <= limits.program_bytes
            assert row["programs"] * (row["shared_bytes"] + PROGRAM_BYTES) <= limits.processor_bytes
            if (
                row["block"] == 64
                and kind == "small"
                and cuda_compile.Heads(*(row[name] for name in OF_HEADS)) in cuda_compile.SHORT
            ):
                if limits.capability in (90, 100):
                    assert row["turn_instructions"] * 64 <= MOST_INSTRUCTIONS[row["fp8"]] * row["keys"]
            if row["itemsize"] == 2:
                assert row["copies_ahead"] > 0 or row["stages"] < 5, "every copy is waited for before products run"
                assert row["products"] > 0


@pytest.mark.long
@pytest.mark.parametrize("architecture", KNOWN)
def test_kernels_fit_as_they_are_launched(architecture: int) -> None:
    """By Triton's own assembler, with what `choose` says for the device: on tensor cores, copies ahead, next to no spills."""
    rows = cuda_compile.in_a_process(architecture, 280)
    held(rows)
    assert {row["capability"] for row in rows if row["kernel"] == "attend"} == {architecture}
    sums_in_one_order(rows)
    slices_in_one_order(rows)


def sums_in_one_order(rows: list[dict[str, Any]]) -> None:
    """Norms of an exact trainer are those of fused layers: with a sum of the residual before or not, and in blocks of any size.
    The negative control has other warps."""
    of_norms = [row for row in rows if row["kernel"] == "add_norm"]
    same = [row["sum_layouts"] for row in of_norms if row["warps"] == 8]
    assert len(same) == 2 and same[0] == same[1] != []
    assert [row["sum_layouts"] for row in of_norms if row["warps"] == 4] != same[:1]
    of_heads = [row["sum_layouts"] for row in rows if row["kernel"] == "rope_store" and not row["fp8"]]
    assert len(of_heads) == 2 and of_heads[0] == of_heads[1] != []


def slices_in_one_order(rows: list[dict[str, Any]]) -> None:
    """The sum of a slice does not depend on how many of them a rank has, though each number is compiled by itself. The control
    has another tile."""
    found: dict[tuple[Any, ...], dict[int, list[str]]] = {}
    for row in rows:
        if row["kernel"] in ("product", "grouped"):
            of = tuple(row.get(name) for name in ("kernel", "itemsize", "near", "numbers"))
            found.setdefault(of, {})[row["slices"]] = row["product_layouts"]
    several = [list(each.values()) for each in found.values() if len(each) > 1]
    assert len(several) == 6 and all(each[0] and each[0] == other for each in several for other in each)
    assert len({str(each[1]) for (kernel, itemsize, *_), each in found.items() if (kernel, itemsize) == ("product", 2)}) > 1


def chunks_read(rows: int, prefix: int, own: int, max_parts: int) -> int:
    """By the tiles of a decode step of rows over a prefix in common."""
    common, blocks = prefix // 32, -(-(prefix + own) // 32)
    table = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    table[:, :common] = np.arange(common)
    made = tiles.cut(
        np.arange(rows + 1, dtype=np.int32), np.full(rows, prefix + own, np.int32), table, True, block_size=32, sizes=(4, 16),
        groups=(33, 16), max_parts=max_parts,
    )  # fmt: skip
    return int(sum((kind[:, 4] - kind[:, 3]).sum() for kind in (made.small, made.large)))


@pytest.mark.parametrize("prefix", [1024, 4096, 8192, 16384])
def test_long_prefixes_are_shared_by_all_rows(prefix: int) -> None:
    """With an H200's memory for partial results; as many as a CPU's pool has end the sharing: the control."""
    capacity = StepCapacity(8192, 256, 1280, 32, 8, 128, 2)
    ideal = 256 // 16 * prefix // 256 + 256 * 2
    assert chunks_read(256, prefix, 512, parts_for(139 << 30, capacity)) == ideal
    if prefix >= 8192:
        assert chunks_read(256, prefix, 512, parts_for(0, capacity)) > 1.4 * ideal


@pytest.mark.parametrize("architecture", KNOWN)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [24, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_every_known_device_has_room(group: int, dim: int, itemsize: int, architecture: int) -> None:
    if dim == 512 and itemsize == 4 and architecture in (89, 120):
        with pytest.raises(ValueError, match="heads of 512 numbers of 4 bytes"):
            choose(group, dim, itemsize, KNOWN[architecture])
        return
    small, large = choose(group, dim, itemsize, KNOWN[architecture])
    assert small.keys == large.keys, "a query's numbers would depend on the kind of its tile"
    for launch in (small, large):
        assert launch.programs >= 1 and launch.rows >= group and launch.shared_bytes <= KNOWN[architecture].program_bytes


@pytest.mark.parametrize("architecture", KNOWN)
def test_blocks_of_part_of_a_turn_leave_registers(architecture: int) -> None:
    """Only on data-center Blackwell, for large tiles of wide heads: fewer stages. All else, and every number, stays."""
    for dim, block in ((128, 64), (128, 32), (64, 32)):
        small, large = chosen = choose(4, dim, 2, KNOWN[architecture])
        crowded = (architecture, dim, block) == (100, 128, 32)
        assert over_blocks(chosen, block, dim, architecture) == (small, large._replace(stages=4) if crowded else large)


def test_a_device_without_room_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"heads of 512 numbers of 4 bytes.*KiB of shared memory.*compute capability 7\.5"):
        choose(8, 512, 4, LaunchLimits(75, 32 << 10, 64 << 10))
