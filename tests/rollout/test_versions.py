"""A version names one digest: over restarts, behind a journal, for whoever requires it, at both ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.client.api import RolloutClient
from rollout.client.pending import REMEMBERED, WeightHistory
from rollout.engine.values import Sampling, Served
from rollout.service.journal import Journal
from rollout.transport import messages as m
from rollout.transport.errors import ServiceRestarted, WeightsRefused
from rollout.transport.frames import pack
from rollout.transport.loopback import LoopbackService
from tests.support import toy
from tests.support.lasting import SeededEngine
from tests.support.played import Played, failure
from tests.support.waiting import until
from tests.support.watermark import watermark_engine, weights_of
from tests.support.wire import Bench, Peer, serving, submit

WAIT = 60.0


# behind a journal


@contextmanager
def life(path: Path) -> Iterator[RolloutClient]:
    """One service on the journal, with the weights of its folder, and its trainer."""
    end = LoopbackService()
    with (
        serving(watermark_engine(), end, journal=Journal(str(path), "watermark")),
        RolloutClient(transport=end.connect(), connect_timeout_s=WAIT) as client,
    ):
        yield client


def test_versions_go_on_behind_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with life(path) as trainer:
        digests = [trainer.refresh(weights_of(7 + i)).digest for i in range(3)]
        assert trainer.weights_status()["version"] == 3
    with life(path) as trainer:
        assert trainer.info.version == 0 and trainer.info.digest not in digests
        with pytest.raises(WeightsRefused, match="version 3 was served before the restart, and versions only grow"):
            trainer.refresh(weights_of(8), version=2)
        with pytest.raises(WeightsRefused, match="version 3 was served before the restart with other weights"):
            trainer.refresh(weights_of(8), version=3)
        assert trainer.weights_status(verify=True)["live_digest"] == trainer.info.digest, "what was refused has left no trace"
        again = trainer.refresh(weights_of(9), version=3)
        assert (again.version, again.digest) == (3, digests[2]), "the very same weights may have their number again"
    with life(path) as trainer:
        pass  # nothing is refreshed, and nothing forgotten
    with life(path) as trainer:
        assert trainer.refresh(weights_of(8)).version == 4


# groups that were open


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    lives = Lives(tmp_path / "journal")
    yield lives
    lives.kill()


class Lives:
    """One service after the other on one journal, turned by hand. folder: which weights are version 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bench: Bench

    def start(self, engine: Any = None, folder: str = "folder") -> Peer:
        engine = engine or SeededEngine()
        engine.folder = folder
        self.bench = Bench(engine, journal=Journal(str(self.path), "seeded"))
        return self.bench.connect("1" * 32)

    def kill(self) -> None:
        record: Any = self.bench.service._persistence
        record.close()


@pytest.mark.parametrize("folder", ["folder", "another"])
def test_groups_go_on_under_no_other_weights_of_their_version(lives: Lives, folder: str) -> None:
    peer, group = lives.start(), submit(max_tokens=5)
    peer.hello()
    peer.send(group)
    lives.bench.turn()
    lives.kill()
    peer = lives.start(folder=folder)
    assert peer.hello([group]).digest == f"weights {folder}"
    lives.bench.turn()
    parked = lives.bench.service.status()["service"]["parked_groups"]
    assert (parked, len(lives.bench.engine.groups)) == ((0, 1) if folder == "folder" else (1, 0))
    lives.bench.engine.version = 1
    lives.bench.settle()
    (sample,) = peer.samples()
    assert sample.weight_versions == [(0, 1)] and sample.finish_reason == "length"


def test_parked_groups_count_in_the_status(lives: Lives) -> None:
    peer, groups = lives.start(toy.engine()), [submit(f"g{i}", max_tokens=50, ignore_eos=True) for i in range(3)]
    lives.bench.engine.weights.version = 2  # type: ignore[attr-defined]
    peer.hello()
    peer.send(*groups)
    until(lambda: lives.bench.turn() or lives.bench.service.status()["groups"] == 3, "the groups have come")
    lives.kill()
    peer = lives.start(toy.engine())
    peer.hello(groups)
    status = lives.bench.service.status()
    assert (status["groups"], status["waiting"], status["service"]["parked_groups"]) == (3, 3, 3)
    assert status["digest"] == lives.bench.engine.weights.digest


def test_a_client_notices_other_weights_under_its_version() -> None:
    """Behind a journal, so that it would go on; and the service hears that the group is not wanted."""
    played = Played()
    played.starts, played.live = 1, Served(4, "aa")
    hello = reconnect(played)
    played.welcome(hello)
    handles = [played.client.submit([1], Sampling(), id) for id in "gh"]
    sent = [played.get(m.Submit) for _ in handles]
    played.starts, played.live = 2, Served(4, "bb")
    hello = reconnect(played)
    assert len(hello.groups) == 2
    played.welcome(hello, m.digests(map(m.digest, sent)))
    for handle in handles:
        error = failure(handle)
        assert type(error) is ServiceRestarted and "other weights as version 4" in str(error)
    assert len(played.get(m.Hello).groups) == 0


@pytest.mark.parametrize("live", [Served(4, "aa"), Served(5, "bb"), Served(4, "")], ids=["same", "newer", "not known"])
def test_a_client_goes_on_under_the_same_weights_and_newer_ones(live: Served) -> None:
    played = Played()
    played.starts, played.live = 1, Served(4, "aa")
    played.welcome(reconnect(played))
    handle = played.client.submit([1], Sampling(), "g")
    sent = played.get(m.Submit)
    played.starts, played.live = 2, live
    played.welcome(reconnect(played), m.digests([m.digest(sent)]))
    played.send(played.sample("g", 0))
    assert len(handle.result(WAIT)) == 1


def reconnect(played: Played) -> m.Hello:
    played.send(m.Refused("no_session", "who are you"))
    hello: m.Hello = played.get(m.Hello)
    return hello


# without a journal


def test_resubmitted_groups_wait_for_their_weights_and_no_others() -> None:
    played = Played(resubmit=True)
    played.live = Served(4, "aa")
    played.welcome(reconnect(played))
    handle = played.client.submit([1], Sampling(), "g")
    played.get(m.Submit)
    played.incarnation, played.live = "two", Served(0, "00")
    played.welcome(reconnect(played))
    until(lambda: played.client.info.incarnation == "two")
    assert not handle.done
    assert played.client._session.link.weights.next_version() == 5, "a refresh without a number is what they wait for"
    played.send(m.Alive(0, 4, digest="bb"))
    assert type(failure(handle)) is ServiceRestarted


def test_a_refresh_without_a_number_is_above_what_groups_wait_for() -> None:
    seen = WeightHistory()
    seen.set_live(Served(4, "aa"))
    seen.add(Served(5, "bb"))  # Applied, before Alive says it
    seen.restarted(same_incarnation=False, resubmit=True)
    seen.set_live(Served(0, "00"))
    assert seen.next_version() == 6
    seen.set_live(Served(6, "cc"))
    assert seen.next_version() is None
    seen.restarted(same_incarnation=True, resubmit=True)  # a journal: the service knows
    seen.set_live(Served(0, "00"))
    assert seen.next_version() is None
    seen.restarted(same_incarnation=False, resubmit=False)  # nothing of before is open
    assert seen.next_version() is None
    for version in range(2 * REMEMBERED):
        seen.add(Served(version, "dd"))
    assert len(seen._digests) == REMEMBERED and seen.digest(6) == "" and seen.digest(2 * REMEMBERED - 1) == "dd"


@pytest.mark.parametrize(("version", "digest", "taken"), [(3, "weights 3", True), (3, "another", False), (2, "another", True)])
def test_require_version_means_the_weights_that_it_named(version: int, digest: str, taken: bool) -> None:
    bench = Bench()  # version 3 is live
    wanted = submit(max_tokens=1)
    message = m.Submit("g", wanted.prompt, wanted.sampling, require_version=version, require_digest=digest)
    peer = bench.client().send(message)
    bench.settle()
    if taken:
        assert len(peer.samples()) == 1
    else:
        refused = peer.refused()
        assert refused.kind == "stale_weights" and "other weights under that version" in refused.message


@pytest.mark.parametrize("capable", [True, False])
def test_a_client_requires_the_digest_that_it_has_seen(capable: bool) -> None:
    played = Played()
    played.capabilities, played.live = (m.DIGESTS,) * capable, Served(4, "aa")
    played.welcome(reconnect(played))
    until(lambda: played.client.info.version == 4)
    played.client.require_version = 4
    played.live = Served(6, "cc")
    played.send(m.Alive(0, 6, digest="cc"))
    played.client.submit([1], Sampling(), "g")
    sent = played.get(m.Submit)
    assert (sent.require_version, sent.require_digest) == (4, "aa" if capable else "")
    assert played.client.require_version == 4


def test_digests_are_told_to_those_who_know_them() -> None:
    bench = Bench()
    peers = bench.client(m.DIGESTS), bench.client()
    for session in bench.service._sessions:
        session.last_sent_at = -1e9
    bench.turn(2)
    told = [peer.take(m.Alive) for peer in peers]
    assert [[alive.digest for alive in some][:1] for some in told] == [["weights 3"], [""]]
    assert b"digest" not in bytes(pack(m.Alive(1, 3))[0]) and b"require" not in bytes(pack(submit())[0])
