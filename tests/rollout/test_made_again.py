"""`client.replay`: samples are made again from their receipts, through the same refreshes, to the bit."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from rollout import AsyncRolloutClient, Change, Receipt, Reproduced, RolloutClient
from rollout.client.receipts import receipt_of
from rollout.client.replaying import Child
from rollout.engine.engine import Engine
from rollout.engine.values import Group, KVPolicy, Sample, Sampling
from rollout.transport.errors import InvalidRequest
from tests.support import recurrent
from tests.support.nightly import Draw
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import group
from tests.support.wire import serving

WAIT = 60.0
PROMPT = [*range(5, 40)]
WEIGHTS: dict[int, Any] = {}


def weights(version: int) -> Any:
    """Return the weights of a version; those of version 0 are the ones that an engine begins with."""
    if version not in WEIGHTS:
        WEIGHTS[version] = tiny("llama", seed=version)
    return WEIGHTS[version]


class Lived(NamedTuple):
    """What an engine made while its weights were refreshed."""

    samples: list[Sample]
    receipts: list[Receipt]
    prompts: list[np.ndarray]


def lived(
    engine: Engine,
    groups: list[Group],
    refreshes: dict[int, tuple[int, KVPolicy]],
    info: Any,
    weights: Callable[[int], Any] = weights,
) -> Lived:
    """Run groups; refreshes: version and policy by the number of the step before which they happen."""
    digests = {engine.version: engine.weights.digest}
    samples: list[Sample] = []
    waiting, step = list(groups), 0
    while waiting or engine.has_work:
        if waiting and step % 3 == 0:
            engine.submit(waiting.pop(0))
        if step in refreshes:
            version, kv = refreshes[step]
            engine.refresh(weights(version), version=version, kv=kv)
            digests[version] = engine.weights.digest
        samples += engine.step()
        step += 1
    by_id = {each.id: each for each in groups}
    mine = [by_id[sample.group_id] for sample in samples]
    receipts = [
        receipt_of(sample, each.prompt, each.sampling, info, lambda version: digests.get(version, ""))
        for sample, each in zip(samples, mine, strict=True)
    ]
    return Lived(samples, receipts, [each.prompt for each in groups])


@contextmanager
def service(**config: Any) -> Iterator[RolloutClient]:
    with serving(tiny_engine(**config)) as running, RolloutClient(running.endpoint) as client:
        yield client


@pytest.fixture
def client() -> Iterator[RolloutClient]:
    with service() as client:
        yield client


def two(**sampling: Any) -> list[Group]:
    return [
        group(f"g{i}", PROMPT[i:], **{"n": 3, "max_tokens": 24, "seed": 7 + i, "ignore_eos": True, **sampling})
        for i in range(2)
    ]


def same(results: list[Reproduced], samples: list[Sample]) -> None:
    """Assert that these are the samples, to the bit."""
    for result, sample in zip(results, samples, strict=True):
        assert result.equal is True, result.why
        made = result.sample
        assert made is not None and (made.index, made.finish_reason) == (sample.index, sample.finish_reason)
        assert np.array_equal(made.token_ids, sample.token_ids)
        assert made.logprobs.tobytes() == sample.logprobs.tobytes()
        assert (made.weight_versions, made.kv_versions) == (sample.weight_versions, sample.kv_versions)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_through_refreshes(kv: KVPolicy, client: RolloutClient) -> None:
    run = lived(tiny_engine(), two(), {5: (3, kv), 11: (4, kv), 14: (9, kv)}, client.info)
    assert any(len(sample.weight_versions) == 4 for sample in run.samples)
    assert any(sample.kv_versions for sample in run.samples) is (kv == "keep")
    same(client.replay(run.receipts, run.prompts, weights={v: weights(v) for v in (3, 4, 9)}, timeout=WAIT), run.samples)


@pytest.mark.parametrize(
    "name", ["gemma3_text", *(pytest.param(name, marks=pytest.mark.long) for name in ("lfm2", "qwen3_5_text"))]
)
def test_models_with_windows_and_with_states(name: str) -> None:
    """A child waits with the KV of its window, and with its recurrent state."""
    options = {**recurrent.COMMON, **recurrent.TYPES[name]} if name in recurrent.TYPES else {}
    made = [tiny(name, seed=version, **options) for version in range(3)]
    with serving(tiny_engine(name, model=copy.deepcopy(made[0]))) as running, RolloutClient(running.endpoint) as client:
        refreshes: dict[int, tuple[int, KVPolicy]] = {5: (1, "keep"), 11: (2, "keep")}
        run = lived(tiny_engine(name, model=made[0]), two(), refreshes, client.info, made.__getitem__)
        assert {len(sample.weight_versions) for sample in run.samples} == {3}
        same(client.replay(run.receipts, run.prompts, weights={1: made[1], 2: made[2]}, timeout=WAIT), run.samples)


def test_a_prompt_of_older_weights(client: RolloutClient) -> None:
    """Its KV is built by a prefill of its beginning, under each of the weights."""
    first = lived(engine := tiny_engine(), two(), {4: (3, "keep"), 9: (4, "keep")}, client.info)
    longer = [*PROMPT, *first.samples[0].token_ids.tolist(), 9] if first.samples[0].group_id == "g0" else PROMPT
    late = [group("late", longer, n=2, max_tokens=9, seed=3, ignore_eos=True, max_kv_lag=9)]
    run = lived(engine, late, {3: (5, "keep")}, client.info)
    run = run._replace(receipts=[with_digests(receipt, first.receipts) for receipt in run.receipts])
    versions = {version for sample in run.samples for _, _, version in sample.kv_versions}
    assert len(versions) >= 3, "the case is there"
    every = {v: weights(v) for v in (3, 4, 5)}
    same(client.replay([*first.receipts, *run.receipts], [*first.prompts, *run.prompts], weights=every, timeout=WAIT),
         [*first.samples, *run.samples])  # fmt: skip


def with_digests(receipt: Receipt, others: list[Receipt]) -> Receipt:
    """Return a receipt with the digests that other receipts have."""
    known = {version: digest for other in others for version, digest in other.weights}
    own = tuple((version, digest or known.get(version, "")) for version, digest in receipt.weights)
    return msgspec.structs.replace(receipt, weights=own)


@pytest.mark.parametrize("seed", range(3))
def test_random_runs_in_a_small_pool(seed: int) -> None:
    run_and_replay(seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_new_random_runs_in_a_small_pool(new_seeds: Draw) -> None:
    for seed in new_seeds(200):
        run_and_replay(seed)


def run_and_replay(seed: int) -> None:
    """Children are preempted, and their KV is dropped, offloaded and computed again; refreshes of all kinds come between."""
    r = random.Random(seed)
    tight = {"kv_tokens": 256, "max_num_seqs": 6, "max_batch_tokens": 32, "drafts": r.choice([0, 3])}
    groups = [
        group(f"g{i}", [r.randrange(3, 199) for _ in range(r.randrange(1, 40))], n=r.randrange(1, 4), seed=i,
              max_tokens=r.randrange(1, 40), max_kv_lag=r.choice([0, 0, 2]), temperature=r.choice([0.0, 1.0]))
        for i in range(6)
    ]  # fmt: skip
    refreshes = {step: (1 + i, r.choice(["keep", "keep", "recompute"])) for i, step in enumerate((6, 15, 30, 50))}
    with service() as client:
        run = lived(tiny_engine(**tight), groups, refreshes, client.info)  # type: ignore[arg-type]
        results = client.replay(run.receipts, run.prompts, weights={v: weights(v) for v in range(1, 5)}, timeout=WAIT)
    kinds = {(len(sample.weight_versions) > 1, bool(sample.kv_versions)) for sample in run.samples}
    print(f"{len(run.samples)} samples, {kinds}")
    same(results, run.samples)


def test_a_small_pool_makes_children_alone(client: RolloutClient) -> None:
    """KV of many children does not fit until the next version is live; that of one child does."""
    run = lived(tiny_engine(), two(n=8), {9: (3, "keep")}, client.info)
    with service(kv_tokens=512) as small:
        same(small.replay(run.receipts, run.prompts, weights={3: weights(3)}, timeout=WAIT), run.samples)


# what is not equal


def changed(receipt: Receipt, **fields: Any) -> Receipt:
    return msgspec.structs.replace(receipt, **fields)


def test_a_forged_receipt_is_proven_wrong(client: RolloutClient) -> None:
    run = lived(tiny_engine(), two(), {5: (3, "keep")}, client.info)
    honest = next(receipt for receipt in run.receipts if receipt.index == 1 and receipt.kv_versions)
    own = honest.sampling
    flipped = f"{int(honest.result[0], 16) ^ 1:x}{honest.result[1:]}"
    lies = [
        changed(honest, result=flipped),
        changed(honest, index=2),
        changed(honest, sampling=msgspec.structs.replace(own, seed=99)),
        changed(honest, sampling=msgspec.structs.replace(own, temperature=0.9)),
        changed(honest, sampling=msgspec.structs.replace(own, max_tokens=23)),
        changed(honest, weight_versions=((0, 0), (2, 3)), kv_versions=((2, 0, 0), (2, len(PROMPT) + 1, 3))),
    ]
    results = client.replay([honest, *lies], run.prompts, weights={3: weights(3)}, timeout=WAIT)
    assert [result.equal for result in results] == [True] + [False] * len(lies)
    assert all("digests differ" in result.why for result in results[1:])


def test_an_end_before_a_refresh_that_it_lived_through(client: RolloutClient) -> None:
    run = lived(tiny_engine(), two(), {5: (3, "keep")}, client.info)
    late = changed(run.receipts[0], weight_versions=((0, 0), (30, 3)), kv_versions=())
    (result,) = client.replay([late], run.prompts, weights={3: weights(3)}, timeout=WAIT)
    assert result.equal is False and "it ends after 24 tokens, before version 3" in result.why


def test_what_cannot_be_made_here_is_no_lie(client: RolloutClient) -> None:
    run = lived(tiny_engine(), two(), {5: (3, "keep")}, client.info)
    receipt = run.receipts[0]
    other = "f" * 40
    cases = {
        "sampled with arithmetic torch/9": changed(receipt, arithmetic="torch/9"),
        "depend on the batch": changed(receipt, arithmetic="fma/1/batch"),
        "sampled with block_size 99": changed(receipt, block_size=99),
        "sampled with kv_dtype fp8": changed(receipt, kv_dtype="fp8"),
        "its prompt was not given": changed(receipt, prompt=other),
        "weights of version 8 .* were not given": changed(
            receipt, weights=((8, other),), weight_versions=((0, 8),), kv_versions=()
        ),
        "given as version 3 have digest": changed(receipt, weights=((0, receipt.weights[0][1]), (3, other))),
        "is not possible under version": changed(receipt, kv_versions=((4, 3, 0),)),
        "no version is named for token 0": changed(receipt, weight_versions=((2, 0),), kv_versions=()),
    }
    results = client.replay(list(cases.values()), run.prompts, weights={3: weights(3)}, timeout=WAIT)
    for result, why in zip(results, cases, strict=True):
        assert result.equal is None and result.sample is None, why
        assert re.search(why, result.why), result.why


# samples that something has ended


def test_children_that_were_cut(client: RolloutClient) -> None:
    """With the ends of a ledger no more tokens are made; without, the sample is found in its continuation."""
    cut = lived(tiny_engine(), two(finish_after=1, n=4, ignore_eos=False, max_tokens=60), {4: (3, "keep")}, client.info)
    assert {"cut"} < {sample.finish_reason for sample in cut.samples}
    ends = [(len(sample.token_ids), sample.finish_reason) for sample in cut.samples]
    given = {3: weights(3)}
    same(client.replay(cut.receipts, cut.prompts, weights=given, ends=ends, timeout=WAIT), cut.samples)
    with service() as other:
        same(other.replay(cut.receipts, cut.prompts, weights=given, timeout=WAIT), cut.samples)


def test_a_child_without_tokens_and_one_that_failed(client: RolloutClient) -> None:
    empty = Sample(
        group_id="g", index=1, token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), weight_versions=[],
        finish_reason="aborted", prompt_tokens=len(PROMPT), seed=3,
    )  # fmt: skip
    receipt = receipt_of(empty, np.array(PROMPT, np.int32), Sampling(n=2, seed=3), client.info, lambda version: "")
    ends = [(0, "aborted"), (0, "error")]
    first, failed = client.replay([receipt, receipt], [PROMPT], ends=ends, timeout=WAIT)
    assert first.equal is True and failed.equal is None and "it ended as 'error'" in failed.why


# another past


def test_from_a_token_on_everything_may_be_other(client: RolloutClient) -> None:
    run = lived(tiny_engine(), two(), {5: (3, "keep")}, client.info)
    place = next(i for i, sample in enumerate(run.samples) if sample.weight_versions[-1][1] == 3)
    since = run.samples[place].weight_versions[-1][0]
    assert 0 < since < 10
    sample, receipt = run.samples[place], [run.receipts[place]]

    def made(change: Change) -> Sample:
        with service() as client:
            (result,) = client.replay(receipt, run.prompts, weights={3: weights(3)}, change=change, timeout=WAIT)
        assert result.equal is None and result.sample is not None, result.why
        assert result.why == f"changed from token {change.token} on"
        return result.sample

    def first_other(one: Sample) -> int:
        length = min(len(one.token_ids), len(sample.token_ids))
        differ = one.token_ids[:length] != sample.token_ids[:length]
        return int(differ.argmax()) if differ.any() else length

    for token in (since + 1, 23):
        unchanged = made(Change(token=token))
        assert np.array_equal(unchanged.token_ids, sample.token_ids) and unchanged.kv_versions == sample.kv_versions
        assert unchanged.logprobs.tobytes() == sample.logprobs.tobytes()
    for token in (0, since - 1):
        assert made(Change(token=token)).weight_versions == [(0, 0)], "the refresh was not live yet"
    assert 10 <= first_other(made(Change(token=10, sampling={"seed": 99}))) < 24
    greedy = made(Change(token=10, sampling={"temperature": 0.0}))
    assert 10 <= first_other(greedy) and greedy.logprobs[:10].tobytes() == sample.logprobs[:10].tobytes()
    turn = made(Change(token=10, append=[17, 18], sampling={"max_tokens": 4}))
    assert turn.prompt_tokens == len(PROMPT) - (sample.group_id == "g1") + 12 and len(turn.token_ids) == 4
    other = made(Change(token=10, append=[17, 19], sampling={"max_tokens": 4}))
    assert turn.logprobs.tobytes() != other.logprobs.tobytes()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Change(token=-1), "must be 0 or a number"),
        (Change(token=1, sampling={"n": 3}), "it may have seed"),
        ({"token": 1}, "give Change"),
    ],
)
def test_impossible_changes_are_refused(change: Any, why: str, client: RolloutClient) -> None:
    with pytest.raises(InvalidRequest, match=why):
        client.replay([], [], change=change)
    with pytest.raises(InvalidRequest, match="0 receipts, 1 ends"):
        client.replay([], [], ends=[(1, "cut")])


def test_a_change_behind_the_end(client: RolloutClient) -> None:
    run = lived(tiny_engine(), two(), {}, client.info)
    (result,) = client.replay(run.receipts[:1], run.prompts, change=Change(token=30), timeout=WAIT)
    assert result.equal is None and "it ends after 24 tokens" in result.why


async def async_replay(address: str, run: Lived) -> list[Reproduced]:
    async with AsyncRolloutClient(address) as client:
        return await client.replay(run.receipts, run.prompts, weights={3: weights(3)}, timeout=WAIT)


def test_the_async_client_replays_as_well(client: RolloutClient) -> None:
    import asyncio

    run = lived(tiny_engine(), two(), {5: (3, "keep")}, client.info)
    with serving(tiny_engine()) as running:
        same(asyncio.run(async_replay(running.endpoint, run)), run.samples)


def test_stages_of_a_receipt(client: RolloutClient) -> None:
    """The plan itself: kept KV, a recompute in the middle of a version, and a prompt of two older versions."""
    (base,) = lived(tiny_engine(), two(n=1)[:1], {}, client.info).receipts
    prompt = np.array(PROMPT, np.int32)

    def stages(weight_versions: Any, kv_versions: Any) -> list[tuple[Any, ...]]:
        receipt = changed(base, weight_versions=weight_versions, kv_versions=kv_versions, weights=())
        return [(stage.weights[0], stage.kv, stage.end, stage.prefill) for stage in Child(receipt, prompt, None, None).stages]

    assert stages(((0, 4),), ()) == [(4, "fresh", None, 0)]
    assert stages(((0, 4), (9, 5)), ((9, 0, 4), (9, 43, 5))) == [(4, "fresh", 9, 0), (5, "kept", None, 0)]
    assert stages(((0, 4), (9, 5)), ()) == [(4, "fresh", 9, 0), (5, "fresh", None, 0)]
    assert stages(((0, 4), (9, 5)), ((9, 0, 4), (9, 43, 5), (15, 0, 5))) == [
        (4, "fresh", 9, 0), (5, "kept", 15, 0), (5, "fresh", None, 0)
    ]  # fmt: skip
    assert stages(((0, 5),), ((0, 0, 2), (0, 8, 4), (0, 24, 5))) == [
        (2, "fresh", None, 8), (4, "built", None, 24), (5, "built", None, 0)
    ]  # fmt: skip
