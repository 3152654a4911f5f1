"""Logits that a group changes: bias, allowed tokens, penalties. What is drawn follows from the group's own tokens alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from rollout.engine.cpu.kernels import choose
from rollout.engine.forward.adjust import NOT_ALLOWED, Adjust, in_place
from rollout.engine.forward.sampling import DrawKernel, SamplingBatch, launch_draws, sample
from rollout.engine.memory import HostMemory
from rollout.engine.scheduling.stopping import LogitRules, TokenCounts
from rollout.engine.values import Group, PartialSample, Sampling
from tests.support.draws import CUTS, batch
from tests.support.equivalence import assert_same
from tests.support.toy import VOCAB, engine, group, run, toy_logits
from tests.support.toy_batch import one_draw

RULES: list[dict[str, Any]] = [
    {"logit_bias": {3: 5.0, 4: -100.0}},
    {"allowed_token_ids": (2, 5, 7, 11)},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"frequency_penalty": 1.9, "temperature": 0.0},
    {
        "logit_bias": {1: 2.0},
        "allowed_token_ids": (1, 2, 5, 7, 11, 12),
        "repetition_penalty": 1.3,
        "top_p": 0.9,
        "top_logprobs": 4,
    },
]
ids = [" ".join(rule) for rule in RULES]


def rules_of(sampling: Sampling, prompt: list[int]) -> LogitRules:
    rules = LogitRules.of(Group("g", np.array(prompt, np.int32), sampling))
    assert rules is not None
    return rules


def by_hand(logits: np.ndarray, sampling: Sampling, prompt: list[int], output: list[int]) -> np.ndarray:
    """[V] float32 logits as they are to be, number by number."""
    changed = logits.astype(np.float32).copy()
    for token, bias in (sampling.logit_bias or {}).items():
        changed[token] += np.float32(bias)
    if sampling.allowed_token_ids is not None:
        changed[[token for token in range(len(changed)) if token not in sampling.allowed_token_ids]] = NOT_ALLOWED
    factor = np.float32(sampling.repetition_penalty)
    for token in {*prompt, *output} if sampling.repetition_penalty != 1 else ():
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token, count in Counter(output).items():
        changed[token] -= np.float32(count) * np.float32(sampling.frequency_penalty) + np.float32(sampling.presence_penalty)
    return changed


def adjust_of(samplings: list[Sampling], prompt: list[int], output: list[int], plain: SamplingBatch) -> tuple[Adjust, ...]:
    """One draw for each, of a child that has this output."""
    partial = PartialSample(
        index=0, token_ids=np.array(output, np.int32), logprobs=np.zeros(len(output)), weight_versions=[(0, 0)]
    )
    each = []
    for draw, sampling in enumerate(samplings):
        if sampling.changes_logits:
            each.append(TokenCounts(sampling, rules_of(sampling, prompt), None, partial).adjustment(draw, 1))
    return Adjust.build(each, plain.logits_row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_are_what_they_are_by_hand(dtype: torch.dtype) -> None:
    samplings = [Sampling(**rule) for rule in RULES]
    logits = (torch.randn(len(RULES), VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    prompt, output = [1, 2, 2, 9], [2, 5, 5, 5, 0]
    (adjust,) = adjust_of(samplings, prompt, output, batch(samplings))
    assert adjust.source.tolist() == list(range(len(RULES)))
    before = logits.clone()
    for got, row, sampling in zip(adjust.apply(logits, in_place), logits.float(), samplings, strict=True):
        np.testing.assert_array_equal(got.numpy(), by_hand(row.numpy(), sampling, prompt, output))
    assert torch.equal(logits, before), "others draw from the model's own"


def test_arrays_of_changes_travel_without_a_wait() -> None:
    """All arrays go through `send`, in one dtype a call, as `DeviceMemory.send` takes them; the draws are the same."""
    samplings = [Sampling(**rule, raw_logprobs=True) for rule in RULES]
    logits, plain = torch.randn(len(RULES), VOCAB), batch(samplings)
    changed = replace(plain, adjust=adjust_of(samplings, [1, 2, 9], [2, 5], plain))
    sent: list[int] = []

    def send(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        assert len({each.dtype for each in arrays}) == 1 and all(each.ndim == 1 for each in arrays)
        sent.append(sum(each.nbytes for each in arrays))
        return HostMemory().send(arrays)

    got, want = launch_draws(logits, changed, None, send).read(), launch_draws(logits, changed).read()
    assert got.tokens.tobytes() == want.tokens.tobytes() and got.logprobs.tobytes() == want.logprobs.tobytes()
    (adjust,) = changed.adjust
    kinds = (adjust.bias, adjust.allowed, adjust.repetition, adjust.counted)
    used = [adjust.source, adjust.restricted, *(column for each in kinds for column in each)]
    assert sum(sent) >= sum(each.nbytes for each in used) - adjust.allowed.values.nbytes


def test_repetition_and_bias_are_transformers() -> None:
    """To the bit, prompt and output counted alike."""
    sampling = Sampling(repetition_penalty=1.37, logit_bias={4: 1.25, 6: -3.0})
    logits, prompt, output = torch.randn(1, VOCAB), [1, 2, 2, 9], [2, 5, 5]
    (adjust,) = adjust_of([sampling], prompt, output, batch([sampling]))
    tokens = torch.tensor([prompt + output])
    biased = SequenceBiasLogitsProcessor({(4,): 1.25, (6,): -3.0})(tokens, logits.clone())
    want = RepetitionPenaltyLogitsProcessor(1.37)(tokens, biased)
    np.testing.assert_array_equal(adjust.apply(logits, in_place).numpy(), want.numpy())


@pytest.mark.parametrize("kernel", [choose().kernels, None], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_draws_are_those_from_rows_that_were_changed_before(dtype: torch.dtype, kernel: DrawKernel | None) -> None:
    """Among draws that change nothing, with every truncation and forbidden tokens; raw log-probs are the model's."""
    kinds = [msgspec.structs.replace(CUTS[i % len(CUTS)], seed=i, raw_logprobs=True, top_logprobs=i % 3) for i in range(24)]
    rules = [
        {k: v for k, v in RULES[i % len(RULES)].items() if k not in ("temperature", "top_p", "top_logprobs")} for i in range(24)
    ]
    mixed = [
        msgspec.structs.replace(kind, **rule) if i % 4 else kind
        for i, (kind, rule) in enumerate(zip(kinds, rules, strict=True))
    ]
    logits = (torch.randn(24, 40, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    prompt, output = [1, 2, 2, 9], [2, 5, 5, 5, 0]
    plain = replace(batch(mixed), forbidden=[(3, [2]), (8, [7]), (13, [0, 1])])
    got = sample(logits, replace(plain, adjust=adjust_of(mixed, prompt, output, plain)), kernel)
    changed = torch.stack(
        [torch.from_numpy(by_hand(row.float().numpy(), s, prompt, output)) for row, s in zip(logits, mixed, strict=True)]
    )
    want = sample(changed, plain, kernel)
    assert got.tokens.tobytes() == want.tokens.tobytes() and got.logprobs.tobytes() == want.logprobs.tobytes()
    assert got.finite.all() and got.top is not None and want.top is not None and got.raw_logprobs is not None
    there = want.top.logprobs > -1e20
    np.testing.assert_array_equal(got.top.ids, np.where(there, want.top.ids, -1))
    np.testing.assert_array_equal(got.top.logprobs[there], want.top.logprobs[there])
    raw = logits.float().log_softmax(-1)[torch.arange(24), torch.from_numpy(got.tokens).long()].numpy()
    np.testing.assert_allclose(got.raw_logprobs, raw, atol=1e-6)
    assert np.abs(got.raw_logprobs - got.logprobs).max() > 0.1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen_where_it_would_be_left_out(bad: float) -> None:
    samplings = [Sampling(allowed_token_ids=(3,))] * 2
    logits = torch.randn(2, 30)
    logits[1, 7] = bad
    plain = batch(samplings)
    for kernel in (choose().kernels, None):
        drawn = sample(logits, replace(plain, adjust=adjust_of(samplings, [1], [], plain)), kernel)
        assert drawn.finite.tolist() == [True, False] and drawn.tokens[0] == 3 and drawn.logprobs[0] == 0


def test_rows_that_are_not_changed_are_not_copied() -> None:
    plain = batch([Sampling()])
    assert LogitRules.of(Group("g", np.array([1], np.int32), Sampling())) is None and plain.adjust == ()
    assert launch_draws(torch.randn(1, 30), plain).read().finite.all()


# ── in an engine ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def expected(asked: Group) -> dict[int, list[int]]:
    """The children of a seeded group, token by token from logits that are changed by hand."""
    children, prompt = {}, asked.prompt.tolist()
    for index in range(asked.sampling.n):
        tokens: list[int] = []
        while len(tokens) < asked.sampling.max_tokens and (not tokens or tokens[-1] != 0 or asked.sampling.ignore_eos):
            logits = toy_logits(np.array([*prompt, *tokens], np.float32) + 1)
            changed = torch.from_numpy(by_hand(logits, asked.sampling, prompt, tokens))
            drawn = sample(changed[None], one_draw(asked.sampling, index, len(tokens)), choose().kernels)
            tokens.append(int(drawn.tokens[0]))
        children[index] = tokens
    return children


WAYS: dict[str, dict[str, Any]] = {
    "roomy": {"kv_tokens": 1024},
    "overlapped": {"kv_tokens": 1024, "overlap_steps": True},
    "preempted": {"kv_tokens": 64},
    "offloaded, overlapped": {"kv_tokens": 64, "cpu_offload_gib": 0.001, "overlap_steps": True},
}


@pytest.mark.some(6)
@pytest.mark.parametrize("rule", RULES, ids=ids)
@pytest.mark.parametrize("way", WAYS)
def test_children_are_what_they_are_by_hand(way: str, rule: dict[str, Any]) -> None:
    """Beside a group that changes nothing, which does not notice."""
    asked = group("g", [5, 6, 7, 5], n=3, max_tokens=20, seed=3, ignore_eos=True, **rule)
    other = group("other", range(5, 16), n=2, max_tokens=16, seed=4, ignore_eos=True)
    alone = run(engine(**WAYS[way]), [other])
    e = engine(**WAYS[way])
    got = run(e, [asked, other])
    assert {index: got["g", index].token_ids.tolist() for index in range(3)} == expected(asked)
    assert_same(alone, {key: sample for key, sample in got.items() if key[0] == "other"})
    assert way != "overlapped" or e.counters.failed_steps == 0
    if (allowed := rule.get("allowed_token_ids")) is not None:
        assert {token for i in range(3) for token in got["g", i].token_ids.tolist()} <= set(allowed)


def test_a_rule_that_is_not_kept_would_be_noticed() -> None:
    """The negative control."""
    for rule in RULES:
        asked = group("g", [5, 6, 7, 5], n=1, max_tokens=20, seed=3, ignore_eos=True, **rule)
        plain = msgspec.structs.replace(
            asked.sampling,
            logit_bias=None,
            allowed_token_ids=None,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
        )
        assert expected(asked) != expected(msgspec.structs.replace(asked, sampling=plain))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_children_that_go_on_count_what_they_had(rule: dict[str, Any], overlap: bool) -> None:
    asked = group("g", [5, 6, 7, 5], n=3, max_tokens=16, seed=3, ignore_eos=True, **rule)
    whole = run(engine(), [asked])
    partials = []
    for index, have in ((0, 9), (2, 1)):
        sample_ = whole["g", index]
        top = {} if sample_.top_ids is None or sample_.top_logprobs is None else {
            "top_ids": sample_.top_ids[:have], "top_logprobs": sample_.top_logprobs[:have]
        }  # fmt: skip
        columns = {"token_ids": sample_.token_ids[:have], "logprobs": sample_.logprobs[:have], **top}
        partials.append(PartialSample(index=index, weight_versions=[(0, 0)], **columns))
    assert_same(whole, run(engine(overlap_steps=overlap), [msgspec.structs.replace(asked, partials=tuple(partials))]))


def test_tokens_are_counted_only_where_that_matters() -> None:
    """A group with a bias alone overlaps like any other; one with penalties waits for each of its tokens."""
    steps = {}
    for name, rule in (("none", {}), ("bias", {"logit_bias": {3: 1.0}}), ("penalty", {"presence_penalty": 1.0})):
        e = engine(overlap_steps=True)
        run(e, [group("g", [5, 6, 7], n=1, max_tokens=20, ignore_eos=True, **rule)])
        steps[name] = e.model.forwards, e.counters.unused_draws
    assert steps["none"] == steps["bias"] and steps["penalty"][0] == 20 and steps["penalty"][1] == 0


@pytest.mark.parametrize("rule", [{"allowed_token_ids": (0,)}, {"allowed_token_ids": (0, 4), "stop_token_ids": (4,)}])
def test_min_tokens_that_leave_no_allowed_token_are_refused(rule: dict[str, Any]) -> None:
    e = engine()
    with pytest.raises(ValueError, match="each of the allowed_token_ids ends a sample"):
        e.submit(group("g", [5], min_tokens=2, **rule))
    assert not e.has_work
    assert run(e, [group("g", [5], n=1, **rule)])["g", 0].finish_reason == "stop"
