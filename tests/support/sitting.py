"""The first hour with a GPU: the commands in order, each at most ten minutes and 2,000 characters, and their figures.

    python3 -m tests.support.sitting                   prints the commands (`make sitting`)
    python3 -m tests.support.sitting --json            the same, a JSON object per command
    python3 -m tests.support.sitting --collect FOLDER  prints a JSON line for each log and each figure that came back in FOLDER

A command runs in the root of a checkout with build/wheels (`make wheels`) on a machine without a network, and leaves logs and
figures in the folder $OUT. It needs a Python with torch, Triton, transformers and pytest; nothing here needs make, and this
module only the standard library."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOST_SECONDS, MOST_CHARACTERS = 600, 2000
"""of a command"""
START_S = 45
"""for the installation and for what a process loads"""
READY = (
    "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "
    "build/wheels/*.whl || exit 1; export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1; set -o pipefail; "
    "OUT=${OUT:-build/sitting}; mkdir -p $OUT"
)
"""first line of every command"""
PYTEST = "python3 -m pytest -q -W default -p no:cacheprovider"
BENCH = "python3 -m tests.bench.gpu"
ORACLE = "tests/gpu/test_attention_oracle.py"
TOGETHER = tuple(
    f"tests/gpu/test_{name}.py"
    for name in ("same_samples", "graphs_on_a_device", "draws_on_a_device", "states_and_experts", "products_on_a_device")
)
"""tests for a GPU that may run beside each other"""
ALONE = tuple(
    f"tests/gpu/test_{name}.py" for name in ("weights_ways", "sleep_on_a_device", "copies_on_a_device", "overlap_on_a_device")
)
"""those that measure time or the device's free memory"""
STREAMED = "tests/engine/test_streaming.py"
"""layers that are copied ahead"""
PARALLEL = "-n 14 --dist worksteal -m ''"
"""all cases, the nightly ones too, in processes that mostly compile"""
SEVERAL = "tests/gpu/test_ranks_on_a_device.py"
"""on a machine with two devices or more"""
COMPILED = (
    "tests/engine/test_{triton_attention,sampler_triton,graphs,norms,fused,exact,device_sums,proven_products,"
    "recurrence_triton,experts_triton,device_digests}.py tests/rollout/test_exact_{on_device,fused}.py"
)
"""tests that run in the interpreter elsewhere"""
RACES = f"'{ORACLE}::test_sixteen_rows_over_a_prefix[8-8x4x128-bfloat16]'"


class Step(NamedTuple):
    """A line of a command."""

    name: str
    """of its log"""
    seconds: int
    """time-out"""
    command: str


class Command(NamedTuple):
    """What is sent to the machine in one piece."""

    name: str
    says: str
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> int:
        return START_S + sum(step.seconds for step in self.steps)

    @property
    def text(self) -> str:
        lines = [f"timeout {step.seconds} {step.command} 2>&1 | tee $OUT/{step.name}.log" for step in self.steps]
        return "\n".join([READY, *lines])


def bench(name: str, seconds: int, model: str, parts: str, options: str = '--against ""') -> Step:
    """Return a step of the benchmark, whose figures are in NAME.jsonl. A part that begins in its last minute is left out."""
    minutes = f"--minutes {(seconds - 60) / 60:.1f}"
    return Step(name, seconds, f"{BENCH} --model {model} --parts {parts} {minutes} {options} --json $OUT/{name}.jsonl")


COMMANDS = (
    Command("A1", "right? without nightly cases an H200 with 16 cores took 60, 50 and 30 s", (
        Step("machine", 20, "nvidia-smi -q -d CLOCK,MEMORY"),
        Step("together", 300, f"{PYTEST} {PARALLEL} {ORACLE} {' '.join(TOGETHER)} {STREAMED} {COMPILED}"),
        Step("alone", 120, f"{PYTEST} -m gpu {' '.join(ALONE)}"),
        bench("small", 90, "qwen3-0.6b", "machine,decode"),
    )),
    Command("A2", "launches, products, counters, races; then give the machine back and read", (
        bench("attention", 170, "qwen3-8b", "machine,attention"),
        bench("products", 70, "qwen3-8b", "products"),
        Step("products-without-splits", 70, "env CUBLAS_WORKSPACE_CONFIG=:16:8 CUBLASLT_WORKSPACE_SIZE=1 "
             f"{BENCH} --model qwen3-8b --parts products --json $OUT/products-without-splits.jsonl"),
        Step("counters", 70, "env REPEATS=1 ncu --clock-control none -k regex:attend -c 4 --section SpeedOfLight "
             f"--section WarpStateStats {PYTEST} -m gpu {RACES}"),
        Step("races", 110, f"env REPEATS=2 compute-sanitizer --tool racecheck --error-exitcode 1 {PYTEST} -m gpu {RACES}"),
    )),
    Command("B1", "fast? with what A has shown set as defaults", (
        bench("decode", 550, "qwen3-8b", "machine,decode,profile,prefill,exact,sharing"),
    )),
    Command("B2", "weights, sleep, offload", (bench("memory", 550, "qwen3-8b", "ipc,refresh,naps,offload,weights"),)),
    Command("B3", "beside another engine; KV in fp8", (
        bench("workloads", 330, "qwen3-0.6b", "workloads", ""),
        bench("fp8", 210, "qwen3-8b", "machine,attention,decode", '--against "" --kv-dtype fp8_e4m3'),
    )),
    Command("C1", "on two devices or more: ranks", (
        Step("devices", 20, "nvidia-smi topo -m"),
        Step("ranks", 530, f"{PYTEST} -x -m gpu {SEVERAL}"),
    )),
)  # fmt: skip
"""in order: two sittings, A and B, on one device, and C on several. Each command starts as soon as the one before has ended:
nobody thinks while a machine is held"""


def collected(folder: Path) -> Iterator[dict[str, object]]:
    """Yield what came back: of each log its last line that says something, with pytest's counts; and each row of figures."""
    for log in sorted(folder.rglob("*.log")):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        counts = re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1]) if lines else []
        failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        yield {"log": log.stem, "last": lines[-1] if lines else "", **{what: int(n) for n, what in counts}, "red": failed}
    for figures in sorted(folder.rglob("*.jsonl")):
        for line in figures.read_text().splitlines():
            try:
                yield {"figures": figures.stem, **json.loads(line)}
            except ValueError:
                yield {"figures": figures.stem, "cut_off": line}


def main(argv: list[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(prog="python3 -m tests.support.sitting", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    arguments.add_argument("--json", action="store_true", help="print the commands as JSON lines")
    arguments.add_argument("--collect", type=Path, metavar="FOLDER", help="print what came back as JSON lines")
    asked = arguments.parse_args(argv)
    if asked.collect is not None:
        for row in collected(asked.collect):
            print(json.dumps(row))
        return
    for each in COMMANDS:
        if asked.json:
            print(json.dumps({"name": each.name, "says": each.says, "timeout_s": each.seconds, "command": each.text}))
        else:
            print(f"# {each.name}: {each.says}; at most {each.seconds} s\n{each.text}\n")


if __name__ == "__main__":
    sys.exit(main())
