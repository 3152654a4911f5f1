"""Recurrent token mixers in Triton, in its interpreter where there is no GPU: transformers' functions, the order of sums that
their text promises, and bits that depend on a row's own tokens and state alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda import recurrence, recurrence_kernels  # noqa: E402
from rollout.engine.cuda.recurrence import TritonMixers, bytes_of_decode, tile_of  # noqa: E402
from rollout.engine.forward.batch import rows_as_table  # noqa: E402
from tests.support.mixers import (  # noqa: E402
    BF16,
    FP32,
    KINDS,
    Kind,
    alone,
    convolution,
    delta,
    far,
    mamba,
    pool,
    rows_of,
    together,
)

FEW = [partial(kind, **({"channels": 40} if kind is convolution else {"heads": 1})) for kind in KINDS]
"""the same with few heads, for tests of many rows"""
INTERPRETED = not torch.cuda.is_available()


class OnDevice(TritonMixers):
    """Takes tensors of the host, as the cases have them, and computes on the device."""

    def _call(self, function: Any, *args: Any, states: Tensor, rows: Any, **options: Any) -> Tensor:
        def moved(each: Any) -> Any:
            return each.cuda() if isinstance(each, Tensor) else each

        there = states.cuda()
        out = function(*map(moved, args), there, moved(rows), **{key: moved(each) for key, each in options.items()})
        states.copy_(there)
        made: Tensor = out.cpu()
        return made

    def convolve(self, x: Any, weight: Any, bias: Any, activation: Any, states: Any, rows: Any) -> Tensor:
        return self._call(super().convolve, x, weight, bias, activation, states=states, rows=rows)

    def delta_rule(self, query: Any, key: Any, value: Any, g: Any, beta: Any, states: Any, rows: Any, **options: Any) -> Tensor:
        return self._call(super().delta_rule, query, key, value, g, beta, states=states, rows=rows, **options)

    def mamba2(self, hidden: Any, dt: Any, A: Any, B: Any, C: Any, states: Any, rows: Any, **options: Any) -> Tensor:
        return self._call(super().mamba2, hidden, dt, A, B, C, states=states, rows=rows, **options)


@pytest.fixture(scope="module")
def it() -> Any:
    """Returns `TritonMixers` as what the cases call."""
    return TritonMixers() if INTERPRETED else OnDevice()


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for each head, which the interpreter takes less time for. Bits do not depend on it: see below."""
    monkeypatch.setattr(recurrence, "TILE", 1 << 15)
    monkeypatch.setattr(recurrence, "NARROW", 128)


def wrong(it: Any, kind: Kind, dtype: torch.dtype, seeds: tuple[int, ...], bound: float) -> list[tuple[int, int]]:
    """Return (seed, row) of the rows whose outputs or states are not transformers': four from slot to slot, and padding."""
    found = []
    for seed in seeds:
        case, random = kind(seed, dtype), np.random.default_rng(seed)
        lengths = random.integers(1, 7, 4).tolist()
        sequences = [case.draw(n) for n in lengths]
        states = pool(case, 6)
        rows = rows_of((lengths[0], -1, 4), (lengths[1], 0, 0), (lengths[2], 1, 2), (lengths[3], 1, -1))
        before = states.clone()
        out = case.ours(it, together(*sequences, case.draw(3)), states, rows)
        assert not out[rows.query_starts[-1] :].any()
        assert torch.equal(states[[1, 3, 5]], before[[1, 3, 5]]), "a slot that no row writes"
        for i, (sequence, read, write) in enumerate(zip(sequences, rows.reads, rows.writes, strict=True)):
            want, last = case.theirs(sequence, None if read < 0 else before[read])
            good = far(out[rows.query_starts[i] : rows.query_starts[i + 1]], want) < bound
            if good and write >= 0 and last is not None:
                good = far(states[write], last) < (bound if kind is mamba else 1e-5)  # which rounds dt to bf16
            found += [] if good else [(seed, i)]
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers(it: Any, kind: Kind) -> None:
    assert not wrong(it, kind, FP32, (0, 2, 3), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers_in_bf16(it: Any, kind: Kind) -> None:
    """The convolution rounds where torch's does; scans compute in fp32, and round their outputs. The interpreter cuts bf16 off
    instead of rounding it, so the bound is twice that of the kernels in C."""
    assert not wrong(it, kind, BF16, (1, 2), 2**-6)


class Mutant(NamedTuple):
    """Something that a kernel could do wrong: changes the arguments of its launch."""

    name: str
    kinds: tuple[Kind, ...]
    changes: dict[str, Any]


class Mutated:
    """Stands in for `recurrence_kernels`: launches with other arguments. changes: functions of an argument, by its name."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(recurrence_kernels, name)

        class Launch:
            def __getitem__(_, grid: Any) -> Any:  # noqa: N805
                def launch(*args: Any, **constants: Any) -> None:
                    given = dict(zip(kernel.arg_names, args, strict=False)) | constants
                    for key, change in self._changes.items():
                        if key in given:
                            given[key] = change(given[key])
                    kernel[grid](**given)

                return launch

        return Launch()


def other_slots(table: Tensor) -> Tensor:
    """Return the rows with each one's read slot exchanged for that of the row before."""
    table = table.clone()
    table[1, :-1] = table[1, :-1].roll(1)
    return table


MUTANTS = [
    Mutant("no decay", (KINDS[1], KINDS[2]), {"g": torch.zeros_like}),
    Mutant("no decay of Mamba", (mamba,), {"a": torch.zeros_like}),
    Mutant("the slot of another row is read", tuple(KINDS), {"rows": other_slots}),
    Mutant("a key too few", (delta,), {"KEYS": lambda keys: keys - 1}),
    Mutant("keys that are not normalized", (delta,), {"NORMALIZED": lambda _: False}),
    Mutant(
        "a state that begins with zeros",
        tuple(KINDS),
        {"rows": lambda table: torch.cat([table[:1], -torch.ones_like(table[1:2]), table[2:]])},
    ),
]


@pytest.mark.some(2)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_seen(it: Any, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(it, "_kernels", Mutated(mutant.changes))
    for kind in mutant.kinds:
        assert wrong(it, kind, FP32, (2,), 1e-5), kind


# ── the order of sums ─────────────────────────────────────────────────────────────────────────────────────────────────
def halved(x: np.ndarray) -> np.ndarray:
    """Sum [K, …] over K, padded to a power of two, by halves."""
    x = np.concatenate([x, np.zeros(((1 << (len(x) - 1).bit_length()) - len(x), *x.shape[1:]), x.dtype)])
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def paired(x: np.ndarray) -> np.ndarray:
    """Sum [N, …] over N, padded to a power of two, by neighbours."""
    x = np.concatenate([x, np.zeros(((1 << (len(x) - 1).bit_length()) - len(x), *x.shape[1:]), x.dtype)])
    while len(x) > 1:
        x = x[::2] + x[1::2]
    return x[0]


def delta_in_order(query: Any, key: Any, value: Any, decay: Any, beta: Any, state: np.ndarray, summed: Any) -> list[np.ndarray]:
    """Return the outputs of one head, whose state is changed. decay: factors [T, 1 or K]."""
    made = []
    for q, k, v, d, b in zip(query, key, value, decay, beta, strict=True):
        q, k = (each * (np.float32(1) / np.sqrt(paired(each * each) + np.float32(1e-6))) for each in (q, k))
        state *= d[:, None]
        change = (v - summed(state * k[:, None])) * b
        state += k[:, None] * change
        made.append(summed(state * (q * np.float32(len(k) ** -0.5))[:, None]))
    return made


@pytest.mark.parametrize("by_channel", [False, True])
def test_sums_of_a_delta_rule_are_in_the_order_that_is_written(it: Any, by_channel: bool) -> None:
    """To the bit, and other orders have other bits. Decays are 1, and in the interpreter 1/2 and 1/4."""
    r = np.random.default_rng(0)
    query, key, value = (r.standard_normal((5, 1, n), np.float32) for n in (21, 21, 9))
    beta, first = r.random((5, 1), np.float32), r.standard_normal((1, 21, 9), np.float32)
    halves = r.integers(0, 3 if INTERPRETED else 1, (5, 1, 21) if by_channel else (5, 1))
    g = (np.log(2.0) * -halves).astype(np.float32)
    decay = np.exp(g).reshape(5, -1)
    states = torch.from_numpy(first.copy())[None]
    out = it.delta_rule(
        *map(torch.from_numpy, (query, key, value, g, beta)), states=states, rows=rows_of((5, 0, 0)), l2norm=True
    )
    for summed, equal in ((halved, True), (lambda x: np.add.reduce(x, 0), False)):
        state = first[0].copy()
        want = np.stack(delta_in_order(query[:, 0], key[:, 0], value[:, 0], decay, beta[:, 0], state, summed))
        assert np.array_equal(out[:, 0].numpy(), want) == equal
        assert np.array_equal(states[0, 0].numpy(), state) == equal
        np.testing.assert_allclose(out[:, 0].numpy(), want, atol=1e-5)


def test_sums_of_mamba_are_in_the_order_that_is_written(it: Any) -> None:
    """To the bit. A is 0, so that no exp is compared."""
    r = np.random.default_rng(1)
    x, b, c = (r.standard_normal((4, 1, n), np.float32) for n in (6, 21, 21))
    dt, first, skip = r.random((4, 1), np.float32), r.standard_normal((1, 6, 21), np.float32), np.array([0.7], np.float32)
    states = torch.from_numpy(first.copy())[None]
    out = it.mamba2(
        *map(torch.from_numpy, (x, dt, np.zeros(1, np.float32), b, c)), states=states, rows=rows_of((4, 0, 0)),
        D=torch.from_numpy(skip),
    )  # fmt: skip
    state, want = first[0].copy(), []
    for t in range(4):
        state += (x[t, 0] * dt[t])[:, None] * b[t, 0]
        want.append(paired((state * c[t, 0]).T) + skip[0] * x[t, 0])
    assert np.array_equal(out[:, 0].numpy(), np.stack(want)) and np.array_equal(states[0, 0].numpy(), state)


def test_softplus_is_right_near_zero(it: Any) -> None:
    """Where a device's own logarithm of 1 + e^x has few digits. An A of 0 leaves the step alone in the state. A device's e^x is
    a power of two of a rounded x / log 2."""
    x = torch.tensor([[-80.0], [-30.0], [-12.0], [-3.0], [0.0], [0.7], [5.0], [19.9], [20.1], [60.0]])
    ones = torch.ones(len(x), 1, 1)
    states = torch.zeros(len(x), 1, 1, 1)
    rows = rows_of(*((1, -1, i) for i in range(len(x))))
    it.mamba2(ones, x, torch.zeros(1), ones, ones, states=states, rows=rows, dt_softplus=True)
    want = torch.nn.functional.softplus(x.double()).flatten()
    of_exponent = 4 if INTERPRETED else x.flatten().double().abs().clamp(min=4)
    assert ((states.flatten().double() - want).abs() <= of_exponent * 2**-24 * want).all()


# ── bits ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def differing(it: Any, kind: Kind, dtype: torch.dtype, seed: int, tokens: int = 10) -> int:
    """Cut one sequence anywhere, among others, from slot to slot, with rows that are empty behind them. Returns how many parts
    have other bits than the sequence in one row, alone, and 1 more if its last state has."""
    case, random = kind(seed, dtype), np.random.default_rng(seed)
    sequence, others = case.draw(tokens), case.draw(8)
    begin = pool(case, 1)[0] if seed % 2 else None
    want, last = alone(it, case, sequence, begin)
    states, at, slot, found = pool(case, 5), 0, -1, 0
    if begin is not None:
        states[0], slot = begin, 0
    while at < tokens:
        n, before, behind = random.integers(1, [tokens + 1 - at if at else 6, 4, 4])
        to = slot if slot >= 0 and random.integers(2) else (slot + 1) % 2
        crowd = together(
            tuple(x[:before] for x in others), tuple(x[at : at + n] for x in sequence), tuple(x[:behind] for x in others)
        )
        rows = rows_as_table(rows_of((before, 3, 3), (n, slot, to), (behind, 4, -1)))
        empty = np.array([[rows[0, -1]] * 2, [-1] * 2, [-1] * 2])
        out = case.ours(it, crowd, states, torch.from_numpy(np.concatenate([rows, empty], 1)))  # type: ignore[arg-type]
        found += not torch.equal(out[before : before + n], want[at : at + n])
        at, slot = at + n, to
    return found + (not torch.equal(states[slot], last))


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP32, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", FEW, ids=lambda kind: kind.func.__name__)
def test_bits_do_not_depend_on_the_rows(it: Any, kind: Kind, dtype: torch.dtype) -> None:
    assert differing(it, kind, dtype, 0) == 0


def test_a_state_that_is_lost_between_rows_is_seen(it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: rows that leave their state in the slot of another one."""

    def crossed(table: Tensor) -> Tensor:
        table = table.clone()
        table[2, :2] = table[2, :2].flip(0)
        return table

    monkeypatch.setattr(it, "_kernels", Mutated({"rows": crossed}))
    for kind in FEW:
        assert differing(it, kind, FP32, 1)


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", FEW, ids=lambda kind: kind.func.__name__)
def test_forks_restores_and_states_advanced_twice(it: Any, kind: Kind) -> None:
    """Two rows may read one slot and write others; a state that is copied away and back goes on; a row that runs again from the
    state that it left has other numbers."""
    case = kind(4)
    first, second, states = case.draw(3), case.draw(4), pool(case, 3)
    want = [alone(it, case, each, states[0]) for each in (first, second)]
    out = case.ours(it, together(first, second), states, rows_of((3, 0, 1), (4, 0, 2)))
    assert torch.equal(out, torch.cat([want[0][0], want[1][0]]))
    assert torch.equal(states[1], want[0][1]) and torch.equal(states[2], want[1][1])
    kept = states[1].clone()
    states[1] = torch.nan
    states[0] = kept
    back = case.ours(it, second, states, rows_of((4, 0, 0)))
    assert torch.equal(back, alone(it, case, second, kept)[0])
    again = case.ours(it, second, states, rows_of((4, 0, 0)))
    assert not torch.equal(again, back), "a state advanced twice"


def test_views(it: Any) -> None:
    """Inputs as a mixer has them: parts of a row, transposed."""
    case = delta(6, BF16)
    inputs = case.draw(3)
    wide = tuple(torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]] for x in inputs)
    strided = tuple(x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs)
    want = alone(it, case, inputs, None)[0]
    for given in (wide, strided):
        assert torch.equal(alone(it, case, given, None)[0], want)
    case = convolution(6, BF16)
    (x,) = case.draw(3)
    assert torch.equal(alone(it, case, (x.T.contiguous().T,), None)[0], alone(it, case, (x,), None)[0])


def test_what_does_not_fit(it: Any) -> None:
    x, weight, states = torch.randn(4, 8), torch.randn(8, 3), torch.zeros(2, 8, 2)
    rows = rows_of((4, 0, 0))
    for arguments, words in (
        ((x, weight, None, "gelu", states), "gelu"),
        ((x.half(), weight, None, None, states), "float16"),
        ((x, weight[:7], None, None, states), "weight"),
        ((x, weight, None, None, torch.zeros(2, 2, 8).transpose(1, 2)), "contiguous"),
        ((x, weight, None, None, states.to(BF16)), "dtype|bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            it.convolve(*arguments, rows)
    narrow = torch.randn(4, 3, 8)
    with pytest.raises(ValueError, match="multiple"):
        it.delta_rule(narrow[:, :2], narrow[:, :2], narrow, torch.zeros(4, 3), torch.ones(4, 3), torch.zeros(1, 3, 8, 8), rows)


# ── counted ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.some(1)
@pytest.mark.parametrize("kind", FEW, ids=lambda kind: kind.func.__name__)
def test_bits_do_not_depend_on_the_tiles(it: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the device has them, and others."""
    case = kind(3, BF16)
    sequence = case.draw(3)
    want = alone(it, case, sequence, None)
    for tile in (2048, 512):
        monkeypatch.setattr(recurrence, "TILE", tile)
        monkeypatch.setattr(recurrence, "NARROW", 32)
        assert all(map(torch.equal, alone(it, case, sequence, None), want))


@pytest.mark.parametrize("shape", [(128, 128), (96, 192), (512, 64), (21, 9), (1, 1)])
def test_a_state_is_read_and_written_once(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tiles of a decode step: every number is in the tile of one program."""
    monkeypatch.undo()
    padded, width = tile_of(*shape)
    tiles = -(-shape[1] // width)
    assert padded >= shape[0] and padded * width <= max(recurrence.TILE, padded)
    assert (tiles - 1) * width < shape[1] <= tiles * width


def test_bytes_of_a_decode_step() -> None:
    """Qwen3.5-0.8B: 18 layers of 16 heads of 128 × 128 numbers, and of 6,144 channels with three columns in bf16."""
    moved = bytes_of_decode([(16, 128, 128)] * 18, [(6144, 3)] * 18, 2)
    assert moved == 2 * 18 * (16 * 128 * 128 * 4 + 6144 * 3 * 2) and math.isclose(moved / 2**20, 37.3, abs_tol=0.1)
