"""`rollout ledger show`, `rollout replay` and `rollout bisect` as a user runs them, on services in threads of the test."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout import ledger
from rollout.client.api import RolloutClient
from rollout.commands import remaking
from rollout.commands.main import main
from rollout.config import Config, InputError, dump
from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.values import Sample, Sampling
from rollout.engine.values.arithmetic import INT8, LATENT
from rollout.ledger.writer import LedgerWriter
from tests.support.waiting import until
from tests.support.wire import serving

WAIT = 60.0
ROLLOUT = [sys.executable, "-m", "rollout"]
SAMPLING = Sampling(n=3, max_tokens=16, seed=5, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


class Recorded(NamedTuple):
    """A run of two groups before a refresh and one behind it, the second of which lived through it."""

    file: Path
    weights: Path
    samples: dict[tuple[str, int], Sample]


@contextmanager
def service_of(config: Config, **options: Any) -> Iterator[SimpleNamespace]:
    """Run what `rollout serve` would run, in a thread."""
    with serving(Engine(config.engine), **options) as service:
        yield SimpleNamespace(endpoint=service.endpoint)


@pytest.fixture(autouse=True)
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remaking, "service_process", service_of)


def config_of(model: Path) -> Config:
    engine = EngineConfig(model=str(model), dtype="float32", kv_tokens=4096, block_size=16, cpu_offload_gib=0, threads=1)
    return Config(engine=engine)


@pytest.fixture(scope="module")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the weights of versions 0 and 1."""
    folder = tmp_path_factory.mktemp("weights")
    for version in range(2):
        shutil.copytree(tiny_model, folder / f"step-{version}")
        (path,) = (folder / f"step-{version}").glob("*.safetensors")
        torch.manual_seed(version)
        changed = {name: w + version * 0.05 * torch.randn(w.shape).to(w.dtype) for name, w in load_file(path).items()}
        save_file(changed, path, {"format": "pt"})
    return folder


class Forging(LedgerWriter):
    """A service that writes what it has not computed."""

    forged = ("late", 1)

    def ended(self, sample: Sample) -> None:
        group = self._open.get(sample.group_id)
        if group is not None and (group.record.group_id, sample.index) == self.forged:
            logprobs = sample.logprobs.copy()
            logprobs.view(np.int32)[9] ^= 1
            sample = msgspec.structs.replace(sample, logprobs=logprobs)
        super().ended(sample)


def recorded(file: Path, weights: Path, kind: type[LedgerWriter] = LedgerWriter, prompts: bool = True, **late: Any) -> Recorded:
    writer = kind(str(file), 1 << 30, prompts=prompts)
    samples = []
    with service_of(config_of(weights / "step-0"), ledger=writer) as service, RolloutClient(service.endpoint) as client:
        samples += client.submit(PROMPTS[0], SAMPLING, "early").result(timeout=WAIT)
        client.refresh(str(weights / "step-1"), version=1)
        samples += client.submit(PROMPTS[1], msgspec.structs.replace(SAMPLING, **late), "late").result(timeout=WAIT)
    return Recorded(file, weights, {(sample.group_id, sample.index): sample for sample in samples})


@pytest.fixture(scope="module")
def run(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded(tmp_path_factory.mktemp("run") / "run.ledger", weights)


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def replay(run: Recorded, out: Path, *words: str) -> int:
    return main(["replay", str(run.file), "--weights", str(run.weights), "--out", str(out), *words])


# replay


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_is_made_again(step: int, run: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(run, tmp_path / "out.jsonl", "--step", str(step)) == 0
    rows = written(tmp_path / "out.jsonl")
    assert [row["equal"] for row in rows] == [
        True
    ] * 3 and "3 equal to the bit, 0 different, 0 not made" in capsys.readouterr().err
    for row in rows:
        sample = run.samples[row["group_id"], row["index"]]
        assert row["token_ids"] == sample.token_ids.tolist() and row["logprobs"] == sample.logprobs.tolist()
        assert row["weight_versions"] == [[0, step]] and row["seed"] == 5


def test_prompts_of_a_file(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = recorded(tmp_path / "run.ledger", weights, prompts=False)
    assert replay(secret, tmp_path / "none.jsonl") == 1
    assert {row["equal"] for row in written(tmp_path / "none.jsonl")} == {None}
    assert "its prompt was not given" in capsys.readouterr().err
    lines = "".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in PROMPTS)
    (tmp_path / "prompts.jsonl").write_text(lines)
    assert replay(secret, tmp_path / "out.jsonl", "--prompts", str(tmp_path / "prompts.jsonl")) == 0
    assert len(written(tmp_path / "out.jsonl")) == 6


def test_other_weights_are_no_lie_of_the_run(run: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run.weights / "step-0", tmp_path / "w" / "step-1")
    shutil.copytree(run.weights / "step-0", tmp_path / "w" / "step-0")
    assert replay(run._replace(weights=tmp_path / "w"), tmp_path / "out.jsonl", "--step", "1") == 1
    assert "0 different, 3 not made" in (said := capsys.readouterr().err) and "given as version 1 have digest" in said


def test_another_past(run: Recorded, tmp_path: Path) -> None:
    """From token 5 on: another seed; another answer of a tool."""
    words = ["--step", "1", "--index", "1", "--at", "5"]
    assert replay(run, tmp_path / "out.jsonl", *words, "--seed", "99", "--max-tokens", "20") == 0
    (row,) = written(tmp_path / "out.jsonl")
    sample = run.samples["late", 1]
    assert row["equal"] is None and row["why"] == "changed from token 5 on" and len(row["token_ids"]) == 20
    assert row["token_ids"][:5] == sample.token_ids[:5].tolist() and row["token_ids"][:16] != sample.token_ids.tolist()
    assert replay(run, tmp_path / "out.jsonl", *words, "--append", "[7, 8]") == 0
    assert written(tmp_path / "out.jsonl")[0]["prompt_tokens"] == len(PROMPTS[1]) + 5 + 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--step", "7"], "the ledger has steps 0 to 1"),
        (["--group", "nobody"], "no such sample"),
        (["--seed", "3"], "without --at"),
        (["--at", "1", "--append", "hello"], "must be token ids"),
        (["--weights", "/nowhere"], "no such folder"),
        (["--weights", "{tmp}"], "neither safetensors nor folders"),
        (["--weights", "{one}"], "one set of weights for versions 0, 1"),
        (["--prompts", "/nowhere"], "No such file"),
    ],
)
def test_what_cannot_be_replayed(
    words: list[str], why: str, run: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"tmp": tmp_path, "one": run.weights / "step-0"}
    assert replay(run, tmp_path / "out.jsonl", *[word.format(**places) for word in words]) == 1
    assert why in capsys.readouterr().err


def test_two_folders_of_one_version_are_refused(run: Recorded, tmp_path: Path) -> None:
    for name in ("a-1", "b-1"):
        shutil.copytree(run.weights / "step-1", tmp_path / name)
    with pytest.raises(InputError, match="a-1 and b-1 are of one version"):
        remaking.weight_folders(tmp_path)


def test_the_service_computes_as_the_run_did(run: Recorded) -> None:
    """Its block size and dtypes are those of the ledger, unless the user asks for others."""
    read = ledger.read(run.file)
    engine = remaking.engine_of(read, 0, EngineConfig(threads=2), "model")
    assert (engine.model, engine.block_size, engine.dtype, engine.kv_dtype, engine.threads) == (
        "model",
        16,
        "float32",
        "auto",
        2,
    )
    read.services[0].arithmetic = f"fma/1+{INT8}"
    assert remaking.engine_of(read, 0, EngineConfig(), "m").weight_dtype == "int8"
    read.services[0].arithmetic = f"fma/1+{LATENT}"
    assert remaking.engine_of(read, 0, EngineConfig(), "m").latent_kv
    read.services[0].kv_dtype = "fp8_e4m3"
    assert remaking.engine_of(read, 0, EngineConfig(block_size=64), "m").kv_dtype == "fp8_e4m3"
    assert remaking.engine_of(read, 0, EngineConfig(block_size=64), "m").block_size == 64


# show


def test_show(run: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "show", str(run.file)]) == 0
    summary = capsys.readouterr().out
    for words in (
        "a sample, digest ",
        "arithmetic",
        "1 refresh, 2 groups, 6 samples, steps 0 to 1",
        "ended in order",
        "2 prompts",
    ):
        assert words in summary, words
    assert main(["ledger", "show", str(run.file), "--json", "--step", "1"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["group_id"], row["index"], row["step"]) for row in rows] == [("late", i, 1) for i in range(3)]
    assert main(["ledger", "show", str(run.file), "--table", "refreshes"]) == 0
    assert "version=1" in capsys.readouterr().out
    assert main(["ledger", "show", str(run.file), "--table", "services", "--step", "1"]) == 1
    data = run.file.read_bytes()
    (tmp_path / "torn").write_bytes(data[:-3])
    assert main(["ledger", "show", str(tmp_path / "torn")]) == 0
    assert "was killed, or runs" in (said := capsys.readouterr().out) and "torn: the last" in said
    (tmp_path / "damaged").write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    assert main(["ledger", "show", str(tmp_path / "damaged")]) == 1
    assert "damaged at byte" in capsys.readouterr().err


# bisect


def test_equal_different_and_trouble(run: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", str(run.file), str(run.file)]) == 0
    assert "equal: 2 refreshes, 6 samples" in capsys.readouterr().out
    other = recorded(tmp_path / "other.ledger", run.weights, temperature=0.5)
    assert main(["bisect", str(run.file), str(other.file)]) == 1
    assert "sampling: step 1, group late: temperature is 1.0 in a, 0.5 in b" in capsys.readouterr().out
    assert main(["bisect", str(run.file), str(other.file), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False and found["difference"]["kind"] == "sampling" and found["computed"] is None
    assert main(["bisect", str(run.file), str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["bisect", str(run.file), str(other.file), "--weights-b", str(run.weights)]) == 2


def test_with_weights_it_says_which_side_is_right(run: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = recorded(tmp_path / "forged.ledger", run.weights, Forging)
    assert main(["bisect", str(forged.file), str(run.file), "--weights-a", str(run.weights), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    difference, computed = found["difference"], found["computed"]
    assert (difference["kind"], difference["group_id"], difference["index"]) == ("log-prob", "late", 1)
    assert difference["tokens"] == [8, 16] and computed["right"] == "b"
    assert main(["bisect", str(run.file), str(forged.file), "--weights-a", str(run.weights)]) == 1
    said = capsys.readouterr().out
    assert "a is right: b has not computed what it says" in said and "a, computed again: the sample of its ledger" in said


def test_with_weights_it_makes_the_token_under_both(run: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = recorded(tmp_path / "other.ledger", run.weights, seed=6)
    words = ["--weights-a", str(run.weights), "--weights-b", str(run.weights), "--json"]
    assert main(["bisect", str(run.file), str(other.file), *words]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["difference"]["kind"] == "seed" and found["computed"]["right"] == "both"
    token, index = found["computed"]["token"], found["computed"]["index"]
    for side, samples in (("a", run.samples), ("b", other.samples)):
        sample = samples["late", index]
        assert (token[side], token[f"{side}_logprob"]) == (sample.token_ids[token["at"]], sample.logprobs[token["at"]])


# processes


@pytest.mark.long
def test_a_killed_process_leaves_a_ledger_that_another_one_replays(weights: Path, tmp_path: Path) -> None:
    """A service that is killed while it writes, a second one that continues the file, and `rollout replay` with its own."""
    file = tmp_path / "run.ledger"
    config = config_of(weights / "step-0")
    service = msgspec.structs.replace(config.service, ledger=str(file), ledger_prompts=True)
    config = msgspec.structs.replace(config, service=service)
    for seed in range(2):
        (tmp_path / "rollout.toml").write_text(dump(config))
        ready = tmp_path / f"ready-{seed}"
        command = [*ROLLOUT, "serve", "--config", str(tmp_path / "rollout.toml"), "--service.endpoint", "tcp://127.0.0.1:*"]
        with subprocess.Popen([*command, "--ready-file", str(ready)]) as process:
            until(ready.exists, "it serves", WAIT)
            with RolloutClient(ready.read_text()) as client:
                sampling = msgspec.structs.replace(SAMPLING, seed=seed)
                client.submit(PROMPTS[seed], sampling, f"first {seed}").result(timeout=WAIT)
                client.refresh(str(weights / "step-1"), version=1)
                client.submit(PROMPTS[seed], sampling, f"second {seed}").result(timeout=WAIT)
                process.kill()
    read = ledger.read(file)
    assert len(read.services) == 2 and not any(service.closed for service in read.services)
    assert [group.group_id for group in read.groups] == ["first 0", "second 0", "first 1", "second 1"]
    words = ["replay", str(file), "--weights", str(weights), "--out", str(tmp_path / "out.jsonl")]
    done = subprocess.run([*ROLLOUT, *words], capture_output=True, text=True, timeout=4 * WAIT)
    assert done.returncode == 0, done.stderr
    assert [row["equal"] for row in written(tmp_path / "out.jsonl")] == [True] * 12
