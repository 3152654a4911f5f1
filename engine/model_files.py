"""The files of a model's folder, by one rule for all who read it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 1 << 25
"""of an index: two hundred thousand tensors with long names"""
MAX_FILES = 4096
"""of a model"""


class Index(msgspec.Struct):
    """What is read of an index."""

    weight_map: dict[str, str]
    """name of the file of each tensor"""


_index = msgspec.json.Decoder(Index)


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


def checkpoint_of(folder: Path, index_bytes: int = MAX_INDEX_BYTES) -> Checkpoint | None:
    """Return the files that hold the model of a folder: those that its index names, or the single one; None: it has neither.
    Other safetensors of the folder are not the model's. index_bytes: most that the index may have, if that is less than
    MAX_INDEX_BYTES. Raises AmbiguousFolder; OSError and ValueError for an invalid index."""
    single = folder / SINGLE
    if (index := folder / INDEX).is_file():
        listed = _listed(index, min(index_bytes, MAX_INDEX_BYTES))
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


def _listed(index: Path, most: int) -> dict[str, str]:
    """Read the file of each tensor from an index of at most `most` bytes. Raises ValueError."""
    with index.open("rb") as opened:
        data = opened.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{index} has more than {most} bytes, which its tensors cannot need: save the model again")
    try:
        listed = _index.decode(data).weight_map
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of safetensors: {type(error).__name__}: {str(error)[:200]}") from None
    named = set(listed.values())
    if not named or not all(map(_is_name, named)):
        raise ValueError(f"{index} is not an index of safetensors: its weight_map must name files of this folder")
    if len(named) > MAX_FILES:
        raise ValueError(f"{index} names {len(named)} files: at most {MAX_FILES}; save the model in larger ones")
    return listed


def _is_name(file: str) -> bool:
    """Return whether a path is the name of a file in a folder."""
    return file not in ("", ".", "..") and "/" not in file and "\0" not in file
