"""`python -m tests.bench trust`: what `--fleet.verify` costs. One replica of a fleet is trusted, the others are verified.

cpu_ratio      CPU seconds of router and replicas over those without verification, by share of verified children
seconds_ratio  the same for the time until all samples have arrived, which other load of the machine disturbs
verified       children that had a verdict; `skipped` ones were delivered without

The same groups with equal seeds run on a new fleet for each share, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import psutil

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import RandomText
from rollout.bench.target import connected
from rollout.config import Config, FleetConfig
from rollout.engine.values import Sample, Sampling
from tests.bench.fleet import WAIT_S, wait_for
from tests.bench.options import options_of
from tests.bench.vanish import all_serve, bits

SHARES = (0.0, 0.05, 1.0)
PROMPTS, N, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 128, 128
TRUSTED = "local-0"


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row for each share and turn, then the summary. Raises BenchFailed for a lie, and for samples that differ."""
    rows: dict[float, list[Row]] = {share: [] for share in SHARES}
    known: dict[tuple[int | None, int], Sample] = {}
    for turn in range(setup.repeat):
        for share in SHARES:
            row, samples = run(setup, share)
            known = known or samples
            if any(bits(known[key]) != bits(sample) for key, sample in samples.items()):
                raise BenchFailed("samples differ though nothing but their verification does")
            rows[share].append(row)
            yield {"workload": "trust", "turn": turn, **row}
    least = {
        share: {name: min(row[name] for row in each) for name in ("cpu_seconds", "seconds")} for share, each in rows.items()
    }
    last = {share: each[-1] for share, each in rows.items()}
    yield {
        "summary": True,
        "replicas": options_of(setup).replicas,
        "samples": len(known),
        "cpu_ratio": {str(share): least[share]["cpu_seconds"] / least[0.0]["cpu_seconds"] for share in SHARES[1:]},
        "seconds_ratio": {str(share): least[share]["seconds"] / least[0.0]["seconds"] for share in SHARES[1:]},
        "verified": {str(share): last[share]["verified"] for share in SHARES[1:]},
        "skipped": {str(share): last[share]["verify_skipped"] for share in SHARES[1:]},
        "model": str(setup.folder),
        "dtype": setup.options.dtype,
    }


def run(setup: BenchSetup, share: float) -> tuple[Row, dict[tuple[int | None, int], Sample]]:
    """Run all groups on a new fleet. Raises BenchFailed for a lie."""
    engine = msgspec.structs.replace(setup.config(), threads=setup.threads or 1)
    trusted = (TRUSTED,) if share else ()
    fleet = FleetConfig(replicas=options_of(setup).replicas, verify=share, trust=trusted, verify_wait_s=WAIT_S)
    sampling = Sampling(n=N, max_tokens=setup.scaled(NEW_TOKENS, 16), ignore_eos=True)
    with connected(Config(engine=engine, fleet=fleet)) as (router, client):
        status = wait_for(client, all_serve)
        pids = [router.pid, *(one["pid"] for one in status["replicas"])]
        cpu, started = cpu_seconds(pids), time.perf_counter()
        prompts = RandomText(client.info.vocab_size).slices(0, PROMPTS, PROMPT_TOKENS)
        handles = [client.submit(prompt, msgspec.structs.replace(sampling, seed=i)) for i, prompt in enumerate(prompts)]
        samples = {(handle.group.sampling.seed, one.index): one for handle in handles for one in handle.result(WAIT_S)}
        row: Row = {"share": share, "seconds": time.perf_counter() - started, "cpu_seconds": cpu_seconds(pids) - cpu}
        return row | counted(client.status(timeout=WAIT_S)["fleet"]), samples


def counted(fleet: Mapping[str, Any]) -> Row:
    """Return what was verified. Raises BenchFailed for a lie: all replicas are honest."""
    if fleet["lies"]:
        raise BenchFailed(f"an honest replica is banned: {fleet['bans']}")
    return {name: fleet[name] for name in ("verified", "unverifiable", "verify_skipped")}


def cpu_seconds(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(each.user + each.system for each in times))
