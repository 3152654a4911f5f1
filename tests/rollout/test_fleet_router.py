"""A router that is killed, and the one after it: replicas outlive it, and it is known which weights are live."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from rollout.client import link as link_module
from rollout.client.api import RolloutClient
from rollout.config import Config, dump
from rollout.engine.values import Group, Mode, Sample, Sampling, Served, TensorInfo, WeightUpdate, manifest_digest
from rollout.fleet.fleet import Fleet
from rollout.fleet.launcher import Host, Launcher, ProcessExit, RouterFolder
from rollout.fleet.replica_set import Predecessor
from rollout.fleet.survivor import Survivor
from rollout.fleet.timing import Timing
from rollout.fleet.weights import FleetWeights
from rollout.service.journal import Journal
from rollout.service.phases import LoopPhase
from rollout.transport import messages as m
from rollout.transport.errors import SourceUnreachable, WeightsRefused
from rollout.transport.weights.shm import SegmentView, ShmOffer
from tests.support.fleet import KEYS, TIMING, WAIT, Threads, collect, fed, fleet_over, refresh, step_until
from tests.support.hash_engine import HashEngine, expected, manifest_of, weights_of
from tests.support.lasting import ROOT
from tests.support.ports import free_port
from tests.support.waiting import until
from tests.support.wire import Bench, Peer, submit

PROMPT = np.array([5, 6, 7], np.int32)


def run(fleet: Fleet, count: int = 8) -> list[Sample]:
    for i in range(count):
        fleet.submit(Group(f"g{i}", PROMPT, Sampling(n=2, max_tokens=10, seed=i)))
    return list(collect(fleet, 2 * count).values())


def check(samples: list[Sample], version: int) -> None:
    for sample in samples:
        assert sample.finish_reason == "length" and sample.weight_versions == [(0, version)]
        assert sample.token_ids.tolist() == expected(PROMPT, sample, KEYS)


class Lives:
    """One router after the other on the same replicas."""

    def __init__(self, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads = threads
        self.fleet = fleet_over(threads)
        self.fleet.open(WAIT)
        self._monkeypatch = monkeypatch

    def kill(self) -> None:
        """Nothing more comes of the router: its links end without a word."""
        with self._monkeypatch.context() as patch:
            patch.setattr(link_module, "say_goodbye", lambda *arguments: None)
            for replica in self.fleet.replicas.by_name.values():
                if replica.link is not None:
                    replica.link.close()
        self.fleet.weights.close()

    def start(self, version: int, wait: bool = True, digest: str = "", timing: Timing = TIMING) -> Fleet:
        """The next router, whose journal has that version; its replicas join it."""
        self.fleet = fleet_over(self.threads, timing, predecessor=Predecessor(Served(version, digest), returning=True))
        if wait:
            self.fleet.open(WAIT, count=1, patient=True)
        return self.fleet

    def states(self) -> list[str]:
        return [replica.state.value for replica in self.fleet.replicas.by_name.values()]


@contextmanager
def lives_of(monkeypatch: pytest.MonkeyPatch, count: int = 3) -> Iterator[Lives]:
    lives = Lives(Threads(count), monkeypatch)
    try:
        yield lives
    finally:
        lives.fleet.close()


# which weights are live


def test_the_next_router_goes_on_with_the_weights_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts later gets them from another replica: the router has not got them any more."""
    with lives_of(monkeypatch) as lives:
        refresh(lives.fleet, 1)
        refresh(lives.fleet, 2)
        lives.kill()
        fleet = lives.start(version=2)
        assert fleet.version == 2 and fleet.weights.live.base is None
        check(run(fleet), 2)
        lives.threads.die("r1")
        step_until(fleet, lambda: lives.threads.replaced == ["r1"] and lives.states() == ["serving"] * 3)
        assert lives.threads.engines["r1"].live_digest() == fleet.weights.digest == manifest_digest(manifest_of(weights_of(2)))
        refresh(fleet, 3)
        check(run(fleet), 3)


@pytest.mark.parametrize("journaled", [1, 2])
def test_a_refresh_that_one_replica_has_is_one_of_all(journaled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router was killed while it committed. Never some of version 1 and some of version 2."""
    with lives_of(monkeypatch) as lives:
        refresh(lives.fleet, 1)
        lives.kill()
        engine = lives.threads.engines["r2"]
        engine.tensors, engine.key, engine.version = weights_of(2), KEYS[2], 2
        fleet = lives.start(journaled)
        assert fleet.version == 2
        step_until(fleet, lambda: lives.states() == ["serving"] * 3)
        assert {engine.live_digest() for engine in lives.threads.engines.values()} == {fleet.weights.digest}
        check(run(fleet), 2)


def test_a_refresh_that_no_replica_has_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the router before has staged is not in the way of the next one."""
    with lives_of(monkeypatch) as lives:
        refresh(lives.fleet, 1)
        staging = lives.fleet.stage(WeightUpdate(manifest_of(weights_of(2)), version=2))
        step_until(lives.fleet, fed(staging, weights_of(2)))
        assert all(engine.staged for engine in lives.threads.engines.values())
        lives.kill()
        fleet = lives.start(1)
        assert fleet.version == 1
        refresh(fleet, 2, weights_of(5))
        assert {engine.key for engine in lives.threads.engines.values()} == {KEYS[5]}


def test_no_replica_has_what_was_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sampled from the base checkpoint in silence: groups wait for a refresh of all tensors."""
    with lives_of(monkeypatch) as lives:
        lives.kill()
        fleet = lives.start(version=4)
        assert fleet.version == 4 and fleet.mode is Mode.WITHOUT_WEIGHTS and lives.states() == ["stale"] * 3
        fleet._grace_s = 0.0
        fleet.submit(Group("g", PROMPT, Sampling(n=2, max_tokens=10, seed=1)))
        with pytest.raises(WeightsRefused, match="all tensors must come first"):
            fleet.stage(WeightUpdate(manifest_of({"w0": weights_of(5)["w0"]}), version=5, partial=True))
        for _ in range(20):
            assert not fleet.step()
            time.sleep(0.02)
        refresh(fleet, 5)
        assert fleet.mode is Mode.RUNNING
        check(list(collect(fleet, 2).values()), 5)
        step_until(fleet, lambda: lives.states() == ["serving"] * 3)


@pytest.mark.parametrize("same", [True, False])
def test_replicas_with_other_weights_under_that_version_have_not_what_was_live(
    same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another router has refreshed them meanwhile, say. Nothing is sampled from theirs under this router's number."""
    with lives_of(monkeypatch) as lives:
        refresh(lives.fleet, 1)
        refresh(lives.fleet, 2)
        digest = lives.fleet.weights.digest if same else "ab" * 32
        lives.kill()
        fleet = lives.start(version=2, wait=same, digest=digest)
        if same:
            return check(run(fleet), 2)
        step_until(fleet, lambda: fleet.weights.settled and lives.threads.replaced)
        assert (fleet.version, fleet.weights.digest) == (2, digest)
        step_until(fleet, lambda: fleet.mode is Mode.WITHOUT_WEIGHTS)
        assert fleet.stage(WeightUpdate(manifest_of(weights_of(5)), version=None)).version == 3


def test_taking_the_oldest_for_live_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a trainer was told that version 2 is live, on the one replica that was left."""

    def oldest(self: FleetWeights, reported: list[Any]) -> None:
        one = min(reported, key=lambda replica: replica.version)
        self.settled, self.version, self.digest = True, one.version, one.digest

    monkeypatch.setattr(FleetWeights, "settle", oldest)
    with lives_of(monkeypatch) as lives:
        lives.kill()
        engine = lives.threads.engines["r2"]
        engine.tensors, engine.key, engine.version = weights_of(2), KEYS[2], 2
        fleet = lives.start(2)
        with pytest.raises(AssertionError):
            check(run(fleet), 2)


def test_a_partial_refresh_over_weights_that_only_replicas_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with lives_of(monkeypatch) as lives:
        refresh(lives.fleet, 1)
        lives.kill()
        fleet = lives.start(1)
        refresh(fleet, 2, {"w1": weights_of(2)["w1"]}, partial=True)
        lives.threads.die("r0")
        step_until(fleet, lambda: lives.threads.replaced == ["r0"] and lives.states() == ["serving"] * 3)
        assert lives.threads.engines["r0"].live_digest() == lives.threads.engines["r1"].live_digest()
        refresh(fleet, 3, {"w2": weights_of(3)["w2"]}, partial=True)  # over what was borrowed
        lives.threads.die("r2")
        step_until(fleet, lambda: lives.threads.replaced == ["r0", "r2"] and lives.states() == ["serving"] * 3)
        assert lives.threads.engines["r2"].live_digest() == lives.threads.engines["r1"].live_digest()


def test_one_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that listens and says nothing, as a stopped process does, is not waited for for ever."""
    with lives_of(monkeypatch, 2) as lives:
        refresh(lives.fleet, 1)
        lives.kill()
        stands = lives.threads.services["r0"]
        monkeypatch.setattr(stands, "_hello", lambda *arguments: None)
        fleet = lives.start(1, timing=Timing(poll_s=0.02, welcome_s=0.3))
        assert fleet.version == 1 and "r0" in lives.threads.replaced
        step_until(fleet, lambda: lives.states() == ["serving"] * 2)
        assert lives.threads.engines["r0"].live_digest() == fleet.weights.digest


# what a service does for a router


@pytest.mark.parametrize("old_one_is", ["a router", "a client"])
def test_a_router_has_its_replica_for_itself(old_one_is: str) -> None:
    """It takes the place of another router, not that of a client: whoever can reach a service can say such a Hello."""
    bench = Bench()
    old, new = bench.connect(), bench.connect()
    old.hello(capabilities=(m.GATHERS,) if old_one_is == "a router" else ())
    old.send(submit("g", n=2, max_tokens=1000))
    bench.turn()
    assert bench.engine.groups
    new.send(m.Hello(m.PROTOCOL, "f" * 32, 1, "new", (m.GATHERS,), alone=True))
    bench.turn(3)
    stays = old_one_is == "a client"
    assert bool(bench.engine.groups) == stays and len(list(bench.service._sessions)) == 1 + stays


def test_sessions_of_other_keys_stay() -> None:
    bench = Bench()
    bench.connect().hello(capabilities=(m.GATHERS,))
    sessions = bench.service._sessions
    theirs = sessions.open("3" * 32, "", key="theirs")
    (mine,) = [one for one in sessions if one.key == ""]
    assert sessions.others(theirs) == [] and sessions.others(mine) == []
    assert sessions.others(sessions.open("4" * 32, "")) == [mine]


def test_a_service_that_is_told_to_ends_when_it_is_alone() -> None:
    now = [0.0]
    watch = LoopPhase(clock=lambda: now[0], alone_s=5.0)
    assert [watch.alone(clients, at) for clients, at in ((0, 0.0), (0, 5.0), (1, 6.0), (0, 7.0), (0, 12.0), (0, 12.1))] == [
        *[False] * 5,
        True,
    ]
    assert not LoopPhase().alone(0, 1e9)
    bench = Bench(exit_without_clients_s=1e-9)
    bench.client()
    bench.turn(3)
    assert bench.service._stop_reason is None
    bench.service._forget(next(iter(bench.service._sessions)), "gone")
    until(lambda: (bench.turn(), bench.service._stop_reason)[1])


def test_a_version_is_written_before_its_trainer_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(HashEngine(), journal=Journal(str(tmp_path / "journal"), "hash"))  # type: ignore[arg-type]
    journal: Any = bench.service._persistence
    seen: list[int] = []
    flush = bench.service._flush
    monkeypatch.setattr(bench.service, "_flush", lambda: (seen.append(journal.weights.version), flush()))
    bench.client()
    monkeypatch.setattr(bench.service._refreshes, "work", lambda now, busy: setattr(bench.engine, "version", 3))
    seen.clear()
    bench.turn()
    assert seen == [3, 3]
    journal.close()


def test_a_replica_that_does_not_return_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the one that has the newest weights."""
    with lives_of(monkeypatch, 2) as lives:
        refresh(lives.fleet, 1)
        lives.kill()
        away = lives.threads._joins.pop("r0")
        fleet = lives.start(1, wait=False, timing=Timing(poll_s=0.02, return_s=0.5))
        began = time.monotonic()
        step_until(fleet, lambda: fleet.weights.settled)
        assert time.monotonic() - began >= 0.5
        check(run(fleet), 1)
        lives.threads._joins["r0"] = away
        step_until(fleet, lambda: lives.states() == ["serving"] * 2)


# processes that outlive their router


class Routers:
    """One launcher after the other, as of routers that are killed. `now`: their clock."""

    def __init__(self, note: Path) -> None:
        self.note, self.now = note, 0.0
        self.launchers: list[Launcher] = []

    def start(self, count: int = 2, configuration: str = "a", wait: bool = True) -> Launcher:
        command = [sys.executable, "-c", "__import__('time').sleep(600)"]
        folder = RouterFolder(self.note, configuration)
        launcher = Launcher(lambda name: command, [Host()] * count, folder, clock=lambda: self.now)
        self.launchers.append(launcher)
        launcher.poll()
        assert not wait or all(pids(launcher))
        return launcher

    def kill(self) -> None:
        os.close(self.launchers[-1].folder.folder.lock)  # all that a kill does to it

    def close(self) -> None:
        if self.launchers[-1].folder.path.exists():  # the test has not closed it
            self.launchers[-1].close()
        for launcher in self.launchers:
            for one in launcher._processes.values():
                if isinstance(one.child, subprocess.Popen):
                    one.child.kill()
                    one.child.wait(WAIT)


def pids(launcher: Launcher) -> list[int]:
    """Return the process of each replica; 0: it has none."""
    return [one.child.pid if one.child is not None else 0 for one in launcher._processes.values()]


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[Routers]:
    one = Routers(tmp_path / "journal.replicas")
    yield one
    one.close()


def ends(launcher: Launcher) -> ProcessExit:
    found: list[ProcessExit] = []
    until(lambda: (found.extend(launcher.poll()), found)[1], "a process ends", WAIT)
    return found[0]


def test_processes_that_join_again_are_taken_over(routers: Routers) -> None:
    first = routers.start()
    one, other = pids(first)
    routers.kill()
    first._processes["local-0"].child.kill()  # type: ignore[union-attr]
    first._processes["local-0"].child.wait()  # type: ignore[union-attr]
    second = routers.start(wait=False)
    assert second.folder.path == first.folder.path and pids(second) == [0, 0], "it waits for them"
    assert second.admit("local-1", other) and second.admit("local-1", other) and not second.admit("local-1", os.getpid())
    routers.now = 6.0
    second.poll()
    (new, same) = pids(second)
    assert same == other and new not in (0, one)
    assert not second.admit("local-0", other), "it comes too late"
    second.kill("local-1")
    assert "only its parent knew" in ends(second).why
    routers.now = 12.0
    second.poll()
    assert pids(second)[1] not in (0, other)
    second.close()
    assert not routers.note.exists() and not second.folder.path.exists() and not any(map(lives, [one, other, new]))


def test_replicas_with_another_configuration_are_refused(routers: Routers) -> None:
    (pid,) = pids(routers.start(1))
    routers.kill()
    second = routers.start(1, "b")
    assert not second.folder.returning and not second.admit("local-0", pid) and pids(second) != [pid]


def test_a_router_has_as_many_replicas_as_it_is_started_with(routers: Routers) -> None:
    one, other = pids(routers.start(2))
    routers.kill()
    second = routers.start(1, wait=False)
    assert second.admit("local-0", one) and not second.admit("local-1", other)
    routers.kill()
    third = routers.start(3, wait=False)
    assert third.admit("local-0", one) and third.admit("local-1", other) and not third.admit("local-2", other)
    routers.now = 6.0
    third.poll()
    assert all(pids(third))


def test_nothing_is_waited_for_where_no_replica_is_left(routers: Routers) -> None:
    first = routers.start(1)
    routers.kill()
    child = first._processes["local-0"].child
    assert child is not None
    child.kill()
    child.wait(WAIT)
    second = routers.start(1)
    assert not second.folder.returning and Survivor.of(child.pid) is None
    routers.note.write_text("")
    assert not RouterFolder(routers.note, "a").returning


def test_a_host_without_descriptors_is_waited_for(routers: Routers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router goes on, says it once, and starts its replica once it can."""
    works, failed = subprocess.Popen, list[float]()

    def fails(*given: Any, **options: Any) -> Any:
        if len(failed) < 2:
            failed.append(routers.now)
            raise OSError(errno.EMFILE, "Too many open files")
        return works(*given, **options)

    monkeypatch.setattr(subprocess, "Popen", fails)
    launcher = routers.start(1, wait=False)
    assert launcher.poll() == [] and failed == [0.0]
    routers.now = 1.0
    assert launcher.poll() == [] and failed == [0.0, 1.0]
    monkeypatch.setattr(subprocess, "Popen", works)
    routers.now = 2.0
    launcher.poll()
    assert all(pids(launcher))


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# a copy of the weights


def shared(bench: Bench, peer: Peer) -> dict[str, Any]:
    peer.send(m.Share(7))
    until(lambda: (bench.turn(), any(isinstance(one, m.StatusReply) for one in peer.read()))[1])
    return dict(msgspec.json.decode(peer.take(m.StatusReply)[0].status))


def read(answer: dict[str, Any]) -> bytes:
    return SegmentView().open(msgspec.convert(answer["offer"], ShmOffer)).tobytes()


def test_what_is_shared_is_what_is_live() -> None:
    bench = Bench(HashEngine())  # type: ignore[arg-type]
    engine: Any = bench.engine
    peer, other = bench.client(), bench.client()
    answer = shared(bench, peer)
    assert read(answer) == b"".join(weights.tobytes() for weights in weights_of(0).values())
    assert (answer["version"], answer["digest"]) == (0, engine.live_digest())
    assert msgspec.convert(answer["manifest"], list[TensorInfo]) == manifest_of(weights_of(0))
    assert shared(bench, other) == answer, "it is not written again"
    bench.service._refreshes._export.discard()  # as other weights go live
    engine.tensors, engine.version = weights_of(1), 1
    with pytest.raises(SourceUnreachable):
        read(answer)
    assert read(shared(bench, peer)) == b"".join(weights.tobytes() for weights in weights_of(1).values())
    peer.send(m.Goodbye())
    bench.turn()
    assert len(bench.service._refreshes._export._segment._memory) == 0, "nobody needs it"


def test_what_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(HashEngine())  # type: ignore[arg-type]
    engine: Any = bench.engine
    peer = bench.client()
    engine.mode = Mode.ASLEEP
    peer.send(m.Share(7))
    bench.turn()
    assert (peer.refused().kind, bench.service._refreshes.has_work) == ("busy", False)
    engine.mode = Mode.RUNNING
    engine.read_slice = lambda *arguments: 1 / 0
    peer.send(m.Share(8))
    bench.turn(2)
    assert "ZeroDivisionError" in peer.refused().message
    monkeypatch.delattr(HashEngine, "own")  # as of a router
    router = Bench(HashEngine())  # type: ignore[arg-type]
    peer = router.client().send(m.Share(9))
    router.turn()
    assert "ask one of its replicas" in peer.refused().message


# as a user has it


@pytest.mark.long
def test_rollout_serve_goes_on_with_its_replicas(tiny_config: Config, tmp_path: Path) -> None:
    """The command line, a model, a refresh, SIGKILL of the router: the same replicas serve the refreshed weights."""
    endpoint, toml = f"tcp://127.0.0.1:{free_port()}", tmp_path / "config.toml"
    toml.write_text(dump(tiny_config))
    flags = ["--config", str(toml), "--service.endpoint", endpoint, "--replicas", "2", "--fleet.router-grace-s", "5"]
    command = [sys.executable, "-m", "rollout", "serve", *flags, "--journal", str(tmp_path / "journal")]

    def start(life: int) -> subprocess.Popen[bytes]:
        ready = tmp_path / f"ready{life}"
        process = subprocess.Popen([*command, "--ready-file", str(ready)], cwd=ROOT, stdout=subprocess.DEVNULL)
        until(lambda: ready.exists() or process.poll() is not None, "the router listens", 200)
        assert process.poll() is None
        return process

    weights = {name: tensor + 0.01 for name, tensor in load_file(Path(tiny_config.engine.model) / "model.safetensors").items()}
    process = start(0)
    try:
        with RolloutClient(endpoint, connect_timeout_s=WAIT) as client:
            client.refresh({name: torch.clone(tensor) for name, tensor in weights.items()}, version=3, timeout=WAIT)
            digest = client.weights_status(True)["live_digest"]
            pids = {one["name"]: one["pid"] for one in client.status()["replicas"]}
            handles = [client.submit([5 + i, 6, 7], Sampling(n=4, max_tokens=200, ignore_eos=True)) for i in range(4)]
            process.kill()
            process.wait(WAIT)
            psutil.Process(pids["local-1"]).kill()
            process = start(1)
            groups = [handle.result(2 * WAIT) for handle in handles]
            assert {sample.weight_versions[0] for samples in groups for sample in samples} == {(0, 3)}
            until(lambda: client.status()["fleet"]["serving"] == 2, "both serve", 2 * WAIT)
            again = {one["name"]: one["pid"] for one in client.status()["replicas"]}
            assert again["local-0"] == pids["local-0"] and again["local-1"] != pids["local-1"]
            assert client.weights_status(True)["live_digest"] == digest, "also of the one that had only the checkpoint"
            for i, samples in enumerate(groups):
                seeded = Sampling(n=4, max_tokens=200, ignore_eos=True, seed=samples[0].seed)
                for one, other in zip(samples, client.submit([5 + i, 6, 7], seeded).result(WAIT), strict=True):
                    assert one.token_ids.tolist() == other.token_ids.tolist()
                    assert one.logprobs.tobytes() == other.logprobs.tobytes()
        process.kill()
        process.wait(WAIT)
        until(lambda: not any(map(lives, again.values())), "replicas without a router end by themselves", WAIT)
    finally:
        process.kill()
        process.wait(WAIT)
