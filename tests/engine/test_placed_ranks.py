"""Ranks that torchrun has started find rank 0, and those of several hosts exchange what they compute without shared memory."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from rollout.engine.cpu.kernels import choose
from rollout.engine.cpu.sums import SumKernels
from rollout.engine.parallel.follower import Follower
from rollout.engine.parallel.group_exchange import GroupExchange
from rollout.engine.parallel.messages import Joining, RankChannel
from rollout.engine.parallel.placement import KEY, Address, MeetingPlace, RankPosition, connect, position_of, process_group
from rollout.engine.values import RankLost
from tests.support.ranks import ranked_engine, ranks_in_threads, saved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def in_store(rank: int, ranks: int, store: Any, local_ranks: int = 1) -> RankPosition:
    class Position(RankPosition):
        open_store = lambda _: store  # noqa: E731

    return Position(rank, ranks, local_ranks, ("127.0.0.1", 9))


def test_the_variables_of_torchrun() -> None:
    place = position_of(TORCHRUN, 2)
    assert place == (1, 2, 2, ("localhost", 29500), None) and place.one_host and place.number_here == 1
    assert not position_of(TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, 2).one_host


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"RANK": None}, r"RANK is not set; start all ranks with torchrun --nproc-per-node 2 -m rollout serve --engine.tp 2"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4, LOCAL_WORLD_SIZE=2 with tp=2"),
        ({"RANK": "2"}, "RANK=2, WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 with tp=2"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x: must be numbers"),
    ],
)
def test_variables_that_do_not_fit_are_refused(changes: dict[str, str | None], reason: str) -> None:
    given = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(ValueError, match=reason):
        position_of(given, 2)


@pytest.mark.parametrize("local_ranks", [1, 2])
def test_only_a_rank_that_knows_the_secret_joins(local_ranks: int) -> None:
    """Whatever else connects before it, at a socket of the host's files or at a port."""
    store = HashStore()
    place = MeetingPlace(in_store(0, 2, store, local_ranks))
    with closing(place):
        address = msgspec.json.decode(store.get(KEY), type=Address)
        assert (address.unix is None) == (local_ranks == 1)
        stranger, other = (connect(in_store(1, 2, store, local_ranks), wrong(store, each)) for each in ("0" * 32, "é"))
        end = connect(in_store(1, 2, store, local_ranks), store)
        channel, joining = place.channel(1)
        with stranger, other, end, channel.socket:
            assert joining.rank == 1 and joining.secret == address.secret
            end.sendall(b"+")
            assert channel.socket.recv(1) == b"+"
            assert stranger.recv(1) == other.recv(1) == b"", "rank 0 has closed them"
    if address.unix is not None:
        assert not Path(address.unix).parent.exists()


def wrong(store: Any, secret: str) -> Any:
    """Return a store with the same address and another secret."""
    other = HashStore()
    address = msgspec.json.decode(store.get(KEY), type=Address)
    other.set(KEY, msgspec.json.encode(msgspec.structs.replace(address, secret=secret)))
    return other


def test_rank_0_waits_no_longer_than_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.parallel.placement.START_S", 0.05)
    with closing(MeetingPlace(in_store(0, 2, HashStore()))) as place, pytest.raises(RankLost, match="rank 1 has not come"):
        place.channel(1)


def test_a_message_of_a_rank_without_a_name_is_no_name() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        RankChannel(theirs, Joining).send(Address(None, None, ""))
        with pytest.raises(msgspec.ValidationError):
            RankChannel(ours, Joining).recv()


Two = list[GroupExchange]
needs_kernels = pytest.mark.skipif(choose("auto").kernels is None, reason="ranks need the kernels of the CPU")


@pytest.fixture
def two() -> Any:
    """The exchanges of two ranks over loopback."""
    store, kernels = HashStore(), choose("auto").kernels
    assert kernels is not None
    library = SumKernels(kernels).library

    def made(rank: int) -> GroupExchange:
        group = process_group(store, in_store(rank, 2, store))
        return GroupExchange(64, rank, 2, group, library)

    with ThreadPoolExecutor(2) as pool:
        exchanges = list(pool.map(made, range(2)))
    yield exchanges
    for each in exchanges:
        each.close()


def both(*calls: Callable[[], Any]) -> list[Any]:
    """Return what calls on two ranks return or raise, at the same time."""

    def done(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RankLost as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(done, calls))


@needs_kernels
def test_tensors_of_different_sizes_are_gathered(two: Two) -> None:
    own = [torch.arange(6.0).view(2, 3), torch.arange(4.0).view(2, 2)]
    shapes = [each.shape for each in own]
    for _ in range(3):
        for found in both(*(lambda rank=rank: two[rank].gather(own[rank], shapes) for rank in range(2))):
            assert all(torch.equal(*pair) for pair in zip(found, own, strict=True))


@needs_kernels
def test_ranks_that_are_out_of_step_end(two: Two) -> None:
    """Instead of taking unrelated numbers: of as many bytes, which only the header tells apart."""
    shapes = [(4,), (2,)], [(2,), (4,)]
    found = both(*(lambda rank=rank: two[rank].gather(torch.zeros(4), shapes[rank]) for rank in range(2)))
    assert found == [f"rank {rank} of 2 is out of step: it exchanges something else" for rank in (1, 0)]


@needs_kernels
def test_a_rank_that_does_not_come_is_not_awaited_for_ever(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.parallel.group_exchange.NOTICE_S", 0.0)
    two[0].patience(0.1)
    with pytest.raises(RankLost, match=r"did not answer within 0.1 s"):
        two[0].gather(torch.zeros(4), [(4,), (4,)])


@needs_kernels
def test_the_thread_ends_with_the_exchange(two: Two) -> None:
    mine = [each for each in threading.enumerate() if each.name == "rollout-ranks"]
    assert len(mine) >= 2
    for each in two:
        each.close()
    for thread in mine[-2:]:
        thread.join(10)
        assert not thread.is_alive()


def test_an_engine_whose_ranks_share_nothing_carries(tmp_path: Path) -> None:
    """The control of the tests of equal bits."""
    with ranks_in_threads(hosts=True), closing(ranked_engine(saved(tmp_path, "float32"), 2, "float32")) as engine:
        assert isinstance(engine.worker.ranks_of.exchange, GroupExchange)  # type: ignore[attr-defined]
        ranks = engine.status()["ranks"]
        assert [each["rank"] for each in ranks] == [0, 1] and all(each["rss_bytes"] > 0 for each in ranks)


def test_a_request_that_is_not_answered_ends_the_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, wait = Follower._answer, threading.Event()  # noqa: SLF001

    def silent(self: Follower, order: Any) -> Any:
        wait.wait(30)
        return answer(self, order)

    with ranks_in_threads(hosts=True), closing(ranked_engine(saved(tmp_path, "float32"), 2, "float32")) as engine:
        engine.worker.followers.patience(0.05)  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(Follower, "_answer", silent)
            with pytest.raises(RankLost, match=r"rank 1 of 2 did not answer within 0.05 s"):
                engine.status()
            wait.set()
