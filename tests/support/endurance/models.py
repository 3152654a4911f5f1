"""The two models of an endurance run, and what their weights of each version are: a function of the version alone, so that
every process can make them, and whoever has a version's number can judge what was made with it.

The tiny one is watermarked: of weights of version v no token can be drawn but those of class v (modulo CLASSES). The first
number of each hidden state is a large constant that no layer changes, and a column of the last matrix makes of it a penalty for
all other classes. All else is a Llama like others, so the KV, the batch and the seed matter.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from rollout import models
from rollout.engine.config import EngineConfig
from tests.support.tiny_folder import make_tiny_folder

Kind = Literal["tiny", "smollm2"]
Named = dict[str, torch.Tensor]

CLASSES = 16
PENALTY = 20.0
CONSTANT = 30.0
KV_TOKENS = 16_384
RANK = 2
ALPHA = 4
"""of an adapter: B A is multiplied by ALPHA / RANK"""


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
        self.scratch = scratch
        self.plan = PLANS[kind]
        if kind == "tiny":
            self.folder = scratch / "tiny"
            if not self.folder.is_dir():
                make_tiny_folder(self.folder, lively)
        else:
            self.folder = models.smollm2_folder()
        self.base: Named = load_file(self.folder / "model.safetensors")
        self.vocab_size = 259 if kind == "tiny" else 49152
        self.adapted: dict[int, int] = {}
        """the version that each version sent as an adapter is added to"""

    def config(self, seed: int) -> EngineConfig:
        """Make the configuration of a replica, and of the accountant's engine: the same arithmetic."""
        dtype = "float32" if self.kind == "tiny" else "bfloat16"
        return EngineConfig(
            model=str(self.folder), dtype=dtype, kv_tokens=KV_TOKENS, cpu_offload_gib=0, threads=1, max_num_seqs=64, seed=seed
        )

    def other_folder(self) -> Path:
        """Return a folder of the same weights whose config.json has another rope theta: another function."""
        folder = self.scratch / f"{self.kind}-other"
        if not folder.is_dir():
            folder.mkdir()
            for path in self.folder.iterdir():
                if path.name != "config.json":
                    (folder / path.name).symlink_to(path.resolve())
            config = json.loads((self.folder / "config.json").read_text())
            rope = config.get("rope_parameters") or config
            rope["rope_theta"] = 2.0 * rope["rope_theta"]
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    def weights(self, version: int) -> Named:
        """Return the weights of a version; neighbours differ in every tensor unless one is an adapter of the other."""
        if version == 0:
            return self.base
        if version in self.adapted:
            return self._merged(version)
        if self.kind == "tiny":
            drawn = torch.Generator().manual_seed(version)
            return watermarked(
                {name: t + 0.1 * torch.randn(t.shape, generator=drawn) for name, t in self.base.items()}, version
            )
        factor = 1 + (version * 37 % 101) * 2e-4
        return {name: tensor * factor for name, tensor in self.base.items()}

    def adapter(self, version: int, base: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Make A [RANK, in] and B [out, RANK] of each weight that the adapter of a version changes, behind weights of `base`.
        Of the tiny model one of them moves the watermark, exactly: its first row and column have nothing else."""
        drawn = torch.Generator().manual_seed(version)
        factors = {}
        for name in ADAPTED[self.kind]:
            out, inner = self.base[name].shape
            a, b = (torch.randn(shape, generator=drawn) * 0.1 for shape in ((RANK, inner), (out, RANK)))
            if name == "lm_head.weight":
                a[:, 0] = torch.tensor([1.0] + [0.0] * (RANK - 1))
                a[0, 1:] = 0.0
                b[:, 0] = (penalties(out, version) - penalties(out, base)) * RANK / ALPHA
            factors[name] = a, b
        return factors

    def save_adapter(self, version: int, base: int, folder: Path) -> Path:
        """Write the adapter as PEFT does, and note what it makes of the version. Returns the folder."""
        folder.mkdir(exist_ok=True)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "init_lora_weights": True}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        tensors = {}
        for name, factors in self.adapter(version, base).items():
            for letter, factor in zip("AB", factors, strict=True):
                tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_{letter}.weight"] = factor
        save_file(tensors, folder / "adapter_model.safetensors")
        self.adapted[version] = base
        return folder

    def _merged(self, version: int) -> Named:
        weights = dict(self.weights(self.adapted[version]))
        for name, (a, b) in self.adapter(version, self.adapted[version]).items():
            weights[name] = (weights[name] + (b @ a) * (ALPHA / RANK)).to(weights[name].dtype)
        return weights

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


ADAPTED: dict[Kind, tuple[str, ...]] = {
    "tiny": ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"),
    "smollm2": ("model.layers.3.self_attn.q_proj.weight", "model.layers.20.mlp.down_proj.weight"),
}
"""weights that an adapter changes"""
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
                tensor[:, 0] = penalties(len(tensor), version)
    return weights


def penalties(count: int, version: int) -> torch.Tensor:
    """Return what weights of a version have in the watermark's column: [count] fp32, 0 for the tokens of its class."""
    return torch.where(torch.arange(count) % CLASSES == version % CLASSES, 0.0, -PENALTY)
