"""What a replica of verl does, without Ray and verl, over a service of the fake engine; tests/integrations has verl itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rollout.engine.values import Mode, Routing, Sample, Sampling
from rollout.integrations.verl.server import VerlOptions, VerlService, ended
from rollout.transport.errors import GroupFailed, InvalidRequest, RolloutError
from tests.support.fake_engine import FakeEngine, expected, fake_routes
from tests.support.wire import serving

WAIT_S = 60.0
VERLS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""what verl's agent loop sends"""


class Pausable(FakeEngine):
    """Steps make nothing between `pause` and `resume`."""

    mode = Mode.RUNNING

    def pause(self) -> None:
        self.frozen = True

    def resume(self) -> None:
        self.frozen = False


@pytest.fixture
def engine() -> FakeEngine:
    return Pausable(context=100)


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[VerlService]:
    with serving(engine) as service:
        one = VerlService(VerlOptions(address=service.endpoint), "unused", response_length=8, prompt_length=10)
        try:
            yield one
        finally:
            one.close()


def generate(served: VerlService, prompt: list[int], **params: Any) -> Any:
    return asyncio.run(asyncio.wait_for(served.generate(prompt, {**VERLS, **params}, "r"), WAIT_S))


def test_a_response_has_tokens_logprobs_and_the_trainer_s_steps(served: VerlService) -> None:
    served.note(3, 7)
    done = generate(served, [5], max_tokens=6)
    assert done.token_ids == expected([5], 0, 6) and len(done.log_probs) == 6 and done.stop_reason == "completed"
    steps = {name: done.extra_fields[name] for name in ("global_steps", "min_global_steps", "max_global_steps")}
    assert steps == {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7}


def test_routes_are_those_of_decoder_layers(engine: FakeEngine) -> None:
    """verl's slot of a layer is its number in the model. Without the option there are none."""
    engine.routing = Routing(layers=(1, 2), chosen=2, experts=60, decoder_layers=3)
    with serving(engine) as service:
        for routed in (True, False):
            options = VerlOptions(address=service.endpoint, routed_experts=routed)
            one = VerlService(options, "unused", response_length=8, prompt_length=10)
            done = generate(one, [5, 6, 7], max_tokens=4)
            one.close()
            if routed:
                assert done.routed_experts.shape == (6, 3, 2) and not done.routed_experts[:, 0].any()
                assert (done.routed_experts[:, 1:] == fake_routes(engine.routing, 0, 6)).all()
            else:
                assert done.routed_experts is None
    engine.routing = None
    with (
        serving(engine) as service,
        pytest.raises(ValueError, match="enable_rollout_routing_replay: the service at .* keeps no"),
    ):
        VerlService(VerlOptions(address=service.endpoint, routed_experts=True), "unused", 8, 10)


@pytest.mark.parametrize(
    ("prompt", "params", "tokens"),
    [
        (10, {}, 8),
        (15, {}, 3),  # what is left of prompt_length + response_length
        (40, {}, 1),
        (10, {"max_new_tokens": 5}, 5),
        (98, {"max_tokens": 50}, 2),  # of the context
    ],
)
def test_how_long_a_response_may_be(served: VerlService, prompt: int, params: dict[str, Any], tokens: int) -> None:
    assert served.sampling_of({**VERLS, **params}, prompt).max_tokens == tokens


def test_words_of_verl_are_ours(served: VerlService) -> None:
    sampling = served.sampling_of(
        {**VERLS, "top_k": 50, "stop_token_ids": [3, 4], "ignore_eos": True, "seed": 9}, 1, priority=2
    )
    assert (sampling.top_k, sampling.stop_token_ids, sampling.ignore_eos, sampling.seed) == (50, (3, 4), True, 9)
    assert sampling.priority == -2, "verl's lower numbers go first"
    assert served.sampling_of(VERLS, 1).top_k == 0


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        (1, {"best_of": 4}, "best_of=4"),
        (1, {"use_beam_search": True}, "use_beam_search"),
        (1, {"n": 2}, "send as many requests"),
        (1, {"temperature": "hot"}, "temperature"),
        (100, {}, "leaves no room in a context of 100"),
    ],
)
def test_what_is_not_served_is_refused_by_name(served: VerlService, prompt: int, params: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        served.sampling_of({**VERLS, **params}, prompt)


def test_paused_it_makes_nothing_and_what_runs_goes_on(served: VerlService, engine: FakeEngine) -> None:
    async def run() -> Any:
        served.pause(reject=False)
        waits = asyncio.create_task(served.generate([5], {**VERLS, "max_tokens": 6}, "r"))
        await asyncio.sleep(0)
        assert not waits.done() and served.pause(reject=False) == 0
        served.resume()
        return await asyncio.wait_for(waits, WAIT_S)

    assert asyncio.run(run()).stop_reason == "completed"


def test_a_service_that_leaves_sends_requests_back(served: VerlService, engine: FakeEngine) -> None:
    async def run() -> tuple[int, Any, Any]:
        engine.frozen = True
        runs = asyncio.create_task(served.generate([5], {**VERLS, "max_tokens": 6}, "r"))
        while "r" not in served._running:
            await asyncio.sleep(0)
        ended = await asyncio.get_running_loop().run_in_executor(None, served.pause, True)
        return ended, await asyncio.wait_for(runs, WAIT_S), await served.generate([5], VERLS, "late")

    count, runs, late = asyncio.run(run())
    assert count == 1 and runs.stop_reason == late.stop_reason == "aborted" and late.token_ids == []


def test_one_request_is_aborted(served: VerlService, engine: FakeEngine) -> None:
    async def run() -> Any:
        engine.frozen = True
        runs = asyncio.create_task(served.generate([5], VERLS, "r"))
        while not served.abort("r"):
            await asyncio.sleep(0)
        assert not served.abort("another")
        return await asyncio.wait_for(runs, WAIT_S)

    assert asyncio.run(run()).stop_reason == "aborted"


def test_a_request_that_fails_raises(served: VerlService, engine: FakeEngine) -> None:
    engine.crash_on = 5
    with pytest.raises(GroupFailed):
        generate(served, [5])
    with pytest.raises(RolloutError):
        generate(served, [10**6])


def test_a_request_that_verl_gives_up_is_cancelled(served: VerlService, engine: FakeEngine) -> None:
    async def run() -> None:
        engine.frozen = True
        handle = served.client.submit([5], Sampling(max_tokens=8))
        future = ended(handle)
        future.cancel()
        (sample,) = await asyncio.get_running_loop().run_in_executor(None, handle.result, WAIT_S)
        assert isinstance(sample, Sample) and sample.finish_reason == "aborted"

    asyncio.run(run())


def test_versions_are_steps_of_the_trainer(served: VerlService) -> None:
    for version, step in ((4, 10), (6, 11), (6, 12)):
        served.note(version, step)
    assert [served.step_of(version) for version in (3, 4, 5, 6, 7)] == [0, 10, 10, 12, 12] and served.step == 12
