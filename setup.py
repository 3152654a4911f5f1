"""What a wheel needs beyond pyproject.toml. An editable installation takes the folders as they lie and compiles on first use.

Folders: `engine/`, `transport/` and `recipes/` are the packages `rollout.engine`, `rollout.transport` and `rollout.recipes`.
What only measures (`rollout/bench`) stays in the sources.

Kernels: one library for each instruction set of this architecture (`rollout.engine.cpu.isa`), compiled at once. Where there is
no compiler the wheel has none and is for any platform."""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # setuptools' backend leaves it out

from rollout.engine.cpu.build import NativeUnavailable, compile_library, find_compiler, library_name  # noqa: E402
from rollout.engine.cpu.isa import ISAS  # noqa: E402

LIBRARIES = "rollout/engine/cpu/lib"
BESIDE = ("engine", "transport", "recipes")


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
        cc = compiler()
        if cc is None:
            self.warn("no C compiler (cc, gcc, clang or $CC): the kernels are compiled on first use, where there is one")
            return
        folder = Path(self.build_lib) / LIBRARIES
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("*.so"):
            stale.unlink()
        names = list(ISAS) if platform.machine() in ("x86_64", "AMD64") else ["plain"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for name, problem in zip(names, pool.map(lambda isa: _compile(isa, cc, folder), names), strict=True):
                if problem:
                    self.warn(f"no kernels for {name}: {problem}")


def _compile(isa: str, cc: str, folder: Path) -> str | None:
    try:
        compile_library(isa, cc, folder / library_name(isa))
    except NativeUnavailable as error:  # an old compiler may not know the newest instructions
        return str(error)
    return None


class Kernels(Distribution):
    def has_ext_modules(self) -> bool:
        """A wheel for one platform."""
        return compiler() is not None


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """The libraries know nothing of Python."""
        return "py3", "none", super().get_tag()[2]


outside = find_packages(include=[pattern for folder in BESIDE for pattern in (folder, f"{folder}.*")])
inside = find_packages(include=["rollout", "rollout.*"], exclude=["rollout.bench*"])
setup(
    packages=[*inside, *(f"rollout.{name}" for name in outside)],
    package_dir={f"rollout.{folder}": folder for folder in BESIDE},
    package_data={"rollout": ["py.typed"], "rollout.engine": ["py.typed", "cpu/c/*"], "rollout.transport": ["py.typed"]},
    distclass=Kernels,
    cmdclass={"build_py": BuildKernels, "bdist_wheel": AnyPython},
)
