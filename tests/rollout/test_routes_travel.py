"""Routes of experts on the wire: through service, client and router, in bounded frames; impossible and oversized ones are
refused."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout import RolloutClient
from rollout.engine.values import Group, Limits, PartialSample, Routing, Sample, Sampling
from rollout.service.validation import check_route_frames
from rollout.transport import messages as m
from rollout.transport.checks import Bounds, check_chunk, check_sample
from rollout.transport.columns import (
    joined_routes,
    pack_partials,
    pack_progress,
    pack_samples,
    route_frames,
    unpack_partials,
    unpack_progress,
    unpack_samples,
)
from rollout.transport.errors import InvalidRequest, LimitExceeded, NotBelieved, ProtocolError
from rollout.transport.frames import Decoder, pack
from tests.support.fake_engine import FakeEngine, fake_routes
from tests.support.fleet import fleet_of, router_of
from tests.support.hash_engine import HashEngine
from tests.support.wire import Bench, serving, submit

WAIT = 60.0
ROUTING = Routing(layers=(1, 2, 5), chosen=2, experts=200, decoder_layers=100)
PROMPT = [5, 6, 7, 8]
SAMPLING = Sampling(n=3, max_tokens=40, routed_experts=True, seed=1)


def engine(routing: Routing | None = ROUTING, step_s: float = 0.0) -> FakeEngine:
    made = FakeEngine(step_s=step_s)
    made.routing = routing
    return made


class RoutedHashEngine(HashEngine):
    """Returns routes, those of a prompt with each group's first sample."""

    def __init__(self) -> None:
        super().__init__(step_s=0.001)
        self.routing, self.wanted, self.routed = ROUTING, set[str](), set[str]()

    def submit(self, group: Group, client: str = "") -> None:
        super().submit(group, client)
        if group.sampling.routed_experts:
            self.wanted.add(group.id)

    def step(self) -> list[Sample]:
        return [self._with_routes(each) for each in super().step()]

    def _with_routes(self, ended: Sample) -> Sample:
        if ended.group_id not in self.wanted:
            return ended
        prompt = None if ended.group_id in self.routed else fake_routes(ROUTING, 0, ended.prompt_tokens - 1)
        self.routed.add(ended.group_id)
        routes = fake_routes(ROUTING, ended.prompt_tokens - 1, len(ended.token_ids))
        return msgspec.structs.replace(ended, routed_experts=routes, prompt_routed_experts=prompt)


def assert_whole(sample: Sample, prompt: int = len(PROMPT), routing: Routing = ROUTING) -> None:
    assert sample.routes is not None
    np.testing.assert_array_equal(sample.routes, fake_routes(routing, 0, prompt + len(sample.token_ids) - 1))


def test_samples_and_streams_have_routes() -> None:
    told: dict[int, list[np.ndarray]] = defaultdict(list)
    with serving(engine(step_s=0.001)) as service, RolloutClient(service.endpoint) as client:
        assert client.info.routing == ROUTING
        plain = client.submit(PROMPT, Sampling(n=2, max_tokens=40, stream_every=3, raw_logprobs=True))
        handle = client.submit(PROMPT, msgspec.structs.replace(SAMPLING, stream_every=4))
        handle.on_tokens(lambda _, new: told[new.index].append(new.routed_experts))  # type: ignore[arg-type]
        samples = handle.result(WAIT)
        assert all(each.routed_experts is each.prompt_routed_experts is None for each in plain.result(WAIT))
        assert plain.prompt_routes is None
    for sample in samples:
        assert_whole(sample)
        assert sample.prompt_routed_experts is handle.prompt_routes, "one array for all"
        streamed = np.concatenate(told[sample.index])
        assert len(told[sample.index]) > 2 and sample.routed_experts is not None
        np.testing.assert_array_equal(streamed, sample.routed_experts[: len(streamed)])


def test_the_routes_of_a_prompt_travel_once() -> None:
    bench = Bench(engine())
    peer = bench.client().send(submit("g", PROMPT, n=3, routed_experts=True), submit("h", [5], n=2, routed_experts=True))
    bench.settle()
    found: dict[str, list[Any]] = defaultdict(list)
    for sample in peer.samples():
        found[sample.group_id].append(sample.prompt_routed_experts)
    assert {name: sum(each is not None for each in of) for name, of in found.items()} == {"g": 1, "h": 1}
    assert next(each for each in found["h"] if each is not None).shape == (0, 3, 2), "a prompt of one token has none before it"


def test_children_go_on_from_their_routes() -> None:
    with serving(engine()) as service, RolloutClient(service.endpoint) as client:
        first = client.submit(PROMPT, msgspec.structs.replace(SAMPLING, max_tokens=7)).result(WAIT)
        again = client.submit(PROMPT, SAMPLING, partials=[PartialSample.of(each) for each in first]).result(WAIT)
        for sample in again:
            assert_whole(sample)
        wide = [PartialSample(index=0, **{**first[0].columns(), "routed_experts": first[0].routed_experts.astype(np.int64)})]  # type: ignore[union-attr]
        with pytest.raises(
            InvalidRequest, match=r"routed_experts is int64 .*: must be uint8 or uint16 \[tokens, layers, chosen\]"
        ):
            client.submit(PROMPT, SAMPLING, partials=wide)


@pytest.mark.parametrize("routed", [True, False])
def test_a_router_sends_the_routes_of_a_prompt_once(routed: bool) -> None:
    """Two replicas, each of which has some of the children."""
    with fleet_of(2, make=RoutedHashEngine) as (fleet, _), router_of(fleet) as service:
        assert fleet.routing == ROUTING
        with RolloutClient(service.endpoint) as client:
            handle = client.submit(PROMPT, msgspec.structs.replace(SAMPLING, n=8, routed_experts=routed))
            for sample in handle.result(WAIT):
                if routed:
                    assert_whole(sample)
                else:
                    assert sample.routes is None


# ── frames ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_long_routes_take_several_frames() -> None:
    """Frames have a bound, whatever the length of a sample; those of several samples are cut anywhere."""
    wide = Routing(layers=tuple(range(60)), chosen=8, experts=384, decoder_layers=100)
    routes = fake_routes(wide, 0, 12_000)
    assert routes.nbytes > 2 * m.ROUTES_FRAME_BYTES
    for frames in (route_frames(routes), route_frames(routes[:1]), route_frames(routes[:0])):
        assert 1 <= len(frames) and all(0 < each.nbytes <= m.ROUTES_FRAME_BYTES or not len(each) for each in frames)
    assert np.array_equal(joined_routes(route_frames(routes), "routes"), routes)
    assert joined_routes(route_frames(routes[:0]), "routes").shape == (0, 60, 8)
    assert np.shares_memory(joined_routes(route_frames(routes[:5]), "routes"), routes), "one frame is not copied"
    with serving(engine(wide)) as service, RolloutClient(service.endpoint) as client:
        long = client.submit(PROMPT * 1500, msgspec.structs.replace(SAMPLING, n=2, max_tokens=5000)).result(WAIT)
    assert_whole(long[0], 6000, wide)
    assert_whole(long[1], 6000, wide)


def test_routes_that_do_not_fit_are_refused() -> None:
    group = Group("g", np.zeros(100, np.int32), msgspec.structs.replace(SAMPLING, max_tokens=100_000))
    check_route_frames(group, Limits(), ROUTING)
    wide = Routing(layers=tuple(range(94)), chosen=22, experts=512, decoder_layers=100)
    with pytest.raises(
        ValueError, match=r"4136 bytes for each of 100 prompt tokens and max_tokens=100000 do not fit into 48 fra"
    ):
        check_route_frames(group, Limits(), wide)
    check_route_frames(group, Limits(max_frames=128), wide)
    with pytest.raises(ValueError, match="frames of 4194304 bytes, Limits.max_frame_bytes is 1000; raise it"):
        check_route_frames(group, Limits(max_frame_bytes=1000), ROUTING)
    made = engine(wide)
    with serving(made) as service, RolloutClient(service.endpoint) as client:
        with pytest.raises(InvalidRequest, match="lower max_tokens, or raise the limit"):
            client.submit(PROMPT, msgspec.structs.replace(SAMPLING, max_tokens=49_000)).result(WAIT)
        routes = np.zeros((10_000, 94, 22), np.uint16)
        tokens = np.zeros(10_000, np.int32)
        children = [
            PartialSample(
                index=at,
                token_ids=tokens,
                logprobs=-np.ones(10_000, np.float32),
                weight_versions=[(0, 0)],
                routed_experts=routes,
            )
            for at in range(7)
        ]
        with pytest.raises(LimitExceeded, match=r"take \d+ frames: at most 64 .*submit fewer children at a time"):
            client.submit(PROMPT, msgspec.structs.replace(SAMPLING, n=7, max_tokens=10_001), partials=children)


def test_a_service_that_keeps_none_refuses() -> None:
    with serving(engine(None)) as service, RolloutClient(service.endpoint) as client:
        assert client.info.routing is None
        with pytest.raises(InvalidRequest, match="no routes are kept; start the service .* with routed_experts = true"):
            client.submit(PROMPT, SAMPLING).result(WAIT)


# ── forged ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def sample(**changed: Any) -> Sample:
    fields: dict[str, Any] = {
        "group_id": "g", "index": 0, "token_ids": np.array([9, 9], np.int32), "logprobs": -np.ones(2, np.float32),
        "weight_versions": [(0, 0)], "finish_reason": "length", "prompt_tokens": 4, "seed": 1,
        "routed_experts": fake_routes(ROUTING, 3, 2), "prompt_routed_experts": fake_routes(ROUTING, 0, 3),
    }  # fmt: skip
    return Sample(**{**fields, **changed})


def decoded(message: Any) -> Any:
    return Decoder[m.ServiceMessage](m.ServiceMessage, Limits()).unpack([bytes(frame) for frame in pack(message)])


def test_what_was_packed_is_unpacked() -> None:
    given = [
        sample(),
        sample(index=1, prompt_routed_experts=None),
        sample(index=2, prompt_routed_experts=fake_routes(ROUTING, 0, 0)),
    ]
    got = unpack_samples(decoded(pack_samples(["g", "g", "h"], given)))
    for one, other in zip(given, got, strict=True):
        for name in ("routed_experts", "prompt_routed_experts"):
            before, after = getattr(one, name), getattr(other, name)
            assert (before is None) == (after is None)
            assert before is None or (before.dtype, before.shape, before.tobytes()) == (
                after.dtype,
                after.shape,
                after.tobytes(),
            )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"routed_experts": []}, "routed_experts is no frames: must be frames of uint8 or uint16"),
        ({"routed_experts": [np.zeros((2, 3, 2), np.int32)]}, r"routed_experts is int32 \[positions, 3, 2\]"),
        ({"routed_experts": [np.zeros((2, 6), np.uint8)]}, r"routed_experts is uint8 \[positions, 6\]"),
        ({"routed_experts": [np.zeros((1, 3, 2), np.uint8), np.zeros((1, 2, 2), np.uint8)]}, "all alike"),
        ({"routed_experts": [np.zeros((1, 3, 2), np.uint8), np.zeros((1, 3, 2), np.uint16)]}, "all alike"),
        ({"routed_experts": [np.zeros((3, 3, 2), np.uint8)]}, r"must be uint8 or uint16 \[2, k, k\], a row per token"),
        ({"prompt_routes": None}, "ended names routes of prompts, and there are none"),
        ({"prompt_routes": [np.zeros((4, 3, 2), np.uint8)]}, "prompt_routes has 4 positions, ended names 3"),
        ({"prompt_routes": [np.zeros((3, 3, 2), np.float32)]}, "prompt_routes is float32"),
    ],
)
def test_forged_messages_are_refused(change: dict[str, Any], why: str) -> None:
    done = msgspec.structs.replace(pack_samples(["g"], [sample()]), **change)
    with pytest.raises(ProtocolError, match=why):
        unpack_samples(decoded(done))


def test_forged_partial_samples_and_progress_are_refused() -> None:
    child = PartialSample(index=0, **sample().columns())
    packed = pack_partials([child])
    assert packed is not None and len(unpack_partials(packed, 1)[0].routed_experts) == 2  # type: ignore[arg-type]
    for frames in ([np.zeros((3, 3, 2), np.uint8)], [np.zeros((2, 6), np.uint8)], []):
        with pytest.raises(InvalidRequest, match="partials: routed_experts"):
            unpack_partials(msgspec.structs.replace(packed, routed_experts=frames), 1)
        progress = pack_progress(1, {"g": [chunk()]})
        with pytest.raises(ProtocolError, match="progress: partials: routed_experts|progress: .*routed_experts"):
            unpack_progress(
                msgspec.structs.replace(progress, children=msgspec.structs.replace(packed, routed_experts=frames)), 1
            )


def chunk(**changed: Any) -> Any:
    from rollout.engine.values import TokenChunk

    return TokenChunk(**{"index": 0, "first": 0, "seed": 1, **sample().columns(), **changed})


def group(**changed: Any) -> Group:
    return Group("g", np.array(PROMPT, np.int32), msgspec.structs.replace(SAMPLING, n=1, max_tokens=2, **changed))


@pytest.mark.parametrize(
    ("changed", "asks", "why"),
    [
        ({"routed_experts": None}, True, "has routed_experts none: must be there if they were requested"),
        ({}, False, r"has routed_experts \(2, 3, 2\): must be there if they were requested, else none"),
        ({"routed_experts": None}, False, "has prompt_routed_experts .*must be none: they were not requested"),
        (
            {"routed_experts": fake_routes(ROUTING, 3, 1)},
            True,
            r"has routed_experts uint8 \(1, 3, 2\): must be uint8 \[2, 3, 2\]",
        ),
        ({"routed_experts": np.zeros((2, 3, 2), np.uint16)}, True, "has routed_experts uint16"),
        ({"routed_experts": np.full((2, 3, 2), 200, np.uint8)}, True, "has routed_experts holds expert 200: must be 0 to 199"),
        (
            {"prompt_routed_experts": np.zeros((4, 3, 2), np.uint8)},
            True,
            r"has prompt_routed_experts uint8 \(4, 3, 2\): must be",
        ),
        ({"prompt_routed_experts": np.full((3, 3, 2), 255, np.uint8)}, True, "prompt_routed_experts holds expert 255"),
    ],
)
def test_impossible_routes_are_not_believed(changed: dict[str, Any], asks: bool, why: str) -> None:
    bounds = Bounds(1000, frozenset(), routing=ROUTING)
    check_sample(sample(), group(), None, bounds)
    check_sample(sample(prompt_routed_experts=None), group(), None, bounds)
    with pytest.raises(ValueError, match=why):
        check_sample(sample(**changed), group(routed_experts=asks), None, bounds)
    if "routed_experts" in changed and asks and changed["routed_experts"] is not None and len(changed["routed_experts"]) == 2:
        with pytest.raises(ValueError, match=why):
            check_chunk(chunk(routed_experts=changed["routed_experts"]), group(), bounds)


def test_other_routes_than_a_child_had_are_not_believed() -> None:
    had = PartialSample.of(sample())
    bounds = Bounds(1000, frozenset(), routing=ROUTING)
    with pytest.raises(ValueError, match="routed_experts that do not begin with those it had"):
        check_sample(sample(routed_experts=fake_routes(ROUTING, 4, 2)), group(), had, bounds)


def test_a_client_fails_a_group_whose_routes_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    monkeypatch.setattr(made, "_routes", lambda child, first, tokens: np.full((tokens, 3, 2), 250, np.uint8))
    with serving(made) as service, RolloutClient(service.endpoint) as client:
        with pytest.raises(NotBelieved, match="holds expert 250: must be 0 to 199"):
            client.submit(PROMPT, SAMPLING).result(WAIT)
