"""`rollout serve --ledger`: each sample and each refresh is in the file, whatever happens to the file and to who writes it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout import identity, ledger
from rollout.client.api import RolloutClient
from rollout.config import InputError
from rollout.engine.values import Group, Refreshed, Sample, Sampling, TensorInfo
from rollout.ledger import records
from rollout.ledger.frames import HEADER, DamagedLedger, frames
from rollout.ledger.writer import LedgerWriter
from rollout.service.journal import Journal
from rollout.service.recording import AcceptedAs, AppliedRefresh
from tests.support.fleet import fleet_of, router_of
from tests.support.hash_engine import HashEngine, tensors_of
from tests.support.ledgers import ROOM, WAIT, asked, recorded, trained
from tests.support.waiting import until
from tests.support.wire import serving

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def files_of_this_user() -> Iterator[None]:
    """Files that a test writes are private, as a service's."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


def one_sample(i: int, tokens: int = 300, group_id: str | None = None) -> Sample:
    return Sample(
        group_id=group_id or f"g{i}", index=0, token_ids=np.arange(i, i + tokens, dtype=np.int32), finish_reason="length",
        logprobs=np.full(tokens, -i, np.float32), weight_versions=[(0, 0)], prompt_tokens=3, seed=i,
    )  # fmt: skip


def wrote(writer: LedgerWriter, i: int, **sampling: Any) -> None:
    """Record a group of one sample."""
    group = Group(f"g{i}", np.array([1, 2, i], np.int32), Sampling(seed=i, **sampling))
    writer.accepted(AcceptedAs(f"named {i}", 1), group, 0)
    writer.ended(one_sample(i))
    writer.commit()


def opened(path: Path, most_bytes: int = ROOM, **options: Any) -> LedgerWriter:
    writer = LedgerWriter(str(path), most_bytes, **options)
    writer.started(HashEngine())  # type: ignore[arg-type]
    return writer


def small(path: Path, groups: int = 3) -> bytes:
    """Write a ledger of a few groups and return its bytes."""
    writer = opened(path)
    for i in range(groups):
        wrote(writer, i)
    writer.close()
    return path.read_bytes()


# contents


def test_each_sample_has_its_receipt(path: Path) -> None:
    with recorded(path) as client:
        groups = trained(client, 3)
        receipts = [
            [client.receipt(sample, *asked(10 * (i // 2) + i % 2)) for sample in group] for i, group in enumerate(groups)
        ]
        live = client.weights_status()["digest"]
        status = client.status()["ledger"]
    run = ledger.read(path)
    assert [[run.receipt(group, group.samples[i]) for i in range(3)] for group in run.groups] == receipts
    assert run.steps() == [0, 1, 2] and [group.group_id for group in run.step(1)] == ["#2", "#3"]
    assert [refresh.version for refresh in run.refreshes] == [1, 2, 3] and run.refreshes[-1].digest == live
    assert run.weights(0)[3] == live and run.services[0].closed and not run.torn_bytes and not run.lost
    assert status["error"] == "" and status["groups"] == 6 and 0 < status["bytes"] < run.bytes == path.stat().st_size


def test_a_sample_that_lived_through_a_refresh(path: Path) -> None:
    engine = HashEngine(step_s=0.002)
    with recorded(path, engine) as client:
        handle = client.submit(*asked(1, max_tokens=300))
        until(lambda: engine.made["generated_tokens"], "it runs", WAIT)
        client.refresh(tensors_of(1), version=1, kv="recompute")
        samples = handle.result(timeout=WAIT)
    ((group,), (refresh,)) = ledger.read(path).groups, ledger.read(path).refreshes
    assert refresh.kv == "recompute" and group.version == 0
    for sample in samples:
        assert list(group.samples[sample.index].weight_versions) == sample.weight_versions and len(sample.weight_versions) == 2


def test_only_tensors_that_changed_are_written_again(path: Path) -> None:
    with recorded(path) as client:
        client.refresh(tensors_of(1), version=1)
        changed = tensors_of(1) | {"w2": tensors_of(7)["w2"]}
        client.refresh(changed, version=2)
        client.refresh({"w1": tensors_of(7)["w1"]}, version=3, partial=True)
    first, second, third = ledger.read(path).refreshes
    assert sorted(first.changed) == ["w0", "w1", "w2", "w3"]
    assert sorted(second.changed) == ["w2"] and sorted(third.changed) == ["w1"] and third.partial


def test_a_seed_that_the_service_chose_is_in_it(path: Path) -> None:
    writer = opened(path)
    writer.accepted(AcceptedAs("a", 1), Group("g7", np.array([1], np.int32), Sampling()), 0)
    writer.ended(one_sample(7))
    writer.close()
    ((group, sample),) = ledger.read(path).samples()
    assert group.sampling.seed is None and sample.seed == 7
    assert ledger.read(path).receipt(group, sample).sampling.seed == 7


def test_scored_tokens_are_not_drawn_and_not_recorded(path: Path) -> None:
    writer = opened(path)
    group = Group("g1", np.array([1], np.int32), Sampling(seed=1), score=True)
    writer.accepted(AcceptedAs("a", 1), group, 0)
    writer.ended(one_sample(1))
    writer.close()
    assert not ledger.read(path).groups


def test_the_bytes_of_a_sample(path: Path) -> None:
    """Groups of 8 with 1,000 tokens that live through a refresh, and weights of 300 tensors for each 64 samples."""
    writer = opened(path)
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(300)]
    for step in range(30):
        for i in range(8):
            group = Group(f"s{step}g{i}", np.arange(40, dtype=np.int32), Sampling(n=8, seed=2**62 + i))
            writer.accepted(AcceptedAs(f"step {step}/{i}", 1), group, step)
            for index in range(8):
                sample = one_sample(i, 1000, group.id)
                spans = [(0, step), (500, step + 1)], [(500, 0, step), (500, 540, step + 1)]
                writer.ended(msgspec.structs.replace(sample, index=index, weight_versions=spans[0], kv_versions=spans[1]))
        manifest = [TensorInfo(name, "bfloat16", (9, 9), f"{step:032x}") for name in names]
        result = Refreshed(
            version=step + 1, via="shm", bytes=1, seconds=0, staged_seconds=0, paused_seconds=0, digest=f"{step:064x}"
        )
        writer.refreshed(AppliedRefresh(result, "keep", False, False, manifest), HashEngine())  # type: ignore[arg-type]
        writer.commit()
    writer.close()
    each = path.stat().st_size / (30 * 64)
    print(f"{each:.1f} bytes a sample")
    assert each <= 150
    assert [len(refresh.changed) for refresh in ledger.read(path).refreshes] == [300] * 30


def test_prompts_and_tokens_are_secret_unless_asked_for(tmp_path: Path) -> None:
    prompt, said = np.array([1, 2, 77_777_777], "<i4"), one_sample(77_777_777)
    for asked_for in (False, True):
        path = tmp_path / str(asked_for)
        writer = opened(path, prompts=asked_for, tokens=asked_for)
        for name in ("g77777777", "other"):
            writer.accepted(AcceptedAs(name, 1), Group(name, prompt, Sampling(seed=1)), 0)
        writer.ended(said)
        writer.close()
        data, run = path.read_bytes(), ledger.read(path)
        assert (prompt[2:].tobytes() in data) is asked_for
        assert (said.logprobs[:2].tobytes() in data) is asked_for
        assert data.count(prompt.tobytes()) == asked_for, "each prompt once"
        ((group, sample),) = run.samples()
        if asked_for:
            assert run.prompts[group.prompt].tolist() == prompt.tolist()
            assert np.array_equal(sample.token_ids, said.token_ids) and np.array_equal(sample.logprobs, said.logprobs)


def test_rows_and_columns_are_plain(path: Path) -> None:
    with recorded(path, tokens=True) as client:
        trained(client, 1)
    run = ledger.read(path)
    for table, count in (("services", 1), ("refreshes", 1), ("groups", 2), ("samples", 6)):
        rows = run.rows(table)  # type: ignore[arg-type]
        assert len(rows) == count and msgspec.json.decode(msgspec.json.encode(rows)) == rows
        columns = run.columns(table)  # type: ignore[arg-type]
        assert set(columns) == set(rows[0]) and all(len(column) == count for column in columns.values())
    assert run.rows("samples")[0]["token_ids"] and run.columns("samples")["step"] == [0] * 6


def test_a_router_writes_one_for_all_replicas(path: Path) -> None:
    """Digests of tensors are of what the trainer sent."""
    with fleet_of(2) as (fleet, _), router_of(fleet, ledger=LedgerWriter(str(path), ROOM)) as router:
        with RolloutClient(router.endpoint) as client:
            groups = trained(client, 2)
            receipts = [client.receipt(sample, *asked(10 * (i // 2) + i % 2)) for i, g in enumerate(groups) for sample in g]
    run = ledger.read(path)
    assert [run.receipt(group, group.samples[i]) for group in run.groups for i in range(3)] == receipts
    assert [refresh.version for refresh in run.refreshes] == [1, 2] and all(refresh.sent for refresh in run.refreshes)
    assert sorted(run.refreshes[0].changed) == ["w0", "w1", "w2", "w3"]


# files


def test_cut_at_every_byte(path: Path) -> None:
    """What is left is read, a torn frame is said, and the next writer goes on behind what is whole."""
    data = small(path, 2)
    ends = [len(HEADER), *(frame.end for frame in frames(memoryview(data)))]
    for size in range(len(data)):
        path.write_bytes(data[:size])
        run, whole = ledger.read(path), max((end for end in ends if end <= size), default=0)
        assert run.torn_bytes == size - whole and run.bytes == size, size
        assert not run.services or not run.services[-1].closed
    for size in [*range(0, 40), *range(40, len(data), 37)]:
        path.write_bytes(data[:size])
        before = len(ledger.read(path).groups)
        writer = opened(path)
        wrote(writer, 9)
        writer.close()
        run = ledger.read(path)
        assert len(run.groups) == before + 1 and not run.torn_bytes and run.services[-1].closed


def test_every_flipped_byte_is_seen(path: Path) -> None:
    data = small(path, 2)
    *_, last = [len(HEADER), *(frame.end for frame in frames(memoryview(data)))][:-1]
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        try:
            run = ledger.read(path)
        except DamagedLedger:
            with pytest.raises(InputError, match="damaged|no ledger|version") if at % 40 == 0 else _nothing():
                if at % 40 == 0:
                    LedgerWriter(str(path), ROOM)
        else:
            assert run.torn_bytes and at >= last, f"byte {at} was changed and nobody noticed"


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_frames_that_are_exchanged_or_left_out_are_seen(path: Path) -> None:
    data = small(path)
    ends = [len(HEADER), *(frame.end for frame in frames(memoryview(data)))]
    parts = [data[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    for i in range(1, len(parts) - 1):
        for other in (parts[:i] + parts[i + 1 :], parts[: i - 1] + [parts[i], parts[i - 1]] + parts[i + 1 :]):
            path.write_bytes(HEADER + b"".join(other))
            with pytest.raises(DamagedLedger, match="damaged at byte"):
                ledger.read(path)


@pytest.mark.parametrize("content", [b"x", b"rollout ledger 1\n....", b"PK\x03\x04" * 9, b"\0" * 100])
def test_other_files_are_refused_and_left_alone(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(DamagedLedger, match="no ledger|version 1: this rollout reads 2"):
        ledger.read(path)
    with pytest.raises(InputError, match="move it away to begin a new one"):
        LedgerWriter(str(path), ROOM)
    assert path.read_bytes() == content


def test_one_service_writes_a_ledger(path: Path) -> None:
    writer = opened(path)
    with pytest.raises(InputError, match="another service writes"):
        LedgerWriter(str(path), ROOM)
    writer.close()
    opened(path).close()
    assert len(ledger.read(path).services) == 2
    with pytest.raises(InputError, match="Not a directory"):
        LedgerWriter(str(path / "no" / "folder"), ROOM)
    with pytest.raises(InputError, match="No such file"):
        ledger.read(path.with_name("none"))


def test_a_full_file_is_followed_by_another_one(path: Path) -> None:
    writer = opened(path, 2000)
    engine = HashEngine()
    long = Group("long", np.array([5], np.int32), Sampling(seed=5))
    writer.accepted(AcceptedAs("long", 1), long, engine.version)
    for i in range(40):
        wrote(writer, i, temperature=0.5)
    writer.ended(one_sample(5, group_id="long"))
    writer.close()
    old, new = ledger.read(f"{path}.1"), ledger.read(path)
    assert not old.services[0].closed and new.services[0].closed, "the first one goes on elsewhere"
    assert 2000 <= old.bytes < 3000 and new.bytes < 2000 + 1000
    assert new.groups[0].group_id == "long" and new.groups[0].samples[0].seed == 5, "open groups are in the new file as well"
    numbers = [group.number for group in (*old.groups, *new.groups) if group.group_id != "long"]
    assert numbers[-1] == 41 and numbers == sorted(numbers)
    assert all(group.sampling.temperature == 0.5 for group in new.groups[1:])


@pytest.mark.parametrize("tail", [b"\0" * 8, b"\0" * 12, b"\0" * 5000, b"\0" * 200_000])
@pytest.mark.parametrize("begun", [0, 1, 5, 13])
def test_zeros_at_the_end_are_an_incomplete_end(tail: bytes, begun: int, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a crash of the machine, a file system may have the size of a file and not its last bytes."""
    data = small(path)
    ends = [len(HEADER), *(frame.end for frame in frames(memoryview(data)))]
    whole, last = data[: ends[-2]], data[ends[-2] :]
    path.write_bytes(whole + last[:begun] + tail)
    run = ledger.read(path)
    assert run.torn_bytes == begun + len(tail) and len(run.services) == 1
    opened(path).close()
    assert f"ledger cut path={path} bytes={begun + len(tail)}" in caplog.text
    again = ledger.read(path)
    assert not again.torn_bytes and len(again.services) == 2


def test_zeros_before_a_frame_are_damage(path: Path) -> None:
    """Control: what follows them would be lost."""
    data = small(path)
    ends = [len(HEADER), *(frame.end for frame in frames(memoryview(data)))]
    for zeros in (4, 12, 100):
        path.write_bytes(data[: ends[-3]] + b"\0" * zeros + data[ends[-3] :])
        with pytest.raises(DamagedLedger, match="damaged at byte"):
            ledger.read(path)
    path.write_bytes(data[: ends[-2] + 6] + bytes([data[ends[-2] + 6] ^ 1]) + data[ends[-2] + 7 :])
    with pytest.raises(DamagedLedger, match="damaged at byte"):
        ledger.read(path)


# whose files


@pytest.mark.parametrize("kind", ["ledger", "journal"])
def test_files_that_are_not_this_users_alone_are_refused(kind: str, tmp_path: Path) -> None:
    def start(path: Path) -> None:
        (LedgerWriter(str(path), ROOM) if kind == "ledger" else Journal(str(path), "hash")).close()

    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for mode in (0o644, 0o666, 0o620, 0o604):
        open_to_all = tmp_path / f"mode {mode:o}"
        open_to_all.touch()
        open_to_all.chmod(mode)
        with pytest.raises(InputError, match=f"others can read it .mode {mode:o}.; chmod 600"):
            start(open_to_all)
        assert open_to_all.stat().st_size == 0 and open_to_all.stat().st_mode & 0o777 == mode
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "to nothing").symlink_to(tmp_path / "nothing")
    for name in ("link", "to nothing"):
        with pytest.raises(InputError, match="is a link"):
            start(tmp_path / name)
    own = tmp_path / "own"
    own.touch(0o600)
    os.link(own, tmp_path / "second name")
    with pytest.raises(InputError, match="has 2 names .hard links"):
        start(own)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(InputError, match="no regular file"):
        start(tmp_path / "pipe")
    for ending in (".lock", "-wal", "-shm", "-journal") if kind == "journal" else (".new", ".1"):
        path = tmp_path / f"beside{ending.strip('.-')}"
        Path(f"{path}{ending}").symlink_to(victim)
        with pytest.raises(InputError, match="is a link"):
            start(path)
    assert victim.read_bytes() == b"precious" and not (tmp_path / "nothing").exists()
    start(tmp_path / "new")
    assert {each.stat().st_mode & 0o077 for each in tmp_path.glob("new*")} == {0}
    start(tmp_path / "new")


def test_files_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for start in (lambda path: LedgerWriter(path, ROOM), lambda path: Journal(path, "hash")):
        with pytest.raises(InputError, match="belongs to user"):
            start(str(tmp_path / "file"))


def test_a_full_ledger_replaces_only_ledgers(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for ending in (".1", ".new"):
        other = Path(f"{path}{ending}")
        other.write_bytes(b"precious" * 99)
        with pytest.raises(InputError, match="is no ledger, and its name is needed"):
            opened(path, 500)
        assert other.read_bytes() == b"precious" * 99
        assert not path.exists(), "nothing is made when it refuses"
        other.unlink()
    Path(f"{path}.new").touch(0o600)  # a service was killed between two calls
    writer = opened(path, 500)
    victim = path.with_name("victim")
    victim.write_bytes(b"precious" * 99)
    Path(f"{path}.new").symlink_to(victim)  # later
    for i in range(10):
        wrote(writer, i)
    assert victim.read_bytes() == b"precious" * 99 and "ledger not written" in caplog.text
    writer.close()


@pytest.mark.parametrize("ending", [".new", ".1"])
@pytest.mark.parametrize("running", [True, False])
def test_a_ledger_of_another_service_with_such_a_name_is_left_alone(ending: str, running: bool, path: Path) -> None:
    """FILE.1 of a service that has ended is what is replaced; FILE.new is a ledger that only its own service begins."""
    other = Path(f"{path}{ending}")
    theirs = opened(other)
    wrote(theirs, 1)
    if not running:
        theirs.close()
    data = other.read_bytes()
    if running or ending == ".new":
        with pytest.raises(InputError, match="another service writes" if running else "is a ledger of its own"):
            opened(path)
        assert other.read_bytes() == data and not path.exists()
    else:
        opened(path).close()
        assert other.read_bytes() == data, "not replaced before the new one is full"
    theirs.close()


@pytest.mark.parametrize("ending", [".new", ".1"])
def test_a_service_that_starts_later_with_such_a_name_keeps_its_ledger(
    ending: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, other = opened(path, 3000), Path(f"{path}{ending}")
    theirs = opened(other)
    held = other.stat().st_ino
    for i in range(30):
        wrote(writer, i)
    assert other.stat().st_ino == held and "ledger not written" in caplog.text
    theirs.close()
    writer.close()
    assert ledger.read(other).services[0].closed


# who writes


KILLED = """
import sys
import numpy as np
from rollout.engine.values import Group, Refreshed, Sample, Sampling, TensorInfo
from rollout.ledger.writer import LedgerWriter
from rollout.service.recording import AcceptedAs, AppliedRefresh
from tests.support.hash_engine import HashEngine

writer = LedgerWriter(sys.argv[1], 1 << 30)
writer.started(HashEngine())
ids, logprobs = np.zeros(9, np.int32), np.zeros(9, np.float32)
for i in range(1_000_000):
    writer.accepted(AcceptedAs(str(i), 1), Group(f"g{i}", ids, Sampling(seed=i)), 0)
    writer.ended(Sample(group_id=f"g{i}", index=0, token_ids=ids, logprobs=logprobs, finish_reason="length",
                        weight_versions=[(0, 0)], prompt_tokens=9, seed=i))
    writer.commit()
    print(i, flush=True)
"""


def test_what_was_written_survives_sigkill(path: Path) -> None:
    for round in range(2):
        command = [sys.executable, "-c", KILLED, str(path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            last = -1
            while last < 50:
                last = int(child.stdout.readline())
            os.kill(child.pid, signal.SIGKILL)
            last = max([last, *map(int, child.stdout.read().split()[:-1])])
        mine = [group for group in ledger.read(path).groups if group.service == round]
        assert [group.sampling.seed for group in mine if group.samples][: last + 1] == list(range(last + 1))
        assert not ledger.read(path).services[round].closed


def test_a_full_disk_stops_no_service(path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A write that is done in part is undone. What is lost is counted, in the status and in the file."""
    write, full = os.write, []

    def fails(file: int, data: Any) -> int:
        if full and os.fstat(file).st_ino == path.stat().st_ino:
            if full.pop() == "part":
                full.append("all")
                return write(file, data[: len(data) // 2])
            full.append("all")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("rollout.ledger.writer.os.write", fails)
    monkeypatch.setattr("rollout.ledger.writer.RETRY_S", 0.0)
    with recorded(path) as client:
        first = trained(client, 1)
        full.append("part")
        trained(client, 2, first=1)
        assert client.status()["ledger"]["error"] == "No space left on device"
        full.clear()
        last = trained(client, 1, first=3)
        assert client.status()["ledger"] | {"bytes": 0, "path": ""} == {
            "path": "", "bytes": 0, "groups": 8, "lost_samples": 12, "error": ""
        }  # fmt: skip
    (line,) = [record.getMessage() for record in caplog.records if "ledger not written" in record.getMessage()]
    assert "the service continues without it" in line
    run = ledger.read(path)
    (lost,) = run.lost
    assert (lost.samples, lost.refreshes, lost.why) == (12, 2, "No space left on device")
    assert [group.group_id for group in run.groups] == ["#0", "#1", "#6", "#7"] and len(run.services) == 1
    assert run.weights(0).keys() >= {1, 3, 4} and len(first) == len(last) == 2
    for group, (_, sampling) in zip(run.groups[2:], (asked(30), asked(31)), strict=True):
        assert group.sampling.seed == sampling.seed and len(group.samples) == 3


def test_a_service_does_not_start_with_a_ledger_that_it_cannot_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(file: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rollout.ledger.writer.os.write", fails)
    with pytest.raises(InputError, match="No space left on device"):
        opened(path)


def test_a_service_that_never_started_leaves_no_record(path: Path) -> None:
    data = small(path)
    LedgerWriter(str(path), ROOM).close()
    assert path.read_bytes() == data
    other = path.with_name("other")
    LedgerWriter(str(other), ROOM).close()
    assert not ledger.read(other).services


def test_without_a_ledger_nothing_is_written() -> None:
    with serving(HashEngine()) as service, RolloutClient(service.endpoint) as client:
        client.submit(*asked(1)).result(timeout=WAIT)
        assert client.status()["ledger"] is None


def test_records_are_as_short_as_can_be() -> None:
    """Defaults at the end are left out, and read again."""
    whole = records.SampleEnded(1, 2, 1, 4, b"r" * 20, b"t" * 8, b"m" * 6, (0, 1, 3, 2), (), 5)
    for record in (
        whole,
        msgspec.structs.replace(whole, seed=None, weight_versions=()),
        records.Stopped(),
        records.Stopped(True),
    ):
        assert records.decode(records.encode(record)) == record
    assert len(records.encode(records.Stopped())) == 2
    default = records.fields_of(Sampling())
    assert default == {} and identity.sampling_of({}, records.ROLES, seed=3) == Sampling(seed=3)
    assert {*identity.OPTIONS} == {*Sampling.__struct_fields__}, "each field says what it decides"
