"""Sums over slices and over ranks by CUDA's kernels, in Triton's interpreter: in the order that the CPU has, with the same bits
on 1, 2, 4 and 8 ranks. Ranks are threads, and gloo is in NCCL's place."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda import exact, reduce  # noqa: E402
from rollout.engine.cuda.experts import group, product  # noqa: E402
from rollout.engine.cuda.reduce import add_up, check_apart, sum_of_ranks  # noqa: E402
from rollout.engine.forward.summed import SLICES, Summed  # noqa: E402
from rollout.engine.values import RankLost  # noqa: E402
from tests.support.device_ranks import exchanges, in_turn, on_all  # noqa: E402

DTYPES = torch.float32, torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
over_gloo = pytest.mark.skipif(DEVICE == "cuda", reason="the CPU plays the devices: tests/gpu/test_ranks_on_a_device.py")


@pytest.fixture(autouse=True, scope="module")
def one_launch_at_a_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            in_turn(patch)
        yield


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add tensors up as c/sums.c does: neighbours, then their sums."""
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_added_in_a_tree(seed: int) -> None:
    """Of any size and dtype, rounded once. The control: from the first to the last, the bits differ."""
    some = random.Random(seed)
    count, rows, outs = some.choice((1, 2, 4, 8)), some.randint(1, 70), some.randint(1, 40)
    given, made = some.choice(DTYPES), some.choice(DTYPES)
    parts = (numbers(count, rows, outs, seed=seed) * 10 ** numbers(count, rows, outs, seed=seed + 1)).to(given)
    bias = numbers(outs, seed=seed + 2).to(made) if some.random() < 0.5 else None
    wide = [each.float() for each in parts]
    want = tree(wide) + (0 if bias is None else bias.float())
    assert torch.equal(add_up(parts, bias, made), want.to(made))
    if count > 2 and rows * outs > 300 and given == torch.float32:
        assert not torch.equal(sum(wide[1:], wide[0]), tree(wide))


def case(rows: int, outs: int, inputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [numbers(*sizes, seed=i).to(dtype) for i, sizes in enumerate(((rows, inputs), (outs, inputs), (outs,)))]


def test_a_sum_is_a_tree_over_eight_slices() -> None:
    """In fp32, where a slice's sum can be seen: it is the product of that slice. So it is no whole sum."""
    x, w, b = case(5, 50, 96, torch.float32)
    slices = [slice(i * 12, (i + 1) * 12) for i in range(SLICES)]
    made = exact.sum_of_slices(x, w, b, Summed(SLICES, None))
    assert torch.equal(made, tree([exact.product(x[:, at], w[:, at]) for at in slices]) + b)
    assert not torch.equal(made, exact.product(x, w, b))
    torch.testing.assert_close(made, x @ w.T + b, rtol=1e-5, atol=1e-4)


@over_gloo
@pytest.mark.some(3)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_ranks(dtype: torch.dtype, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows that are exchanged in several pieces. The control: whole sums of each rank, added up, differ."""
    x, w, b = case(5, 50, 96, dtype)
    want = exact.sum_of_slices(x, w, b, Summed(SLICES, None))
    monkeypatch.setattr(reduce, "BUFFER_BYTES", 2 * 50 * 4 * SLICES)
    monkeypatch.setattr(reduce, "linear", exact.product)  # torch's depends on the thread that calls it
    of = exchanges(ranks)

    def at(rank: int) -> slice:
        return slice(rank * 96 // ranks, (rank + 1) * 96 // ranks)

    def summed(rank: int) -> Summed:
        return Summed(SLICES // ranks, of[rank])

    def work(rank: int) -> list[torch.Tensor]:
        here = x[:, at(rank)], w[:, at(rank)].contiguous()
        return [exact.sum_of_slices(*here, b, summed(rank)), sum_of_ranks(*here, b, summed(rank))]

    found = on_all(ranks, work)
    assert all(torch.equal(exactly, want) for exactly, _ in found)
    parts = [exact.product(x[:, at(rank)], w[:, at(rank)]) for rank in range(ranks)]
    wanted = (tree([each.float() for each in parts]) + b.float()).to(dtype)
    assert all(torch.equal(other, wanted) for _, other in found)
    assert ranks == SLICES or not torch.equal(wanted, want), "with eight, each sum is that of a slice"
    for each in of:
        each.close()


@over_gloo
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_experts_have_the_bits_of_one_product_each(dtype: torch.dtype) -> None:
    """On 1 and 2 ranks, in place of whole sums."""
    x, w = numbers(9, 96).to(dtype), numbers(5, 64, 96, seed=1).to(dtype)
    chosen = torch.randint(5, (9, 1), generator=torch.Generator().manual_seed(0))
    tile = exact.TILES[x.element_size()]

    def experts(x: torch.Tensor, w: torch.Tensor, summed: Summed | None) -> torch.Tensor:
        grouping = group(chosen, 5, tile.rows)
        out = product(x[grouping.order.long()], w, None, grouping, tile, 0, False, summed)
        return out[grouping.place[:, 0].long()]

    want = torch.cat([exact.sum_of_slices(x[i : i + 1], w[chosen[i, 0]], None, Summed(SLICES, None)) for i in range(9)])
    assert torch.equal(experts(x, w, Summed(SLICES, None)), want)
    assert dtype == torch.bfloat16 or not torch.equal(experts(x, w, None), want)
    of = exchanges(2)
    halves = [slice(0, 48), slice(48, 96)]
    found = on_all(2, lambda i: experts(x[:, halves[i]], w[:, :, halves[i]].contiguous(), Summed(4, of[i])))
    assert all(torch.equal(each, want) for each in found)
    for exchange in of:
        exchange.close()


@over_gloo
def test_tensors_of_different_sizes_are_gathered() -> None:
    of, shapes = exchanges(2), [(3, 5), (3, 4)]
    given = [numbers(*shape).bfloat16() for shape in shapes]
    for found in on_all(2, lambda rank: of[rank].gather(given[rank], shapes)):
        assert all(torch.equal(*pair) for pair in zip(found, given, strict=True))
    for exchange in of:
        exchange.close()


def test_a_device_that_does_not_come_to_a_mark_is_not_awaited_for_ever() -> None:
    """The group is given up, so that its kernels end, and stays so."""
    exchange, other = exchanges(2, patience_s=0.05)
    given_up: list[bool] = []
    exchange._group = SimpleNamespace(abort=lambda: given_up.append(True))  # noqa: SLF001
    exchange.wait(lambda: True)
    assert not given_up and not exchange.failed
    with pytest.raises(RankLost, match=r"another rank of 2 did not answer within 0\.05 s"):
        exchange.wait(lambda: False)
    assert given_up and exchange.failed and not other.failed
    with pytest.raises(RankLost, match="did not answer"):
        exchange.gather(torch.zeros(1), [(1,), (1,)])


def test_a_rank_that_ends_wakes_who_waits_for_the_device() -> None:
    """Also where the device has come to the mark: what it has computed then may be nothing."""
    exchange, other = exchanges(2)
    waits = threading.Event()

    def reached() -> bool:
        waits.set()
        return False

    def lose() -> None:
        assert waits.wait(20)
        other.lose(1)

    ending = threading.Thread(target=lose)
    ending.start()
    with pytest.raises(RankLost, match="rank 1 of 2 has ended"):
        exchange.wait(reached)
    ending.join()
    with pytest.raises(RankLost, match="rank 1 of 2 has ended"):
        exchange.wait(lambda: True)
    with pytest.raises(RankLost, match="rank 1 of 2 has ended"):
        exchange.sum(torch.zeros(1, 4), None, torch.float32)


def test_an_exchange_that_the_group_fails_is_a_lost_rank() -> None:
    exchange, _ = exchanges(2)

    def fails(*_: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error\nmore")

    exchange._group = SimpleNamespace(_allgather_base=fails, abort=lambda: None)  # noqa: SLF001
    with pytest.raises(RankLost, match=r"NCCL error: unhandled system error$"):
        exchange.gather(torch.zeros(1), [(1,), (1,)])


def test_two_ranks_with_one_device_are_refused() -> None:
    of = exchanges(2)
    on_all(2, lambda rank: check_apart(of[rank], f"GPU-{rank}"))

    def same(rank: int) -> str:
        with pytest.raises(ValueError, match="ranks 0 and 1 have the same CUDA device") as raised:
            check_apart(of[rank], "GPU-0")
        return str(raised.value)

    assert len(set(on_all(2, same))) == 1
    with closing(of[0]), closing(of[1]):
        pass
