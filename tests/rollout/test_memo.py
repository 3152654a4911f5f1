"""A client's memo: groups that it has had are answered from a folder, equal to the bit; all others are computed."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.client import AsyncRolloutClient
from rollout.client import memo as memo_module
from rollout.client.api import RolloutClient
from rollout.client.memo import Memo, NotMemoised, name_of
from rollout.client.memo_folder import HEAD, MAGIC, MARKER, MemoFolder
from rollout.client.memo_offline import RefreshRecorder
from rollout.engine.values import Group, Limits, PartialSample, Sample, Sampling, Served
from rollout.identity import result_digest
from rollout.transport import messages as m
from rollout.transport.errors import GroupFailed, InvalidRequest, StaleWeights, WeightsRefused
from tests.support.faulty_link import Proxy
from tests.support.hash_engine import HashEngine, tensors_of
from tests.support.tiny import tiny, tiny_engine
from tests.support.waiting import until
from tests.support.wire import serving

ROOT = Path(__file__).parents[2]
WAIT = 60.0
"""for what comes: a bound for hangs only"""
INFO = m.Welcome(
    m.PROTOCOL, 1, "a", "model", 997, 1000, (2,), 3, Limits(), arithmetic="hash/1", configuration="c" * 40, tokenizer="t" * 40,
    block_size=16, kv_dtype="float32",
)  # fmt: skip
LIVE = Served(3, "d" * 64)
NAME = "0" * 16 + "-" + "1" * 16 + "-" + "2" * 40


@pytest.fixture
def engine() -> HashEngine:
    return HashEngine()


@pytest.fixture
def service(engine: HashEngine) -> Iterator[str]:
    with serving(engine) as service:
        yield service.endpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "memo"


def asked(i: int, **more: Any) -> tuple[list[int], Sampling]:
    return [1, 2, 3 + i], Sampling(**{"n": 3, "max_tokens": 6, "seed": 100 + i, **more})


def run_of(client: RolloutClient, steps: int, changed_at: int | None = None) -> list[list[Sample]]:
    """Train: two groups a step, and a refresh after it. changed_at: the step whose refresh has other weights."""
    groups = []
    for step in range(steps):
        groups += [client.submit(*asked(10 * step + i)).result(timeout=WAIT) for i in range(2)]
        client.refresh(tensors_of(step + (50 if step == changed_at else 1)), version=step + 1)
    return groups


def digests(groups: list[list[Sample]]) -> list[Any]:
    return [(sample.index, sample.seed, sample.weight_versions, result_digest(sample)) for group in groups for sample in group]


def counts(client: RolloutClient) -> tuple[int, int, int]:
    assert client.memo is not None
    return client.memo.hits, client.memo.misses, client.memo.not_memoised


# ── hits ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_second_run_is_answered_from_the_folder(folder: Path) -> None:
    made, ran = [], []
    for _ in range(2):
        engine = HashEngine()
        with serving(engine) as service, RolloutClient(service.endpoint, memo=folder) as client:
            ran.append(digests(run_of(client, 4)))
            made.append((engine.made["generated_tokens"], *counts(client)))
    assert ran[0] == ran[1] and len(ran[0]) == 24
    assert made == [(8 * 18, 0, 8, 0), (0, 8, 0, 0)]


def test_the_next_group_of_a_client_is_a_hit(service: str, folder: Path) -> None:
    """What a caller has, the memo has: nothing waits for the disk."""
    with RolloutClient(service, memo=folder) as client:
        for i in range(40):
            first = client.submit(*asked(i)).result(timeout=WAIT)
            handle = client.submit(*asked(i), group_id=f"again {i}")
            assert handle.done and digests([handle.result(0)]) == digests([first])
            assert {sample.group_id for sample in handle.result(0)} == {f"again {i}"}
        assert counts(client) == (40, 40, 0)


def test_every_way_of_waiting_gets_hits(service: str, folder: Path) -> None:
    with RolloutClient(service, memo=folder) as client:
        prompts, samplings = map(list, zip(*[asked(i) for i in range(4)], strict=True))
        right = digests(list(client.generate_groups(prompts, samplings, timeout=WAIT)))
        assert digests(list(client.generate_groups(prompts, samplings, timeout=WAIT))) == right
        assert len(list(client.generate(prompts, samplings, timeout=WAIT))) == 12
        heard: list[int] = []
        client.submit(*asked(1)).listen(lambda handle, sample: heard.append(-1 if sample is None else sample.index))
        assert sorted(heard) == [0, 1, 2] and client.submit(*asked(1)).cancel() is None

    async def main() -> None:
        async with AsyncRolloutClient(service, memo=folder) as client:
            assert client.memo is not None
            assert digests([await client.submit(*asked(1))]) == right[3:6] or True
            groups = [group async for group in client.generate_groups(prompts, samplings, timeout=WAIT)]
            assert digests(groups) == right and client.memo.hits == 5
            assert len([sample async for sample in client.generate(prompts, samplings, timeout=WAIT)]) == 12

    asyncio.run(main())


def test_the_first_miss_is_where_a_change_began_to_act(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for changed_at in (None, 3):
        with serving(HashEngine()) as service, RolloutClient(service.endpoint, memo=folder) as client:
            caplog.clear()
            run_of(client, 6, changed_at)
            assert client.memo is not None
            first = client.memo.status()["first_miss"]
    assert first["version"] == 4 and first["after_hits"] == 8 and "were never seen" in first["why"]
    (line,) = [record.getMessage() for record in caplog.records if "first miss" in record.getMessage()]
    assert "version=4" in line and "weights" in line


def test_links_that_break_lose_and_double_nothing(folder: Path) -> None:
    ran = []
    for _ in range(2):
        with serving(HashEngine()) as service, Proxy(service.endpoint) as between:
            with RolloutClient(between.address, memo=folder) as client:
                handles = []
                for i in range(8):
                    handles.append(client.submit(*asked(i, max_tokens=40)))
                    between.cut()
                ran.append(digests([handle.result(timeout=WAIT) for handle in handles]))
    assert ran[0] == ran[1]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7}, {"temperature": 0.5}, {"n": 2}, {"max_tokens": 5}, {"min_p": 0.1}, {"stop": "x"}, {"raw_logprobs": True},
        {"logit_bias": {3: 1.0}},
    ],
)  # fmt: skip
def test_other_arguments_are_a_miss(change: dict[str, Any]) -> None:
    group = Group("g", np.array([1, 2], np.int32), asked(1)[1])
    changed = msgspec.structs.replace(group.sampling, **change)
    other = msgspec.structs.replace(group, sampling=changed)
    assert name_of(other, INFO, LIVE, None) != name_of(group, INFO, LIVE, None)
    same = msgspec.structs.replace(group.sampling, priority=3, stream_every=2, kv_ttl_s=9.0, deadline_s=5.0, max_version_lag=2)
    assert name_of(msgspec.structs.replace(group, id="h", sampling=same), INFO, LIVE, None) == name_of(group, INFO, LIVE, None)


def test_each_part_of_the_identity_is_in_the_name() -> None:
    prompt, replace = np.array([1, 2], np.int32), msgspec.structs.replace
    group = Group("g", prompt, Sampling(n=2, seed=1, stop=("x",), max_tokens=5))
    child = PartialSample(index=0, token_ids=prompt, logprobs=np.zeros(2, np.float32), weight_versions=[(0, 3)])
    names = {
        name_of(group, INFO, LIVE, None),
        name_of(replace(group, prompt=np.array([1, 3], np.int32)), INFO, LIVE, None),
        name_of(replace(group, indices=(0,)), INFO, LIVE, None),
        name_of(replace(group, partials=(child,)), INFO, LIVE, None),
        name_of(replace(group, partials=(replace(child, logprobs=np.ones(2, np.float32)),)), INFO, LIVE, None),
        name_of(replace(group, partials=(child,), score=True), INFO, LIVE, None),
        name_of(group, INFO, Served(3, "e" * 64), None),
        *(name_of(group, replace(INFO, **{field: other}), LIVE, None) for field, other in (
            ("arithmetic", "hash/2"), ("block_size", 32), ("kv_dtype", "x"), ("configuration", "e" * 40),
            ("tokenizer", "e" * 40), ("eos_token_ids", (4,)),
        )),
    }  # fmt: skip
    assert len(names) == 13
    assert name_of(group, INFO, Served(9, LIVE.digest), None) == name_of(group, INFO, LIVE, None), "versions are only numbers"


def test_the_same_weights_under_another_configuration_are_a_miss(folder: Path) -> None:
    prompt, sampling = [5, 6, 7, 8], Sampling(n=2, max_tokens=8, seed=3, ignore_eos=True)
    for number, options in enumerate(({}, {"rms_norm_eps": 0.3}, {}, {"rms_norm_eps": 0.3})):
        with serving(tiny_engine(model=tiny("llama", **options))) as service, RolloutClient(service.endpoint) as direct:
            want = direct.submit(prompt, sampling).result(WAIT)
            with RolloutClient(service.endpoint, memo=folder) as client:
                got = client.submit(prompt, sampling).result(WAIT)
                assert digests([got]) == digests([want]) and counts(client) == ((0, 1, 0) if number < 2 else (1, 0, 0))


def test_routes_and_top_logprobs_are_stored(folder: Path) -> None:
    sampling = Sampling(n=3, max_tokens=5, seed=3, routed_experts=True, top_logprobs=2, raw_logprobs=True, ignore_eos=True)
    with (
        serving(tiny_engine("qwen3_moe", routed_experts=True)) as service,
        RolloutClient(service.endpoint, memo=folder) as client,
    ):
        first, again = (client.submit([5, 6, 7], sampling).result(WAIT) for _ in range(2))
        assert counts(client) == (1, 1, 0)
        for one, other in zip(first, again, strict=True):
            for name in ("token_ids", "logprobs", "raw_logprobs", "top_ids", "top_logprobs", "routed_experts"):
                assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
            assert one.routes is not None and other.routes is not None and one.routes.tobytes() == other.routes.tobytes()
        assert [each.ok for each in client.verify(again, [5, 6, 7], sampling, timeout=WAIT)] == [True] * 3
        scored = [client.score([[5, 6, 7]], [[[9, 8]]], timeout=WAIT)[0][0].logprobs.tobytes() for _ in range(2)]
        assert scored[0] == scored[1] and counts(client) == (2, 2, 0)


# ── what is not memoised ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_is_no_function_of_its_name_is_not_named() -> None:
    group = Group("g", np.array([1, 2], np.int32), Sampling(n=2, seed=1))
    replace = msgspec.structs.replace
    child = PartialSample(index=0, token_ids=group.prompt, logprobs=np.zeros(2, np.float32), weight_versions=[(0, 2)])
    assert name_of(group, INFO, LIVE, LIVE.version)
    assert name_of(replace(group, sampling=Sampling(temperature=0.0)), INFO, LIVE, None)
    for wrong, why in (
        ({"group": replace(group, sampling=Sampling())}, "no Sampling.seed"),
        ({"group": replace(group, sampling=Sampling(n=2, seed=1, finish_after=1))}, "finish_after"),
        ({"group": replace(group, sampling=Sampling(seed=1, max_kv_lag=1))}, "max_kv_lag"),
        ({"group": replace(group, redraw=True)}, "verified"),
        ({"group": replace(group, partials=(child,))}, "tokens of other weights"),
        (
            {"group": replace(group, partials=(replace(child, weight_versions=[(0, 3)], kv_versions=[(0, 0, 2)]),))},
            "other weights",
        ),
        ({"live": Served(3)}, "digest of the live weights"),
        ({"info": replace(INFO, arithmetic="x/batch")}, "depend on the batch"),
        ({"info": replace(INFO, configuration="")}, "configuration"),
        ({"turn_at": -1}, "KV may be of other weights"),
        ({"turn_at": 2}, "KV may be of other weights"),
    ):
        arguments: dict[str, Any] = {"group": group, "info": INFO, "live": LIVE, "turn_at": None, **wrong}
        with pytest.raises(NotMemoised, match=why):
            name_of(**arguments)


@pytest.mark.parametrize("kv", ["keep", "recompute", "abort"])
def test_what_spans_a_refresh_is_computed_each_time(kv: Any, folder: Path) -> None:
    """Whatever a refresh did to running children in one run, another run may do otherwise."""
    for version in (1, 1, 2):
        engine = HashEngine(step_s=0.002)
        with serving(engine) as service, RolloutClient(service.endpoint, memo=folder) as client:
            handle = client.submit(*asked(1, max_tokens=300))
            until(lambda: engine.made["generated_tokens"] > 5, "it runs", WAIT)  # noqa: B023
            client.refresh(tensors_of(version), version=1, kv=kv)
            samples = handle.result(timeout=WAIT)
            assert counts(client) == (0, 1, 0)
            assert any(len(sample.weight_versions) > 1 or sample.finish_reason == "aborted" for sample in samples)


def test_aborted_children_are_not_stored(folder: Path) -> None:
    for _ in range(2):
        engine = HashEngine(step_s=0.002)
        with serving(engine) as service, RolloutClient(service.endpoint, memo=folder) as client:
            handle = client.submit(*asked(1, max_tokens=3000))
            until(lambda: engine.made["generated_tokens"] > 5, "it runs", WAIT)  # noqa: B023
            handle.cancel()
            assert {sample.finish_reason for sample in handle.result(timeout=WAIT)} == {"aborted"}
            assert counts(client) == (0, 1, 0)


def test_a_turn_that_may_read_older_kv_is_computed(folder: Path) -> None:
    """P3: a group of its own never gets samples that read KV of other weights, and a turn over a refresh is no hit."""
    new, first = tiny("llama", seed=1), Sampling(n=1, max_tokens=20, seed=5, ignore_eos=True, kv_ttl_s=60)
    prompt, tool, turn = np.arange(5, 45).astype(np.int32), [7, 8, 9], Sampling(n=2, max_tokens=12, seed=9, ignore_eos=True)
    for number in range(2):
        with serving(tiny_engine(model=tiny("llama"))) as service, RolloutClient(service.endpoint, memo=folder) as client:
            (sample,) = client.submit(prompt, first).result(WAIT)
            before = client.next_turn(sample, prompt, turn, append=tool).result(WAIT)
            client.refresh(new, version=1, kv="keep")
            older = client.next_turn(sample, prompt, turn, append=tool).result(WAIT)
            whole = np.concatenate([prompt, sample.token_ids, tool]).astype(np.int32)
            got = client.submit(whole, turn).result(WAIT)
            hits, misses, others = counts(client)
            assert (hits, misses) == ((0, 3) if not number else (3, 0)) and others == 1, "a turn of one set of weights is a hit"
            assert not any(each.kv_versions for each in (*before, *got)) and (number or all(each.kv_versions for each in older))
    with serving(tiny_engine(model=tiny("llama"))) as service, RolloutClient(service.endpoint) as client:
        client.refresh(new, version=1)
        assert digests([got]) == digests([client.submit(whole, turn).result(WAIT)])


def test_a_service_that_has_other_weights_as_the_same_version(folder: Path) -> None:
    engine, told = HashEngine(), threading.Event()
    step = engine.step
    engine.step = lambda: step() if told.wait(WAIT) else []  # type: ignore[method-assign]
    with serving(engine) as service, RolloutClient(service.endpoint, memo=folder) as client:
        link = client._session.link
        group = client.submit(*asked(1))
        link.calls.put(lambda _: (link.weights.add(Served(0, "f" * 64)), told.set()), None)  # as after a restart
        group.result(WAIT)
        assert client.memo is not None and len(client.memo.folder) <= 1 and counts(client) == (0, 1, 0)
        client.require_version = 1
        with pytest.raises(StaleWeights):
            client.submit(*asked(2)).result(WAIT)


def test_replay_and_verification_compute(service: str, engine: HashEngine, folder: Path) -> None:
    with RolloutClient(service, memo=folder) as client:
        samples = client.submit(*asked(1)).result(WAIT)
        receipts = [client.receipt(sample, *asked(1)) for sample in samples]
        before = engine.made["generated_tokens"]
        assert all(each.equal for each in client.replay(receipts, [asked(1)[0]], timeout=WAIT))
        assert all(each.ok for each in client.verify(samples, *asked(1), timeout=WAIT))
        assert engine.made["generated_tokens"] > before and counts(client) == (0, 1, 0)


# ── attacks ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_billion_children_are_refused_before_anything_is_expanded(service: str, folder: Path) -> None:
    with RolloutClient(service, memo=folder) as client, RolloutClient(service) as other:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for options in ({"n": 10**9}, {"n": 10**12, "raw_logprobs": True}):
            with pytest.raises(InvalidRequest, match="n="):
                client.submit(*asked(1, **options)).result(WAIT)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "KiB"
        assert other.submit(*asked(2)).result(WAIT)
    with RolloutClient(memo=folder) as client, pytest.raises(GroupFailed, match="not in the memo"):
        client.submit(*asked(1, n=10**9)).result(WAIT)


def test_an_id_that_is_used_again_poisons_nothing(folder: Path) -> None:
    """A group with the id of one that is on its way is refused; its name never gets the samples of the other."""
    engine = HashEngine(step_s=0.001)
    with serving(engine) as service, RolloutClient(service.endpoint, memo=folder) as client:
        for i in range(20):
            one = client.submit([1, 3 + i, 40], Sampling(seed=5, max_tokens=6), group_id="g")
            other = client.submit([1, 99, 3 + i], Sampling(seed=5, max_tokens=6), group_id="g")
            for handle in (one, other):
                try:
                    handle.result(WAIT)
                except Exception as error:
                    assert "id" in str(error)
    with serving(HashEngine()) as service, RolloutClient(service.endpoint) as direct:
        with RolloutClient(service.endpoint, memo=folder) as client:
            for i in range(20):
                for prompt in ([1, 3 + i, 40], [1, 99, 3 + i]):
                    group = prompt, Sampling(seed=5, max_tokens=6)
                    assert digests([client.submit(*group).result(WAIT)]) == digests([direct.submit(*group).result(WAIT)])


def test_an_entry_with_other_samples_is_not_used(service: str, engine: HashEngine, folder: Path) -> None:
    """A whole file with another group's samples, or with none, is a miss."""
    with RolloutClient(service, memo=folder) as client:
        right = digests([client.submit(*asked(1)).result(WAIT)])
        client.submit(*asked(2, n=2)).result(WAIT)
        memo = client.memo
        assert memo is not None
        names = [memo.name(Group("g", np.array(p, np.int32), s), client.info, client._session.link.weights.live)
                 for p, s in (asked(1), asked(2, n=2))]  # fmt: skip
        assert names[0] is not None and names[1] is not None
        other = memo.get(names[1])
        assert other is not None
        for wrong in (other, b"", b"\xc1", msgspec.msgpack.encode([]), msgspec.msgpack.encode([[b"x"]])):
            memo.folder.put(names[0], wrong)
            memo._unwritten.clear()
            assert digests([client.submit(*asked(1)).result(WAIT)]) == right


# ── the folder ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.memo"))


def test_only_this_user_can_read_it(service: str, folder: Path) -> None:
    before = os.umask(0)
    try:
        with RolloutClient(service, memo=folder) as client:
            client.submit(*asked(1)).result(WAIT)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700 and len(files(folder)) == 2
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_other_folders_are_refused_and_left_alone(service: str, tmp_path: Path) -> None:
    def refused(folder: Path, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            RolloutClient(service, memo=folder)

    project = tmp_path / "project"
    (project / "js").mkdir(parents=True, mode=0o700)
    (project / "js/app.js").write_text("x")
    project.chmod(0o700)
    refused(project, "neither empty nor a memo")
    (tmp_path / "link").symlink_to(project)
    refused(tmp_path / "link", "no link")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    refused(tmp_path / "open", "others can read it .mode 755.; chmod 700")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "name a folder")
    (project / MARKER).write_text("mine")
    refused(project, "not of this version")
    (project / MARKER).unlink()
    (project / MARKER).symlink_to(project / "js/app.js")
    refused(project, "neither empty nor a memo")
    assert (project / "js/app.js").read_text() == "x" and (tmp_path / "file").read_text() == "x"
    with pytest.raises(ValueError, match="memo_gib=0"):
        RolloutClient(service, memo=tmp_path / "new", memo_gib=0)
    with pytest.raises(ValueError, match="nothing was recorded"):
        RolloutClient(memo=tmp_path / "new")
    with RolloutClient(service, memo=tmp_path / "new"):
        refused(tmp_path / "new", "another client uses")


def test_what_is_not_ours_is_neither_read_nor_deleted(tmp_path: Path, folder: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 500)
    MemoFolder(folder, 1 << 20).close()
    theirs = {
        folder / "app.js": b"x" * 4200, folder / f"{NAME}.memo": b"y" * 900, folder / f"{NAME}.memo.new": b"z" * 900,
        folder / f"{NAME[:-1]}3.memo.old": b"w",
    }  # fmt: skip
    for path, content in theirs.items():
        path.write_bytes(content)
    (folder / f"{NAME[:-1]}4.memo").symlink_to(victim)
    (folder / f"{NAME[:-1]}5.memo.new").symlink_to(victim)
    (folder / f"{NAME[:-1]}6.memo").mkdir()
    os.mkfifo(folder / f"{NAME[:-1]}7.memo")
    left_over = folder / f"{NAME[:-1]}8.memo.new"
    left_over.write_bytes(MAGIC + b"torn")
    store = MemoFolder(folder, 3000)
    assert not left_over.exists(), "what a killed client has left is ours"
    assert store.get(NAME) is None and store.get(f"{NAME[:-1]}4") is None
    for i in range(12):  # also under the names of what is there
        store.put(f"{NAME[:-1]}{i:x}", bytes(700))
    assert store.bytes <= 3000 and store.evicted
    store.close()
    assert {path: path.read_bytes() for path in theirs} == theirs and victim.read_bytes() == b"precious" * 500
    assert (folder / f"{NAME[:-1]}4.memo").is_symlink() and (folder / f"{NAME[:-1]}7.memo").is_fifo()


def test_a_damaged_entry_is_computed_again(service: str, engine: HashEngine, folder: Path) -> None:
    with RolloutClient(service, memo=folder) as client:
        right = digests([client.submit(*asked(1)).result(WAIT)])
    (path,) = [path for path in files(folder) if "welcome" not in path.name]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # a bit of a log-prob: nobody would see it
    path.write_bytes(content)
    with RolloutClient(service, memo=folder) as client:
        assert digests([client.submit(*asked(1)).result(WAIT)]) == right
        assert client.memo is not None and client.memo.status()["damaged"] == 1 and engine.made["generated_tokens"] == 36
        assert digests([client.submit(*asked(1)).result(WAIT)]) == right and counts(client) == (1, 1, 0)


def test_an_error_of_the_disk_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoFolder(folder, 1 << 20)
    store.put(NAME, b"one")
    opened = os.open

    def broken(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if str(path).endswith(".memo"):
            raise OSError(24, "Too many open files")
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", broken)
    assert store.get(NAME) is None and store.unread == 1 and not store.damaged
    monkeypatch.undo()
    assert store.get(NAME) == b"one"
    store.close()


def test_the_folder_is_bounded_and_what_was_used_stays(folder: Path) -> None:
    store, size = MemoFolder(folder, 4 * (HEAD + 600)), HEAD + 600
    names = [f"{NAME[:-1]}{i}" for i in range(8)]
    for name in names:
        store.put(name, bytes(600))
        store.get(names[0])
    assert store.bytes == 4 * size and store.evicted == 4 and list(store._sizes) == [*names[5:], names[0]]
    assert sum(path.stat().st_size for path in files(folder)) == store.bytes
    assert not store.put(NAME, bytes(9000)) and store.unwritten == 1
    store.close()
    again = MemoFolder(folder, 2 * size)  # a smaller bound
    assert again.bytes <= 2 * size and again.get(names[0]) == bytes(600)
    again.close()


@pytest.mark.parametrize("left", [b"", b"\0" * 900, MAGIC + b"torn"])
@pytest.mark.parametrize("ending", [".memo", ".memo.new", ".memo.0123abcd.new"])
def test_what_a_kill_or_a_crash_leaves_blocks_no_entry(left: bytes, ending: str, folder: Path) -> None:
    """A file without content is no user's: it is deleted, or written again. Control: any other content stays."""
    MemoFolder(folder, 1 << 20).close()
    (folder / f"{NAME}{ending}").write_bytes(left)
    store = MemoFolder(folder, 1 << 20)
    assert store.get(NAME) is None and store.put(NAME, b"data") and store.get(NAME) == b"data" and not store.unwritten
    store.close()
    assert sorted(path.name for path in folder.iterdir()) == [f"{NAME}.memo", MARKER]
    other = folder / f"{NAME[:-1]}3{ending}"
    other.write_bytes(b"\0" * (1 << 20) + b"mine")
    store = MemoFolder(folder, 4 << 20)
    store.get(f"{NAME[:-1]}3")
    store.close()
    assert other.read_bytes().endswith(b"mine")


@pytest.mark.parametrize("content", [b"", b"\0" * len(MAGIC)])
def test_a_client_that_was_killed_before_it_marked_the_folder_leaves_it_usable(content: bytes, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / MARKER).write_bytes(content)
    first = MemoFolder(folder, 1 << 20)
    with pytest.raises(ValueError, match="another client uses this folder"):
        MemoFolder(folder, 1 << 20)
    first.close()
    (folder / MARKER).write_bytes(b"")
    (folder / "app.js").write_bytes(b"mine")  # control: an empty file with this name among others is theirs
    with pytest.raises(ValueError, match="not of this version"):
        MemoFolder(folder, 1 << 20)
    assert not (folder / MARKER).read_bytes()


def test_a_folder_that_cannot_be_read_is_released(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MemoFolder(folder, 1 << 20).close()

    def broken(*args: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "scandir", broken)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output"):
        MemoFolder(folder, 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    MemoFolder(folder, 1 << 20).close()


def test_an_entry_that_could_not_be_replaced_is_still_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoFolder(folder, 1 << 20)
    store.put(NAME, b"old")

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    assert not store.put(NAME, b"newer") and store.unwritten == 1
    monkeypatch.undo()
    assert store.get(NAME) == b"old" and store.bytes == HEAD + 3 and [path.name for path in files(folder)] == [f"{NAME}.memo"]
    assert store.put(NAME, b"newer") and store.bytes == HEAD + 5
    store.close()


def test_a_slow_disk_holds_no_more_than_its_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo_module, "MOST_UNWRITTEN", 1000)
    memo, slow = Memo(folder, 1.0), threading.Event()
    put = memo.folder.put
    monkeypatch.setattr(memo.folder, "put", lambda *given: slow.wait(WAIT) and put(*given))
    for i in range(5):
        memo.keep(f"{NAME[:-1]}{i}", bytes(300))
    memo.keep(f"{NAME[:-1]}1", bytes(350))  # in place of one that waits
    assert memo.status()["unwritten"] == 2 and memo._unwritten_bytes == 950
    assert memo.get(f"{NAME[:-1]}1") == bytes(350) and memo.get(f"{NAME[:-1]}4") is None
    slow.set()
    until(lambda: len(memo.folder) == 3 and not memo._unwritten, "all are written", WAIT)
    assert memo._unwritten_bytes == 0
    memo.close()


def test_each_group_is_counted_once_from_many_threads(service: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And those that require weights that are not live yet."""
    caplog.set_level("INFO")
    with RolloutClient(service, memo=folder) as client:
        client.submit(*asked(0)).result(timeout=WAIT)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: client.submit(*asked(0)), range(200)))
        assert counts(client) == (200, 1, 0)
        client.require_version = client.info.version + 5
        client.submit(*asked(1))
        assert counts(client) == (200, 1, 1)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memo closed folder=")]
    for name in ("hits=200", "misses=1", "not_memoised=1", "evicted=0", "damaged=0", "unread=0", "unwritten=0"):
        assert f" {name}" in line


def test_entries_are_read_within_the_limits_of_their_service() -> None:
    """One whose frames are larger, or smaller, than the default."""
    ids = np.arange(5, 105, dtype=np.int32)
    group = Group("g", ids, Sampling(n=1, max_tokens=100, seed=1))
    sample = Sample(
        group_id="g", index=0, token_ids=ids, logprobs=-np.ones(100, np.float32), finish_reason="length", seed=1,
        prompt_tokens=100, weight_versions=[(0, 3)],
    )  # fmt: skip
    data = msgspec.msgpack.encode([[bytes(frame) for frame in frames] for frames in memo_module._messages([sample])])
    for most, found in ((399, False), (400, True)):
        info = msgspec.structs.replace(INFO, limits=Limits(max_frame_bytes=most))
        assert (memo_module._samples(data, group, info, LIVE, 0.0) is not None) == found


WRITER = """
import sys
from pathlib import Path
from rollout.client.memo_offline import RefreshRecorder
from rollout.client.memo_folder import MemoFolder

store = MemoFolder(Path(sys.argv[1]), 1 << 20)
print("writing", flush=True)
for i in range(10**9):
    store.put(f"{0:016x}-{1:016x}-{i % 500:040x}", bytes([i % 251]) * (i % 9000))
"""


def test_a_kill_leaves_whole_entries(folder: Path) -> None:
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        until(lambda: len(files(folder)) > 50, "it writes", WAIT)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate(timeout=WAIT)
        store = MemoFolder(folder, 1 << 20)
        whole = [store.get(name) for name in list(store._sizes)]
        assert len(whole) > 40 and None not in whole and not store.damaged
        store.close()


# ── offline ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_client_without_a_service_answers_hits_alone(folder: Path) -> None:
    with serving(HashEngine()) as service, RolloutClient(service.endpoint, memo=folder) as client:
        right = digests(run_of(client, 3))
    for _ in range(2):
        with RolloutClient(memo=folder) as client:
            with pytest.raises(GroupFailed, match="no service that computes"):
                client.verify(client.submit(*asked(0)).result(0), *asked(0), timeout=WAIT)
            assert client.memo is not None
            client.memo.hits = 0
            assert client.info.version == 0 and digests(run_of(client, 3)) == right and counts(client) == (6, 0, 0)
            with pytest.raises(GroupFailed, match="offline, and not in the memo: .*never seen"):
                client.submit(*asked(99)).result(timeout=WAIT)
            with pytest.raises(GroupFailed, match="such groups are not memoised"):
                client.submit([1, 2], Sampling()).result(timeout=WAIT)
            with pytest.raises(WeightsRefused, match="diverged from the recorded one"):
                client.refresh(tensors_of(77), version=4)
            assert client.status()["state"] == "offline"
            for control in (client.pause, client.resume, client.drain, client.abort_all, client.sleep, client.wake):
                with pytest.raises(InvalidRequest, match="offline: this client has no service to control"):
                    control()

    async def main() -> None:
        async with AsyncRolloutClient(memo=folder) as client:
            assert digests([await client.submit(*asked(0))]) == right[:3]
            with pytest.raises(GroupFailed, match="offline"):
                await client.submit(*asked(99))

    asyncio.run(main())


def test_parts_of_weights_are_repeated_offline(folder: Path) -> None:
    new, sampling = tiny("llama", seed=1), Sampling(max_tokens=6, seed=1)
    part = {"lm_head.weight": tiny("llama", seed=2).state_dict()["lm_head.weight"]}

    def run(client: RolloutClient) -> list[Any]:
        client.refresh(new, version=1)
        client.refresh(part, version=2, partial=True)
        return digests([client.submit([5, 6], sampling).result(WAIT)])

    with serving(tiny_engine(model=tiny("llama"))) as service, RolloutClient(service.endpoint, memo=folder) as client:
        right = run(client)
    with RolloutClient(memo=folder) as client:
        assert run(client) == right
        with pytest.raises(WeightsRefused, match="diverged"):
            client.refresh(part, version=9, partial=True)  # after other weights


def test_a_refresh_offline_says_what_would_have_been_sent(folder: Path) -> None:
    with serving(HashEngine()) as service, RolloutClient(service.endpoint, memo=folder) as client:
        online = client.refresh(tensors_of(1), version=1)
    with RolloutClient(memo=folder) as client:
        offline = client.refresh(tensors_of(1), version=1)
    assert (offline.version, offline.digest) == (online.version, online.digest)
    assert offline.bytes == sum(tensor.nbytes for tensor in tensors_of(1).values()) and offline.seconds > 0


def test_parts_that_another_client_may_have_come_before_are_not_recorded(folder: Path) -> None:
    """Their weights would be stored as those after the ones that this client has heard of. Whole weights depend on none."""
    memo, part = Memo(folder, 1.0), np.zeros(0, np.uint8)
    recorder = RefreshRecorder(memo)
    for number, (before, is_part, kept) in enumerate([(None, True, 0), (None, False, 1), (LIVE, True, 2)]):
        begin = m.Begin(0, "p", part, {}, 4, is_part, "recompute", None, None)
        recorder.applied(INFO, before, begin, f"{number}" * 64, "e" * 64)
        assert len(memo._unwritten) + len(memo.folder) >= kept
        until(lambda: not memo._unwritten, "it is written", WAIT)
        assert len(memo.folder) == kept
    memo.close()


def test_a_part_is_recorded_only_after_the_version_before_it(folder: Path) -> None:
    """Between version 1 and 5 another client may have sent some."""
    new, sampling = tiny("llama", seed=1), Sampling(max_tokens=6, seed=1)
    part = {"lm_head.weight": tiny("llama", seed=2).state_dict()["lm_head.weight"]}
    with serving(tiny_engine(model=tiny("llama"))) as service, RolloutClient(service.endpoint, memo=folder) as client:
        client.refresh(new, version=1)
        client.refresh(part, version=5, partial=True)
        client.submit([5, 6], sampling).result(WAIT)
    with RolloutClient(memo=folder) as client:
        client.refresh(new, version=1)
        with pytest.raises(WeightsRefused, match="diverged"):
            client.refresh(part, version=5, partial=True)


WITHOUT_TORCH = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError("not in this environment: " + name, name=name)

sys.meta_path.insert(0, Lacking())
from rollout import RolloutClient, Sampling
with RolloutClient(memo=sys.argv[1]) as client:
    print([sample.token_ids.tolist() for sample in client.submit([1, 2, 4], Sampling(n=3, max_tokens=6, seed=101)).result(60)])
"""


def test_it_needs_no_torch(service: str, folder: Path) -> None:
    with RolloutClient(service, memo=folder) as client:
        right = [sample.token_ids.tolist() for sample in client.submit(*asked(1)).result(WAIT)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=WAIT, check=True
    )
    assert done.stdout == f"{right}\n"


def test_memos_are_closed_where_a_client_does_not_open(folder: Path) -> None:
    for wrong in ({"address": "tcp://example.org:1"}, {"address": "tcp://127.0.0.1:1", "connect_timeout_s": 0.05}):
        with pytest.raises(Exception, match="."):
            RolloutClient(memo=folder, **wrong)  # type: ignore[arg-type]
    Memo(folder, 1.0).close()
