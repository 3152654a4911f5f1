"""What happens when something breaks: processes that die or stop, links that break, strangers that send rubbish."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import zmq

from rollout.client.api import RolloutClient
from rollout.client.config import ClientConfig
from rollout.client.connection import LinkTiming
from rollout.engine.values import Limits, Sampling
from rollout.service import receiver
from rollout.service.session import Session
from rollout.transport import errors as e
from rollout.transport import sockets
from rollout.transport.keys.cookie import ClientCookie
from tests.support import by_hand
from tests.support.fake_engine import FakeEngine, expected
from tests.support.faulty_link import Proxy
from tests.support.rubbish import rubbish
from tests.support.waiting import until
from tests.support.wire import service_of, serving

ROOT = Path(__file__).parents[2]
ENDLESS = Sampling(n=2, max_tokens=40_000)
WAIT = 60.0
"""for what comes: a bound for hangs only"""


class Process:
    """A service of the fake engine, as a process."""

    def __init__(self, folder: Path, endpoint: str = "tcp://127.0.0.1:*", step_s: float = 0.002, grace_s: float = 10.0) -> None:
        ready = folder / f"ready{time.monotonic_ns()}"
        command = [sys.executable, "-m", "tests.support.fake_engine", endpoint, str(ready), str(step_s), str(grace_s)]
        self.popen = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        until(lambda: ready.exists() or self.popen.poll() is not None)
        self.endpoint = ready.read_text()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(WAIT)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:

        def one(**options: object) -> Process:
            process = Process(tmp_path, **options)  # type: ignore[arg-type]
            stack.callback(process.end)
            return process

        yield one


# processes


CLIENT = """
import sys
from rollout.engine.values import Sampling
from rollout.client import RolloutClient
with RolloutClient(sys.argv[1], name="trainer", connect_timeout_s=60, link_timeout_s=60) as client:
    handle = client.submit([5], Sampling(n=2, max_tokens=int(sys.argv[2])), group_id="same id")
    client.status()
    print("running", flush=True)
    print([sample.token_ids.tolist() for sample in handle.result(100)], flush=True)
"""


@contextmanager
def trainer(endpoint: str, max_tokens: int) -> Iterator[subprocess.Popen[str]]:
    """Another process with a group that runs."""
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, endpoint, str(max_tokens)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "running\n"
            yield process
        finally:
            process.kill()


def test_two_trainers_one_killed(start: Callable[..., Process]) -> None:
    """As a user would see it: three processes; the groups of the dead trainer end after the grace time, the other's go on."""
    service = start(grace_s=4.0)
    with RolloutClient(service.endpoint, name="watcher") as client, trainer(service.endpoint, 40_000) as victim:

        def clients() -> dict[str, int]:
            return {one["name"]: one["running_samples"] for one in client.status()["service"]["clients"]}

        mine = client.submit([7], Sampling(n=3, max_tokens=1500), group_id="same id")
        until(lambda: clients().get("trainer") == 2)
        victim.kill()
        killed = time.monotonic()
        until(lambda: "trainer" not in clients())
        assert time.monotonic() - killed > 1, "it is given its time"
        assert client.status()["running"] <= 3
        assert [s.token_ids.tolist() for s in mine.result(WAIT)] == [expected([7], i, 1500) for i in range(3)]


def test_a_trainer_that_was_suspended_gets_everything_in_the_end(start: Callable[..., Process]) -> None:
    """Longer than the grace time: its session is forgotten, and set up again when it wakes."""
    service = start(grace_s=2.0)
    with RolloutClient(service.endpoint, name="watcher") as client, trainer(service.endpoint, 800) as sleeper:
        sleeper.send_signal(signal.SIGSTOP)
        until(lambda: [c["name"] for c in client.status()["service"]["clients"]] == ["watcher"])
        assert client.status()["running"] == 0
        sleeper.send_signal(signal.SIGCONT)
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == f"{[expected([5], i, 800) for i in range(2)]}\n"


def test_a_dead_or_stopped_service_is_told_and_a_slow_one_is_not(
    start: Callable[..., Process],
) -> None:
    """By clients of one pace. `test_a_dead_service_is_told_within_10_seconds` has the pace that they have by themselves."""
    pace = sockets.SocketOptions(heartbeat_ms=500, silence_ms=1500)
    killed, stopped, slow = start(), start(), start(step_s=1000.0)
    with ExitStack() as stack:
        stack.callback(slow.end)
        clients = [
            stack.enter_context(
                RolloutClient(transport=sockets.ClientEnd(process.endpoint, Limits(), pace), link_timeout_s=2.0)
            )
            for process in (killed, stopped, slow)
        ]
        handles = [client.submit([1], ENDLESS) for client in clients]
        for client in clients[:2]:
            client.status()

        def computes() -> bool:
            try:
                clients[2].status(0.5)
            except e.RequestTimeout:
                return True
            return False

        until(computes, "the slow one is in the middle of its step")
        killed.signal(signal.SIGKILL)
        stopped.signal(signal.SIGSTOP)
        for handle in handles[:2]:
            with pytest.raises(e.ServiceLost, match="dead or unreachable"):
                handle.result(WAIT)
        assert not handles[2].done

        stopped.signal(signal.SIGCONT)  # it was not dead: the next group is served, and nothing of the old one is left
        deadline = time.monotonic() + WAIT
        while True:
            try:
                (sample,) = clients[1].submit([3], Sampling(max_tokens=2), group_id=handles[1].group_id).result(WAIT)
                break
            except e.ServiceLost:  # not connected again yet
                assert time.monotonic() < deadline
        assert sample.token_ids.tolist() == expected([3], 0, 2)
        until(lambda: clients[1].status()["running"] == 0)


def test_a_dead_service_is_told_within_10_seconds() -> None:
    """A ping may have been answered just before, then it is silent, then without a connection, then the loop looks."""
    link_timeout_s = ClientConfig().link_timeout_s
    pace = sockets.SocketOptions()
    assert (pace.heartbeat_ms + pace.silence_ms) / 1000 + link_timeout_s + LinkTiming().poll_s < 9


def test_a_service_that_is_killed_and_started_again(start: Callable[..., Process]) -> None:
    first = start()
    with RolloutClient(first.endpoint, link_timeout_s=WAIT) as client:
        incarnation = client.info.incarnation
        handle = client.submit([1], ENDLESS)
        client.status()
        first.end()
        start(endpoint=first.endpoint)
        with pytest.raises(e.ServiceRestarted):
            handle.result(WAIT)
        assert client.info.incarnation != incarnation
        ((sample,),) = client.generate_groups([[3]], Sampling(max_tokens=2), timeout=WAIT)
        assert sample.token_ids.tolist() == expected([3], 0, 2)


# links


def many_groups(client: RolloutClient, count: int) -> None:
    """Groups of every length, each checked token by token; each sample once."""
    prompts = [[i, i] for i in range(count)]
    samplings = [Sampling(n=1 + i % 4, max_tokens=1 + 37 * i % 150) for i in range(count)]
    seen = set()
    for sample in client.generate(prompts, samplings, group_ids=[str(i) for i in range(count)], timeout=WAIT):
        i = int(sample.group_id)
        assert (i, sample.index) not in seen
        seen.add((i, sample.index))
        assert sample.finish_reason == "length"
        assert sample.token_ids.tolist() == expected(prompts[i], sample.index, samplings[i].max_tokens)
    assert len(seen) == sum(sampling.n for sampling in samplings)


@contextmanager
def through_a_proxy(engine: FakeEngine) -> Iterator[tuple[RolloutClient, Proxy]]:
    """Both ends have more patience than any of these tests."""
    with (
        serving(engine, client_grace_s=WAIT) as service,
        Proxy(service.endpoint) as proxy,
        RolloutClient(proxy.address, connect_timeout_s=WAIT, link_timeout_s=WAIT) as client,
    ):
        yield client, proxy


def test_a_link_that_breaks_and_heals_loses_nothing() -> None:
    engine = FakeEngine(step_s=0.005)
    with through_a_proxy(engine) as (client, proxy):
        done, rounds = threading.Event(), 0

        def break_it() -> None:
            rng = random.Random(3)
            while not done.wait(rng.uniform(0.02, 0.4)):
                proxy.cut()

        breaker = threading.Thread(target=break_it)
        breaker.start()
        try:
            while proxy.cuts < 3:
                many_groups(client, 60)
                rounds += 1
        finally:
            done.set()
            breaker.join()
        assert sum(engine.clients.values()) == 60 * rounds and not engine.aborted  # each group was run once


def test_a_link_that_breaks_in_the_middle_of_frames_loses_nothing() -> None:
    engine = FakeEngine(step_s=0.002)
    with through_a_proxy(engine) as (client, proxy):
        proxy.cut_after = (3000, 20_000)  # the groups and their samples are some 50,000 bytes
        proxy.cut()
        many_groups(client, 40)
        assert proxy.cuts >= 3
        assert sum(engine.clients.values()) == 40 and not engine.aborted


def test_without_sending_again_a_broken_link_would_lose_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    attach, attached = Session.attach, threading.Event()

    def forgetful(self: Session, peer: bytes, welcome: list) -> None:  # type: ignore[type-arg]
        attach(self, peer, welcome)
        while len(self._queue) > 1:
            self._queue.pop()
        attached.set()

    monkeypatch.setattr(Session, "attach", forgetful)
    engine = FakeEngine(step_s=0.005)
    with through_a_proxy(engine) as (client, proxy):
        engine.frozen = True
        handle = client.submit([1], Sampling(max_tokens=3))
        until(lambda: client.status()["running"] == 1)
        attached.clear()
        proxy.mute = True
        proxy.cut()
        engine.frozen = False
        until(lambda: not engine.groups)  # the sample has ended, and waits for the client
        proxy.mute = False
        assert attached.wait(WAIT)
        with pytest.raises(e.RequestTimeout):
            handle.result(1.0)


def test_a_link_that_stays_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(step_s=0.002)
    with serving(engine, client_grace_s=2.0) as service:
        with Proxy(service.endpoint) as proxy:
            client = RolloutClient(proxy.address, link_timeout_s=0.5)
            handle = client.submit([1], ENDLESS)
            client.status()
        with pytest.raises(e.ServiceLost, match="no connection for 0.5 s"):
            handle.result(WAIT)
        until(lambda: bool(engine.aborted))
        client.close()


# strangers


ATTACKER = """
import sys
from tests.support.rubbish import rubbish
assert rubbish(sys.argv[1], 250_000, int(sys.argv[2])) == 250_000
"""


def raw_bytes(endpoint: str, count: int, seed: int) -> None:
    """Bytes that are no ZMTP, or the beginning of one."""
    rng = random.Random(seed)
    port = int(endpoint.rpartition(":")[2])
    greeting = rng.choice((by_hand.NULL, by_hand.GREETING))
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            try:
                raw.sendall(
                    rng.choice((b"", greeting[: rng.randrange(64)], greeting, b"POST /")) + rng.randbytes(rng.randrange(300))
                )
                if rng.random() < 0.3:
                    raw.sendall(greeting + b"\x02" + b"\xff" * 8)  # a frame of 2**64 - 1 bytes
            except OSError:
                pass  # thrown out already


def test_rubbish_at_a_live_service_harms_nobody_else() -> None:
    engine = FakeEngine(Limits(max_clients=16), step_s=0.0005)
    with (
        serving(engine, client_grace_s=WAIT) as service,
        RolloutClient(service.endpoint, name="victim", link_timeout_s=WAIT) as victim,
    ):
        done, rounds, failed = threading.Event(), [0], []

        def generate() -> None:
            try:
                while not done.is_set():
                    many_groups(victim, 6)
                    rounds[0] += 1
            except BaseException as error:
                failed.append(error)

        generator = threading.Thread(target=generate)
        generator.start()
        with ExitStack() as stack:
            stack.callback(generator.join, WAIT)
            stack.callback(done.set)
            attackers = [threading.Thread(target=rubbish, args=(service.endpoint, 550, seed)) for seed in range(4)]
            attackers.append(threading.Thread(target=raw_bytes, args=(service.endpoint, 100, 9)))
            for attacker in attackers:
                attacker.start()
            for attacker in attackers:
                attacker.join(WAIT)
                assert not attacker.is_alive()
            seen = rounds[0]
            until(lambda: rounds[0] > seen or bool(failed))  # it still generates
        assert not failed and not generator.is_alive()
        until(lambda: victim.status()["service"]["malformed"] > 800)
        many_groups(victim, 10)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_broken_messages(start: Callable[..., Process]) -> None:
    """A process, so that an abort inside libzmq and its memory are seen."""
    service = start()
    memory = psutil.Process(service.popen.pid)
    before = memory.memory_info().rss
    attackers = [subprocess.Popen([sys.executable, "-c", ATTACKER, service.endpoint, str(seed)], cwd=ROOT) for seed in range(4)]
    try:
        while any(attacker.poll() is None for attacker in attackers):
            assert service.popen.poll() is None, "the service died"
            assert memory.memory_info().rss - before < 1 << 30  # what waits both ways, each bounded
            time.sleep(0.1)
    finally:
        for attacker in attackers:
            attacker.kill()
    assert [attacker.returncode for attacker in attackers] == [0] * 4
    with RolloutClient(service.endpoint, connect_timeout_s=WAIT) as client:
        many_groups(client, 10)


def test_the_rubbish_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, at a service that lets what decoding raises go through: it falls."""
    monkeypatch.setattr(receiver, "RolloutError", ZeroDivisionError)
    service = service_of(FakeEngine(), "tcp://127.0.0.1:*", linger_s=0.1)
    fallen: list[BaseException] = []

    def run() -> None:
        monkeypatch.setattr(service._receiver, "_refuse", lambda *args: 1 / 0)
        try:
            service.run()
        except BaseException as error:
            fallen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        ClientCookie(service.endpoint).show(dealer)
        dealer.connect(service.endpoint)
        dealer.send(b"rubbish")
        thread.join(WAIT)
    assert fallen and not thread.is_alive()


def test_many_connections_leave_nothing_behind() -> None:
    process = psutil.Process(os.getpid())
    engine = FakeEngine()
    with serving(engine) as service:
        with RolloutClient(service.endpoint) as watcher:
            fds = threads = 0
            for i in range(25):
                with RolloutClient(service.endpoint) as client:
                    handle = client.submit([i], ENDLESS if i % 2 else Sampling(max_tokens=1))
                    if not i % 2:
                        handle.result(WAIT)
                until(lambda: len(watcher.status()["service"]["clients"]) == 1)
                if i == 4:
                    fds, threads = process.num_fds(), threading.active_count()
            until(lambda: process.num_fds() <= fds and threading.active_count() <= threads)
            assert not engine.groups and watcher.status()["running"] == 0
