"""Recurrent states and experts on a device: captured graphs of hybrids, and exact services of mixtures. The kernels themselves
are in tests/engine/test_recurrence_triton.py and tests/engine/test_experts_triton.py, compiled where there is a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollout.engine.cuda.recurrence import TritonMixers, bytes_of_decode
from rollout.engine.engine import Engine
from rollout.engine.forward.model import UnsupportedModel
from rollout.exact import sample_logprobs, use_exact
from tests.support.equivalence import assert_same
from tests.support.families import build
from tests.support.on_device import DEVICE, agree, captured_of, engine, lockstep, needs_cuda
from tests.support.toy import group, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), needs_cuda]
HYBRIDS = ["qwen3_5_text", "lfm2", "falcon_h1", "nemotron_h", "kimi_linear"]
MIXED = ["nemotron_h", "kimi_linear"]
"""of these: with experts"""
MIXTURES = ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "minimax_m2"]


def crowd() -> list[Any]:
    return [group(f"g{i}", range(5, 15 + 13 * i), n=3, max_tokens=6 + 3 * i, seed=i, ignore_eos=True) for i in range(5)]


def made(name: str, dtype: str = "float32", **options: Any) -> Engine:
    """Make an engine of a hybrid. Skips what this release of transformers has in another form."""
    try:
        return engine(model=build(name, getattr(torch, dtype)), dtype=dtype, **options)
    except UnsupportedModel as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_replayed_from_graphs(name: str) -> None:
    """Replayed is eager, forks included: to the bit in bf16, and near it in any batch in fp32. (Experts in fp32 wait for the
    device: torch's grouped products take 16 bits.)"""
    options: dict[str, Any] = {"max_num_seqs": 24}
    eager, graphed = (made(name, "bfloat16", cuda_graphs=graphs, **options) for graphs in (False, True))
    assert_same(run(eager, lockstep()), run(graphed, lockstep()))
    assert captured_of(graphed), "its forward could not be captured"
    if name not in MIXED:
        agree(run(made(name, cuda_graphs=False, **options), crowd()), run(made(name, **options), crowd()))
    assert f"+{TritonMixers.arithmetic}" in graphed.arithmetic


@pytest.mark.parametrize("name", HYBRIDS[:3])
def test_states_survive_pressure(name: str) -> None:
    """Offloaded, restored, reset and prefilled again."""
    roomy, tight = made(name), made(name, kv_tokens=320, cpu_offload_gib=0.01)
    agree(run(roomy, crowd()), run(tight, crowd()))


def test_a_frozen_state_is_seen() -> None:
    """The negative control: graphs that see the rows of the step that was captured."""
    one, other = (made("qwen3_5_text", max_num_seqs=24) for _ in range(2))
    graphs: Any = other.worker.graphs
    send = graphs._send_state_rows
    graphs._send_state_rows = lambda rows, end: None if graphs._replays else send(rows, end)
    with pytest.raises(AssertionError):
        agree(run(one, crowd()), run(other, crowd()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MIXTURES)
def test_exact_mixtures_are_the_same_alone_and_in_a_trainer(name: str, dtype: str) -> None:
    served = engine(model=build(name, getattr(torch, dtype)), dtype=dtype, exact=True)
    many = run(served, crowd())
    assert captured_of(served), "its forward could not be captured"
    for each in crowd():
        for key, sample in run(served, [each]).items():
            assert_same({key: sample}, {key: many[key]})
    trainer = build(name, getattr(torch, dtype)).to(DEVICE)
    use_exact(trainer, served.arithmetic, block_size=served.config.block_tokens)
    prompts = {each.id: each.prompt for each in crowd()}
    with torch.no_grad():
        found = sample_logprobs(trainer, [(np.asarray(prompts[key[0]]), sample.token_ids) for key, sample in many.items()])
    for sample, logprobs in zip(many.values(), found, strict=True):
        np.testing.assert_array_equal(logprobs.cpu().numpy(), sample.logprobs)


def seconds(launch: Any, rounds: int = 20) -> float:
    """Return the seconds of one of several launches, after two."""
    launch(), launch()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in "12")
    began.record()
    for _ in range(rounds):
        launch()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1000 / rounds


def test_the_share_of_the_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    """256 rows of a layer of Qwen3.5 that decode, against a copy of the same bytes: printed, for docs/benchmarks/cuda.md."""
    rows, heads, size = 256, 16, 128
    states = torch.zeros(rows, heads, size, size, device=DEVICE)
    query, key, value = (torch.randn(rows, heads, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    g, beta = -torch.rand(rows, heads, device=DEVICE), torch.rand(rows, heads, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.arange(rows + 1, device=DEVICE)
    table, mixers = torch.stack([slots] * 3), TritonMixers()
    ours = seconds(lambda: mixers.delta_rule(query, key, value, g, beta, states, table, l2norm=True))
    copied = torch.empty_like(states)
    copy = seconds(lambda: copied.copy_(states))
    moved = rows * bytes_of_decode([(heads, size, size)], [], 2)
    with capsys.disabled():
        print(f"\ndelta rule {moved / ours / 1e9:.0f} GB/s, a copy {moved / copy / 1e9:.0f} GB/s: {copy / ours:.2f}")
    assert ours > 0 and copy > 0
