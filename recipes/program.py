"""Runs a recipe from the command line: `--help`, messages, Ctrl-C, exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tyro

from rollout.commands.extras import missing
from rollout.commands.interrupt import INTERRUPTED
from rollout.config import CannotServe, InputError
from rollout.models import ModelNotFound
from rollout.process import ServiceFailed
from rollout.transport.errors import RolloutError

Options = TypeVar("Options")


def run(name: str, main: Callable[[Options], Any], options: type[Options]) -> int:
    """Parse the arguments of `python -m rollout.recipes.NAME` and call `main`. Returns the exit status: what `main` returned,
    if that is an integer; 1 for an error of the user or of the service, whose message is printed; 130 after Ctrl-C."""
    try:
        result = main(tyro.cli(options, prog=f"python -m rollout.recipes.{name}"))
    except KeyboardInterrupt:
        say(f"{name}: stopped")
        return INTERRUPTED
    except (CannotServe, InputError, ModelNotFound, RolloutError, ServiceFailed) as error:
        say(f"{name}: {error}")
        return 1
    except BrokenPipeError:  # the reader closed standard output, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        sentence = missing(error)
        if sentence is None:
            raise
        say(f"{name}: {sentence}")
        return 1
    return result if isinstance(result, int) else 0


def make_folder(path: Path, option: str) -> None:
    """Make the folder that an option names. Raises InputError if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be made a folder ({error.strerror}); name another one") from None


def make_folder_for_model(path: Path) -> None:
    """Make the folder that a trained model is saved to. Raises InputError for one that holds files: saving replaces those of a
    model, and deletes shards of an older one."""
    make_folder(path, "--save")
    if any(path.iterdir()):
        raise InputError(f"--save {path}: holds files, which stay; name a new or an empty folder")


def say(text: str) -> None:
    """Print progress to standard error at once."""
    print(text, file=sys.stderr, flush=True)
