"""Tensors by gloo: every byte arrives, nothing blocks, and whatever breaks is typed and leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from rollout.transport.errors import InvalidRequest, RequestTimeout, SourceUnreachable
from rollout.transport.weights import distributed, group
from rollout.transport.weights.distributed import Broadcaster, DistributedOffer, DistributedPayload
from rollout.transport.weights.receiving import capabilities, open_payload
from rollout.transport.weights.shm import SegmentView
from tests.support.sent_tensors import ARRAYS, MANIFEST, WHOLE
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
NEVER: Callable[[], bool] = lambda: False  # noqa: E731
WAIT = 60.0
"""for what comes: a bound for hangs only"""


def held() -> tuple[int, int, int]:
    """Descriptors, threads of Python, threads of the process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))


@pytest.fixture(scope="module", autouse=True)
def torch_has_what_it_keeps() -> None:
    """The first store of a process opens a pipe that stays, and the first group may start threads that do."""
    round_trip(ARRAYS)


@pytest.fixture(autouse=True)
def small_slots_and_nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed, "SLOT_BYTES", 70_001)
    monkeypatch.setattr(distributed, "REACH_S", WAIT)
    before = held()
    yield
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


class Sending:
    """A trainer's end in a thread."""

    def __init__(
        self,
        arrays: list[np.ndarray],
        total: int,
        over: Callable[[], bool] = NEVER,
        seconds: float = WAIT,
        announced: bool = False,
    ) -> None:
        self.sender = Broadcaster("gloo", "127.0.0.1", total, announced=announced)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(arrays, over, time.monotonic() + seconds))
        self._thread.start()

    def _run(self, arrays: list[np.ndarray], over: Callable[[], bool], end: float) -> None:
        try:
            self.sender.send(arrays, over, end)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.join()
        self.sender.close()


def read(payload: DistributedPayload, size: int, piece: int = 50_003) -> bytes:
    """Polled as the service does."""
    got, memory, end = b"", np.empty(piece, np.uint8), time.monotonic() + WAIT
    while len(got) < size:
        assert time.monotonic() < end, f"{len(got)} of {size} bytes came"
        count = payload.read(memory)
        got += memory[:count].tobytes()
        if not count:
            time.sleep(0.001)
    return got


def round_trip(arrays: list[np.ndarray], announced: bool = False) -> None:
    whole = b"".join(array.tobytes() for array in arrays)
    trainer = Sending(arrays, len(whole), announced=announced)
    payload = open_payload(trainer.sender.offer, MANIFEST, len(whole), SegmentView(), CPU)
    assert isinstance(payload, DistributedPayload) and payload.via == "gloo" and payload.unannounced
    assert read(payload, len(whole)) == whole
    assert not payload.ready and payload.read(np.empty(9, np.uint8)) == 0, "nothing is left"
    trainer.close()
    assert trainer.error is None
    payload.close()
    payload.close()


def test_round_trip_again_and_again() -> None:
    for arrays in (ARRAYS, ARRAYS[::-1], ARRAYS[:2], [np.ones(1, np.uint8)]):
        round_trip(arrays)


def test_broadcasts_that_are_announced() -> None:
    """As NCCL's are, here by gloo."""
    for arrays in (ARRAYS, [np.ones(1, np.uint8)]):
        round_trip(arrays, announced=True)


def test_none_is_posted_before_the_trainer_sends() -> None:
    """A receive of NCCL's that is posted holds processors of the GPU until the bytes come."""
    sender = Broadcaster("gloo", "127.0.0.1", len(WHOLE), announced=True)
    payload, memory = DistributedPayload(sender.offer, CPU), np.empty(100_000, np.uint8)
    over = threading.Event()
    thread = threading.Thread(target=sender.send, args=([], over.is_set, time.monotonic() + WAIT))
    thread.start()  # joins, and has nothing to send
    until(payload._joined.is_set)
    for _ in range(200):
        assert not payload.ready and payload.read(memory) == 0 and not payload._posted
        time.sleep(0.001)
    thread.join(WAIT)
    first = torch.from_numpy(np.frombuffer(WHOLE[:70_001], np.uint8).copy())
    work = sender._group.broadcast(first, 0)
    sender._store.set(distributed._sent(sender.offer, 0), "1")
    assert read(payload, 70_001) == WHOLE[:70_001] and payload._posted == 1
    work.wait()
    payload.close()
    sender.close()


def test_a_trainer_that_sends_no_more_is_told_and_the_group_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the helper thread: the loop may be waiting for the device on which the broadcast is waited for."""
    monkeypatch.setattr(distributed, "STALL_S", 0.3)
    sender = Broadcaster("gloo", "127.0.0.1", len(WHOLE), announced=True)
    payload = DistributedPayload(sender.offer, CPU)
    thread = threading.Thread(target=sender.send, args=([], NEVER, time.monotonic() + WAIT))
    thread.start()
    until(payload._joined.is_set)
    assert "nothing was heard of it for" in failure_of(payload)
    thread.join(WAIT)
    sender.close()


def test_an_offer_of_another_size_is_refused() -> None:
    offer = DistributedOffer("gloo", "127.0.0.1", 1, "0" * 32, 10, "0" * 64)
    with pytest.raises(InvalidRequest, match="10 bytes are offered, the manifest's tensors have 11"):
        open_payload(offer, MANIFEST, 11, SegmentView(), CPU)


@pytest.mark.parametrize(
    "wrong", [{"port": 0}, {"port": 70_000}, {"host": ""}, {"group": "../x"}, {"backend": "mpi"}, {"x": 1}, {"secret": ""}]
)
def test_offers_that_are_none(wrong: dict[str, Any]) -> None:
    fields = {
        "type": "distributed",
        "backend": "gloo",
        "host": "h",
        "port": 1,
        "group": "0" * 32,
        "total": 1,
        "secret": "0" * 64,
    }
    assert msgspec.convert(fields, DistributedOffer).port == 1
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**fields, **wrong}, DistributedOffer)


def test_bytes_that_come_late_hold_nothing_up() -> None:
    """Nothing is sent before `read` has returned a thousand times."""
    sender = Broadcaster("gloo", "127.0.0.1", len(WHOLE))
    payload = DistributedPayload(sender.offer, CPU)
    memory = np.empty(10, np.uint8)
    joined = f"{sender.offer.group}/joined"
    until(lambda: sender._store.check([joined]))
    for _ in range(1000):
        assert not payload.ready and payload.read(memory) == 0
    thread = threading.Thread(target=sender.send, args=(ARRAYS, NEVER, time.monotonic() + WAIT))
    thread.start()
    assert read(payload, len(WHOLE)) == WHOLE
    thread.join(WAIT)
    assert not thread.is_alive()
    payload.close()
    sender.close()


def failure_of(payload: DistributedPayload) -> str:
    memory = np.empty(1 << 20, np.uint8)

    def failed() -> bool:
        try:
            payload.read(memory)
        except SourceUnreachable as error:
            told.append(error.message)
        return bool(told)

    told: list[str] = []
    until(failed)
    payload.close()
    return told[0]


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed port is told at once, and not when the service has given up."""
    monkeypatch.setattr(distributed, "REACH_S", 10 * WAIT)
    sender = Broadcaster("gloo", "127.0.0.1", 10)
    sender.close()
    assert os.strerror(errno.ECONNREFUSED) in failure_of(DistributedPayload(sender.offer, CPU))


class Stranger:
    """Reaches the store before the service, reads what is in it, and joins as rank 1 or 0."""

    def __init__(self, offer: DistributedOffer, rank: int) -> None:
        self.got = torch.zeros(1 << 16, dtype=torch.uint8)
        self.offer = msgspec.structs.replace(offer, secret="0" * 64)
        self._rank = rank
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        offer = self.offer
        store = dist.TCPStore(offer.host, offer.port, 2, False, distributed.timedelta(seconds=WAIT), False)
        store.set(f"{offer.group}/joined", "1")  # the name of the group is in the store for all to read
        member = distributed._group(offer, store, self._rank, "127.0.0.1", None)
        shown = distributed._proof_tensor(distributed.proof(offer, self._rank), None)
        wait = distributed.timedelta(seconds=2)
        try:
            member.broadcast(shown, 1, wait).wait()
            member.broadcast(torch.zeros(32, dtype=torch.uint8), 0, wait).wait()
            member.broadcast(self.got, 0, wait).wait()
        except RuntimeError:
            pass  # it was left
        group.leave(member, "gloo")

    def join(self) -> None:
        self._thread.join(WAIT)
        assert not self._thread.is_alive()


def test_a_stranger_who_joins_in_place_of_the_service_gets_nothing() -> None:
    array = np.full(1 << 16, 7, np.uint8)
    trainer = Sending([array], len(array))
    stranger = Stranger(trainer.sender.offer, 1)
    trainer.join()
    trainer.close()
    stranger.join()
    assert isinstance(trainer.error, SourceUnreachable) and "does not know the secret" in trainer.error.message
    assert not stranger.got.any()


def test_without_the_proof_the_stranger_would_have_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "check_proof", lambda *_: None)
    array = np.full(1 << 16, 7, np.uint8)
    trainer = Sending([array], len(array))
    stranger = Stranger(trainer.sender.offer, 1)
    stranger.join()
    trainer.close()
    assert stranger.got.any()


def test_a_stranger_in_place_of_the_trainer_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    thief = Broadcaster("gloo", "127.0.0.1", 10)

    def pretend(over: Callable[[], bool], end: float) -> bool:
        for rank in (1, 0):
            anything, wait = torch.zeros(32, dtype=torch.uint8), distributed.timedelta(seconds=WAIT)
            distributed._finished(thief._group.broadcast(anything, rank, wait), over, end)
        return True

    monkeypatch.setattr(thief, "_recognise", pretend)
    payload = DistributedPayload(msgspec.structs.replace(thief.offer, secret="0" * 64), CPU)
    over = threading.Event()
    thread = threading.Thread(
        target=suppressed, args=(thief.send, [np.zeros(10, np.uint8)], over.is_set, time.monotonic() + WAIT)
    )
    thread.start()
    assert "does not know the secret" in failure_of(payload)
    over.set()
    thread.join(WAIT)
    thief.close()


def suppressed(function: Callable[..., None], *args: Any) -> None:
    try:
        function(*args)
    except SourceUnreachable:
        pass


def test_the_trainer_waits_where_its_session_goes_out() -> None:
    assert group.own_address("tcp://127.0.0.1:5655") == "127.0.0.1" and group.own_address("tcp://[::1]:5655") == "::1"
    assert group.own_address("ipc:///tmp/x") == "127.0.0.1" == group.own_address("tcp://no.such.host.invalid:1")


def test_a_trainer_that_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Broadcaster("gloo", "127.0.0.1", 10)
    monkeypatch.setattr(distributed, "JOIN_S", 0.3)
    assert f"no group with the trainer at 127.0.0.1:{sender.offer.port}" in failure_of(DistributedPayload(sender.offer, CPU))
    sender.close()


def test_a_port_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service gives the refresh up in time, its thread when the port is closed."""
    monkeypatch.setattr(distributed, "REACH_S", 0.3)
    with group.listen("127.0.0.1") as mute:
        offer = DistributedOffer("gloo", "127.0.0.1", mute.getsockname()[1], "0" * 32, 10, "0" * 64)
        payload = DistributedPayload(offer, CPU)
        assert f"no group with the trainer at 127.0.0.1:{offer.port}" in failure_of(payload)
    payload._thread.join(WAIT)
    assert not payload._thread.is_alive()


@pytest.fixture
def given_up() -> Iterator[threading.Event]:
    """Set at the end, whatever happens: no thread is left waiting for it."""
    event = threading.Event()
    yield event
    event.set()


def test_joins_of_nccl_that_hang_do_not_pile_up(monkeypatch: pytest.MonkeyPatch, given_up: threading.Event) -> None:
    """Each keeps a thread and sockets. So many are borne; then refreshes by NCCL are refused, by gloo not, until they end."""
    joining = threading.Semaphore(0)

    def join(*arguments: Any) -> None:
        joining.release()
        given_up.wait(10 * WAIT)
        raise RuntimeError("it does not join")

    sender = Broadcaster("gloo", "127.0.0.1", 10)
    offer = msgspec.structs.replace(sender.offer, backend="nccl")
    monkeypatch.setattr(distributed, "_group", join)
    hung = []
    for _ in range(distributed.MOST_HUNG):
        hung.append(DistributedPayload(offer, CPU))
        assert joining.acquire(timeout=WAIT)
        hung[-1].close()
    with pytest.raises(SourceUnreachable, match='2 groups of NCCL.*via="gloo" works'):
        DistributedPayload(offer, CPU)
    hung.append(DistributedPayload(sender.offer, CPU))
    assert joining.acquire(timeout=WAIT)
    hung[-1].close()
    given_up.set()
    for payload in hung:
        payload._thread.join(WAIT)
    again = DistributedPayload(offer, CPU)
    again.close()
    again._thread.join(WAIT)
    sender.close()


def test_a_service_that_is_gone_before_it_has_connected(monkeypatch: pytest.MonkeyPatch, given_up: threading.Event) -> None:
    """`close` does not wait for the helper thread, which goes when it has given up."""

    def join(*arguments: Any) -> None:
        given_up.wait(10 * WAIT)
        raise RuntimeError("it does not join")

    monkeypatch.setattr(distributed, "join", join)
    sender = Broadcaster("gloo", "127.0.0.1", 10)
    payload = DistributedPayload(sender.offer, CPU)
    payload.close()
    assert payload._thread.is_alive()
    given_up.set()
    payload._thread.join(WAIT)
    assert not payload._thread.is_alive()
    sender.close()


def test_a_trainer_that_goes_before_the_group_is_made(monkeypatch: pytest.MonkeyPatch, given_up: threading.Event) -> None:
    """The service is told by a connection of its own, while torch still tries."""

    def store(*arguments: Any) -> None:
        given_up.wait(10 * WAIT)
        raise RuntimeError("no store")

    monkeypatch.setattr(distributed, "REACH_S", 10 * WAIT)
    monkeypatch.setattr(dist, "TCPStore", store)
    mute = group.listen("127.0.0.1")
    payload = DistributedPayload(DistributedOffer("gloo", "127.0.0.1", mute.getsockname()[1], "0" * 32, 10, "0" * 64), CPU)
    first, _ = mute.accept()
    assert not payload.ready and payload.read(np.empty(9, np.uint8)) == 0
    first.close()
    assert "it is gone" in failure_of(payload)
    mute.close()
    given_up.set()
    payload._thread.join(WAIT)
    assert not payload._thread.is_alive()


def test_a_trainer_that_sends_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "STALL_S", 0.3)
    trainer = Sending(ARRAYS[:1], len(WHOLE))
    message = failure_of(DistributedPayload(trainer.sender.offer, CPU))
    told = r"the trainer was lost while it sent the weights, \d+\.\d s after its last bytes: ."
    assert re.match(told, message), message
    trainer.close()


def test_a_trainer_that_is_killed() -> None:
    program = (
        "import sys, msgspec, numpy as np, time\n"
        "from rollout.transport.weights import distributed\n"
        "distributed.SLOT_BYTES = 70_001\n"
        "sender = distributed.Broadcaster('gloo', '127.0.0.1', 10_000_000)\n"
        "print(msgspec.json.encode(sender.offer).decode(), flush=True)\n"
        "sender.send([np.full(14 * 70_001, 7, np.uint8)], lambda: False, time.monotonic() + 100)\n"
        "print('sent', flush=True)\n"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        offer = msgspec.json.decode(child.stdout.readline(), type=DistributedOffer)
        payload = DistributedPayload(offer, CPU)
        assert read(payload, 14 * 70_001) == bytes([7]) * 14 * 70_001
        assert child.stdout.readline() == "sent\n"
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT)
        assert "the trainer was lost" in failure_of(payload)


@pytest.mark.parametrize("told", [True, False])
def test_a_service_that_wants_no_more(told: bool) -> None:
    """It leaves the group in the middle. A sender that has its answer stops; one that has none is told by the group."""
    over = threading.Event()
    trainer = Sending([np.zeros(5_000_000, np.uint8)], 5_000_000, over.is_set if told else NEVER)
    payload = DistributedPayload(trainer.sender.offer, CPU)
    read(payload, 500_000, 10_000)
    over.set()
    if told:
        trainer.join()
    payload.close()
    trainer.close()
    if told:
        assert trainer.error is None
    else:
        assert isinstance(trainer.error, SourceUnreachable) and "did not take the weights by gloo" in trainer.error.message


def test_a_service_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    late = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], sleep=time.sleep)
    monkeypatch.setattr(distributed, "time", clock)
    trainer = Sending([np.zeros(5_000_000, np.uint8)], 5_000_000)
    payload = DistributedPayload(trainer.sender.offer, CPU)
    until(payload._joined.is_set)
    late[0] = 10 * WAIT
    trainer.close()
    assert isinstance(trainer.error, RequestTimeout)
    payload.close()


def test_a_service_that_does_not_come() -> None:
    trainer = Sending(ARRAYS, len(WHOLE), seconds=0.1)
    trainer.close()
    assert isinstance(trainer.error, RequestTimeout)


@pytest.mark.parametrize("told", [True, False])
def test_a_service_that_dies_before_the_group_is_made(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo waits on, in a thread that nobody waits for."""
    monkeypatch.setattr(distributed, "JOIN_S", 1.0)
    over = threading.Event()
    trainer = Sending(ARRAYS, len(WHOLE), over.is_set if told else NEVER, seconds=WAIT if told else 0.1)
    trainer.sender._store.set(f"{trainer.sender.offer.group}/joined", "1")  # all that such a service has done
    until(lambda: not told or "rollout-weights-join" in [thread.name for thread in threading.enumerate()])
    over.set()
    trainer.join()
    waiting = [thread.name for thread in threading.enumerate()]
    assert isinstance(trainer.error, RequestTimeout) != told and (not told or "rollout-weights-join" in waiting)
    trainer.close()


def test_a_group_that_fails_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the tensors nor the store's port, also where nobody collects garbage."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("injected failure of the group")

    monkeypatch.setattr(distributed, "_group", broken)
    piece = np.zeros(1000, np.uint8)
    seen = weakref.ref(piece)
    sender = Broadcaster("gloo", "127.0.0.1", 1000)
    sender._store.set(f"{sender.offer.group}/joined", "1")
    gc.disable()
    try:
        with pytest.raises(SourceUnreachable, match="injected"):
            sender.send([piece], NEVER, time.monotonic() + WAIT)
        sender.close()
        del piece
        assert seen() is None
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", sender.offer.port), 1).close()
    finally:
        gc.enable()


def test_an_address_of_another_machine() -> None:
    with pytest.raises(SourceUnreachable, match=r"192\.0\.2\.1.*of this machine"):
        Broadcaster("gloo", "192.0.2.1", 10)


def listening() -> set[str]:
    """Addresses, as /proc writes them, at which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{fd}")))
        except OSError:
            pass  # of the listing itself
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_only_the_chosen_address_listens() -> None:
    before = listening()
    trainer = Sending([np.zeros(5_000_000, np.uint8)], 5_000_000)
    payload = DistributedPayload(trainer.sender.offer, CPU)
    some = len(read(payload, 100_000))
    assert listening() - before <= {"0100007F"}
    until(lambda: "0100007F" in listening())
    read(payload, 5_000_000 - some)
    trainer.close()
    payload.close()
    wide = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)  # as torch makes it by itself
    until(lambda: bool(listening() - before - {"0100007F"}))  # an address that is not loopback would be seen
    del wide


def test_the_trainer_s_default_group_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = dist.distributed_c10d._world.pg_map.copy()
        trainer = Sending(ARRAYS, len(WHOLE))
        payload = DistributedPayload(trainer.sender.offer, CPU)
        assert read(payload, len(WHOLE)) == WHOLE
        trainer.close()
        payload.close()
        assert dist.distributed_c10d._world.pg_map == before
        value = torch.ones(3)
        dist.all_reduce(value)
        assert value.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_what_a_service_says_it_can_do() -> None:
    assert "gloo" in capabilities(CPU) and "nccl" not in capabilities(CPU)
    assert not {"gloo", "nccl"} & set(capabilities(None)), "without torch there is no torch.distributed"


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_that_is_not_there_is_told() -> None:
    sender = Broadcaster("nccl", "127.0.0.1", 10)
    assert "without NCCL" in failure_of(DistributedPayload(msgspec.structs.replace(sender.offer), CPU))
    sender.close()


def test_errors_of_nccl_are_told_only_to_groups_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for before in (None, "3"):
        monkeypatch.delenv(name, raising=False)
        if before:
            monkeypatch.setenv(name, before)
        with group.without_nccl_watchdog():
            assert os.environ[name] == "0"
        assert os.environ.get(name) == before


def test_a_group_that_cannot_be_destroyed_holds_nobody_up() -> None:
    """gloo joins its threads in the group's destructor, and one that missed the end of the group waits on."""
    ends, destroyed = threading.Event(), threading.Event()

    class Stuck:
        def rank(self) -> int:
            return 0

        def recv(self, *_: object) -> Any:
            raise RuntimeError("closed")

        def __del__(self) -> None:
            assert ends.wait(WAIT)
            destroyed.set()

    group.leave_aside([Stuck()], "gloo", seconds=0.01)
    assert not destroyed.is_set(), "it is still being destroyed"
    ends.set()
    assert destroyed.wait(WAIT)
