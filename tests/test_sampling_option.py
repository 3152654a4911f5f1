"""docs/contributing/sampling-option.md leads to an option that works: a copy of the sources gets its blocks, and runs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.snippets import commands_of, snippets_of, words_of
from tests.support.worked_page import ROOT, Change, Misfit, apply, changes_of, copy_sources

NAME = "docs/contributing/sampling-option.md"
PAGE = (ROOT / NAME).read_text()
PROGRAM = """
import sys
import msgspec, numpy as np, torch
import rollout
from transformers import LlamaConfig, LlamaForCausalLM
from rollout.engine.engine import Engine, EngineConfig
from rollout.engine.values import Group, Sampling
from rollout.engine.values import OPTIONS
from rollout.identity import DRAWN_BY

folder, isa, top_a = sys.argv[1], sys.argv[2], 0.5
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval()
model.lm_head.weight.data *= 60  # so that some tokens are much more probable than others
model.save_pretrained(folder)
engine = Engine(EngineConfig(model=folder, dtype="float32", kv_tokens=2048, threads=1, isa=isa, cpu_offload_gib=0))
prompt = np.arange(1, 9, dtype=np.int32)
cases = {"cut": {"top_a": top_a}, "with others": {"top_a": top_a, "top_k": 30, "temperature": 1.2}, "off": {}}
for name, options in cases.items():
    engine.submit(Group(name, prompt, Sampling(n=4, max_tokens=12, seed=5, ignore_eos=True, **options)))
samples = []
while engine.has_work:
    samples += engine.step()
left_out = 0
for sample in samples:
    options = cases[sample.group_id]
    ids = torch.from_numpy(np.concatenate([prompt, sample.token_ids])).long()
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].double() / options.get("temperature", 1.0)
    if "top_k" in options:
        logits = logits.masked_fill(logits < logits.topk(options["top_k"]).values[:, -1:], -torch.inf)
    p = logits.softmax(-1)
    kept = p >= options.get("top_a", 0.0) * p.amax(-1, keepdim=True) ** 2
    left_out += int((~kept & (p > 0)).sum())
    want = (p * kept / (p * kept).sum(-1, keepdim=True)).gather(-1, ids[len(prompt) :, None])[:, 0].log()
    assert torch.allclose(torch.from_numpy(sample.logprobs).double(), want, atol=1e-3), (sample.group_id, sample.logprobs, want)
assert len(samples) == 12 and left_out > 1000, left_out
assert msgspec.msgpack.decode(msgspec.msgpack.encode(Sampling(top_a=top_a)), type=Sampling).top_a == top_a
assert "top_a" in DRAWN_BY and OPTIONS["top_a"].role == "truncates"
for bad in (-0.1, 1.1):
    try:
        Sampling(top_a=bad)
    except ValueError as error:
        assert f"top_a={bad}: must be in [0, 1]" in str(error)
    else:
        raise AssertionError(bad)
print("works", engine.status()["isa"], rollout.__file__)
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources to which the page was applied, its commands not yet."""
    folder = tmp_path_factory.mktemp("copied")
    copy_sources(folder)
    for change in changes_of(PAGE):
        apply(change, folder)
    return folder


def run(copied: Path, *words: str, timeout: float = 250) -> str:
    """Run Python in the copy; return what it printed."""
    environment = os.environ | {"PYTHONPATH": str(copied), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, *words], cwd=copied, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    return done.stdout


def test_the_option_of_the_page_works(copied: Path, tmp_path: Path) -> None:
    """From a group to its samples, with the reference sampler."""
    assert run(copied, "-c", PROGRAM, str(tmp_path), "torch").split() == ["works", "torch", str(copied / "rollout/__init__.py")]
    run(copied, "-m", "ruff", "check", "engine", "rollout", "tests")


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler for the kernels of the copy")
def test_the_kernels_of_the_page_do_what_its_reference_does(copied: Path, tmp_path: Path) -> None:
    """By the commands at the end of the page."""
    assert run(copied, "-c", PROGRAM, str(tmp_path), "auto", timeout=1500).startswith("works")
    (commands,) = [each for each in snippets_of(NAME, PAGE) if each.mark("elsewhere") is not None]
    run(copied, "-m", "ruff", "format", "engine", "rollout", "tests")
    for command in commands_of(commands):
        run(copied, *words_of(command)[1:], timeout=3000)
    run(copied, "-m", "mypy", timeout=600)


def test_a_page_that_no_longer_fits_is_seen(copied: Path, tmp_path: Path) -> None:
    """Each block names lines that stand in the sources once; applied twice, none fits."""
    changes = changes_of(PAGE)
    files = {change.path for change in changes if change.path.startswith("engine/")}
    assert len(changes) > 12 and len(files) == 4 and files >= {"engine/values/sampling.py", "engine/cpu/c/sampling.c"}
    (tmp_path / "a.py").write_text("one\ntwo\none\n")
    for old in ("one\n", "three\n"):
        with pytest.raises(Misfit, match=re.escape("a.py has")):
            apply(Change("a.py", old, ""), tmp_path)
    apply(Change("a.py", "two\none\n", "2\n"), tmp_path)
    assert (tmp_path / "a.py").read_text() == "one\n2\n"
    with pytest.raises(Misfit, match="without a place"):
        changes_of("```diff\n--- a.py\n+new\n```\n")
