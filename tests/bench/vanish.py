"""`python -m tests.bench vanish`: what machines that vanish cost. Replicas of a fleet are killed again and again while it
generates.

kills_per_hour   of replicas, by SIGKILL, three at most, each as soon as all serve again and have worked for a while
more_tokens      fraction of tokens, prefill included, that was computed beyond those of a run without kills
lost, different  samples that did not arrive, and samples of which a token or a bit of a log-prob differs from that run's

The same groups with equal seeds run on three fleets: undisturbed; with kills, where a killed replica's unfinished children
begin again; with kills and `stream_every`, where they continue from the tokens that the router has. Tokens of a killed replica
are counted up to its last status, which is less than two steps old: a replica is killed as soon as a new one has arrived.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import RandomText
from rollout.bench.target import connected
from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.engine.values import Sample, Sampling
from tests.bench.fleet import WAIT_S, fleet_of, wait_for
from tests.bench.options import options_of

PROMPTS, N, PROMPT_TOKENS, NEW_TOKENS = 24, 8, 128, 128
KILLS = 3
"""in a run at most: replicas that are killed more often than a sample takes would never finish one that begins again"""
WORK_S = 4.0
"""for which all replicas serve between two kills"""
STREAM_EVERY = 8
STILL_S = 2.5
"""for which counters must not change: all statuses have arrived"""
LOOK_S = 0.01
COUNTED = ("generated_tokens", "prefill_tokens")


class Run(NamedTuple):
    """What one fleet did."""

    samples: dict[tuple[int | None, int], Sample]
    """by seed of the group and index"""
    tokens: int
    """that were computed"""
    seconds: float
    kills: int


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row for each fleet, then the summary. Raises BenchFailed for a fleet without a kill."""
    new_tokens = setup.scaled(NEW_TOKENS, 2 * STREAM_EVERY)
    sampling = Sampling(n=N, max_tokens=new_tokens, ignore_eos=True)
    streamed = msgspec.structs.replace(sampling, stream_every=STREAM_EVERY)
    calm = run(setup, sampling, kill=False)
    yield {"workload": "vanish", "run": "calm", "tokens": calm.tokens, "seconds": calm.seconds, "samples": len(calm.samples)}
    rows = {}
    for name, how in (("begin_again", sampling), ("continue", streamed)):
        rows[name] = row = compared(calm, run(setup, how, kill=True))
        yield {"workload": "vanish", "run": name, **row}
    yield {
        "summary": True,
        "replicas": options_of(setup).replicas,
        "samples": len(calm.samples),
        "tokens_per_sample": new_tokens,
        **{name: sum(row[name] for row in rows.values()) for name in ("kills", "lost", "different")},
        **{f"{name}_{figure}": row[figure] for name, row in rows.items() for figure in ("more_tokens", "kills_per_hour")},
        **{f"{name}_tokens_per_kill": row["tokens_per_kill"] for name, row in rows.items()},
        "model": str(setup.folder),
        "dtype": setup.options.dtype,
    }


def compared(calm: Run, disturbed: Run) -> Row:
    """Compare a run with the one without kills. Raises BenchFailed if nothing was killed."""
    if not disturbed.kills:
        raise BenchFailed("all groups ended before a replica was killed: give a larger --scale")
    both = [(sample, disturbed.samples.get(key)) for key, sample in calm.samples.items()]
    there = [(one, other) for one, other in both if other is not None and other.finish_reason == "length"]
    more = disturbed.tokens - calm.tokens
    return {
        "kills": disturbed.kills,
        "kills_per_hour": disturbed.kills * 3600 / disturbed.seconds,
        "seconds": disturbed.seconds,
        "tokens": disturbed.tokens,
        "more_tokens": more / calm.tokens,
        "tokens_per_kill": more / disturbed.kills,
        "lost": len(both) - len(there),
        "different": sum(bits(one) != bits(other) for one, other in there),
    }


def bits(sample: Sample) -> tuple[bytes, bytes]:
    return sample.token_ids.tobytes(), sample.logprobs.tobytes()


def run(setup: BenchSetup, sampling: Sampling, kill: bool) -> Run:
    """Run all groups on a new fleet."""
    options = options_of(setup)
    engine = msgspec.structs.replace(setup.config(), threads=options.threads or 1)
    with connected(fleet_of(engine, options.replicas)) as (_, client):
        wait_for(client, all_serve)
        before, started = computed(client), time.perf_counter()
        prompts = RandomText(client.info.vocab_size).slices(0, PROMPTS, PROMPT_TOKENS)
        handles = submitted(client, prompts, sampling)
        kills = kill_until_done(client, handles) if kill else 0
        samples = {(handle.group.sampling.seed, one.index): one for handle in handles for one in handle.result(WAIT_S)}
        seconds = time.perf_counter() - started
        return Run(samples, computed(client) - before, seconds, kills)


def submitted(client: RolloutClient, prompts: list[np.ndarray], sampling: Sampling) -> list[Handle]:
    return [client.submit(prompt, msgspec.structs.replace(sampling, seed=i)) for i, prompt in enumerate(prompts)]


def all_serve(status: Mapping[str, Any]) -> bool:
    return bool(status["fleet"]["serving"] == status["fleet"]["replicas"])


def computed(client: RolloutClient) -> int:
    """Return the tokens that all replicas have computed, once all have reported them."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < STILL_S:
        status = client.status(timeout=WAIT_S)
        if (now := sum(status[name] for name in COUNTED)) != last:
            last, since = now, time.monotonic()
        time.sleep(LOOK_S)
    return last


def kill_until_done(client: RolloutClient, handles: list[Handle]) -> int:
    """Kill replicas in turn, until all groups have ended or KILLS were killed. Returns how many."""
    kills, serve_since, seen = 0, None, None
    while kills < KILLS and not all(handle.done for handle in handles):
        status = client.status(timeout=WAIT_S)
        victim = status["replicas"][kills % len(status["replicas"])]
        counter = victim.get("generated_tokens")
        if not (all_serve(status) and victim["parts"]):
            serve_since = seen = None
        elif serve_since is None:
            serve_since = time.monotonic()
        elif time.monotonic() - serve_since > WORK_S and seen not in (None, counter):
            os.kill(victim["pid"], signal.SIGKILL)
            kills, serve_since, seen = kills + 1, None, None
            wait_for(client, lambda status: not all_serve(status))
            continue
        seen = counter
        time.sleep(LOOK_S)
    return kills
