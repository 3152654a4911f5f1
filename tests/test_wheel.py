"""An installed wheel runs natively where there is no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from engine.cpu.isa import ISAS

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
PROGRAM = """
import json, numpy as np, torch
from transformers import AutoConfig, AutoModelForCausalLM
import rollout
from rollout.engine import Engine, EngineConfig, Group, Sampling, cpu
from rollout.engine.cpu.kernels import Kernels, choose
from rollout.engine.cpu.isa import here
from rollout.engine.forward.model import Model

sizes = dict(hidden_size=96, intermediate_size=224, num_attention_heads=6, num_key_value_heads=2, head_dim=32, vocab_size=208)
config = AutoConfig.for_model("llama", num_hidden_layers=2, max_position_embeddings=512, **sizes)
module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
engine = Engine(EngineConfig(kv_tokens=1024, cpu_offload_gib=0, max_num_seqs=8, threads=1), Model(module, "tiny"))
engine.submit(Group("g", np.arange(3, 20, dtype=np.int32), Sampling(n=2, max_tokens=6, ignore_eos=True, seed=1)))
samples = []
while engine.has_work:
    samples += engine.step()
status = engine.status()
paths = {}
for isa in here():
    try:
        paths[isa] = str(Kernels(isa).path)
    except Exception as error:
        paths[isa] = str(error)
print(json.dumps({"package": cpu.__file__, "samples": len(samples), "paths": paths, "why": choose().why,
                  **{name: status[name] for name in ("isa", "attention", "arithmetic")}}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """of a copy of this tree"""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("engine", "transport", "rollout"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    done = subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=tree, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with what it depends on from where this test has it."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]))
    return folder


def run(installed: Path, cache: Path) -> dict[str, object]:
    environment = {"PATH": str(installed), "HOME": str(cache), "ROLLOUT_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [installed / "bin" / "python", "-c", PROGRAM], cwd=cache, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler to build the wheel with")
def test_without_a_compiler_an_installed_wheel_runs_natively(wheel: Path, installed: Path, tmp_path: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {"rollout"}, "packages that others may have under the same name"
    assert not any("/bench/" in name for name in zipfile.ZipFile(wheel).namelist())
    assert wheel.name.split("-")[2:4] == ["py3", "none"] and os.uname().machine in wheel.name
    told = run(installed, tmp_path)
    assert str(installed) in str(told["package"]) and told["samples"] == 2 and told["attention"] == "native"
    assert told["isa"] in ISAS and not (tmp_path / "native").exists(), "nothing was compiled"
    paths = told["paths"]
    assert isinstance(paths, dict)
    for isa, path in paths.items():
        assert ("/engine/cpu/lib/kernels-" in path) == (isa in ISAS), path

    # the negative control, and the guard against libraries of other sources: another byte in a C file
    (source,) = installed.glob("lib/python*/site-packages/rollout/engine/cpu/c/sampling.c")
    source.write_text(source.read_text() + "\n")
    told = run(installed, tmp_path)
    assert told["isa"] == "torch" and told["attention"] == "reference" and "no C compiler" in str(told["why"])
    assert str(told["arithmetic"]).startswith("torch/")
