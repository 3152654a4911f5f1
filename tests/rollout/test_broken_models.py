"""Folders that are no model, or not the one that they say: `rollout serve` prints one sentence and ends with status 2."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.commands.main import main

WEIGHTS = "model.safetensors"


def with_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def truncate(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 1000)


DOWN = "model.layers.1.mlp.down_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated weights": (truncate, "cannot be loaded"),
    "absent weights": (lambda folder: (folder / WEIGHTS).unlink(), "cannot be loaded"),
    "rubbish for weights": (lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 5000) and None, "cannot be loaded"),
    "wrong shapes": (with_config(intermediate_size=48), "6 mismatched (model.layers.0.mlp.down_proj.weight, "),
    "a tensor is missing": (with_weights(lambda tensors: tensors.pop(DOWN)), f"1 missing ({DOWN})"),
    "a tensor too many": (with_weights(lambda tensors: tensors.update(extra=torch.ones(3))), "1 unexpected (extra)"),
    "one layer too few": (with_config(num_hidden_layers=3), "9 missing"),
    "one layer too many": (with_config(num_hidden_layers=1), "9 unexpected"),
    "bad JSON": (lambda folder: (folder / "config.json").write_text('{"model_type": ') and None, "configuration"),
    "JSON of another kind": (lambda folder: (folder / "config.json").write_text("[1, 2]") and None, "configuration"),
    "bytes for JSON": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00") and None, "configuration"),
    "no such type": (with_config(model_type="no_such_type"), "no_such_type"),
    "a number of the wrong kind": (with_config(hidden_size="many"), "hidden_size"),
    "quantised": (
        with_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "bitsandbytes",
    ),
    "code of its own": (
        with_config(model_type="their_own", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}), "never run",
    ),
    "a layer that is not served": (with_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
}  # fmt: skip


@pytest.mark.some(8)
@pytest.mark.parametrize("name", BROKEN)
def test_serve_says_what_is_wrong_with_a_model(
    name: str, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks, says = BROKEN[name]
    for handler in logging.getLogger("transformers").handlers:
        if type(handler) is logging.StreamHandler:  # transformers' own, made when something else was standard error
            monkeypatch.setattr(handler, "stream", sys.stderr)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    breaks(folder)
    read, write = os.pipe()
    os.close(write)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with os.fdopen(read) as nobody:  # whoever asks it anything gets an EOFError
        monkeypatch.setattr(sys, "stdin", nobody)
        try:
            engine = ["--engine.dtype", "float32", "--engine.kv-tokens", "4096", "--port", "0", "--quiet"]
            status = main(["serve", "--model", str(folder), *engine])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    out, err = capfd.readouterr()
    assert status == 2 and out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("rollout serve: "), err
    assert says in lines[0] and len(lines[0]) < 700 and str(folder) in lines[0]
