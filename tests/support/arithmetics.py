"""Machines whose arithmetic a CPU can imitate: what `make test-arithmetic` runs what depends on arithmetic under.

    python -m tests.support.arithmetics               a table of them
    python -m tests.support.arithmetics zen3 [ARGS]   pytest as on one of them: what depends on arithmetic, or what ARGS name
    python -m tests.support.arithmetics all [ARGS]    as on each, as many at a time as there are cores; 1 if one is red

Six libraries choose their kernels by the CPU: torch itself (ATEN_CPU_CAPABILITY), oneDNN below it (bf16 products), MKL below it
(fp32 products, exp: MKL_ENABLE_INSTRUCTIONS), numpy (NPY_DISABLE_CPU_FEATURES), OpenBLAS below it (numpy's products:
OPENBLAS_CORETYPE), libm (GLIBC_TUNABLES); and so do we (`engine/cpu/isa.py`; TESTS_ISA hides what is above it).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rollout.engine.cpu import isa

ROOT = Path(__file__).parents[2]
WITH_TORCH = re.compile(r"^(?:import|from) torch\b", re.MULTILINE)
APART = {
    "tests/engine/test_batch.py": "arrays of integers",
    "tests/engine/test_cpu_build.py": "compilers",
    "tests/engine/test_device_digests.py": "sums of integers",
    "tests/engine/test_device_staging.py": "bytes, as they were sent",
    "tests/engine/test_memory.py": "memory",
    "tests/engine/test_overlap.py": "steps in flight, whatever they compute",
    "tests/engine/test_regions.py": "memory",
    "tests/engine/test_streaming.py": "copies of weights, whatever is computed with them",
    "tests/engine/test_weights.py": "bytes, as they were sent",
}
"""of the engine, with torch and without arithmetic"""
MORE = (
    "tests/engine/test_equivalence.py",
    "tests/rollout/test_exact.py",
    "tests/rollout/test_exact_on_device.py",
    "tests/rollout/test_exact_fused.py",
    "tests/rollout/test_trainer_attention.py",
    "tests/recipes/test_exact.py",
    "tests/test_arithmetics.py",
)
NO_AVX512 = "X86_V4 AVX512_ICL AVX512_SPR"


WITHOUT_VECTORS = {
    "tests/engine/test_smollm2.py": "minutes in plain C",
    "tests/rollout/test_exact.py": "log-probs have torch's bits where torch has vectors: docs/decisions/arithmetic.md",
    "tests/rollout/test_trainer_attention.py": "as test_exact.py",
    "tests/recipes/test_exact.py": "as test_exact.py",
}
"""what a machine without AVX2 leaves out"""


class Machine(NamedTuple):
    shows: str
    environment: dict[str, str]
    needs: str = "plain"
    """a name of `rollout.engine.cpu.isa.ISAS`: libraries that are told to use instructions which are not there crash"""


def _machine(shows: str, ours: str, blas: str, mkl: str, aten: str, onednn: str, needs: str = "plain", **more: str) -> Machine:
    environment = {
        "TESTS_ISA": ours,
        "OPENBLAS_CORETYPE": blas,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
    }
    return Machine(shows, {name: value for name, value in (environment | more).items() if value}, needs)


MACHINES = {
    "zen3": _machine(
        "AVX2 throughout: MKL's and OpenBLAS's sums depend on the number of rows and on a row's place",
        *("avx2", "Haswell", "AVX2", "avx2", "AVX2", "avx2"),
        NPY_DISABLE_CPU_FEATURES=NO_AVX512,
    ),
    "nehalem": _machine(
        "our plain C, torch and numpy without vectors of AVX2, libm's exp without FMA",
        *("plain", "Nehalem", "SSE4_2", "default", "SSE41"),
        NPY_DISABLE_CPU_FEATURES=f"X86_V3 {NO_AVX512}",
        GLIBC_TUNABLES="glibc.cpu.hwcaps=-AVX2",  # and -FMA would make each fmaf of our plain C a function of integers
    ),
    "skylake": _machine(
        "AVX-512 without bf16: oneDNN widens what it multiplies",
        *("avx512", "SkylakeX", "AVX512", "avx512", "AVX512_CORE", "avx512"),
    ),
    "zen4": _machine(
        "AVX-512 with bf16, without AMX; MKL's path for CPUs that are not Intel's",
        *("avx512_bf16", "SkylakeX", "", "avx512", "AVX512_CORE_BF16", "avx512_bf16"),
        MKL_CBWR="COMPATIBLE",
    ),
    "mixed": _machine(
        "torch and oneDNN held to AVX2 by their variables; ours, MKL and numpy take all that the CPU has",
        *("amx", "", "", "avx2", "AVX2", "avx2"),
    ),
}


def chosen_tests(machine: Machine) -> list[str]:
    """What depends on its arithmetic: the engine's tests with torch in them but those in APART, and MORE; kernels in Triton's
    interpreter, which numpy computes, where numpy is another. Paths from ROOT."""
    files = sorted((ROOT / "tests/engine").glob("test_*.py"))
    with_torch = [str(file.relative_to(ROOT)) for file in files if WITH_TORCH.search(file.read_text())]
    paths = [path for path in with_torch if path not in APART] + [*MORE]
    numpy_too = "NPY_DISABLE_CPU_FEATURES" in machine.environment
    left_out = WITHOUT_VECTORS if machine.environment["ATEN_CPU_CAPABILITY"] == "default" else {}
    paths = [path for path in paths if path not in left_out]
    return [path for path in paths if numpy_too or 'importorskip("triton"' not in (ROOT / path).read_text()]


def missing(machine: Machine) -> list[str]:
    """CPU flags without which this CPU cannot imitate it."""
    return isa.lacking(machine.needs)


def run(name: str, args: list[str]) -> tuple[int, str]:
    """Run pytest as on the machine `name`; returns its exit status and what it printed. What this CPU cannot imitate is said
    and left out."""
    machine = MACHINES[name]
    if lacking := missing(machine):
        return 0, f"== {name}: left out, this CPU has no {', '.join(lacking)}"
    started = time.monotonic()
    paths = [] if any(Path(ROOT, arg.partition("::")[0]).exists() for arg in args) else chosen_tests(machine)
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *paths, *args]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **machine.environment}, stdout=subprocess.PIPE, text=True)
    color = "green" if not done.returncode else "RED"
    took = time.monotonic() - started
    return done.returncode, f"== {name}: {machine.shows}\n{done.stdout}== {name}: {color} after {took:.0f} s"


def main(words: list[str]) -> int:
    if not words or words[0] not in ("all", *MACHINES):
        for name, machine in MACHINES.items():
            print(f"{name:8} {machine.shows}\n{'':8} {' '.join(f'{k}={v!r}' for k, v in machine.environment.items())}")
        return int(bool(words))
    names, red = [*MACHINES] if words[0] == "all" else words[:1], []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as at_once:  # one thread of each computes
        for name, (status, said) in zip(names, at_once.map(run, names, [words[1:]] * len(names)), strict=True):
            print(said, flush=True)
            red += [name] if status else []
    print(f"== red: {', '.join(red) or 'none'} of {', '.join(names)}")
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
