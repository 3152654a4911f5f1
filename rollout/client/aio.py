"""The client of a rollout service for asyncio. Imports neither torch nor an engine.

    async with AsyncRolloutClient("tcp://127.0.0.1:5655") as client:
        group = await client.submit([1, 2, 3], Sampling(n=8, max_tokens=256))
        async for sample in client.generate([[1, 2, 3], [4, 5]], Sampling(n=8, max_tokens=256)):
            print(sample.group_id, sample.index, sample.token_ids, sample.finish_reason)

Arguments, results and errors are those of `RolloutClient`. Waiting tasks take no threads: the client's I/O thread wakes each
event loop once for all that arrived together.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from rollout.client.async_handle import AsyncGeneration, AsyncHandle, AsyncRefreshHandle, answer_async
from rollout.client.base import BaseClient
from rollout.client.submission import (
    Samples,
    TokenIds,
    check_scored,
    continued_group,
    group_of,
    groups_of,
    scored_group,
    scored_groups,
    turn_group,
)
from rollout.client.text import Prompt
from rollout.client.wakeups import Wakeups
from rollout.engine.values import Group, KVPolicy, PartialSample, Refreshed, Sample, Sampling, Tag
from rollout.transport.weights import Via

if TYPE_CHECKING:
    from rollout.client.lora import AdapterSource
    from rollout.client.receipts import Receipt
    from rollout.client.refresh import NamedTensors
    from rollout.client.replaying import Change, Reproduced
    from rollout.client.verification import Verified


class AsyncRolloutClient(BaseClient):
    """Connects tasks of event loops to a rollout service: `async with AsyncRolloutClient(address) as client`. The start of the
    block waits for the service. The end of the block ends the session: the service aborts its open groups, and waiting tasks
    get ClientClosed.

    `submit` and its relatives return at once; `await` their handles. Cancelling a task that waits for samples, also by
    `asyncio.timeout`, aborts its groups. One client may serve several event loops.

    A prompt of text needs the tokenizer, which the first one loads: this blocks the event loop for seconds, except in
    `generate`, `generate_groups` and `score`, which load it in a thread.

    The arguments are those of `RolloutClient`; `connect_timeout_s` bounds the wait at the start of the block."""

    @functools.cached_property
    def _wakeups(self) -> Wakeups:
        return Wakeups(self._session.link.calls)

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await asyncio.shield(asyncio.wrap_future(self._session.link.first_welcome))
        except TimeoutError:
            error = self._session.unreachable(self._config.connect_timeout_s)
            await self.close()
            raise error from None
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session, as `RolloutClient.close`. May be repeated."""
        await asyncio.to_thread(self._close)

    # groups

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        group_id: str | None = None,
        *,
        indices: Sequence[int] | None = None,
        partials: Sequence[PartialSample] = (),
    ) -> AsyncHandle:
        """Send one group; returns at once. As `RolloutClient.submit`."""
        return self._submit(group_of(self._session.group_id(group_id), self._text.ids(prompt), sampling, indices, partials))

    def continue_samples(
        self,
        samples: Samples | AsyncHandle,
        prompt: Prompt | None = None,
        sampling: Sampling | None = None,
        group_id: str | None = None,
    ) -> AsyncHandle:
        """Continue samples that ended early as a new group; returns at once. As `RolloutClient.continue_samples`."""
        known = samples.handle if isinstance(samples, AsyncHandle) else samples
        ids = None if prompt is None else self._text.ids(prompt)
        return self._submit(continued_group(self._session.group_id(group_id), known, ids, sampling))

    def next_turn(
        self,
        sample: Sample,
        prompt: Prompt,
        sampling: Sampling | None = None,
        group_id: str | None = None,
        *,
        append: Prompt,
    ) -> AsyncHandle:
        """Start the next turn of a conversation; returns at once. As `RolloutClient.next_turn`."""
        before, more = self._text.ids(prompt), self._text.next_ids(sample, append)
        return self._submit(turn_group(self._session.group_id(group_id), sample, before, sampling, more))

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        group_ids: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[Sample, None]:
        """Yield the samples of all groups as they finish. The first step of the iteration sends the groups; leaving it early
        cancels them: `contextlib.aclosing` at once, otherwise when the iterator is collected. As `RolloutClient.generate`."""
        with AsyncGeneration(self._session.submit, self._wakeups) as generation:
            ids = await self._text.all_ids_async(prompts)
            generation.submit_all(groups_of(self._session.group_id, ids, sampling, group_ids))
            async for sample in generation.samples(timeout):
                yield sample

    async def generate_groups(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        group_ids: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[list[Sample], None]:
        """Yield whole groups (n samples, sorted by index) in the order of the prompts. timeout: maximum seconds for one group.
        Otherwise as `generate`."""
        with AsyncGeneration(self._session.submit, self._wakeups) as generation:
            ids = await self._text.all_ids_async(prompts)
            generation.submit_all(groups_of(self._session.group_id, ids, sampling, group_ids))
            async for group in generation.groups(timeout):
                yield group

    async def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[TokenIds | str]],
        sampling: Sampling | None = None,
        *,
        timeout: float | None = None,
    ) -> list[list[Sample]]:
        """Compute the log-probs of given tokens. As `RolloutClient.score`."""
        with AsyncGeneration(self._session.submit, self._wakeups) as generation:
            ids = await self._text.all_ids_async(prompts)
            texts = [self._text.completion_ids(mine) for mine in completions]
            generation.submit_all(scored_groups(self._session.group_id, ids, texts, sampling))
            groups = [group async for group in generation.groups(timeout)]
        for group in groups:
            check_scored(group)
        return groups

    def submit_score(
        self,
        prompt: Prompt,
        completions: Sequence[TokenIds | str],
        sampling: Sampling | None = None,
        group_id: str | None = None,
    ) -> AsyncHandle:
        """Send one prompt whose completions are to be scored; returns at once. As `RolloutClient.submit_score`."""
        ids, texts = self._text.ids(prompt), self._text.completion_ids(completions)
        return self._submit(scored_group(self._session.group_id(group_id), ids, texts, sampling))

    async def verify(
        self,
        samples: Samples,
        prompt: Prompt,
        sampling: Sampling,
        *,
        receipts: Sequence[Receipt] | None = None,
        timeout: float | None = None,
    ) -> list[Verified]:
        """Compute samples of one group again, and draw each token again. As `RolloutClient.verify`."""
        given = None if receipts is None else [receipts]
        mine = [samples] if isinstance(samples, Sample) else samples
        (verdicts,) = await self.verify_groups([mine], [prompt], sampling, receipts=given, timeout=timeout)
        return verdicts

    async def verify_groups(
        self,
        groups: Sequence[Sequence[Sample]],
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling],
        *,
        receipts: Sequence[Sequence[Receipt]] | None = None,
        timeout: float | None = None,
    ) -> list[list[Verified]]:
        """Verify several groups at once. As `RolloutClient.verify_groups`."""
        checks = self._parts.checks(groups, await self._text.all_ids_async(prompts), sampling, receipts)
        with AsyncGeneration(self._session.compute, self._wakeups) as generation:
            for check in checks:
                generation.submit_all(check.groups)
            drawn = [sample async for group in generation.groups(timeout) for sample in group]
        return [check.judge(drawn) for check in checks]

    async def replay(
        self,
        receipts: Sequence[Receipt],
        prompts: Sequence[Prompt],
        *,
        weights: Mapping[int, NamedTensors] | None = None,
        ends: Sequence[tuple[int, str]] | None = None,
        change: Change | None = None,
        timeout: float | None = None,
    ) -> list[Reproduced]:
        """Make samples again from their receipts. As `RolloutClient.replay`."""
        given = {} if weights is None else weights
        replay = self._parts.replaying(receipts, await self._text.all_ids_async(prompts), given, ends, change)
        done: Refreshed | list[Sample] | None = None
        while (step := replay.next_step(done)) is not None:
            if not isinstance(step, list):
                done = await self.refresh(given[step.version], kv="keep")
                continue
            with AsyncGeneration(self._session.compute, self._wakeups) as generation:
                generation.submit_all(step)
                done = [sample async for group in generation.groups(timeout) for sample in group]
        return replay.results

    def _submit(self, group: Group) -> AsyncHandle:
        return AsyncHandle(lambda on_change: self._session.submit(group, on_change), self._wakeups)

    # the service, for all clients

    async def status(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return the service's status. Raises RequestTimeout, ServiceLost."""
        return await answer_async(self._session.status(), timeout, "status")

    async def pause(self, timeout: float = 60.0) -> None:
        """Stop between two steps, for all clients. As `RolloutClient.pause`."""
        await answer_async(self._session.control("pause"), timeout, "pause")

    async def resume(self, timeout: float = 60.0) -> None:
        """Undo `pause` and `drain`, of any client."""
        await answer_async(self._session.control("resume"), timeout, "resumption")

    async def drain(self, timeout: float = 3600.0) -> None:
        """Finish the started groups of all clients and start no others until `resume`. Returns when nothing runs. The service
        continues to drain after a RequestTimeout, and when the task is cancelled."""
        await answer_async(self._session.control("drain"), timeout, "end of the drain")

    async def abort_all(self, timeout: float = 60.0) -> None:
        """Abort all groups of all clients; samples return as "aborted" with their tokens so far."""
        await answer_async(self._session.control("abort_all"), timeout, "end of all groups")

    async def change_replicas(
        self, action: Literal["scale", "drain", "roll"], *, count: int = 0, name: str = "", timeout: float = 60.0
    ) -> None:
        """Change the replicas of a fleet. As `RolloutClient.change_replicas`."""
        await answer_async(self._session.change_replicas(action, count, name), timeout, "change of replicas")

    async def sleep(self, level: int = 1, timeout: float = 300.0) -> int:
        """Release the service's device memory between two steps. Returns the released bytes. As `RolloutClient.sleep`."""
        return (await answer_async(self._session.sleep(level), timeout, "sleep")).freed_bytes

    async def wake(self, timeout: float = 300.0, *, tags: Sequence[Tag] | None = None) -> None:
        """Undo `sleep`, for all memory or a part of it. As `RolloutClient.wake`."""
        await answer_async(self._session.wake(tags), timeout, "wake-up")

    # weights

    async def weights_status(self, verify: bool = False, timeout: float = 60.0) -> dict[str, Any]:
        """Return the live version and digest, and which client stages which weights. As `RolloutClient.weights_status`."""
        return await answer_async(self._session.weights_status(verify), timeout, "status of the weights")

    async def refresh(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        partial: bool = False,
        timeout: float = 600.0,
    ) -> Refreshed:
        """Replace the service's weights in place, as `RolloutClient.refresh`. A thread reads and sends the tensors. The refresh
        continues when the task is cancelled: do not change the tensors until `weights_status` shows no staged weights."""
        handle = await self.refresh_async(named_tensors, version=version, kv=kv, via=via, partial=partial, timeout=timeout)
        return await handle

    async def refresh_async(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        partial: bool = False,
        timeout: float = 600.0,
    ) -> AsyncRefreshHandle:
        """Start a `refresh`; returns when the tensors have been read. As `RolloutClient.refresh_async`."""
        start = self._parts.start_refresh
        return AsyncRefreshHandle(await asyncio.to_thread(start, named_tensors, version, kv, partial, via, timeout))

    async def refresh_lora(
        self,
        adapter: AdapterSource,
        *,
        scale: float = 1.0,
        base: str | None = None,
        version: int | None = None,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        timeout: float = 600.0,
    ) -> Refreshed:
        """Replace the service's weights by base + adapter, as `RolloutClient.refresh_lora`. Otherwise as `refresh`."""
        start = self._parts.start_lora
        return await AsyncRefreshHandle(await asyncio.to_thread(start, adapter, scale, base, version, kv, via, timeout))
