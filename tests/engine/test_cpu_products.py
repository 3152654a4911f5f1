"""Products of every instruction set that this CPU has, and of tiles in portable C: near the exact sum, the same bits for a row
in any company, the same bits in sets that share an arithmetic."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch

from rollout.engine.cpu.isa import EMULATED, here, isa_of
from rollout.engine.cpu.kernels import Kernels, Linear
from rollout.engine.cpu.products import sensitive

CHAINS = [isa for isa in here() if isa_of(isa).arithmetic != "amx/1"]
"""whose products are one chain of FMAs for each output"""
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (17, 33, 63),
    (2, 16, 32),
    (9, 48, 64),
    (40, 100, 1100),
    (300, 31, 65),
    (70, 64, 544),
    (5, 96, 63),
    (16, 48, 1041),
]
"""rows, outputs, inputs: whole tiles, and ends inside tiles, panels, chunks and blocks of rows"""
FAR = ((0, 2048), (0, 4096), (1, 2047), (32, 1104), (0, 3001))
"""first input and number of inputs of matrices cut from one whose outputs are a multiple of 4 KiB apart, as a rank's are"""


@pytest.fixture(scope="module", params=here())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)


def numbers(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs + inputs)
    return tuple(torch.randn(*size, generator=generator).to(dtype) for size in ((rows, inputs), (outputs, inputs), (outputs,)))  # type: ignore[return-value]


def bound(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact product, and how far an fp32 sum in any order, rounded once to the dtype, may be from it (Higham 2002, 4.2)."""
    exact = x.double() @ w.double().T + bias.double()
    sizes = x.double().abs() @ w.double().abs().T + bias.double().abs()
    far = (x.shape[1] + 1) * 2.0**-24 * sizes
    return exact, far + (2.0**-8 * (exact.abs() + far) if x.dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_near_the_exact_sum(kernels: Kernels, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, w, bias = numbers(*shape, dtype)
    for b in (bias, None):
        exact, far = bound(x, w, torch.zeros_like(bias) if b is None else b)
        assert ((kernels.linear(x, w, b).double() - exact).abs() <= far).all()
    assert not ((kernels.linear(x, w).double() - exact - 1).abs() <= far).all(), "a bound that holds for anything"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_the_same_in_any_company(kernels: Kernels, dtype: torch.dtype, threads: int) -> None:
    alone = Kernels(kernels.isa, threads)
    x, w = sensitive(290, torch.empty(70, 611, dtype=dtype))
    together = kernels.linear(x, w)
    for first, rows in ((0, 1), (7, 1), (7, 2), (30, 9), (16, 17), (100, 130), (289, 1)):
        assert torch.equal(alone.linear(x[first : first + rows], w), together[first : first + rows]), (
            f"{rows} rows from {first}"
        )
    assert not torch.equal(alone.linear(x.flip(1), w.flip(1)), together), "another order of the sums is not seen"


def test_neighbours_that_are_not_finite(kernels: Kernels) -> None:
    """Neither another row nor what lies behind the last input or output reaches a sum."""
    for dtype, (n, size, inputs) in itertools.product(DTYPES, ((19, 35, 75), (5, 48, 63), (9, 48, 63))):
        x, w, _ = numbers(n, size, inputs, dtype)
        want = kernels.linear(x, w)
        x[3], w[7], w[34, 5], w[12, 0] = torch.nan, torch.inf, torch.nan, torch.nan
        got = kernels.linear(x, w)
        rows, outputs = [i for i in range(n) if i != 3], [i for i in range(size) if i not in (7, 12, 34)]
        assert torch.equal(got[rows][:, outputs], want[rows][:, outputs])
        assert got[3].isnan().all() and not got[rows][:, 7].isfinite().any() and got[:, [12, 34]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_arithmetic_for_every_width(dtype: torch.dtype) -> None:
    """bf16: pairs of inputs in chunks, as vdpbf16ps has them, with and without that instruction, denormal numbers included."""
    assert len(CHAINS) > 1 or CHAINS == ["plain"], CHAINS
    widths = [Kernels(isa) for isa in CHAINS]
    for rows, outputs, inputs in ((5, 50, 97), (33, 30, 1090)):
        x, w = sensitive(rows, torch.empty(outputs, inputs, dtype=dtype))
        for scale in (1.0, 1e-19):
            got = [each.linear((x * scale).to(dtype), (w * scale).to(dtype)) for each in widths]
            assert all(torch.equal(each, got[0]) for each in got[1:]), f"{CHAINS} differ"
        assert dtype != torch.bfloat16 or torch.equal(got[0].float().abs() < 2.0**-126, got[0] == 0), (
            "denormals are not flushed"
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_that_are_pages_apart(dtype: torch.dtype) -> None:
    """Their lines meet in one set of the L1 cache, so they are read in another way: the same bits as side by side, in all
    instruction sets, and nothing behind the last input reaches a sum."""
    sets = [Kernels(isa) for isa in CHAINS]
    for first, inputs in FAR:
        x, w = sensitive(9, torch.empty(64, inputs, dtype=dtype))
        whole = torch.full((64, 6144), torch.nan, dtype=dtype)
        whole[:, first : first + inputs] = w
        for rows in (1, 2, 3, 4, 5, 8, 9):
            want = sets[0].linear(x[:rows], w)
            for kernels in sets:
                far = linear_of(kernels, x[:rows], whole[:, first:], inputs)
                assert torch.equal(kernels.linear(x[:rows], w), want) and torch.equal(far, want), (kernels.isa, rows, inputs)
        assert not torch.equal(sets[0].linear(x.flip(1), w.flip(1)), want), "another order of the sums is not seen"


def linear_of(kernels: Kernels, x: torch.Tensor, w: torch.Tensor, inputs: int) -> torch.Tensor:
    """Multiply by the first `inputs` columns of a matrix, where they lie."""
    struct = Linear(w.data_ptr(), None, len(w), inputs, w.dtype == torch.bfloat16, False, 0, w.stride(0))
    out, packed = x.new_empty(len(x), len(w)), kernels.packed(len(x), (inputs,), x.dtype)
    x = x.contiguous()
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (packed, out))
    kernels.library.rollout_linear(
        ctypes.byref(kernels.team()), ctypes.byref(struct), ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x)), *pointers
    )
    return out


@pytest.mark.parametrize("isa", CHAINS)
def test_choices_change_no_bit(isa: str) -> None:
    """What a probe or a table chooses for a CPU is about time alone."""
    kernels = Kernels(isa)
    x, w = sensitive(40, torch.empty(99, 1300, dtype=torch.bfloat16))
    want = kernels.linear(x, w)
    for dot, piece, few in ((0, 256, 8), (1, 256, 8), (0, 32, 0), (1, 64, 100), (0, 128, 100), (1, 512, 0)):
        kernels.tuning.dot, kernels.tuning.piece, kernels.tuning.few = dot, piece, few
        for rows in (1, 8, 9, 40):
            assert torch.equal(kernels.linear(x[:rows], w), want[:rows]), (dot, piece, few, rows)


def test_tiles_add_up_as_the_manual_has_it() -> None:
    """tdpbf16ps by hand in numpy: even and odd products in two chains of FMAs over 32 inputs, added, then added to the sum."""
    if "amx_portable" not in here():
        pytest.skip("the portable tiles are compiled for AVX-512 here")
    x, w = sensitive(3, torch.empty(18, 100, dtype=torch.bfloat16))
    got = Kernels("amx_portable").linear(x, w)
    fma = ctypes.CDLL(None).fmaf if hasattr(ctypes.CDLL(None), "fmaf") else ctypes.CDLL("libm.so.6").fmaf
    fma.restype, fma.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    a, b = (torch.nn.functional.pad(each, (0, 28)).float().numpy() for each in (x, w))
    for row in range(3):
        for output in range(18):
            total = np.float32(0)
            for step in range(0, 128, 32):
                halves = []
                for parity in (0, 1):
                    chain = 0.0
                    for i in range(step + parity, step + 32, 2):
                        chain = fma(a[row, i], b[output, i], chain)
                    halves.append(np.float32(chain))
                total = total + (halves[0] + halves[1])
            assert float(torch.tensor(total).bfloat16()) == float(got[row, output])


def test_the_bits_of_torch(kernels: Kernels) -> None:
    """Where this torch sums bf16 on this CPU as we do; else told, not compared."""
    shapes = [(576, 1536), (96, 208), (1536, 576), (48, 1100)]
    equal = {}
    for outputs, inputs in shapes:
        x, w = sensitive(130, torch.empty(outputs, inputs, dtype=torch.bfloat16))
        equal[outputs, inputs] = all(
            torch.equal(kernels.linear(x[:n], w), torch.nn.functional.linear(x[:n], w)) for n in (2, 37, 130)
        )
    if len(set(equal.values())) > 1 or not all(equal.values()):
        pytest.skip(f"torch has other bits than {kernels.isa} here: {equal}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_a_number_is_its_own(kernels: Kernels, dtype: torch.dtype) -> None:
    x = (torch.randn(70_001, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    want = kernels.silu(x)
    torch.testing.assert_close(want, torch.nn.functional.silu(x), rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)
    for first, n in ((0, 1), (5, 17), (31, 33), (999, 4097)):
        assert torch.equal(kernels.silu(x[first : first + n]), want[first : first + n])


def test_what_does_not_fit(kernels: Kernels) -> None:
    x, w = torch.zeros(2, 8), torch.zeros(4, 8)
    for wrong in ((x.bfloat16(), w, None), (x, w[:, :7], None), (x[0], w, None), (x.double(), w.double(), None), (x, w, x[0])):
        with pytest.raises(ValueError, match="need \\[T, K\\]"):
            kernels.linear(*wrong)
    with pytest.raises(ValueError, match="silu of"):
        kernels.silu(x.double())
    assert kernels.linear(x[:0], w).shape == (0, 4)
    strided = torch.randn(8, 4).T
    assert torch.equal(kernels.linear(strided, strided), kernels.linear(strided.contiguous(), strided.contiguous()))


def test_emulated_sets_are_for_tests_alone() -> None:
    from rollout.engine.cpu.isa import ISAS, best

    assert best() not in EMULATED and not set(EMULATED) & set(ISAS)
