"""Several ranks run one replica: samples of 1, 2 and 4 ranks are equal, to the bit, and all ranks take a refresh, or none."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.engine import Engine
from rollout.engine.parallel import ranks as of_ranks
from rollout.engine.values import DeviceLost, Group, PartialSample, Sample, Sampling
from rollout.engine.weights.buffers import RefreshBuffers
from rollout.engine.weights.tensors import InvalidWeights
from rollout.exact import sample_logprobs, use_exact
from tests.support.adapters import adapter, factors
from tests.support.adapters import refresh as merge
from tests.support.families import build
from tests.support.ranks import bits, ranked_engine, ranks_in_threads, saved, tiny_shared
from tests.support.samebits import torchs_log_softmax
from tests.support.tiny import tiny
from tests.support.toy import group, run

pytestmark = [
    pytest.mark.usefixtures("copies_pay"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux"),
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"n": 4, "max_tokens": 24, "ignore_eos": True, "raw_logprobs": True},
    {"n": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "min_tokens": 4},
    {"n": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {4: 1.0}, "max_tokens": 20},
    {"n": 2, "allowed_token_ids": tuple(range(3, 30)), "top_logprobs": 3, "max_tokens": 12},
]
Samples = dict[tuple[str, int], Sample]


class Replicas(NamedTuple):
    """Engines of a model of `SHAPES` on 1, 2 and 4 ranks."""

    name: str
    dtype: str
    of: dict[int, Engine]

    def weights(self, seed: int) -> PreTrainedModel:
        return tiny_shared(self.name, seed=seed)


HOSTS = ("llama", "float32", "hosts")
"""ranks that share no memory"""
ALL: list[tuple[str, ...]] = [("llama", "float32"), ("llama", "bfloat16"), ("qwen3_5_moe_text", "bfloat16"), HOSTS]
"""a dense model, and one that has experts, delta nets and attention with gates"""
NAMES = ("llama", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "lfm2")
"""a dense model, a mixture, and hybrids with delta nets, with both, and with convolutions"""
MORE: list[tuple[str, ...]] = [(name, dtype) for name in NAMES for dtype in ("float32", "bfloat16") if (name, dtype) not in ALL]
MORE += [("qwen3_5_moe_text", "bfloat16", "hosts")]
CASES = 30
"""of each of them: 300 in all"""


@pytest.fixture(scope="module")
def replicas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Engines of the model and the dtype that a test asks for."""
    name, dtype, *hosts = request.param
    folder = saved(tmp_path_factory.mktemp("tiny"), dtype, name)
    with ranks_in_threads(hosts=bool(hosts)):
        made = {
            tp: ranked_engine(
                folder,
                tp,
                dtype,
            )
            for tp in (1, 2, 4)
        }
    yield Replicas(name, dtype, made)
    for engine in made.values():
        engine.close()


def of_replicas(pairs: list[tuple[str, ...]], long: Sequence[tuple[str, ...]] = ()) -> pytest.MarkDecorator:
    """Run a test with `pairs`, and with `long` in the nightly tier."""
    params = [pytest.param(each, id="-".join(each)) for each in pairs]
    params += [pytest.param(each, id="-".join(each), marks=pytest.mark.long) for each in long]
    return pytest.mark.parametrize("replicas", params, indirect=True, scope="module")


def random_case(replicas: Replicas, seed: int) -> Callable[[int], Samples]:
    """Make a case that runs on so many ranks, parts of it on another number: forks, preemption, a refresh in the middle,
    scores, turns, children that were cut elsewhere."""
    r = random.Random(seed)
    base = [r.randrange(3, 199) for _ in range(60)]
    prompts = [[*base[: r.randrange(50)], r.randrange(3, 199)] for _ in range(6)]
    steps = [r.randrange(5) for _ in prompts]
    at_refresh, kv, cut = r.randrange(1, 5), r.choice(["keep", "recompute"]), r.randrange(2, 10)
    old, new = replicas.weights(seed), replicas.weights(seed + 1)

    def case(tp: int) -> Samples:
        engine, other = replicas.of[tp], replicas.of[{1: 4, 2: 1, 4: 2}[tp]]
        for each in {id(engine): engine, id(other): other}.values():
            each.refresh(old)
        groups = [
            group(f"{seed}/{number}", prompt, **{"seed": number, "max_tokens": 16, **SAMPLINGS[number % len(SAMPLINGS)]})
            for number, prompt in enumerate(prompts)
        ]
        done: Samples = {}
        for number, each in enumerate(groups):
            engine.submit(each)
            for _ in range(steps[number]):
                done |= {(sample.group_id, sample.index): sample for sample in engine.step()}
            if number == at_refresh:
                engine.refresh(new, kv=kv)
        done |= run(engine)
        other.refresh(new)
        short = group("short", prompts[0], n=2, seed=5, max_tokens=cut, ignore_eos=True)
        begun = run(other, [short])
        resumed = Sampling(n=2, seed=5, max_tokens=20, ignore_eos=True)
        partials = tuple(PartialSample.of(each) for _, each in sorted(begun.items()))
        partials = tuple(with_version_of(each, engine) for each in partials)
        done |= run(engine, [Group("resumed", short.prompt, resumed, partials=partials)])
        scored = Group("scored", short.prompt, resumed, partials=partials, score=True)
        done |= run(engine, [scored])
        first = done["resumed", 0]
        longer = np.concatenate([short.prompt, first.token_ids, [7]]).astype(np.int32)
        return done | run(engine, [Group("turn", longer, Sampling(n=2, seed=8, max_tokens=9), after=("resumed", 0))])

    return case


def with_version_of(partial: PartialSample, engine: Engine) -> PartialSample:
    """Give a partial sample the live version of another engine, which has the same weights under another number."""
    return PartialSample(
        index=partial.index, token_ids=partial.token_ids, logprobs=partial.logprobs, weight_versions=[(0, engine.version)]
    )


def numbered(samples: Samples) -> dict[tuple[str, int], tuple[object, ...]]:
    """Return what must be equal, with versions counted from the first one."""
    least = min(version for each in samples.values() for _, version in each.weight_versions)
    found = bits(samples)
    for key, each in samples.items():
        versions = tuple((token, version - least) for token, version in each.weight_versions)
        found[key] = (*found[key][:2], versions, *found[key][3:])
    return found


@pytest.mark.some(2)
@of_replicas(ALL, MORE)
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, CASES))])
def test_samples_do_not_depend_on_the_number_of_ranks(replicas: Replicas, number: int, new_seed: int) -> None:
    """The first seed is always the same one, the others are new each time."""
    seed = new_seed if number else 0
    case, engines = random_case(replicas, seed), replicas.of.values()
    one, two, four = (numbered(case(tp)) for tp in (1, 2, 4))
    assert one == two == four and len(one) > 15
    assert seed or {version for each in one.values() for _, version in each[2]} == {0, 1}, "refreshed in the middle"
    assert all(engine.counters.offloaded_blocks and engine.counters.restored_blocks for engine in engines)
    assert len({engine.arithmetic for engine in engines}) == 1


@torchs_log_softmax
@of_replicas(ALL, MORE)
def test_a_trainer_has_the_bits_of_two_ranks(replicas: Replicas) -> None:
    engine, dtype = replicas.of[2], getattr(torch, replicas.dtype)
    model = tiny_shared(replicas.name, dtype)
    engine.refresh(model)
    samples = run(engine, [group("a", range(3, 20), n=2, max_tokens=12, ignore_eos=True)])
    assert engine.arithmetic.endswith("+tree8/1")
    assert use_exact(model, engine.arithmetic, block_size=8).arithmetic == engine.arithmetic
    prompt = np.arange(3, 20).astype(np.int32)
    with torch.no_grad():
        scores = sample_logprobs(model, [(prompt, each.token_ids) for each in samples.values()])
    learned = sample_logprobs(model, [(prompt, each.token_ids) for each in samples.values()])
    assert all(np.array_equal(got.numpy(), each.logprobs) for got, each in zip(scores, samples.values(), strict=True))
    assert all(torch.equal(*pair) for pair in zip(learned, scores, strict=True)), "also with gradients"
    torch.cat(learned).sum().backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in model.parameters())


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_sums_in_a_tree_and_routes_of_experts(tmp_path: Path, name: str) -> None:
    """Two ranks return the routes of one with the same sums; other sums have other bits."""
    asked = group("a", range(3, 40), n=4, max_tokens=12, ignore_eos=True, routed_experts=True)
    folder, found = saved(tmp_path, "float32", name), {}
    with ranks_in_threads():
        for tp, tree in ((1, True), (2, True), (1, False)):
            with closing(ranked_engine(folder, tp, "float32", tree_sums=tree, routed_experts=True)) as engine:
                samples = run(engine, [asked])
                found[tp, tree] = bits(samples), [each.routed_experts for each in samples.values()]
    assert found[1, True][0] == found[2, True][0] != found[1, False][0]
    pairs = zip(found[1, True][1], found[2, True][1], strict=True)
    assert all(one is not None and len(one) and np.array_equal(one, two) for one, two in pairs)


@of_replicas(ALL)
def test_sleep_and_wake_on_all_ranks(replicas: Replicas) -> None:
    engine, weights = replicas.of[2], replicas.weights(3)
    engine.refresh(weights)
    asked = group("a", range(3, 40), n=4, max_tokens=12)
    want, digest = bits(run(engine, [asked])), engine.weights.digest
    engine.sleep()
    assert engine.weights.live_digest() == digest
    engine.wake()
    assert bits(run(engine, [asked])) == want
    engine.sleep(2)
    engine.wake()
    engine.refresh(weights)
    assert engine.weights.live_digest() == engine.weights.digest == digest
    assert [each[:2] for each in bits(run(engine, [asked])).values()] == [each[:2] for each in want.values()]


@of_replicas(ALL)
def test_digests_are_those_of_whole_tensors(replicas: Replicas) -> None:
    engines, weights = replicas.of, replicas.weights(4)
    for engine in engines.values():
        engine.refresh(weights)
    assert len({engine.weights.digest for engine in engines.values()}) == 1
    assert len({engine.weights.live_digest() for engine in engines.values()}) == 1
    names = [name for name, _ in weights.named_parameters() if any(each in name for each in ("mlp", "conv1d", "qkv", "A_log"))]
    for name in names:
        start, size = (64, 128) if weights.get_parameter(name).numel() >= 96 else (0, 4)
        pieces = [engine.weights.own.read_slice(name, start, size).tobytes() for engine in engines.values()]
        assert pieces[0] == pieces[1] == pieces[2], name
    name = next(name for name in names if "down_proj" in name)
    engines[4].refresh({name: torch.ones_like(weights.get_parameter(name))}, partial=True)
    assert engines[4].weights.live_digest() == engines[4].weights.digest != engines[1].weights.digest


@of_replicas(ALL)
@pytest.mark.parametrize("bad", [1, 0])
def test_a_refresh_that_one_rank_cannot_take_is_undone_on_all(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """The failing rank has swapped some tensors, and the other one perhaps all."""
    engine = replicas.of[2]
    engine.refresh(replicas.weights(6))
    asked = group("a", range(3, 40), n=4, max_tokens=12)
    want, digest = bits(run(engine, [asked])), engine.weights.digest
    slices = RefreshBuffers.slices
    own = engine.weights._buffers  # noqa: SLF001
    failed = []

    def failing(self: RefreshBuffers, name: str) -> Iterator[Any]:
        if "layers.1.mlp" in name and "down_proj" in name and (self is own) == (bad == 0) and not failed:
            failed.append(name)
            raise MemoryError("no memory for a slice")
        yield from slices(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(RefreshBuffers, "slices", failing)
        reason = (
            "no memory" if bad == 0 else "rank 1 could not take the new weights, and all ranks keep the old ones: MemoryError"
        )
        with pytest.raises((MemoryError, RuntimeError), match=reason):
            engine.refresh(replicas.weights(7))
    assert failed and engine.weights.live_digest() == engine.weights.digest == digest
    assert bits(run(engine, [asked])) == want
    engine.refresh(replicas.weights(7))
    assert engine.weights.live_digest() == engine.weights.digest != digest


PRODUCTS = ("layers.2.self_attn.q_proj", "layers.2.self_attn.k_proj", "layers.2.self_attn.o_proj", "layers.0.mlp.down_proj")
"""of which adapters change some: cut by rows, by rows that two ranks may share, by columns"""


def adapted(model: PreTrainedModel, more: tuple[str, ...] = ()) -> list[str]:
    """Return names of weights with an adapter, in layers that every kind has."""
    wanted = [each.replace("layers.2", "layers.1") for each in PRODUCTS] + [*PRODUCTS, "in_proj_qkv", *more]
    return [name for name, each in model.named_parameters() if each.ndim == 2 and any(f"{one}.w" in name for one in wanted)]


@pytest.mark.some(2)
@of_replicas(ALL)
def test_an_adapter_gives_all_numbers_of_ranks_the_same_weights(replicas: Replicas) -> None:
    """One after the other, with a refresh of whole tensors in between, and tensors that come whole with an adapter: the last
    adapter changes the samples, and without it the base is back."""
    base, other = replicas.weights(8), replicas.weights(9)
    names, head = adapted(base), "lm_head.weight"
    assert len(names) >= 4 and any("o_proj" in name for name in names) and any("k_proj" in name for name in names)
    whole = {"model.norm.weight": torch.linspace(0.5, 1.5, len(base.get_parameter("model.norm.weight")))}
    whole |= {head: other.get_parameter(head).detach()}
    asked, found = group("a", range(3, 40), n=4, max_tokens=12), []
    for engine in replicas.of.values():
        engine.refresh(base)
        plain, digest = bits(run(engine, [asked])), engine.weights.digest
        merge(engine, factors(base, names), adapter(names, base=digest))
        merge(engine, factors(base, [*names[1:], head], 1) | whole, adapter([*names[1:], head], base=digest))
        first = [engine.weights.digest, engine.weights.base.digest, bits(run(engine, [asked]))]
        engine.refresh(other, kv="recompute")
        merge(engine, factors(base, names[:2], 2), adapter(names[:2], base=engine.weights.digest))
        second = [engine.weights.digest, bits(run(engine, [asked]))]
        assert engine.weights.live_digest() == engine.weights.digest and first[1] == digest != first[0]
        merge(engine, {name: 0 * each for name, each in factors(base, names[:1]).items()}, adapter(names[:1]))
        assert engine.weights.digest == engine.weights.base.digest, "back to the base"
        engine.refresh(base)
        assert [each[0] for each in bits(run(engine, [asked])).values()] == [each[0] for each in plain.values()]
        found.append([*first[:2], *second[:1], [[each[:2] for each in part.values()] for part in (first[2], second[1])]])
    assert found[0] == found[1] == found[2] and found[0][3][0] != [each[:2] for each in plain.values()]


@of_replicas(ALL)
@pytest.mark.parametrize("fault", ["bad", "0", "1"])
def test_an_adapter_that_one_rank_cannot_take_leaves_the_one_before(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """An infinite factor of the last rank's rows, or a commit that a rank fails."""
    engine, base = replicas.of[2], replicas.weights(8)
    engine.refresh(base)
    names = adapted(base)
    merge(engine, factors(base, names), adapter(names))
    asked = group("a", range(3, 40), n=4, max_tokens=12)
    want, live, kept = bits(run(engine, [asked])), engine.weights.digest, engine.weights.base.digest
    tensors = factors(base, names, 3)
    if fault == "bad":
        tensors[names[-1] + ".B"][-1] = torch.inf
        with pytest.raises(InvalidWeights, match="infinity"):
            merge(engine, tensors, adapter(names))
    else:
        slices, own, failed = RefreshBuffers.slices, engine.weights._buffers, list[str]()  # noqa: SLF001

        def failing(self: RefreshBuffers, name: str) -> Iterator[Any]:
            if name == names[-1] and (self is own) == (fault == "0") and not failed:
                failed.append(name)
                raise MemoryError("no memory for a slice")
            yield from slices(self, name)

        with monkeypatch.context() as patch:
            patch.setattr(RefreshBuffers, "slices", failing)
            with pytest.raises((MemoryError, RuntimeError), match="no memory"):
                merge(engine, tensors, adapter(names))
        assert failed
    assert engine.weights.live_digest() == engine.weights.digest == live and engine.weights.base.digest == kept
    assert bits(run(engine, [asked])) == want
    merge(engine, factors(base, names, 3), adapter(names))
    assert engine.weights.live_digest() == engine.weights.digest != live


@of_replicas(ALL)
def test_bad_tensors_are_refused_before_any_rank_has_them(replicas: Replicas) -> None:
    engine, good = replicas.of[2], dict(replicas.weights(8).named_parameters())
    engine.refresh(good)
    digest = engine.weights.digest
    name = next(name for name in good if name.endswith(("layers.1.self_attn.k_proj.weight", "layers.1.mlp.experts.down_proj")))
    bad = good[name].detach().clone()
    bad.view(-1)[-1] = torch.nan  # in the part of the last rank
    for tensor, reason in ((bad, "holds NaN"), (bad[:-1], "has shape")):
        with pytest.raises(InvalidWeights, match=f"{name}.*{reason}"):
            engine.refresh(good | {name: tensor})
    assert engine.weights.live_digest() == engine.weights.digest == digest


def test_a_rank_that_draws_another_token_ends_the_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the weights of rank 1 are spoiled in a way that the sums do not show to both alike."""
    monkeypatch.setattr(of_ranks, "CHECK_STEPS", 16)
    execute = of_ranks.Worker.execute

    def differing(self: Any, plan: Any) -> Any:
        if self.ranks_of.exchange.rank == 1:
            plan.sampling["seed"] += np.uint64(1)
        return execute(self, plan)

    monkeypatch.setattr(of_ranks.Worker, "execute", differing)
    with ranks_in_threads(), closing(ranked_engine(saved(tmp_path, "float32"), 2, "float32")) as engine:
        engine.submit(group("a", range(3, 9), n=2, max_tokens=40, ignore_eos=True))
        with pytest.raises(DeviceLost, match="rank 1 of 2 has drawn other tokens than rank 0 within 16 steps"):
            for _ in range(40):
                engine.step()


def test_options_and_models_that_ranks_do_not_support_are_refused(tmp_path: Path) -> None:
    with ranks_in_threads():
        for options, reason in [
            ({"overlap_steps": True}, "overlap_steps with tp=2"),
            ({"isa": "torch"}, "tp=2: several ranks need the kernels of the CPU"),
            ({"latent_kv": True}, "latent_kv with tp=2"),
        ]:
            with pytest.raises(ValueError, match=reason):
                ranked_engine(saved(tmp_path / "a", "float32"), 2, "float32", **options)
        tiny("phi3").save_pretrained(tmp_path / "b")
        with pytest.raises(ValueError, match=r"phi3 has .*serve this one whole \(tp = 1\)"):
            ranked_engine(str(tmp_path / "b"), 2, "float32")
        with pytest.raises(ValueError, match="4 query heads, which 8 ranks cannot share"):
            ranked_engine(saved(tmp_path / "c", "float32"), 8, "float32")


FAMILIES_CUT = (
    "cohere2_moe", "cwm", "dots1", "ernie4_5_moe", "exaone4", "exaone_moe", "glm4_moe", "granite", "helium", "hy_v3",
    "lfm2_moe", "ministral", "mixtral", "olmo", "qwen2", "qwen2_moe", "qwen3", "qwen3_next", "seed_oss", "smollm3",
    "solar_open",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES_CUT)
def test_every_family_that_is_cut_has_the_bits_of_one_rank(tmp_path: Path, name: str) -> None:
    """Families are recognised by their modules, so more of them are served than have names in the guide."""
    build(name).save_pretrained(tmp_path)
    asked = [group("a", range(3, 40), n=3, max_tokens=20), group("b", range(5, 25), n=3, max_tokens=10)]
    found = []
    with ranks_in_threads():
        for tp in (1, 2):
            with closing(ranked_engine(str(tmp_path), tp, "float32", kv_tokens=2048)) as engine:
                found.append((bits(run(engine, asked)), engine.weights.live_digest()))
    assert found[0] == found[1]


@pytest.mark.usefixtures("loads_in_full")  # as the other rank does, in its own process: they are in step
@pytest.mark.parametrize(
    "number, reason",
    [
        (signal.SIGKILL, "rank 1 of 2 has ended: killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, "rank 1 of 2 did not answer within 5 s", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_killed_or_hangs_ends_the_replica(tmp_path: Path, number: int, reason: str) -> None:
    """In processes, as they are served; no process is left."""
    with closing(ranked_engine(saved(tmp_path, "float32"), 2, "float32", tp_timeout_s=5.0)) as engine:
        want = run(engine, [group("a", range(3, 9), n=2)])
        assert len(want) == 2
        _, other = (each["pid"] for each in engine.status()["ranks"])
        engine.submit(group("b", range(3, 9), n=2, max_tokens=200, ignore_eos=True))
        engine.step()
        os.kill(other, number)
        with pytest.raises(DeviceLost, match=reason):
            for _ in range(400):
                engine.step()
        assert engine.has_work, "the service steps again, and ends"
    assert not psutil.pid_exists(other)


ALONE = """
import sys
from tests.support.ranks import ranked_engine
engine = ranked_engine(sys.argv[1], 2, "float32")
print(engine.status()["ranks"][1]["pid"], flush=True)
input()
"""


@pytest.mark.long
@pytest.mark.parametrize("stopped", [False, True])
def test_no_rank_outlives_a_killed_rank_0(tmp_path: Path, stopped: bool) -> None:
    command = [sys.executable, "-c", ALONE, saved(tmp_path, "float32")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        other = psutil.Process(int(process.stdout.readline()))
        if stopped:
            other.suspend()
        process.kill()
        other.wait(20)
