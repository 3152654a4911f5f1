"""`rollout bench`: named workloads through the whole service, or with --in-process through the engine alone.

workloads.py   the table of workloads, and the KV each needs
text.py        prompts: slices of real text
target.py      what is driven: the service as a process of its own, or an engine in this one
runner.py      warm up, run, measure, check; one dict a run and one summary
report.py      the table and the JSON lines
special.py     what is measured in its own way: one row a way
"""

from rollout.bench.command import run
from rollout.bench.errors import BenchFailed

__all__ = ["BenchFailed", "run"]
