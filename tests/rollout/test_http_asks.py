"""What requests ask for, on its way to the service and back: which of them become one group, and that nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.client.api import RolloutClient
from rollout.engine.values import Limits, Sample, Sampling
from rollout.transport.errors import LimitExceeded
from rollout.transport.loopback import LoopbackService
from tests.support.fake_engine import FakeEngine, expected
from tests.support.waiting import until
from tests.support.wire import serving

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")

from rollout.http.requests import PromptRequest, RequestQueue  # noqa: E402
from rollout.http.settings import RequestLimits  # noqa: E402

PROMPT = np.array([5], np.int32)
WAIT_S = 60.0
REQUEST_LIMITS = RequestLimits(max_joined=64)
Use = Callable[[RequestQueue], Coroutine[Any, Any, Any]]


class Stack(msgspec.Struct):
    engine: FakeEngine
    end: LoopbackService
    client: RolloutClient
    groups: list[Any]
    """that the engine was given"""

    def run(self, use: Use, client: RolloutClient | None = None) -> Any:
        async def main() -> Any:
            return await asyncio.wait_for(use(RequestQueue(client or self.client, REQUEST_LIMITS)), WAIT_S)

        return asyncio.run(main())


@pytest.fixture
def stack() -> Iterator[Stack]:
    engine, end = FakeEngine(), LoopbackService()
    groups: list[Any] = []
    submit = engine.submit
    engine.submit = lambda group, client="": (groups.append(group), submit(group, client))[1]  # type: ignore[method-assign]
    with serving(engine, end), RolloutClient(transport=end.connect()) as client:
        yield Stack(engine, end, client, groups)


def sampling(**some: Any) -> Sampling:
    return Sampling(**{"max_tokens": 3, **some})


async def asked(asks: RequestQueue, *wanted: Sampling, prompt: np.ndarray = PROMPT) -> list[list[Sample]]:
    """Ask at once, as requests do that came together; return what each gets."""
    made = [PromptRequest(prompt, each) for each in wanted]
    asks.open(made)
    for ask in made:
        await ask.done
    return [ask.samples for ask in made]


def test_equal_requests_are_one_group_and_each_has_a_child_of_its_own(stack: Stack) -> None:
    samples = stack.run(lambda asks: asked(asks, *[sampling()] * 8))
    (group,) = stack.groups
    assert group.sampling == sampling(n=8)
    assert [[sample.index for sample in mine] for mine in samples] == [[0]] * 8
    assert [mine[0].token_ids.tolist() for mine in samples] == [expected([5], i, 3) for i in range(8)]


def test_requests_of_several_children_share_a_group_too(stack: Stack) -> None:
    samples = stack.run(lambda asks: asked(asks, sampling(n=2), sampling(n=2)))
    assert [group.sampling.n for group in stack.groups] == [4]
    assert [[sample.index for sample in mine] for mine in samples] == [[0, 1], [0, 1]]
    assert [sample.token_ids.tolist() for mine in samples for sample in mine] == [expected([5], i, 3) for i in range(4)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"seed": 7}, {"seed": 7}),
        ({"seed": 7}, {}),
        ({"temperature": 0.5}, {}),
        ({"max_tokens": 4}, {}),
        ({"priority": 1}, {}),
        ({"max_kv_lag": 1}, {}),
        ({"stream_every": 1}, {}),
        ({"logit_bias": {5: 1.0}}, {"logit_bias": {5: 2.0}}),
    ],
    ids=str,
)
def test_what_is_not_the_same_or_has_a_seed_stays_alone(stack: Stack, first: Any, second: Any) -> None:
    """A seed names the very tokens of child 0: the child of another index would have others."""
    samples = stack.run(lambda asks: asked(asks, sampling(**first), sampling(**second)))
    assert [group.sampling.n for group in stack.groups] == [1, 1]
    assert [mine[0].token_ids[:3].tolist() for mine in samples] == [expected([5], 0, 3)] * 2


def test_other_prompts_stay_alone(stack: Stack) -> None:
    async def use(asks: RequestQueue) -> None:
        made = [PromptRequest(np.array(prompt, np.int32), sampling()) for prompt in ([5], [6], [5, 5])]
        asks.open(made)
        await asyncio.gather(*(ask.done for ask in made))

    stack.run(use)
    assert sorted(group.prompt.tolist() for group in stack.groups) == [[5], [5, 5], [6]]


def test_a_group_has_a_bound_and_the_service_s_limits_hold(stack: Stack) -> None:
    stack.run(lambda asks: asked(asks, *[sampling()] * (64 + 3)))
    assert [group.sampling.n for group in stack.groups] == [64, 3]
    stack.groups.clear()
    engine, end = FakeEngine(Limits(max_n=4, max_samples_per_client=5)), LoopbackService()
    with serving(engine, end), RolloutClient(transport=end.connect()) as client:
        samples = stack.run(lambda asks: asked(asks, *[sampling()] * 9), client)
    assert [len(mine) for mine in samples] == [1] * 9 and engine.clients.total() == 3


def test_a_client_s_budget_that_holds_one_but_not_all_serves_one_after_the_other(stack: Stack) -> None:
    with RolloutClient(transport=stack.end.connect(), budget=5) as client:
        samples = stack.run(lambda asks: asked(asks, *[sampling()] * 4), client)
        assert [mine[0].token_ids.tolist() for mine in samples] == [expected([5], 0, 3)] * 4
        with pytest.raises(LimitExceeded, match="budget of 5"):
            stack.run(lambda asks: asked(asks, *[sampling(max_tokens=9)] * 2), client)


def test_one_that_hangs_up_takes_its_own_child_along_and_no_other(stack: Stack) -> None:
    stack.engine.frozen = True
    ended: list[int | None] = []
    abort = stack.engine.abort
    stack.engine.abort = lambda group, index=None: (ended.append(index), abort(group, index))[1]  # type: ignore[method-assign]

    async def use(asks: RequestQueue) -> list[list[int]]:
        made = [PromptRequest(PROMPT, sampling()) for _ in range(4)]
        asks.open(made)
        await asyncio.to_thread(until, lambda: stack.groups)
        asks.close(made[1:2])
        await asyncio.to_thread(until, lambda: ended == [1])
        stack.engine.frozen = False
        rest = [made[0], *made[2:]]
        await asyncio.gather(*(ask.done for ask in rest))
        assert not made[1].samples
        return [ask.samples[0].token_ids.tolist() for ask in rest]

    assert stack.run(use) == [expected([5], i, 3) for i in (0, 2, 3)]


def test_once_all_have_hung_up_the_group_ends(stack: Stack) -> None:
    stack.engine.frozen = True

    async def use(asks: RequestQueue) -> None:
        made = [PromptRequest(PROMPT, sampling()) for _ in range(3)]
        asks.open(made)
        await asyncio.to_thread(until, lambda: stack.engine.groups)
        asks.close(made)
        await asyncio.to_thread(until, lambda: not stack.engine.groups)

    stack.run(use)


def test_what_hangs_up_before_it_is_sent_is_never_sent(stack: Stack) -> None:
    async def use(asks: RequestQueue) -> None:
        made = [PromptRequest(PROMPT, sampling()) for _ in range(3)]
        asks.open(made)
        asks.close(made[:2])
        await made[2].done
        gone = [PromptRequest(np.array([6], np.int32), sampling())]
        asks.open(gone)
        asks.close(gone)
        await asked(asks, sampling(seed=1))

    stack.run(use)
    assert [(group.prompt.tolist(), group.sampling.n) for group in stack.groups] == [([5], 1), ([5], 1)]


def test_an_abort_brings_back_what_there_is_also_of_what_was_not_sent(stack: Stack) -> None:
    stack.engine.frozen = True

    async def use(asks: RequestQueue) -> None:
        made = [PromptRequest(PROMPT, sampling()) for _ in range(3)]
        asks.open(made)
        assert asks.abort(lambda ask: ask is made[1]) == 1
        await made[1].done
        assert [sample.finish_reason for sample in made[1].samples] == ["aborted"]
        assert not made[0].ended and not made[2].ended
        assert asks.abort() == 2
        await asyncio.gather(made[0].done, made[2].done)
        assert [made[i].samples[0].finish_reason for i in (0, 2)] == ["aborted"] * 2
        assert asks.abort() == 0

    stack.run(use)


def test_parts_of_a_joined_group_come_to_whom_they_belong(stack: Stack) -> None:
    stack.engine.step_s = 0.01

    async def use(asks: RequestQueue) -> list[list[Any]]:
        told: list[list[Any]] = [[], [], []]
        made = [PromptRequest(PROMPT, sampling(max_tokens=40, stream_every=2), mine.append) for mine in told]
        asks.open(made)
        await asyncio.gather(*(ask.done for ask in made))
        return told

    for i, parts in enumerate(stack.run(use)):
        *chunks, sample, end = parts
        assert end is None and isinstance(sample, Sample) and sample.token_ids.tolist() == expected([5], i, 40)
        assert len(chunks) > 1 and {chunk.index for chunk in chunks} == {0}
        come = [id for chunk in chunks for id in chunk.token_ids.tolist()]
        assert come == expected([5], i, len(come))


def test_a_lost_service_is_told_to_all(stack: Stack) -> None:
    from rollout.transport.errors import ClientClosed

    stack.engine.frozen = True

    async def use(asks: RequestQueue) -> None:
        made = [PromptRequest(PROMPT, sampling()) for _ in range(2)]
        asks.open(made)
        await asyncio.to_thread(until, lambda: stack.engine.groups)
        await asyncio.to_thread(client.close)
        for ask in made:
            with pytest.raises(ClientClosed):
                await ask.done

    with RolloutClient(transport=stack.end.connect()) as client:
        stack.run(use, client)


def test_a_lost_service_is_told_to_whoever_was_aborted_as_well() -> None:
    """Its end was asked for and never came."""
    from types import SimpleNamespace

    from rollout.http.requests import SharedGroup
    from rollout.transport.errors import ServiceLost

    async def run() -> None:
        made = [PromptRequest(PROMPT, sampling()) for _ in range(2)]
        cancelled: list[Any] = []
        handle: Any = SimpleNamespace(cancel=cancelled.append, error=ServiceLost("gone"))
        shared = SharedGroup(handle, made)
        for i, ask in enumerate(made):
            ask.shared, ask.first = shared, i
        made[1].abort()
        assert [list(indices) for indices in cancelled] == [[1]]
        shared.add(None)
        for ask in made:
            with pytest.raises(ServiceLost):
                await asyncio.wait_for(ask.done, WAIT_S)

    asyncio.run(run())
