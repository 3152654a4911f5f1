"""Products whose inputs are cut into eight slices: the same bits on 1, 2, 4 and 8 ranks, which are threads here."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch

from rollout.engine.cpu.experts import Routes, sort_routes
from rollout.engine.cpu.isa import here
from rollout.engine.cpu.kernels import Kernels
from rollout.engine.cpu.sums import Exchange, SumKernels, shared_bytes
from rollout.engine.forward.summed import SLICES, Summed
from rollout.engine.values import RankLost
from tests.support.isas import best_first

BEST = here()[0]
DTYPES = (torch.float32, torch.bfloat16)


@cache
def kernels(isa: str = BEST) -> SumKernels:
    return SumKernels(Kernels(isa, threads=1))


def exchanges(ranks: int, width: int, patience_s: float = 20.0) -> list[Exchange]:
    """Make the exchanges of all ranks."""
    if ranks == 1:
        return [Exchange(width)]
    shared = mmap.mmap(-1, shared_bytes(ranks, width))
    library = kernels().library
    return [Exchange(width, rank, ranks, shared, patience_s, library) for rank in range(ranks)]


def on_all(ranks: int, work: Any) -> list[Any]:
    """Call `work` with each rank, in a thread each."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))


def case(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * inputs)
    sizes = (rows, inputs), (outputs, inputs), (outputs,)
    x, w, b = (torch.randn(*size, generator=generator).to(dtype) for size in sizes)
    return x, w, b


@pytest.mark.parametrize("outputs, inputs", [(64, 96), (50, 32), (112, 2048)])
def test_a_sum_is_a_tree_over_eight_slices(outputs: int, inputs: int) -> None:
    """In fp32, where a slice's sum can be seen: it is the product of that slice."""
    x, w, b = case(19, outputs, inputs, torch.float32)
    each = inputs // SLICES
    slices = [slice(i * each, (i + 1) * each) for i in range(SLICES)]
    s = [kernels().kernels.linear(x[:, at], w[:, at].contiguous()) for at in slices]
    tree = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])) + b
    assert torch.equal(kernels().linear(x, w, b, Summed(SLICES, None)), tree)
    in_turn = s[0]
    for other in s[1:]:
        in_turn = in_turn + other
    assert not torch.equal(in_turn + b, tree), "another order has other bits"


def on_ranks(ranks: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Compute a product on ranks that have a part of its inputs each."""
    inputs, of = x.shape[1], exchanges(ranks, len(w))

    def product(rank: int) -> torch.Tensor:
        at = slice(rank * inputs // ranks, (rank + 1) * inputs // ranks)
        return kernels().linear(x[:, at], w[:, at].contiguous(), b, Summed(SLICES // ranks, of[rank]))

    return on_all(ranks, product)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_ranks(dtype: torch.dtype) -> None:
    for rows, outputs, inputs in [(1, 64, 96), (5, 50, 32), (300, 96, 256)]:
        x, w, b = case(rows, outputs, inputs, dtype)
        want = kernels().linear(x, w, b, Summed(SLICES, None))
        assert torch.equal(kernels().linear(x[:1], w, b, Summed(SLICES, None)), want[:1])
        assert all(torch.equal(got, want) for ranks in (2, 4, 8) for got in on_ranks(ranks, x, w, b))


def by_expert(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Routes]:
    """Return inputs, weights of five experts and the routes of rows to four of them."""
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 96, generator=generator).to(dtype), torch.randn(5, 64, 96, generator=generator).to(dtype)
    chosen = torch.randint(5, (rows, 1), generator=generator)
    chosen[chosen == 2] = 0
    return x, w, sort_routes(chosen.numpy(), 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 9, 700])
def test_rows_of_several_weights_have_the_bits_of_one_product_each(rows: int, dtype: torch.dtype) -> None:
    """Also where rows of an expert are in two exchanges, on every number of ranks."""
    x, w, routes = by_expert(rows, dtype)
    groups = zip(routes.expert, routes.begin[:-1], routes.begin[1:], strict=True)
    want = [kernels().linear(x[first:last], w[expert], None, Summed(SLICES, None)) for expert, first, last in groups]
    for ranks in (1, 2, 8):
        of, each = exchanges(ranks, 64), 96 // ranks

        def product(rank: int, of: list[Exchange] = of, each: int = each) -> torch.Tensor:
            at = slice(rank * each, (rank + 1) * each)
            return kernels().grouped(x[:, at], w[:, :, at].contiguous(), routes, Summed(SLICES // len(of), of[rank]))

        assert all(torch.equal(got, torch.cat([*want, got[:0]])) for got in on_all(ranks, product))


@pytest.mark.parametrize("isa", best_first([isa for isa in here() if isa != "plain"]))
def test_instruction_sets_of_an_arithmetic_agree(isa: str) -> None:
    other = next(name for name in reversed(here()) if kernels(name).kernels.arithmetic == kernels(isa).kernels.arithmetic)
    for dtype in DTYPES:
        x, w, b = case(21, 50, 96, dtype)
        assert torch.equal(*(kernels(each).linear(x, w, b, Summed(SLICES, None)) for each in (isa, other)))


def test_tensors_of_different_sizes_are_gathered() -> None:
    of, shapes = exchanges(2, 4), [(3, 1000), (3, 999)]
    given = [torch.randn(*shape) for shape in shapes]  # more than a part has room for
    for got in on_all(2, lambda rank: of[rank].gather(given[rank], shapes)):
        assert all(torch.equal(one, other) for one, other in zip(got, given, strict=True))


def test_a_rank_that_does_not_come_is_named() -> None:
    of = exchanges(2, 4, patience_s=0.2)
    with pytest.raises(RankLost, match="rank 1 of 2 did not answer within 0.2 s"):
        of[0].gather(torch.zeros(1), [(1,), (1,)])
    with pytest.raises(RankLost):  # and stays lost
        of[0].gather(torch.zeros(1), [(1,), (1,)])


def test_ranks_out_of_step_are_seen() -> None:
    of = exchanges(2, 64)

    def exchange(rank: int) -> torch.Tensor:
        rows = 3 + rank
        return kernels().linear(torch.ones(rows, 32), torch.ones(64, 32), None, Summed(4, of[rank]))

    with pytest.raises(RankLost, match="is out of step"):
        on_all(2, exchange)


def test_a_rank_that_ends_wakes_the_others() -> None:
    of = exchanges(2, 64, patience_s=60.0)
    x, w, _ = case(3, 64, 32, torch.float32)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(kernels().linear, x, w, None, Summed(4, of[0]))
        of[1].lose(1)
        with pytest.raises(RankLost, match="rank 1 of 2 has ended"):
            waiting.result(20)
    assert of[0].lost == 1
