"""The Triton backend: in Triton's interpreter where there is no GPU, compiled where there is one.

Right against double precision, the same to the bit in every company, deaf to unwritten memory. Chunks are small here, so that
short contexts have many.
"""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.build import choose_backend  # noqa: E402
from rollout.engine.config import EngineConfig  # noqa: E402
from rollout.engine.cpu.device import CpuDevice  # noqa: E402
from rollout.engine.cuda import attention_kernels, tiles  # noqa: E402
from rollout.engine.cuda.attention import StepCapacity, TritonAttention, TritonUnavailable  # noqa: E402
from rollout.engine.cuda.launches import LaunchLimits  # noqa: E402
from rollout.engine.forward.attention import Scores  # noqa: E402
from rollout.engine.forward.reference import ReferenceAttention  # noqa: E402
from rollout.engine.kv import fp8  # noqa: E402
from tests.support import paged, production  # noqa: E402
from tests.support.paged import (  # noqa: E402
    FP32,
    Row,
    Shape,
    Tokens,
    assert_close,
    geometry,
    oracle,
    pool,
    same_bits,
    step_arrays,
    text,
    tokens,
    whole,
)  # fmt: skip

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = 2**-8 if DEVICE.type == "cuda" else 2**-7
"""of bf16: the interpreter cuts bits off"""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(tiles, "SPAN_CHUNKS", 2)


def pool_in_fp8(shape: Shape, blocks: int) -> torch.Tensor:
    """Full of bytes that are NaN."""
    size = geometry(shape, True).block_shape(shape.block_size)
    return torch.full((blocks, *size), 0xFF, dtype=torch.uint8, device=DEVICE)


def backend(shape: Shape, programs: int = 6) -> TritonAttention:
    capacity = StepCapacity(512, 16, 64, shape.q_heads, shape.kv_heads, shape.dim, shape.dtype.itemsize, shape.value_dim)
    return TritonAttention(DEVICE, capacity, programs)


attend = partial(paged.attend, device=DEVICE)


SHAPES = [
    Shape(q_heads=3, kv_heads=1, dim=24, block_size=4),
    Shape(q_heads=2, kv_heads=1, dim=16, window=23, dtype=FP32),
    Shape(q_heads=3, kv_heads=1, dim=24, block_size=4, window=23, dtype=FP32, value_dim=12, softcap=2.0, sinks=True),
]
"""an odd group and odd heads in bf16, a window in fp32, and all that scores may ask for"""
MORE = [
    Shape(q_heads=4, dim=32),
    Shape(q_heads=9, kv_heads=3, block_size=32, dtype=FP32),
    Shape(q_heads=2, dim=80, block_size=8),
    Shape(q_heads=20, kv_heads=1, dim=16, dtype=FP32),
    Shape(q_heads=2, kv_heads=1, block_size=48),
    Shape(q_heads=2, kv_heads=1, dim=16, window=1),
    Shape(q_heads=2, kv_heads=1, dim=16, window=500),
    Shape(q_heads=2, kv_heads=1, dim=48, block_size=8, value_dim=32),
    Shape(q_heads=6, kv_heads=3, dim=24, block_size=4, value_dim=40, softcap=2.0, dtype=FP32),
    Shape(q_heads=4, dim=32, softcap=50.0, sinks=True),
]


def test_scores_without_what_was_asked_for_are_seen() -> None:
    """The negative control: no sinks, no soft cap."""
    shape = Shape(q_heads=2, kv_heads=1, dim=16, block_size=4, dtype=FP32, softcap=2.0, sinks=True)
    made = tokens(shape, [(None, 0)], [9])
    want, asked = oracle(shape, made, 0)[0], paged.scores_of(shape)
    assert_close(shape, attend(backend(shape), shape, made, whole(made))[0], want, ROUNDING)
    for other in (asked._replace(sinks=None), asked._replace(softcap=0.0)):
        with pytest.raises(AssertionError):
            assert_close(shape, attend(backend(shape), shape, made, whole(made), scores=other)[0], want, ROUNDING)


def nightly(shape: Shape) -> Any:
    return pytest.param(shape, marks=pytest.mark.long)


@pytest.mark.some(1)
@pytest.mark.parametrize("shape", [*SHAPES, *map(nightly, MORE)], ids=text)
def test_against_double_precision(shape: Shape) -> None:
    made = tokens(shape, [(None, 0)] * 2, [57, 1])
    outputs = attend(backend(shape), shape, made, whole(made))
    for i in range(2):
        assert_close(shape, outputs[i], oracle(shape, made, i)[0], ROUNDING)


SMALL = Shape(q_heads=2, kv_heads=1, dim=16, block_size=4)
TREE = [(None, 0), (0, 5), (0, 5), (1, 6)]
LENGTHS = [27, 26, 31, 33]


def tree(name: str, shape: Shape) -> Tokens:
    """Make the tokens that `schedule` is for."""
    return tokens(shape, [(None, 0), (0, 3)], [19, 18]) if name == "short" else tokens(shape, TREE, LENGTHS)


def schedule(name: str, made: Tokens) -> list[list[Row]]:
    """Steps that together compute what `whole` computes."""
    if name == "short":
        return [[(0, 0, 17)], [(0, 17, 1), (1, 12, 4)], [(1, 16, 2), (0, 18, 1)]]
    if name == "chunks":
        return [[(i, a, min(7, len(q) - a)) for i, q in enumerate(made.q) if a < len(q)] for a in range(0, max(LENGTHS), 7)]
    order = [0, 1, 3, 2] if name == "decode" else [2, 3, 0, 1]
    prefill = [(i, 0, len(made.q[i]) - 2) for i in range(4)]
    return [prefill, *([(i, len(made.q[i]) - left, 1) for i in order] for left in (2, 1))]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("short", SMALL),
        ("short", SMALL._replace(dtype=FP32, dim=24, value_dim=8, softcap=2.0, sinks=True)),
        *(
            pytest.param(name, shape, marks=pytest.mark.long)
            for name, shape in [
                ("short", SMALL._replace(window=9, dtype=FP32)),
                ("chunks", SMALL),
                ("chunks", SMALL._replace(window=9)),
                ("decode", SMALL._replace(dtype=FP32)),
                ("decode", SMALL._replace(window=9)),
                ("decode in another order", SMALL),
                ("chunks", SMALL._replace(softcap=2.0, sinks=True)),
                ("decode", SMALL._replace(dim=24, value_dim=16, window=9, sinks=True)),
            ]
        ),
    ],
)
def test_the_same_bits_in_any_company(shape: Shape, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 8)
    made = tree(name, shape)
    want = attend(backend(shape, 1), shape, made, whole(made))
    assert not any(x.isnan().any() for x in want)
    for share, programs in ((True, 6), (False, 1)):
        assert same_bits(want, attend(backend(shape, programs), shape, made, schedule(name, made), share)), (share, programs)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_blocks_that_left_the_window_are_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be those of another sequence by now, and those may hold NaN: before the chunk of the window, and in it."""
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 32)
    shape = Shape(q_heads=2, kv_heads=1, dim=16, block_size=8, window=21, dtype=FP32)
    made = tokens(shape, [(None, 0)], [100])
    one: Any = backend(shape, 1) if name == "triton" else ReferenceAttention()
    want = attend(one, shape, made, whole(made))[0]
    for length, count in ((100, 1), (90, 20)):
        data, first = pool(shape, made.blocks).to(DEVICE), length - count
        attend(one, shape, made, [[(0, 0, first)]], data=data)
        data[torch.from_numpy(made.tables[0][: max(0, first - shape.window + 1) // 8])] = torch.nan
        got = attend(one, shape, made, [[(0, first, count)]], data=data)[0]
        if name == "reference" and DEVICE.type == "cuda":  # torch's products there depend on the number of tiles
            torch.testing.assert_close(got[first:length], want[first:length])
        else:
            assert torch.equal(got[first:length], want[first:length])
    data[torch.from_numpy(made.tables[0][(first - shape.window + 1) // 8 :][:1])] = torch.nan
    assert attend(one, shape, made, [[(0, first, count)]], data=data)[0][first:length].isnan().any(), "the negative control"


@pytest.mark.parametrize(
    "shape",
    [
        nightly(Shape(q_heads=4, dim=32)),
        Shape(q_heads=3, kv_heads=1, dim=24, block_size=4, dtype=FP32),
        nightly(Shape(q_heads=2, dim=80, block_size=8, window=23)),
        nightly(Shape(q_heads=4, dim=32, value_dim=16, block_size=8, softcap=2.0, sinks=True, dtype=FP32)),
    ],
    ids=text,
)
def test_fp8_is_stored_as_the_reference_stores_it_and_read(shape: Shape) -> None:
    """The pool to the bit, whatever lay in it. Outputs against double precision of the numbers that are stored; those that were
    given are the control."""
    made = tokens(shape, [(None, 0)] * 2, [57, 1])
    made.k[0][5], made.v[0][7] = made.k[0][5] * 1e4, made.v[0][7] * 1e-4
    pools = [pool_in_fp8(shape, made.blocks) for _ in range(2)]
    outputs = attend(backend(shape), shape, made, whole(made), data=pools[0])
    theirs = attend(ReferenceAttention(), shape, made, whole(made), data=pools[1])
    assert torch.equal(*pools)
    stored = made._replace(**{name: [fp8.decode(*fp8.encode(x)) for x in getattr(made, name)] for name in ("k", "v")})
    for i in range(2):
        want = oracle(shape, stored, i)[0]
        for got in (outputs[i], theirs[i]):
            assert_close(shape, got, want, ROUNDING)
    with pytest.raises(AssertionError):
        assert_close(shape, outputs[0], oracle(shape, made, 0)[0], ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize("name", ["short", *(pytest.param(each, marks=pytest.mark.long) for each in ("chunks", "decode"))])
def test_fp8_has_the_same_bits_in_any_company(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 8)
    made = tree(name, SMALL)
    want = attend(backend(SMALL, 1), SMALL, made, whole(made), data=pool_in_fp8(SMALL, made.blocks))
    assert not any(x.isnan().any() for x in want)
    got = attend(backend(SMALL, 6), SMALL, made, schedule(name, made), data=pool_in_fp8(SMALL, made.blocks))
    assert same_bits(want, got)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no conversion of a device")
def test_the_device_converts_as_shifts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokens(SMALL, TREE, LENGTHS)
    results = []
    for converts in (True, False):
        one = backend(SMALL)
        monkeypatch.setattr(one, "_converts", converts)
        results.append(attend(one, SMALL, made, whole(made), data=pool_in_fp8(SMALL, made.blocks)))
    assert same_bits(*results)


def test_a_shared_prefix_is_read_through_the_first_row_alone() -> None:
    """Spoil the shared blocks in the other rows' tables: whole chunks of the prefix come from the first row's."""
    shape = Shape(q_heads=2, kv_heads=1, dim=16, block_size=8)
    made = tokens(shape, [(None, 0), (0, 4), (0, 4)], [33, 36, 39])
    rows: list[Row] = [(0, 32, 1), (1, 32, 4), (2, 32, 7)]
    one = backend(shape)
    want = attend(one, shape, made, [[(0, 0, 32)], rows])
    cut = tiles.cut

    def spoiled(
        query_starts: np.ndarray, context_lens: np.ndarray, block_table: np.ndarray, *rest: object, **more: object
    ) -> object:
        made = cut(query_starts, context_lens, block_table, *rest, **more)  # type: ignore[arg-type]
        block_table[1:, : 32 // shape.block_size] = 0
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout.engine.cuda.attention.cut", spoiled)
        assert same_bits(want, attend(one, shape, made, [[(0, 0, 32)], rows]))
        broken = attend(one, shape, made, [[(0, 0, 32)], rows], share=False)
    assert not same_bits(want, broken)


def test_without_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TritonUnavailable, match="different numbers of query heads"):
        TritonAttention(DEVICE, StepCapacity(16, 2, 8, 0, 1, 16, 2), 1)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(TritonUnavailable, match="TRITON_INTERPRET=1"):
        TritonAttention(torch.device("cpu"), StepCapacity(16, 2, 8, 4, 1, 16, 2), 1)
    with pytest.raises(ValueError, match='attention="triton".*TRITON_INTERPRET=1'):
        choose_backend("triton", CpuDevice(EngineConfig()), StepCapacity(16, 2, 8, 4, 1, 16, 2))


@pytest.mark.some(1)
@pytest.mark.parametrize("kept_in_fp8", [False, True])
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16], ids=str)
def test_the_smallest_case_of_production(dtype: torch.dtype, kept_in_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 256 tokens, as they run: a prefix of one in common, a second chunk, several turns of the loop in each. A block
    of 64 tokens has all keys of a turn; blocks of 16 give the same bits. On a device test_attention_oracle.py has all sizes."""
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 256)
    heads = production.Heads(kv=1, group=2, dim=16, dtype=dtype, fp8=kept_in_fp8)
    made = production.pages(heads, [259, 300], 4)
    query, out = production.attend(made, [1, 1], share=True)
    production.assert_right(made, [1, 1], query, out)
    assert torch.equal(out, production.attend(made, [1, 1], share=False)[1])
    assert torch.equal(out, production.attend(production.recut(made, 16), [1, 1], share=True)[1])


def run_ptx(code: str, word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Execute assembly of few instructions: $0 and $1 from words $2."""
    registers = {"$2": word.astype(np.uint32)}

    def value(name: str) -> Any:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in re.search(r"\{(.*)\}", code)[1].split(";"):  # type: ignore[index]
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        target, *given = [each.strip() for each in rest.split(",")]
        a, b = map(value, given[:2])
        if operation == "lop3.b32":
            assert given[3] == "0xEA"
            registers[target] = (a & b) | value(given[2])
        else:
            registers[target] = {"shl.b32": np.left_shift, "shr.u32": np.right_shift, "and.b32": np.bitwise_and}[operation](
                a, b
            )
    return registers["$0"], registers["$1"]


def test_assembly_moves_codes_as_the_interpreter_does() -> None:
    """All pairs of codes, in both halves of a word: bf16 of 2^-120 times what torch says that they are."""
    both = np.arange(1 << 16, dtype=np.uint32)
    word = both | (both[::-1] << 16)
    for made, codes in zip(run_ptx(attention_kernels.PAIRS.value, word), (word, word >> 8), strict=True):
        for half in (0, 16):
            numbers = torch.from_numpy(((codes >> half) & 0xFF).astype(np.uint8)).view(torch.float8_e4m3fn).double()
            got = torch.from_numpy(((made >> half) & 0xFFFF).astype(np.uint16)).view(torch.bfloat16).double() * 2.0**120
            assert torch.equal(got[~numbers.isnan()], numbers[~numbers.isnan()]) and numbers.isnan().sum() < 1025


def test_a_device_without_room_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.cuda.attention._limits", lambda device: (LaunchLimits(75, 16 << 10, 64 << 10), 1))
    with pytest.raises(TritonUnavailable, match="KiB of shared memory per program"):
        TritonAttention(DEVICE, StepCapacity(16, 2, 8, 4, 1, 256, 4), 1)


def test_what_has_nothing_to_do_is_not_launched() -> None:
    """One short row: no large tile, nothing to merge. A prefix in common: both."""
    launched: list[str] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(__getitem__=None) if name.startswith("__") else Grid(name)

    class Grid:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Any:
            return lambda *_, **__: launched.append(self.name)

    shape = Shape(q_heads=8, kv_heads=1, dim=16, block_size=8)
    made = tokens(shape, [(None, 0), *[(0, 8)] * 5], [65, 66, 67, 68, 69, 70])
    one = TritonAttention(DEVICE, StepCapacity(512, 16, 64, 8, 1, 16, 2), 6, Noted())
    kv: Any = SimpleNamespace(data=pool(shape, made.blocks).to(DEVICE), block_size=8, geometry=SimpleNamespace(kv_heads=1))
    for rows, want in (
        ([(0, 0, 3)], ["store", "attend"]),
        ([(i, 64 + i, 1) for i in range(6)], ["store", "attend", "attend", "merge"]),
    ):
        arrays = step_arrays(shape, made, rows)
        batch: Any = SimpleNamespace(
            **arrays | {"slots": torch.from_numpy(arrays["slots"])}, num_tokens=sum(n for _, _, n in rows)
        )
        batch.attention = one.prepare(batch, kv)
        q, k = torch.zeros(batch.num_tokens, 8, 16), torch.zeros(batch.num_tokens, 1, 16)
        launched.clear()
        one.attend(1, q, k, k, batch, kv, Scores(1.0))
        assert launched == want
