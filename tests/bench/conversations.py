"""`python -m tests.bench conversations`: 1,000 conversations of 3 turns at once, through each client.

    asyncio   a task per conversation, `AsyncRolloutClient`
    stream    one thread for all, `RolloutClient` with `SampleStream`
    pool      a thread per conversation, `RolloutClient`

All use one service with a tiny model, in turn, with prompts that no run has had. `threads` are those of this process in the
middle of a run. `--scale` multiplies the number of conversations.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import RandomText, save_tiny
from rollout.bench.target import connected
from rollout.client.aio import AsyncRolloutClient
from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.client.streams import SampleStream
from rollout.config import Config
from rollout.engine.values import Sampling

CONVERSATIONS, TURNS = 1000, 3
PROMPT_TOKENS, TOOL_TOKENS, NEW_TOKENS = 32, 8, 8
VOCABULARY = 1024
WAIT_S = 600.0
SAMPLING = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, kv_ttl_s=60.0)
LAST = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)


class Load(NamedTuple):
    """Conversations of one run."""

    address: str
    client: RolloutClient
    prompts: list[np.ndarray]
    answer: np.ndarray
    """of the tool, before each turn but the first"""


class Outcome(NamedTuple):
    """What one run has measured."""

    seconds: float
    tokens: int
    threads: int


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per round of runs, then the summary. Raises BenchFailed if tokens are missing."""
    count, text = setup.scaled(CONVERSATIONS, 8), RandomText(VOCABULARY)
    with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
        tiny = save_tiny(Path(folder), 64, VOCABULARY, setup.options.dtype)
        length = PROMPT_TOKENS + TURNS * (TOOL_TOKENS + NEW_TOKENS)
        engine = setup.config(model=str(tiny), kv_tokens=4 * count * length, cpu_offload_gib=0, max_num_seqs=count)
        with connected(Config(engine=engine)) as (service, client):
            rounds = []
            for number in range(setup.repeat + 1):
                results = {}
                for place, (way, run) in enumerate(WAYS.items()):
                    prompts = text.slices(len(WAYS) * number + place, count + 1, PROMPT_TOKENS)
                    load = Load(service.endpoint, client, prompts[:count], prompts[count][:TOOL_TOKENS])
                    results[way] = checked(way, run(load), count)
                if number:  # the first round warms up
                    rounds.append(row_of(results, count))
                    yield {"run": number - 1, **rounds[-1]}
    yield {
        "summary": True,
        **{name: statistics.median(row[name] for row in rounds) for name in rounds[0]},
        "conversations": count,
        "turns": TURNS,
        "new_tokens": NEW_TOKENS,
        "runs": len(rounds),
    }


def checked(way: str, result: Outcome, count: int) -> Outcome:
    if result.tokens != count * TURNS * NEW_TOKENS:
        raise BenchFailed(f"{way}: {result.tokens} of {count * TURNS * NEW_TOKENS} tokens arrived, so the time means nothing")
    return result


def row_of(results: dict[str, Outcome], count: int) -> Row:
    """ratio: asyncio to the faster of the other two."""
    rates = {f"{way}_per_second": count / result.seconds for way, result in results.items()}
    faster = max(rates["stream_per_second"], rates["pool_per_second"])
    threads = {f"{way}_threads": result.threads for way, result in results.items()}
    return {**rates, "ratio": rates["asyncio_per_second"] / faster, **threads}


def sampling_of(turn: int) -> Sampling:
    """Return the sampling of a turn, from 1 on; the KV of the last one is not kept."""
    return SAMPLING if turn < TURNS else LAST


def threads() -> int:
    return int(psutil.Process().num_threads())


def run_asyncio(load: Load) -> Outcome:
    return asyncio.run(run_tasks(load))


async def run_tasks(load: Load) -> Outcome:
    async with AsyncRolloutClient(load.address, name="rollout bench", connect_timeout_s=60.0) as client:

        async def converse(prompt: np.ndarray) -> int:
            handle = client.submit(prompt, sampling_of(1))
            (sample,) = await handle
            tokens = len(sample.token_ids)
            for turn in range(2, TURNS + 1):
                handle = client.next_turn(sample, handle.group.prompt, sampling_of(turn), append=load.answer)
                (sample,) = await handle
                tokens += len(sample.token_ids)
            return tokens

        started = time.perf_counter()
        async with asyncio.timeout(WAIT_S):
            tasks = [asyncio.ensure_future(converse(prompt)) for prompt in load.prompts]
            await tasks[len(tasks) // 2]
            here = threads()
            tokens = sum(await asyncio.gather(*tasks))
        return Outcome(time.perf_counter() - started, tokens, here)


def run_stream(load: Load) -> Outcome:
    client, stream, turns = load.client, SampleStream(), dict[str, int]()
    tokens = 0

    def follow(handle: Handle, turn: int) -> None:
        turns[handle.group_id] = turn
        stream.add(handle)

    started = time.perf_counter()
    for prompt in load.prompts:
        follow(client.submit(prompt, sampling_of(1)), 1)
    here = threads()
    while turns:
        handle, sample = stream.get(WAIT_S)
        tokens, turn = tokens + len(sample.token_ids), turns.pop(handle.group_id) + 1
        if turn <= TURNS:
            follow(client.next_turn(sample, handle.group.prompt, sampling_of(turn), append=load.answer), turn)
    return Outcome(time.perf_counter() - started, tokens, here)


def run_pool(load: Load) -> Outcome:
    client = load.client

    def converse(prompt: np.ndarray) -> int:
        handle = client.submit(prompt, sampling_of(1))
        (sample,) = handle.result(WAIT_S)
        tokens = len(sample.token_ids)
        for turn in range(2, TURNS + 1):
            handle = client.next_turn(sample, handle.group.prompt, sampling_of(turn), append=load.answer)
            (sample,) = handle.result(WAIT_S)
            tokens += len(sample.token_ids)
        return tokens

    started = time.perf_counter()
    with ThreadPoolExecutor(len(load.prompts)) as pool:
        futures = [pool.submit(converse, prompt) for prompt in load.prompts]
        futures[len(futures) // 2].result(WAIT_S)
        here = threads()
        tokens = sum(future.result(WAIT_S) for future in futures)
        seconds = time.perf_counter() - started
    return Outcome(seconds, tokens, here)


WAYS: dict[str, Callable[[Load], Outcome]] = {"asyncio": run_asyncio, "stream": run_stream, "pool": run_pool}
