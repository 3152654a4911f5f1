"""Fixtures that more than one package's tests use."""

from __future__ import annotations

import gc
import os
import random

from tests.support.signals import heed_interrupts

heed_interrupts()
gc.disable()  # until tests are collected: what is imported stays, and looking through it for garbage takes a third of that time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `rollout` does; read when torch is loaded
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a hub for anything
os.environ.setdefault("WANDB_INIT_TIMEOUT", "110")  # its process starts late on a loaded machine
os.environ.setdefault("WANDB__SERVICE_WAIT", "110")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is loaded, which transformers does

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

from rollout import process  # noqa: E402
from rollout.config import Config  # noqa: E402
from rollout.engine.config import EngineConfig  # noqa: E402
from rollout.engine.cpu import isa  # noqa: E402
from rollout.engine.scheduling.counters import Rates  # noqa: E402
from rollout.process import service_process  # noqa: E402
from tests.support.interpreter import use_ordered_dot  # noqa: E402
from tests.support.tiny_folder import make_tiny_folder  # noqa: E402

pytest_plugins = ["tests.support.nightly"]
if "TESTS_ISA" in os.environ:  # what is above it is hidden from this process: tests/support/arithmetics.py
    seen = isa.cpu_flags() & isa.isa_of(os.environ["TESTS_ISA"]).needs
    isa.cpu_flags = lambda: seen  # type: ignore[assignment]
process.STOP_TIMEOUT_S = 60.0  # patience with a loaded machine
use_ordered_dot()


def pytest_report_header() -> list[str]:
    """Which arithmetic a green run covers."""
    from rollout.engine.cpu.isa import EMULATED, ISAS, isa_of, lacking

    covered = [f"{name} ({isa_of(name).arithmetic})" for name in [*ISAS, *EMULATED] if not lacking(name)]
    others = [f"{name} (no {', '.join(lacking(name))})" for name in ISAS if lacking(name)]
    restricted = [f"{name}={os.environ[name]}" for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY") if name in os.environ]
    lines = [f"CPU kernels covered: {', '.join(covered)}", f"not on this CPU: {', '.join(others) or 'none'}"]
    return [*lines, f"torch: {torch.backends.cpu.get_cpu_capability()} {' '.join(restricted)}".rstrip()]


NIGHTLY = ("test_bench_", "test_bench.", "test_against.")
"""how names of files begin whose tests are all nightly: benchmarks. The default tier has test_one_bench.py"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.path.name.startswith(NIGHTLY):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("some") and not item.get_closest_marker("long"):
            cases.setdefault((item.path, item.name.split("[")[0]), []).append(item)
    for (_, name), each in cases.items():
        count = each[0].get_closest_marker("some").args[0]  # type: ignore[union-attr]
        # drawn: evenly spaced cases would miss every second value; a case that is named alone runs
        daily = random.Random(name).sample(range(len(each)), min(count, len(each)))
        for i, item in enumerate(each):
            if i not in daily:
                item.add_marker(pytest.mark.long)
    # first, and so in one process of several: each process that has some starts a service
    items.sort(key=lambda item: "tiny_service" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    gc.freeze()  # torch, transformers and all tests are a million objects: a look through them takes half a second
    gc.enable()
    gc.set_threshold(50_000, 20, 100)  # engines that tests drop are small, and looking for them takes a twentieth of the time


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Compute with one thread: models here are tiny, and a second one costs more than it brings, above all beside other
    processes. An engine of an earlier test may have set another number."""
    torch.set_num_threads(1)


@pytest.fixture
def loads_in_full() -> None:
    """Engines of this test compare at load all that they compare in a service."""


@pytest.fixture(autouse=True)
def loads_quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process skip most of what they compare at load, which takes longer than most tests. Tests of these
    comparisons use `loads_in_full` (tests/engine/test_models.py, test_cpu_judge.py, …)."""
    if "loads_in_full" in request.fixturenames:
        return
    from tests.support.loads import decide_once  # with transformers, which a process that only hands out tests does not need

    monkeypatch.setattr("rollout.engine.forward.self_check.check_model", lambda served: None)
    monkeypatch.setattr("rollout.engine.cpu.select_path.CHECKED_ROWS", (1, 33))
    monkeypatch.setattr("rollout.engine.cpu.device.decide", decide_once)


@pytest.fixture
def copies_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is preempted is copied to host memory if that has room. By itself the engine compares rates that it has measured,
    and on a loaded machine it may rather compute a short sequence again."""
    monkeypatch.setattr(Rates, "copy_pays", lambda *_: True)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of 2 layers with random weights and a byte-level tokenizer of 259 ids (</s> is 2); context 8,192."""
    folder = tmp_path_factory.mktemp("tiny_model")
    make_tiny_folder(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real model if it is in the cache (`make model` puts it there); skips otherwise: tests do not download."""
    from rollout import models

    folder = models.smollm2_folder()
    if not folder.is_dir():
        pytest.skip(f"smollm2 is not in {models.cache_dir()}: run `make model` once")
    return folder


@pytest.fixture(scope="session")
def tiny_config(tiny_model: Path) -> Config:
    """A service of the tiny model in little memory."""
    return Config(engine=EngineConfig(model=str(tiny_model), dtype="float32", kv_tokens=65_536, cpu_offload_gib=0, threads=1))


@pytest.fixture(scope="session")
def tiny_service(tiny_config: Config) -> Iterator[str]:
    """Address of a service process with the tiny model, shared by the tests that only use it."""
    with service_process(tiny_config, start_timeout_s=300) as service:
        yield service.endpoint
