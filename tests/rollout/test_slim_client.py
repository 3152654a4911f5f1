"""A client in environments that lack torch, or the engine: it talks to a live service and needs neither."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support.described import digest_of
from tests.support.watermark import watermark_engine, weights_of
from tests.support.wire import serving

ROOT = Path(__file__).parents[2]
WAIT = 100.0
"""for what comes: a bound for hangs only"""

LACKING = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if {lacking}:
            raise ModuleNotFoundError("not in this environment: " + name, name=name)

sys.meta_path.insert(0, Lacking())
"""

VALUES = ("values", "config", "vocabulary", "model_files")
"""of the engine: value types, the bytes of tokens, and the rule for the files of a folder"""
BARE = f"""name.split(".")[0] not in {{*sys.stdlib_module_names, *"msgspec numpy xxhash zmq rollout".split()}} \
            or name.startswith("rollout.engine.") and name[15:].split(".")[0] not in {VALUES}"""
"""what a client needs that has no tensors: four packages, and VALUES"""

TRAINER = f"""name.startswith("rollout.engine.") and name[15:].split(".")[0] not in {VALUES} \
               and name[15:] not in ("weights", "weights.tensors")"""
"""a trainer has torch; of the engine it needs the names and bytes of tensors as well"""

GROUPS = """
from rollout.client import RolloutClient
from rollout.engine.values import Sampling

client = RolloutClient(sys.argv[1])
handle = client.submit([1, 2, 3], Sampling(n=3, max_tokens=5, ignore_eos=True))
streamed = [sample.index for sample in handle.samples(60)]
assert sorted(streamed) == [0, 1, 2] and all(len(sample.token_ids) == 5 for sample in handle.result(60))
assert len(list(client.generate([[1], [2]], Sampling(max_tokens=2, ignore_eos=True), timeout=60))) == 2
assert client.status()["service"]["clients"][0]["connected"]
"""

FOLDER = """
refreshed = client.refresh(sys.argv[2], version=1)
assert refreshed.via == "files" and refreshed.digest == sys.argv[3], refreshed
"""

TENSORS = """
from safetensors.torch import load_file

tensors = load_file(sys.argv[2] + "/model.safetensors")
for version, via in enumerate(("auto", "inline"), 1):
    assert client.refresh(tensors, version=version, via=via).digest == sys.argv[3]
"""


@pytest.fixture
def service() -> Iterator[str]:
    with serving(watermark_engine()) as service:
        yield service.endpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    save_file(weights_of(1), folder / "model.safetensors")
    return folder


def run(lacking: str, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LACKING.format(lacking=lacking) + program, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)


def test_what_client_and_transport_import_of_the_engine() -> None:
    """Wherever in a file: a rarely taken branch counts as well. Without `rollout.engine.cuda.digests` the host takes
    digests."""
    named = re.compile(r"^\s*(?:from|import) (rollout\.engine(?:\.\w+)*)", re.MULTILINE)
    paths = [*ROOT.glob("rollout/client/*.py"), *ROOT.glob("transport/**/*.py")]
    found = {name for path in paths for name in named.findall(path.read_text())}
    of_engine = {"values", "values.arithmetic", "vocabulary", "model_files", "weights.tensors", "cuda.digests"}
    assert found == {f"rollout.engine.{name}" for name in of_engine}
    assert named.findall("def f():\n    from rollout.engine.weights.staging import x") == ["rollout.engine.weights.staging"]
    assert named.findall((ROOT / "engine/weights/tensors.py").read_text()) == ["rollout.engine.values"]


def test_a_client_without_torch_and_without_the_engine(service: str, folder: Path) -> None:
    """Submit, stream, status, and weights by a folder."""
    done = run(BARE, GROUPS + FOLDER + "client.close()", service, folder, digest_of(1))
    assert done.returncode == 0, done.stderr


def test_a_trainer_without_the_engine_sends_tensors(service: str, folder: Path) -> None:
    done = run(TRAINER, GROUPS + TENSORS + "client.close()", service, folder, digest_of(1))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "wants",
    ["torch", "transformers", "tyro", "rollout.engine.engine", "rollout.engine.weights.tensors", "rollout.engine.kv.pages"],
)
def test_what_the_environment_lacks_would_be_noticed(wants: str) -> None:
    done = run(BARE, f"import rollout.client, {wants}")
    assert done.returncode != 0 and f"not in this environment: {'.'.join(wants.split('.')[:3])}\n" in done.stderr, done.stderr


def test_tensors_would_be_noticed(service: str, folder: Path) -> None:
    """The environment of the first test lacks what the second one needs."""
    done = run(BARE, GROUPS + "client.refresh({'w0': [1, 2]})", service)
    assert done.returncode != 0 and "not in this environment: rollout.engine.weights" in done.stderr, done.stderr
