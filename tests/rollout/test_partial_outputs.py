"""Tokens of children that run, as they come: through the service and the client, past slow readers, broken links and a kill."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout import RolloutClient
from rollout.client.handle import OpenHandle, PartialOutputs
from rollout.client.submission import rest_of, sendable
from rollout.engine.values import Group, Limits, PartialSample, Sample, Sampling, TokenChunk
from rollout.service import streaming
from rollout.service.session import SendLimits
from rollout.transport import messages as m
from rollout.transport.checks import Bounds
from rollout.transport.columns import pack_partials, unpack_progress
from rollout.transport.errors import InvalidRequest, ProtocolError, ServiceLost
from rollout.transport.frames import pack
from rollout.transport.loopback import LoopbackService
from tests.support.equivalence import assert_same
from tests.support.fake_engine import FakeEngine, expected
from tests.support.faulty_link import Proxy
from tests.support.tiny import tiny_engine
from tests.support.toy import engine as toy_engine
from tests.support.toy import run
from tests.support.waiting import until
from tests.support.wire import Bench, serving, submit

ROOT = Path(__file__).parents[2]
WAIT = 60.0
"""for what comes: a bound for hangs only"""
PROMPT = [5, 6, 7, 8, 9]
SAMPLING = Sampling(n=4, max_tokens=150, ignore_eos=True, seed=3, raw_logprobs=True, stream_every=4, top_logprobs=2)

SERVICE = """
import time
from rollout.config import ServiceConfig
from rollout.service.build import open_service
from tests.support.tiny import tiny_engine
engine = tiny_engine()
step = engine.step
engine.step = lambda: (time.sleep(0.005), step())[1]
service = open_service(engine, ServiceConfig(endpoint="tcp://127.0.0.1:*"))
print(service.endpoint, flush=True)
service.run()
"""


def chunk(index: int, first: int, tokens: list[int], **changed: Any) -> TokenChunk:
    values = np.full(len(tokens), -0.5, np.float32)
    fields = {"token_ids": np.array(tokens, np.int32), "logprobs": values, "weight_versions": [(0, 0)], "seed": 7}
    return TokenChunk(**{"index": index, "first": first, **fields, **changed})


def children_of(*chunks: TokenChunk) -> m.PackedChildren:
    packed = pack_partials(chunks)
    assert packed is not None
    return packed


def assert_begins(sample: Sample, partial: PartialSample) -> None:
    """The child's tokens so far are those of its sample, with what belongs to them."""
    count = len(partial.token_ids)
    assert partial.token_ids.tolist() == sample.token_ids[:count].tolist()
    assert partial.logprobs.tobytes() == sample.logprobs[:count].tobytes()
    assert partial.weight_versions == [span for span in sample.weight_versions if span[0] < count]
    if sample.raw_logprobs is not None:
        assert partial.raw_logprobs is not None and partial.raw_logprobs.tobytes() == sample.raw_logprobs[:count].tobytes()
    if sample.top_ids is not None and sample.top_logprobs is not None:
        assert partial.top_ids is not None and partial.top_ids.tolist() == sample.top_ids[:count].tolist()
        assert partial.top_logprobs is not None and partial.top_logprobs.tobytes() == sample.top_logprobs[:count].tobytes()


# ── over sockets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_chunks_are_what_the_samples_begin_with() -> None:
    told: dict[int, list[TokenChunk]] = defaultdict(list)
    with serving(toy_engine(kv_tokens=1024)) as service, RolloutClient(service.endpoint) as client:
        handle = client.submit(PROMPT, SAMPLING)
        handle.on_tokens(lambda _, new: told[new.index].append(new))
        samples = {("g", sample.index): sample for sample in handle.result(WAIT)}
        assert handle.partial_samples() == [] and handle.seed == 3
    assert_same(run(toy_engine(kv_tokens=1024), [Group("g", np.array(PROMPT, np.int32), SAMPLING)]), samples)
    assert told.keys() == {0, 1, 2, 3}
    for index, chunks in told.items():
        ends = np.cumsum([len(new.token_ids) for new in chunks]).tolist()
        assert [new.first for new in chunks] == [0, *ends[:-1]] and all(len(new.token_ids) >= 4 for new in chunks)
        for new in chunks:
            part = slice(new.first, new.first + len(new.token_ids))
            assert new.token_ids.tolist() == samples["g", index].token_ids[part].tolist() and new.seed == 3
            assert new.logprobs.tobytes() == samples["g", index].logprobs[part].tobytes()


def test_after_a_kill_children_go_on_elsewhere_to_the_same_bits() -> None:
    """SIGKILL in the middle: what was streamed is not computed again, and nobody could tell."""
    whole = run(tiny_engine(), [Group("g", np.array(PROMPT, np.int32), SAMPLING)])
    with subprocess.Popen([sys.executable, "-c", SERVICE], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with RolloutClient(address, link_timeout_s=0.5, connect_timeout_s=WAIT) as client:
                handle = client.submit(PROMPT, SAMPLING)
                until(lambda: sum(len(child.token_ids) for child in handle.partial_samples()) > 100)
                process.kill()
                with pytest.raises(ServiceLost):
                    handle.result(WAIT)
        finally:
            process.kill()
    had = handle.partial_samples()
    assert len(had) == 4 and all(0 < len(child.token_ids) < 150 for child in had)
    for child in had:
        assert_begins(whole["g", child.index], child)
    other = tiny_engine()
    with serving(other) as service, RolloutClient(service.endpoint) as client:
        again = {("g", sample.index): sample for sample in client.continue_samples(handle).result(WAIT)}
    assert_same(whole, again)
    assert other.counters.generated_tokens == 600 - sum(len(child.token_ids) for child in had), "nothing is drawn twice"


def test_a_broken_link_repeats_and_nobody_notices() -> None:
    """On a new connection chunks come again from the first token; the listener gets each token once, in order."""
    told: dict[int, list[int]] = defaultdict(list)
    engine = FakeEngine(step_s=0.001)
    with serving(engine) as service, Proxy(service.endpoint) as proxy, RolloutClient(proxy.address) as client:
        handle = client.submit([5], Sampling(n=3, max_tokens=1500, stream_every=5))
        handle.on_tokens(lambda _, new: told[new.index].extend(new.token_ids.tolist()))
        for most in (100, 400, 800):
            until(lambda: len(told[2]) > most)  # noqa: B023
            proxy.cut()
        handle.result(WAIT)
    assert proxy.cuts
    for index, tokens in told.items():
        assert len(tokens) > 1000 and tokens == expected([5], index, len(tokens))


# ── the service's end, by hand ────────────────────────────────────────────────────────────────────────────────────────────


def lengths(progress: m.Progress) -> list[tuple[str, int, int, int]]:
    return [(id, each.index, each.first, len(each.token_ids)) for id, each in unpack_progress(progress, 10**6)]


def test_whenever_so_many_tokens_are_new() -> None:
    bench = Bench()
    peer = bench.client().send(submit("g", n=2, max_tokens=20, stream_every=3), submit("h", max_tokens=20, stream_every=5))
    peer.send(submit("off", max_tokens=20))
    bench.turn(3)
    (first,) = peer.take(m.Progress)
    assert lengths(first) == [("g", 0, 0, 3), ("g", 1, 0, 3)] and first.number == 1
    peer.send(m.Ack([], 1))
    bench.turn(3)
    assert [lengths(each) for each in peer.take(m.Progress)] == [[("h", 0, 0, 5)], [("g", 0, 3, 3), ("g", 1, 3, 3)]]
    bench.settle()
    assert len(peer.samples()) == 4, "whole, whatever was streamed"


def test_who_does_not_read_gets_fewer_and_larger_chunks() -> None:
    bench = Bench()
    peer = bench.client().send(submit("g", n=2, max_tokens=5000, stream_every=1))
    bench.turn(1000)
    got = peer.take(m.Progress)
    assert [each.number for each in got] == [1, 2] and streaming.MOST_UNREAD == 2
    peer.send(m.Ack([], 1))
    bench.turn()
    (third,) = peer.take(m.Progress)
    assert lengths(third) == [("g", 0, 2, 999), ("g", 1, 2, 999)]
    peer.send(m.Ack([], 2**60))  # read no more than was sent
    bench.turn(3)
    assert [each.number for each in peer.take(m.Progress)] == [4, 5]


def test_a_message_has_a_bound_and_groups_take_turns() -> None:
    bench = Bench(send_limits=SendLimits(progress_tokens=10))
    peer = bench.client().send(*(submit(name, n=2, max_tokens=500, stream_every=40) for name in "ab"))
    bench.turn(40)
    got = []
    for _ in range(8):
        for each in peer.take(m.Progress):
            assert sum(count for *_, count in lengths(each)) <= 10
            got += lengths(each)
            peer.send(m.Ack([], each.number))
        bench.turn()
    assert {(id, index) for id, index, *_ in got} == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


def test_on_a_new_connection_all_of_it_comes_again() -> None:
    """But not what children had when their group came."""
    bench = Bench()
    peer, asked = bench.client(), submit("g", n=2, max_tokens=500, stream_every=4)
    partial = PartialSample(
        index=1, token_ids=np.array([8, 9], np.int32), logprobs=np.zeros(2, np.float32), weight_versions=[(0, 0)]
    )
    asked = msgspec.structs.replace(asked, partials=pack_partials([partial]))
    peer.send(asked)
    bench.turn(20)
    assert [each.number for each in peer.take(m.Progress)] == [1, 2]
    again = bench.connect(peer.session)
    again.hello([asked], number=2)
    bench.turn(2)
    first, *_ = again.take(m.Progress)
    assert first.number == 1 and [(index, at) for _, index, at, _ in lengths(first)] == [(0, 0), (1, 2)]


def test_groups_that_end_or_are_dropped_are_forgotten() -> None:
    bench = Bench()
    peer = bench.client().send(submit("g", max_tokens=4, stream_every=2), submit("h", max_tokens=400, stream_every=2))
    bench.turn(6)
    (session,) = bench.service._sessions
    assert session.streaming._groups.keys() == {"h"}
    peer.send(m.Hello(m.PROTOCOL, peer.session, 2, "tester"))  # it wants nothing any more
    bench.turn()
    assert not session.streaming._groups


BOUNDS = Bounds(199, frozenset())


# ── the client's end ──────────────────────────────────────────────────────────────────────────────────────────────────────


def partials(**sampling: Any) -> PartialOutputs:
    options = {"n": 3, "max_tokens": 10, **sampling}
    return PartialOutputs(Group("g", np.array([5], np.int32), Sampling(**options)))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (chunk(3, 0, [1]), "child 3"),
        (chunk(-1, 0, [1]), "child -1"),
        (chunk(0, 1, [1]), "0 are known"),
        (chunk(0, 0, []), "token_ids"),
        (chunk(0, 0, [1] * 11), "token_ids"),
        (chunk(1, 2, [1] * 9), "max_tokens=10"),
        (chunk(0, 0, [199]), "token id 199"),
        (chunk(0, 0, [-1]), "token id -1"),
        (chunk(0, 0, [1, 2], logprobs=np.zeros(1, np.float32)), "logprobs"),
        (chunk(0, 0, [1], weight_versions=[]), "weight_versions"),
        (chunk(0, 0, [1], weight_versions=[(1, 0)]), "weight_versions"),
        (chunk(0, 0, [1], weight_versions=[(0, -1)]), "below 0"),
    ],
)
def test_chunks_that_a_group_cannot_have(wrong: TokenChunk, reason: str) -> None:
    known = partials()
    known.add(chunk(1, 0, [4, 5, 6]), BOUNDS)
    with pytest.raises(ValueError, match=reason):
        known.add(wrong, BOUNDS)
    (child,) = known.partial_samples()
    assert child.token_ids.tolist() == [4, 5, 6], "nothing of it is kept"


def test_raw_logprobs_that_were_asked_for_must_come() -> None:
    with pytest.raises(ValueError, match="raw_logprobs none"):
        partials(raw_logprobs=True).add(chunk(0, 0, [1]), BOUNDS)


def test_chunks_are_joined_whatever_is_repeated() -> None:
    known = partials()
    assert known.add(chunk(0, 0, [1, 2], weight_versions=[(0, 3)]), BOUNDS) is not None
    assert known.add(chunk(0, 0, [1, 2], weight_versions=[(0, 3)]), BOUNDS) is None
    new = known.add(chunk(0, 1, [2, 3, 4, 5], weight_versions=[(0, 3), (2, 4)]), BOUNDS)
    assert new is not None and (new.first, new.token_ids.tolist(), new.weight_versions) == (2, [3, 4, 5], [(0, 3), (1, 4)])
    (child,) = known.partial_samples()
    assert child.token_ids.tolist() == [1, 2, 3, 4, 5] and child.weight_versions == [(0, 3), (3, 4)]
    assert len(child.logprobs) == 5 and child.raw_logprobs is None and known.seed == 7
    known.restart()
    assert known.partial_samples() == [] and known.seed is None


def test_a_child_that_came_back_may_run_again() -> None:
    """At a service that has lost the group, or was killed before it knew: its tokens are known, and told to nobody."""
    known = partials()
    known.add(chunk(0, 0, [1, 2]), BOUNDS)
    known.end(0)
    known.restart()
    assert known.add(chunk(0, 0, [1, 2]), BOUNDS) is None
    assert known.add(chunk(0, 2, [3, 4]), BOUNDS) is None
    assert known.partial_samples() == []
    with pytest.raises(ValueError, match="token id 199"):
        known.add(chunk(0, 4, [199]), BOUNDS)


def handle_of(sampling: Sampling, partials: tuple[PartialSample, ...] = ()) -> OpenHandle:
    group = Group("g", np.array([5], np.int32), sampling, None, partials)
    handle = sendable(group, serial=1, require_version=0, limits=Limits())
    handle.bounds = BOUNDS
    return handle


def finished(index: int, reason: str = "stop") -> Sample:
    tokens, values = np.array([1, 2], np.int32), np.zeros(2, np.float32)
    return Sample(
        group_id="g", index=index, token_ids=tokens, logprobs=values, finish_reason=reason,  # type: ignore[arg-type]
        weight_versions=[(0, 0)], prompt_tokens=1, seed=7,
    )  # fmt: skip


def test_the_rest_of_a_group() -> None:
    handle = handle_of(Sampling(n=4, max_tokens=10, finish_after=3))
    handle.add_chunk(chunk(2, 0, [4, 5]))
    handle.add_chunk(chunk(0, 0, [4, 5]))
    handle.add_sample(finished(0))
    handle.cancelled_children.add(3)
    rest = rest_of("again", handle)
    assert rest.indices == (1, 2) and [child.index for child in rest.partials] == [2] and rest.id == "again"
    assert rest.sampling.seed == 7 and rest.sampling.finish_after == 2
    handle.add_sample(finished(1))
    handle.add_sample(finished(2))
    with pytest.raises(InvalidRequest, match="nothing is left"):
        rest_of("again", handle)


def test_what_would_have_been_cut_does_not_go_on() -> None:
    handle = handle_of(Sampling(n=4, max_tokens=10, finish_after=1))
    handle.add_sample(finished(0))
    with pytest.raises(InvalidRequest, match="finish_after=1"):
        rest_of("again", handle)


def test_columns_of_an_unreadable_progress_end_no_client() -> None:
    """The client starts over, and the next group is served."""
    end = LoopbackService()
    with serving(FakeEngine(step_s=0.001), end) as service, RolloutClient(transport=end.connect()) as client:
        handle = client.submit([5], Sampling(max_tokens=40_000), group_id="g")
        until(lambda: len(list(service._sessions)) and next(iter(service._sessions)).groups)
        (session,) = service._sessions
        gap = m.Progress(1, ["g"], [7], np.zeros(1, np.int32), np.array([5], np.int32), children_of(chunk(0, 0, [1])))
        session.reply(pack(gap))
        with pytest.raises(ProtocolError, match="an impossible value"):
            handle.result(WAIT)
        assert len(client.submit([5], Sampling(max_tokens=3)).result(WAIT)) == 1
