"""The file of samples that `rollout generate` writes, and what an interrupted run has left in it."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec

from rollout.config import InputError
from rollout.transport import own_files

AGAIN = ("error", "aborted")
"""finish reasons of samples that `--resume` generates again"""


class Prompt(NamedTuple):
    """A prompt as it is sent and written."""

    id: str
    text: str
    token_ids: list[int]


class WrittenSample(msgspec.Struct):
    """The fields of a line that tell which sample it is."""

    group_id: str
    index: int
    finish_reason: str
    prompt_tokens: int
    prompt: str | None = None


@contextmanager
def open_out(out: str) -> Iterator[TextIO]:
    """Open the file of samples, whose content stays for now, or standard output. Raises InputError if it cannot be written."""
    if out == "-":
        yield sys.stdout
        return
    try:
        file = Path(out).open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from error
    with file:
        yield file


def complete_groups(path: Path, prompts: Mapping[str, Prompt], n: int) -> set[str]:
    """Return the ids of the prompts all of whose n samples are in the file. A torn last line does not count. Raises InputError
    for samples of other prompts or of another n."""
    found: dict[str, set[int]] = defaultdict(set)
    again = set()
    for number, sample in enumerate(_written(path), 1):
        where = f"--out {path}, line {number}"
        prompt = prompts.get(sample.group_id)
        if prompt is None:
            raise InputError(f"{where}: --prompts has no id {sample.group_id!r}; give --resume the prompts of the first run")
        if (sample.prompt, sample.prompt_tokens) != (prompt.text, len(prompt.token_ids)):
            raise InputError(
                f"{where}: the prompt of {sample.group_id!r} differs from --prompts; name another --out, or leave --resume out"
            )
        if sample.index >= n or sample.index in found[sample.group_id]:
            raise InputError(
                f"{where}: sample {sample.index} of {sample.group_id!r} exceeds --n {n}; give --resume the --n of the first run"
            )
        found[sample.group_id].add(sample.index)
        if sample.finish_reason in AGAIN:
            again.add(sample.group_id)
    return {id for id, indices in found.items() if len(indices) == n and id not in again}


def keep_groups(path: Path, ids: set[str]) -> None:
    """Drop the samples of other groups, and a torn last line, from the file. It is replaced at once."""
    path = path.resolve()  # a link to it stays a link
    new = own_files.beside(path)
    try:
        held = own_files.open_new(new, path.stat().st_mode & 0o777)
        try:
            with path.open("rb") as file, open(held, "wb", closefd=False) as kept:
                kept.writelines(raw for raw, sample in zip(file, _written(path), strict=False) if sample.group_id in ids)
            os.replace(new, path)
        finally:
            own_files.remove_if_same(new, held)
            os.close(held)
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}") from error


def _written(path: Path) -> Iterator[WrittenSample]:
    """Yield the samples of a file, up to a torn last line. Raises InputError for another line that is no sample."""
    decoder = msgspec.json.Decoder(WrittenSample)
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                return
            try:
                yield decoder.decode(raw)
            except msgspec.DecodeError as error:
                raise InputError(
                    f"--out {path}, line {number}: not a sample of `rollout generate`, remove it: {error}"
                ) from error
