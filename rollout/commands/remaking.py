"""Services that make the samples of a ledger again: `rollout replay`, and `rollout bisect` with weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from rollout import models
from rollout.client.replaying import Change, Reproduced
from rollout.commands.connecting import connected
from rollout.commands.generate import encode, read_lines
from rollout.config import Config, InputError
from rollout.engine.config import EngineConfig, KVName
from rollout.engine.values.arithmetic import Arithmetic
from rollout.identity import prompt_digest
from rollout.ledger import RecordedGroup, RecordedRun, RecordedSample
from rollout.process import service_process

Picked = tuple[RecordedGroup, RecordedSample]


class Remaker:
    """Makes samples of a run again, on a service of its own.

    Args:
        weights: a folder of safetensors, or one with a folder for each version, whose name ends with the version.
        prompts: JSONL file of the prompts that the ledger does not have.
        model: of the service; None: found in `weights`, or as in the ledger.
        settings: of the service. What the ledger says replaces the defaults."""

    def __init__(self, run: RecordedRun, weights: str, prompts: str | None, model: str | None, settings: Config) -> None:
        if not run.services:
            raise InputError("the ledger has no records")
        self._run = run
        self._folders = weight_folders(Path(weights))
        self._model = model or self._found_model(Path(weights))
        self._settings = settings
        self._prompts = run.prompts | ({} if prompts is None else prompts_of(prompts, self._model))

    def remade(self, picked: Sequence[Picked], change: Change | None = None) -> list[Reproduced]:
        """Make samples again, and return the results in their order. Raises InputError, ServiceFailed, RolloutError."""
        receipts = [self._run.receipt(group, sample) for group, sample in picked]
        needed = sorted({version for receipt in receipts for version, _ in receipt.weights})
        folders = self._folders_of(needed)
        ends = [(sample.tokens, sample.finish_reason) for _, sample in picked]
        wanted = {receipt.prompt for receipt in receipts}
        prompts = [ids.tolist() for digest, ids in self._prompts.items() if digest in wanted]
        with self._service(picked) as address, connected(address, "rollout replay") as client:
            return client.replay(receipts, prompts, weights=folders, ends=ends, change=change)

    def _folders_of(self, versions: Sequence[int]) -> dict[int, str]:
        """Return the folders of these versions, as far as there are any. Raises InputError for one folder for several."""
        if None in self._folders:
            if len(versions) > 1:
                raise InputError(
                    f"--weights: one set of weights for versions {', '.join(map(str, versions))}: give a folder with a folder "
                    "for each, named by the version"
                )
            return {version: str(self._folders[None]) for version in versions}
        return {version: str(self._folders[version]) for version in versions if version in self._folders}

    @contextmanager
    def _service(self, picked: Sequence[Picked]) -> Iterator[str]:
        """Run a service that computes as the run did."""
        number = picked[0][0].service if picked else 0
        engine = engine_of(self._run, number, self._settings.engine, self._model)
        with service_process(msgspec.structs.replace(self._settings, engine=engine)) as service:
            yield service.endpoint

    def _found_model(self, weights: Path) -> str:
        named = sorted(version for version in self._folders if version is not None)
        folders = [weights, *(self._folders[version] for version in named)]
        own = next((folder for folder in folders if (folder / "config.json").is_file()), None)
        model = self._run.services[0].model if own is None else str(own)
        if own is None and not Path(model).is_dir():
            raise InputError(f"no config.json in {weights}, and the ledger's model {model} is not here: give --model")
        return model


def weight_folders(weights: Path) -> dict[int | None, Path]:
    """Return the folders of weights by version; None: one for whichever version is needed. Raises InputError."""
    if not weights.is_dir():
        raise InputError(f"--weights {weights}: no such folder")
    if any(weights.glob("*.safetensors")):
        return {None: weights}
    found: dict[int | None, Path] = {}
    for folder in sorted(weights.iterdir()):
        number = re.search(r"(\d+)$", folder.name)
        if number is not None and any(folder.glob("*.safetensors")):
            if int(number[1]) in found:
                raise InputError(f"--weights {weights}: {found[int(number[1])].name} and {folder.name} are of one version")
            found[int(number[1])] = folder
    if not found:
        raise InputError(f"--weights {weights}: neither safetensors nor folders of them, named by the version")
    return found


def engine_of(run: RecordedRun, number: int, engine: EngineConfig, model: str) -> EngineConfig:
    """Return the configuration of an engine that computes as a service of a run did, as far as the ledger says; other values
    than the defaults stay."""
    service, default = run.services[number], EngineConfig()
    own = [refresh for refresh in run.refreshes if refresh.service == number and not refresh.sent]
    dtypes = Counter(info.dtype for refresh in own[:1] for info in refresh.changed.values())
    dtype = dtypes.most_common(1)[0][0] if dtypes else service.kv_dtype
    wanted: dict[str, Any] = {"model": model, "block_size": service.block_size}
    if dtype in ("bfloat16", "float32"):
        wanted["dtype"] = dtype
    if service.kv_dtype != wanted.get("dtype", engine.dtype) and service.kv_dtype in get_args(KVName):
        wanted["kv_dtype"] = service.kv_dtype
    computed = Arithmetic.parse(service.arithmetic)
    wanted |= ({"weight_dtype": "int8"} if computed.int8 else {}) | ({"latent_kv": True} if computed.latent else {})
    changes = {name: value for name, value in wanted.items() if getattr(engine, name) == getattr(default, name)}
    return msgspec.structs.replace(engine, **changes)


def prompts_of(path: str, model: str) -> dict[str, np.ndarray]:
    """Return the token ids of the prompts of a JSONL file by digest. model: whose tokenizer encodes texts. Raises
    InputError."""
    lines = read_lines(Path(path))
    texts = any(line.token_ids is None for line in lines)
    tokenizer = models.load_tokenizer(models.resolve(model)) if texts else None
    ids = [np.asarray(encode(tokenizer, line, number), np.int32) for number, line in enumerate(lines, 1)]
    return {prompt_digest(each): each for each in ids}
