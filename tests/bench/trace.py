"""`python -m tests.bench turns --trace FILE`: replays the lengths of recorded rollouts, group by group and turn by turn.

    {"group": 0, "stream": 1, "prompt_len": 96, "out_lens": [24, 9], "obs_lens": [12, 0], "tool_times": [0.2]}

    stream 0   p p p p o o o t t o
    stream 1   p p p p o o t o o o      p: the prompt that all streams of the group share
                       │   └ t: observation, which a tool gives `tool_times` seconds after the turn
                       └ o: `out_lens` tokens of each turn, whose stop tokens are ignored

A line per stream, in the format of `benchmark_agentic.py --trace-file` (vllm-project/tpu-inference, changes 3365 and 3383). All
streams run at once, each turn as `next_turn` of the one before. Texts are those of the other benchmarks: only lengths and times
come from the trace.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import PromptSource, long_enough
from rollout.bench.target import connected
from rollout.client.aio import AsyncRolloutClient
from rollout.client.api import RolloutClient
from rollout.config import Config, InputError
from rollout.engine.values import Sample, Sampling
from tests.bench.options import options_of

KV_TTL_S = 600.0
WAIT_S = 3600.0
FIGURES = (
    "tokens_per_second", "seconds", "generated_tokens", "prompt_tokens", "prefilled_tokens", "cached_share",
    "latency_p50_seconds", "latency_p95_seconds",
)  # fmt: skip
"""whose medians the summary has"""


class Stream(msgspec.Struct, frozen=True):
    """A line of a trace: lengths in tokens, times in seconds."""

    group: int
    prompt_len: int
    """the same for all streams of a group"""
    out_lens: list[int]
    """of each turn, at least 1"""
    obs_lens: list[int] = []
    """after each turn, at least 1; that of the last turn may be missing or 0, and is not used"""
    stream: int = 0
    tool_times: list[float] = []
    """after each turn but the last, or none at all"""

    @property
    def tokens(self) -> int:
        """Return the tokens at the end of the last turn."""
        return self.prompt_len + sum(self.out_lens) + sum(self.obs_lens[: len(self.out_lens) - 1])

    def problem(self) -> str:
        """Return what is wrong with it; "" if nothing is."""
        gaps = len(self.out_lens) - 1
        if self.prompt_len < 1 or not self.out_lens or min(self.out_lens) < 1:
            return "prompt_len and each of out_lens must be at least 1, and there must be a turn"
        if len(self.obs_lens) < gaps or min(self.obs_lens[:gaps], default=1) < 1:
            return f"obs_lens: need {gaps} numbers of at least 1, one after each turn but the last"
        if self.tool_times and (len(self.tool_times) < gaps or min(self.tool_times) < 0):
            return f"tool_times: need {gaps} numbers, none negative, or none at all"
        return ""

    def scaled(self, setup: BenchSetup) -> Stream:
        """Multiply the lengths by `--scale`, down to one token."""
        out, obs = ([setup.scaled(tokens, 1) for tokens in each] for each in (self.out_lens, self.obs_lens))
        return msgspec.structs.replace(self, prompt_len=setup.scaled(self.prompt_len, 1), out_lens=out, obs_lens=obs)


class TraceRun(NamedTuple):
    """What one run of a trace has measured on the client's side."""

    seconds: float
    generated_tokens: int
    prompt_tokens: int
    """of all requests, history included"""
    latencies: list[float]
    """seconds from the submission of each turn to its sample"""


def read_trace(path: str) -> list[Stream]:
    """Read a trace. Raises InputError naming the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise InputError(f"--trace {path}: {error}") from error
    streams: list[Stream] = []
    lengths: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            stream = msgspec.json.decode(line, type=Stream)
        except msgspec.MsgspecError as error:
            raise InputError(f"--trace {path}, line {number}: {error}") from error
        problem = stream.problem()
        if lengths.setdefault(stream.group, stream.prompt_len) != stream.prompt_len:
            problem = f"prompt_len {stream.prompt_len}: another stream of group {stream.group} has {lengths[stream.group]}"
        if problem:
            raise InputError(f"--trace {path}, line {number}: {problem}")
        streams.append(stream)
    if not streams:
        raise InputError(f"--trace {path}: no streams; see tests/bench/trace.jsonl for an example")
    return streams


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per run, then the summary with the medians. Raises InputError, and BenchFailed if tokens are missing."""
    streams = [stream.scaled(setup) for stream in read_trace(options_of(setup).trace)]
    with long_enough(setup.folder, max(stream.tokens for stream in streams)) as (served, weights):
        block = setup.config().block_tokens
        room = sum(stream.tokens + 2 * block for stream in streams)
        engine = setup.config(model=str(served), kv_tokens=2 * room, cpu_offload_gib=0)
        rows: list[Row] = []
        with connected(Config(engine=engine)) as (service, client):
            for run in range(setup.repeat):
                rows.append({"run": run, **replay(service.endpoint, client, streams, setup.text, run)})
                yield rows[-1]
            status = client.status()
    yield {
        "summary": True,
        **{name: statistics.median(row[name] for row in rows) for name in FIGURES},
        "groups": len({stream.group for stream in streams}),
        "streams": len(streams),
        "requests": sum(len(stream.out_lens) for stream in streams),
        "runs": len(rows),
        "trace": options_of(setup).trace,
        "model": str(setup.folder),
        "weights": weights,
        **{name: getattr(engine, name) for name in ("dtype", "threads")},
        "arithmetic": status["arithmetic"],
    }


def replay(address: str, client: RolloutClient, streams: list[Stream], text: PromptSource, run: int) -> Row:
    """Replay a trace once, with texts of its own."""
    before = client.status()
    done = asyncio.run(run_streams(address, streams, text, run))
    after = client.status()
    wanted = sum(sum(stream.out_lens) for stream in streams)
    if done.generated_tokens != wanted:
        raise BenchFailed(f"{done.generated_tokens} of {wanted} tokens arrived, so the time means nothing")
    prefilled = after["prefill_tokens"] - before["prefill_tokens"]
    half, most = np.percentile(done.latencies, [50, 95]).tolist()
    return {
        "tokens_per_second": wanted / done.seconds,
        "seconds": done.seconds,
        "generated_tokens": wanted,
        "prompt_tokens": done.prompt_tokens,
        "prefilled_tokens": prefilled,
        "cached_share": 1 - prefilled / done.prompt_tokens,
        "latency_p50_seconds": half,
        "latency_p95_seconds": most,
    }


async def run_streams(address: str, streams: list[Stream], text: PromptSource, run: int) -> TraceRun:
    """Run all streams at once."""
    longest, groups = max(stream.tokens for stream in streams), sorted({stream.group for stream in streams})
    count = len(groups) + len(streams)
    texts = text.slices(run * count * longest, count, longest)
    prompts, answers = dict(zip(groups, texts, strict=False)), texts[len(groups) :]
    latencies: list[float] = []
    async with AsyncRolloutClient(address, name="rollout bench", connect_timeout_s=60.0) as client:
        started = time.perf_counter()
        async with asyncio.timeout(WAIT_S):
            followed = [
                follow(client, stream, prompts[stream.group][: stream.prompt_len], answers[i], i, latencies)
                for i, stream in enumerate(streams)
            ]
            generated, prompted = zip(*await asyncio.gather(*followed), strict=True)
        return TraceRun(time.perf_counter() - started, sum(generated), sum(prompted), latencies)


async def follow(
    client: AsyncRolloutClient, stream: Stream, prompt: np.ndarray, answer: np.ndarray, seed: int, latencies: list[float]
) -> tuple[int, int]:
    """Run a stream turn by turn, and add the seconds of each turn to `latencies`. answer: tokens of all its observations.
    Returns the tokens generated and those of all its prompts."""
    generated = prompted = 0
    sample: Sample | None = None
    for turn, new in enumerate(stream.out_lens):
        last = turn == len(stream.out_lens) - 1
        sampling = Sampling(max_tokens=new, ignore_eos=True, seed=seed, kv_ttl_s=0.0 if last else KV_TTL_S)
        began = time.perf_counter()
        if sample is None:
            handle = client.submit(prompt, sampling)
        else:
            more, answer = np.split(answer, [stream.obs_lens[turn - 1]])
            handle = client.next_turn(sample, prompt, sampling, append=more)
        (sample,) = await handle
        latencies.append(time.perf_counter() - began)
        prompt = handle.group.prompt
        generated, prompted = generated + len(sample.token_ids), prompted + len(prompt)
        if stream.tool_times and not last:
            await asyncio.sleep(stream.tool_times[turn])
    return generated, prompted
