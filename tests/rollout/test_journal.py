"""A service that is killed goes on where it was: with its journal, or with what its clients submit again."""

from __future__ import annotations

import random
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.client.api import RolloutClient
from rollout.commands.main import main
from rollout.config import Config, InputError, dump
from rollout.engine.values import Sample, Sampling
from rollout.service import journal
from rollout.service.build import open_service
from rollout.service.journal import Journal
from rollout.service.persistence import Persistence
from rollout.transport import messages as m
from rollout.transport.errors import ServiceLost, ServiceRestarted
from rollout.transport.loopback import LoopbackService
from tests.support.lasting import ROOT, Process, SeededEngine, expected
from tests.support.ports import free_port
from tests.support.waiting import until
from tests.support.wire import Bench, Peer, submit

WAIT = 60.0
ENDLESS = Sampling(n=2, max_tokens=40_000)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def one(journal: bool, **options: Any) -> Process:
        started.append(Process(tmp_path, tmp_path / "journal" if journal else None, **options))
        return started[-1].start()

    yield one
    for process in started:
        process.kill()


def check(samples: list[Sample], prompt: int, count: int) -> None:
    """Each is what one uninterrupted service makes of that seed, and all have the same."""
    (seed,) = {sample.seed for sample in samples}
    for sample in samples:
        assert sample.token_ids.tolist() == expected(prompt, sample.index, count, seed), sample.finish_reason


def test_killed_again_and_again_nothing_is_lost_doubled_or_changed(start: Callable[..., Process]) -> None:
    """Groups of many lengths; kills at random times. The client hears of nothing."""
    process, rng = start(journal=True), random.Random(18)
    came: list[tuple[str, int]] = []
    with RolloutClient(process.endpoint, link_timeout_s=WAIT) as client:
        handles = {}
        for number in range(40):
            count = rng.choice([1, 30, 200, 800])
            handle = client.submit([number], Sampling(n=4, max_tokens=count), group_id=f"g{number}")
            handle.listen(lambda handle, sample: came.append((handle.group_id, -1 if sample is None else sample.index)))
            handles[number] = handle, count
        for _ in range(5):
            time.sleep(rng.random() * 0.4)
            process.kill()
            process.start()
        for number, (handle, count) in handles.items():
            samples = handle.result(WAIT)
            assert [sample.index for sample in samples] == [0, 1, 2, 3]
            check(samples, number, count)
        assert len(came) == len(set(came)) == 160
        status = client.status()["service"]
        assert status["starts"] == 6 and client.info.starts == 6
        assert client.submit([1], Sampling(max_tokens=2)).result(WAIT)
        until(lambda: client.status()["service"]["clients"][0]["groups"] == 0)


def test_without_the_journal_clients_are_told(start: Callable[..., Process]) -> None:
    process = start(journal=False)
    with RolloutClient(process.endpoint, link_timeout_s=WAIT) as client:
        handle = client.submit([5], Sampling(n=2, max_tokens=40_000))
        client.status()
        process.kill()
        process.start()
        with pytest.raises(ServiceRestarted):
            handle.result(WAIT)


def test_resubmit_sends_what_was_open_once_the_weights_are_there(start: Callable[..., Process]) -> None:
    process = start(journal=False)
    process.refresh()
    with RolloutClient(process.endpoint, resubmit=True, restart_timeout_s=WAIT) as client:
        until(lambda: client.status()["version"] == 1)
        handles = [client.submit([number], Sampling(n=3, max_tokens=300 * (1 + number))) for number in range(3)]
        first = next(handles[0].samples(WAIT))
        request = client._session.link.request(lambda id: m.Control(id, "drain"))
        process.kill()
        process.start(version=0)
        with pytest.raises(ServiceRestarted):  # a request is not known to be harmless twice
            request.result(WAIT)
        until(lambda: client.info.version == 0)
        for _ in range(5):
            assert client.status()["running"] == 0  # the old weights get nothing
        assert not handles[2].done
        process.refresh()
        for number, handle in enumerate(handles):
            samples = handle.result(WAIT)
            check(samples, number, 300 * (1 + number))
            assert all(sample.weight_versions[0][1] >= 1 for sample in samples)
        assert first.seed == handles[0].result()[0].seed


def test_groups_of_a_journal_wait_for_the_weights_that_they_had(
    start: Callable[..., Process], caplog: pytest.LogCaptureFixture
) -> None:
    process = start(journal=True)
    process.refresh()
    with RolloutClient(process.endpoint, link_timeout_s=WAIT) as client:
        until(lambda: client.status()["version"] == 1)
        handle = client.submit([5], Sampling(n=2, max_tokens=2000))
        client.status()
        client.status()  # the turn in which it came is over, and written
        process.kill()
        late = client.submit([8], Sampling(n=2, max_tokens=5))  # the caller knows of no restart
        process.start(version=0)
        assert client.status(WAIT)["service"]["parked_groups"] == 1
        assert client.info.version == 0 and not late.done
        assert "open groups wait for a refresh live=0 needed=1" in caplog.text
        process.refresh()
        check(handle.result(WAIT), 5, 2000)
        check(late.result(WAIT), 8, 5)
        assert {sample.weight_versions[0][1] for sample in handle.result() + late.result()} == {1}


# by hand: a service that is gone without a word is one that is never closed


class Lives:
    """One service after the other on one journal, each on a loopback of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bench: Bench

    def start(self, version: int = 0) -> Peer:
        self.bench = Bench(SeededEngine(version=version), journal=Journal(str(self.path), "seeded"))
        return self.bench.connect("1" * 32)

    def kill(self) -> None:
        journal: Any = self.bench.service._persistence
        journal.close()  # what was not committed is lost; sqlite's and our locks go with a process


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    lives = Lives(tmp_path / "journal")
    yield lives
    lives.kill()


def test_acked_children_are_not_made_again(lives: Lives) -> None:
    group = submit(n=3, max_tokens=2)
    peer = lives.start()
    peer.hello()
    peer.send(group)
    lives.bench.settle()
    peer.send(m.Ack([("g", 0)]))
    lives.bench.turn()
    first = {sample.index: sample.token_ids.tolist() for sample in peer.samples()}
    lives.kill()
    peer = lives.start()
    welcome = peer.hello([group])
    assert welcome.starts == 2 and bytes(welcome.groups) == m.digest(group)
    lives.bench.turn()
    again = {sample.index: sample.token_ids.tolist() for sample in peer.samples()}
    assert again == {index: tokens for index, tokens in first.items() if index != 0} and len(again) == 2
    assert not lives.bench.engine.groups
    peer.send(m.Ack([("g", 1), ("g", 2)]))
    lives.bench.turn()
    assert rows(lives.path, "groups") == rows(lives.path, "samples") == 0


def rows(path: Path, table: str) -> int:
    with sqlite3.connect(path) as db:
        (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
    db.close()
    return int(count)


@pytest.mark.parametrize("finish_after", [None, 2])
def test_children_that_run_are_run_again_with_their_seed(lives: Lives, finish_after: int | None) -> None:
    peer = lives.start()
    peer.hello()
    begun = submit(n=4, max_tokens=5, finish_after=finish_after)
    peer.send(begun)
    lives.bench.turn(3)
    (group,) = [children[0].group for children in lives.bench.engine.groups.values()]
    lives.kill()
    peer = lives.start()
    peer.hello([begun])
    lives.bench.turn()
    (again,) = [children[0].group for children in lives.bench.engine.groups.values()]
    assert again.sampling == group.sampling and again.sampling.seed is not None and tuple(again.wanted) == (0, 1, 2, 3)
    lives.bench.settle()
    check(peer.samples(), 3, 5)


def test_what_counts_towards_finish_after_and_a_deadline_is_kept(lives: Lives) -> None:
    from rollout.engine.values import Group
    from rollout.service.journal import JournaledGroup
    from rollout.service.restoring import rest

    group = Group("1.1", np.array([1], np.int32), Sampling(n=5, finish_after=3, deadline_s=100.0))
    ended: Any = {0: ("stop", None), 2: ("length", None), 4: ("aborted", None)}
    left = rest(group, JournaledGroup("", "s", "1.1", [], 7, 0, 40.0, ended))
    assert left.wanted == (1, 3) and left.sampling.finish_after == 1
    assert left.sampling.deadline_s == pytest.approx(60.0) and left.sampling.seed == 7
    lives.start()


def test_ended_sessions_leave_nothing(lives: Lives) -> None:
    peer = lives.start()
    peer.hello()
    peer.send(submit(n=2, max_tokens=100))
    lives.bench.turn()
    assert rows(lives.path, "groups") == rows(lives.path, "sessions") == 1
    peer.send(m.Goodbye())
    lives.bench.turn()
    assert rows(lives.path, "groups") == rows(lives.path, "sessions") == rows(lives.path, "samples") == 0


def test_parked_groups_can_be_aborted_and_dropped(lives: Lives) -> None:
    peer, group, other = lives.start(version=3), submit(max_tokens=100), submit("h", max_tokens=100)
    peer.hello()
    peer.send(group, other)
    lives.bench.turn()
    lives.kill()
    peer = lives.start(version=0)
    peer.hello([group])  # the other one is not wanted any more
    lives.bench.turn()
    assert lives.bench.service.status()["service"]["parked_groups"] == 1 and not lives.bench.engine.groups
    peer.send(m.Abort(["g"]))
    lives.bench.turn(2)
    (sample,) = peer.samples()
    assert sample.finish_reason == "aborted" and sample.group_id == "g"


def test_samples_are_sent_after_they_are_written(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = lives.start()
    peer.hello()
    peer.send(submit(n=2, max_tokens=1))
    order: list[str] = []
    commit, send = Journal.commit, LoopbackService.send

    def written(self: Journal, version: int) -> None:
        if self._writes:
            order.append("written")
        commit(self, version)

    def sent(self: LoopbackService, peer: bytes, frames: Any) -> bool:
        order.append("sent")
        return send(self, peer, frames)

    monkeypatch.setattr(Journal, "commit", written)
    monkeypatch.setattr(LoopbackService, "send", sent)
    lives.bench.turn()
    assert order == ["written", "sent"]  # one transaction a turn


def test_a_turn_without_news_writes_nothing(lives: Lives) -> None:
    lives.start().hello()
    lives.bench.turn()
    changes = lives.bench.service._persistence._db.total_changes  # type: ignore[attr-defined]
    lives.bench.turn(20)
    assert lives.bench.service._persistence._db.total_changes == changes  # type: ignore[attr-defined]


def test_a_real_engine_goes_on_equal_to_the_bit(lives: Lives) -> None:
    """Killed every few steps, with children that end meanwhile; compared with one engine that was never stopped."""
    from tests.support import toy

    sent = [submit(f"g{i}", [1 + i, 2, 3], n=3, max_tokens=10 + 10 * i, ignore_eos=True) for i in range(4)]
    got: dict[tuple[str, int], Sample] = {}
    for life in range(60):
        lives.bench = Bench(toy.engine(), journal=Journal(str(lives.path), "toy"))  # type: ignore[arg-type]
        peer = lives.bench.connect("1" * 32)
        peer.hello([] if life == 0 else sent)
        if life == 0:
            peer.send(*sent)
        lives.bench.turn(8 + 4 * life)  # what has not ended begins again in each life
        for sample in peer.samples():
            known = got.setdefault((sample.group_id, sample.index), sample)
            assert known.token_ids.tolist() == sample.token_ids.tolist()  # sent again until it is acked
        if life % 3 == 0:
            peer.send(m.Ack(list(got)))
            lives.bench.turn()
        if len(got) == 12:
            break
        lives.kill()
    assert len(got) == 12 and life > 3
    for group in sent:
        children = [got[group.group_id, index] for index in range(3)]
        (seed,) = {sample.seed for sample in children}
        sampling = dict(n=3, max_tokens=group.sampling.max_tokens, ignore_eos=True, seed=seed)
        whole = toy.group(group.group_id, group.prompt.tolist(), **sampling)
        reference = toy.run(toy.engine(), [whole])
        for sample in children:
            want = reference[group.group_id, sample.index]
            assert sample.token_ids.tolist() == want.token_ids.tolist()
            assert sample.logprobs.tobytes() == want.logprobs.tobytes()


@pytest.mark.long
def test_rollout_serve_is_killed_with_keys_and_a_journal(tiny_config: Config, tmp_path: Path) -> None:
    """As a user has it: the command line, a model, SIGKILL; the samples are those of one life, in every bit."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    keys, mine, toml = tmp_path / "service.json", tmp_path / "client.json", tmp_path / "config.toml"
    assert main(["keys", "init", "--file", str(keys), "--address", endpoint]) == 0
    assert main(["keys", "add", "client", "--role", "rollout", "read", "--file", str(keys)]) == 0
    toml.write_text(dump(tiny_config))
    flags = ["--config", str(toml), "--service.endpoint", endpoint, "--service.keys", str(keys)]
    command = [sys.executable, "-m", "rollout", "serve", *flags, "--journal", str(tmp_path / "journal")]

    def start(life: int) -> subprocess.Popen[bytes]:
        ready = tmp_path / f"ready{life}"
        process = subprocess.Popen([*command, "--ready-file", str(ready)], cwd=ROOT, stdout=subprocess.DEVNULL)
        until(ready.exists, "the service listens", 200)
        return process

    process = start(0)
    try:
        with RolloutClient(str(mine), connect_timeout_s=WAIT) as client:
            sampling = Sampling(n=4, max_tokens=300, ignore_eos=True)
            handles = [client.submit([5 + i, 6, 7], sampling) for i in range(6)]
            for life in (1, 2, 3):
                until(lambda: client.status(WAIT)["generated_tokens"] > 500, "it generates")
                process.kill()
                process.wait(WAIT)
                process = start(life)
            groups = [handle.result(WAIT) for handle in handles]
            for i, samples in enumerate(groups):
                seeded = msgspec.structs.replace(sampling, seed=samples[0].seed)
                again = client.submit([5 + i, 6, 7], seeded).result(WAIT)
                for one, other in zip(samples, again, strict=True):
                    assert one.token_ids.tolist() == other.token_ids.tolist()
                    assert one.logprobs.tobytes() == other.logprobs.tobytes()
    finally:
        process.kill()
        process.wait(WAIT)


# the file


def test_a_log_that_cannot_be_opened_for_a_while_is_checkpointed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's first connection fails, as without descriptors; it ended for good then, and the log grew without a bound."""
    connect, opened = journal._connect, list[str]()

    def failing_once(path: str) -> sqlite3.Connection:
        opened.append(path)
        if len(opened) == 2:
            raise sqlite3.OperationalError("unable to open database file")
        return connect(path)

    monkeypatch.setattr(journal, "_connect", failing_once)
    one = Journal(str(tmp_path / "journal"), "seeded", checkpoint_s=0.01)
    try:
        until(lambda: len(opened) == 3, "the thread connects again")
    finally:
        one.close()


def test_one_service_at_a_time(lives: Lives) -> None:
    lives.start()
    with pytest.raises(InputError, match="another service uses it"):
        Journal(str(lives.path), "seeded")
    program = "import sys; from rollout.service.journal import Journal; Journal(sys.argv[1], 'seeded')"
    done = subprocess.run(
        [sys.executable, "-c", program, str(lives.path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "another service uses it" in done.stderr


@pytest.mark.parametrize("reason", ["database or disk is full", "disk I/O error"])
def test_a_service_that_can_keep_nothing_leaves_its_clients_to_the_next(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """As if it had been killed: not a group is ended, and nobody is told that it was."""
    group = submit(n=2, max_tokens=50, seed=5)
    peer = lives.start()
    peer.hello()
    peer.send(group)
    lives.bench.turn(3)

    def full(version: int) -> None:
        raise sqlite3.OperationalError(reason)

    monkeypatch.setattr(lives.bench.service._persistence, "commit", full)
    with pytest.raises(sqlite3.OperationalError, match=reason):
        lives.bench.service.run()
    assert not peer.take(m.SamplesDone) and not peer.samples() and not peer.take(m.Closing)
    peer = lives.start()
    peer.hello([group])
    lives.bench.settle()
    assert [sample.token_ids.tolist() for sample in sorted(peer.samples(), key=lambda one: one.index)] == [
        expected(3, i, 50, 5) for i in range(2)
    ]


def test_files_that_are_no_journal_of_ours(lives: Lives, tmp_path: Path) -> None:
    lives.start()
    assert stat.S_IMODE(lives.path.stat().st_mode) == 0o600
    lives.kill()
    with pytest.raises(InputError, match="is for the model seeded"):
        Journal(str(lives.path), "another")
    with sqlite3.connect(lives.path) as db:
        db.execute("UPDATE meta SET value = 9 WHERE name = 'version'")
    db.close()
    with pytest.raises(InputError, match="has version 9: this rollout writes 3"):
        Journal(str(lives.path), "seeded")
    (tmp_path / "text").write_text("not a database at all, but long enough to be looked at" * 10)
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(InputError, match="file is not a database"):
        Journal(str(tmp_path / "text"), "seeded")
    with pytest.raises(InputError, match="No such file or directory"):
        Journal("/nowhere/journal", "seeded")
    lives.path = tmp_path / "new"
    lives.start()


DAMAGES = {
    "UPDATE groups SET submit = x'05'": r"table groups, row '1\.1' is damaged \(Expected `array`, got `int`",
    "UPDATE groups SET submit = x'91c40105'": r"table groups, row '1\.1' is damaged \(not a message of this protocol",
    "UPDATE groups SET session = 'x'": r"table groups, row '1\.1' is damaged \(its session 'x' is missing\)",
    "UPDATE groups SET engine_id = 'g'": r"table groups, row 'g' is damaged",
    "UPDATE groups SET at = 'then'": r"table groups, row '1\.1' is damaged \(Expected `float`, got `str`",
    "DELETE FROM sessions": r"row '1\.1' is damaged \(its session '1+' is missing\)",
    "UPDATE sessions SET number = 'one'": r"table sessions, row \('', '1+'\) is damaged",
    "UPDATE samples SET frames = x'05'": r"table samples, group '1\.1' is damaged",
    "UPDATE samples SET frames = x'91c40105'": r"table samples, row \('1\.1', 0\) is damaged",
    "UPDATE samples SET child = 9": r"table samples, row \('1\.1', 9\) is damaged \(the group has no such child\)",
    "UPDATE samples SET reason = 'x'": r"table samples, group '1\.1' is damaged \(Invalid enum value 'x'",
    "UPDATE meta SET value = 'x' WHERE name = 'starts'": r"table meta is damaged \(Expected `int`, got `str`",
    "DELETE FROM meta WHERE name = 'digest'": r"table meta is damaged \(Object missing required field `digest`",
}


@pytest.mark.parametrize("statement", DAMAGES)
def test_a_damaged_row_is_named_and_what_to_do(lives: Lives, statement: str) -> None:
    peer = lives.start()
    peer.hello()
    peer.send(submit(n=1, max_tokens=1))
    lives.bench.settle()
    lives.kill()
    with sqlite3.connect(lives.path) as db:
        assert db.execute(statement).rowcount
    db.close()
    with pytest.raises(InputError, match=DAMAGES[statement]) as told:
        lives.start()
    assert str(lives.path) in str(told.value) and "move the file away" in str(told.value)
    (Path(f"{lives.path}.lock")).unlink()
    lives.path.rename(lives.path.with_name("away"))
    lives.start()


def test_a_journal_that_cannot_be_written_ends_the_service_and_its_clients_are_told(tmp_path: Path) -> None:
    """It must not go on as if it could keep what it promises."""
    journal, end = Journal(str(tmp_path / "journal"), "seeded"), LoopbackService()
    service = open_service(SeededEngine(), transport=end, journal=journal)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            service.run()
        except sqlite3.Error as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with RolloutClient(transport=end.connect(), link_timeout_s=0.5, restart_timeout_s=0.5) as client:
        client.status()
        client.status()
        journal._db.execute("DROP TABLE groups")
        handle = client.submit([5], ENDLESS)
        with pytest.raises(ServiceLost):  # nobody has started another one within its patience
            handle.result(WAIT)
        thread.join(WAIT)
        assert not thread.is_alive() and "no such table" in str(failed[0])
    Journal(str(tmp_path / "journal.2"), "seeded").close()


def test_a_service_without_a_journal_keeps_nothing() -> None:
    record = Persistence()
    assert not record.lasting
    service = open_service(SeededEngine(), transport=LoopbackService())
    assert service.status()["service"]["starts"] == 0
    service.stop()
    service.run()
