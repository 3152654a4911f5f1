"""Every way of a refresh into a service of two ranks, each a process: with a tensor that is bad on one rank, or that one rank
cannot take, both keep the old version, to the bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.client.api import RolloutClient
from rollout.config import Config, ServiceConfig, dump
from rollout.engine.engine import Engine
from rollout.engine.values import Refreshed, Sampling
from rollout.transport.errors import RolloutError
from tests.support.adapters import PREFIX, write
from tests.support.configs import engine_config
from tests.support.rank_service import FAILS_AT
from tests.support.ranks import ranked_engine, saved, tiny_shared
from tests.support.toy import group, run
from tests.support.waiting import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux"),
]
WAYS = ["inline", "shm", "files", "partial", "delta", "gloo"]
SMALL = {"block_size": 8, "kv_tokens": 1024, "max_num_seqs": 12, "max_batch_tokens": 64, "cpu_offload_gib": 0, "drafts": 0}
ROOT = Path(__file__).parents[2]
Bits = list[tuple[bytes, bytes]]


class Served:
    """A service of two ranks, and one rank in this process, which has its bits. fault: names the rank whose commits fail."""

    def __init__(self, name: str, client: RolloutClient, reference: Engine, folder: Path) -> None:
        self.name, self.client, self.reference = name, client, reference
        self.folder, self.fault = folder, folder / "fault"

    def push(self, way: str, tensors: dict[str, torch.Tensor]) -> Refreshed:
        match way:
            case "files":
                made = tiny_shared(self.name)
                made.save_pretrained(self.folder / "pushed", state_dict=dict(tensors), save_original_format=False)
                return self.client.refresh(self.folder / "pushed", via="files")
            case "partial":
                return self.client.refresh(some_of(tensors), via="inline", partial=True)
            case _:
                return self.client.refresh(tensors, via=way)

    def samples(self) -> Bits:
        """Return what the live weights sample."""
        handle = self.client.submit(np.arange(3, 40, dtype=np.int32), Sampling(n=4, seed=1, max_tokens=12, ignore_eos=True))
        return bits_of(handle.result(60.0))

    def wanted(self, tensors: dict[str, torch.Tensor]) -> Bits:
        """Return what one rank samples."""
        self.reference.refresh(tensors)
        asked = group("a", range(3, 40), n=4, seed=1, max_tokens=12, ignore_eos=True)
        return bits_of([each for _, each in sorted(run(self.reference, [asked]).items())])

    def state(self) -> dict[str, Any]:
        status = self.client.weights_status(verify=True)
        assert status["live_digest"] == status["digest"]
        return {name: status[name] for name in ("version", "digest")}


def bits_of(samples: Any) -> Bits:
    return [(each.token_ids.tobytes(), each.logprobs.tobytes()) for each in sorted(samples, key=lambda each: each.index)]


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "qwen3_5_moe_text"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ranks")
    model, ready = saved(folder / "model", "float32", request.param), folder / "ready"
    engine = engine_config(model=model, dtype="float32", tp=2, threads=1, **SMALL)
    (folder / "serve.toml").write_text(dump(Config(engine=engine, service=ServiceConfig(endpoint="tcp://127.0.0.1:*"))))
    command = [sys.executable, "-m", "tests.support.rank_service", folder / "serve.toml", ready, folder / "fault"]
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdin=subprocess.DEVNULL) as service:
        try:
            until(lambda: ready.exists() or service.poll() is not None, "the service listens", 120.0)
            with RolloutClient(ready.read_text(), connect_timeout_s=60.0) as client:
                reference = ranked_engine(model, 1, "float32", **SMALL)
                yield Served(request.param, client, reference, folder)
                reference.close()
        finally:
            service.terminate()
            service.wait(60.0)


def some_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a partial refresh sends."""
    return {name: tensor for name, tensor in tensors.items() if FAILS_AT in name or "A_log" in name}


def tensors_of(name: str, seed: int) -> dict[str, torch.Tensor]:
    return {key: tensor.detach() for key, tensor in tiny_shared(name, seed=seed).state_dict().items()}


def bad_on_last_rank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Spoil the last number of a tensor of the second MLP, which is in the part of rank 1 alone."""
    name = [name for name in tensors if FAILS_AT in name and "down_proj" in name][-1]
    spoilt = tensors[name].clone()
    spoilt.view(-1)[-1] = torch.nan
    return tensors | {name: spoilt}


FAULTS = {"bad": "NaN", "1": "rank 1 could not take the new weights, and all ranks keep the old ones", "0": "injected"}
"""a tensor that is bad in the part of rank 1, and a commit that fails on a rank: what the trainer is told"""


@pytest.mark.parametrize("way", WAYS)
def test_a_refresh_that_fails_on_one_rank_leaves_the_old_version_on_both(served: Served, way: str) -> None:
    """A sample that runs meanwhile has one version. The same push without the fault changes the samples."""
    old, new = tensors_of(served.name, 10), tensors_of(served.name, 11)
    if way == "delta":  # which is for few changes
        new = {name: torch.where(torch.arange(each.shape[-1]) % 16 == 15, new[name], each) for name, each in old.items()}
    for fault, reason in FAULTS.items():
        served.push("delta" if way == "delta" else "inline", old)  # what a difference is against
        state, samples = served.state(), served.samples()
        assert samples == served.wanted(old)
        running = served.client.submit([5, 6, 7], Sampling(n=2, seed=2, max_tokens=400, ignore_eos=True))
        if fault != "bad":
            served.fault.write_text(fault)
        with pytest.raises(RolloutError, match=reason):
            served.push(way, bad_on_last_rank(new) if fault == "bad" else new)
        served.fault.unlink(missing_ok=True)
        assert served.state() == state and served.samples() == samples
        running.cancel()
        assert all(each.weight_versions == [(0, state["version"])] for each in running.result(60.0) if len(each.token_ids))
    served.push("delta" if way == "delta" else "inline", old)
    assert served.samples() == samples
    assert served.push(way, new).via == ("inline" if way == "partial" else way)
    assert served.samples() == served.wanted(old | some_of(new) if way == "partial" else new) != samples


def test_an_adapter_that_fails_on_one_rank_leaves_the_old_version_on_both(served: Served, tmp_path: Path) -> None:
    old = tensors_of(served.name, 10)
    served.push("inline", old)
    state, samples = served.state(), served.samples()
    name = next(name for name in old if f"{FAILS_AT}." in name and "down_proj" in name and old[name].ndim == 2)
    a, b = torch.randn(4, old[name].shape[1]), torch.randn(len(old[name]), 4)
    path = PREFIX + name.removesuffix(".weight")
    good = write(tmp_path / "good", {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b})
    bad = write(tmp_path / "bad", {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b.clone().fill_(torch.nan)})
    for fault, reason in FAULTS.items():
        if fault != "bad":
            served.fault.write_text(fault)
        with pytest.raises(RolloutError, match=reason):
            served.client.refresh_lora(bad if fault == "bad" else good)
        served.fault.unlink(missing_ok=True)
        assert served.state() == state and served.samples() == samples
    served.client.refresh_lora(good)
    merged = old | {name: old[name] + b @ a * 2.0}
    assert served.samples() == served.wanted(merged) != samples
