"""Children that go on, some children only, and the end of single ones, through the client and the service."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout import RolloutClient, SampleStream
from rollout.engine.values import Group, PartialSample, Sample, Sampling
from rollout.transport import messages as m
from rollout.transport.errors import GroupFailed, InvalidRequest, RequestTimeout
from rollout.transport.loopback import LoopbackService
from tests.support.equivalence import assert_same
from tests.support.fake_engine import FakeEngine, expected
from tests.support.faulty_link import Proxy
from tests.support.toy import engine as toy_engine
from tests.support.toy import run
from tests.support.waiting import until
from tests.support.wire import Bench, serving, submit

WAIT = 60.0
"""for what comes: a bound for hangs only"""
PROMPT = [5, 6, 7, 8, 9]
SAMPLING = Sampling(n=4, max_tokens=12, ignore_eos=True, seed=3, raw_logprobs=True, top_logprobs=2)


@pytest.fixture
def clients() -> Iterator[tuple[RolloutClient, RolloutClient]]:
    """Of two services with the same model."""
    ends = LoopbackService(), LoopbackService()
    with serving(toy_engine(), ends[0]), serving(toy_engine(), ends[1]):
        with RolloutClient(transport=ends[0].connect()) as one, RolloutClient(transport=ends[1].connect()) as other:
            yield one, other


def whole() -> dict[tuple[str, int], Sample]:
    return run(toy_engine(), [Group("g", np.array(PROMPT, np.int32), SAMPLING)])


def named(samples: list[Sample]) -> dict[tuple[str, int], Sample]:
    return {("g", sample.index): sample for sample in samples}


def cut(sample: Sample, tokens: int) -> Sample:
    """The same child, stopped after so many tokens."""
    assert sample.raw_logprobs is not None and sample.top_ids is not None and sample.top_logprobs is not None
    return msgspec.structs.replace(
        sample,
        token_ids=sample.token_ids[:tokens],
        logprobs=sample.logprobs[:tokens],
        raw_logprobs=sample.raw_logprobs[:tokens],
        top_ids=sample.top_ids[:tokens],
        top_logprobs=sample.top_logprobs[:tokens],
        finish_reason="cut",
        weight_versions=sample.weight_versions if tokens else [],
    )


def test_a_group_split_over_two_services(clients: tuple[RolloutClient, RolloutClient]) -> None:
    one, other = clients
    handles = one.submit(PROMPT, SAMPLING, indices=[0, 3]), other.submit(PROMPT, SAMPLING, indices=np.array([1, 2]))
    assert [handle.n for handle in handles] == [2, 2]
    assert_same(whole(), named([sample for handle in handles for sample in handle.result(WAIT)]))


def test_children_go_on_at_another_service(clients: tuple[RolloutClient, RolloutClient]) -> None:
    want = whole()
    samples = [cut(want["g", index], tokens) for index, tokens in ((2, 7), (0, 1), (3, 0))]
    got = clients[1].continue_samples(samples, PROMPT, msgspec.structs.replace(SAMPLING, seed=None)).result(WAIT)
    assert_same({key: want[key] for key in want if key[1] != 1}, named(got))
    for sample in got:
        raw = want["g", sample.index].raw_logprobs
        assert raw is not None and sample.raw_logprobs is not None and raw.tobytes() == sample.raw_logprobs.tobytes()
    alone = clients[0].continue_samples(samples[0], PROMPT, SAMPLING, group_id="alone").result(WAIT)
    assert [(sample.group_id, sample.index) for sample in alone] == [("alone", 2)]


def test_what_was_cut_goes_on(clients: tuple[RolloutClient, RolloutClient]) -> None:
    """finish_after at one service, the rest at the other; the seed is the engine's own choice."""
    asked = Sampling(n=5, max_tokens=40, finish_after=2)
    first = clients[0].submit(PROMPT, asked).result(WAIT)
    late = [sample for sample in first if sample.finish_reason == "cut"]
    assert len(late) == 3
    rest = clients[1].continue_samples(late, PROMPT, msgspec.structs.replace(asked, finish_after=None)).result(WAIT)
    seeded = msgspec.structs.replace(asked, finish_after=None, seed=first[0].seed)
    want = run(toy_engine(), [Group("g", np.array(PROMPT, np.int32), seeded)])
    assert_same(want, named([sample for sample in first if sample.finish_reason != "cut"] + rest))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ([], "no samples"),
        ([{"finish_reason": "stop"}], "ended by themselves"),
        ([{"finish_reason": "error"}], "failed"),
        ([{}, {"index": 1, "seed": 4}], "one of|of one group"),
        ([{}, {}], "indices="),
    ],
)
def test_what_cannot_go_on_is_refused(
    changed: list[dict[str, Any]], reason: str, clients: tuple[RolloutClient, RolloutClient]
) -> None:
    sample = cut(whole()["g", 0], 3)
    with pytest.raises(InvalidRequest, match=reason):
        clients[0].continue_samples([msgspec.structs.replace(sample, **each) for each in changed], PROMPT, SAMPLING).result(
            WAIT
        )
    with pytest.raises(InvalidRequest, match="PartialSample.of"):
        clients[0].submit(PROMPT, SAMPLING, partials=[sample])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="indices"):
        clients[0].submit(PROMPT, SAMPLING, indices=["0"])  # type: ignore[list-item]


@pytest.fixture
def scripted() -> Iterator[tuple[RolloutClient, FakeEngine]]:
    end, engine = LoopbackService(), FakeEngine()
    with serving(engine, end), RolloutClient(transport=end.connect()) as client:
        yield client, engine


def test_single_children_are_cancelled(scripted: tuple[RolloutClient, FakeEngine]) -> None:
    client, engine = scripted
    handle = client.submit([5], Sampling(n=4, max_tokens=40_000))
    until(lambda: engine.groups)
    handle.cancel([1, 3])
    first = {sample.index: sample for sample in islice(handle.samples(WAIT), 2)}
    assert first.keys() == {1, 3} and not handle.done
    assert all(sample.finish_reason == "aborted" for sample in first.values())
    assert first[1].token_ids.tolist() == expected([5], 1, len(first[1].token_ids))
    handle.cancel()
    assert [sample.index for sample in handle.result(WAIT)] == [0, 1, 2, 3]
    with pytest.raises(InvalidRequest, match="no child 4"):
        handle.cancel([4])


def test_a_cancelled_child_is_not_forgotten_where_the_link_breaks() -> None:
    """The Abort is lost with the connection, and is asked again on the next one."""
    engine = FakeEngine(step_s=0.001)
    with serving(engine) as service, Proxy(service.endpoint) as proxy, RolloutClient(proxy.address) as client:
        handle = client.submit([5], Sampling(n=2, max_tokens=40_000))
        until(lambda: engine.groups)
        proxy.mute = True
        proxy.cut()
        handle.cancel([1])
        proxy.mute = False
        ended = next(handle.samples(WAIT))
        assert (ended.index, ended.finish_reason) == (1, "aborted")
        handle.cancel()
        assert len(handle.result(WAIT)) == 2


def test_cancelled_before_it_was_sent_a_child_that_has_begun_keeps_its_tokens(
    scripted: tuple[RolloutClient, FakeEngine],
) -> None:
    client, engine = scripted
    limits = client.info.limits
    large = [client.submit([5], Sampling(n=1024, max_tokens=40_000)) for _ in range(limits.max_samples_per_client // 1024)]
    partial = PartialSample(
        index=1, token_ids=np.array([8, 9], np.int32), logprobs=np.zeros(2, np.float32), weight_versions=[(0, 0)]
    )
    waits = client.submit([5], Sampling(n=2, max_tokens=10), partials=[partial])
    waits.cancel()
    ended = waits.result(WAIT)
    assert [(sample.finish_reason, sample.token_ids.tolist()) for sample in ended] == [("aborted", []), ("aborted", [8, 9])]
    for handle in large:
        handle.cancel()


def test_samples_of_several_groups_as_they_come(scripted: tuple[RolloutClient, FakeEngine]) -> None:
    """Groups are added while others are waited for, also one that is done; each sample comes once."""
    client, _ = scripted
    arrivals, done = SampleStream(), client.submit([1], Sampling(n=2, max_tokens=3))
    done.result(WAIT)
    arrivals.add(done)
    later = client.submit([2], Sampling(n=3, max_tokens=3))
    arrivals.add(later)
    got = [arrivals.get(WAIT) for _ in range(5)]
    assert {(handle, sample.index) for handle, sample in got} == {(done, 0), (done, 1), *((later, i) for i in range(3))}
    with pytest.raises(RequestTimeout):
        arrivals.get(0.01)
    arrivals.add(client.submit([1000], Sampling()))
    with pytest.raises(InvalidRequest, match="token id 1000"):
        arrivals.get(WAIT)


def test_children_that_a_group_does_not_have_cost_nothing() -> None:
    """An Abort of made-up indices leaves nothing behind that waits for its turn."""
    bench = Bench()
    peer = bench.client().send(submit("g", n=3, max_tokens=50))
    bench.turn()
    peer.send(m.Abort([], [("g", index) for index in (-1, 3, 2**40, *range(1000, 3000))] + [("other", 0), ("g", 2)]))
    asked: list[int | None] = []
    abort = bench.engine.abort
    bench.engine.abort = lambda group_id, index=None: (asked.append(index), abort(group_id, index))[1]  # type: ignore[method-assign]
    bench.turn(3)
    assert asked == [2] and not bench.service._running.has_aborts
    assert [(sample.index, sample.finish_reason) for sample in peer.samples()] == [(2, "aborted")]


def test_scores_are_those_of_the_samples(clients: tuple[RolloutClient, RolloutClient]) -> None:
    """At another service; a prompt with one completion beside one with four."""
    want = [sample for _, sample in sorted(whole().items())]
    completions = [[want[0].token_ids], [sample.token_ids.tolist() for sample in want]]
    single, group = clients[1].score([PROMPT, PROMPT], completions, SAMPLING, timeout=WAIT)
    for scores, sample in [(single[0], want[0]), *zip(group, want, strict=True)]:
        assert scores.logprobs.tobytes() == sample.logprobs.tobytes() and scores.weight_versions == [(0, 0)]
        assert sample.raw_logprobs is not None and scores.raw_logprobs is not None
        assert scores.raw_logprobs.tobytes() == sample.raw_logprobs.tobytes()
    (cold,) = clients[0].score([PROMPT], [completions[0]], Sampling(temperature=0.5), timeout=WAIT)[0]
    assert cold.logprobs.tobytes() != want[0].logprobs.tobytes() and cold.raw_logprobs is None


@pytest.mark.parametrize(
    ("prompts", "completions", "why"),
    [
        ([PROMPT], [], "1 prompts, 0 lists of completions"),
        ([PROMPT], [[]], "a prompt has no completions: give at least one"),
        ([PROMPT], [[[1], []]], "completion 1 has no tokens"),
        ([PROMPT], [[["a"]]], "integer token ids"),
        ([PROMPT], [[[10_000]]], "holds token id 10000"),
        ([PROMPT], [[[1] * 400]], "exceeds the context"),
        ([[]], [[[1]]], "prompt of 0 tokens"),
    ],
)
def test_bad_scores_are_refused(clients: tuple[RolloutClient, RolloutClient], prompts: Any, completions: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        clients[0].score(prompts, completions, timeout=WAIT)
    assert clients[0].status()["groups"] == 0


def test_a_score_that_is_not_waited_for_is_a_group_like_others(clients: tuple[RolloutClient, RolloutClient]) -> None:
    want = [sample for _, sample in sorted(whole().items())]
    handle = clients[1].submit_score(PROMPT, [sample.token_ids for sample in want], SAMPLING, group_id="mine")
    scored = handle.result(WAIT)
    assert handle.group_id == "mine" and {sample.finish_reason for sample in scored} == {"scored"}
    for scores, sample in zip(scored, want, strict=True):
        assert scores.logprobs.tobytes() == sample.logprobs.tobytes()
    with pytest.raises(InvalidRequest, match="completion 0 has no tokens"):
        clients[0].submit_score(PROMPT, [[]])
    clients[0].pause()
    handle = clients[0].submit_score(PROMPT, [[1, 2]])
    handle.cancel()
    assert [sample.finish_reason for sample in handle.result(WAIT)] == ["aborted"]


def test_a_score_that_somebody_ends_is_an_error(clients: tuple[RolloutClient, RolloutClient]) -> None:
    clients[0].pause()
    with ThreadPoolExecutor(1) as threads:
        scored = threads.submit(clients[0].score, [PROMPT], [[[1, 2]]], Sampling(deadline_s=0.01), timeout=WAIT)
        until(lambda: clients[0].status()["waiting"], "it waits, over its deadline too")
        clients[0].abort_all()
        with pytest.raises(GroupFailed, match="ended as 'aborted'"):
            scored.result(WAIT)


# ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
TURN = Sampling(max_tokens=6, ignore_eos=True, seed=5, kv_ttl_s=600.0)
"""in the toy's blocks of 4: 5 tokens of prompt and 5 of 6 outputs have KV, 2 whole blocks of it"""


def prefilled(client: RolloutClient, handle: Any) -> int:
    """Wait for a group; returns how many tokens the service has prefilled since its start."""
    handle.result(WAIT)
    return int(client.status(WAIT)["prefill_tokens"])


def test_a_turn_continues_one_sample() -> None:
    """The whole prompt travels, and only the last token and what follows it is computed."""
    end, engine = LoopbackService(), toy_engine()
    with serving(engine, end), RolloutClient(transport=end.connect()) as client:
        first = client.submit(PROMPT, TURN)
        before = prefilled(client, first)
        (sample,) = first.result(WAIT)
        again = client.next_turn(sample, PROMPT, msgspec.structs.replace(TURN, kv_ttl_s=0.0), append=[7, 8, 9])
        assert again.group.prompt.tolist() == [*PROMPT, *sample.token_ids.tolist(), 7, 8, 9] and again.group.after == ("#0", 0)
        assert prefilled(client, again) - before == 4
        status = client.status(WAIT)
        assert status["kept_tokens"] == 10 and status["kv"]["kept_children"] == 0
        alone = run(toy_engine(), [Group("g", again.group.prompt, again.group.sampling)])
        assert again.result(WAIT)[0].token_ids.tolist() == alone["g", 0].token_ids.tolist()


def test_somebody_elses_turn_cannot_be_told_from_none() -> None:
    """What another client has is not found under its name, nor is it given up; the owner's turn finds it then."""
    computed = []
    for name in ("conversation", "nothing"):
        end, engine = LoopbackService(), toy_engine()
        with (
            serving(engine, end),
            RolloutClient(transport=end.connect()) as one,
            RolloutClient(transport=end.connect()) as other,
        ):
            (sample,) = one.submit(PROMPT, TURN, "conversation").result(WAIT)
            named = msgspec.structs.replace(sample, group_id=name)
            computed.append(prefilled(other, other.next_turn(named, PROMPT, TURN, "stranger", append=[7, 8, 9])))
            other.submit([1], TURN, "conversation").cancel()
            assert one.status(WAIT)["kept_tokens"] == 0
            one.next_turn(sample, PROMPT, TURN, "conversation", append=[7, 8, 9]).result(WAIT)
            assert one.status(WAIT)["kept_tokens"] == 10, "an id that is used again means its last owner until then"
    assert computed == [11, 11], "5 and, behind two blocks of the prefix index, 6"


def test_what_is_kept_is_given_up_when_asked_and_with_its_client() -> None:
    end, engine = LoopbackService(), toy_engine()

    def kept() -> int:
        return len(engine.scheduler.state.pinned)

    with serving(engine, end):
        with RolloutClient(transport=end.connect()) as client:
            handles = [client.submit([*PROMPT, i], msgspec.structs.replace(TURN, n=2), f"g{i}") for i in range(4)]
            for handle in handles:
                handle.result(WAIT)
            assert kept() == 8
            handles[0].cancel()
            handles[1].cancel([1])
            until(lambda: kept() == 5)
            client.submit(PROMPT, TURN, "g2").result(WAIT)
            until(lambda: kept() == 4)
        until(lambda: kept() == 0)


@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({"finish_reason": "error", "error": "NaN"}, {}, "continue another one"),
        ({"prompt_tokens": 4}, {}, "give the prompt of its group"),
        ({}, {"append": []}, "append is empty"),
        ({}, {"append": [0.5]}, "integer token ids"),
        ({}, {"append": [10**6]}, "token id 1000000"),
        ({}, {"sampling": Sampling(kv_ttl_s=1e9)}, "max_kv_ttl_s"),
        ({}, {"sampling": Sampling(max_tokens=10_000)}, "context"),
    ],
)
def test_a_turn_that_cannot_be_is_refused(
    changed: dict[str, Any], options: dict[str, Any], reason: str, clients: tuple[RolloutClient, RolloutClient]
) -> None:
    """And what was kept for it still is."""
    client = clients[0]
    (sample,) = client.submit(PROMPT, TURN).result(WAIT)
    with pytest.raises(InvalidRequest, match=reason):
        arguments = {"sampling": TURN, "append": [7], **options}
        client.next_turn(msgspec.structs.replace(sample, **changed), PROMPT, **arguments).result(WAIT)
    assert client.status(WAIT)["kv"]["kept_children"] == 1
    with pytest.raises(InvalidRequest, match="continues one sample"):
        client.next_turn([sample], PROMPT, TURN, append=[7])  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [("other", 0), ("", 0), ("g", 2**40), ("g", -1), ("x" * 5000, 0)])
def test_a_hint_that_names_nothing_changes_nothing(after: tuple[str, int]) -> None:
    bench = Bench()
    peer = bench.client().send(submit("g", max_tokens=3, kv_ttl_s=60.0))
    bench.settle()
    peer.send(msgspec.structs.replace(submit("h", max_tokens=3), after=after))
    bench.settle()
    assert [sample.group_id for sample in peer.samples()] == ["g", "h"] and not peer.take(m.Refused)
