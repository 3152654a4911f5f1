"""The C files of the engine as shared libraries, one for each instruction set, loaded through ctypes. No torch in here.

An installed wheel brings them compiled, in `lib/`; their names hash the sources and flags, so a library of other sources is
never taken. Where there is none (a source tree, an editable installation, another architecture) the system's compiler makes one
on first use and keeps it in `$ROLLOUT_CACHE/native` (default `~/.cache/rollout/native`), under a name that hashes the compiler
and the machine too. The files include no headers of torch, so each library takes some seconds.
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

from engine.cpu.isa import isa_of, lacking
from engine.paths import cache_dir

SOURCES = Path(__file__).with_name("c")
SHIPPED = Path(__file__).with_name("lib")
"""of a wheel"""
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-strict-aliasing", "-ffp-contract=off", "-Wno-psabi", "-fPIC", "-shared"]
COMPILE_TIMEOUT_S = 300


class NativeUnavailable(RuntimeError):
    """There is no native code on this machine; the message says why. Plain torch does the same work."""


class LayoutMismatch(RuntimeError):
    """A struct of a library is not laid out as Python's copy of it."""


def build(isa: str, folder: Path = SOURCES) -> Path:
    """The library of the C files of `folder` for `isa`: as shipped, else compiled unless that was done before.

    Raises ValueError for an unknown isa, NativeUnavailable with the compiler's words otherwise."""
    missing = lacking(isa)
    if missing:
        raise NativeUnavailable(f"this CPU has no {', '.join(missing)}, which {isa} needs")
    shipped = SHIPPED / library_name(isa, folder)
    if shipped.exists():
        return shipped
    compiler = find_compiler()
    cache = cache_dir() / "native"
    target = cache / library_name(
        isa, folder, os.path.realpath(compiler), str(os.stat(compiler).st_mtime_ns), platform.machine()
    )
    if target.exists():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NativeUnavailable(
            f"cannot write to {cache} ({error}): set ROLLOUT_CACHE to a folder that can be written"
        ) from error
    compile_library(isa, compiler, target, folder)
    return target


def find_compiler() -> str:
    """Path of $CC, cc, gcc or clang, whichever is there first. Raises NativeUnavailable if none is."""
    named = filter(None, [os.environ.get("CC"), "cc", "gcc", "clang"])
    compiler = next(filter(None, map(shutil.which, named)), None)
    if compiler is None:
        raise NativeUnavailable("no C compiler: install a wheel of rollout, or gcc or clang, or set CC")
    return compiler


def library_name(isa: str, folder: Path = SOURCES, *more: str) -> str:
    """File name of a library: hashes the sources, the flags and `more`."""
    sources = b"\0".join(source.name.encode() + b"\0" + source.read_bytes() for source in _sources(folder))
    key = hashlib.sha256(sources + "\0".join([*FLAGS, *isa_of(isa).flags, *more]).encode()).hexdigest()[:16]
    return f"kernels-{isa}-{key}.so"


def compile_library(isa: str, compiler: str, target: Path, folder: Path = SOURCES) -> None:
    """Compile the C files of `folder` to `target`, which appears whole or not at all. Raises NativeUnavailable."""
    sources = [str(source) for source in _sources(folder) if source.suffix == ".c"]
    command = [compiler, *FLAGS, *isa_of(isa).flags, *sources]
    try:
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise NativeUnavailable(
            f"cannot write to {target.parent} ({error}): set ROLLOUT_CACHE to a folder that can be written"
        ) from error
    try:
        done = subprocess.run([*command, "-o", temporary, "-lm"], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if done.returncode:
            raise NativeUnavailable(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{' '.join(command)} failed: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def load(path: Path) -> ctypes.CDLL:
    """Raises NativeUnavailable if the library cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {path}: {error}; delete it to have it built again") from error


class _Field(ctypes.Structure):
    """`Field` of c/layout.h."""

    _fields_ = [("type", ctypes.c_char_p), ("field", ctypes.c_char_p), ("size", ctypes.c_int64), ("offset", ctypes.c_int64)]


def check_layout(library: ctypes.CDLL, table: str, **mirrors: type[ctypes.Structure]) -> None:
    """Compare each struct of the library's `table` (c/layout.h) with Python's copy of it, given by its name in C.

    Raises LayoutMismatch naming the first field that lies elsewhere, or the struct that only one of the two has."""
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
                f"{library._name}: {name} ({differing[0][0]}) differs between C and Python, which are of different versions: "
                "install rollout again"
            )


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.[ch]"))
