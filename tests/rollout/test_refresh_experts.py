"""Refreshes of mixtures: experts [E, …] by every way, whole or as differences, undone and merged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.client.api import RolloutClient
from rollout.engine.config import WeightOffload
from rollout.engine.engine import Engine
from rollout.engine.values import WeightUpdate
from rollout.engine.weights.staging import source_of
from rollout.engine.weights.tensors import InvalidWeights, describe, with_digest
from rollout.models import stacked_experts
from rollout.transport.errors import RolloutError, WeightsRefused
from rollout.transport.loopback import LoopbackService
from rollout.transport.weights import Via, delta
from tests.support.broken_commit import PLACES, fail_commit
from tests.support.families import build
from tests.support.tiny import tiny_engine
from tests.support.toy import group, run
from tests.support.wire import serving

WAIT = 60.0
KINDS = ("qwen3_moe", "gpt_oss")
"""[E, outputs, inputs]; [E, inputs, outputs] with biases"""
LAST = "model.layers.3.mlp.experts.down_proj"


def moved(kind: str, step: int = 1) -> PreTrainedModel:
    """The model after some steps: experts moved a little, all but expert 1, which no token chose."""
    made = build(kind, torch.bfloat16)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".experts." in name:
                before = parameter[1].clone()
                parameter.mul_(1 + step / 64)
                parameter[1] = before
    return made


@contextmanager
def served(kind: str, **config: Any) -> Iterator[tuple[Engine, RolloutClient]]:
    engine, end = tiny_engine(dtype="bfloat16", model=build(kind, torch.bfloat16), **config), LoopbackService()
    with serving(engine, end), RolloutClient(transport=end.connect(), connect_timeout_s=WAIT) as client:
        yield engine, client


def samples(engine: Engine) -> list[bytes]:
    asked = group("g", [9, 8, 7, 6], n=3, max_tokens=8, seed=1, ignore_eos=True)
    return [sample.logprobs.tobytes() for _, sample in sorted(run(engine, [asked]).items())]


def fresh(model: PreTrainedModel) -> Engine:
    return tiny_engine(dtype="bfloat16", model=model)


@pytest.mark.parametrize("kind", KINDS)
def test_every_way(kind: str, tmp_path: Path) -> None:
    """Digests and samples are those of an engine that began with these weights; a difference is sent for what moved alone."""
    ways: tuple[Via, ...] = ("shm", "inline", "gloo", "delta", "delta", "files")
    with served(kind) as (engine, client):
        for version, via in enumerate(ways, 1):
            model: Any = moved(kind, version)
            if via == "files":
                model.save_pretrained(tmp_path, save_original_format=False)
            done = client.refresh(tmp_path if via == "files" else model, version=version, via=via, timeout=WAIT)
            assert done.version == version and done.via == via or (via == "delta" and version == 4), done
            assert done.digest == engine.weights.live_digest() == fresh(moved(kind, version)).weights.digest, via
        assert engine.version == len(ways)
    assert samples(engine) == samples(fresh(moved(kind, len(ways))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_of_a_lost_expert_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the service adds all differences but those of one expert."""
    with served(kind) as (engine, client):
        client.refresh(moved(kind, 1), via="delta")
        before, decode, slices = engine.weights.live_digest(), delta.decode, iter(range(10_000))
        size = build(kind, torch.bfloat16).get_parameter(LAST)[0].numel()

        def lossy(head: np.ndarray, rest: np.ndarray, values: np.ndarray) -> None:
            kept = values[:size].copy()
            decode(head, rest, values)
            if len(values) == 4 * size and next(slices) == 2:
                values[:size] = kept

        monkeypatch.setattr(delta, "decode", lossy)
        with pytest.raises(WeightsRefused, match=r"experts.*digest"):
            client.refresh(moved(kind, 2), via="delta")
        assert engine.version == 1 and engine.weights.live_digest() == before
        monkeypatch.undo()
        assert client.refresh(moved(kind, 2), via="delta").digest == fresh(moved(kind, 2)).weights.digest


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_with_nan_leaves_all_of_them(kind: str) -> None:
    with served(kind) as (engine, client):
        before = engine.weights.live_digest()
        bad = moved(kind)
        with torch.no_grad():
            bad.get_parameter(LAST)[3, -1, -1] = torch.nan
        with pytest.raises(WeightsRefused, match=rf"{LAST}.*NaN"):
            client.refresh(bad)
        assert engine.version == 0 and engine.weights.live_digest() == before
        assert client.refresh(moved(kind)).version == 1


@pytest.mark.parametrize("where", PLACES)
def test_a_commit_that_fails_in_the_experts_is_undone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two phases: staged and checked first, exchanged later, and back again if that fails."""
    engine = fresh(build("gpt_oss", torch.bfloat16))
    before, drawn = engine.weights.live_digest(), samples(engine)
    described = [describe(name, tensor) for name, tensor in moved("gpt_oss").named_parameters()]
    staging = engine.stage(WeightUpdate([with_digest(*each) for each in described]))
    staging.feed_all(source_of(data for _, data in described))
    assert staging.complete and engine.weights.live_digest() == before, "nothing is live yet"
    at = next(i for i, (info, _) in enumerate(described) if "layers.2.mlp.experts.gate_up_proj" in info.name)
    fail_commit(monkeypatch, at, where)
    with pytest.raises(MemoryError):
        engine.commit(staging)
    staging.close()
    assert engine.version == 0 and engine.weights.live_digest() == before and samples(engine) == drawn


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_in_every_size(kind: str) -> None:
    """Those of the status, which a fleet and the pools go by, and of the first line of `rollout serve`."""
    made = build(kind, torch.bfloat16)
    experts = sum(each.nbytes for name, each in made.named_parameters() if ".experts." in name)
    others = sum(each.nbytes for name, each in made.named_parameters() if ".experts." not in name)
    engine = fresh(made)
    assert experts > others / 4 and engine.weights.inventory.nbytes >= experts + others
    assert experts + others <= engine.status()["weights"]["resident_bytes"] < 1.01 * (experts + others)


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_layers(kind: str) -> None:
    """Experts are in host memory with the rest of their layer: equal bits, also after a refresh of the masters."""
    offload = WeightOffload(group_size=2, num_in_group=1, prefetch_step=1)
    engine = tiny_engine(dtype="bfloat16", model=build(kind, torch.bfloat16), weight_offload=offload)
    assert samples(engine) == samples(fresh(build(kind, torch.bfloat16)))
    layer = sum(p.nbytes for p in build(kind, torch.bfloat16).get_submodule("model.layers.1").parameters())
    assert engine.weights.offloaded_bytes >= 2 * layer, "experts count"
    engine.refresh(moved(kind))
    assert samples(engine) == samples(fresh(moved(kind))) != samples(fresh(build(kind, torch.bfloat16)))


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_names_of_published_checkpoints(kind: str, tmp_path: Path) -> None:
    """A folder as published is refused by name with the fix; the mapping makes the module's tensors of it."""
    from safetensors.torch import load_file

    wanted: Any = moved(kind)
    wanted.save_pretrained(tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    stacked = stacked_experts(reversed(published.items()), wanted.config.model_type)
    own = {name: tensor for name, tensor in wanted.state_dict().items() if name in stacked}
    assert own.keys() == stacked.keys() and all(torch.equal(stacked[name], own[name]) for name in own)
    assert stacked_experts(stacked, wanted.config.model_type).keys() == stacked.keys(), "which may be done again"
    with served(kind) as (engine, client):
        if kind != "gpt_oss":
            with pytest.raises(
                RolloutError,
                match=r"(experts\.0\.|lists 807 tensors).*all .*in one.*stacked_experts.*save_original_format=False",
            ):
                client.refresh(tmp_path, via="files")
            with pytest.raises(RolloutError, match="stacked_experts"):
                client.refresh(published)
        assert engine.version == 0
        assert client.refresh(stacked).digest == fresh(wanted).weights.digest


def test_incomplete_experts_are_refused() -> None:
    one = torch.zeros(2, 2)
    names = [f"model.layers.0.mlp.experts.{e}.{part}_proj.weight" for e in range(3) for part in ("gate", "up", "down")]
    with pytest.raises(ValueError, match=r"gate_up_proj: its experts are not complete.*gate_proj.*3.*up_proj.*2"):
        stacked_experts({name: one for name in names if name != "model.layers.0.mlp.experts.1.up_proj.weight"}, "qwen3_moe")
    engine = fresh(build("qwen3_moe", torch.bfloat16))
    fewer = {name: tensor[:3] if ".experts." in name else tensor for name, tensor in moved("qwen3_moe").named_parameters()}
    with pytest.raises(InvalidWeights, match=r"experts.gate_up_proj.*has shape \(3, 64, 64\), but \(4, 64, 64\)"):
        engine.refresh(fewer)
    dense = {"model.layers.0.mlp.experts.0.up_proj.weight": one}
    with pytest.raises(InvalidWeights, match="no tensor of this name; save_pretrained"):
        fresh(build("llama", torch.bfloat16)).refresh(dense, partial=True)


# ── adapters ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def adapted(kind: str, **config: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **config}
    return peft.get_peft_model(build(kind, torch.bfloat16), peft.LoraConfig(**settings))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_experts_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """PEFT's target_parameters. What is merged may be sent; adapters on other layers of a mixture are served."""
    on_experts = adapted(kind, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    on_experts.save_pretrained(tmp_path)
    with served(kind) as (engine, client):
        base = engine.weights.digest
        for source in (on_experts, tmp_path):
            with pytest.raises(WeightsRefused, match=r"target_parameters.*merge_and_unload"):
                client.refresh_lora(source)
        assert engine.version == 0
        done = client.refresh_lora(adapted(kind))
        assert done.digest == fresh(adapted(kind).merge_and_unload()).weights.digest != base
        merged = on_experts.merge_and_unload()
        assert client.refresh(merged).digest == fresh(merged).weights.digest != done.digest
