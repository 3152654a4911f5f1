"""Metrics: what they say, that the table in the docs is what comes out, and that no sink can hurt the service."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.client.api import RolloutClient
from rollout.commands.main import main
from rollout.commands.progress import Phases, nothing
from rollout.commands.starting import make_tracker, start
from rollout.config import Config, InputError, TrackingConfig, dump, load
from rollout.engine.config import WeightOffload
from rollout.engine.memory import HostMemory
from rollout.engine.scheduling.counters import Rates
from rollout.engine.values import Group, PartialSample, Sample, Sampling
from rollout.engine.weights.offload import OffloadedModel
from rollout.exact import sample_logprobs
from rollout.fleet.merge import merged
from rollout.metrics.audit import Audit, plain_twin
from rollout.metrics.catalog import METRICS
from rollout.metrics.meters import EngineMeter, SampleMeter
from rollout.metrics.sinks import TIME_INDEXED, ConsoleSink, JsonlSink, WandbSink, open_sinks, wandb_mode
from rollout.metrics.tracker import Tracker
from rollout.service.build import open_service
from rollout.service.phases import LoopPhase
from rollout.transport.loopback import LoopbackService
from tests.support.clock import Clock
from tests.support.fake_engine import FakeEngine
from tests.support.tiny import tiny, tiny_engine
from tests.support.wandb_file import history
from tests.support.wire import serving

ROOT = Path(__file__).parents[2]


def sample(group_id: str = "g", tokens: int = 4, **fields: Any) -> Sample:
    made: dict[str, Any] = {
        "group_id": group_id,
        "index": 0,
        "token_ids": np.zeros(tokens, np.int32),
        "logprobs": np.full(tokens, -0.5, np.float32),
        "finish_reason": "length",
        "weight_versions": [(0, 0)],
        "prompt_tokens": 3,
    }
    return Sample(**(made | fields))


def group(group_id: str = "g", prompt: int = 3, **sampling: Any) -> Group:
    return Group(group_id, np.arange(1, prompt + 1, dtype=np.int32), Sampling(**sampling))


def run_engine(tracker: Tracker, engine: Any, clock: Clock, groups: list[Group], step_s: float = 0.2) -> list[Sample]:
    """As the service does it."""
    ended = []
    for one in groups:
        engine.submit(one)
        tracker.begin(one)
    while engine.has_work:
        for done in engine.step():
            ended.append(done)
            tracker.observe([done], engine.version)
        clock.now += step_s
        tracker.tend(lambda: seen_by_a_service(engine), engine.version)
    return ended


def seen_by_a_service(engine: Any) -> dict[str, Any]:
    return {**engine.status(), "loop": LoopPhase().status()}


# samples


def test_figures_of_samples() -> None:
    meter = SampleMeter(window_s=10)
    meter.begin(group(n=3))
    meter.add([sample(tokens=2, finish_reason="stop", seconds=1.0)], 0, now=0)
    meter.add([sample(tokens=10, seconds=2.0)], 0, now=1)
    assert "rollout/group_s_mean" not in meter.row(1)
    meter.add([sample(tokens=6, finish_reason="aborted", seconds=3.0)], 0, now=2)
    row = meter.row(2)
    assert (row["rollout/samples"], row["rollout/sample_tokens"], row["rollout/groups"]) == (3, 18, 1)
    assert (row["rollout/length_mean"], row["rollout/length_min"], row["rollout/length_max"]) == (6, 2, 10)
    assert row["rollout/clipped_ratio"] == 0.5 and row["rollout/unfinished_ratio"] == pytest.approx(1 / 3)
    assert row["rollout/logprob_mean"] == -0.5
    assert row["rollout/sample_s"] == 1.5 and row["rollout/group_s_mean"] == row["rollout/group_s_max"] == 3.0
    assert row["rollout/group_spread"] == pytest.approx(np.std([1, 2, 3]) / 2) and row["rollout/cut_ratio"] == 0
    meter.add([sample(tokens=6, finish_reason="cut")], 0, now=3)
    assert meter.row(3)["rollout/cut_ratio"] == 1 / 4


def test_log_probs_that_a_client_submitted_are_not_averaged() -> None:
    """They may be anything; a client could move the mean of all."""
    logprobs = np.array([-3e38, 1e30], np.float32)
    partial = PartialSample(index=0, token_ids=np.array([5, 6], np.int32), logprobs=logprobs, weight_versions=[(0, 0)])
    meter = SampleMeter(window_s=10)
    meter.begin(msgspec.structs.replace(group(n=1), partials=(partial,)))
    whole = sample(tokens=6, finish_reason="stop", seconds=1.0)
    meter.add([msgspec.structs.replace(whole, logprobs=np.concatenate([logprobs, whole.logprobs[2:]]))], 0, now=0)
    row = meter.row(0)
    assert row["rollout/logprob_mean"] == -0.5 and row["rollout/sample_tokens"] == row["rollout/length_mean"] == 6


def test_the_window_slides_and_totals_stay() -> None:
    meter = SampleMeter(window_s=10)
    meter.add([sample(tokens=2)], 0, now=0)
    meter.add([sample(tokens=4)], 0, now=8)
    assert meter.row(9)["rollout/length_mean"] == 3
    assert meter.row(12)["rollout/length_mean"] == 4
    row = meter.row(30)
    assert "rollout/length_mean" not in row and row["rollout/sample_tokens"] == 6


def test_samples_that_end_together_are_kept_as_one() -> None:
    """A row costs as much at 1,000 samples a second as at one."""
    meter = SampleMeter(window_s=10)
    for i in range(4000):
        reason = "length" if i % 4 else "aborted"
        meter.add(
            [sample(tokens=1 + i % 8, finish_reason=reason, seconds=i / 4000, weight_versions=[(0, i % 2)])], 1, now=i / 100
        )
    assert len(meter._ended) <= 401
    row, last = meter.row(39.99), range(3000, 4000)  # those of the last 10 s, and of none that began before
    whole = [i for i in last if i % 4]
    assert row["rollout/unfinished_ratio"] == pytest.approx(1 / 4, abs=0.01) and row["rollout/samples"] == 4000
    assert row["rollout/length_mean"] == pytest.approx(np.mean([1 + i % 8 for i in whole]), abs=0.05)
    assert (row["rollout/length_min"], row["rollout/length_max"]) == (2, 8)
    assert row["rollout/sample_s"] == pytest.approx(np.mean([i / 4000 for i in whole]), abs=0.002)
    assert row["off_policy/lag_mean"] == pytest.approx((1 + 3 + 5 + 7) / 36, abs=0.01)
    assert row["rollout/logprob_mean"] == -0.5 and len(meter._ended) <= 101


def test_lag_counts_tokens_not_samples() -> None:
    meter = SampleMeter(window_s=10)
    meter.add([sample(tokens=10, weight_versions=[(0, 3), (4, 5)])], 5, now=0)  # 4 tokens 2 behind
    meter.add([sample(tokens=30, weight_versions=[(0, 5)])], 5, now=0)
    row = meter.row(0)
    assert row["off_policy/lag_mean"] == 8 / 40 and row["off_policy/lag_max"] == 2 and row["off_policy/mixed_ratio"] == 0.5


def test_samples_without_tokens_make_no_figures() -> None:
    meter = SampleMeter(window_s=10)
    meter.add([sample(tokens=0, finish_reason="aborted", weight_versions=[])], 5, now=0)
    row = meter.row(0)
    assert row["rollout/unfinished_ratio"] == 1.0 and not {"rollout/length_mean", "off_policy/lag_mean"} & row.keys()


# engine


def status(**counters: float) -> dict[str, Any]:
    base = {
        "steps": 0,
        "generated_tokens": 0,
        "prefill_tokens": 0,
        "prefix_hit_tokens": 0,
        "kept_tokens": 0,
        "step_seconds": 0.0,
        "model_seconds": 0.0,
        "sample_seconds": 0.0,
        "move_seconds": 0.0,
        "plan_seconds": 0.0,
        "build_seconds": 0.0,
        "commit_seconds": 0.0,
        "uptime_seconds": 0.0,
        "recomputed_tokens": 0,
    }
    return {**base, **counters}


def test_rates_are_sums_over_sums() -> None:
    meter = EngineMeter(window_s=100)
    meter.add(status(), now=0)
    meter.add(status(steps=1, generated_tokens=100), now=1)
    meter.add(status(steps=10, generated_tokens=190), now=10)
    row = meter.row()
    assert row["engine/batch_size"] == 19 and row["rollout/tokens_per_s"] == 19
    assert row["engine/batch_size"] != (100 + 10) / 2  # what a mean of ratios would say


def test_the_time_to_the_first_token_is_of_the_window() -> None:
    meter = EngineMeter(window_s=10)
    meter.add(status(first_tokens=4, first_token_seconds=100.0), now=0)
    assert "rollout/first_token_s" not in meter.row()
    meter.add(status(first_tokens=8, first_token_seconds=102.0), now=4)
    assert meter.row()["rollout/first_token_s"] == 0.5


def test_rates_look_back_on_the_window_only() -> None:
    meter = EngineMeter(window_s=10)
    for now in range(0, 100, 5):
        meter.add(status(steps=now, generated_tokens=now * (1 if now < 50 else 3)), now=now)
    assert meter.row()["rollout/tokens_per_s"] == 3
    wide = EngineMeter(window_s=1000)
    for now in range(0, 100, 5):
        wide.add(status(steps=now, generated_tokens=now * (1 if now < 50 else 3)), now=now)
    assert wide.row()["rollout/tokens_per_s"] == pytest.approx(3 * 95 / 95)


def test_host_share() -> None:
    meter = EngineMeter(window_s=10)
    meter.add(status(), now=0)
    parts = {"plan_seconds": 0.25, "build_seconds": 0.125, "commit_seconds": 0.125, "model_seconds": 1.0, "sample_seconds": 0.5}
    meter.add(status(step_seconds=2.0, uptime_seconds=4.0, steps=4, **parts), now=4)
    row = meter.row()
    assert row["engine/host_ratio"] == 0.25 and row["engine/busy_ratio"] == 0.5 and row["engine/step_s"] == 0.5
    assert row["kv/stall_ratio"] == 0 and "kv/host_used_ratio" not in row


def test_copies_that_take_longer_than_steps() -> None:
    """On CUDA copies overlap with steps, and a step may have begun before the window."""
    meter = EngineMeter(window_s=10)
    meter.add(status(), now=0)
    meter.add(status(step_seconds=5.0, move_seconds=6.0, model_seconds=2.0, uptime_seconds=4.0, steps=1), now=4)
    row = meter.row()
    assert row["kv/stall_ratio"] == 0.75 and row["engine/busy_ratio"] == 1 and row["engine/host_ratio"] == 0


def test_ratios_of_a_fleet_are_means() -> None:
    """Two replicas, one busy half of the time and one always."""
    half, always = status(step_seconds=2.0, uptime_seconds=4.0), status(step_seconds=4.0, uptime_seconds=4.0)
    meter = EngineMeter(window_s=10)
    meter.add(merged([status(), status()]), now=0)
    meter.add(merged([half, always]), now=4)
    assert meter.row()["engine/busy_ratio"] == 0.75


# the table


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A tiny engine with too little KV, refreshed on the way, watched by every sink and the audit."""
    folder = tmp_path_factory.mktemp("tracked")
    model = tiny("llama")
    engine = tiny_engine(model=model, kv_tokens=256, cpu_offload_gib=0.01, max_num_seqs=16, min_run_tokens=4)
    config = TrackingConfig(
        interval_s=1.0, window_s=1e6, audit_every=1, audit_max_share=1.0, wandb_project="test", wandb_dir=str(folder)
    )
    clock, console, jsonl = Clock(100.0), io.StringIO(), folder / "metrics.jsonl"
    with redirect_stderr(io.StringIO()) as said:
        sinks = [ConsoleSink(console), JsonlSink(str(jsonl)), WandbSink(config)]
    tracker = Tracker(config, sinks, Audit(model, config), clock)
    groups = [group(str(i), prompt=24, n=4, max_tokens=40, seed=i) for i in range(4)]
    with pytest.MonkeyPatch.context() as patch:  # as copies_pay
        patch.setattr(Rates, "copy_pays", lambda *_: True)
        run_engine(tracker, engine, clock, groups)
    engine.refresh([(name, tensor + 0.01) for name, tensor in model.named_parameters()])
    run_engine(tracker, engine, clock, [group("after", prompt=24, n=4, max_tokens=40, seed=9)])
    tracker.close(lambda: seen_by_a_service(engine))
    yield {"row": tracker.row, "console": console.getvalue(), "jsonl": jsonl, "wandb": folder, "said": said.getvalue()}


def documented() -> set[str]:
    """Those of an engine; what a router has besides: `tests/rollout/test_fleet.py`."""
    return {name for name, metric in METRICS.items() if metric.over != "histogram" and not name.startswith("fleet/")}


def test_the_table_is_what_is_emitted(tracked: dict[str, Any]) -> None:
    assert set(tracked["row"]) == documented()
    assert len(documented()) > 50


def test_figures_of_a_real_run(tracked: dict[str, Any]) -> None:
    row = tracked["row"]
    assert row["rollout/samples"] == 20 and row["rollout/groups"] == 5
    assert row["engine/generated_tokens"] == row["rollout/sample_tokens"]
    assert row["kv/offloads"] > 0 and row["kv/bytes_to_host"] > 0
    assert row["weights/version"] == 1 and row["weights/refreshes"] == 1
    assert 0 < row["engine/host_ratio"] < 1 and row["engine/busy_ratio"] > 0 and row["kv/stall_ratio"] > 0
    assert row["mismatch/logprob_abs_max"] < 1e-4 and row["mismatch/audited_tokens"] > 100


def out_of_range(row: dict[str, float]) -> set[str]:
    return {name for name, value in row.items() if name.endswith("_ratio") and not 0 <= value <= 1}


def test_a_ratio_is_a_fraction(tracked: dict[str, Any]) -> None:
    """In every row of the run, not in the last alone."""
    rows = [json.loads(line) for line in tracked["jsonl"].read_text().splitlines()]
    assert sum(name.endswith("_ratio") for name in tracked["row"]) > 12
    assert not {name for row in [*rows, tracked["row"]] for name in out_of_range(row)}
    assert out_of_range({"a_ratio": 1.01, "b_ratio": -0.01, "c_ratio": 1.0, "d": 7.0}) == {"a_ratio", "b_ratio"}


def test_wandb_shows_every_metric_over_the_service_s_time() -> None:
    rows = re.findall(r"^\| `([\w/]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert {name.split("/")[0] + "/*" for name in rows} == set(TIME_INDEXED)


def test_jsonl(tracked: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in tracked["jsonl"].read_text().splitlines()]
    assert len(rows) > 3 and all(row["time"] > 1e9 for row in rows)
    times = [row["engine/time_s"] for row in rows]
    assert times == sorted(times)
    assert rows[-1] == {"time": rows[-1]["time"], **tracked["row"]}


def test_console(tracked: dict[str, Any]) -> None:
    last = tracked["console"].splitlines()[-1]
    assert re.search(r"\d\d:\d\d:\d\d  \d+ tokens/s  20 samples  running 0  waiting 0  KV \d+%  host KV \d+%  version 1", last)


@pytest.mark.parametrize("number", [0, 1])
def test_the_programs_in_the_docs_run(number: int, tmp_path: Path) -> None:
    """As they are written, but for the address; wandb is one that keeps what it gets."""
    (tmp_path / "wandb.py").write_text(WANDB)
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL)
    assert len(programs) == 2
    with serving(FakeEngine(), tracker=Tracker(TrackingConfig(interval_s=1e-6))) as service:
        text = programs[number].replace("tcp://127.0.0.1:5655", service.endpoint)
        paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "logged.jsonl").read_text().splitlines()]
    assert [row["train/step"] for row in rows] == [0, 1, 2]
    assert ("engine/time_s" in rows[-1]) == (number == 1)


WANDB = """
import json
class Settings:
    def __init__(self, **options): pass
class Run:
    id = "abc"
    def define_metric(self, name, **options): pass
    def log(self, row):
        with open("logged.jsonl", "a") as file:
            print(json.dumps(row), file=file)
    def finish(self): pass
def init(**options):
    return Run()
"""


def test_an_offline_wandb_run_says_where_it_lies(tracked: dict[str, Any]) -> None:
    (folder,) = (one for one in tracked["wandb"].rglob("offline-run-*") if one.is_dir() and not one.is_symlink())
    assert tracked["said"].endswith(f"wandb run of project test in {folder}, offline; upload it with: wandb sync {folder}\n")


def test_the_console_is_quiet_while_nothing_runs() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    idle = {"rollout/samples": 8.0, "rollout/tokens_per_s": 3.0, "engine/running": 0.0, "engine/waiting": 0.0}
    for row, lines, last_is_idle in (
        (idle, 1, True),
        (idle | {"rollout/tokens_per_s": 0.0}, 1, True),
        (idle | {"engine/running": 2.0}, 2, False),
        (idle | {"engine/running": 2.0}, 3, False),  # the negative control: what runs is printed each time
        (idle | {"engine/waiting": 2.0}, 4, False),
        (idle | {"rollout/samples": 10.0}, 5, True),
        (idle | {"rollout/samples": 10.0}, 5, True),
        (idle | {"rollout/samples": 12.0}, 6, True),  # so fast that no row saw them run
        (idle | {"rollout/samples": 12.0, "weights/version": 1.0}, 7, True),
    ):
        sink.write(row)
        said = stream.getvalue().splitlines()
        assert len(said) == lines and said[-1].endswith("  idle") == last_is_idle


def test_the_offline_wandb_run_holds_every_documented_metric(tracked: dict[str, Any]) -> None:
    rows, axes = history(tracked["wandb"])
    assert set().union(*rows) >= documented()
    assert rows[-1]["rollout/samples"] == 20
    assert {axes[f"{room}/*"] for room in ("rollout", "engine", "kv", "weights", "off_policy", "mismatch")} == {"engine/time_s"}


# sinks that fail


class Broken:
    name = "broken"

    def __init__(self) -> None:
        self.calls = 0

    def write(self, row: dict[str, float]) -> None:
        self.calls += 1
        raise OSError("no space left on device")

    def close(self) -> None:
        raise OSError("still none")


class Kept:
    name = "kept"

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.rows.append({})


def test_a_sink_that_fails_warns_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    clock, broken, kept = Clock(100.0), Broken(), Kept()
    tracker = Tracker(TrackingConfig(interval_s=1.0), [broken, kept], clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now += 1
            tracker.tend(status, 0)
        tracker.close(status)
    assert broken.calls == 4 and len(kept.rows) == 5
    (warning,) = caplog.messages
    assert "part=broken error=OSError" in warning and "no space left" in warning


def test_a_sink_that_cannot_start_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"tracking.jsonl .*nowhere"):
        open_sinks(TrackingConfig(jsonl=str(tmp_path / "nowhere" / "m.jsonl")))
    with pytest.raises(InputError, match="wandb could not start"):
        open_sinks(TrackingConfig(wandb_project="p", wandb_run_id="a/b", wandb_mode="offline", wandb_dir=str(tmp_path)))
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'rl-rollout\[wandb\]'"):
        open_sinks(TrackingConfig(wandb_project="p"))


def test_wandb_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    own, trainers = TrackingConfig(wandb_project="p"), TrackingConfig(wandb_project="p", wandb_run_id="x")
    assert (wandb_mode(own), wandb_mode(trainers)) == ("offline", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert (wandb_mode(own), wandb_mode(trainers)) == ("online", "shared")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode(trainers) is None
    assert wandb_mode(TrackingConfig(wandb_project="p", wandb_mode="offline")) == "offline"


def test_the_trainer_s_run_is_shared_not_owned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import wandb

    given: dict[str, Any] = {}

    class Run:
        project, dir, url, offline = "p", "/w/run-abc/files", "https://wandb.ai/me/p/runs/abc", False

        def define_metric(self, *args: Any, **options: Any) -> None:
            pass

    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or Run())
    WandbSink(TrackingConfig(wandb_project="p", wandb_run_id="abc", wandb_mode="shared"))
    settings = given["settings"]
    assert (given["id"], given["mode"]) == ("abc", "shared")
    assert (settings.x_primary, settings.x_label, settings.x_update_finish_state) == (False, "rollout", False)
    WandbSink(TrackingConfig(wandb_project="p", wandb_mode="offline"))
    assert given["settings"].x_primary is True
    where = "wandb run of project p at https://wandb.ai/me/p/runs/abc, files in /w/run-abc"
    assert capsys.readouterr().err.splitlines() == [f"rollout: {where}"] * 2


# the audit


def audited(model: Any, engine: Any, spoil: Any = None, **sampling: Any) -> dict[str, float]:
    config = TrackingConfig(interval_s=1.0, window_s=1e6, audit_every=1, audit_max_share=1.0)
    clock = Clock(100.0)
    tracker = Tracker(config, [], Audit(model, config), clock)
    engine.submit(one := group(prompt=9, n=2, **{"max_tokens": 12, "seed": 3, "ignore_eos": True, **sampling}))
    tracker.begin(one)
    while engine.has_work:
        for done in engine.step():
            tracker.observe([done], engine.version)
    if spoil is not None:
        spoil()
    clock.now += 0.5
    tracker.tend(engine.status, engine.version)
    tracker.close(engine.status)
    return tracker.row


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5, "raw_logprobs": True}])
def test_the_audit_agrees_with_the_engine(sampling: dict[str, Any]) -> None:
    model = tiny("qwen3")
    row = audited(model, tiny_engine(model=model), **sampling)
    assert row["mismatch/audited_tokens"] == 12 and row["mismatch/skipped_samples"] == 1
    assert row["mismatch/logprob_abs_max"] < 1e-5 and row["mismatch/outside_ratio"] == 0
    assert model.config._attn_implementation == "rollout"  # the serving model is as it was


def test_the_audit_sees_weights_that_are_not_those_of_the_sample() -> None:
    model = tiny("llama")

    def spoil() -> None:
        with torch.no_grad():
            model.get_output_embeddings().weight.add_(torch.randn_like(model.get_output_embeddings().weight))

    row = audited(model, tiny_engine(model=model), spoil)
    assert row["mismatch/logprob_abs_mean"] > 0.01 and row["mismatch/outside_ratio"] > 0.1 and row["mismatch/kl"] > 0


def scored(module: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """[tokens] log-probs of what comes after the first five."""
    with torch.inference_mode():
        return sample_logprobs(module, [(ids[:5], ids[5:])])[0].numpy()


@pytest.mark.parametrize("name", ["llama", "llama-mha", "gemma3_text", "qwen3_moe", "phi3"])
def test_the_plain_twin_shares_every_tensor_and_no_module(name: str) -> None:
    model = tiny(name)
    tiny_engine(model=model)
    twin = plain_twin(model)
    theirs, ours = dict(model.state_dict(keep_vars=True)), dict(twin.state_dict(keep_vars=True))
    assert theirs.keys() == ours.keys() and all(theirs[key] is ours[key] for key in theirs)
    assert not set(map(id, model.modules())) & set(map(id, twin.modules()))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.base_model.layers[0].forward = None  # whatever is done to what serves
    ids = np.arange(3, 20, dtype=np.int32)
    before = scored(twin, ids)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    assert not np.allclose(before, scored(twin, ids))  # a refresh in place reaches it


def test_the_audit_reads_offloaded_layers() -> None:
    """The twin has no hooks of its own: without those of the offload its layers compute with whatever lies in the slots."""
    module, offload = tiny("llama", num_hidden_layers=5), WeightOffload(group_size=1, prefetch_step=2)
    ids = np.arange(3, 20)
    want = scored(plain_twin(module), ids)
    streamed = OffloadedModel(module, "llama", offload, HostMemory())
    audit = Audit(module, TrackingConfig(audit_every=1), streamed=streamed)
    for _ in range(2):
        assert scored(audit._plain, ids).tobytes() == want.tobytes()
    assert not np.allclose(scored(plain_twin(module), ids), want)


def test_the_audit_skips_what_it_cannot_compare() -> None:
    model = tiny("llama")
    engine = tiny_engine(model=model)
    row = audited(model, engine, top_k=5)
    assert row["mismatch/audited_tokens"] == 0 and row["mismatch/skipped_samples"] == 2
    row = audited(model, engine, lambda: engine.refresh(model.state_dict()))  # the sample is of version 0 now
    assert row["mismatch/audited_tokens"] == 0 and row["mismatch/skipped_samples"] == 2


def test_the_audit_waits_while_the_weights_are_away() -> None:
    """After sleep(level=2) the parameters hold zeros until a refresh has come, under the version that they had."""
    model = tiny("llama")
    new = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    engine = tiny_engine(model=model)
    tracker = make_tracker(TrackingConfig(interval_s=1e6, window_s=1e6, audit_every=1, audit_max_share=1.0), [], engine)
    engine.submit(one := group(prompt=9, max_tokens=12, seed=3, ignore_eos=True))
    tracker.begin(one)
    while engine.has_work:
        for done in engine.step():
            tracker.observe([done], engine.version)
    engine.sleep(2)
    for order in (lambda: None, engine.wake, lambda: engine.refresh(new)):
        order()
        tracker.tend(engine.status, engine.version)
        tracker.tend(engine.status, engine.version)
    tracker.close(engine.status)
    assert tracker.row["mismatch/audited_tokens"] == 0 and tracker.row["mismatch/skipped_samples"] == 1


def test_an_audit_that_fails_is_a_skipped_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("injected failure of the plain forward")

    monkeypatch.setattr("rollout.metrics.audit.sample_logprobs", broken)
    model = tiny("llama")
    row = audited(model, tiny_engine(model=model))
    assert row["mismatch/audited_tokens"] == 0 and row["mismatch/skipped_samples"] == 2


def test_the_audit_keeps_to_its_share_of_the_time() -> None:
    model = tiny("llama")
    tiny_engine(model=model)
    now = iter(range(0, 1000, 2))  # a forward takes 2 s
    config = TrackingConfig(audit_every=1, audit_max_share=0.1, audit_max_tokens=5)
    audit = Audit(model, config, clock=lambda: float(next(now)))
    for at in range(100, 141):
        audit.offer(group(), sample(tokens=4))
        audit.run(0, float(at))
    row = audit.row(140.0)
    assert row["mismatch/audit_s"] == 6.0  # at 100, 120 and 140
    assert row["mismatch/audited_tokens"] == 3 * 2  # of 3 + 4 tokens the first 5


# configuration


def test_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[tracking]\nconsole = true\naudit_every = 16\n")
    config = load(tmp_path / "c.toml")
    assert config == Config(tracking=TrackingConfig(console=True, audit_every=16))
    (tmp_path / "d.toml").write_text(dump(config))
    assert load(tmp_path / "d.toml") == config


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"interval_s": 0.0}, "interval_s"),
        ({"window_s": float("nan")}, "window_s"),
        ({"audit_every": -1}, "audit_every"),
        ({"audit_max_tokens": 1}, "audit_max_tokens"),
        ({"audit_max_share": 1.5}, "audit_max_share"),
        ({"wandb_run_id": "x"}, "wandb_project"),
    ],
)
def test_bad_configuration_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TrackingConfig(**fields)


def test_the_configuration_in_the_docs_is_accepted(tmp_path: Path) -> None:
    (toml,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL)
    (tmp_path / "c.toml").write_text(toml)
    assert load(tmp_path / "c.toml").tracking.audit_every == 64


# in the service


def test_a_service_keeps_metrics_and_survives_a_broken_sink(tmp_path: Path) -> None:
    """Loopback, a scripted engine; the client sees the row in the status."""
    kept, broken = Kept(), Broken()
    loopback = LoopbackService()
    service = open_service(
        FakeEngine(),
        transport=loopback,
        tracker=Tracker(TrackingConfig(interval_s=0.01), [broken, kept]),
    )
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        with RolloutClient(transport=loopback.connect()) as client:
            list(client.generate([[1, 2], [3, 4]], Sampling(n=3, max_tokens=5)))
            deadline = time.monotonic() + 60
            while (metrics := client.status()["metrics"]).get("rollout/groups") != 2:
                assert time.monotonic() < deadline, "the row is written a hundredth of a second after the samples"
            assert (
                metrics["rollout/samples"] == 6 and metrics["rollout/length_mean"] == 5 and metrics["off_policy/lag_max"] == 0
            )
    finally:
        service.stop()
        thread.join(60)
    assert not thread.is_alive() and broken.calls > 0
    assert kept.rows[-1] == {} and kept.rows[-2]["rollout/samples"] == 6  # a last row, then closed


def test_dropped_groups_are_forgotten() -> None:
    tracker = Tracker(TrackingConfig(), audit=Audit(tiny("llama"), TrackingConfig(audit_every=1)))
    tracker.begin(group("kept", n=2))
    tracker.begin(group("dropped", n=2))
    tracker.forget("dropped")
    tracker.forget("unknown")
    assert tracker._groups.keys() == {"kept"} and not tracker._samples.is_live("dropped")


def test_serve_writes_what_it_is_told(tiny_config: Config, tmp_path: Path) -> None:
    jsonl = tmp_path / "m.jsonl"
    tracking = TrackingConfig(interval_s=0.05, jsonl=str(jsonl), audit_every=1, audit_max_share=1.0)
    at_any_port = msgspec.structs.replace(tiny_config.service, endpoint="tcp://127.0.0.1:*")
    _, service = start(
        msgspec.structs.replace(tiny_config, tracking=tracking, service=at_any_port), Phases("rollout serve", nothing)
    )
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        with RolloutClient(service.endpoint) as client:
            list(client.generate([[5, 6, 7]], Sampling(n=4, max_tokens=20, ignore_eos=True)))
    finally:
        service.stop()
        thread.join(60)
    assert not thread.is_alive()
    last = json.loads(jsonl.read_text().splitlines()[-1])
    assert last["rollout/samples"] == 4 and last["engine/generated_tokens"] == 80


def test_serve_ends_at_once_if_a_sink_cannot_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert main(["serve", "--model", "/nowhere", "--tracking.jsonl", str(tmp_path / "no" / "m.jsonl")]) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "tracking.jsonl" in capfd.readouterr().err  # before the model is even looked for
