"""Who gets in with which key, over real sockets: nobody without one, and nobody as somebody else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zmq

from rollout.client.api import RolloutClient
from rollout.client.connection import LinkTiming
from rollout.engine.values import Sampling
from rollout.service.access import ROLES_OF
from rollout.service.loop import Service
from rollout.transport import messages as m
from rollout.transport import sockets
from rollout.transport.errors import Forbidden, KeyRefused, ServiceLost
from rollout.transport.keys import authenticator, files, ring
from rollout.transport.keys.files import Role
from tests.support.fake_engine import FakeEngine, expected
from tests.support.faulty_link import Proxy
from tests.support.keyed import Keyed, RawDealer
from tests.support.waiting import until
from tests.support.wire import serving, submit

WAIT = 60.0
ENDLESS = Sampling(n=2, max_tokens=40_000)
SESSION = "5" * 32


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    with Keyed(tmp_path, FakeEngine(step_s=0.001)).serving() as keyed:
        yield keyed


def taken(service: Service) -> int:
    """Messages that the loop has taken from anybody."""
    return service._receiver.messages


def hello(session: str = SESSION, number: int = 1) -> m.Hello:
    return m.Hello(m.PROTOCOL, session, number, "x")


def knock(dealer: RawDealer, seconds: float = 0.5, wanted: int = 1000) -> list[Any]:
    """Say Hello and submit; what comes back: so much of it, or until so many seconds were silent."""
    dealer.sock.setsockopt(zmq.SNDTIMEO, int(seconds * 1000))
    try:
        dealer.send(hello(), submit())
        return dealer.receive(seconds, wanted)
    except zmq.Again:  # libzmq has given this connection up
        return dealer.receive(seconds, wanted)
    finally:
        dealer.close()


def strangers(keyed: Keyed) -> dict[str, Callable[[], RawDealer]]:
    """Everybody who must not get in."""
    address = keyed.service.endpoint
    mine = files.read_client(keyed.add("mine", "rollout"))
    revoked = files.read_client(keyed.add("gone", "rollout"))
    files.revoke(keyed.file, "gone")
    other, secret = (half.decode() for half in zmq.curve_keypair())
    return {
        "no key": lambda: RawDealer(address, None),
        "a client's key that is unknown": lambda: RawDealer(
            address, msgspec.structs.replace(mine, public=other, secret=secret)
        ),
        "a public key without its secret": lambda: RawDealer(address, msgspec.structs.replace(mine, secret=secret)),
        "another server's key": lambda: RawDealer(address, msgspec.structs.replace(mine, server=other)),
        "a revoked key": lambda: RawDealer(address, revoked),
        "plain with a password": lambda: RawDealer(address, None, PLAIN_USERNAME=b"admin", PLAIN_PASSWORD=b"admin"),
    }


def test_no_stranger_gets_in(keyed: Keyed) -> None:
    with keyed.client("friend", "rollout", "read") as friend:
        for who, come in strangers(keyed).items():
            friend.status()
            before = taken(keyed.service)
            assert knock(come()) == [], who
            friend.status()
            heard = taken(keyed.service) - before
            assert heard <= 4, who  # of the friend: two requests and heartbeats
            assert {one["name"] for one in friend.status()["service"]["clients"]} == {"friend"}, who
    assert not keyed.engine.clients


def test_the_right_key_gets_in_which_shows_that_the_others_might_have(keyed: Keyed) -> None:
    dealer = RawDealer(keyed.service.endpoint, files.read_client(keyed.add("mine", "rollout")))
    welcome, *samples = knock(dealer, WAIT, 2)
    assert isinstance(welcome, m.Welcome) and len(samples) == 1 and keyed.engine.clients


def test_a_client_is_told_at_once_that_its_key_is_not_known(keyed: Keyed) -> None:
    path = keyed.add("gone", "rollout")
    files.revoke(keyed.file, "gone")
    began = time.monotonic()
    with pytest.raises(KeyRefused, match="does not know this key"):
        RolloutClient(str(path), connect_timeout_s=WAIT)
    assert time.monotonic() - began < WAIT / 2


def test_a_client_without_a_key_is_told_what_it_may_lack(keyed: Keyed) -> None:
    with pytest.raises(ServiceLost, match="connection file"):
        RolloutClient(keyed.service.endpoint, connect_timeout_s=0.5)


# roles

REQUESTS: list[tuple[str, Callable[[RolloutClient], object]]] = [
    ("rollout", lambda client: client.submit([1], Sampling(max_tokens=2)).result(WAIT)),
    ("weights", lambda client: client._session.link.request(lambda id: m.Abandon(id, "a" * 32)).result(WAIT)),
    ("weights", lambda client: client._session.link.request(lambda id: m.Commit(id, "a" * 32, "d")).result(WAIT)),
    ("weights", lambda client: client._session.link.request(lambda id: m.Chunk(id, "a" * 32, 0, [])).result(WAIT)),
    ("admin", lambda client: client.pause()),
    ("admin", lambda client: client.resume()),
    ("admin", lambda client: client.drain(WAIT)),
    ("admin", lambda client: client.abort_all()),
    ("admin", lambda client: client.sleep()),
    ("admin", lambda client: client.wake()),
    ("read", lambda client: client.status()),
    ("weights or read", lambda client: client.weights_status()),
]


@pytest.mark.parametrize("role", files.ROLES)
def test_a_key_is_refused_what_is_not_its_role(keyed: Keyed, role: Role) -> None:
    with keyed.client("one", role) as client:
        for needed, ask in REQUESTS:
            try:
                ask(client)
                refused = False
            except Forbidden as error:
                refused = True
                assert "'one' has " + role in str(error)
            except Exception:  # this engine has no weights and no modes; it was let through to it
                refused = False
            assert refused == (role not in needed), (role, needed)
        assert client._session.link.welcome is not None  # and serves on


def test_every_message_has_its_role() -> None:
    assert set(ROLES_OF) == set(get_args(m.ClientMessage))


def test_without_keys_every_local_client_may_do_all() -> None:
    with serving(FakeEngine()) as service, RolloutClient(service.endpoint) as client:
        assert client.submit([1], Sampling(max_tokens=2)).result(WAIT) and client.status()["service"]["keys"] is None
        client.abort_all()


def test_without_keys_another_user_is_told_at_once_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    with serving(engine) as service, RolloutClient(service.endpoint) as friend:
        with monkeypatch.context() as patch:
            patch.setenv("ROLLOUT_COOKIES", str(tmp_path / "of another"))
            began = time.monotonic()
            with pytest.raises(KeyRefused, match=r"of another.*no such file(?s:.*)rollout keys"):
                RolloutClient(service.endpoint, connect_timeout_s=WAIT)
            assert time.monotonic() - began < WAIT / 2
        assert len(friend.status()["service"]["clients"]) == 1


# rotation and revocation


def test_keys_come_and_go_while_the_service_runs(keyed: Keyed) -> None:
    with keyed.client("watcher", "read", "rollout") as watcher, keyed.client("old", "rollout") as old:
        handle = old.submit([5], ENDLESS)
        other = watcher.submit([7], Sampling(n=2, max_tokens=300))
        until(lambda: watcher.status()["running"] >= 2)
        with keyed.client("new", "rollout") as new:  # was made after the service had started
            assert new.submit([3], Sampling(max_tokens=2)).result(WAIT)
            files.revoke(keyed.file, "old")
            with pytest.raises(KeyRefused, match="revoked"):
                handle.result(WAIT)
            until(lambda: {one["name"] for one in watcher.status()["service"]["clients"]} == {"watcher", "new"})
            with pytest.raises(KeyRefused):
                old.submit([5], ENDLESS).result(WAIT)
            assert new.submit([3], Sampling(max_tokens=2)).result(WAIT)
        assert [sample.token_ids.tolist() for sample in other.result(WAIT)] == [expected([7], i, 300) for i in range(2)]
        until(lambda: not keyed.engine.groups)


def test_a_revoked_client_says_so_once(keyed: Keyed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However often it asks; and how often, once it is closed."""
    with keyed.client("old", "rollout", timing=LinkTiming(hello_retry_s=0.01)):
        files.revoke(keyed.file, "old")
        until(lambda: "message refused" in caplog.text)
        before = taken(keyed.service)
        until(lambda: taken(keyed.service) > before + 20)
        told = [record.getMessage() for record in caplog.records if "message refused" in record.getMessage()]
        assert len(set(told)) == len(told) <= 2, "for each reason once"
        assert all("times=1" in line for line in told)
    told = [record.getMessage() for record in caplog.records if "message refused" in record.getMessage()]
    assert int(told[-1].rpartition("=")[2]) >= 10


def test_a_key_file_that_cannot_be_read_lets_nobody_new_in(keyed: Keyed, caplog: pytest.LogCaptureFixture) -> None:
    inside, outside = keyed.add("inside", "rollout", "read"), keyed.add("outside", "rollout")
    with RolloutClient(str(inside)) as client:
        keyed.file.chmod(0o644)
        until(lambda: "others can read it" in caplog.text)
        with pytest.raises(ServiceLost):
            RolloutClient(str(outside), connect_timeout_s=0.5)
        assert client.submit([1], Sampling(max_tokens=2)).result(WAIT)
        keyed.file.chmod(0o600)
        with RolloutClient(str(outside), connect_timeout_s=WAIT) as late:
            assert late.submit([1], Sampling(max_tokens=2)).result(WAIT)


# somebody else


def test_the_session_id_of_another_client_is_worth_nothing(keyed: Keyed) -> None:
    with keyed.client("victim", "rollout", "read") as victim:
        handle = victim.submit([5], ENDLESS)
        until(lambda: victim.status()["running"] == 2)
        thief = RawDealer(keyed.service.endpoint, files.read_client(keyed.add("thief", "rollout")))
        thief.send(hello(victim._session.link.session, 99), m.Abort(["#0"]))
        (welcome,) = thief.receive(WAIT, 1)
        assert isinstance(welcome, m.Welcome) and not len(welcome.groups)
        assert not handle.done and victim.status()["running"] == 2
        thief.close()
        handle.cancel()
        assert len(handle.result(WAIT)) == 2


@pytest.mark.parametrize("victim_is_gone", [False, True])
def test_the_routing_id_of_another_client_is_worth_nothing(keyed: Keyed, victim_is_gone: bool) -> None:
    """The thief knows it, which it cannot: samples wait for the victim, and the thief is where libzmq would send them."""
    end = f"tcp://127.0.0.1:{keyed.service.endpoint.rpartition(':')[2]}"
    with Proxy(end) as proxy, keyed.client("watcher", "read") as watcher:
        path = keyed.add("victim", "rollout", at=proxy.address)
        with RolloutClient(str(path), link_timeout_s=WAIT) as victim:
            handle = victim.submit([5], Sampling(n=2, max_tokens=400))
            until(lambda: watcher.status()["running"] == 2)
            routing_id = victim._session.link._transport._sock.getsockopt(zmq.ROUTING_ID)  # type: ignore[attr-defined]
            assert len(routing_id) >= 16
            if victim_is_gone:
                proxy.mute = True
                proxy.cut()
            thief = RawDealer(end, files.read_client(keyed.add("thief", "rollout")), routing_id)
            until(lambda: watcher.status()["running"] == 0)
            silent = thief.receive(1.5)
            thief.send(hello(), m.Ack([("#0", 0), ("#0", 1)]), m.Abort(["#0"]))
            answers = thief.receive(0.5)
            thief.close()
            proxy.mute = False  # before what may fail: a client that hears nothing takes long to close
            assert not any(isinstance(message, m.SamplesDone) for message in [*silent, *answers])
            assert [sample.token_ids.tolist() for sample in handle.result(WAIT)] == [expected([5], i, 400) for i in range(2)]


@pytest.mark.long
def test_without_the_look_at_the_connection_the_thief_would_get_the_samples(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets.ClientConnection, "up", True)
    with pytest.raises(AssertionError):
        test_the_routing_id_of_another_client_is_worth_nothing(keyed, True)


def test_a_routing_id_that_could_be_guessed_is_refused(keyed: Keyed) -> None:
    for routing_id in (b"short", b"\0abcd"):
        dealer = RawDealer(keyed.service.endpoint, files.read_client(keyed.add(f"a{routing_id[0]}", "rollout")), routing_id)
        answers: list[Any] = []
        until(lambda: dealer.send(hello(), submit()) or answers.extend(dealer.receive(0.2)) or answers)  # noqa: B023
        dealer.close()
        assert {type(one) for one in answers} == {m.Refused}
        assert "random bytes" in answers[0].message
    assert not keyed.engine.clients


# the thread that checks keys


class Broken:
    """Lets the door's thread die at its next look at the file, until `mend`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._look = files.read_service
        monkeypatch.setattr(ring.KeyRing, "reload", self._die)

    def _die(self, *_: Any) -> None:
        raise RuntimeError("scripted death")

    def mend(self) -> None:
        self._monkeypatch.setattr(ring.KeyRing, "reload", LOOK)


LOOK = ring.KeyRing.reload


@pytest.fixture
def dead(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> Broken:
    """A service whose door is dead and is not started again."""
    keyed.early = keyed.add("early", "rollout", "read")  # type: ignore[attr-defined]
    keyed.late = keyed.add("late", "rollout")  # type: ignore[attr-defined]
    monkeypatch.setattr(authenticator.KeyAuthenticator, "restart_if_dead", lambda self: None)
    return Broken(monkeypatch)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_handler_lets_nobody_in(keyed: Keyed, dead: Broken) -> None:
    thread = keyed.service._transport.authenticator._thread  # type: ignore[attr-defined]
    until(lambda: not thread.is_alive())
    late = files.read_client(keyed.late)  # type: ignore[attr-defined]
    assert knock(RawDealer(keyed.service.endpoint, late), 1.0) == []
    assert knock(RawDealer(keyed.service.endpoint, None), 0.5) == []
    assert not keyed.engine.clients


def test_without_enforcement_a_dead_handler_would_let_everybody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = sockets.guard

    def open_door(sock: Any, keys: Any) -> None:
        guard(sock, keys)
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 0)

    monkeypatch.setattr(sockets, "guard", open_door)
    monkeypatch.setattr(authenticator.KeyAuthenticator, "restart_if_dead", lambda self: None)
    with Keyed(tmp_path, FakeEngine()).serving() as keyed:
        Broken(monkeypatch)
        thread = keyed.service._transport.authenticator._thread  # type: ignore[attr-defined]
        until(lambda: not thread.is_alive())
        mine = files.read_client(keyed.add("mine", "rollout"))
        public, secret = (half.decode() for half in zmq.curve_keypair())
        unknown = msgspec.structs.replace(mine, public=public, secret=secret)
        (refused, *_) = knock(RawDealer(keyed.service.endpoint, unknown), 5.0, 1)
        assert refused.kind == KeyRefused.kind and taken(keyed.service)  # by the loop alone: what it sent has come in


def test_a_dead_handler_is_started_again_and_told(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = keyed.add("late", "rollout")
    with keyed.client("early", "rollout", "read") as early, monkeypatch.context() as patch:
        patch.setattr(ring.KeyRing, "reload", Broken._die)
        until(lambda: "thread died" in caplog.text)
        assert early.submit([1], Sampling(max_tokens=2)).result(WAIT)  # who is in stays in
        patch.undo()
        with RolloutClient(str(path), connect_timeout_s=WAIT) as late:
            assert late.submit([1], Sampling(max_tokens=2)).result(WAIT)
        assert "restarted restarts=" in caplog.text and caplog.records[0].levelno >= logging.WARNING


# in clear

PROMPT = [717, 718, 719, 720, 721, 722, 723, 724]


def exchange(client: RolloutClient, address: str, keys: files.ClientKeys | None, recorded: bytearray) -> dict[str, bool]:
    """A group and a chunk of weights through a relay; which known bytes went by in clear."""
    (sample,) = client.submit(PROMPT, Sampling(max_tokens=64), group_id="a name to find").result(WAIT)
    weights = np.frombuffer(bytes(range(256)) * 64, np.uint8)
    dealer = RawDealer(address, keys)
    dealer.send(hello(), m.Chunk(1, "a" * 32, 0, [weights]))
    until(lambda: any(isinstance(one, m.Refused) for one in dealer.receive(0.1)), "it has arrived")
    dealer.close()
    known = {
        "prompt": np.array(PROMPT, np.int32).tobytes(),
        "tokens": sample.token_ids.tobytes(),
        "logprobs": sample.logprobs.tobytes(),
        "weights": bytes(range(256)),
        "names": b"a name to find",
        "session": client._session.link.session.encode(),
        "messages": b"submit",
    }
    return {name: content in recorded for name, content in known.items()}


def test_nothing_goes_by_in_clear(keyed: Keyed) -> None:
    with Proxy(keyed.service.endpoint) as relay:
        path = keyed.add("one", "rollout", "weights", at=relay.address)
        with RolloutClient(str(path)) as client:
            keys = files.read_client(keyed.add("two", "rollout", "weights", at=relay.address))
            found = exchange(client, relay.address, keys, relay.recorded)
    assert len(relay.recorded) > 20_000 and not any(found.values()), found


def test_without_keys_all_of_it_would() -> None:
    with serving(FakeEngine()) as service, Proxy(service.endpoint) as relay, RolloutClient(relay.address) as client:
        found = exchange(client, relay.address, None, relay.recorded)
    assert all(found.values()), found


def test_many_small_frames_are_counted_as_they_are_on_the_wire(keyed: Keyed) -> None:
    """Encryption adds to each frame; uncounted, it would sum up until the connection is taken for a flood."""
    with keyed.client("one", "rollout", "read") as client:
        for _ in range(300):
            client.status()
        inflow: Any = keyed.service._transport._inflow  # type: ignore[attr-defined]
        (connection,) = inflow._connections.values()
        assert connection.taken > 300 * 33
        assert connection.waits() == 0
        received = connection.taken + connection.waits()
        connection.since -= 1e9  # nothing is taken off for pings
        assert abs(received - connection.taken) < 1
