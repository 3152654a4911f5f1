"""Equivalence classes: configurations that must give the same samples, tokens and log-probs to the bit.

The canonical run is a roomy pool with everything at once. The negative control gives one group another seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from rollout.engine.cpu.isa import best, here, isa_of
from rollout.engine.values import Group, Sample, Sampling
from tests.support.equivalence import CLASSES, MIXED, ROOMY, Samples, assert_same, groups
from tests.support.tiny import tiny_engine
from tests.support.toy import group, run

Canonical = tuple[dict[str, str], Samples]
"""options of the engine, and what `groups` become"""
OURS = [{"dtype": "float32", "attention": "native"}, {"dtype": "bfloat16", "attention": "native"}]
FIRST_WITH = {isa_of(isa).arithmetic: isa for isa in reversed(here())}
"""the fastest instruction set of each arithmetic of this machine"""
OTHERS = [
    {"dtype": "float32", "attention": "reference"},
    {"dtype": "bfloat16", "isa": "torch"},
    *({"dtype": "bfloat16", "isa": isa} for isa in FIRST_WITH.values() if isa != best()),
]
MORE = [{"dtype": "bfloat16", "attention": "reference"}, {"dtype": "float32", "isa": "torch"}]
"""plain torch in its other dtype"""


def text(options: dict[str, str]) -> str:
    return "-".join(options.values())


def arithmetics(default: list[dict[str, str]]) -> Any:
    """Parametrize `canonical`; what is not in `default` is nightly."""
    params = [pytest.param(each, marks=() if each in default else pytest.mark.long) for each in (*OURS, *OTHERS, *MORE)]
    return pytest.mark.parametrize("canonical", params, ids=text, indirect=True)


def classes() -> Iterator[Any]:
    """Each class in each arithmetic. What the scheduler alone decides is the same in all of them: nightly but in our own."""
    for options in (*OURS, *OTHERS, *MORE):
        for name in CLASSES:
            small = options in OURS or (options in OTHERS and name in MIXED)
            yield pytest.param(options, name, id=f"{text(options)}-{name}", marks=() if small else pytest.mark.long)


@cache
def whole(*options: tuple[str, str]) -> Samples:
    return run(tiny_engine(**dict(options), **ROOMY), groups())


@pytest.fixture
def canonical(request: pytest.FixtureRequest) -> Canonical:
    return request.param, whole(*request.param.items())


@pytest.mark.some(10)
@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize(("canonical", "name"), [*classes()], indirect=["canonical"])
def test_class(name: str, canonical: Canonical) -> None:
    arithmetic, samples = canonical
    engine = tiny_engine(**arithmetic, **CLASSES[name])
    assert_same(samples, run(engine, groups()))
    if "resets" in name:
        assert engine.counters.recompute_preemptions > 0
    if "offload" in name:
        assert engine.counters.offloads > 0
    if name == "offload":
        assert engine.counters.recomputed_tokens == 0


@pytest.mark.some(2)
@arithmetics([*OURS, *OTHERS[1:]])
def test_alone_or_in_a_crowd(canonical: Canonical) -> None:
    """Each group alone, and all of them among 16 others that come and go."""
    arithmetic, samples = canonical
    for each in groups():
        alone = run(tiny_engine(**arithmetic, **ROOMY), [each])
        assert_same({key: samples[key] for key in alone}, alone)
    r = np.random.default_rng(9)
    crowd = [
        group(f"other{i}", r.integers(3, 199, int(r.integers(1, 50))), n=int(r.integers(1, 6)), max_tokens=12, seed=i)
        for i in range(16)
    ]
    for pool in (ROOMY, {"kv_tokens": 512}):
        mixed = run(tiny_engine(**arithmetic, **pool), [*crowd[:8], *groups(), *crowd[8:]])
        assert_same(samples, {key: mixed[key] for key in samples})


@arithmetics([*OURS, *OTHERS])
def test_forked_or_independent(canonical: Canonical) -> None:
    """Child i of a group is the same whether n is 3 or 7: it depends on (seed, index, position) and its logits."""
    arithmetic, samples = canonical
    each = groups()[3]
    wider = group("g3", each.prompt, n=7, max_tokens=20, seed=3, ignore_eos=True)
    mine = run(tiny_engine(**arithmetic, **ROOMY), [wider])
    assert_same({("g3", i): samples["g3", i] for i in range(3)}, {("g3", i): mine["g3", i] for i in range(3)})


@arithmetics([*OURS, *OTHERS])
def test_another_seed_is_seen(canonical: Canonical) -> None:
    arithmetic, samples = canonical
    with pytest.raises(AssertionError):
        assert_same(samples, run(tiny_engine(**arithmetic, **ROOMY), groups(seed=1)))


@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_block_sizes_agree(block_size: int) -> None:
    """Another block size is another order of sums: greedy tokens agree in fp32, log-probs to 1e-5."""
    greedy = [group(g.id, g.prompt, temperature=0.0, n=1, max_tokens=20, ignore_eos=True) for g in groups()]
    one = run(tiny_engine(**ROOMY), greedy)
    other = run(tiny_engine(block_size=block_size, **ROOMY), greedy)
    for key, sample in one.items():
        np.testing.assert_array_equal(sample.token_ids, other[key].token_ids)
        np.testing.assert_allclose(sample.logprobs, other[key].logprobs, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize("gone", [False, True], ids=["on the device", "in host memory"])
def test_a_turn_over_kept_kv_is_the_same_as_one_whose_prompt_is_prefilled(gone: bool) -> None:
    """To the bit; the partial block of the turn before is written on. The control reads KV of other weights."""
    prompt, sampling = np.arange(5, 42, dtype=np.int32), Sampling(max_tokens=21, ignore_eos=True, seed=3, kv_ttl_s=60.0)
    drawn: dict[str, Sample] = {}
    for way in ("kept", "old weights"):
        engine = tiny_engine(cpu_offload_gib=0.01)
        first = run(engine, [Group("one", prompt, sampling)])["one", 0]
        history = np.concatenate([prompt, first.token_ids, np.array([9, 8, 7], np.int32)])
        if gone:
            engine.sleep()
            engine.wake()
            assert all(block.device is None for block in engine.scheduler.state.pinned.blocks)
        if way == "old weights":
            engine.refresh({name: tensor * 1.01 for name, tensor in engine.model.module.named_parameters()})  # type: ignore[union-attr]
        turn = Group("two", history, Sampling(max_tokens=9, ignore_eos=True, seed=4), after=("one", 0))
        drawn[way] = run(engine, [turn])["two", 0]
        assert engine.counters.kept_tokens == 37 + 20
        live = {name: tensor.detach().clone() for name, tensor in engine.model.module.named_parameters()}  # type: ignore[union-attr]
        fresh = tiny_engine()
        if way == "old weights":
            fresh.refresh(live)
        alone = run(fresh, [Group("two", history, turn.sampling)])["two", 0]
        assert (alone.logprobs.tobytes() == drawn[way].logprobs.tobytes()) == (way == "kept")
