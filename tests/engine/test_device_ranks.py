"""Several ranks with a device each, without a GPU: their layers run CUDA's kernels in Triton's interpreter, and they exchange
over gloo. Samples of 1, 2 and 4 ranks are equal, to the bit, with `exact`; all ranks take a refresh, or none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.build import sums_of  # noqa: E402
from rollout.engine.cuda import reduce, tiles  # noqa: E402
from rollout.engine.cuda.fused import FusedDecoder  # noqa: E402
from rollout.engine.cuda.reduce import DeviceExchange  # noqa: E402
from rollout.engine.engine import Engine  # noqa: E402
from rollout.engine.forward.summed import SLICES, Summed, sum_slices
from rollout.engine.parallel.devices import device_of_rank  # noqa: E402
from rollout.engine.parallel.follower import Follower  # noqa: E402
from rollout.engine.parallel.ranks import Ranks, check_alike  # noqa: E402
from rollout.engine.values import Group, RankLost  # noqa: E402
from rollout.engine.weights.buffers import RefreshBuffers  # noqa: E402
from rollout.engine.weights.layer_cuts import summed_products  # noqa: E402
from rollout.engine.weights.tensors import InvalidWeights  # noqa: E402
from rollout.exact import on_device, sample_logprobs  # noqa: E402
from rollout.exact.attention import _attending, register  # noqa: E402
from rollout.exact.attention_on_device import DeviceAttention  # noqa: E402
from rollout.exact.fused import use_fused_layers  # noqa: E402
from tests.support import ranks as of_ranks  # noqa: E402
from tests.support.configs import engine_config  # noqa: E402
from tests.support.device_ranks import device_ranks, exchanges, on_all, weights_as_on_a_device  # noqa: E402
from tests.support.ranks import bits, ranked_engine, saved, tiny_shared  # noqa: E402
from tests.support.samebits import torchs_log_softmax  # noqa: E402
from tests.support.toy import group, run  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU plays the devices: kernels need the interpreter"),
]
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
EXACT = {"exact": True, "attention": "triton"}


class Replicas(NamedTuple):
    name: str
    of: dict[int, Engine]

    def weights(self, seed: int) -> PreTrainedModel:
        return tiny_shared(self.name, seed=seed)


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CHUNK_TOKENS", 16)
        for name in ("llama", "qwen3_moe", "qwen3_5_text"):
            wide = {"moe_intermediate_size": 128} if "moe" in name else {}  # torch's silu on the CPU ends rows with another exp
            layers = {"intermediate_size": 128} if name == "qwen3_5_text" else SMALL
            patch.setitem(of_ranks.SHAPES, name, of_ranks.SHAPES[name] | layers | wide)
        yield


def asked(tag: str = "") -> list[Group]:
    return [
        group(f"a{tag}", range(3, 12), n=2, max_tokens=2, ignore_eos=True),
        group(f"b{tag}", [9, 8], n=1, max_tokens=2, temperature=0.7, ignore_eos=True),
    ]


def numbers_of(engine: Engine, tag: str = "") -> list[Any]:
    """Return tokens and log-probs of samples."""
    return [each[:2] for _, each in sorted(bits(run(engine, asked(tag))).items())]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Fused engines on 1 and 2 ranks, those of 2 with weights as on a device."""
    folder = saved(tmp_path_factory.mktemp("tiny"), "float32")
    with device_ranks() as patch:
        made = {1: ranked_engine(folder, 1, "float32", **EXACT, fused_layers=True)}
        weights_as_on_a_device(patch)
        made[2] = ranked_engine(folder, 2, "float32", **EXACT, fused_layers=True)
        yield Replicas("llama", made)
        for engine in made.values():
            engine.close()


def test_samples_do_not_depend_on_the_number_of_ranks(replicas: Replicas) -> None:
    """With fused layers, before and after a refresh, and after sleeps of both kinds. The name says how products are summed."""
    one, two = replicas.of[1], replicas.of[2]
    assert isinstance(two.model.decoder, FusedDecoder) and isinstance(two.worker.ranks_of.exchange, DeviceExchange)
    assert one.arithmetic == two.arithmetic and two.arithmetic.endswith("+tree8/1") and "exact/1/fused" in two.arithmetic
    first = numbers_of(one)
    assert first == numbers_of(two)
    for engine in replicas.of.values():
        engine.refresh(replicas.weights(5))
    second = numbers_of(one, "refreshed")
    assert second == numbers_of(two, "refreshed") and second != first
    assert one.weights.digest == two.weights.digest == two.weights.live_digest()
    two.sleep()
    two.wake()
    assert two.weights.live_digest() == one.weights.digest
    two.sleep(2)
    two.wake()
    two.refresh(replicas.weights(5))
    assert two.weights.live_digest() == one.weights.digest, "so samples are those of before"
    heads = two.model.module.model.layers[0].self_attn.q_proj.weight
    assert len(heads) * 2 == len(one.model.module.model.layers[0].self_attn.q_proj.weight), "each rank has its heads"


@torchs_log_softmax
def test_a_trainer_has_the_bits_of_two_ranks(replicas: Replicas) -> None:
    """On one device, with the same tree. The control: whole sums."""
    engine = replicas.of[2]
    engine.refresh(replicas.weights(8))
    sample = run(engine, asked("trained")[1:])["btrained", 0]
    sequence = [(np.array([9, 8]), sample.token_ids)]
    backend = DeviceAttention(torch.device("cpu"), 2)
    found = []
    for summed in (True, False):
        model: Any = replicas.weights(8)
        if summed:
            sum_slices(summed_products(model), Summed(SLICES, None))
        _attending(model, register("tests_device_ranks", backend.attend, 8), 8, "sdpa")
        on_device.use_products(model)
        use_fused_layers(model, 8)
        with torch.no_grad():
            found.append(sample_logprobs(model, sequence, 0.7)[0].numpy().tobytes())
    assert found[0] == sample.logprobs.tobytes() != found[1]


@pytest.mark.parametrize("fault", ["0", "1", "bad"])
def test_a_refresh_that_one_rank_cannot_take_leaves_the_old_version(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine = replicas.of[2]
    engine.refresh(replicas.weights(6))
    version, digest = engine.version, engine.weights.digest
    new = replicas.weights(7)
    slices, own, failed = RefreshBuffers.slices, engine.weights._buffers, list[str]()  # noqa: SLF001

    def failing(self: RefreshBuffers, name: str) -> Iterator[Any]:
        if "down_proj" in name and (self is own) == (fault == "0") and not failed:
            failed.append(name)
            raise MemoryError("no memory for a slice")
        yield from slices(self, name)

    if fault == "bad":
        new.lm_head.weight.data[-1] = torch.nan  # a token of the last rank
        with pytest.raises(InvalidWeights, match="NaN"):
            engine.refresh(new)
    else:
        monkeypatch.setattr(RefreshBuffers, "slices", failing)
        with pytest.raises((MemoryError, RuntimeError), match="no memory"):
            engine.refresh(new)
        assert failed
    assert (engine.version, engine.weights.digest, engine.weights.live_digest()) == (version, digest, digest)


def test_the_library_s_products_are_added_up_over_ranks(tmp_path: Path) -> None:
    """Without `exact`: the module's numbers up to rounding. The control: other weights."""
    folder = saved(tmp_path, "float32")
    options = {"attention": "reference", "fused_layers": False}
    with device_ranks() as patch:
        with closing(ranked_engine(folder, 2, "float32", **options)) as engine:
            found = run(engine, asked())
        patch.undo()
    with closing(ranked_engine(folder, 1, "float32", tree_sums=False)) as engine:
        wanted = run(engine, asked())
        engine.refresh(tiny_shared(seed=5))
        other = run(engine, asked("other"))
    assert all((found[key].token_ids == each.token_ids).all() for key, each in wanted.items())
    for key, each in wanted.items():
        np.testing.assert_allclose(found[key].logprobs, each.logprobs, atol=1e-4)
    near = [np.allclose(found[name, i].logprobs, other[f"{name}other", i].logprobs, atol=1e-4) for name, i in wanted]
    assert not any(near)


def test_a_rank_that_ends_in_a_step_ends_the_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rank 0 waits for it in an exchange of devices, which gloo ends after its time-out."""

    def broken(self: Follower, plan: Any) -> None:
        raise RuntimeError("no kernel image is available")

    folder, options = saved(tmp_path, "float32"), {"exact": True, "attention": "reference", "tp_timeout_s": 1.0}
    monkeypatch.setattr(reduce, "LATER_S", 0.0)
    with device_ranks(), closing(ranked_engine(folder, 2, "float32", **options)) as engine:
        monkeypatch.setattr(Follower, "_follow", broken)
        engine.submit(asked()[0])
        with pytest.raises(RankLost, match="rank 1 of 2 has ended: RuntimeError: no kernel image"):
            for _ in range(3):
                engine.step()


def test_ranks_that_compute_different_things_are_refused() -> None:
    of = exchanges(2)

    def alike(rank: int, names: list[str]) -> str:
        try:
            check_alike(Ranks(of[rank], 2), names[rank])
        except ValueError as error:
            return str(error)
        return ""

    assert on_all(2, lambda rank: alike(rank, ["exact/1/sm90", "exact/1/sm90"])) == ["", ""]
    found = on_all(2, lambda rank: alike(rank, ["exact/1/sm90", "exact/1/sm100"]))
    assert found == ["rank 1 computes exact/1/sm100, rank 0 exact/1/sm90: all ranks need the same kind of device"] * 2
    for each in of:
        each.close()


def test_which_device_a_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(device="cuda", tp=4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [device_of_rank(config, rank, 4, False) for rank in range(4)] == [f"cuda:{rank}" for rank in range(4)]
    assert device_of_rank(engine_config(tp=4), 3, 4, False) == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of_rank(config, 3, 4, True) == "cuda:0", "as Ray lets it see one alone"
    with pytest.raises(ValueError, match="tp=4: 4 ranks of this host and 1 CUDA devices; lower tp"):
        device_of_rank(config, 0, 4, False)
    with pytest.raises(ValueError, match="set device=cuda, and CUDA_VISIBLE_DEVICES"):
        device_of_rank(engine_config(device="cuda:1", tp=4), 0, 4, False)


def test_the_name_says_what_is_summed() -> None:
    """Over slices, the number of ranks does not matter; the library's sums of ranks have it in their name."""
    assert sums_of(engine_config(tp=2)) == sums_of(engine_config(device="cuda", tp=4, exact=True)) == "tree8/1"
    assert sums_of(engine_config(device="cuda", tp=1, tree_sums=True, exact=True)) == "tree8/1"
    assert [sums_of(engine_config(device="cuda", tp=tp)) for tp in (1, 2, 4)] == ["", "ranks2/1", "ranks4/1"]


ALL = [("llama", dtype, fused) for dtype in ("float32", "bfloat16") for fused in (False, True)]
ALL += [("qwen3_moe", "float32", False), ("qwen3_moe", "bfloat16", False), ("qwen3_5_text", "float32", False)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype", "fused"), ALL)
def test_samples_of_four_ranks(tmp_path: Path, name: str, dtype: str, fused: bool) -> None:
    """A dense model, a mixture, and a hybrid with delta nets."""
    folder, found = saved(tmp_path, dtype, name), {}
    with device_ranks():
        for tp in (1, 2, 4):
            with closing(ranked_engine(folder, tp, dtype, **EXACT, fused_layers=fused)) as engine:
                found[tp] = numbers_of(engine), engine.arithmetic
    assert found[1] == found[2] == found[4]
