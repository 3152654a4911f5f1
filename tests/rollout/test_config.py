"""Configuration: file and flags, and every mistake named."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from rollout.commands.arguments import ServeArgs, UsageError, parse
from rollout.commands.serve import configured
from rollout.config import Config, InputError, ServiceConfig, dump, load
from rollout.engine.config import ADVANCED_BOUNDS, BOUNDS, AdvancedConfig, EngineConfig, WeightOffload
from rollout.engine.values import Limits


def write(folder: Path, text: str) -> Path:
    path = folder / "rollout.toml"
    path.write_text(text)
    return path


def parse_serve(*argv: str) -> Config:
    args = parse(["serve", *argv])
    assert isinstance(args, ServeArgs)
    return args.settings


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "[engine]\nmax_num_seqs = 64\nseed = 5\n[limits]\nmax_n = 256\n")
    config = parse_serve("--config", str(path), "--engine.seed", "7")
    assert config == Config(engine=EngineConfig(max_num_seqs=64, seed=7), limits=Limits(max_n=256))
    assert parse_serve(f"--config={path}").engine.seed == 5
    assert parse_serve("--engine.weight-dtype", "int8").engine == EngineConfig(weight_dtype="int8")
    assert parse_serve() == Config()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[engine]\nmax_sequences = 3\n", "max_sequences.*did you mean max_num_seqs"),
        ("[engine]\nkv_dtpye = 'auto'\n", "`kv_dtpye`.*; did you mean kv_dtype"),
        ("[engine]\nquite_another = 1\n", r"`quite_another` - at `\$\.engine`$"),
        ("[engine.advanced]\nmin_tokens = 1\n", "`min_tokens`.*; did you mean min_run_tokens"),
        ("[engine]\ndtype = 'bf16'\n", "'bf16'.*; one of bfloat16, float32; did you mean bfloat16"),
        ("[tracking]\nwandb_mode = 'of'\n", "; one of auto, online, offline, shared$"),
        ("[tracker]\nx = 3\n", "tracker.*; did you mean tracking"),
        ("[limits]\nmax_n = 'many'\n", r"limits\.max_n"),
        ("[limits]\nmax_frame_bytes = 0\n", "max_frame_bytes=0: must be at least 1"),
        ("[limits]\nmax_frames = 1\n", "max_frames=1: must be at least 2"),
        ("[engine]\nblock_size = 0\n", "block_size=0"),
        ("[service]\nstall_s = inf\n", "stall_s=inf: must be at most 100000000 seconds"),
        ("[fleet]\nrouter_grace_s = 1e300\n", "router_grace_s=1e.300: must be at most"),
        ("[tracking]\nwindow_s = 1e300\n", "window_s=1e.300: must be at most"),
        ("[limits]\nmax_frame_bytes = 9000000000000000000\n", "max_frame_bytes=9000000000000000000: must be at most"),
        ("[engine.weight_offload]\nprefetch_step = 1000000000\n", "prefetch_step=1000000000: must be at most 4096"),
        ("[service]\nclient_grace_s = 1.5\n", "client_grace_s=1.5: must be at least 2"),
        ("[service]\nlease_s = 0.0\n", "lease_s=0.0"),
        ("[engine\n", "."),
        ("[engine]\nkv_gib = 1.0\nkv_tokens = 64\n", "kv_gib=1.0 and kv_tokens=64: set one of them"),
        ("[engine.weight_offload]\nnum_in_group = 5\n", "num_in_group=5: must be at most group_size=4"),
        ("[engine.weight_offload]\nsteps = 5\n", "steps"),
        ("[engine]\nweight_offload = true\n", r"engine\.weight_offload"),
        ("[engine.advanced]\nmin_run_tokens = -1\n", r"min_run_tokens=-1: must be 0 to .*engine\.advanced"),
        ("[engine]\nmin_run_tokens = 8\n", r"min_run_tokens.*belongs in the table \[engine\.advanced\]"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(InputError, match=rf"rollout\.toml: .*{named}"):
        load(write(tmp_path, text))


TABLES = ((EngineConfig, BOUNDS, "seed"), (AdvancedConfig, ADVANCED_BOUNDS, "cpu_offload_safety_threshold"))
"""with the field that is checked on its own"""


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, bounds, _ in TABLES for name in bounds])
def test_every_number_of_an_engine_has_a_bound(table: type[msgspec.Struct], name: str) -> None:
    """Values beyond a bound are rejected before anything is allocated; the upper bound itself is accepted."""
    least, most = (BOUNDS | ADVANCED_BOUNDS)[name]
    for value in (least - 1, most + 1, 10 * most, 2**62):
        with pytest.raises(ValueError, match=rf"{name}={value}: must be {least:,} to {most:,}"):
            table(**{name: value})
    table(**{name: most})


@pytest.mark.parametrize(("table", "bounds", "alone"), TABLES)
def test_every_number_of_an_engine_is_among_them(table: type[msgspec.Struct], bounds: dict[str, object], alone: str) -> None:
    kinds = {each.name: each.type for each in msgspec.structs.fields(table)}
    numbers = {name for name, kind in kinds.items() if {int, float} & {kind, *get_args(kind)}}
    assert numbers == bounds.keys() | {alone}


def test_a_table_inside_a_table(tmp_path: Path) -> None:
    """Off by default; the table or any of its flags turns it on, and flags win."""
    assert parse_serve("--engine.seed", "7").engine.weight_offload is None
    flags = ("--engine.weight-offload.group-size", "8", "--engine.weight_offload.prefetch_step=2")
    assert parse_serve(*flags).engine == EngineConfig(weight_offload=WeightOffload(group_size=8, prefetch_step=2))
    path = write(tmp_path, "[engine]\nseed = 5\n[engine.weight_offload]\ngroup_size = 6\nnum_in_group = 2\n")
    assert parse_serve("--config", str(path)).engine.weight_offload == WeightOffload(group_size=6, num_in_group=2)
    config = parse_serve("--config", str(path), *flags).engine
    assert config == EngineConfig(seed=5, weight_offload=WeightOffload(group_size=8, num_in_group=2, prefetch_step=2))
    path = write(tmp_path, "[engine.advanced]\nlookahead_blocks = 2\nmin_run_tokens = 8\n")
    config = parse_serve("--config", str(path), "--engine.advanced.lookahead-blocks", "3").engine
    assert config == EngineConfig(advanced=AdvancedConfig(lookahead_blocks=3, min_run_tokens=8))


def test_help_lists_the_flags_of_what_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_serve("--help")
    assert "--engine.weight-offload.group-size" in capsys.readouterr().out


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match="nowhere.toml: No such file"):
        load("nowhere.toml")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--engine.max-sequences", "3"], "--engine.max-sequences"),
        (["--engine.block-size", "0"], "block_size=0"),
        (["--engine.max-num-seqs", "1000000000"], "max_num_seqs=1000000000"),
        (["--limits.max-n", "many"], "--limits.max-n"),
        (["--engine.weight-offload.prefetch-step", "0"], "prefetch_step=0"),
        (["--engine.weight-offload.steps", "2"], "--engine.weight-offload.steps"),
        (["--engine.min-run-tokens", "8"], "--engine.advanced.min-run-tokens"),
    ],
)
def test_a_mistake_in_a_flag_is_named(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, UsageError)) as stopped:
        parse_serve(*argv)
    assert isinstance(stopped.value, UsageError) or stopped.value.code == 2
    assert named in str(stopped.value) + capsys.readouterr().err


def test_dump_is_read_back(tmp_path: Path) -> None:
    config = Config(
        engine=EngineConfig(
            model='we"ird\\folder',
            kv_tokens=4096,
            weight_offload=WeightOffload(prefetch_step=2),
            advanced=AdvancedConfig(share_prefix=False),
        ),
        service=ServiceConfig(endpoint="ipc:///tmp/x", client_grace_s=2.5),
        limits=Limits(max_n=3),
    )
    assert load(write(tmp_path, dump(config))) == config
    assert load(write(tmp_path, dump(Config()))) == Config()


def configured_by(*argv: str) -> Config:
    args = parse(["serve", *argv])
    assert isinstance(args, ServeArgs)
    return configured(args)


def test_a_model_is_given_by_position_or_by_flag() -> None:
    assert configured_by("org/name").engine.model == configured_by("--model", "org/name").engine.model == "org/name"
    assert configured_by("--port", "9000", "./x").engine.model == "./x"
    assert configured_by().engine.model == EngineConfig().model
    with pytest.raises(InputError, match="a and --model b: give the model once"):
        configured_by("a", "--model", "b")


@pytest.mark.parametrize(
    ("words", "endpoint"),
    [
        (["--port", "9000"], "tcp://127.0.0.1:9000"),
        (["--port", "0"], "tcp://127.0.0.1:0"),
        (["--host", "0.0.0.0"], "tcp://0.0.0.0:5655"),
        (["--host", "::1", "--port", "1"], "tcp://[::1]:1"),
        (["--service.endpoint", "tcp://*:7", "--port", "8"], "tcp://*:8"),
        ([], "tcp://127.0.0.1:5655"),
    ],
)
def test_host_and_port_are_those_of_the_endpoint(words: list[str], endpoint: str) -> None:
    assert configured_by(*words).service.endpoint == endpoint


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="--port 70000: must be 0"):
        configured_by("--port", "70000")
    with pytest.raises(InputError, match="ipc:///tmp/x, which is no tcp://HOST:PORT"):
        configured_by("--service.endpoint", "ipc:///tmp/x", "--port", "1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--engine.dtyp", "float16"], "unknown flag --engine.dtyp; did you mean --engine.dtype?"),
        (["serve", "--dtype=x"], "unknown flag --dtype; did you mean --engine.dtype?"),
        (["serve", "--engine.weight-offload.group", "4"], "did you mean --engine.weight-offload.group-size?"),
        (["http", "--model-name", "x"], "did you mean --served-model-name?"),
        (["bench", "fanout", "--jsn", "x"], "did you mean --json?"),
        (["status", "--zzz"], "unknown flag --zzz (all flags: rollout status --help)"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["status", "tcp://127.0.0.1:5655"], "the service is given as --address ADDRESS"),
        (["top", "--port", "5655"], "unknown flag --port; did you mean --address?"),
        (["sreve"], "unknown command 'sreve'; did you mean serve?"),
    ],
)
def test_a_word_that_means_nothing_is_named_with_the_nearest(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(words)
    assert said in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 300
