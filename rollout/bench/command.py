"""The command `rollout bench`: checks its options, then runs benchmarks and workloads one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from rollout.bench import fidelity, host, http, refresh
from rollout.bench.against import parse
from rollout.bench.checkouts import compare
from rollout.bench.floor import MachineRates
from rollout.bench.harness import Benchmark, BenchOptions, BenchSetup, Row
from rollout.bench.inputs import long_enough
from rollout.bench.report import Report, open_json, origin_of
from rollout.bench.runner import measure
from rollout.bench.workloads import WORKLOADS, find
from rollout.config import InputError

BENCHMARKS = {
    "fidelity": Benchmark(fidelity.measure, any_kv=True),
    "host": Benchmark(host.measure),
    "http": Benchmark(http.measure, in_process=False),
    "refresh": Benchmark(refresh.measure, in_process=False),
}
"""what is not a workload"""
Rule = tuple[object, str]
"""whether it is broken, and what is wrong then"""

COLUMNS = {
    "workload": "{workload}",
    "tokens/s": "{tokens_per_second:.0f}",
    "range": "{tokens_per_second_min:.0f}-{tokens_per_second_max:.0f}",
    "seconds": "{seconds:.2f}",
    "prefilled": "{prefill_tokens:.0f}",
    "recomputed": "{recomputed_tokens:.0f}",
    "off/restored": "{offloaded_blocks:.0f}/{restored_blocks:.0f}",
    "resets": "{recompute_preemptions:.0f}",
    "RSS MiB": "{peak_rss_mib:.0f}",
}
"""of the table of workloads: medians of the runs; the range is that of the slowest and the fastest run"""


def run(options: BenchOptions) -> int:
    """Run what is named and print the figures. Returns the exit status. Raises InputError for options that do not fit,
    BenchFailed for a run that did not do its work."""
    peers, checkout = parse(options.against)
    check(options, peers, checkout)
    with ExitStack() as stack:
        report = Report(open_json(stack, options.json_file), origin_of(options.command))
        if checkout is not None:
            compare(options, checkout, report)
            return 0
        setup = BenchSetup(options)
        for name in (name for name in options.names if name in BENCHMARKS):
            report.rows(name, BENCHMARKS[name].measure(setup))
        summaries = [run_workload(name, setup, peers, report) for name in options.names if name in WORKLOADS]
        if summaries:
            print_summaries(report, summaries)
    return 0


def check(options: BenchOptions, peers: Iterable[str], checkout: Path | None) -> None:
    """Raise InputError for options that do not fit together, before anything is measured."""
    flags = [f"--against {name}" for name in peers] + ["--floor"] * options.floor
    special = [name for name in options.names if name in BENCHMARKS]
    alone = special + flags + [f"--{name}" for name in ("unshared", "undrafted") if getattr(options, name)]
    on_cpu = [flag for flag in flags if flag != "--against transformers_cb"]
    refuse(
        [
            *rules(options, [*WORKLOADS, *BENCHMARKS], BENCHMARKS, on_cpu, flags),
            *((options.tp > 1, f"{name} runs on one rank: leave --tp {options.tp} out") for name in special + flags),
            *((checkout is not None, f"--against CHECKOUT compares workloads: leave {name} out") for name in alone),
        ]
    )


def rules(
    options: BenchOptions,
    known: Sequence[str],
    benchmarks: Mapping[str, Benchmark],
    on_cpu: Sequence[str] = (),
    plain_kv: Sequence[str] = (),
) -> Iterator[Rule]:
    """Yield what options have to keep to.

    Args:
        known: all names.
        benchmarks: what those support that are no workloads.
        on_cpu, plain_kv: flags that were given and that measure the CPU alone, or need KV in the model's dtype."""
    special = [(name, benchmarks[name]) for name in options.names if name in benchmarks]
    cuda, other_kv = options.device != "cpu", options.kv_dtype != "auto"
    yield not options.scale > 0, f"--scale {options.scale}: must be positive"
    yield options.repeat < 1, f"--repeat {options.repeat}: must be at least 1"
    yield not options.names, f"name a workload: {', '.join(known)}"
    for name in options.names:
        yield name not in known, f"no workload {name!r}; there are: {', '.join(known)}"
    for name, each in special:
        yield options.in_process and not each.in_process, f"{name} runs in several processes: leave --in-process out"
    yield (
        cuda and not torch.cuda.is_available(),
        f"--device {options.device}: torch {torch.__version__} finds no CUDA device here; --device cpu works",
    )
    for name in [*(name for name, each in special if not each.on_device), *on_cpu]:
        yield cuda, f"{name} measures the CPU: leave --device {options.device} out"
    for name in [*(name for name, each in special if not each.any_kv), *plain_kv]:
        yield other_kv, f"{name} needs KV in the model's dtype: leave --engine.kv-dtype {options.kv_dtype} out"


def refuse(broken: Iterable[Rule]) -> None:
    """Raise InputError for the first rule that is broken."""
    for is_broken, message in broken:
        if is_broken:
            raise InputError(message)


def run_workload(name: str, setup: BenchSetup, peers: dict[str, str], report: Report) -> Row:
    """Run a workload, on its own and beside the peers and variants that the options name. Returns the summary."""
    options, summary = setup.options, Row()
    workload = find(name).scaled(options.scale, setup.config().block_tokens, options.temperature)
    report.line(
        f"{workload.name}: {workload.prompts} × {workload.prompt_tokens} prompt tokens, n = {workload.n}, "
        f"{workload.new_tokens} new"
    )
    with long_enough(setup.folder, workload.tokens) as (served, weights):
        engine = msgspec.structs.replace(setup.config(), model=str(served))
        bounded = options.device == "cpu" and (peers or options.floor)
        rows = measure(
            workload, setup.text, engine, setup.open_target, options.repeat,
            compare=options.compare and not peers, unshared=options.unshared, undrafted=options.undrafted, against=peers,
            floor=MachineRates(served, engine).bounded if bounded else None,
        )  # fmt: skip
        for row in rows:
            if "summary" in row:
                summary = row = row | {"model": str(setup.folder), "weights": weights}
            else:
                variant = "".join(f", {each}" for each in [row["workload"].partition("/")[2]] if each)
                speed = f"{row['seconds']:.2f} s, {row['tokens_per_second']:.0f} tokens/s"
                report.line(f"  run {row['run']}{variant}: {row['generated_tokens']} tokens in {speed}")
            report.write(row)
    return summary


def print_summaries(report: Report, summaries: list[Row]) -> None:
    """Print the table of workloads, and below it the ratios to variants, peers and the floor."""
    report.table(COLUMNS, [row | {"peak_rss_mib": row["peak_rss_bytes"] / 2**20} for row in summaries])
    for row in summaries:
        for other in sorted(name.removeprefix("ratio_to_") for name in row if name.startswith("ratio_to_")):
            ratio, speed = row[f"ratio_to_{other}"], row[f"{other}_tokens_per_second"]
            report.line(f"{row['workload']}: {ratio:.2f} x {other} ({speed:.0f} tokens/s)")
        for rank in row["ranks"]:
            sizes = ", ".join(
                f"{rank[name] / 2**20:.0f} MiB {what}"
                for name, what in (("weights_bytes", "of weights"), ("rss_bytes", "resident"))
            )
            report.line(f"{row['workload']}: rank {rank['rank']}: {sizes}")
        for peer, ratio in row.get("ratios", {}).items():
            report.line(f"{row['workload']}: {ratio:.2f} x {peer} {row['peers'][peer]}")
        if "floor_fraction" in row:
            of = f"of the floor, {row['floor_tokens_per_second']:.0f} tokens/s by {row['floor_bound']}"
            report.line(f"{row['workload']}: {row['floor_fraction']:.2f} {of}")
