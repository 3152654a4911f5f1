"""`rollout bench`: named workloads through the whole service, or with --in-process through the engine alone.

workloads.py   the table of workloads, and the KV each needs
inputs.py      prompts, lengths and models
target.py      what is driven: the service as a process of its own, or an engine in this one
runner.py      warm up, run, measure, check; one dict a run and one summary
report.py      the table, rows as lines of text, and the JSON lines
special.py     benchmarks that are no workload, by name
"""

from rollout.bench.command import run
from rollout.bench.errors import BenchFailed

__all__ = ["BenchFailed", "run"]
