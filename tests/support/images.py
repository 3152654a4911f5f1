"""Reads a Dockerfile: its stages and instructions, and what is wrong with them."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple


class Stage(NamedTuple):
    name: str
    base: str
    steps: list[tuple[str, str]]
    """instruction and its words, in order"""


def stages_of(text: str) -> dict[str, Stage]:
    """Return the stages by name. ARGs before the first FROM are filled in."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    defaults: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage = Stage("", "", [])
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "ARG" and not stages:
            name, _, value = rest.partition("=")
            defaults[name] = value
        elif word == "FROM":
            base, _, name = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], rest).partition(" AS ")
            stage = stages[name] = Stage(name, base, [])
        else:
            stage.steps.append((word, rest.strip()))
    return stages


def with_bases(stages: dict[str, Stage], name: str) -> list[tuple[str, str]]:
    """Return the steps of a stage after those of the stages that it is built from."""
    stage = stages[name]
    return [*(with_bases(stages, stage.base) if stage.base in stages else []), *stage.steps]


def problems(text: str, images: tuple[str, ...]) -> list[str]:
    """Return what is wrong with a Dockerfile whose stages `images` are run."""
    stages = stages_of(text)
    found = []
    for stage in stages.values():
        if stage.base not in stages and not re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*(@sha256:\w+)?", stage.base):
            found.append(f"{stage.name}: {stage.base} is not pinned")
        for word, rest in stage.steps:
            if word == "RUN":
                found += [f"{stage.name}: {problem}" for problem in problems_of_command(rest)]
    for name in images:
        steps = with_bases(stages, name)
        last = {word: rest for word, rest in steps}
        if last.get("USER", "root") in ("root", "0"):
            found.append(f"{name}: runs as root")
        if "rollout status" not in last.get("HEALTHCHECK", ""):
            found.append(f"{name}: no health check")
        if not last.get("ENTRYPOINT"):
            found.append(f"{name}: no entry point")
    return found


def problems_of_command(command: str) -> list[str]:
    found = []
    for part in command.split("&&"):
        words = shlex.split(part)
        if any(word.endswith("pip") for word in words) and {"install", "wheel"} & {*words} and "--no-cache-dir" not in words:
            found.append("pip without --no-cache-dir")
        if words[:2] == ["apt-get", "install"] and "--no-install-recommends" not in words:
            found.append("apt-get without --no-install-recommends")
    if "apt-get update" in command and "rm -rf /var/lib/apt/lists/*" not in command:
        found.append("apt's lists stay in the image")
    return found
