"""Builds the C files as one shared library per instruction set and loads them with ctypes. Imports no torch.

A wheel contains the compiled libraries in `lib/`. Their names hash the sources and flags, so a library of other sources is
never used. If there is none (a source tree, an editable installation, another architecture), the system's compiler builds one
at first use and stores it in `$ROLLOUT_CACHE/native` (default `~/.cache/rollout/native`); this name also hashes the compiler
and the machine. The files include no torch headers, so a build takes a few seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollout.engine.cpu.isa import ISAS, isa_of, lacking
from rollout.engine.paths import cache_dir

SOURCES = Path(__file__).with_name("c")
SHIPPED = Path(__file__).with_name("lib")
"""in a wheel"""
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-strict-aliasing", "-ffp-contract=off", "-Wno-psabi", "-fPIC", "-shared"]
COMPILE_TIMEOUT_S = 300


class NativeUnavailable(RuntimeError):
    """Native code is not available on this machine; the message says why. Plain torch does the same work."""


class LayoutMismatch(RuntimeError):
    """A struct has another layout in a library than in Python."""


def build(isa: str, folder: Path = SOURCES) -> Path:
    """Return the library of the C files of `folder` for `isa`: the one in the wheel, or a cached one, or a new build.

    Raises ValueError for an unknown isa, NativeUnavailable with the compiler's output if it cannot be built."""
    missing = lacking(isa)
    if missing:
        raise NativeUnavailable(f"this CPU has no {', '.join(missing)}, which {isa} needs")
    shipped = SHIPPED / library_name(isa, folder)
    if shipped.exists():
        return shipped
    compiler = find_compiler()
    target = _cached(isa, compiler, folder)
    if target.exists():
        return target
    cache = target.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NativeUnavailable(f"cannot write to {cache} ({error}): set ROLLOUT_CACHE to a writable folder") from error
    compile_library(isa, compiler, target, folder)
    return target


def is_built(isa: str) -> bool:
    """Return whether `build` would compile nothing: a library is in the wheel or cached, or there is no compiler. Raises
    ValueError for an unknown isa."""
    try:
        return (SHIPPED / library_name(isa)).exists() or _cached(isa, find_compiler()).exists()
    except NativeUnavailable:
        return True


def _cached(isa: str, compiler: str, folder: Path = SOURCES) -> Path:
    """Return where a library that this compiler makes is stored."""
    about = os.path.realpath(compiler), str(os.stat(compiler).st_mtime_ns), platform.machine()
    return cache_dir() / "native" / library_name(isa, folder, *about)


def find_compiler() -> str:
    """Return the path of the first of $CC, cc, gcc and clang that exists. Raises NativeUnavailable."""
    named = filter(None, [os.environ.get("CC"), "cc", "gcc", "clang"])
    compiler = next(filter(None, map(shutil.which, named)), None)
    if compiler is None:
        raise NativeUnavailable("no C compiler found: install a wheel of rollout, or gcc or clang, or set CC")
    return compiler


def installed_kernels() -> list[str]:
    """Return the instruction sets whose libraries were installed with these sources, best first; empty in a checkout."""
    return [isa for isa in ISAS if (SHIPPED / library_name(isa)).exists()]


def library_name(isa: str, folder: Path = SOURCES, *more: str) -> str:
    """Return the file name of a library, which hashes the sources, the flags and `more`."""
    sources = b"\0".join(source.name.encode() + b"\0" + source.read_bytes() for source in _sources(folder))
    key = hashlib.sha256(sources + "\0".join([*FLAGS, *isa_of(isa).flags, *more]).encode()).hexdigest()[:16]
    return f"kernels-{isa}-{key}.so"


def compile_library(
    isa: str,
    compiler: str,
    target: Path,
    folder: Path = SOURCES,
    more: Sequence[str] = (),
    timeout_s: float = COMPILE_TIMEOUT_S,
) -> None:
    """Compile the C files of `folder` to `target` atomically. Raises NativeUnavailable, also after `timeout_s` seconds.

    Args:
        more: flags that leave the results as they are, such as `-s`, which omits the symbols that profilers show.
    """
    sources = [str(source) for source in _sources(folder) if source.suffix == ".c"]
    command = [compiler, *FLAGS, *isa_of(isa).flags, *more, *sources]
    try:
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise NativeUnavailable(f"cannot write to {target.parent} ({error}): set ROLLOUT_CACHE to a writable folder") from error
    try:
        done = subprocess.run([*command, "-o", temporary, "-lm"], capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise NativeUnavailable(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{' '.join(command)} failed: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def load(path: Path) -> ctypes.CDLL:
    """Load a library. Raises NativeUnavailable."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {path}: {error}; delete it, and it is built again") from error


class _Field(ctypes.Structure):
    """`Field` of c/layout.h."""

    _fields_ = [("type", ctypes.c_char_p), ("field", ctypes.c_char_p), ("size", ctypes.c_int64), ("offset", ctypes.c_int64)]


def check_layout(library: ctypes.CDLL, table: str, **mirrors: type[ctypes.Structure]) -> None:
    """Compare each struct in the library's `table` (c/layout.h) with its Python counterpart, given by its C name.

    Raises LayoutMismatch naming the first field that differs, or the struct that only one side has."""
    rows = ctypes.cast(getattr(library, table), ctypes.POINTER(_Field))
    theirs: dict[str, dict[str, int]] = {}
    at = 0
    while (row := rows[at]).type is not None:
        theirs.setdefault(row.type.decode(), {"size": row.size})["." + row.field.decode()] = row.offset
        at += 1
    ours = {
        name: {"size": ctypes.sizeof(mirror), **{"." + field[0]: getattr(mirror, field[0]).offset for field in mirror._fields_}}
        for name, mirror in mirrors.items()
    }
    for name in sorted(ours.keys() | theirs.keys()):
        differing = sorted(ours.get(name, {}).items() ^ theirs.get(name, {}).items())
        if differing:
            raise LayoutMismatch(
                f"{library._name}: {name} ({differing[0][0]}) differs between C and Python, so their versions differ: "
                "install rollout again"
            )


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.[ch]"))
