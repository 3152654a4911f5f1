"""`rollout bench`: measures workloads through the whole service, or with --in-process through the engine alone.

harness.py     options, engine configuration and errors that all benchmarks share
command.py     the command: names, checks, order of runs
report.py      JSON lines, lines of text, tables
workloads.py   the named workloads, and the KV that each needs
runner.py      runs a workload: warm-up, runs, checks, summary
against.py     other engines as processes; checkouts.py: another checkout of this project
inputs.py      prompts, lengths and models;  target.py: the service or engine that is measured

Developers' benchmarks are in `tests/bench`.
"""

from rollout.bench.command import run
from rollout.bench.harness import BenchFailed, BenchOptions

__all__ = ["BenchFailed", "BenchOptions", "run"]
