"""Samples of untrusted replicas are computed again on trusted ones; the first lie bans whoever sent it."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.client.api import RolloutClient
from rollout.commands.arguments import ServeArgs, parse
from rollout.commands.serve import configured
from rollout.commands.serve_fleet import check_verifiable, owners_of
from rollout.config import CannotServe, FleetConfig
from rollout.engine.engine import Engine
from rollout.engine.values import Group, PartialSample, Sample, Sampling, Served, manifest_digest
from rollout.fleet import verifier as verifier_module
from rollout.fleet.fleet import Fleet, FleetOptions
from rollout.fleet.open_groups import OpenGroup
from rollout.fleet.owners import MOST_GROUPS, Ban, Owner, Owners
from rollout.fleet.unclear import FIRST_S, LEAST, UnclearShares
from rollout.fleet.verifier import Verification
from rollout.service.journal import BanRow, Journal
from tests.bench import forgeries
from tests.support.fleet import (
    KEYS,
    WAIT,
    Threads,
    check,
    collect,
    fleet_of,
    fleet_over,
    prompt,
    refresh,
    router_of,
    step_until,
)
from tests.support.hash_engine import expected, manifest_of, weights_of
from tests.support.scored_only import score_only
from tests.support.tiny import tiny, tiny_engine

REPLACE = msgspec.structs.replace
Change = Callable[[Sample], Sample]
ALL = Verification(1.0)
"""every child is verified"""


def group(i: int, **sampling: Any) -> Group:
    return Group(f"g{i}", prompt(i), Sampling(**{"n": 4, "max_tokens": 20, "seed": i, **sampling}), label=f"mine {i}")


def lies(threads: Threads, change: Change, name: str = "r1") -> None:
    """Have the samples that a replica's engine has generated changed before they are sent."""
    engine = threads.engines[name]
    step = engine.step
    engine.step = lambda: [one if one.finish_reason == "scored" else change(one) for one in step()]


def judged(fleet: Fleet, found: tuple[int, int]) -> bool:
    """Whether so many samples were verified, and so many are lies."""
    return counts(fleet)[:2] == found


def logprobs_of(tokens: np.ndarray) -> np.ndarray:
    """Return the log-probs that a hash engine gives to tokens."""
    return (-(tokens + 1) / 997).astype(np.float32)


def other_token(at: int) -> Change:
    """Make a change of the token at a position, and of its log-prob: one that is possible."""

    def change(sample: Sample) -> Sample:
        tokens, logprobs = sample.token_ids.copy(), sample.logprobs.copy()
        tokens[at] = (tokens[at] + 1) % 997
        logprobs[at] = -(tokens[at] + 1) / 997
        return REPLACE(sample, token_ids=tokens, logprobs=logprobs)

    return change


@contextmanager
def trusting(
    verification: Verification = ALL, trusted: Sequence[str] = ("r0",), count: int = 2, **options: Any
) -> Iterator[tuple[Fleet, Threads]]:
    with fleet_of(count, owners=Owners(trusted), verification=verification, **options) as (fleet, threads):
        yield fleet, threads


def recorded(fleet: Fleet) -> list[Sample]:
    """Return a list that gets every sample that ends, also during a refresh."""
    ended, step = list[Sample](), fleet.step

    def recording() -> list[Sample]:
        samples = step()
        ended.extend(samples)
        return samples

    fleet.step = recording  # type: ignore[method-assign]
    return ended


def only_verifies(fleet: Fleet, name: str) -> None:
    """Have a trusted replica generate nothing."""
    replicas = fleet.replicas
    serving = replicas.serving
    replicas.serving = lambda: [one for one in serving() if one.name != name]  # type: ignore[method-assign]
    replicas.trusted = lambda: [one for one in serving() if one.name == name]  # type: ignore[method-assign]


def counts(fleet: Fleet) -> tuple[int, int, int, int]:
    """Return verified, lies, unverifiable, skipped."""
    about = fleet.status()["fleet"]
    return about["verified"], about["lies"], about["unverifiable"], about["verify_skipped"]


def ran(threads: Threads, name: str) -> int:
    return int(threads.engines[name].made["generated_tokens"])


# a liar is found


def test_the_first_lie_bans_and_nothing_of_it_is_returned() -> None:
    """With all children verified. Its groups run elsewhere; the status has the evidence; it cannot join again."""
    with trusting() as (fleet, threads):
        lies(threads, other_token(7))
        for i in range(8):
            fleet.submit(group(i))
        check(collect(fleet, 32).values())
        (ban,) = fleet.status()["fleet"]["bans"]
        assert ban["owner"] == "replica r1" and not ban["groups"]
        assert "first_bad=7" in ban["why"] and "field=token_ids" in ban["why"] and "verified by r0" in ban["why"]
        assert "group 'mine " in ban["why"] and "expected=" in ban["why"] and "got=" in ban["why"]
        assert counts(fleet)[1] >= 1
        threads.refused.clear()
        threads.start("r1")
        step_until(fleet, lambda: "r1" in threads.refused, "it is refused")
        assert threads.refused["r1"] == f"replica r1 is banned: {ban['why']}"
        made = ran(threads, "r1")
        for i in range(8, 12):
            fleet.submit(group(i))
        check(collect(fleet, 16).values())
        assert ran(threads, "r1") == made and fleet.status()["fleet"]["lies"] == counts(fleet)[1]


def test_without_verification_the_lies_are_returned() -> None:
    """The negative control."""
    with trusting(Verification(0.0)) as (fleet, threads):
        lies(threads, other_token(7))
        for i in range(8):
            fleet.submit(group(i))
        with pytest.raises(AssertionError):
            check(collect(fleet, 32).values())
        assert not fleet.status()["fleet"]["bans"] and counts(fleet) == (0, 0, 0, 0)


def test_trusted_replicas_are_not_verified() -> None:
    with trusting(trusted=("r0", "r1")) as (fleet, _):
        for i in range(8):
            fleet.submit(group(i))
        check(collect(fleet, 32).values())
        assert counts(fleet) == (0, 0, 0, 0)


def test_honest_replicas_raise_no_alarm() -> None:
    """With refreshes in the middle, of which some samples live through several versions: they have no verdict."""
    with trusting(count=3, step_s=0.001) as (fleet, threads):
        number, ended = 0, recorded(fleet)
        for version in range(1, 5):
            for _ in range(12):
                fleet.submit(group(number, n=6, max_tokens=30 + number % 50))
                number += 1
            refresh(fleet, version)
        step_until(fleet, lambda: len(ended) == 6 * number, "all have ended")
        check(ended)
        verified, lied, unverifiable, skipped = counts(fleet)
        assert verified > 0 < unverifiable and (lied, skipped) == (0, 0) and not fleet.status()["fleet"]["bans"]
        assert verified + unverifiable <= 6 * number and min(ran(threads, name) for name in ("r1", "r2")) > 0


def test_as_many_lies_go_by_as_chance_lets() -> None:
    """A replica that lies one time in four, a fifth of whose children are verified: the ban comes after 20 samples on average.
    By a seed, exactly so many are delivered; all but the verified ones are named."""
    draw, lying, delivered = random.Random(8), random.Random(1), 0
    caught = expected_at = 0
    twin, twin_lies = random.Random(8), random.Random(1)
    while not expected_at:
        caught += 1
        lie = twin_lies.random() < 0.25
        if twin.random() < 0.2 and lie:
            expected_at = caught
    with trusting(Verification(0.2, draw=draw.random), count=2) as (fleet, threads):
        lies(threads, lambda sample: other_token(3)(sample) if lying.random() < 0.25 else sample)
        only_verifies(fleet, "r0")
        while not fleet.status()["fleet"]["bans"]:
            fleet.submit(group(delivered, n=1))
            delivered += 1
            step_until(fleet, lambda: not fleet._groups.open or fleet.status()["fleet"]["bans"])
        (ban,) = fleet.status()["fleet"]["bans"]
        verified = counts(fleet)[0]
        assert delivered == expected_at and counts(fleet) == (verified, 1, 0, 0)
        named = [each["group"] for each in ban["groups"]]
        assert len(named) == delivered - 1 - verified and set(named) < {f"mine {i}" for i in range(delivered)}


@pytest.mark.parametrize(("share", "lying"), [(0.05, 1.0), (0.05, 0.2), (0.5, 0.02), (1.0, 0.1)])
def test_how_long_a_liar_lasts(share: float, lying: float) -> None:
    """1 / (share x lying) samples on average."""
    rng, lasted = np.random.default_rng(0), []
    found = rng.random((2_000_000, 2))
    at = np.flatnonzero((found[:, 0] < share) & (found[:, 1] < lying))
    lasted = np.diff(at, prepend=-1)
    assert abs(lasted.mean() * share * lying - 1) < 0.05


def test_no_replica_knows_the_numbers() -> None:
    assert isinstance(Verification().draw.__self__, random.SystemRandom)  # type: ignore[attr-defined]


# adversaries, with a real model: each sends what a model may have generated, and nothing impossible

REAL = Sampling(n=4, max_tokens=12, seed=100)
REAL_PROMPT = np.array([5, 9, 11, 42, 7, 7, 3, 120, 60, 17, 4], np.int32)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


def run(engine: Engine, *groups: Group) -> list[Sample]:
    """Return the samples of groups, by group and index."""
    for each in groups:
        engine.submit(each)
    ended: list[Sample] = []
    while len(ended) < sum(len(each.wanted) for each in groups):
        ended += engine.step()
    return sorted(ended, key=lambda one: (one.group_id, one.index))


class Adversary:
    """Makes samples of a kind of `forgeries`, or with a right prefix and other tokens after it ("prefix"), with engines of its
    own. every: how many of its samples are honest between two lies."""

    def __init__(self, kind: str, model: Any, every: int = 1) -> None:
        self.kind, self.every, self.seen = kind, every, 0
        self.engine = tiny_engine(model=tiny("llama", seed=1) if kind == "old_weights" else model)
        self.rng = random.Random(0)

    def __call__(self, sample: Sample) -> Sample:
        self.seen += 1
        if self.seen % self.every or not len(sample.token_ids):
            return sample
        sampling = REPLACE(REAL, seed=sample.seed)
        if self.kind == "prefix":
            had = PartialSample.of(sample).slice(0, 6)
            known = PartialSample(index=sample.index, **had.columns())
            other = REPLACE(sampling, seed=sample.seed + 1)
            (made,) = run(self.engine, Group("other", REAL_PROMPT, other, (sample.index,), (known,)))
            return REPLACE(made, group_id=sample.group_id, seed=sample.seed)
        ways = forgeries.instead(self.kind, sampling)
        groups = [Group(f"other{i}", REAL_PROMPT, how, (sample.index,)) for i, how in enumerate(ways)]
        return forgeries.forged(self.kind, sample, run(self.engine, *groups), self.rng)


@pytest.mark.some(4)
@pytest.mark.parametrize("kind", [*forgeries.KINDS, "prefix"])
def test_an_adversary_is_banned(kind: str, model: Any) -> None:
    """And not one of its samples is delivered, if all are verified."""
    honest = run(tiny_engine(model=model), *(Group(f"g{i}", REAL_PROMPT, REPLACE(REAL, seed=i)) for i in range(4)))
    with trusting(make=lambda: tiny_engine(model=model)) as (fleet, threads):
        lies(threads, Adversary(kind, model))
        fleet.replicas.by_name["r0"].load = 10_000  # so that the other one gets groups
        for i in range(4):
            fleet.submit(Group(f"g{i}", REAL_PROMPT, REPLACE(REAL, seed=i)))
        got = collect(fleet, 16)
        (ban,) = fleet.status()["fleet"]["bans"]
        assert counts(fleet)[1] > 0 and not ban["groups"] and "field=" in ban["why"]
        assert ("field=token_ids" in ban["why"]) or kind in ("logprob", "old_weights", "temperature")
        for one in honest:
            assert not forgeries.differ(one, got[one.group_id, one.index])


def test_without_drawing_again_the_best_of_eight_passes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: log-probs alone are right for any seed."""
    score_only(monkeypatch)
    with trusting(make=lambda: tiny_engine(model=model)) as (fleet, threads):
        lies(threads, Adversary("best_of_8", model))
        fleet.replicas.by_name["r0"].load = 10_000
        fleet.submit(Group("g0", REAL_PROMPT, REAL))
        collect(fleet, 4)
        assert counts(fleet) == (4, 0, 0, 0)


def test_one_that_seldom_lies_is_found(model: Any) -> None:
    """Every fifth sample is a lie. Half of its samples are verified; the others are delivered, and named."""
    with trusting(Verification(0.5, draw=random.Random(3).random), make=lambda: tiny_engine(model=model)) as (fleet, threads):
        only_verifies(fleet, "r0")
        lies(threads, Adversary("token", model, every=5))
        number = 0
        while not fleet.status()["fleet"]["bans"]:
            fleet.submit(REPLACE(Group(f"g{number}", REAL_PROMPT, REPLACE(REAL, seed=number, n=1)), label=f"mine {number}"))
            number += 1
            step_until(fleet, partial(settled, fleet), "it is judged")
        (ban,) = fleet.status()["fleet"]["bans"]
        verified = counts(fleet)[0]
        assert number % 5 == 0 and counts(fleet) == (verified, 1, 0, 0) and len(ban["groups"]) == number - 1 - verified


def settled(fleet: Fleet) -> bool:
    return not fleet._groups.open or bool(fleet.status()["fleet"]["bans"])


def test_honest_replicas_of_a_real_model_raise_no_alarm(model: Any) -> None:
    """Cuts, stop tokens, aborts, continued samples, turns, streams and a refresh: 0 lies."""
    ends = {"stop_token_ids": tuple(range(60)), "max_tokens": 30}
    ways: list[dict[str, Any]] = [
        {}, {"top_p": 0.8, "temperature": 0.7}, {"n": 8, "finish_after": 2, **ends}, {"min_tokens": 3, **ends},
        {"repetition_penalty": 1.3, "raw_logprobs": True, "top_logprobs": 2}, {"stream_every": 2, "max_tokens": 24},
    ]  # fmt: skip
    samplings = [REPLACE(REAL, seed=i, **how) for i, how in enumerate(ways)]
    with trusting(make=lambda: tiny_engine(model=tiny("llama")), count=2) as (fleet, _), router_of(fleet) as service:
        only_verifies(fleet, "r0")
        with RolloutClient(service.endpoint, connect_timeout_s=WAIT) as client:

            def all_ways() -> list[list[Sample]]:
                return list(client.generate_groups([REAL_PROMPT] * len(ways), samplings, timeout=WAIT))

            first = all_ways()[0]
            kept = REPLACE(REAL, kv_ttl_s=60.0)
            one = client.submit(REAL_PROMPT, kept).result(WAIT)[0]
            client.next_turn(one, REAL_PROMPT, append=[3, 4, 5], sampling=REAL).result(WAIT)
            early = {"finish_reason": "aborted"}
            shorter = [REPLACE(one, token_ids=one.token_ids[:5], logprobs=one.logprobs[:5], **early) for one in first]
            client.continue_samples(shorter, REAL_PROMPT, samplings[0]).result(WAIT)
            long = client.submit(REAL_PROMPT, REPLACE(REAL, max_tokens=400, stream_every=1))
            started = threading.Event()
            long.on_tokens(lambda handle, chunk: started.set())
            assert started.wait(WAIT)
            long.cancel([1])
            other = {name: 2 * tensor for name, tensor in model.state_dict().items()}
            client.refresh(other.items(), version=4, timeout=WAIT)
            long.cancel()
            long.result(WAIT)
            all_ways()
            about = client.status()["fleet"]
    assert (
        about["verified"] > 60
        and about["unverifiable"] + about["verify_skipped"] > 0
        and (about["lies"], about["bans"]) == (0, [])
    )


# whose tokens


def test_a_child_that_was_moved_accuses_who_made_the_wrong_token() -> None:
    """r1 streams wrong tokens and dies; r2 goes on from them in good faith. r1 is banned, and the child begins again."""
    with trusting(count=3, step_s=0.002) as (fleet, threads):
        threads.again = False
        engine = threads.engines["r1"]
        chunks = engine.chunks

        def wrong(*given: Any) -> list[Any]:
            found = chunks(*given)
            for chunk in found:
                if chunk.first == 0:
                    chunk.token_ids[2] = (chunk.token_ids[2] + 1) % 997
                    chunk.logprobs[2] = -(chunk.token_ids[2] + 1) / 997
            return found

        engine.chunks = wrong
        only_verifies(fleet, "r0")
        for i in range(6):
            fleet.submit(group(i, n=2, max_tokens=120, stream_every=8))
        step_until(fleet, lambda: any(one.has(20) for one in parts(fleet, "r1")), "it has streamed")
        threads.die("r1")
        ended = collect(fleet, 12)
        check(ended.values())
        (ban,) = fleet.status()["fleet"]["bans"]
        assert ban["owner"] == "replica r1" and "first_bad=2" in ban["why"]
        assert fleet.replicas.by_name["r2"].state.value == "serving"


@pytest.mark.parametrize(("stream_every", "decision"), [(0, "again"), (8, "deliver")])
def test_a_child_whose_tokens_its_client_has_is_not_generated_again(stream_every: int, decision: str) -> None:
    """After a refresh it would have others, and its client would not believe the service. The control streams nothing."""
    with trusting() as (fleet, _):
        one = OpenGroup.of(group(1, stream_every=stream_every), "", 0.0)
        fleet.submit(group(2))
        sample = REPLACE(next(iter(collect(fleet, 4).values())), weight_versions=[(0, 0), (1, 1)])
        owner = fleet.replicas.by_name["r1"].owner
        assert fleet._groups._verifier.decide(one, sample, [(0, owner)], 1, trusted=True) == decision


class Streamed(msgspec.Struct):
    known: list[int]

    def has(self, count: int) -> bool:
        return any(tokens > count for tokens in self.known)


def parts(fleet: Fleet, name: str) -> list[Streamed]:
    found = fleet._groups.at[fleet.replicas.by_name[name]]
    return [Streamed([len(child.token_ids) for child in part.handle.partial_samples()]) for part in found]


def test_tokens_that_a_client_gave_accuse_nobody() -> None:
    """A client continues tokens that nobody has drawn: no lie of the replica that goes on from them. A wrong token after them
    is one."""
    given = np.array([5, 6, 7], np.int32)
    child = PartialSample(index=0, token_ids=given, logprobs=logprobs_of(given), weight_versions=[(0, 0)])
    with trusting() as (fleet, _):
        only_verifies(fleet, "r0")
        fleet.submit(REPLACE(group(1, n=1), partials=(child,)))
        ((_, sample),) = collect(fleet, 1).items()
        assert sample.token_ids[:3].tolist() == [5, 6, 7] and counts(fleet) == (0, 0, 1, 0)
    right = np.array(expected(prompt(1), REPLACE(sample, token_ids=given), KEYS), np.int32)
    true = PartialSample(index=0, token_ids=right, logprobs=logprobs_of(right), weight_versions=[(0, 0)])
    for at, found in ((3, (0, 1)), (None, (1, 0))):
        with trusting() as (fleet, threads):
            only_verifies(fleet, "r0")
            if at is not None:
                lies(threads, other_token(at))
            fleet.submit(REPLACE(group(1, n=1), partials=(true,)))
            step_until(fleet, partial(judged, fleet, found), "it is judged")


# what waits


def test_a_full_queue_skips_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(verifier_module, "MOST_TOKENS", 100)  # three children
    with trusting() as (fleet, _):
        only_verifies(fleet, "r0")
        fleet.replicas.trusted = list  # type: ignore[method-assign]
        fleet.submit(group(1, n=8))
        ended = step_until(fleet, lambda: counts(fleet)[3] == 5, "five are skipped")
        assert len(ended) == 5 and fleet.status()["fleet"]["verifying"] == 3
        assert [one["skipped"] for one in fleet.status()["replicas"]] == [0, 5]
        assert "96 tokens wait to be verified" in caplog.text
        only_verifies(fleet, "r0")
        fleet.replicas.trusted = lambda: [fleet.replicas.by_name["r0"]]  # type: ignore[method-assign]
        check([*ended, *collect(fleet, 3).values()])
        assert counts(fleet) == (3, 0, 0, 5)


def test_a_sample_waits_no_longer_than_it_may(caplog: pytest.LogCaptureFixture) -> None:
    """No trusted replica serves: generation goes on, later."""
    with trusting(Verification(1.0, wait_s=0.05)) as (fleet, threads):
        threads.again = False
        threads.die("r0")
        step_until(fleet, lambda: fleet.replicas.by_name["r0"].state.value == "dead")
        fleet.submit(group(1))
        check(collect(fleet, 4).values())
        assert counts(fleet) == (0, 0, 0, 4) and "no verdict within 0.05 s" in caplog.text


def test_a_trusted_replica_that_dies_or_stops_is_no_verdict() -> None:
    """What it was verifying is verified by another one."""
    with trusting(trusted=("r0", "r2"), count=3) as (fleet, threads):
        only_verifies(fleet, "r0")
        threads.engines["r0"].step = lambda: []  # it never answers
        serving = fleet.replicas.serving
        fleet.replicas.trusted = lambda: [r for r in serving() if r.owner.trusted]  # type: ignore[method-assign]
        threads.again = False
        for i in range(6):
            fleet.submit(group(i, n=2))
        fleet.replicas.trusted = lambda: [fleet.replicas.by_name["r0"]]  # type: ignore[method-assign]
        ended = step_until(fleet, lambda: threads.engines["r0"].children, "it is asked")
        fleet.replicas.trusted = lambda: [fleet.replicas.by_name["r2"]]  # type: ignore[method-assign]
        threads.die("r0")
        check([*ended, *collect(fleet, 12 - len(ended)).values()])
        verified, lied, unverifiable, skipped = counts(fleet)
        assert verified > 0 and (lied, unverifiable, skipped) == (0, 0, 0)


def test_a_child_that_is_held_may_be_aborted() -> None:
    with trusting() as (fleet, _):
        fleet.replicas.trusted = list  # type: ignore[method-assign]
        only = fleet.replicas.by_name["r1"]
        fleet.replicas.serving = lambda: [only]  # type: ignore[method-assign]
        fleet.submit(group(1))
        step_until(fleet, lambda: fleet.status()["fleet"]["verifying"] == 4, "they are held")
        assert [one.index for one in fleet.abort("g1", 2)] == [2] and fleet.status()["fleet"]["verifying"] == 3
        assert [one.index for one in fleet.abort("g1")] == [0, 1, 3]
        assert not fleet._groups.open and fleet.status()["fleet"]["verifying"] == 0
        check(collect(fleet, 0).values())


def test_only_trusted_replicas_judge() -> None:
    """A client's verification is not computed by those that it doubts."""
    with trusting() as (fleet, threads):
        fleet.submit(group(1))
        samples = [one for _, one in sorted(collect(fleet, 4).items())]
        partials = tuple(PartialSample.of(one) for one in samples)
        lies(threads, other_token(0))
        threads.engines["r1"].submit = None
        fleet.submit(REPLACE(group(1), id="g2", partials=partials, score=True, redraw=True))
        again = collect(fleet, 4)
        assert [again["g2", i].token_ids.tolist() for i in range(4)] == [one.token_ids.tolist() for one in samples]
        trusted = fleet.replicas.trusted
        fleet.replicas.trusted = list  # type: ignore[method-assign]
        score = REPLACE(group(1), partials=partials, score=True, redraw=True)
        fleet.submit(REPLACE(score, id="g3"))
        assert (fleet.status()["fleet"]["waiting"], fleet._groups.has_work) == (1, False), (
            "it waits, and nothing turns meanwhile"
        )
        fleet.submit(REPLACE(score, id="g4"))
        assert [one.finish_reason for one in fleet.abort("g4")] == ["aborted"] * 4
        fleet.replicas.trusted = trusted  # type: ignore[method-assign]
        again = collect(fleet, 4)
        assert [again["g3", i].token_ids.tolist() for i in range(4)] == [one.token_ids.tolist() for one in samples]
        assert not fleet._groups.unjudged and not fleet._groups.open


def test_a_score_does_not_wait_for_a_trusted_replica_for_ever() -> None:
    with trusting() as (fleet, _):
        fleet._grace_s = 0.2
        fleet.submit(group(1))
        partials = tuple(PartialSample.of(one) for _, one in sorted(collect(fleet, 4).items()))
        fleet.replicas.trusted = list  # type: ignore[method-assign]
        fleet.submit(REPLACE(group(1), id="g2", partials=partials, score=True))
        assert {one.error for one in collect(fleet, 4).values()} == {
            "no trusted replica (fleet.trust) has served for 0.2 s (replica_grace_s)"
        }


# owners


def test_a_ban_outlives_the_router(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal"), "hash")
    owners = Owners(("r0",), store=lambda ban: journal.banned(BanRow(*ban)))
    owner = owners.of("gpu-1", "k" * 40, "gpu", own=False)
    owners.ban(owner, "field=token_ids first_bad=7")
    journal.commit(Served())
    journal.close()
    again = Journal(str(tmp_path / "journal"), "hash")
    after = Owners(("gpu",), [Ban(*row) for row in again.bans()])
    again.close()
    banned = after.of("gpu-2", "k" * 40, "gpu", own=False)
    assert banned.ban is not None and banned.ban.why == "field=token_ids first_bad=7" and not banned.trusted
    assert after.of("gpu-1", "j" * 40, "other", own=False).ban is None


def test_a_trusted_replica_says_which_weights_are_live() -> None:
    """One that is not, and joins first with other weights, does not: it waits, and is lost then."""
    launcher = Threads(2)
    launcher.engines["r0"].tensors, launcher.engines["r0"].version = weights_of(3), 7
    fleet = fleet_over(launcher, owners=Owners(("r1",)), options=FleetOptions(verification=ALL))
    try:
        fleet.open(WAIT, count=1, patient=True)
        assert fleet.version == 0 and "r0" in launcher.refused and "a trusted replica" in launcher.refused["r0"]
        step_until(fleet, lambda: "r0" in launcher.replaced, "it is lost")
        assert fleet.replicas.by_name["r1"].state.value == "serving" and fleet.weights.digest == expected_digest()
    finally:
        fleet.close()


def test_without_trust_the_first_replica_says_it() -> None:
    """The negative control."""
    launcher = Threads(2)
    launcher.engines["r0"].tensors, launcher.engines["r0"].version = weights_of(3), 7
    fleet = fleet_over(launcher)
    try:
        fleet.open(WAIT, count=1, patient=True)
        assert fleet.version == 7
    finally:
        fleet.close()


def expected_digest() -> str:
    return manifest_digest(manifest_of(weights_of(0)))


def test_whom_the_router_trusts() -> None:
    """With keys the name of the key counts, which nobody can take; a replica's own name does not."""
    owners = Owners(("gpu", "r0", "local"))
    assert owners.of("any", "k1", "gpu", own=False).trusted
    assert not owners.of("gpu", "k2", "other", own=False).trusted and not owners.of("r0", "k3", "other", own=False).trusted
    assert owners.of("r0", "", "", own=False).trusted and owners.of("local-1", "", "", own=True).trusted
    assert not owners.of("local", "", "", own=False).ban and not Owners(("x",)).of("local-0", "", "", own=True).trusted
    assert owners.of("a", "k1", "gpu", own=False) is owners.of("b", "k1", "gpu", own=False), "a key has many replicas"


def test_groups_of_an_owner_have_a_bound() -> None:
    owner = Owner("k", "key gpu")
    for i in range(MOST_GROUPS + 3):
        owner.add_delivered("1", f"g{i}", 0)
        owner.add_delivered("1", f"g{i}", 1)
    assert len(owner.delivered) == MOST_GROUPS and owner.forgotten == 3 and owner.delivered["1", "g3"] == {0, 1}


@pytest.mark.parametrize(
    ("fleet", "why"),
    [
        ({"verify": 1.5, "trust": ("a",), "replicas": 1}, "verify=1.5: must be 0"),
        ({"verify": 0.1, "replicas": 1}, "verify without trust"),
        ({"trust": ("a",), "replicas": 1}, "trust without verify"),
        ({"verify": 0.1, "trust": ("a",)}, "a router verifies"),
        ({"verify_wait_s": 0.0}, "verify_wait_s=0.0: must be positive"),
    ],
)
def test_options_that_cannot_be(fleet: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FleetConfig(**fleet).check()


def test_flags_and_an_arithmetic_that_cannot_be_verified() -> None:
    args = parse(["serve", "--replicas", "2", "--fleet.verify", "0.05", "--fleet.trust", "local", "gpu"])
    assert isinstance(args, ServeArgs)
    fleet = configured(args).fleet
    assert (fleet.verify, fleet.trust, fleet.verify_wait_s) == (0.05, ("local", "gpu"), 60.0)
    check_verifiable(fleet, "fma/1")
    check_verifiable(FleetConfig(), "torch/2/batch")
    with pytest.raises(CannotServe, match="depend on the batch"):
        check_verifiable(fleet, "torch/2/batch")


def test_the_router_reads_bans_from_its_journal(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal"), "hash")
    owners = owners_of(FleetConfig(verify=1.0, trust=("local",)), journal)
    owners.ban(owners.of("a", "k1", "gpu", own=False), "why")
    owners.ban(owners.of("local-0", "", "", own=True), "why")  # the next router may start it again
    journal.commit(Served())
    assert [owner.name for owner in owners_of(FleetConfig(), journal).banned] == ["key gpu"]
    journal.close()
    assert not owners_of(FleetConfig(), None).banned


# claims that make a sample one that cannot be verified

UNCLEAR: dict[str, Change] = {
    "KV of no version": lambda one: REPLACE(other_token(7)(one), kv_versions=[(0, 0, 99)]),
    "KV of its own": lambda one: REPLACE(other_token(7)(one), kv_versions=[(0, 0, one.weight_versions[0][1])]),
    "KV of before": lambda one: REPLACE(
        other_token(7)(one), kv_versions=[(0, 0, 0), (0, one.prompt_tokens - 1, one.weight_versions[0][1])]
    ),
    "several versions": lambda one: REPLACE(other_token(7)(one), weight_versions=[(0, 1), (5, 2)]),
    "aborted": lambda one: REPLACE(other_token(7)(one), finish_reason="aborted"),
}


@pytest.mark.parametrize("claim", UNCLEAR)
def test_no_claim_keeps_a_lie_from_being_found(claim: str) -> None:
    """No refresh takes place while the children live: the router knows that no such claim is possible."""
    with trusting() as (fleet, threads):
        refresh(fleet, 1)
        threads.again = False
        lies(threads, UNCLEAR[claim])
        for i in range(8):
            fleet.submit(group(i))
        check(collect(fleet, 32).values())
        (about,) = [one for one in fleet.status()["replicas"] if one["name"] == "r1"]
        assert about["state"] == "dead" and counts(fleet)[2] == 0


def refreshed_while_it_runs(fleet: Fleet, number: int, version: int) -> None:
    """Submit groups, and refresh the weights while they run."""
    for i in range(number, number + 8):
        fleet.submit(group(i, max_tokens=60))
    for _ in range(3):
        fleet.step()
    refresh(fleet, version)


def test_what_cannot_be_verified_is_generated_again_on_a_trusted_replica() -> None:
    """A liar that lies about each sample with several versions, which are possible: refreshes take place."""

    def lie(sample: Sample) -> Sample:
        return other_token(7)(sample) if len(sample.weight_versions) > 1 else sample

    with trusting(step_s=0.001) as (fleet, threads):
        lies(threads, lie)
        ended = recorded(fleet)
        for version in range(1, 4):
            refreshed_while_it_runs(fleet, 8 * version, version)
        step_until(fleet, lambda: len(ended) == 96, "all have ended")
        check(ended)
        assert counts(fleet)[2] > 0 and not fleet.status()["fleet"]["bans"]


def test_what_cannot_be_verified_was_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(verifier_module, "is_unclear", lambda sample, live: False)
    judged_as = verifier_module.Verifier._judged_as
    monkeypatch.setattr(
        verifier_module.Verifier, "_judged_as", lambda self, *given: judged_as(self, *given)._replace(again=False)
    )

    def lie(sample: Sample) -> Sample:
        return other_token(7)(sample) if len(sample.weight_versions) > 1 else sample

    with trusting(step_s=0.001) as (fleet, threads):
        lies(threads, lie)
        ended = recorded(fleet)
        refreshed_while_it_runs(fleet, 8, 1)
        step_until(fleet, lambda: len(ended) == 32, "all have ended")
        with pytest.raises(AssertionError):
            check(ended)


def test_without_a_trusted_replica_they_wait_no_longer_than_they_may(caplog: pytest.LogCaptureFixture) -> None:
    """Generated again by those that are not trusted, they would have no verdict again, for ever."""
    with trusting(Verification(1.0, wait_s=0.05), step_s=0.001) as (fleet, _):
        fleet.replicas.trusted = list  # type: ignore[method-assign]
        ended = recorded(fleet)
        refreshed_while_it_runs(fleet, 8, 1)
        step_until(fleet, lambda: len(ended) == 32, "all have ended")
        check(ended)
        assert any(len(one.weight_versions) > 1 for one in ended)
        verified, lied, unverifiable, skipped = counts(fleet)
        assert (verified, lied, unverifiable) == (0, 0, 0) and skipped > 0 and "no verdict within 0.05 s" in caplog.text
        assert not fleet._groups.open and fleet.status()["fleet"]["verifying"] == 0


def test_they_wait_for_a_trusted_replica_that_serves_later() -> None:
    with trusting(step_s=0.001) as (fleet, _):
        trusted, ended = fleet.replicas.trusted, recorded(fleet)
        fleet.replicas.trusted = list  # type: ignore[method-assign]
        refreshed_while_it_runs(fleet, 8, 1)
        step_until(fleet, lambda: fleet.verifier._unclear and not any(fleet._groups.at.values()), "they wait")
        waiting = {(held.one.group.id, held.sample.index) for held in fleet.verifier._unclear}
        fleet.replicas.trusted = trusted  # type: ignore[method-assign]
        step_until(fleet, lambda: len(ended) == 32, "all have ended")
        check(ended)
        assert counts(fleet)[2] >= len(waiting) and counts(fleet)[3] == 0
        again = [one for one in ended if (one.group_id, one.index) in waiting]
        assert len(again) == len(waiting) and {one.versions for one in again} == {"version 1"}


def test_an_aborted_child_ends_with_its_tokens_though_nothing_can_verify_them() -> None:
    with trusting(step_s=0.002) as (fleet, threads):
        only_verifies(fleet, "r0")
        fleet.submit(group(1, max_tokens=900))
        step_until(fleet, lambda: threads.engines["r1"].made["generated_tokens"] > 20, "it runs")
        refresh(fleet, 1)
        made = ran(threads, "r1")
        step_until(fleet, lambda: ran(threads, "r1") > made + 20, "it goes on")
        here = fleet.abort("g1", None)
        ended = [*here, *collect(fleet, 4 - len(here)).values()]
        assert [one.finish_reason for one in ended] == ["aborted"] * 4
        assert all(len(one.token_ids) and len(one.weight_versions) > 1 for one in ended)
        assert counts(fleet) == (0, 0, 0, 4)


@pytest.mark.parametrize("changes", [{"score": True}, {"doubted": {0}}])
def test_what_runs_on_trusted_replicas_only_is_not_what_they_are_compared_by(changes: dict[str, Any]) -> None:
    """Scores are never unclear: they would make the share of trusted replicas small, and honest owners suspended."""
    with trusting() as (fleet, _):
        fleet.submit(group(1))
        (sample, *_) = collect(fleet, 4).values()
        verifier, origins = fleet.verifier, [(0, fleet.replicas.by_name["r0"].owner)]
        before = verifier.shares.all
        for group_changes, found in ((changes, before), ({}, before + 1)):
            one = OpenGroup.of(REPLACE(group(1), score=group_changes.get("score", False)), "1", 0.0)
            one.doubted = group_changes.get("doubted", set())
            sample = REPLACE(sample, index=0)
            assert verifier.decide(one, sample, origins, 0, True) == "deliver" and verifier.shares.all == found


def test_an_owner_with_more_of_them_than_trusted_replicas_is_suspended() -> None:
    """Few samples are verified, so most would be delivered. Those beyond the share of the trusted replicas are not."""
    shares = UnclearShares()
    liar, honest, slow = Owner("l", "liar"), Owner("h", "honest"), Owner("s", "slow")
    too_many: Counter[str] = Counter()
    for i in range(400):
        shares.add_trusted(i % 10 == 0)
        too_many["honest"] += shares.add([honest], i % 10 == 0, float(i))
        too_many["slow"] += shares.add([slow], i % 10 < 3, float(i))
        too_many["liar"] += shares.add([liar], True, float(i))
    assert too_many == {"honest": 0, "slow": 0, "liar": 400 - LEAST}
    assert [shares.is_suspended(one, 400.0) for one in (liar, slow, honest)] == [True, False, False]
    assert shares.times[liar] > 1 and shares.suspended[liar] == LEAST + 7 * FIRST_S, "it doubles"


def test_a_suspended_owner_gets_no_groups_unless_there_is_no_other() -> None:
    with trusting(Verification(0.01, draw=lambda: 0.5)) as (fleet, threads):
        owner = fleet.replicas.by_name["r1"].owner
        fleet.verifier.shares.suspended[owner] = math.inf
        for i in range(8):
            fleet.submit(group(i))
        check(collect(fleet, 32).values())
        assert not ran(threads, "r1") and fleet.status()["fleet"]["suspended"] == ["replica r1"]
        fleet.replicas.lose(fleet.replicas.by_name["r0"], "a test")
        for i in range(8, 12):
            fleet.submit(group(i))
        check(collect(fleet, 16).values())
        assert ran(threads, "r1")


def test_scores_are_computed_by_trusted_replicas() -> None:
    """Nothing verifies a score."""
    with trusting() as (fleet, _):
        fleet.submit(group(1))
        partials = tuple(PartialSample.of(one) for _, one in sorted(collect(fleet, 4).items()))
        for i in range(8):
            fleet.submit(REPLACE(group(i), id=f"s{i}", partials=partials, score=True))
        parts = [part for one in fleet._groups.open.values() for part in one.parts]
        assert {part.replica.name for part in parts} == {"r0"} and len(parts) == 8
