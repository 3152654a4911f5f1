"""Configuration: file and flags, and every mistake named."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.request import Limits
from rollout.cli import ServeArgs, parse
from rollout.config import Config, InputError, ServiceConfig, dump, load


def write(folder: Path, text: str) -> Path:
    path = folder / "rollout.toml"
    path.write_text(text)
    return path


def parse_serve(*argv: str) -> Config:
    return parse(lambda base: ServeArgs(settings=base), list(argv), "rollout serve").settings


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "[engine]\nmax_num_seqs = 64\nseed = 5\n[limits]\nmax_n = 256\n")
    config = parse_serve("--config", str(path), "--engine.seed", "7")
    assert config == Config(engine=EngineConfig(max_num_seqs=64, seed=7), limits=Limits(max_n=256))
    assert parse_serve(f"--config={path}").engine.seed == 5
    assert parse_serve() == Config()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[engine]\nmax_sequences = 3\n", "max_sequences"),
        ("[tracker]\nx = 3\n", "tracker"),
        ("[limits]\nmax_n = 'many'\n", r"limits\.max_n"),
        ("[engine]\nblock_size = 0\n", "block_size=0"),
        ("[service]\nclient_grace_s = 1.5\n", "client_grace_s=1.5: at least 2"),
        ("[service]\nlease_s = 0.0\n", "lease_s=0.0"),
        ("[engine\n", "Expected"),
        ("[engine]\nkv_gib = 1.0\nkv_tokens = 64\n", "kv_gib or kv_tokens"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(InputError, match=rf"rollout\.toml: .*{named}"):
        load(write(tmp_path, text))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match="nowhere.toml: No such file"):
        load("nowhere.toml")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--engine.max-sequences", "3"], "--engine.max-sequences"),
        (["--engine.block-size", "0"], "block_size=0"),
        (["--limits.max-n", "many"], "--limits.max-n"),
    ],
)
def test_a_mistake_in_a_flag_is_named(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_serve(*argv)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_dump_is_read_back(tmp_path: Path) -> None:
    config = Config(
        engine=EngineConfig(model='we"ird\\folder', kv_tokens=4096, share_prefix=False),
        service=ServiceConfig(endpoint="ipc:///tmp/x", client_grace_s=2.5),
        limits=Limits(max_n=3),
    )
    assert load(write(tmp_path, dump(config))) == config
    assert load(write(tmp_path, dump(Config()))) == Config()
