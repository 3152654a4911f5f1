"""What a wheel needs beyond pyproject.toml. An editable installation takes the folders as they lie and compiles on first use.

Names: `engine/` and `transport/` are installed as `rollout.engine` and `rollout.transport`, so that no other project's packages
of these names are touched; imports are rewritten on the way. What only measures (`rollout/bench`) stays in the sources.

Kernels: one library for each instruction set of this architecture (`engine.cpu.isa`), compiled at once. Where there is no
compiler the wheel has none and is for any platform.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # setuptools' backend leaves it out

from engine.cpu.build import NativeUnavailable, compile_library, find_compiler, library_name  # noqa: E402
from engine.cpu.isa import ISAS  # noqa: E402

LIBRARIES = "rollout/engine/cpu/lib"
ROOMS = ("engine", "transport")
IN_PLACE = "editable_wheel" in sys.argv


def installed_name(module: str) -> str:
    return f"rollout.{module}" if module.split(".")[0] in ROOMS else module


def is_module(name: str) -> bool:
    path = Path(__file__).parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def refuse_named_modules(tree: ast.Module) -> None:
    """Raises ValueError for a string, other than a docstring, that names a module of our rooms: it would be sought under that
    name when it is installed."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for name in re.findall(rf"(?<![\w./])(?:{'|'.join(ROOMS)})(?:\.\w+)+(?![\w-])", node.value):
                if is_module(name):
                    raise ValueError(f"line {node.lineno}: {name!r} as a string: write an import statement, which is rewritten")


def with_installed_names(source: str) -> str:
    """A module whose imports of our rooms name them as they are installed. Raises ValueError for `import engine.x`, which binds
    a name that would be another one then, and for a module that a string names."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    refuse_named_modules(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in ROOMS and not alias.asname for alias in node.names):
            raise ValueError(f"line {node.lineno}: import {node.names[0].name}: write from … import …")
        if isinstance(node, ast.ImportFrom) and node.level == 0 and installed_name(node.module or "") != node.module:
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"from {node.module} ", f"from rollout.{node.module} ", 1)
    return "".join(lines)


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
        for path in Path(self.build_lib).rglob("*.py"):
            try:
                path.write_text(with_installed_names(path.read_text(encoding="utf-8")), encoding="utf-8")
            except ValueError as error:
                raise ValueError(f"{path.relative_to(self.build_lib)}, {error}") from None
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


packages = find_packages(include=["engine*", "transport*", "rollout*"], exclude=[] if IN_PLACE else ["rollout.bench*"])
setup(
    packages=packages if IN_PLACE else [installed_name(each) for each in packages],
    package_dir={} if IN_PLACE else {installed_name(each): each for each in ROOMS},
    package_data={"engine" if IN_PLACE else "rollout.engine": ["cpu/c/*"]},
    distclass=Kernels,
    cmdclass={"build_py": BuildKernels, "bdist_wheel": AnyPython},
)
