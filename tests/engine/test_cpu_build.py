"""Compiling C on the user's machine: once, into a cache, and with a clear word when it cannot be done."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.engine.cpu import build, isa
from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.cpu.isa import best
from rollout.engine.cpu.openmp import symbols

PROGRAM = "int answer(void) { return 42; }"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "c" / "small.c"
    path.parent.mkdir()
    path.write_text(PROGRAM)
    return path


def libraries(source: Path) -> list[str]:
    return sorted(path.name for path in (source.parents[1] / "cache" / "native").iterdir())


def compiler(folder: Path, script: str) -> str:
    path = folder / "fakecc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_built_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "calls"
    monkeypatch.setenv("CC", compiler(tmp_path, f'echo x >> {counter}\nexec cc "$@"'))
    first = build.build("plain", source.parent)
    assert build.load(first).answer() == 42
    assert build.build("plain", source.parent) == first and counter.read_text() == "x\n"
    assert libraries(source) == [first.name], "no temporary file stays"


def test_another_source_compiler_or_isa_is_another_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {build.build(isa, source.parent).name for isa in ("plain", best())}
    kinds = len(names)
    source.write_text(PROGRAM.replace("42", "43"))
    names.add(build.build("plain", source.parent).name)
    monkeypatch.setenv("CC", compiler(tmp_path, 'exec cc "$@"'))
    names.add(build.build("plain", source.parent).name)
    assert names == set(libraries(source)) and len(names) == kinds + 2


def test_a_compiler_that_fails_is_quoted(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, "echo no space on the device >&2; exit 3"))
    with pytest.raises(NativeUnavailable, match="no space on the device"):
        build.build("plain", source.parent)
    assert libraries(source) == []


def test_no_compiler_and_no_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        without.delenv("CC", raising=False)
        with pytest.raises(NativeUnavailable, match="no C compiler"):
            build.build("plain", source.parent)
    monkeypatch.setenv("ROLLOUT_CACHE", str(source))
    with pytest.raises(NativeUnavailable, match="cannot write"):
        build.build("plain", source.parent)


def test_what_is_no_library_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"\x7fELF")
    with pytest.raises(NativeUnavailable, match="cannot load .*delete it"):
        build.load(tmp_path / "broken.so")


def test_the_instruction_set(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="isa='neon': must be one of amx, avx512_bf16, avx512, avx2, plain, amx_portable"):
        build.build("neon", source.parent)
    monkeypatch.setattr(isa, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    assert isa.best() == "avx2" and isa.here() == ["avx2", "plain"]
    with pytest.raises(NativeUnavailable, match="this CPU has no .*avx512f"):
        build.build("avx512", source.parent)
    monkeypatch.setattr(isa, "cpu_flags", frozenset)
    assert isa.best() == "plain"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("cores", [1, 2])
def test_an_engine_has_the_cores_of_its_process(cores: int) -> None:
    """As many threads as `taskset` leaves, without an option: torch's and so ours."""
    program = (
        f"import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cores}]); import torch; "
        "from rollout.engine.cpu.kernels import Kernels; print(torch.get_num_threads(), Kernels('plain').team().threads)"
    )
    free = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    made = subprocess.run([sys.executable, "-c", program], env=free, capture_output=True, text=True, timeout=120, check=True)
    assert made.stdout.split() == [str(cores)] * 2


def test_symbols_are_those_torch_runs_on() -> None:
    """The number of threads that torch set is the one that its OpenMP, and so our kernels, know of."""
    import torch

    (address,) = symbols("omp_get_max_threads")
    assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == torch.get_num_threads()
    assert symbols("GOMP_parallel", "no_such_function") == (None, None)
