"""The client of event loops, against a service in another thread and against a service played by hand."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from rollout import AsyncHandle, AsyncRolloutClient, RolloutClient
from rollout.client.base import BaseClient
from rollout.engine.values import PartialSample, Sample, Sampling, TokenChunk
from rollout.transport import errors as e
from rollout.transport import messages as m
from rollout.transport.columns import pack_samples
from rollout.transport.loopback import LoopbackService
from tests.support.fake_engine import FakeEngine, expected
from tests.support.played import Played
from tests.support.toy import engine as toy_engine
from tests.support.watermark import token_of, watermark_engine, weights_of
from tests.support.wire import serving

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
WAIT = 60.0
"""for what comes: a bound for hangs only"""
ENDLESS = Sampling(n=2, max_tokens=40_000)


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the wake-ups by other threads, and timers."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = self.timers = 0

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> asyncio.Handle:
        self.woken += 1
        return super().call_soon_threadsafe(*args, **options)

    def call_at(self, *args: Any, **options: Any) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_at(*args, **options)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run it in a loop of its own, at most WAIT seconds."""

    async def bounded() -> T:
        async with asyncio.timeout(WAIT):
            return await main

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        return runner.run(bounded())


Connect = Callable[..., AsyncRolloutClient]


@contextmanager
def connecting(engine: Any = None, sockets: bool = False) -> Iterator[Connect]:
    """Run a service in a thread; yields what makes its clients."""
    end = None if sockets else LoopbackService()
    with serving(engine or FakeEngine(step_s=0.0005), end, client_grace_s=WAIT) as service:

        def connect(**options: Any) -> AsyncRolloutClient:
            options = {"connect_timeout_s": WAIT, "link_timeout_s": WAIT, **options}
            if end is not None:
                return AsyncRolloutClient(transport=end.connect(), **options)
            return AsyncRolloutClient(service.endpoint, **options)

        yield connect


@pytest.fixture(params=[False, True], ids=["loopback", "sockets"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    with connecting(sockets=request.param) as connect:
        yield connect


def tokens(samples: list[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Wait for what happens at the service."""
    while not await condition():
        await asyncio.sleep(0.002)


async def groups_of(client: AsyncRolloutClient) -> int:
    """Return the number of groups of the other clients at the service."""
    clients = (await client.status(WAIT))["service"]["clients"]
    return sum(each["groups"] for each in clients)


# the same verbs


def public(kind: type) -> dict[str, Any]:
    """Public members of a client, beside those that both have from `BaseClient`."""
    own = [each for each in reversed(kind.__mro__) if each not in BaseClient.__mro__]
    members = {name: member for each in own for name, member in vars(each).items() if not name.startswith("_")}
    return members | {"__init__": kind.__init__}


def shape(member: Any) -> Any:
    """What a member promises in a loop, or would promise there: its parameters, and what it returns."""
    if isinstance(member, property):
        return "property", member.fset is not None
    signature = inspect.signature(member)
    parameters = [str(each).replace("AsyncHandle", "Handle") for each in signature.parameters.values()]
    returns = signature.return_annotation.replace(", None]", "]")
    for one, other in (("AsyncHandle", "Handle"), ("AsyncRefreshHandle", "RefreshHandle"), ("AsyncGenerator", "Iterator")):
        returns = returns.replace(one, other)
    waits = inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
    return parameters, returns, waits


def differences(kind: type) -> set[str]:
    """Names of the public members that differ from RolloutClient's, other than in that they do not block."""
    mine, theirs = public(kind), public(RolloutClient)
    at_once = {"submit", "continue_samples", "next_turn", "submit_score", "encode", "decode", "__init__"}
    wrong = set(mine) ^ set(theirs)
    for name in set(mine) & set(theirs):
        one, other = shape(mine[name]), shape(theirs[name])
        if not isinstance(mine[name], property):
            one, other = one, (*other[:2], name not in at_once)
        wrong |= {name} if one != other else set()
    return wrong


def test_every_method_has_a_twin() -> None:
    assert differences(AsyncRolloutClient) == set()


def test_a_method_without_a_twin_is_seen() -> None:
    class Wrong(AsyncRolloutClient):
        def status(self, timeout: float = 10.0) -> dict[str, Any]:  # type: ignore[override]
            return {}

        async def pause(self, timeout: float = 61.0) -> None: ...

        async def more(self) -> None: ...

    members = {**vars(AsyncRolloutClient), **vars(Wrong)}
    members = {name: member for name, member in members.items() if name not in ("drain", "__dict__", "__weakref__")}
    assert differences(type("Other", AsyncRolloutClient.__bases__, members)) == {"status", "pause", "more", "drain"}


# groups


def test_a_group_is_awaited(connect: Connect) -> None:
    async def main() -> None:
        async with connect(name="test") as client:
            handle = client.submit([5], Sampling(n=3, max_tokens=20), group_id="mine")
            assert (handle.group_id, handle.n, handle.group.prompt.tolist()) == ("mine", 3, [5])
            group = await handle
            assert tokens(group) == [expected([5], i, 20) for i in range(3)] and handle.done
            assert [sample.index for sample in await handle] == [0, 1, 2], "again"
            assert tokens(await client.submit([6], Sampling(max_tokens=2))) == [expected([6], 0, 2)]
            together = await asyncio.gather(*(client.submit([i], Sampling(max_tokens=3)) for i in range(50)))
            assert [tokens(group) for group in together] == [[expected([i], 0, 3)] for i in range(50)]
            assert client.info.model == "fake" and (await client.status())["service"]["clients"][0]["name"] == "test"

    run(main())


def test_samples_come_as_they_finish(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            handle = client.submit([5], Sampling(n=3, max_tokens=20))
            assert sorted(tokens([sample async for sample in handle])) == sorted(expected([5], i, 20) for i in range(3))
            assert len([sample async for sample in handle.samples(timeout=1)]) == 3, "again from the first"
            prompts = [[1, 2], np.array([7]), (9, 9)]
            samplings = [Sampling(n=2, max_tokens=60), Sampling(n=1, max_tokens=5), Sampling(n=3, max_tokens=1)]
            samples = [sample async for sample in client.generate(prompts, samplings, timeout=WAIT)]
            assert [len(sample.token_ids) for sample in samples] == [1, 1, 1, 5, 60, 60]
            assert [sample async for sample in client.generate([])] == []

    run(main())


def test_whole_groups_come_in_order(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            samplings = [Sampling(n=2, max_tokens=30), Sampling(n=3, max_tokens=1)]
            groups = [
                group
                async for group in client.generate_groups([[1], [2]], samplings, group_ids=["late", "early"], timeout=WAIT)
            ]
            assert [[(s.group_id, s.index) for s in group] for group in groups] == [
                [("late", 0), ("late", 1)],
                [("early", 0), ("early", 1), ("early", 2)],
            ]

    run(main())


def test_a_wait_that_takes_too_long(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            handle = client.submit([5], ENDLESS)
            with pytest.raises(e.RequestTimeout, match=r"0 of 2 samples after 0.02 s"):
                await handle.result(0.02)
            with pytest.raises(e.RequestTimeout, match=r"0 of 2 samples after 0.02 s"):
                await anext(handle.samples(0.02))
            with pytest.raises(e.RequestTimeout, match="no sample in 0.02 s; 2 are missing"):
                await anext(client.generate([[5]], ENDLESS, timeout=0.02))
            with pytest.raises(e.RequestTimeout, match=r"0 of 2 samples after 0.02 s"):
                await anext(client.generate_groups([[5]], ENDLESS, timeout=0.02))
            await until(lambda: only_one_is_left(client))
            assert not handle.done, "it was still live"
            handle.cancel()
            assert [sample.finish_reason for sample in await handle] == ["aborted"] * 2
            with pytest.raises(e.RequestTimeout, match="no status within 0 s"):
                await client.status(0)

    async def only_one_is_left(client: AsyncRolloutClient) -> bool:
        return await groups_of(client) == 1

    run(main())


def test_errors_are_those_of_the_thread_client(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            with pytest.raises(e.InvalidRequest, match="must be integer token ids"):
                client.submit([1.5])  # type: ignore[list-item]
            with pytest.raises(e.InvalidRequest, match="token id 5000"):
                await client.submit([5000])
            with pytest.raises(e.InvalidRequest, match="token id 5000"):
                [sample async for sample in client.submit([5000])]
            with pytest.raises(e.InvalidRequest, match="token id 5000"):
                [sample async for sample in client.generate([[1], [5000]])]
            with pytest.raises(ValueError, match="2 prompts, 1 samplings, 2 group_ids"):
                await anext(client.generate([[1], [2]], [Sampling()]))
            with pytest.raises(e.InvalidRequest, match="no child 7"):
                client.submit([1], ENDLESS).cancel([7])
            with pytest.raises(e.InvalidRequest, match="level=3"):
                await client.sleep(3)

    run(main())


def test_tokens_come_while_a_child_runs(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            handle = client.submit([5], msgspec.structs.replace(ENDLESS, stream_every=5))
            streamed: dict[int, list[int]] = {0: [], 1: []}
            async for chunk in handle.tokens():
                assert isinstance(chunk, TokenChunk) and chunk.first == len(streamed[chunk.index])
                streamed[chunk.index] += chunk.token_ids.tolist()
                if min(map(len, streamed.values())) > 20:
                    handle.cancel()  # the iteration ends with the group
            for sample in await handle:
                known = streamed[sample.index]
                assert known == expected([5], sample.index, len(known)) == sample.token_ids.tolist()[: len(known)]

    run(main())


PROMPT = [5, 6, 7, 8, 9]


def test_a_continued_sample_a_next_turn_and_scores() -> None:
    """Against an engine that samples from its context."""
    turn = Sampling(max_tokens=6, ignore_eos=True, seed=5, kv_ttl_s=600.0)

    async def main(connect: Connect) -> None:
        async with connect() as client:
            (sample,) = await client.submit(PROMPT, turn)
            half = msgspec.structs.replace(PartialSample.of(sample), **halves(sample, 3))
            (again,) = await client.submit(PROMPT, turn, partials=[half])
            assert again.token_ids.tolist() == sample.token_ids.tolist()
            cut = msgspec.structs.replace(sample, finish_reason="cut", **halves(sample, 3))
            (again,) = await client.continue_samples(cut, PROMPT, turn)
            assert again.token_ids.tolist() == sample.token_ids.tolist()
            with pytest.raises(e.InvalidRequest, match="nothing is left of this group"):
                client.continue_samples(await finished(client.submit(PROMPT, turn)))
            following = client.next_turn(sample, PROMPT, turn, append=[7, 8])
            assert following.group.prompt.tolist() == [*PROMPT, *sample.token_ids.tolist(), 7, 8]
            assert len((await following)[0].token_ids) == 6 and (await client.status())["kept_tokens"] > 0
            (scores,) = await client.score([PROMPT], [[sample.token_ids]], turn, timeout=WAIT)
            assert scores[0].logprobs.tolist() == sample.logprobs.tolist() and scores[0].finish_reason == "scored"
            (scored,) = await client.submit_score(PROMPT, [sample.token_ids], turn)
            assert scored.logprobs.tolist() == sample.logprobs.tolist()
            with pytest.raises(e.InvalidRequest, match="1 prompts, 2 lists of completions"):
                await client.score([PROMPT], [[[1]], [[2]]])

    async def finished(handle: AsyncHandle) -> AsyncHandle:
        await handle
        return handle

    with connecting(toy_engine()) as connect:
        run(main(connect))


def halves(sample: Sample, tokens: int) -> dict[str, Any]:
    return {"token_ids": sample.token_ids[:tokens], "logprobs": sample.logprobs[:tokens]}


def test_controls_of_the_service() -> None:
    async def main(connect: Connect) -> None:
        async with connect() as client:
            running = client.submit(PROMPT, Sampling(max_tokens=200, ignore_eos=True))
            await client.pause()
            assert (await client.status())["state"] == "paused"
            await client.resume()
            await client.abort_all()
            assert (await running)[0].finish_reason in ("aborted", "length")
            await client.drain()
            await client.resume()
            assert await client.sleep() >= 0 and (await client.status())["state"] == "asleep"
            await client.wake()
            with pytest.raises(e.InvalidRequest):
                await client.wake(tags=("kv",))
            with pytest.raises(e.InvalidRequest, match="this service has one engine"):
                await client.change_replicas("scale", count=2)
            client.require_version = 0
            assert client.require_version == 0 and len(await client.submit(PROMPT, Sampling(max_tokens=3))) == 1

    with connecting(toy_engine()) as connect:
        run(main(connect))


# cancellation


async def awaits(client: AsyncRolloutClient) -> None:
    await client.submit([1], ENDLESS)


async def iterates(client: AsyncRolloutClient) -> None:
    async for _ in client.submit([1], ENDLESS):
        pass


async def streams(client: AsyncRolloutClient) -> None:
    async for _ in client.submit([1], ENDLESS).tokens():
        pass


async def generates(client: AsyncRolloutClient) -> None:
    async for _ in client.generate([[1]], ENDLESS):
        pass


async def generates_groups(client: AsyncRolloutClient) -> None:
    async for _ in client.generate_groups([[1]], ENDLESS):
        pass


async def gathers(client: AsyncRolloutClient) -> None:
    await asyncio.gather(awaits(client), awaits(client))


async def shields(client: AsyncRolloutClient) -> None:
    await asyncio.shield(client.submit([1], ENDLESS))


WAITS = [awaits, iterates, streams, generates, generates_groups, gathers]


async def there_are_groups(client: AsyncRolloutClient) -> bool:
    return await groups_of(client) > 0


async def there_are_none(client: AsyncRolloutClient) -> bool:
    return await groups_of(client) == 0


@pytest.mark.parametrize("wait", WAITS)
def test_cancelling_a_wait_ends_the_children(wait: Callable[[AsyncRolloutClient], Awaitable[None]], connect: Connect) -> None:
    async def main() -> None:
        async with connect() as watcher, connect() as client:
            task = asyncio.ensure_future(wait(client))
            await until(lambda: there_are_groups(watcher))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: there_are_none(watcher))

    run(main())


def test_without_the_cancel_they_continue() -> None:
    """The control: the task is cancelled as above, and the group is not."""
    engine = FakeEngine(step_s=0.0005)

    async def main(connect: Connect) -> None:
        async with connect() as watcher, connect() as client:
            task = asyncio.ensure_future(shields(client))
            await until(lambda: there_are_groups(watcher))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            (children,) = engine.groups.values()
            known = len(children[0].tokens)
            await until(lambda: longer(children, known + 50))
            assert await groups_of(watcher) == 1 and not engine.aborted

    async def longer(children: list[Any], tokens: int) -> bool:
        return len(children[0].tokens) > tokens

    with connecting(engine) as connect:
        run(main(connect))


@pytest.mark.parametrize("wait", WAITS)
def test_a_timeout_of_asyncio_ends_the_children(wait: Callable[[AsyncRolloutClient], Awaitable[None]]) -> None:
    async def main(connect: Connect) -> None:
        async with connect() as watcher, connect() as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await wait(client)
            await until(lambda: there_are_none(watcher))
            assert tokens(await client.submit([2], Sampling(max_tokens=1))) == [expected([2], 0, 1)]

    with connecting() as connect:
        run(main(connect))


def test_leaving_the_iteration_cancels_the_rest(connect: Connect) -> None:
    samplings = [Sampling(max_tokens=1), ENDLESS]

    async def main() -> None:
        async with connect() as watcher, connect() as client:
            async for _ in client.generate([[1], [2]], samplings):
                await until(lambda: there_are_groups(watcher))
                break
            await until(lambda: there_are_none(watcher))
            async for _ in client.generate_groups([[1], [2]], samplings):
                break
            await until(lambda: there_are_none(watcher))
            async with aclosing(client.generate([[1], [2]], samplings)) as samples:
                await anext(samples)
                await until(lambda: there_are_groups(watcher))
            await until(lambda: there_are_none(watcher))

    run(main())


def test_leaving_the_block_ends_the_session() -> None:
    engine = FakeEngine(step_s=0.0005)

    async def main(connect: Connect) -> None:
        async with connect() as watcher:
            async with connect() as client:
                waits = [asyncio.ensure_future(wait(client)) for wait in WAITS]
                await until(lambda: there_are_groups(watcher))
            for error in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(error, e.ClientClosed)
            await until(lambda: there_are_none(watcher))
            for use in (client.submit([1]), client.status()):
                with pytest.raises(e.ClientClosed):
                    await use
            await client.close()
            client.submit([1]).cancel()

    with connecting(engine) as connect:
        run(main(connect))
        assert engine.aborted


# loops and threads


def arrived(groups: list[AsyncHandle]) -> m.SamplesDone:
    """One message with the sample of each group."""
    array, zeros = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    samples = [
        Sample(
            group_id=each.group_id, index=0, token_ids=array, logprobs=zeros, finish_reason="aborted", prompt_tokens=1,
            weight_versions=[(0, 1)],
        )
        for each in groups
    ]  # fmt: skip
    return pack_samples([each.group_id for each in groups], samples)


def test_one_wake_up_for_all_that_arrived_together() -> None:
    """Whatever the number of groups and waits; and no timers. The control: messages one after the other."""
    played = Played(AsyncRolloutClient)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        async with played.client as client:
            for together in (True, False):
                handles = [client.submit([1], Sampling()) for _ in range(50)]
                status = asyncio.ensure_future(client.status())
                await asyncio.to_thread(played.get, m.StatusRequest)  # it follows the groups
                status.cancel()
                tasks = [asyncio.ensure_future(handle.result()) for handle in handles]
                tasks += [asyncio.ensure_future(anext(handle.samples())) for handle in handles]
                await asyncio.sleep(0)  # now all of them wait
                loop.woken = loop.timers = 0
                if together:
                    played.send(arrived(handles))
                else:
                    for handle, task in zip(handles, tasks, strict=False):
                        played.send(arrived([handle]))
                        await task
                await asyncio.gather(*tasks)
                assert (loop.woken, loop.timers) == (1 if together else 50, 0)

    run(main())


def test_waits_take_no_threads(connect: Connect) -> None:
    async def main() -> None:
        async with connect() as client:
            await client.status()
            before = threading.active_count()
            tasks = [asyncio.ensure_future(awaits(client)) for _ in range(300)]
            tasks += [asyncio.ensure_future(client.status(WAIT)) for _ in range(300)]
            assert len(await tasks[-1]) and threading.active_count() <= before

    run(main())


def test_a_closed_loop_harms_no_other(connect: Connect) -> None:
    """Its tasks wait for ever; the client and the group serve a second loop."""
    client, first = connect(), asyncio.new_event_loop()

    async def start() -> tuple[AsyncHandle, list[asyncio.Future[Any]]]:
        await client.__aenter__()
        handle = client.submit([5], Sampling(n=2, max_tokens=300))
        waits = [asyncio.ensure_future(wait) for wait in (handle.result(), anext(handle.samples()), client.status())]
        await asyncio.sleep(0)
        return handle, waits

    handle, waits = first.run_until_complete(start())
    first.close()
    with pytest.raises(RuntimeError, match="Event loop is closed"):  # what the I/O thread meets
        first.call_soon_threadsafe(print)

    async def main() -> None:
        try:
            assert tokens(await handle) == [expected([5], i, 300) for i in range(2)]
            assert tokens(await client.submit([6], Sampling(max_tokens=2))) == [expected([6], 0, 2)]
        finally:
            await client.close()

    run(main())
    assert not any(wait.done() for wait in waits)
    for wait in waits:
        wait._log_destroy_pending = False  # type: ignore[attr-defined]


def test_two_loops_share_a_client(connect: Connect) -> None:
    async def use(client: AsyncRolloutClient, handle: AsyncHandle, number: int) -> list[list[int]]:
        for i in range(20):
            ((sample,),) = [group async for group in client.generate_groups([[number, i]], Sampling(max_tokens=2))]
            assert sample.token_ids.tolist() == expected([number, i], 0, 2)
        return tokens(await handle)

    async def main() -> None:
        async with connect() as client:
            handle = client.submit([5], Sampling(n=2, max_tokens=500))
            others = [asyncio.to_thread(run, use(client, handle, number)) for number in (1, 2)]
            results = await asyncio.gather(*others, use(client, handle, 3))
            assert results == [[expected([5], i, 500) for i in range(2)]] * 3

    run(main())


def test_conversations_in_one_loop(tiny_service: str) -> None:
    """Their number, and that of the threads; `python -m tests.bench conversations` measures the rate."""
    sampling = Sampling(max_tokens=4, ignore_eos=True, kv_ttl_s=60.0)

    async def converse(client: AsyncRolloutClient, number: int) -> int:
        turn = client.submit([number + 3, 5, 6], sampling)
        for _ in range(2):
            (sample,) = await turn
            turn = client.next_turn(sample, turn.group.prompt, sampling, append=[7])
        (sample,) = await turn
        return len(turn.group.prompt) + len(sample.token_ids)

    async def main() -> None:
        before = {each.name for each in threading.enumerate()}
        async with AsyncRolloutClient(tiny_service, connect_timeout_s=WAIT) as client:
            tasks = [asyncio.ensure_future(converse(client, number)) for number in range(100)]
            await tasks[50]
            new = {each.name for each in threading.enumerate()} - before
            assert "rollout-client" in new and len(new) <= 2, "the client's I/O thread, and one of libzmq's binding"
            assert await asyncio.gather(*tasks) == [3 + 3 * 4 + 2] * 100

    run(main())


def test_the_example_of_the_guide_runs_as_printed(tiny_service: str, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(import asyncio\n.*?)```", (ROOT / "docs/client.md").read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script, tiny_service], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\d (?:stop|length) -\d+\.\d+$", done.stdout, re.MULTILINE)) == 8, done.stdout


# the end of a service


def test_a_lost_service_is_raised_in_all_waits() -> None:
    played = Played(AsyncRolloutClient)

    async def main() -> None:
        async with played.client as client:
            tasks = [asyncio.ensure_future(wait(client)) for wait in WAITS]
            tasks += [asyncio.ensure_future(wait) for wait in (client.status(), client.score([[1]], [[[2]]]))]
            for _ in range(len(WAITS) + 2):
                await asyncio.to_thread(played.get, m.Submit)
            played.send(m.Closing("it was stopped"))
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, e.ServiceLost) and "it was stopped" in str(error)

    run(main())


def test_a_group_that_failed_continues_from_its_streamed_tokens() -> None:
    played = Played(AsyncRolloutClient)

    async def main() -> None:
        async with played.client as client:
            half = PartialSample(
                index=0, token_ids=np.array([4, 5], np.int32), logprobs=np.zeros(2, np.float32), weight_versions=[(0, 1)]
            )
            handle = client.submit([1], Sampling(seed=1), partials=[half])
            await asyncio.to_thread(played.get, m.Submit)
            played.send(m.Closing("it was stopped"))
            with pytest.raises(e.ServiceLost):
                await handle
            (known,) = handle.partial_samples()
            again = client.continue_samples(handle)
            assert known.token_ids.tolist() == again.group.partials[0].token_ids.tolist() == [4, 5]

    run(main())


def test_nobody_there() -> None:
    async def main(client: AsyncRolloutClient) -> None:
        async with client:
            pass

    before = threading.active_count()
    with pytest.raises(e.ServiceLost, match="no service at tcp://127.0.0.1:9 within 0.2 s: is `rollout serve` running"):
        run(main(AsyncRolloutClient("tcp://127.0.0.1:9", connect_timeout_s=0.2)))
    with pytest.raises(e.ServiceLost, match="accepts connections but did not answer"):
        run(main(AsyncRolloutClient(transport=LoopbackService().connect(), connect_timeout_s=0.1)))
    with pytest.raises(ValueError, match="either an address or a transport"):
        AsyncRolloutClient()
    assert threading.active_count() <= before, "the clients have ended their threads"


def test_a_use_outside_of_the_block() -> None:
    client = AsyncRolloutClient(transport=LoopbackService().connect())
    with pytest.raises(RuntimeError, match="not connected yet: use it inside `async with"):
        client.submit([1])
    run(client.close())


# weights


def test_a_refresh_leaves_the_loop_free() -> None:
    """The tensors are read in a thread: here they wait for the loop."""
    started, free = threading.Event(), threading.Event()

    def tensors() -> Iterator[tuple[str, Any]]:
        started.set()
        assert free.wait(WAIT), "the loop is blocked"
        yield from weights_of(1).items()

    async def main(connect: Connect) -> None:
        async with connect() as client:
            task = asyncio.ensure_future(client.refresh(tensors(), via="inline"))
            assert await asyncio.to_thread(started.wait, WAIT)
            assert (await client.weights_status())["version"] == 0
            free.set()
            refreshed = await task
            assert refreshed.version == 1 and client.info.version == 0
            (sample,) = await client.submit([1], Sampling(max_tokens=2, temperature=0.0))
            assert sample.token_ids.tolist() == [token_of(1)] * 2
            with pytest.raises(e.InvalidRequest, match="kv='drop'"):
                await client.refresh(weights_of(2), kv="drop")  # type: ignore[arg-type]
            with pytest.raises(e.WeightsRefused, match="is no adapter"):
                await client.refresh_lora(7)  # type: ignore[arg-type]

    with connecting(watermark_engine()) as connect:
        run(main(connect))


def test_a_refresh_continues_when_its_wait_is_cancelled() -> None:
    async def main(connect: Connect) -> None:
        async with connect() as client:
            handle = await client.refresh_async(weights_of(1), via="inline")
            wait = asyncio.ensure_future(handle.result())
            await asyncio.sleep(0)
            wait.cancel()
            with pytest.raises(asyncio.CancelledError):
                await wait
            assert (await handle).version == 1 and handle.done
            assert (await client.weights_status())["version"] == 1

    with connecting(watermark_engine()) as connect:
        run(main(connect))
