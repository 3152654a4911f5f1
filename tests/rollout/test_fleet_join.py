"""Replicas that others start and that join a fleet: with keys, from other hosts, and what becomes of them."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout.client.api import RolloutClient
from rollout.commands.arguments import ServeArgs, parse
from rollout.commands.serve import run
from rollout.commands.serve_replica import RESTART
from rollout.config import Config, FleetConfig, InputError, dump
from rollout.engine.values import Group, Limits, Sampling
from rollout.fleet.fleet import FleetOptions
from rollout.fleet.join_listener import JoinEndpoint, JoinListener, ReplicaEvent
from rollout.fleet.launcher import ProcessExit
from rollout.fleet.owners import Owner, Owners
from rollout.fleet.replica import State
from rollout.fleet.replica_set import MOST_JOINING
from rollout.fleet.timing import Timing
from rollout.fleet.verifier import Verification
from rollout.transport import messages as m
from rollout.transport.errors import KeyRefused, ServiceLost
from rollout.transport.frames import Decoder, pack
from rollout.transport.keys import files
from rollout.transport.places import reaches
from rollout.transport.sockets import ServiceEnd
from tests.support.fleet import WAIT, Threads, check, collect, fleet_of, prompt, refresh, step_until
from tests.support.joined import JoinedFleet, end, joined_fleet
from tests.support.keyed import RawDealer
from tests.support.ports import free_port
from tests.support.waiting import until


def group(i: int, max_tokens: int = 20) -> Group:
    return Group(f"g{i}", prompt(i), Sampling(n=4, max_tokens=max_tokens, seed=i))


def test_a_start_has_one_line_for_each_replica() -> None:
    with joined_fleet(None) as joined:
        said: list[str] = []
        for name in ("a", "b"):
            joined.start(name)
        joined.fleet.open(WAIT, 2, patient=True, report=said.append)
        assert sorted(line.split()[1] for line in said) == ["a", "b"]
        assert [line.split(" ", 2)[2] for line in said] == ["ready, 1 of 2", "ready, 2 of 2"]
        joined.fleet.open(WAIT, 2, patient=True)  # without a report nothing is printed


def test_replicas_join_with_keys_die_and_come_back(tmp_path: Path) -> None:
    """As on another host: both ends have keys. One is killed and comes back with the live weights; one stops in order."""
    with joined_fleet(tmp_path, "a", "b", step_s=0.002) as joined:
        fleet = joined.fleet
        for i in range(6):
            fleet.submit(group(i, 300))
        joined.processes["a"].kill()
        check(collect(fleet, 24).values())
        assert joined.replica("a")["state"] == "dead" and fleet.status()["fleet"]["moved"]
        refresh(fleet, 1)
        joined.processes["a"].wait()
        joined.start("a", 0.002)
        joined.await_state("a", "serving")
        assert joined.replica("a")["version"] == 1, "never the base checkpoint"
        for i in range(6, 12):
            fleet.submit(group(i, 600))
        step_until(fleet, lambda: joined.replica("b")["parts"], "it has work")
        joined.processes["b"].terminate()
        got = collect(fleet, 24).values()
        check(got)
        assert {tuple(sample.weight_versions) for sample in got} == {((0, 1),)}
        assert joined.processes["b"].wait(WAIT) == 0
        assert joined.replica("b")["why"] in ("it has stopped", "the service is closing: stopped")


def test_a_process_that_lies_is_banned_with_all_of_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two processes of one key; one of them lies. All of the other samples come; both are refused from then on."""
    options = FleetOptions(verification=Verification(1.0))
    joined = JoinedFleet(tmp_path, owners=Owners(("mine",)), options=options)
    try:
        joined.start("mine")
        rented = str(joined.key("rented", "replica"))
        joined.start("b", 0.0, "fault=lies", router=rented)
        joined.start("c", 0.0, router=rented)
        joined.fleet.open(WAIT, 3, patient=True)
        for i in range(12):
            joined.fleet.submit(group(i))
        check(collect(joined.fleet, 48).values())
        (ban,) = joined.fleet.status()["fleet"]["bans"]
        assert ban["owner"] == "key rented" and "first_bad=0" in ban["why"] and joined.replica("mine")["state"] == "serving"
        assert {joined.replica(name).get("state") for name in ("b", "c")} <= {"dead", None}
        joined.start("d", 0.0, router=rented)
        refused = lambda: [line for line in caplog.messages if "name=d" in line and "key rented is banned" in line]  # noqa: E731
        step_until(joined.fleet, refused, "it is refused")
        assert not joined.replica("d")
    finally:
        joined.close()


def test_nobody_but_the_router_gets_into_a_replica(tmp_path: Path) -> None:
    with joined_fleet(tmp_path, "a") as joined:
        known = joined.joins._known["a"].join
        assert known.server and known.address.startswith("tcp://127.0.0.1:")
        with pytest.raises(ServiceLost):
            RolloutClient(known.address, connect_timeout_s=1.0)
        mine = files.read_client(joined.folder / "a.json")  # type: ignore[operator]  the replica's own key is none of the router's
        stranger = tmp_path / "stranger.json"
        fields = files.ClientKeys(1, known.address, known.server, "a", mine.public, mine.secret)
        files._write(stranger, fields, replace=False)
        with pytest.raises(KeyRefused):
            RolloutClient(str(stranger), connect_timeout_s=WAIT)


def test_a_key_that_is_revoked_is_no_replica_s(tmp_path: Path) -> None:
    with joined_fleet(tmp_path, "a", "b") as joined:
        assert joined.file is not None
        files.revoke(joined.file, "a")
        step_until(joined.fleet, lambda: not joined.replica("a"), "it is gone")
        joined.fleet.submit(group(1))
        check(collect(joined.fleet, 4).values())


TIMING = Timing()


class Router:
    """The end where replicas join, and replicas of somebody's own making."""

    def __init__(self, folder: Path | None) -> None:
        self.now = 0.0
        file = None if folder is None else folder / "service.json"
        if file is not None:
            files.create(file, "tcp://127.0.0.1:1")
        self.folder, self.file = folder, file
        self.end = ServiceEnd("tcp://127.0.0.1:*", Limits(), None if file is None else str(file))
        self.joins = JoinListener(JoinEndpoint(self.end), clock=lambda: self.now)
        self.dealers: list[RawDealer] = []
        self.events: list[tuple[str, bool, bool]] = []

    def dealer(self, *roles: files.Role) -> RawDealer:
        keys = None
        if self.file is not None and self.folder is not None and roles:
            name = f"k{len(self.dealers)}"
            keys = files.add(self.file, name, roles, self.folder / f"{name}.json", self.end.endpoint)
            self.end.keys.reload()  # type: ignore[union-attr]
        dealer = RawDealer(self.end.endpoint, keys)
        dealer._decoder = Decoder(m.RouterMessage, Limits())  # type: ignore[assignment]
        self.dealers.append(dealer)
        return dealer

    def poll(self) -> None:
        self.events += [(event.name, event.address is not None, event.removed) for event in self.joins.poll()]

    def ask(self, dealer: RawDealer, message: m.ReplicaMessage) -> Any:
        """The answer: Joined, or the kind of the refusal."""
        dealer.send(message)
        until(lambda: self.poll() or dealer.sock.poll(10), "an answer", WAIT)
        answer = dealer.receive(WAIT, 1)[0]
        return answer.kind if isinstance(answer, m.Refused) else answer

    def close(self) -> None:
        for dealer in self.dealers:
            dealer.close()
        self.joins.close()


@pytest.fixture
def router() -> Iterator[Router]:
    one = Router(None)
    yield one
    one.close()


@pytest.fixture
def keyed_router(tmp_path: Path) -> Iterator[Router]:
    one = Router(tmp_path)
    yield one
    one.close()


def test_a_banned_key_is_refused_under_any_name(keyed_router: Router) -> None:
    """With the reason. Other keys join, also under the name of a banned replica."""
    liar, other = keyed_router.dealer("replica"), keyed_router.dealer("replica")
    server = files.read_service(keyed_router.file).public  # type: ignore[arg-type]  any key will do
    assert keyed_router.ask(liar, join(server=server)) == m.Joined()
    known = keyed_router.joins._known["a"]
    owner = known.owner
    assert (owner.id, owner.name, owner.trusted) == (known.key, "key k0", False) and len(known.key) == 40
    keyed_router.joins.owners.ban(owner, "first_bad=7")
    for name in ("a", "b"):
        assert keyed_router.ask(liar, join(name, server=server)) == "forbidden"
    keyed_router.now = 10.0
    assert keyed_router.ask(other, join(server=server)) == m.Joined()


def join(name: str = "a", **fields: Any) -> m.Join:
    return m.Join(
        **{
            "protocol": m.PROTOCOL,
            "name": name,
            "incarnation": secrets.token_hex(16),
            "address": "tcp://127.0.0.1:7",
            "pid": 3,
            **fields,
        }
    )


def test_who_may_join_a_router_with_keys(keyed_router: Router) -> None:
    server = files.read_service(keyed_router.file).public  # type: ignore[arg-type]  any key will do
    trainer = keyed_router.dealer("rollout", "weights", "admin", "read")
    assert keyed_router.ask(trainer, join(server=server)) == "forbidden"
    replica = keyed_router.dealer("replica")
    assert keyed_router.ask(replica, join(server="")) == "invalid_request", "its link would be in clear"
    assert keyed_router.ask(replica, join(server="x" * 39)) == "invalid_request"
    assert not keyed_router.events
    mine = join(server=server)
    assert keyed_router.ask(replica, mine) == m.Joined() and keyed_router.events == [("a", True, False)]
    other = keyed_router.dealer("replica")
    assert keyed_router.ask(other, mine) == "busy", "a name belongs to the key that has it"
    assert keyed_router.ask(other, m.Leave("a", mine.incarnation)) == m.Joined()
    assert keyed_router.events == [("a", True, False)], "and nobody else says that it has left"
    nobody = keyed_router.dealer()
    nobody.send(join("b", server=server))
    keyed_router.ask(replica, mine)
    assert not nobody.receive(0.3) and len(keyed_router.events) == 1


def test_who_may_join_a_router_without_keys(router: Router) -> None:
    dealer = router.dealer()
    assert router.ask(dealer, join(address="tcp://10.0.0.7:5")) == "invalid_request", "another host, in clear"
    assert router.ask(dealer, join(address="rubbish")) == "invalid_request"
    assert router.ask(dealer, join(server="k" * 40)) == "invalid_request"
    assert router.ask(dealer, join(protocol=m.PROTOCOL + 1)) == "version_mismatch"
    for name in ("", "7", "-x", "a b", "x" * 65):
        assert router.ask(dealer, join(name)) == "protocol_error", name
    dealer.sock.send_multipart([b"rubbish"])
    assert router.ask(dealer, join("b"))  # its answer, or that to the rubbish
    with pytest.raises(ValueError, match="can be reached from other hosts"):
        ServiceEnd("tcp://0.0.0.0:*", Limits())


def test_a_name_has_one_process(router: Router) -> None:
    first, second, one, other = router.dealer(), router.dealer(), join(), join()
    assert router.ask(first, one) == m.Joined()
    assert router.ask(second, other) == "busy"
    router.now += TIMING.silent_s
    assert router.ask(second, other) == m.Joined()
    assert router.events == [("a", True, False), ("a", False, False), ("a", True, False)], "the first one was lost in between"
    assert router.ask(second, m.Leave("a", other.incarnation)) == m.Joined()
    assert router.ask(first, one) == m.Joined() and len(router.joins.names) == 1
    assert router.events[3:] == [("a", False, False), ("a", True, False)], "who leaves makes room at once"


def test_what_a_router_asks_of_those_that_joined(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    dealer, one = router.dealer(), join()
    router.ask(dealer, one)
    router.joins.lost("a")
    assert router.ask(dealer, one) == m.Joined() and len(router.events) == 1, "after a pause only"
    router.now += 0.6
    assert router.ask(dealer, one) == m.Joined() and router.events[1:] == [("a", True, False)]
    router.joins.lost("a", sick=True)
    router.now += 10
    assert router.ask(dealer, one).leave == "restart" and len(router.events) == 2
    router.ask(dealer, m.Leave("a", one.incarnation))
    again = join()
    assert router.ask(dealer, again) == m.Joined() and router.joins.pid("a") == 3
    router.joins.restart("a")
    assert router.ask(dealer, again).leave == "restart"
    with pytest.raises(ValueError, match="start more with"):
        router.joins.scale(2)
    assert router.joins.scale(0) == ["a"]
    router.joins.remove("a")
    assert router.ask(dealer, again).leave == "stop" and not router.joins.names
    router.ask(dealer, m.Leave("a", again.incarnation))
    assert router.events[-1] == ("a", False, True) and "a" not in router.joins
    router.ask(dealer, again)
    router.joins.restart("a")
    router.ask(dealer, m.Leave("a", again.incarnation))
    router.joins.remove("a")
    assert router.ask(dealer, join()).leave == "stop", "who is to go goes, whichever process it is by then"
    router.now += TIMING.silent_s + TIMING.forget_s
    router.poll()
    router.ask(dealer, one)
    router.joins.lost("a")
    router.now += TIMING.forget_s + 1
    router.poll()
    assert router.events[-1] == ("a", False, True) and "a" not in router.joins, "who does not come back is forgotten"


def test_the_router_s_own_processes_have_an_address_and_names_of_their_own() -> None:
    ours, theirs = Threads(0), Threads(0)
    own = {"local-0": 7}
    joins = JoinListener(JoinEndpoint(theirs), JoinEndpoint(ours, lambda name, pid: own.get(name) == pid))
    answers: list[Any] = []
    noted = lambda peer, frames: bool(answers.append(Decoder(m.RouterMessage, Limits()).unpack(frames)))  # noqa: E731
    ours.send = theirs.send = noted  # type: ignore[method-assign, assignment]

    def events() -> list[tuple[str, bool, bool]]:
        return [(event.name, event.address is not None, event.removed) for event in joins.poll(exits)]

    exits: list[ProcessExit] = []
    theirs._joins["local-0"] = join("local-0", pid=7)
    assert not events() and answers.pop().kind == "invalid_request"
    theirs._joins.clear()
    ours._joins["local-0"] = join("local-0", pid=8)
    assert not events() and answers.pop().leave == "stop", "one that is not wanted any more ends"
    ours._joins["local-0"] = join("local-0", pid=7)
    assert events() == [("local-0", True, False)]
    own["local-0"] = 9
    ours._joins["local-0"] = join("local-0", pid=9)
    assert events() == [("local-0", False, False), ("local-0", True, False)], "its name is free at once"
    ours._joins.clear()
    exits.append(ProcessExit("local-0", "its process ended with signal 9"))
    assert events() == [("local-0", False, False)]
    exits[0] = exits[0]._replace(removed=True)
    assert events() == [("local-0", False, True)] and "local-0" not in joins


def test_scale_drain_and_roll() -> None:
    with joined_fleet(None, "a", "b", step_s=0.002) as joined:
        fleet = joined.fleet
        for i in range(4):
            fleet.submit(group(i, 400))
        first, second = [one["name"] for one in fleet.status()["replicas"]]
        fleet.change_replicas("roll", 0, "")
        got = step_until(fleet, lambda: joined.processes[first].poll() is not None, "it has stopped")
        assert joined.processes[first].returncode == RESTART, "its launcher is told to start another one"
        assert joined.processes[second].poll() is None, "one after the other"
        joined.start(first, 0.002)
        got += step_until(fleet, lambda: joined.processes[second].poll() is not None, "and so has the other")
        joined.start(second, 0.002)
        got += step_until(fleet, lambda: joined.joins.pid(second) == joined.processes[second].pid, "it has joined")
        got += step_until(fleet, lambda: joined.replica(second)["state"] == "serving" and not fleet._groups.open)
        check(got)
        assert len(got) == 16
        fleet.change_replicas("drain", 0, "b")
        step_until(fleet, lambda: joined.processes["b"].poll() is not None and not joined.replica("b"), "it has gone")
        assert joined.processes["b"].returncode == 0
        fleet.submit(group(5))
        check(collect(fleet, 4).values())


def test_replicas_join_the_next_router(tmp_path: Path) -> None:
    """A router that ends leaves them: they join whoever listens there afterwards, with the weights that they have."""
    first = JoinedFleet(None)
    second: JoinedFleet | None = None
    try:
        child = first.start("a")
        first.fleet.open(WAIT, 1, patient=True)
        refresh(first.fleet, 1)
        endpoint = first.end.endpoint
        first.fleet.close()
        second = JoinedFleet(None, endpoint)
        second.fleet.open(WAIT, 1, patient=True)
        assert second.fleet.version == 1 and second.replica("a")["pid"] == child.pid
        second.fleet.submit(group(1))
        check(collect(second.fleet, 4).values())
    finally:
        first.processes["a"].terminate()
        end(first.processes["a"])
        if second is not None:
            second.close()


def test_a_message_of_a_replica_is_small() -> None:
    assert sum(map(len, pack(join()))) < 300


# the commands


@pytest.mark.long
def test_serve_listen_replicas_and_join(tiny_config: Config, tmp_path: Path) -> None:
    """As a user runs it, with a real model and keys: a router without a replica of its own, two that join it."""
    file, ready = tmp_path / "service.json", tmp_path / "ready"
    port, replicas_port = free_port(), free_port()
    files.create(file, f"tcp://127.0.0.1:{port}")
    files.add(file, "trainer", ("rollout", "weights", "admin", "read"), tmp_path / "trainer.json")
    files.add(file, "gpu", ("replica",), tmp_path / "gpu.json", f"tcp://127.0.0.1:{replicas_port}")
    service = msgspec.structs.replace(tiny_config.service, endpoint=f"tcp://127.0.0.1:{port}", keys=str(file))
    fleet = FleetConfig(listen_replicas=f"tcp://127.0.0.1:{replicas_port}")
    (tmp_path / "router.toml").write_text(dump(msgspec.structs.replace(tiny_config, service=service, fleet=fleet)))
    (tmp_path / "replica.toml").write_text(dump(tiny_config))
    serve = [sys.executable, "-m", "rollout", "serve", "--exit-on-stdin-close", "--config"]
    replica = [*serve, str(tmp_path / "replica.toml"), "--join", str(tmp_path / "gpu.json"), "--fleet.name"]
    with ExitStack() as stack:
        router = stack.enter_context(running([*serve, str(tmp_path / "router.toml"), "--ready-file", str(ready)]))
        one, other = (stack.enter_context(running([*replica, name])) for name in ("one", "other"))
        until(ready.exists, "the first replica has joined", 2 * WAIT)
        client = stack.enter_context(RolloutClient(str(tmp_path / "trainer.json"), connect_timeout_s=WAIT))
        until(lambda: client.status()["fleet"]["serving"] == 2, "both serve", 2 * WAIT)
        assert {one["name"] for one in client.status()["replicas"]} == {"one", "other"}
        asked = [prompt(i) % 90 for i in range(4)], [Sampling(n=3, max_tokens=20, seed=i) for i in range(4)]
        made = client.generate_groups(*asked, timeout=WAIT)
        client.change_replicas("drain", name="one")
        assert one.wait(WAIT) == 0
        assert told(client.generate_groups(*asked, timeout=WAIT)) == told(made), "a sample does not know who made it"
        router.terminate()
        assert router.wait(WAIT) == 0 and other.poll() is None, "it waits for the next router"


def told(groups: Any) -> list[Any]:
    return [[(sample.token_ids.tolist(), sample.logprobs.tolist()) for sample in group] for group in groups]


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.terminate()
        end(child)


def test_what_cannot_be_asked_of_a_replica(tmp_path: Path) -> None:
    def serve(*flags: str) -> str:
        with pytest.raises(InputError) as error:
            args = parse(["serve", *flags])
            assert isinstance(args, ServeArgs)
            run(args)
        return str(error.value)

    local = "tcp://127.0.0.1:5656"
    assert "a replica or a router, not both" in serve("--join", local, "--replicas", "2")
    assert "makes its own keys" in serve("--join", local, "--service.keys", "x")
    assert "the router has the clients" in serve("--join", local, "--service.journal", "x")
    assert "not on this host" in (told := serve("--join", "tcp://10.0.0.5:5656")) and "--role replica" in told
    assert "say how many" in serve("--ray")
    assert "without ray" in serve("--replicas", "2", "--fleet.ray-cpus", "2")
    assert "--listen-replicas tcp://*:PORT" in serve("--ray", "auto", "--replicas", "2")
    keys = tmp_path / "service.json"
    files.create(keys, "tcp://127.0.0.1:1")
    keyed = ("--ray", "--replicas", "2", "--service.keys", str(keys), "--service.endpoint", "tcp://127.0.0.1:0")
    assert "give --fleet.ray-join the connection file" in serve(*keyed)
    assert "No such file" in serve("--join", str(tmp_path / "none.json"))
    assert "no keys to tell clients apart" in serve("--listen-replicas", "tcp://*:5656")


def test_ray_without_an_address_is_this_machine_s() -> None:
    def ray(*flags: str) -> str | None:
        args = parse(["serve", *flags])
        assert isinstance(args, ServeArgs)
        return args.ray

    assert ray("--ray", "--replicas", "2") == ray("--replicas", "2", "--ray") == "local"
    assert ray("--ray", "auto", "--replicas", "2") == ray("--ray=auto", "--replicas", "2") == "auto"
    assert ray("--replicas", "2") is None


def test_the_router_connects_to_no_address_of_its_own(router: Router, tmp_path: Path) -> None:
    """Nor to files that are no sockets of its user."""
    dealer = router.dealer()
    router.joins.own_addresses.add("tcp://127.0.0.1:5655")
    (tmp_path / "file").touch()
    local = router.end.endpoint.replace("127.0.0.1", "localhost")
    for address in (
        router.end.endpoint,
        local,
        "tcp://127.0.0.1:5655",
        "tcp://localhost:5655",
        f"ipc://{tmp_path}/none",
        f"ipc://{tmp_path}/file",
    ):
        assert router.ask(dealer, join(address=address)) == "invalid_request", address
    assert not router.events
    other = ServiceEnd(f"ipc://{tmp_path}/s", Limits())
    assert router.ask(dealer, join(address=other.endpoint)) == m.Joined(), "the control: a socket of this user"
    other.close()


@pytest.mark.parametrize("bound", ["tcp://127.0.0.1:5655", "tcp://0.0.0.0:5655", "tcp://[::]:5655", "tcp://*:5655"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]", "127.1", "1.2.3.4:0;127.0.0.1"])
def test_an_address_of_its_own_is_known_however_it_is_written(bound: str, host: str) -> None:
    assert reaches(f"tcp://{host}:5655", bound) and reaches(f"tcp://{host}:05655", bound)
    assert not reaches(f"tcp://{host}:5656", bound)


def test_addresses_of_others_are_told_from_its_own(tmp_path: Path) -> None:
    """Those of documentation (192.0.2.0/24) are no host's."""
    everywhere, here = "tcp://0.0.0.0:5655", "tcp://127.0.0.1:5655"
    assert reaches("tcp://127.0.0.9:5655", everywhere) and reaches("tcp://[::1]:5655", everywhere)
    assert reaches(f"tcp://{socket.gethostname()}:5655", everywhere)
    assert not reaches("tcp://127.0.0.9:5655", here) and not reaches("tcp://192.0.2.7:5655", everywhere)
    assert not reaches("tcp://elsewhere.example:5655", everywhere) and not reaches("ipc:///tmp/s", everywhere)
    (tmp_path / "link").symlink_to(tmp_path)
    with ExitStack() as stack:
        one, other = (ServiceEnd(f"ipc://{tmp_path}/{name}", Limits()) for name in ("one", "other"))
        stack.callback(one.close)
        stack.callback(other.close)
        assert reaches(f"ipc://{tmp_path}/link/../{tmp_path.name}/one", one.endpoint)
        assert not reaches(other.endpoint, one.endpoint) and not reaches("ipc://@one", one.endpoint)
        assert not reaches("ipc://a\0b", one.endpoint)


def test_false_joins_hold_few_links() -> None:
    """Names at whose addresses nothing listens: the router connects to so many at a time, and serves meanwhile."""
    with fleet_of(1) as (fleet, _):
        events = [ReplicaEvent(f"false{i}", "tcp://127.0.0.1:9", "it has joined", owner=None) for i in range(300)]
        poll = fleet.replicas._joins.poll
        fleet.replicas._joins.poll = lambda exits=(): [*poll(exits), *(events.pop() for _ in range(len(events)))]  # type: ignore[method-assign]
        fleet.submit(group(1))
        check(collect(fleet, 4).values())
        fleet.replicas.poll(time.monotonic())
        joining = [one for one in fleet.replicas.by_name.values() if one.state is State.JOINING]
        assert len(joining) == MOST_JOINING and len(fleet.replicas._waiting) == 300 - MOST_JOINING


@pytest.mark.parametrize("owner", [Owner("k", "key gpu", trusted=True), Owner("n", "replica local-0", own=True)])
def test_false_joins_do_not_keep_ours_waiting(owner: Owner) -> None:
    """A replica of a trusted owner, and one that the router has started again, are connected to at once."""
    with fleet_of(1) as (fleet, _):
        others = [ReplicaEvent(f"false{i}", "tcp://127.0.0.1:9", "it has joined", owner=None) for i in range(100)]
        events = [*others, ReplicaEvent("ours", "tcp://127.0.0.1:9", "it has joined", owner=owner)]
        fleet.replicas._joins.poll = lambda exits=(): [events.pop(0) for _ in range(len(events))]  # type: ignore[method-assign]
        fleet.replicas.poll(time.monotonic())
        assert fleet.replicas.by_name["ours"].state is State.JOINING
        assert [one.name for one in fleet.replicas._waiting] == [f"false{i}" for i in range(MOST_JOINING, 100)]
