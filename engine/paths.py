"""Folders in which rollout caches compiled kernels and converted models, and the files of a model's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 1 << 25
"""of an index: two hundred thousand tensors with long names"""


class AmbiguousFolder(ValueError):
    """The files of a folder contradict each other: they may hold two models. The message names the files."""


class Checkpoint(NamedTuple):
    """The safetensors files of a model's folder, by one rule for all who read it."""

    files: list[Path]
    listed: Mapping[str, str]
    """name of the file of each tensor, by the index; {}: there is none"""

    def check(self, tensors: Iterable[tuple[str, str]]) -> None:
        """Check the tensors that the files hold: (name of a file, tensor). Raises AmbiguousFolder for one that two files hold,
        or that is not where the index says."""
        found: dict[str, str] = {}
        for file, name in tensors:
            if name in found:
                raise AmbiguousFolder(
                    f"tensor {name!r:.200} is in {found[name]} and in {file}: delete the file that is not the model's"
                )
            found[name] = file
        for name, file in self.listed.items():
            if found.get(name) != file:
                there = f"it is in {found[name]}" if name in found else "it is in none of the files"
                raise AmbiguousFolder(
                    f"tensor {name!r:.200}: {INDEX} says that it is in {file}, but {there}: save the model again"
                )


def checkpoint_of(folder: Path) -> Checkpoint | None:
    """Return the files that hold the model of a folder: those that its index names, or the single one; None: it has neither.
    Other safetensors of the folder are not the model's. Raises AmbiguousFolder; OSError and ValueError for an invalid index."""
    single = folder / SINGLE
    if (index := folder / INDEX).is_file():
        listed = _listed(index)
        named = sorted(set(listed.values()))
        if single.is_file() and SINGLE not in named:
            raise AmbiguousFolder(
                f"{folder} has {SINGLE}, and {INDEX}, which names other files, such as {named[0]}: delete the older of the two"
            )
        for name in named:
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder}: {name} is missing, which {INDEX} names")
        return Checkpoint([folder / name for name in named], listed)
    if not single.is_file():
        return None
    if shards := sorted(folder.glob("model-*-of-*.safetensors")):
        raise AmbiguousFolder(
            f"{folder} has {SINGLE}, and shards without an index, such as {shards[0].name}: delete the older of the two"
        )
    return Checkpoint([single], {})


def _listed(index: Path) -> dict[str, str]:
    """Read the file of each tensor from an index. Raises ValueError."""
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise ValueError(f"{index} has {index.stat().st_size} bytes: at most {MAX_INDEX_BYTES}")
    try:
        listed = json.loads(index.read_bytes())["weight_map"]
        valid = bool(listed) and all(isinstance(file, str) and Path(file).name == file for file in listed.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of safetensors: {type(error).__name__}: {str(error)[:200]}") from None
    if not valid:
        raise ValueError(f"{index} is not an index of safetensors: its weight_map must name files of this folder")
    return dict(listed)


def cache_dir() -> Path:
    """Return `ROLLOUT_CACHE`, or ~/.cache/rollout. Does not create it."""
    return Path(os.environ.get("ROLLOUT_CACHE") or Path.home() / ".cache" / "rollout")
