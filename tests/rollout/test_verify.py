"""Verification: what was not computed from its arguments is found, and what was raises no alarm."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout import identity
from rollout.client import AsyncRolloutClient, Receipt, RolloutClient, Verified, receipts, verification
from rollout.engine.engine import Engine
from rollout.engine.forward import sampling as sampler
from rollout.engine.values import Sample, Sampling
from rollout.engine.vocabulary import Vocabulary
from rollout.transport.errors import InvalidRequest
from rollout.transport.loopback import LoopbackService
from tests.bench import forgeries
from tests.support.fleet import fleet_of, router_of
from tests.support.scored_only import score_only
from tests.support.tiny import tiny, tiny_engine
from tests.support.wire import serving

WAIT = 60.0
PROMPT = [5, 9, 11, 42, 7, 7, 3, 120, 60, 17, 4]
N = 4
PLAIN = Sampling(n=N, max_tokens=12, seed=100)
SAMPLINGS = {
    "plain": PLAIN,
    "top_p": Sampling(n=N, max_tokens=12, seed=200, top_p=0.8),
    "top_k and min_p": Sampling(n=N, max_tokens=12, seed=300, top_k=9, min_p=0.02, temperature=0.7),
    "penalties": Sampling(n=N, max_tokens=12, seed=400, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    "bias": Sampling(n=N, max_tokens=12, seed=500, logit_bias={5: 2.0}, allowed_token_ids=tuple(range(2, 60))),
    "greedy": Sampling(n=N, max_tokens=12, seed=600, temperature=0.0),
    "own ends": Sampling(n=N, max_tokens=30, seed=700, ignore_eos=True, min_tokens=3, stop_token_ids=tuple(range(9, 40))),
    "strings": Sampling(n=N, max_tokens=30, seed=800, stop=("abba", "cc")),
    "columns": Sampling(n=N, max_tokens=12, seed=900, raw_logprobs=True, top_logprobs=3, top_p=0.9),
    "cut": Sampling(n=8, max_tokens=40, seed=1000, finish_after=2, stop_token_ids=tuple(range(60))),
}
TEXT = Vocabulary([b"abc"[token % 3 :][: 1 + token % 2] for token in range(199)])


@contextmanager
def client_of(engine: Engine, sockets: bool = False) -> Iterator[RolloutClient]:
    engine.texts.vocabulary = lambda: TEXT  # type: ignore[attr-defined]
    end = None if sockets else LoopbackService()
    with serving(engine, end) as service:
        at: dict[str, Any] = {"address": service.endpoint} if end is None else {"transport": end.connect()}
        with RolloutClient(**at, connect_timeout_s=WAIT) as client:
            yield client


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def client(module: Any) -> Iterator[RolloutClient]:
    """Of a service whose weights stay as they are."""
    with client_of(tiny_engine(model=module)) as client:
        yield client


@pytest.fixture(scope="module")
def old() -> Iterator[RolloutClient]:
    """Of a service with other weights under the same version."""
    with client_of(tiny_engine(model=tiny("llama", seed=1))) as client:
        yield client


def generated(client: RolloutClient, *samplings: Sampling) -> list[list[Sample]]:
    return list(client.generate_groups([PROMPT] * len(samplings), samplings, timeout=WAIT))


def verify(client: RolloutClient, samples: list[Sample], sampling: Sampling = PLAIN, **options: Any) -> list[Verified]:
    return client.verify(samples, PROMPT, sampling, timeout=WAIT, **options)


def lies_of(kind: str, sampling: Sampling, client: RolloutClient, old: RolloutClient) -> list[Sample]:
    """Forge the samples of a group; only those that differ from the honest ones."""
    (honest,) = generated(client, sampling)
    others = generated(old if kind == "old_weights" else client, *forgeries.instead(kind, sampling))
    r = random.Random(0)
    made = [forgeries.forged(kind, each, [other[each.index] for other in others], r) for each in honest]
    return [lie for lie, each in zip(made, honest, strict=True) if forgeries.differ(lie, each)]


# what is right, and what is not


@pytest.mark.parametrize("name", SAMPLINGS)
def test_honest_samples_raise_no_alarm(client: RolloutClient, name: str) -> None:
    (samples,) = generated(client, SAMPLINGS[name])
    ends = {sample.finish_reason for sample in samples}
    assert {"own ends": "stop", "strings": "stop", "cut": "cut"}.get(name, "length") in ends
    kept = [client.receipt(sample, PROMPT, SAMPLINGS[name]) for sample in samples]
    assert [each.ok for each in verify(client, samples, SAMPLINGS[name], receipts=kept)] == [True] * len(samples)


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", forgeries.KINDS)
def test_forgeries_are_caught(client: RolloutClient, old: RolloutClient, kind: str) -> None:
    """Of all six kinds, with every way to draw."""
    for name, sampling in SAMPLINGS.items():
        if name == "cut":
            continue  # where a child is cut depends on its siblings
        lies = lies_of(kind, sampling, client, old)
        assert lies or (name == "greedy" and kind in ("seed", "best_of_8")), f"{name}: there is nothing to find"
        for verdict in verify(client, lies, sampling):
            assert verdict.ok is False and verdict.why, (name, verdict)


def test_a_wrong_token_and_a_wrong_bit_are_named(client: RolloutClient) -> None:
    (samples,) = generated(client, PLAIN)
    tokens, logprobs = samples[1].token_ids.copy(), samples[2].logprobs.copy()
    tokens[7], right = (tokens[7] + 5) % 199, int(tokens[7])
    logprobs.view(np.uint32)[9] ^= 1
    samples[1] = msgspec.structs.replace(samples[1], token_ids=tokens)
    samples[2] = msgspec.structs.replace(samples[2], logprobs=logprobs)
    found = verify(client, samples)
    assert [each.ok for each in found] == [True, False, False, True]
    assert (found[1].field, found[1].first_bad, found[1].expected, found[1].got) == ("token_ids", 7, right, (right + 5) % 199)
    assert (found[2].field, found[2].first_bad, found[2].got) == ("logprobs", 9, float(logprobs[9]))
    assert found[2].expected != found[2].got and abs(found[2].expected - found[2].got) < 1e-5


def test_without_drawing_again_another_seed_is_not_seen(
    client: RolloutClient, old: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: scoring alone gives the log-probs that any seed has."""
    score_only(monkeypatch)
    for kind in ("seed", "best_of_8"):
        assert [each.ok for each in verify(client, lies_of(kind, PLAIN, client, old))] == [True] * N
    assert [each.ok for each in verify(client, lies_of("old_weights", PLAIN, client, old))] == [False] * N


def test_without_log_probs_a_bit_is_not_seen(client: RolloutClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: all tokens are right."""
    monkeypatch.setattr(verification, "COLUMNS", ())
    assert [each.ok for each in verify(client, lies_of("logprob", PLAIN, client, client))] == [True] * N


def test_other_counters_raise_alarms(client: RolloutClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of honest samples: each position has its own counter."""
    (samples,) = generated(client, PLAIN)
    uniform = sampler.uniform
    monkeypatch.setattr(sampler, "uniform", lambda seed, index, at: uniform(seed, index, at + np.uint64(1)))
    assert [each.ok for each in verify(client, samples)] == [False] * N


# the end of a sample


def test_a_wrong_end_is_seen(client: RolloutClient) -> None:
    sampling = SAMPLINGS["own ends"]
    (samples,) = generated(client, sampling)
    stopped = next(sample for sample in samples if sample.finish_reason == "stop" and len(sample.token_ids) > 4)

    def judged(sample: Sample, as_if: Sampling = sampling) -> Verified:
        (verdict,) = verify(client, [sample], as_if)
        return verdict

    def replaced(sample: Sample, count: int, **more: Any) -> Sample:
        return msgspec.structs.replace(sample, token_ids=sample.token_ids[:count], logprobs=sample.logprobs[:count], **more)

    shorter = judged(replaced(stopped, len(stopped.token_ids) - 1, finish_reason="length"))
    assert shorter.ok is False and "finish_reason" in shorter.why
    whole = msgspec.structs.replace(sampling, max_tokens=len(stopped.token_ids))
    late = judged(msgspec.structs.replace(stopped, finish_reason="length"), whole)
    assert (late.ok, late.field, late.expected) == (False, "finish_reason", "stop")
    cut = judged(replaced(stopped, len(stopped.token_ids) - 1, finish_reason="aborted"))
    assert cut.ok is True, "an abort ends a child anywhere"
    (plain, *_), *_ = generated(client, PLAIN)
    at = next(i for i, token in enumerate(plain.token_ids.tolist()) if token not in plain.token_ids[:i] and i > 2)
    more = judged(plain, msgspec.structs.replace(PLAIN, stop_token_ids=(int(plain.token_ids[at]),)))
    assert (more.ok, more.first_bad) == (False, at + 1), "a token after the end"


def test_a_wrong_stop_string_is_seen(client: RolloutClient) -> None:
    sampling = SAMPLINGS["strings"]
    (samples,) = generated(client, sampling)
    stopped = next(sample for sample in samples if sample.stopped_by)
    assert stopped.text_end is not None
    for change in ({"text_end": stopped.text_end + 1}, {"stopped_by": "cc" if stopped.stopped_by == "abba" else "abba"}):
        (verdict,) = verify(client, [msgspec.structs.replace(stopped, **change)], sampling)
        assert verdict.ok is False and verdict.field in change
    plain = msgspec.structs.replace(sampling, stop=("nowhere", "abba", "cc"))
    (verdict,) = verify(client, [msgspec.structs.replace(stopped, stopped_by="nowhere")], plain)
    assert (verdict.ok, verdict.field) == (False, "stopped_by")


def test_impossible_samples_are_wrong_without_a_forward(client: RolloutClient) -> None:
    (samples,) = generated(client, PLAIN)
    one, scored = samples[0], client.status()["scored_tokens"] if "scored_tokens" in client.status() else None
    out, nan = one.token_ids.copy(), one.logprobs.copy()
    out[2], nan[2] = 199, np.nan
    changes: list[dict[str, Any]] = [
        {"token_ids": out}, {"logprobs": nan}, {"index": N}, {"seed": 7}, {"prompt_tokens": 3},
        {"logprobs": one.logprobs[:-1]}, {"weight_versions": [(1, 0)]}, {"finish_reason": "deadline"},
        {"kv_versions": [(40, 0, 0)]},
    ]  # fmt: skip
    for change in changes:
        (verdict,) = verify(client, [msgspec.structs.replace(one, **change)])
        assert verdict.ok is False and verdict.why, change
    assert scored is None or client.status()["scored_tokens"] == scored


def test_one_index_may_come_several_times(client: RolloutClient) -> None:
    """A second sample of a child is as right as the first one, or not."""
    (samples,) = generated(client, PLAIN)
    lie = forgeries.forged("token", samples[0], (), random.Random(0))
    assert [each.ok for each in verify(client, [samples[0], lie, samples[0], samples[1]])] == [True, False, True, True]


def test_without_a_seed_the_seeds_of_the_samples_count(client: RolloutClient) -> None:
    """So a choice among many seeds is not seen, and one of many children is."""
    unseeded = msgspec.structs.replace(PLAIN, seed=None)
    groups = generated(client, unseeded, unseeded)
    mixed = [groups[0][0], groups[1][0], groups[1][1]]
    assert groups[0][0].seed != groups[1][0].seed
    assert [each.ok for each in verify(client, mixed, unseeded)] == [True] * 3
    claimed = msgspec.structs.replace(mixed[1], index=3)
    assert [each.ok for each in verify(client, [claimed], unseeded)] == [False]


# what cannot be verified


def test_other_weights_are_no_lie(module: Any) -> None:
    with client_of(tiny_engine(model=module)) as client:
        (before,) = generated(client, PLAIN)
        first = [client.receipt(sample, PROMPT, PLAIN) for sample in before]
        other = {name: 2 * tensor for name, tensor in tiny("llama").state_dict().items()}
        client.refresh(other.items(), version=4)
        for verdict in verify(client, before, receipts=first):
            assert verdict.ok is None and "version 0 of the weights, version 4 is live" in verdict.why
        (now,) = generated(client, PLAIN)
        assert [each.ok for each in verify(client, now)] == [True] * N
        claimed = [msgspec.structs.replace(sample, weight_versions=[(0, 4)]) for sample in before]
        assert [each.ok for each in verify(client, claimed)] == [False] * N, "the negative control: old tokens, new version"
        mine = client.receipt(now[0], PROMPT, PLAIN)
        assert [version for version, _ in mine.weights] == [4] and mine.weights[0][1] != first[0].weights[0][1]
        several = msgspec.structs.replace(now[0], weight_versions=[(0, 3), (2, 4)])
        kept = msgspec.structs.replace(now[0], kv_versions=[(2, 0, 3), (2, len(PROMPT) + 1, 4)])
        assert [each.ok for each in verify(client, [several, kept])] == [None, None]
        strange = msgspec.structs.replace(mine, weights=((4, "ab" * 20),))
        (verdict,) = verify(client, [now[0]], receipts=[strange])
        assert verdict.ok is None and "other weights as version 4" in verdict.why


@pytest.mark.parametrize(
    ("field", "value"), [("configuration", "00" * 20), ("arithmetic", "amx/1"), ("block_size", 32), ("kv_dtype", "fp8_e4m3")]
)
def test_another_arithmetic_is_no_lie(client: RolloutClient, field: str, value: object) -> None:
    (samples,) = generated(client, PLAIN)
    elsewhere = [msgspec.structs.replace(client.receipt(each, PROMPT, PLAIN), **{field: value}) for each in samples]
    for verdict in verify(client, samples, receipts=elsewhere):
        assert verdict.ok is None and verdict.why.startswith("cannot be verified here: ") and str(value) in verdict.why
    assert [each.ok for each in verify(client, samples)] == [True] * N


def test_a_sample_of_another_configuration_is_no_lie_without_a_receipt(client: RolloutClient) -> None:
    """Its log-probs would differ; a client that noted no configuration has it compared."""
    (samples,) = generated(client, PLAIN)
    changed = [msgspec.structs.replace(each, logprobs=each.logprobs * 2) for each in samples]
    for configuration, ok in (("00" * 20, None), ("", False), (client.info.configuration, False)):
        theirs = [msgspec.structs.replace(each, configuration=configuration) for each in changed]
        for verdict in verify(client, theirs):
            assert verdict.ok is ok and (ok is False or "configuration of the model 0000" in verdict.why)


def test_bits_that_depend_on_the_batch_prove_nothing(client: RolloutClient) -> None:
    (samples,) = generated(client, PLAIN)
    info = msgspec.structs.replace(client.info, arithmetic="torch/2/batch")
    here = verification.Here(info, 0, lambda version: "")
    check = verification.GroupCheck(samples, PROMPT, PLAIN, None, here, lambda: "x")
    assert not check.groups and {verdict.ok for verdict in check.judge([])} == {None}


def test_weights_that_change_meanwhile_are_no_lie(client: RolloutClient) -> None:
    (samples,) = generated(client, PLAIN)
    for change in ({"weight_versions": [(0, 1)]}, {"weight_versions": [(0, 0), (3, 1)]}, {"kv_versions": [(0, 0, 7)]}):
        again = msgspec.structs.replace(samples[0], finish_reason="scored", **change)
        verdict = verification.compare(samples[0], again, PLAIN, frozenset())
        assert verdict.ok is None and "changed while" in verdict.why


def test_scored_tokens_were_not_drawn(client: RolloutClient) -> None:
    ((scored,),) = client.score([PROMPT], [[[5, 6, 7]]], timeout=WAIT)
    (verdict,) = verify(client, [scored])
    assert verdict.ok is None
    with pytest.raises(InvalidRequest, match="no receipt"):
        client.receipt(scored, PROMPT, PLAIN)


def test_every_field_of_a_sample_is_compared_or_has_a_reason() -> None:
    compared = {"token_ids", "finish_reason", "prompt_routed_experts", *verification.COLUMNS, *verification.ENDS}
    tables = [compared, {*verification.CHECKED}, {*verification.NOT_COMPARED}]
    assert set().union(*tables) == {*Sample.__struct_fields__} and sum(map(len, tables)) == len(Sample.__struct_fields__)


def test_a_change_of_any_compared_column_is_found() -> None:
    """One number of each array, in a sample that has all of them; and each array left out."""
    sampling = Sampling(n=2, max_tokens=8, seed=3, routed_experts=True, raw_logprobs=True, top_logprobs=2, ignore_eos=True)
    with client_of(tiny_engine("qwen3_moe", routed_experts=True)) as client:
        (samples,) = generated(client, sampling)
        assert [each.ok for each in verify(client, samples, sampling)] == [True, True]
        receipts = [client.receipt(each, PROMPT, sampling) for each in samples]
        assert [each.ok for each in verify(client, samples, sampling, receipts=receipts)] == [True, True]
        for name in (*verification.COLUMNS, "prompt_routed_experts"):
            column = getattr(samples[0], name)
            for place in (0, len(column) - 1):
                other = column.copy()
                changed = other.reshape(len(other), -1)
                changed[place, 0] = -9.0 if other.dtype == np.float32 else (changed[place, 0] + 1) % 4
                lie = msgspec.structs.replace(samples[0], **{name: other})
                (verdict,) = verify(client, [lie], sampling)
                assert (verdict.ok, verdict.field, verdict.first_bad) == (False, name, place), (name, verdict)
            (verdict,) = verify(client, [msgspec.structs.replace(samples[0], **{name: None})], sampling)
            assert verdict.ok is False, name


# receipts


def test_a_receipt_has_every_argument(client: RolloutClient) -> None:
    """A change of any field of `Sampling` that decides a token changes it, and no other one does."""
    sampling = SAMPLINGS["own ends"]
    (samples,) = generated(client, sampling)
    receipt = client.receipt(samples[0], PROMPT, sampling)
    assert Receipt.unpack(receipt.pack()) == receipt and 110 <= len(receipt.pack()) <= 170
    plain = generated(client, PLAIN)[0][0]
    assert len(client.receipt(plain, PROMPT, PLAIN).pack()) <= 142
    assert (receipt.arithmetic, receipt.block_size, receipt.kv_dtype) == (client.info.arithmetic, 8, "float32")
    changed: dict[str, object] = {
        "seed": 1, "temperature": 0.5, "max_tokens": 20, "min_tokens": 1, "top_k": 1, "top_p": 0.5, "min_p": 0.1,
        "stop_token_ids": (77,), "ignore_eos": False, "stop": ("a",), "logit_bias": {3: 1.0}, "allowed_token_ids": (3,),
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    }  # fmt: skip
    assert tuple(changed) == identity.DRAWN_BY
    service_only = {
        "n": 5, "raw_logprobs": True, "max_kv_lag": 1, "max_version_lag": 1, "finish_after": 1, "min_len_to_cut": 0,
        "deadline_s": 1.0, "priority": 1, "stream_every": 1, "top_logprobs": 1, "kv_ttl_s": 1.0,
            "routed_experts": True,
    }  # fmt: skip
    assert changed.keys() | service_only.keys() == set(Sampling.__struct_fields__), "decide whether a new field is an argument"
    for name, value in (changed | service_only).items():
        how = msgspec.structs.replace(sampling, **{name: value})
        seed = int(how.seed or 0) if name == "seed" else samples[0].seed
        other = receipts.receipt_of(
            msgspec.structs.replace(samples[0], seed=seed), PROMPT, how, client.info, lambda version: ""
        )
        assert (other.sampling != receipt.sampling) == (name in changed), name
        assert Receipt.unpack(other.pack()) == other


def test_a_receipt_of_another_sample_is_forged(client: RolloutClient) -> None:
    (samples,) = generated(client, PLAIN)
    kept = [client.receipt(sample, PROMPT, PLAIN) for sample in samples]
    swapped = verify(client, samples[:2], receipts=[kept[1], kept[0]])
    assert [(each.ok, each.field) for each in swapped] == [(False, "receipt.index")] * 2
    for field, value in {
        "prompt": "00" * 20, "sampling": Sampling(seed=3), "result": "00" * 20, "weight_versions": ((0, 9),),
        "kv_versions": ((0, 0, 9),),
    }.items():  # fmt: skip
        (verdict,) = verify(client, samples[:1], receipts=[msgspec.structs.replace(kept[0], **{field: value})])
        assert (verdict.ok, verdict.field) == (False, f"receipt.{field}")
    (verdict,) = client.verify(samples[0], [1, *PROMPT[1:]], PLAIN, receipts=kept[:1], timeout=WAIT)
    assert (verdict.ok, verdict.field) == (False, "receipt.prompt")
    with pytest.raises(InvalidRequest, match="4 samples, 1 receipts"):
        verify(client, samples, receipts=kept[:1])


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xc1", b"x" * 99])
def test_what_is_no_receipt_is_refused(client: RolloutClient, data: bytes) -> None:
    with pytest.raises(ValueError, match="are no receipt"):
        Receipt.unpack(data)
    (samples,) = generated(client, PLAIN)
    packed = bytearray(client.receipt(samples[0], PROMPT, PLAIN).pack())
    with pytest.raises(ValueError, match="are no receipt"):
        Receipt.unpack(bytes(packed[:-1]))
    packed[1] = 9
    with pytest.raises(ValueError, match="format 9"):
        Receipt.unpack(bytes(packed))


def test_a_receipt_needs_the_prompt_of_its_group(client: RolloutClient) -> None:
    (samples,) = generated(client, PLAIN)
    with pytest.raises(InvalidRequest, match="prompt of 3 tokens"):
        client.receipt(samples[0], [1, 2, 3], PLAIN)


# services


def test_over_zeromq_with_both_clients_and_drafts(module: Any) -> None:
    """Groups of several prompts, on a service that drafts; children of one token as well."""
    engine = tiny_engine(model=module, drafts=4, max_batch_tokens=64)
    prompts = [PROMPT, PROMPT[:4], [*PROMPT, 3]]
    samplings = [msgspec.structs.replace(PLAIN, seed=i, max_tokens=each, temperature=0.4) for i, each in enumerate((40, 1, 30))]
    with client_of(engine, sockets=True) as client:
        samples = list(client.generate_groups(prompts, samplings, timeout=WAIT))
        lie = forgeries.forged("token", samples[2][1], (), random.Random(0))
        samples[2][1] = lie
        found = client.verify_groups(samples, prompts, samplings, timeout=WAIT)
        assert [[each.ok for each in group] for group in found] == [[True] * N, [True] * N, [True, False, True, True]]

        async def again() -> list[list[Verified]]:
            async with AsyncRolloutClient(client._session.address, connect_timeout_s=WAIT) as other:
                assert other.receipt(samples[0][0], PROMPT, samplings[0]) == client.receipt(samples[0][0], PROMPT, samplings[0])
                (one,) = await other.verify(samples[0][0], PROMPT, samplings[0], timeout=WAIT)
                assert one == found[0][0]
                return await other.verify_groups(samples, prompts, samplings, timeout=WAIT)

        assert asyncio.run(again()) == found
        with pytest.raises(InvalidRequest, match="must be as many"):
            client.verify_groups(samples, prompts[:1], samplings)


def test_through_a_fleet() -> None:
    """A router hands the groups on, and its replicas agree on what the bits depend on."""
    with (
        fleet_of(2, make=tiny_engine) as (fleet, _),
        router_of(fleet) as router,
        RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client,
    ):
        samples = generated(client, PLAIN, msgspec.structs.replace(PLAIN, seed=3))
        lie = forgeries.forged("token", samples[1][2], (), random.Random(0))
        samplings = [PLAIN, msgspec.structs.replace(PLAIN, seed=3)]
        found = client.verify_groups([samples[0], [*samples[1][:2], lie]], [PROMPT] * 2, samplings, timeout=WAIT)
        assert [[each.ok for each in group] for group in found] == [[True] * N, [True, True, False]]
        assert client.receipt(samples[0][0], PROMPT, PLAIN).block_size == 8
