"""C files of the engine: compiled with the system's compiler on first use, kept, loaded through ctypes.

They include no headers of torch, so all of them take a few seconds. The library is kept in `$ROLLOUT_CACHE/native` (default
`~/.cache/rollout/native`) under a name that hashes source, flags, compiler and machine. Threads are those of the OpenMP that
torch itself runs on: a second one beside it would fight for the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from engine.paths import cache_dir

SOURCES = Path(__file__).with_name("c")
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC", "-shared"]
_AVX512 = ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
ISAS: dict[str, tuple[set[str], list[str]]] = {
    "avx512_bf16": ({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}, [*_AVX512, "-mavx512bf16"]),
    "avx512": ({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}, _AVX512),
    "avx2": ({"avx2", "fma"}, ["-mavx2", "-mfma"]),
    "plain": (set(), []),
}
"""instruction set: (CPU flags it needs, compiler flags), best first"""


class NativeUnavailable(RuntimeError):
    """There is no native code on this machine; the message says why. Plain torch does the same work."""


def best_isa() -> str:
    """The first of `ISAS` of which this CPU has every flag."""
    have = cpu_flags()
    return next(isa for isa, (need, _) in ISAS.items() if need <= have)


def cpu_flags() -> set[str]:
    """Flags of the first CPU in /proc/cpuinfo; empty where there is no such file or the machine is no x86-64."""
    info = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not info.exists():
        return set()
    line = next((line for line in info.read_text().splitlines() if line.startswith("flags")), ":")
    return set(line.split(":", 1)[1].split())


def build(isa: str, folder: Path = SOURCES) -> Path:
    """Compile the C files of `folder` into one library for `isa`, unless that was done before; its path.

    Raises ValueError for an unknown isa, NativeUnavailable with the compiler's words otherwise."""
    if isa not in ISAS:
        raise ValueError(f"isa={isa!r}: one of {', '.join(ISAS)}")
    need, flags = ISAS[isa]
    missing = need - cpu_flags()
    if missing:
        raise NativeUnavailable(f"this CPU has no {', '.join(sorted(missing))}, which {isa} needs")
    compiler = next(filter(None, map(shutil.which, filter(None, [os.environ.get("CC"), "cc", "gcc", "clang"]))), None)
    if compiler is None:
        raise NativeUnavailable("no C compiler: install gcc or clang, or set CC")
    sources = sorted(folder.glob("*.[ch]"))
    command = [compiler, *FLAGS, *flags, *(str(source) for source in sources if source.suffix == ".c")]
    about = "\0".join([*FLAGS, *flags, os.path.realpath(compiler), str(os.stat(compiler).st_mtime_ns), platform.machine()])
    key = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources) + about.encode()).hexdigest()[:16]
    cache = cache_dir() / "native"
    target = cache / f"kernels-{isa}-{key}.so"
    if target.exists():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=cache)
        os.close(handle)
    except OSError as error:
        raise NativeUnavailable(
            f"cannot write to {cache} ({error}): set ROLLOUT_CACHE to a folder that can be written"
        ) from error
    try:
        done = subprocess.run([*command, "-o", temporary, "-lm"], capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise NativeUnavailable(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
        os.replace(temporary, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{' '.join(command)} failed: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def load(path: Path) -> ctypes.CDLL:
    """Raises NativeUnavailable if the library cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {path}: {error}; delete it to have it built again") from error


def symbols(*names: str) -> tuple[int | None, ...]:
    """Addresses of functions that torch runs on: a preloaded library's (an OpenMP, say), else of libtorch_cpu and what it is
    linked with. libgomp, libomp and libiomp5 all offer GOMP's names. All None if one is missing."""
    libraries: list[str | None] = [None, *map(str, Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))]
    for library in libraries:
        try:
            handle = ctypes.CDLL(library)
            return tuple(ctypes.cast(getattr(handle, name), ctypes.c_void_p).value for name in names)
        except (OSError, AttributeError):
            continue
    return (None,) * len(names)
