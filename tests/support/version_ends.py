"""Runs the tests that touch torch, Triton and transformers with the oldest and the newest versions that are supported.

    python -m tests.support.version_ends              both ends; makes .venv-oldest, which takes some GB and a network
    python -m tests.support.version_ends oldest -x    one of them, with arguments of pytest
    OLDEST=python3.12 python -m tests.support.version_ends oldest      an interpreter whose environment has these versions

The newest end is the environment that runs this. Each end must have exactly its versions, else nothing is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rollout.engine.cuda.compiled import SUPPORTED as TRITON
from rollout.engine.forward.versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
OLDEST = ROOT / ".venv-oldest"
RANGES = {**SUPPORTED, "triton": TRITON}
TESTS = tuple(
    f"tests/engine/test_{name}.py"
    for name in (
        "versions", "models", "norms", "exact", "fused", "graphs", "triton_attention", "sampler_triton", "experts_triton",
        "recurrence_triton", "device_digests", "device_staging", "streaming", "fp8", "folder",
    )
)  # fmt: skip
"""what calls functions of these packages that have changed before"""
FOUND = "from importlib.metadata import version; print(*('.'.join(version(n).split('.')[:2]) for n in {names!r}))"


def versions_of(python: str) -> dict[str, str]:
    """Return the minor version of each package in the environment of an interpreter."""
    names = list(RANGES)
    told = subprocess.check_output([python, "-c", FOUND.format(names=names)], text=True, timeout=120)
    return dict(zip(names, told.split(), strict=True))


def wanted(end: int) -> dict[str, str]:
    """Return the versions of an end: 0 = the oldest, 1 = the newest."""
    return {name: ".".join(map(str, ends[end])) for name, ends in RANGES.items()}


def oldest() -> str:
    """Return the interpreter of the oldest end; make its environment if there is none."""
    if given := os.environ.get("OLDEST"):
        return given
    python = OLDEST / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(OLDEST)], check=True, timeout=300)
        pinned = [f"{name}=={version}.*" for name, version in wanted(0).items()]
        pinned.append("numpy<2.4")  # of which Triton 3.6's interpreter takes no scalars
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *pinned, f"{ROOT}[dev]"], check=True, timeout=3600)
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "rl-rollout"], check=True, timeout=300)
    return str(python)


def run(end: str, arguments: list[str]) -> int:
    """Run the tests at one end. Returns pytest's status; 2 if the environment has other versions."""
    python = oldest() if end == "oldest" else sys.executable
    found, right = versions_of(python), wanted(end == "newest")
    if found != right:
        print(f"{end}: {found} in the environment of {python}, {right} is this end", file=sys.stderr)
        return 2
    print(f"{end}: {found}", flush=True)
    command = [python, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", *(arguments or TESTS)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode


def main(arguments: list[str]) -> int:
    ends = [arguments.pop(0)] if arguments[:1] in (["oldest"], ["newest"]) else ["oldest", "newest"]
    return max(run(end, arguments) for end in ends)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
