"""The endurance run in small: who counts there would see what must not be, and a long form of the whole."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from rollout.client.api import RolloutClient
from rollout.client.lora import digest_of_tensors
from rollout.engine.engine import Engine
from rollout.engine.values import Group as EngineGroup
from rollout.engine.values import Mode, Sample, Sampling
from rollout.identity import result_digest
from rollout.transport import messages as m
from rollout.transport.errors import InvalidRequest, RolloutError, SourceUnreachable, WeightsRefused
from tests.support.endurance import hostile, leaks, ledgers, older
from tests.support.endurance.account import Account, Group, Judge
from tests.support.endurance.foreign import LINK, Foreign
from tests.support.endurance.garbage import HARMFUL, Attacker
from tests.support.endurance.models import BROKEN, CLASSES, TestModel
from tests.support.endurance.numberless import Contents
from tests.support.endurance.pushing import HOSTILE_ANSWERS
from tests.support.hash_engine import HashEngine
from tests.support.ledgers import asked, recorded
from tests.support.waiting import until
from tests.support.wire import serving

PROMPT = np.array([5, 6, 7], np.int32)
SAMPLING = Sampling(n=2, max_tokens=3, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TestModel:
    return TestModel("tiny", tmp_path_factory.mktemp("endurance"))


@pytest.fixture
def account(model: TestModel) -> Account:
    account = Account(model, 0)
    account.may_serve |= {1, 2}
    account.version = 1
    return account


def sample(index: int = 0, **options: object) -> Sample:
    """Make a sample of PROMPT under version 1."""
    fields = {
        "group_id": "g",
        "index": index,
        "token_ids": np.array([1, 1 + CLASSES, 1], np.int32),
        "logprobs": np.full(3, -0.5, np.float32),
        "finish_reason": "length",
        "weight_versions": [(0, 1)],
        "prompt_tokens": 3,
        "seed": 1,
    }
    return Sample(**{**fields, **options})  # type: ignore[arg-type]


def violations(account: Account) -> Counter[str]:
    return Counter({name: account.counts[name] for name in ("lost", "doubled", "mixed") if account.counts[name]})


def test_what_is_right_is_no_violation(account: Account) -> None:
    group = account.group("a", PROMPT, SAMPLING)
    both = sample(1, token_ids=np.array([1, 2, 2], np.int32), weight_versions=[(0, 1), (1, 2)])
    account.settle(group, [sample(0), both])
    account.finish()
    assert not violations(account) and account.counts["samples"] == account.counts["owed"] == 2


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        ("lost", []),
        ("lost", [sample(0)]),
        ("lost", [sample(0), sample(1, finish_reason="error", error="why")]),
        ("lost", [sample(0), sample(1, token_ids=np.array([1], np.int32), logprobs=np.zeros(1, np.float32))]),
        ("doubled", [sample(0), sample(1), sample(1)]),
        ("doubled", [sample(0), sample(1), sample(2)]),
        ("mixed", [sample(0), sample(1, token_ids=np.array([1, 2, 1], np.int32))]),
        ("mixed", [sample(0), sample(1, weight_versions=[(0, 2)])]),
        ("mixed", [sample(0), sample(1, weight_versions=[(0, 2), (1, 1)])]),
        ("mixed", [sample(0), sample(1, weight_versions=[(0, 17)])]),
        ("mixed", [sample(0), sample(1, weight_versions=[(0, 0)])]),
        ("mixed", [sample(0), sample(1, logprobs=np.array([-1, np.nan, -1], np.float32))]),
    ],
)
def test_each_violation_is_seen(account: Account, seen: str, wrong: list[Sample]) -> None:
    account.settle(account.group("a", PROMPT, SAMPLING), wrong)
    assert violations(account)[seen] >= 1 and len(account.notes) == violations(account).total()


def test_a_sample_that_the_ledger_lacks_is_seen(account: Account, tmp_path: Path) -> None:
    """And a ledger in which a byte was changed; one whose last frame is torn is whole."""
    path = tmp_path / "ledger"
    with recorded(path) as client:
        prompt, sampling = asked(0)
        came = client.submit(prompt, sampling).result(timeout=60.0)
    for sample in came:
        account.arrived[result_digest(sample)] = "one"
    ledgers.check(account, path)
    assert (account.counts["unrecorded"], account.counts["ledger_records"]) == (0, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-40:-3])
    ledgers.check(account, path)
    assert account.counts["unrecorded"] == 0, "torn: another life of the service would cut it"
    account.arrived["0" * 40] = "another"
    ledgers.check(account, path)
    assert account.counts["unrecorded"] == 1
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    ledgers.check(account, path)
    assert account.counts["unrecorded"] == 2 and "cannot be read" in account.notes[-1]


def test_what_nobody_settles_is_lost(account: Account) -> None:
    account.group("a", PROMPT, SAMPLING)
    account.finish()
    assert violations(account) == {"lost": 2}


def test_the_judge_agrees_with_the_engine_and_with_nothing_else(model: TestModel, account: Account) -> None:
    account.may_serve |= set(range(20))
    engine = Engine(model.config(0))
    engine.refresh(model.weights(1))
    sampling = msgspec.structs.replace(SAMPLING, max_tokens=12)
    engine.submit(EngineGroup("g", PROMPT, sampling))
    samples: list[Sample] = []
    while len(samples) < 2:
        samples += engine.step()
    group = Group("a", PROMPT, sampling, 1, 1)
    changed = samples[1].logprobs.copy()
    changed[5] = np.nextafter(changed[5], np.float32(0))
    relabelled = msgspec.structs.replace(samples[1], weight_versions=[(0, 1 + CLASSES)])  # of the same class
    over = threading.Event()
    over.set()
    for case, mixed in ((samples[0], 0), (msgspec.structs.replace(samples[1], logprobs=changed), 1), (relabelled, 1)):
        account.counts.clear()
        account.look(group, case)
        assert not violations(account)
        if account.to_judge.empty():  # it takes a share of them
            account.to_judge.put((group, case))
        Judge(account, 0).run(over)
        assert account.counts["judged"] == 1 and account.counts["mixed"] == mixed
        assert account.counts["remade"] == 1 and account.counts["unequal"] == mixed
    account.counts.clear()
    account.to_judge.put((group, msgspec.structs.replace(samples[0], seed=2)))
    Judge(account, 0).run(over)
    assert (account.counts["mixed"], account.counts["unequal"]) == (0, 1), "another child's tokens, with their log-probs"


def test_weights_that_break_are_refused(model: TestModel) -> None:
    engine, rng = Engine(model.config(0)), random.Random(0)
    for how in BROKEN:
        with pytest.raises(ValueError):
            engine.refresh(model.broken(1, how, rng))
    assert engine.version == 0
    engine.refresh(model.weights(1))  # and only those


def series(more_mib: float, noise: float = 2.0) -> list[tuple[float, leaks.Held]]:
    """Make ten minutes of a process that holds so much more at their end, with bursts."""
    rng = random.Random(0)
    held = lambda i: 500 + more_mib * i / 300 + rng.uniform(0, noise) + 40 * (rng.random() < 0.2)  # noqa: E731
    return [(2.0 * i, leaks.Held(held(i), 40 + rng.randrange(3), 12, 0.0)) for i in range(300)]


def test_growth_is_seen_and_bursts_are_not() -> None:
    flat, leak = leaks.growths("flat", series(0.0)), leaks.growths("leak", series(40.0))
    assert [growth.what for growth in flat] == list(leaks.Held._fields) and not any(growth.leaks for growth in flat)
    assert [growth.what for growth in leak if growth.leaks] == ["rss_mib"]
    assert leaks.held(2**22 + 1) is None


def test_weights_that_are_staged_more_often_are_no_leak() -> None:
    """Two levels, the upper one seen from two thirds of the time on."""
    two = [
        (at, held._replace(rss_mib=held.rss_mib + 200 * (i >= 200 or i % 5 == 0))) for i, (at, held) in enumerate(series(0.0))
    ]
    assert not any(growth.leaks for growth in leaks.growths("two levels", two))


def test_attackers_break_messages_and_no_service() -> None:
    engine = HashEngine()
    with serving(engine) as service:
        attacker = Attacker(service.endpoint, 3)
        try:
            for _ in range(200):
                with pytest.raises(RolloutError):
                    while isinstance(attacker.decoder.unpack(attacker.broken()), m.ClientMessage):
                        pass
            until(lambda: attacker.send() or attacker.counts["messages"] >= 400, "they are sent")
            for _ in range(20):
                attacker.raw()
                attacker.ask_deaf()
            until(lambda: service.status()["service"]["malformed"] > 150, "they have come")
            assert service._engine.mode is Mode.RUNNING
        finally:
            for raw in attacker.half_open:
                raw.close()
            attacker.context.destroy(linger=0)


def test_what_would_do_harm_is_sent_broken_only() -> None:
    with serving(HashEngine()) as service:
        attacker = Attacker(service.endpoint, 4)
        attacker.valid = [frames for frames in attacker.valid if isinstance(attacker.decoder.unpack(frames), HARMFUL)]
        for _ in range(300):
            try:
                assert not isinstance(attacker.decoder.unpack(attacker.broken()), HARMFUL)
            except RolloutError:
                pass
        attacker.context.destroy(linger=0)


def test_an_adapter_is_its_version_s_weights(tmp_path: Path) -> None:
    model = TestModel("tiny", tmp_path)
    engine = Engine(model.config(0))
    with serving(engine) as service, RolloutClient(service.endpoint) as client:
        base = client.refresh(model.weights(3), version=3)
        done = client.refresh_lora(model.save_adapter(9, 3, tmp_path / "adapter"), base=base.digest, version=9)
        (sample,) = client.submit(PROMPT, msgspec.structs.replace(SAMPLING, n=1, max_tokens=8)).result(30)
    assert done.digest == digest_of_tensors(model.weights(9)) != base.digest
    assert not any(model.wrong_token(int(token), 9) for token in sample.token_ids)


@pytest.mark.parametrize("make", [lambda port, rng: older.bare(rng), older.request], ids=["bare", "page"])
def test_older_peers_are_believed_by_a_bare_socket_only(make: Callable[[int, random.Random], bytes]) -> None:
    context, rng = zmq.Context(), random.Random(0)
    bare = context.socket(zmq.ROUTER)
    port = bare.bind_to_random_port("tcp://127.0.0.1")
    answering = threading.Thread(target=answer, args=(bare,), daemon=True)
    try:
        answering.start()
        until(lambda: older.believed(port, make(port, rng)), "the bare socket believes it")
        answering.join(30)
        with serving(HashEngine()) as service:
            served = int(service.endpoint.rpartition(":")[2])
            assert not any(older.believed(served, make(served, rng)) for _ in range(4))
            assert service._engine.mode is Mode.RUNNING and not service.status()["service"]["malformed"]
    finally:
        bare.close(0)
        context.destroy(linger=0)


def answer(bare: zmq.Socket[bytes]) -> None:
    """Answer the first Hello that comes, as a service does."""
    while bare.poll(20_000):
        peer, *frames = bare.recv_multipart()
        if b"hello" in frames[0]:
            bare.send_multipart([peer, b"welcome"])
            return


def test_two_contents_of_one_version_are_seen(account: Account) -> None:
    contents = Contents(account)
    contents.pushed(1, 1)
    contents.look(sample())
    assert not violations(account)
    contents.pushed(1, 2)
    assert violations(account) == {"mixed": 2}, "it did not rise, and is another content"
    contents.look(sample(token_ids=np.array([4, 4, 4], np.int32), weight_versions=[(0, 0)]))
    assert violations(account)["mixed"] > 2


def test_each_harm_to_a_file_of_the_user_is_seen(tmp_path: Path) -> None:
    def touched(path: Path) -> None:
        content, mode = path.read_bytes(), path.stat().st_mode
        path.unlink()
        path.write_bytes(content)
        path.chmod(mode)

    harms: dict[str, Callable[[Path], object]] = {
        "gone": Path.unlink,
        "content": lambda path: path.write_bytes(b"other"),
        "mode": lambda path: path.chmod(0o666),
        "replaced": touched,
        "a link": lambda path: (path.unlink(), path.symlink_to("draft.new")),
    }
    for name, harm in harms.items():
        foreign = Foreign(tmp_path / name)
        assert not foreign.harmed()
        harm(tmp_path / name / "model.safetensors")
        assert foreign.harmed() == ["model.safetensors"], name
    foreign = Foreign(tmp_path / "another")
    (tmp_path / "another" / LINK).unlink()
    assert foreign.harmed() == [LINK]


@pytest.mark.parametrize("kind", hostile.KINDS)
def test_a_header_that_lies_is_refused_by_both_ends(kind: str, tmp_path: Path) -> None:
    folder = hostile.write(tmp_path / "hostile", kind)
    with serving(HashEngine()) as service, RolloutClient(service.endpoint) as client:
        with pytest.raises((InvalidRequest, WeightsRefused, SourceUnreachable)):
            client.refresh(folder)
        answer = hostile.offer(service.endpoint, folder, "a", 30.0)
        assert isinstance(answer, m.Refused) and answer.kind in HOSTILE_ANSWERS - {"busy", "no_session"}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["tiny", "smollm2"])
def test_a_minute_of_endurance(kind: str, tmp_path: Path) -> None:
    from tests.support.endurance.run import FOUND, run

    if kind == "smollm2" and not TestModel("smollm2", tmp_path).folder.is_dir():
        pytest.skip("run `make model` once")
    found = run(0.02, 7, [kind])  # type: ignore[list-item]
    assert not any(found[name] for name in FOUND), found
    assert found["samples"] > 100 and found["kills"] >= 2 and found["malformed"] > 1000 and found["broken_pushes"] > 2


def test_processes_may_start_while_memory_is_judged() -> None:
    watcher, over = leaks.Watcher(), threading.Event()

    def start_processes() -> None:
        for number in range(300):
            watcher.look({f"process {number}": os.getpid()})
        over.set()

    looks = threading.Thread(target=start_processes)
    looks.start()
    while not over.is_set():
        watcher.judge()
    looks.join(10)
    assert len(watcher.series) == 300


def test_shared_memory_that_nobody_has_mapped_is_left() -> None:
    segment = SharedMemory(create=True, size=4096)
    try:
        assert leaks.mapped({segment.name, "nobody has it"}) == {segment.name}
        segment.close()
        assert segment.name in leaks.shared_memory() and not leaks.mapped({segment.name})
    finally:
        segment.unlink()
