"""What a wheel needs beyond pyproject.toml. An editable installation takes the folders as they lie and compiles on first use.

Folders: `rollout/engine`, `rollout/transport` and `rollout/recipes` are links to the folders at the top. A copy of the sources
may lack them (Windows without developer mode, some archives): such folders are installed from where they lie.
What only measures (`rollout/bench`) stays in the sources.

Kernels: one library for each instruction set of this architecture (`rollout.engine.cpu.isa`), compiled at once. On x86-64 plain
C is left out: it takes 0.8 MB, and only CPUs without AVX2 run it. If a library cannot be compiled, the build fails: a wheel
without it has the same name, and is slower on some machines. ROLLOUT_KERNELS lists the sets that a wheel has instead, e.g.
avx2,plain; none: no libraries, and the wheel is for any platform, as where there is no compiler. What a wheel has is read from
the files' names (`rollout.engine.cpu.build.installed_kernels`)."""

from __future__ import annotations

import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # setuptools' backend leaves it out

from rollout.engine.cpu.build import NativeUnavailable, compile_library, find_compiler, library_name  # noqa: E402
from rollout.engine.cpu.isa import ISAS  # noqa: E402

LIBRARIES = "rollout/engine/cpu/lib"
SMALLER = ["-s", "-fno-asynchronous-unwind-tables", "-O2"]
"""flags: without symbols and tables for debuggers, and with a sixth less code, whose products take up to 2 % longer at 128
rows and as long at few: with all of it a client's environment would have more than 100 MB"""
COMPILE_TIMEOUT_S = 1800
"""for each library, on a busy machine"""
LINKED = ("engine", "transport", "recipes")


def known() -> list[str]:
    return list(ISAS) if platform.machine() in ("x86_64", "AMD64") else ["plain"]


def usual() -> list[str]:
    return [isa for isa in known() if isa != "plain"] or ["plain"]


def wanted() -> list[str]:
    """Return the instruction sets that the wheel gets libraries for; empty for a wheel of any platform."""
    named = os.environ.get("ROLLOUT_KERNELS")
    if named is None:
        return usual() if compiler() else []
    names = named.replace(",", " ").split()
    if names == ["none"]:
        return []
    if not names or not set(names) <= set(known()):
        raise SystemExit(f"ROLLOUT_KERNELS={named!r}: must be none, or some of {','.join(known())}")
    return names


def compiler() -> str | None:
    try:
        return find_compiler()
    except NativeUnavailable:
        return None


class BuildKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / LIBRARIES
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("*.so"):
            stale.unlink()
        names, cc = wanted(), compiler()
        if not names:
            why = "" if cc else "no C compiler (cc, gcc, clang or $CC): "
            print(f"rollout: {why}no kernels in this wheel, they are compiled on first use, where there is a compiler")
            return
        if cc is None:
            raise SystemExit(f"ROLLOUT_KERNELS={','.join(names)}: no C compiler (cc, gcc, clang or $CC) is there")
        print(f"rollout: compiling the kernels for {', '.join(names)} with {cc}", flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            problems = list(pool.map(lambda isa: _compile(isa, cc, folder), names))
        failed = {name: problem for name, problem in zip(names, problems, strict=True) if problem}
        if failed:
            others = ",".join(name for name in names if name not in failed) or "none"
            told = "\n".join(f"{name}: {problem}" for name, problem in failed.items())
            raise SystemExit(
                f"{told}\nno kernels for {', '.join(failed)}: ROLLOUT_KERNELS={others} builds a wheel without them"
            )


def _compile(isa: str, cc: str, folder: Path) -> str | None:
    began = time.monotonic()
    try:
        compile_library(isa, cc, folder / library_name(isa), more=SMALLER, timeout_s=COMPILE_TIMEOUT_S)
    except NativeUnavailable as error:  # an old compiler may not know the newest instructions
        return str(error)
    print(f"rollout: {isa} compiled in {time.monotonic() - began:.0f} s", flush=True)
    return None


class Kernels(Distribution):
    def has_ext_modules(self) -> bool:
        """A wheel for one platform."""
        return bool(wanted())


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """The libraries know nothing of Python."""
        return "py3", "none", super().get_tag()[2]


unlinked = [folder for folder in LINKED if not Path("rollout", folder).is_dir()]
outside = find_packages(include=[pattern for folder in unlinked for pattern in (folder, f"{folder}.*")])
inside = find_packages(include=["rollout", "rollout.*"], exclude=["rollout.bench*"])
setup(
    packages=[*inside, *(f"rollout.{name}" for name in outside)],
    # with the root said, an editable installation is a plain path, which type checkers follow
    package_dir={"": ".", **{f"rollout.{folder}": folder for folder in unlinked}},
    package_data={"rollout": ["py.typed"], "rollout.engine": ["py.typed", "cpu/c/*"], "rollout.transport": ["py.typed"]},
    distclass=Kernels,
    cmdclass={"build_py": BuildKernels, "bdist_wheel": AnyPython},
)
