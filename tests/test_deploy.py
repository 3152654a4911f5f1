"""The images of the Dockerfile and the manifests in deploy/: what can be checked, and run, without Docker and a cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.commands.arguments import HttpArgs, ServeArgs, StatusArgs, UsageError, parse
from rollout.config import Config
from rollout.process import service_process
from tests.support.images import problems, stages_of, with_bases

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IMAGES = ("cpu", "cuda")
MANIFESTS = sorted((ROOT / "deploy").glob("*.yaml"))


def test_the_dockerfile() -> None:
    assert not problems(DOCKERFILE, IMAGES)
    stages = stages_of(DOCKERFILE)
    copied = [rest.split()[:-1] for stage in stages.values() for word, rest in stage.steps if word == "COPY"]
    sources = {name for words in copied if not words[0].startswith("--from") for name in words}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*" and sources == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in sources)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("PYTHON=3.12.12-slim-bookworm", "PYTHON=latest", "wheel: python:latest is not pinned"),
        ("FROM python:${PYTHON} AS user", "FROM python AS user", "user: python is not pinned"),
        ("USER 1000", "USER root", "cpu: runs as root"),
        ("USER 1000", "", "cpu: runs as root"),
        ("pip install --no-cache-dir", "pip install", "cpu-packages: pip without --no-cache-dir"),
        (" --no-install-recommends", "", "wheel: apt-get without --no-install-recommends"),
        ("&& rm -rf /var/lib/apt/lists/*", "", "cuda: apt's lists stay in the image"),
        ("HEALTHCHECK", "LABEL", "cpu: no health check"),
    ],
)
def test_a_problem_of_the_dockerfile_is_seen(old: str, new: str, problem: str) -> None:
    assert old in DOCKERFILE and problem in problems(DOCKERFILE.replace(old, new), IMAGES)


def containers(manifest: Any) -> Iterator[dict[str, Any]]:
    """Every container of a manifest, with the names of its ports' Services added under "app"."""
    if isinstance(manifest, dict):
        yield from manifest.get("containers", [])
    for value in manifest.values() if isinstance(manifest, dict) else manifest if isinstance(manifest, list) else []:
        yield from containers(value)


def commands(container: dict[str, Any]) -> Iterator[list[str]]:
    """The words after `rollout` of the container's command and of its probes."""
    for words in [container["command"], *(each["exec"]["command"] for each in container.values() if "exec" in each)]:
        words = words if words[0] == "rollout" else shlex.split(words[-1].split("&& exec ")[1])
        assert words[0] == "rollout"
        yield words[1:]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_names_an_image_and_flags_that_exist(path: Path) -> None:
    manifest = list(yaml.safe_load_all(path.read_text()))
    found = list(containers(manifest))
    built = set(re.findall(r"docker build --target (\w+) --tag (\S+)", path.read_text()))
    for container in found:
        target = container["image"].rpartition(":")[2]
        assert (target, container["image"]) in built and target in stages_of(DOCKERFILE)
        assert "memory" in container["resources"]["limits"] and "cpu" in container["resources"]["requests"]
        assert container["name"] == "replica" or {"readinessProbe", "livenessProbe"} <= container.keys()
        for words in commands(container):
            assert isinstance(parse(words), ServeArgs | HttpArgs | StatusArgs)
    assert len(found) == 2
    with pytest.raises(UsageError):  # the negative control: such a flag does not exist
        parse([*next(commands(found[0])), "--modle", "x"])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_service_leads_to_ports_that_a_pod_has(path: Path) -> None:
    manifest = list(yaml.safe_load_all(path.read_text()))
    (service,) = [each["spec"] for each in manifest if each["kind"] == "Service"]
    templates = [found for each in manifest for found in templates_of(each)]
    (pod,) = [each["spec"] for each in templates if each["metadata"]["labels"] == service["selector"]]
    ports = {port["name"]: port["containerPort"] for container in pod["containers"] for port in container.get("ports", [])}
    assert {port["targetPort"]: port["port"] for port in service["ports"]}.items() <= ports.items()
    for template in templates:
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert all({mount["name"] for mount in each["volumeMounts"]} <= volumes for each in template["spec"]["containers"])


def templates_of(manifest: Any) -> Iterator[dict[str, Any]]:
    if isinstance(manifest, dict):
        if "containers" in manifest.get("spec", {}):
            yield manifest
        for value in manifest.values():
            yield from templates_of(value)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler to build the wheel with")
def test_the_steps_of_the_cpu_image_make_a_service(tiny_config: Config, tmp_path: Path) -> None:
    """Each RUN and COPY in order, below a folder in place of /, without apt and useradd."""
    stages = stages_of(DOCKERFILE)
    venv.create(tmp_path / "tools", with_pip=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "ROLLOUT_KERNELS")}
    environment["PATH"] = f"{tmp_path / 'tools' / 'bin'}:{os.environ['PATH']}"
    for name in ("wheel", "cpu-packages", "cpu"):
        folder = tmp_path
        for word, rest in stages[name].steps:
            if word == "WORKDIR":
                folder = Path(below(rest, tmp_path))
                folder.mkdir(parents=True, exist_ok=True)
            elif word == "COPY" and not rest.startswith("--from"):  # stages share the folder
                copy(rest.split()[:-1], folder / rest.split()[-1])
            elif word == "RUN" and "apt-get" not in rest:
                done = subprocess.run(below(rest, tmp_path), shell=True, cwd=folder, env=environment, capture_output=True)
                assert done.returncode == 0, f"{rest}\n{done.stderr.decode()[-3000:]}"

    environment["PATH"] = f"{tmp_path / 'opt/rollout/bin'}:{os.environ['PATH']}"
    check = next(rest for word, rest in with_bases(stages, "cpu") if word == "HEALTHCHECK").partition(" CMD ")[2]

    def healthy(address: str) -> int:
        with_address = environment | {"ROLLOUT_ADDRESS": address}
        return subprocess.run(yaml.safe_load(check), cwd=tmp_path, env=with_address, capture_output=True).returncode

    with service_process(tiny_config, python=str(tmp_path / "opt/rollout/bin/python")) as service:
        assert healthy(service.endpoint) == 0
    assert healthy(service.endpoint) == 1, "the negative control: it has ended"
    ours = subprocess.run(
        ["python", "-c", "import rollout; print(rollout.__file__)"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert str(tmp_path / "opt/rollout") in ours.stdout.decode()


def below(command: str, root: Path) -> str:
    """Move the absolute paths of a command below `root`."""
    return re.sub(r"(?<![\w./:])/(source|wheels|opt|cache|home)\b", rf"{root}/\1", command)


def copy(names: list[str], target: Path) -> None:
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__", "*.so", "bench"))
        else:
            shutil.copy(ROOT / name, target)
