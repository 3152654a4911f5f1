"""Several ranks with a GPU each: processes, NCCL, compiled kernels. Needs two devices; with four, four ranks run, too. None of
it has run yet: begin with `-x`, and read the log of the first failure."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engine.engine import Engine
from rollout.engine.values import Group, RankLost
from rollout.exact import sample_logprobs, use_exact
from tests.support.on_device import DEVICE, agree
from tests.support.ranks import bits, ranked_engine, saved, tiny_shared
from tests.support.toy import group, run
from tests.support.waiting import until

COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(COUNT < 2, reason="two CUDA devices"),
]
RANKS = [tp for tp in (2, 4, 8) if tp <= COUNT] or [2]
NAMES = ("llama", "qwen3_moe", "qwen3_5_text")


def engine(folder: str, tp: int, dtype: str = "bfloat16", **options: Any) -> Engine:
    if tp == 1 and not options.get("exact"):
        options["tree_sums"] = False
    return ranked_engine(folder, tp, dtype, device=DEVICE, attention="triton", warm_up=False, **options)


def asked(tag: str = "") -> list[Group]:
    return [
        group(f"a{tag}", range(3, 60), n=4, max_tokens=16, ignore_eos=True),
        group(f"b{tag}", [9, 8], n=2, max_tokens=24, temperature=0.7, top_p=0.9, ignore_eos=True),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_samples_do_not_depend_on_the_number_of_ranks(tmp_path: Path, name: str, dtype: str) -> None:
    """With `exact`, to the bit; before and after a refresh, and after sleeps of both kinds."""
    folder, found, new = saved(tmp_path, dtype, name), {}, tiny_shared(name, seed=5)
    for tp in (1, *RANKS):
        with closing(engine(folder, tp, dtype, exact=True)) as made:
            first = bits(run(made, asked()))
            made.refresh(new)
            second = bits(run(made, asked("refreshed")))
            made.sleep()
            made.wake()
            assert made.weights.live_digest() == made.weights.digest
            made.sleep(2)
            made.wake()
            made.refresh(new)
            third = [each[:2] for each in bits(run(made, asked("refreshed"))).values()]
            assert third == [each[:2] for each in second.values()]
            found[tp] = first, second, made.arithmetic, made.weights.digest
    assert all(each == found[1] for each in found.values()) and found[1][2].endswith("+tree8/1")


def test_warmed_up_and_without_fused_layers(tmp_path: Path) -> None:
    """All ranks warm up together."""
    folder, found = saved(tmp_path, "bfloat16"), []
    for tp in (1, 2):
        with closing(ranked_engine(folder, tp, "bfloat16", device=DEVICE, exact=True, fused_layers=False)) as made:
            found.append(bits(run(made, asked())))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_library_s_products_agree_up_to_rounding(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, "float32", name)
    with closing(engine(folder, 1, "float32")) as one, closing(engine(folder, 2, "float32")) as two:
        assert two.arithmetic.endswith("+ranks2/1")
        agree(run(one, asked()), run(two, asked()))


def test_a_trainer_has_the_bits_of_two_ranks(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bfloat16")
    with closing(engine(folder, 2, exact=True)) as made:
        samples = run(made, asked()[:1])
        model: Any = tiny_shared("llama", torch.bfloat16).to(DEVICE)
        assert use_exact(model, made.arithmetic, block_size=8).arithmetic == made.arithmetic
    with torch.no_grad():
        scores = sample_logprobs(model, [(asked()[0].prompt, each.token_ids) for each in samples.values()])
    for got, each in zip(scores, samples.values(), strict=True):
        assert got.cpu().numpy().tobytes() == each.logprobs.tobytes()


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "has ended: killed by SIGKILL"), (signal.SIGSTOP, "did not")])
def test_a_rank_that_is_lost_in_a_step_ends_the_replica(tmp_path: Path, number: int, reason: str) -> None:
    """Rank 0 waits for a device that waits in NCCL; the communicator is given up."""
    made = engine(saved(tmp_path, "bfloat16"), 2, tp_timeout_s=3.0)
    pid = made.worker.ranks()[1]["pid"]
    made.submit(group("a", range(3, 9), n=2, max_tokens=400, ignore_eos=True))
    for _ in range(4):
        made.step()
    os.kill(pid, number)
    with pytest.raises(RankLost, match=reason):
        until(lambda: made.step() and False, "the rank is missed", 60)
    made.close()
    torch.cuda.synchronize()


def test_a_refresh_that_is_bad_leaves_the_old_version(tmp_path: Path) -> None:
    with closing(engine(saved(tmp_path, "bfloat16"), 2)) as made:
        digest, bad = made.weights.digest, tiny_shared(seed=7)
        bad.lm_head.weight.data[-1] = torch.nan
        with pytest.raises(ValueError, match="NaN"):
            made.refresh(bad)
        assert made.weights.live_digest() == digest and made.version == 0
