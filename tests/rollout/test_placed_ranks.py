"""Services whose ranks something else has started: torchrun, and by its variables alone two processes that share no memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rollout.client.api import RolloutClient
from rollout.config import Config, ServiceConfig, dump
from rollout.engine.values import Sampling
from tests.support.configs import engine_config
from tests.support.ranks import ranked_engine, saved, tiny_shared
from tests.support.toy import group, run
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")
SMALL = {"block_size": 8, "kv_tokens": 1024, "max_num_seqs": 12, "max_batch_tokens": 64, "cpu_offload_gib": 0, "drafts": 0}
WAIT = 120.0
"""for what comes: a bound for hangs only"""
HOSTS, TORCHRUN, NODES = "two hosts", "torchrun", "two nodes of torchrun"


@contextmanager
def started(folder: Path, how: str, timeout_s: float = 60.0) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a service of two ranks: as on two hosts, a process each, or by torchrun; or of four, by torchrun on two nodes. Its
    address is in folder / "ready"."""
    engine = engine_config(
        model=saved(folder / "model", "float32"),
        dtype="float32",
        tp=4 if how == NODES else 2,
        threads=1,
        tp_launcher="torchrun",
        tp_timeout_s=timeout_s,
        **SMALL,
    )
    (folder / "serve.toml").write_text(dump(Config(engine=engine, service=ServiceConfig(endpoint="tcp://127.0.0.1:*"))))
    config, ready = str(folder / "serve.toml"), str(folder / "ready")
    serve = ["rollout", "serve", "--config", config, "--ready-file", ready, "--quiet"]
    python, several = [sys.executable, "-m"], ["torch.distributed.run", "--nproc-per-node", "2"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    placed = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if how == TORCHRUN:
        commands = [([*python, *several, "-m", *serve], dict[str, str]())]
    elif how == NODES:
        nodes = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        commands = [([*python, *several, *nodes, "-m", *serve], dict[str, str]())] * 2
    else:
        commands = [(python + serve, placed | {"RANK": str(rank)}) for rank in range(2)]
    with (folder / "errors").open("wb") as errors:
        ranks = [
            subprocess.Popen(command, env={**os.environ, **more}, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
            for command, more in commands
        ]
    try:
        yield ranks
    finally:
        for each in ranks:
            each.kill()
            each.wait()


@pytest.mark.long
@pytest.mark.parametrize("how", [HOSTS, TORCHRUN, NODES])
def test_placed_ranks_have_the_samples_of_one_and_one_fate(tmp_path: Path, how: str) -> None:
    """Before and after a refresh. A rank that is killed ends all."""
    asked, sampling = list(range(3, 40)), Sampling(n=4, seed=1, max_tokens=12, ignore_eos=True)
    reference = ranked_engine(saved(tmp_path / "one", "float32"), 1, "float32", **SMALL)
    wanted = []
    for weights in (None, tiny_shared(seed=5)):
        if weights is not None:
            reference.refresh(weights)
        done = run(reference, [group("a", asked, n=4, seed=1, max_tokens=12, ignore_eos=True)])
        wanted.append([(each.token_ids.tolist(), each.logprobs.tolist()) for _, each in sorted(done.items())])
    with started(tmp_path, how) as processes:
        ready = tmp_path / "ready"
        until(lambda: ready.exists() or any(each.poll() is not None for each in processes), "the service listens", WAIT)
        with RolloutClient(ready.read_text(), connect_timeout_s=WAIT) as client:
            found = []
            for weights in (None, tiny_shared(seed=5)):
                if weights is not None:
                    assert client.refresh(weights, via="inline").version == 1
                    status = client.weights_status(verify=True)
                    assert status["live_digest"] == status["digest"] == reference.weights.digest
                samples = client.submit(asked, sampling).result(WAIT)
                found.append([(each.token_ids.tolist(), each.logprobs.tolist()) for each in samples])
            ranks = [psutil.Process(each["pid"]) for each in client.status()["ranks"]]
        assert found == wanted and wanted[0] != wanted[1]
        os.kill(ranks[1].pid, signal.SIGKILL)
        ends = {HOSTS: [3, -signal.SIGKILL], TORCHRUN: [1], NODES: [1, 1]}
        assert [each.wait(WAIT) for each in processes] == ends[how]
        until(lambda: not any(each.is_running() for each in ranks), "no rank is left", WAIT)
    assert f"rank 1 of {len(ranks)} has ended: its connection is closed" in (tmp_path / "errors").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "rank 1 of 2 has ended: its connection is closed"), (signal.SIGSTOP, "did not answer within 3 s")],
)
def test_a_rank_that_is_lost_in_a_step_ends_the_others(tmp_path: Path, number: int, reason: str) -> None:
    with started(tmp_path, HOSTS, timeout_s=3.0) as processes:
        ready = tmp_path / "ready"
        until(lambda: ready.exists() or any(each.poll() is not None for each in processes), "the service listens", WAIT)
        with RolloutClient(ready.read_text(), connect_timeout_s=WAIT) as client:
            handle = client.submit([5, 6, 7], Sampling(n=2, max_tokens=450, ignore_eos=True))
            until(lambda: client.status()["running"] == 2, "it computes", WAIT)
            os.kill(processes[1].pid, number)
            assert processes[0].wait(WAIT) == 3
            handle.cancel()
        os.kill(processes[1].pid, signal.SIGCONT)
        assert processes[1].wait(WAIT) == (-number if number == signal.SIGKILL else 3)
    assert reason in (tmp_path / "errors").read_text()


@pytest.mark.long
@pytest.mark.parametrize("how", [HOSTS, TORCHRUN])
@pytest.mark.parametrize("stopped", [False, True])
def test_all_ranks_end_in_order(tmp_path: Path, how: str, stopped: bool) -> None:
    """SIGTERM stops all with status 0; a killed rank 0 takes the others along, which have failed then: so that a torchrun of
    another host does not wait for more of them. stopped: by the signal."""
    with started(tmp_path, how) as processes:
        ready = tmp_path / "ready"
        until(lambda: ready.exists() or any(each.poll() is not None for each in processes), "the service listens", WAIT)
        with RolloutClient(ready.read_text(), connect_timeout_s=WAIT) as client:
            ranks = [psutil.Process(each["pid"]) for each in client.status()["ranks"]]
        if stopped:
            processes[0].terminate()
        else:
            ranks[0].kill()
        statuses = [each.wait(WAIT) for each in processes]
        until(lambda: not any(each.is_running() for each in ranks), "no rank is left", WAIT)
    if how == HOSTS:
        assert statuses == ([0, 0] if stopped else [-signal.SIGKILL, 3])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--restart"], "--restart with --engine.tp-launcher torchrun: let torchrun start all ranks again"),
        (["--replicas", "2"], "--replicas with --engine.tp-launcher torchrun: start each replica with torchrun"),
        ([], "RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"),
    ],
)
def test_what_torchrun_cannot_start_is_refused(words: list[str], reason: str) -> None:
    command = [sys.executable, "-m", "rollout", "serve", "--model", "smollm2", "--engine.tp", "2"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command += ["--engine.tp-launcher", "torchrun", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and reason in done.stderr
