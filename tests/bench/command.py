"""The developers' benchmarks: their names, the checks of their options, and the run of one after the other."""

from __future__ import annotations

from contextlib import ExitStack

from rollout.bench.command import refuse, rules
from rollout.bench.harness import Benchmark, BenchSetup
from rollout.bench.report import Report, open_json, origin_of
from tests.bench import (
    batch_invariance,
    conversations,
    delta,
    experts,
    fleet,
    int8,
    keys,
    lora,
    neighbour,
    products,
    replay,
    score,
    sharing,
    train_step,
    trust,
    turns,
    vanish,
    verify,
)
from tests.bench.options import DeveloperOptions

BENCHMARKS = {
    "batch_invariance": Benchmark(batch_invariance.measure, any_kv=True, on_device=True),
    "conversations": Benchmark(conversations.measure, in_process=False),
    "delta": Benchmark(delta.measure, in_process=False),
    "experts": Benchmark(experts.measure),
    "fleet": Benchmark(fleet.measure, in_process=False),
    "int8": Benchmark(int8.measure),
    "keys": Benchmark(keys.measure),
    "lora": Benchmark(lora.measure, in_process=False),
    "neighbour": Benchmark(neighbour.measure),
    "products": Benchmark(products.measure),
    "replay": Benchmark(replay.measure, in_process=False),
    "score": Benchmark(score.measure),
    "sharing": Benchmark(sharing.measure_model, any_kv=True, on_device=True),
    "train_step": Benchmark(train_step.measure),
    "trust": Benchmark(trust.measure, in_process=False),
    "turns": Benchmark(turns.measure, in_process=False),
    "vanish": Benchmark(vanish.measure, in_process=False),
    "verify": Benchmark(verify.measure, in_process=False),
}


def run(options: DeveloperOptions) -> int:
    """Run what is named and print the figures. Returns the exit status. Raises InputError for options that do not fit,
    BenchFailed for a run that did not do its work."""
    refuse(
        [
            *rules(options, list(BENCHMARKS), BENCHMARKS),
            (
                options.trace and "turns" not in options.names,
                f"--trace {options.trace}: only `turns` replays a trace; name it",
            ),
        ]
    )
    with ExitStack() as stack:
        report = Report(open_json(stack, options.json_file), origin_of(options.command))
        setup = BenchSetup(options)
        for name in options.names:
            report.rows(name, BENCHMARKS[name].measure(setup))
    return 0
