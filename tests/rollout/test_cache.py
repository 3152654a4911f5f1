"""`rollout cache`: groups that were seen are answered from a folder, equal to the bit; all others are computed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.cache.answers import Answer, recorded
from rollout.cache.keys import NotCacheable, group_name
from rollout.cache.proxy import CacheProxy
from rollout.cache.store import FolderStore
from rollout.client.api import RolloutClient
from rollout.client.receipts import result_digest
from rollout.engine.types import Limits, Sample, Sampling, Served
from rollout.transport import messages as m
from rollout.transport.errors import GroupFailed, WeightsRefused
from tests.support.cache import WAIT, cache_of, client_of, tensors_of
from tests.support.faulty_link import Proxy
from tests.support.hash_engine import HashEngine
from tests.support.waiting import until
from tests.support.wire import serving, submit

ROOT = Path(__file__).parents[2]
INFO = m.Welcome(
    m.PROTOCOL, 1, "a", "model", 997, 1000, (2,), 3, Limits(), arithmetic="hash/1", block_size=16, kv_dtype="float32"
)
LIVE = Served(3, "d" * 64)


@pytest.fixture
def engine() -> HashEngine:
    return HashEngine()


@pytest.fixture
def service(engine: HashEngine) -> Iterator[str]:
    with serving(engine) as service:
        yield service.endpoint


def asked(i: int, **more: Any) -> tuple[list[int], Sampling]:
    return [1, 2, 3 + i], Sampling(**{"n": 3, "max_tokens": 6, "seed": 100 + i, **more})


def run_of(client: RolloutClient, steps: int, changed_at: int | None = None) -> list[list[Sample]]:
    """Train: two groups a step, and a refresh after it. changed_at: the step whose refresh has other weights."""
    groups = []
    for step in range(steps):
        groups += [client.submit(*asked(10 * step + i)).result(timeout=WAIT) for i in range(2)]
        client.refresh(tensors_of(step + (50 if step == changed_at else 1)), version=step + 1)
    return groups


def until_it_waits_or_runs(proxy: CacheProxy, engine: HashEngine, waits: bool) -> None:
    """Wait until the group is held, or is computed."""
    until(lambda: proxy._held if waits else engine.made["steps"] > 5, "it waits, or runs", WAIT)


def digests(groups: list[list[Sample]]) -> list[Any]:
    return [(sample.index, sample.seed, sample.weight_versions, result_digest(sample)) for group in groups for sample in group]


# hits


def test_a_second_run_is_answered_from_the_folder(tmp_path: Path) -> None:
    made, ran = [], []
    for _ in range(2):
        engine = HashEngine()
        with serving(engine) as service, client_of(tmp_path, service.endpoint) as (client, proxy):
            ran.append(digests(run_of(client, 4)))
            made.append((engine.made["generated_tokens"], proxy.tally.hits, proxy.tally.misses))
            status = client.status()
            assert status["cache"]["hits"] == proxy.tally.hits and "generated_tokens" in status
    assert ran[0] == ran[1] and len(ran[0]) == 24
    assert made == [(8 * 18, 0, 8), (0, 8, 0)]


def test_the_first_miss_is_where_a_change_began_to_act(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for changed_at in (None, 3):
        with serving(HashEngine()) as service, client_of(tmp_path, service.endpoint) as (client, proxy):
            caplog.clear()
            run_of(client, 6, changed_at)
            first = client.status()["cache"]["first_miss"]
    assert proxy.tally.hits == 8 and proxy.tally.misses == 4 or proxy.tally.hits == 10
    assert first["version"] == 4 and first["after_hits"] == 8 and "were never seen" in first["why"]
    (line,) = [record.getMessage() for record in caplog.records if "first miss" in record.getMessage()]
    assert "version=4" in line and "weights" in line


@pytest.mark.parametrize("side", ["client", "service"])
def test_links_that_break_lose_and_double_nothing(side: str, tmp_path: Path) -> None:
    """A client's link to the cache, or the cache's to the service, is cut while groups run: computed ones, then stored ones."""
    ran = []
    for _ in range(2):
        with serving(HashEngine()) as service, Proxy(service.endpoint) as behind, cache_of(tmp_path, behind.address) as cache:
            with Proxy(cache.endpoint) as before, RolloutClient(before.address) as client:  # type: ignore[attr-defined]
                handles = []
                for i in range(8):
                    handles.append(client.submit(*asked(i, max_tokens=40)))
                    (before if side == "client" else behind).cut()
                ran.append(digests([handle.result(timeout=WAIT) for handle in handles]))
                client.refresh(tensors_of(1), version=1)
                ran[-1] += digests([client.submit(*asked(9)).result(timeout=WAIT)])
                cuts = before.cuts + behind.cuts
        assert cuts > 0
    with serving(HashEngine()) as service, RolloutClient(service.endpoint) as client:
        wanted = digests([client.submit(*asked(i, max_tokens=40)).result(timeout=WAIT) for i in range(8)])
    assert ran[0] == ran[1] and ran[0][:24] == wanted
    assert cache.tally.hits > 0, "the second run has some from the folder"


@pytest.mark.parametrize("change", [{"seed": 7}, {"temperature": 0.5}, {"n": 2}, {"max_tokens": 5}, {"min_p": 0.1}])
def test_other_arguments_are_a_miss(change: dict[str, Any], service: str, tmp_path: Path) -> None:
    with client_of(tmp_path, service) as (client, proxy):
        client.submit(*asked(1)).result(timeout=WAIT)
        client.submit(*asked(1, **change)).result(timeout=WAIT)
        assert (proxy.tally.hits, proxy.tally.misses) == (0, 2)
        client.submit(*asked(1, priority=3)).result(timeout=WAIT)  # decides no token
        assert (proxy.tally.hits, proxy.tally.misses) == (1, 2)


def test_a_sample_that_lived_through_a_refresh_waits_for_it(tmp_path: Path) -> None:
    ran = []
    for second in (False, True):
        engine = HashEngine(step_s=0.002)
        with serving(engine) as service, client_of(tmp_path, service.endpoint) as (client, proxy):
            handle = client.submit(*asked(1, max_tokens=300))
            until_it_waits_or_runs(proxy, engine, waits=second)
            assert not handle.done
            client.refresh(tensors_of(1), version=1, kv="keep")
            ran.append(digests([handle.result(timeout=WAIT)]))
            assert proxy.tally.hits == second and engine.made["generated_tokens"] == 900 * (not second)
    assert ran[0] == ran[1] and len(ran[0][0][2]) == 2, "both have the spans of two versions"


def test_a_refresh_with_other_weights_is_no_hit(tmp_path: Path) -> None:
    for version in (1, 2):
        engine = HashEngine(step_s=0.002)
        with serving(engine) as service, client_of(tmp_path, service.endpoint) as (client, proxy):
            handle = client.submit(*asked(1, max_tokens=300))
            until_it_waits_or_runs(proxy, engine, waits=version == 2)
            client.refresh(tensors_of(version), version=1, kv="keep")
            handle.result(timeout=WAIT)
            assert proxy.tally.hits == 0 and engine.made["generated_tokens"] == 900


def test_aborting_a_held_group(tmp_path: Path) -> None:
    for second in (False, True):
        engine = HashEngine(step_s=0.002)
        with serving(engine) as service, client_of(tmp_path, service.endpoint) as (client, proxy):
            handle = client.submit(*asked(1, max_tokens=300))
            until_it_waits_or_runs(proxy, engine, waits=second)
            if second:
                handle.cancel()
                assert {sample.finish_reason for sample in handle.result(timeout=WAIT)} == {"aborted"}
            else:
                client.refresh(tensors_of(1), version=1, kv="keep")
                handle.result(timeout=WAIT)


def test_many_hits_do_not_stop_the_flow_of_bytes(service: str, tmp_path: Path) -> None:
    """A client sends at most 8 MiB ahead of what the service reports; hits never reach the service."""
    prompt = np.arange(60_000, dtype=np.int32) % 900
    sampling = Sampling(max_tokens=2, seed=1)
    with client_of(tmp_path, service) as (client, proxy):
        first = client.submit(prompt, sampling).result(timeout=WAIT)
        handles = [client.submit(prompt, sampling) for _ in range(60)]
        assert {result_digest(handle.result(timeout=WAIT)[0]) for handle in handles} == {result_digest(first[0])}
        assert proxy.tally.hits == 60


# what is not stored


def test_what_has_unknown_arguments_is_not_named() -> None:
    known = {3: LIVE.digest}.get

    def name(live: Served = LIVE, info: m.Welcome = INFO, **sampling: Any) -> str:
        return group_name(submit(**{"seed": 1, **sampling}), info, live, lambda version: known(version, ""))

    assert name() == name() and len({name(), name(seed=2), name(live=Served(3, "e" * 64))}) == 3
    assert name(seed=None, temperature=0.0) == name(seed=None, temperature=0.0)
    replaced = msgspec.structs.replace
    for field, other in (("arithmetic", "hash/2"), ("block_size", 32), ("kv_dtype", "float8_e4m3fn"), ("eos_token_ids", (4,))):
        assert name(info=replaced(INFO, **{field: other})) != name()
    for wrong in ({"seed": None}, {"live": Served(3)}, {"info": replaced(INFO, arithmetic="x/batch")}):
        with pytest.raises(NotCacheable):
            name(**wrong)


def test_aborted_children_are_not_stored() -> None:
    sample = Sample(
        group_id="g", index=0, finish_reason="stop", prompt_tokens=3, seed=1, token_ids=np.array([5], np.int32),
        logprobs=np.array([-1], np.float32), weight_versions=[(0, 3)],
    )  # fmt: skip
    known = {3: LIVE.digest}
    data = recorded([sample], 3, lambda version: known.get(version, ""))
    assert data is not None and Answer.read(data).awaits(9, lambda version: LIVE.digest if version == 9 else "") == 9
    assert Answer.read(data).awaits(9, lambda version: "e" * 64) is None
    assert recorded([msgspec.structs.replace(sample, finish_reason="aborted")], 3, lambda version: LIVE.digest) is None
    assert recorded([sample], 3, lambda version: "") is None


# the folder


def test_a_damaged_entry_is_computed_again(service: str, engine: HashEngine, tmp_path: Path) -> None:
    with client_of(tmp_path, service) as (client, proxy):
        right = digests([client.submit(*asked(1)).result(timeout=WAIT)])
        (path,) = [path for path in tmp_path.glob("??/*") if "welcome" not in path.name]
        content = bytearray(path.read_bytes())
        content[-5] ^= 1  # a bit of a log-prob: nobody would see it
        path.write_bytes(content)
        assert digests([client.submit(*asked(1)).result(timeout=WAIT)]) == right
        assert engine.made["generated_tokens"] == 36 and proxy.status(proxy.tally)["damaged"] == 1
        assert digests([client.submit(*asked(1)).result(timeout=WAIT)]) == right and proxy.tally.hits == 1


def test_an_entry_under_another_name_is_damaged(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 1 << 20)
    store.put("a-b-cc", b"one")
    store.put("a-b-dd", b"two")
    (tmp_path / "cc/a-b-cc").write_bytes((tmp_path / "dd/a-b-dd").read_bytes())
    assert store.get("a-b-cc") is None and store.get("a-b-dd") == b"two" and store.damaged == 1
    store.close()


def test_the_folder_is_bounded_and_what_was_used_stays(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 3000)
    for i in range(8):
        store.put(f"w-p-0{i}", bytes(600))
        store.get("w-p-00")
    assert store.bytes <= 3000 and store.evicted == 4 and sorted(store._sizes) == ["w-p-00", "w-p-05", "w-p-06", "w-p-07"]
    assert sum(path.stat().st_size for path in tmp_path.glob("??/*")) == store.bytes
    assert store.has_prefix("w-p") and not store.has_prefix("w-q") and not store.put("w-p-99", bytes(4000))
    with pytest.raises(ValueError, match="another"):
        FolderStore(tmp_path, 3000)
    store.close()
    again = FolderStore(tmp_path, 1500)  # a smaller bound
    assert again.bytes <= 1500 and again.get("w-p-00") == bytes(600)
    again.close()


WRITER = """
import sys
from pathlib import Path
from rollout.cache.proxy import CacheProxy
from rollout.cache.store import FolderStore

store = FolderStore(Path(sys.argv[1]), 1 << 20)
print("writing", flush=True)
for i in range(10**9):
    store.put(f"w-p-{i % 500:04}", bytes([i % 251]) * (i % 9000))
"""


def test_a_kill_leaves_whole_entries(tmp_path: Path) -> None:
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        until(lambda: len(list(tmp_path.glob("??/*"))) > 50, "it writes", WAIT)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate(timeout=WAIT)
        store = FolderStore(tmp_path, 1 << 20)
        whole = [store.get(name) for name in list(store._sizes)]
        assert len(whole) > 40 and None not in whole and not store.damaged and not list(tmp_path.glob("??/*.new"))
        store.close()


# offline


def test_offline_serves_hits_alone(tmp_path: Path) -> None:
    with serving(HashEngine()) as service, client_of(tmp_path, service.endpoint) as (client, _):
        right = digests(run_of(client, 3))
    for _ in range(2):
        with client_of(tmp_path, None) as (client, proxy):
            assert digests(run_of(client, 3)) == right and proxy.tally.hits == 6
            with pytest.raises(GroupFailed, match="offline, and not in the cache: .*never seen"):
                client.submit(*asked(99)).result(timeout=WAIT)
            with pytest.raises(WeightsRefused, match="diverged from the recorded one"):
                client.refresh(tensors_of(77), version=4)
            with RolloutClient(client.info and proxy.endpoint) as other:  # type: ignore[attr-defined]
                assert other.status()["cache"]["misses"] == 0 and other.info.version == 3


WITHOUT_TORCH = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError("not in this environment: " + name, name=name)

sys.meta_path.insert(0, Lacking())
from rollout.commands.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_needs_no_torch(service: str, tmp_path: Path) -> None:
    """A process in which torch cannot be imported serves a trainer, is killed, and serves it offline."""
    right: list[Any] = []
    for more in ([service], ["--offline"]):
        with process_of(more, tmp_path, len(right)) as address, RolloutClient(address) as client:
            right.append(digests([client.submit(*asked(1)).result(timeout=WAIT)]))
            assert client.status()["cache"]["hits"] == len(right) - 1
    assert right[0] == right[1]


@contextmanager
def process_of(more: list[str], folder: Path, number: int) -> Iterator[str]:
    """Run the command until it listens, and kill it in the end."""
    ready = folder / f"ready{number}"
    words = [*more, "--dir", str(folder / "dir"), "--endpoint", "tcp://127.0.0.1:*", "--ready-file", str(ready)]
    cache = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, "cache", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: ready.exists() or cache.poll() is not None, "it listens", WAIT)
        assert cache.poll() is None, cache.stderr and cache.stderr.read()
        yield ready.read_text()
    finally:
        cache.kill()
        cache.communicate(timeout=WAIT)
