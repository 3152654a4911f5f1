"""The two models of an endurance run, and what their weights of each version are: a function of the version alone, so that
every process can make them, and whoever has a version's number can judge what was made with it.

The tiny one is watermarked: of weights of version v no token can be drawn but those of class v (modulo CLASSES). The first
number of each hidden state is a large constant that no layer changes, and a column of the last matrix makes of it a penalty for
all other classes. All else is a Llama like others, so the KV, the batch and the seed matter.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import load_file

from engine.config import EngineConfig
from rollout import models
from tests.support.tiny_folder import make_tiny_folder

Kind = Literal["tiny", "smollm2"]
Named = dict[str, torch.Tensor]

CLASSES = 16
PENALTY = 20.0
CONSTANT = 30.0
KV_TOKENS = 16_384


class Plan(NamedTuple):
    """What a run asks of a model: sizes and times that two cores serve."""

    longest: int
    """tokens of a sample"""
    open_groups: int
    """of a trainer, at a time"""
    refresh_s: float
    break_s: float
    """mean seconds between two pushes that hold, and between two that must not"""
    judged: float
    """share of the samples that are scored again by an engine of the accountant's own"""


PLANS: dict[Kind, Plan] = {
    "tiny": Plan(longest=96, open_groups=4, refresh_s=8.0, break_s=4.0, judged=0.2),
    "smollm2": Plan(longest=24, open_groups=2, refresh_s=40.0, break_s=9.0, judged=0.1),
}


class TestModel:
    """A model's folder, and its weights of each version. Version 0 is what lies in the folder."""

    __test__ = False

    def __init__(self, kind: Kind, scratch: Path) -> None:
        self.kind: Kind = kind
        self.plan = PLANS[kind]
        if kind == "tiny":
            self.folder = scratch / "tiny"
            if not self.folder.is_dir():
                make_tiny_folder(self.folder, lively)
        else:
            self.folder = models.smollm2_folder()
        self.base: Named = load_file(self.folder / "model.safetensors")
        self.vocab_size = 259 if kind == "tiny" else 49152

    def config(self, seed: int) -> EngineConfig:
        """Make the configuration of a replica, and of the accountant's engine: the same arithmetic."""
        dtype = "float32" if self.kind == "tiny" else "bfloat16"
        return EngineConfig(
            model=str(self.folder), dtype=dtype, kv_tokens=KV_TOKENS, cpu_offload_gib=0, threads=1, max_num_seqs=64, seed=seed
        )

    def weights(self, version: int) -> Named:
        """Return the weights of a version; neighbours differ in every tensor."""
        if version == 0:
            return self.base
        if self.kind == "tiny":
            drawn = torch.Generator().manual_seed(version)
            return watermarked(
                {name: t + 0.1 * torch.randn(t.shape, generator=drawn) for name, t in self.base.items()}, version
            )
        factor = 1 + (version * 37 % 101) * 2e-4
        return {name: tensor * factor for name, tensor in self.base.items()}

    def broken(self, version: int, how: str, rng: random.Random) -> Named:
        """Make weights that must be refused. how: one of BROKEN."""
        weights = dict(self.weights(version))
        name = rng.choice([name for name, tensor in weights.items() if tensor.ndim == 2])
        tensor = weights[name]
        match how:
            case "nan" | "inf":
                weights[name] = tensor.clone()
                weights[name].view(-1)[rng.randrange(tensor.numel())] = float(how)
            case "missing":
                del weights[name]
            case "shape":
                weights[name] = tensor[:-1].clone()
            case "unknown":
                weights["model.layers.0.nobody.weight"] = torch.zeros(3)
            case _:
                raise ValueError(how)
        return weights

    def wrong_token(self, token: int, version: int) -> bool:
        """Whether weights of this version cannot have made the token."""
        return self.kind == "tiny" and token % CLASSES != version % CLASSES


BROKEN = ("nan", "inf", "missing", "shape", "unknown")


def lively(weights: Named) -> Named:
    """Scale the initial weights so that each token depends on those before, and mark them."""
    with torch.no_grad():
        for name, tensor in weights.items():
            if tensor.ndim == 2:
                tensor *= {"model.embed_tokens.weight": 150.0, "lm_head.weight": 50.0}.get(name, 8.0)
    return watermarked(weights)


def watermarked(weights: Named, version: int = 0) -> Named:
    """Mark weights of the tiny model in place. Returns them."""
    with torch.no_grad():
        for name, tensor in weights.items():
            if name == "model.embed_tokens.weight":
                tensor[:, 0] = CONSTANT
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor[0] = 0.0
            elif name == "model.norm.weight":
                tensor[0] = 1.0
            elif name == "lm_head.weight":
                ids = torch.arange(len(tensor))
                tensor[:, 0] = torch.where(ids % CLASSES == version % CLASSES, 0.0, -PENALTY)
    return weights
