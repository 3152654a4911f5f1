"""The commands as a user runs them: processes, signals, exit statuses."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from rollout import __version__
from rollout.client.api import RolloutClient
from rollout.commands import version
from rollout.commands.arguments import DESCRIPTIONS, commands
from rollout.commands.lines import next_lines
from rollout.commands.main import main
from rollout.config import Config, ServiceConfig, dump
from rollout.engine.cpu import build, isa
from rollout.engine.values import Sampling
from rollout.process import ServiceFailed, service_process
from tests.support.modelless import as_python
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(400)  # most of these start processes that load a model

ROLLOUT = [sys.executable, "-m", "rollout"]


def rollout(*argv: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ROLLOUT, *argv], capture_output=True, text=True, timeout=timeout)


@contextmanager
def serving(config: Config, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`rollout serve` as a shell would start it; its process and its endpoint, from the line that it prints."""
    toml = folder / "rollout.toml"
    toml.write_text(dump(config))
    command = [*ROLLOUT, "serve", "--config", str(toml), "--service.endpoint", "tcp://127.0.0.1:*"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                assert selector.select(200), "serve printed nothing"
            line = process.stdout.readline()
            assert line.startswith("rollout: serving "), line
            yield process, line.split(" at ")[1].split(",")[0]
        finally:
            process.kill()


PHASES = (
    "starting, process", "importing torch", "opening ", "kernels", "loading the weights as float32", "comparing the kernels",
    "KV pools", "loaded in ", "computes with", "KV for 65,536 tokens", "digest",
)  # fmt: skip
"""what a start of the tiny model prints, in this order"""


def assert_in_order(said: str, words: Sequence[str]) -> None:
    """Each of the words comes in a line of its own, after those before."""
    lines = iter(said.splitlines())
    for word in words:
        assert any(word in line for line in lines), f"{word!r} is not there, or not behind what comes before it:\n{said}"


def test_an_order_that_does_not_hold_is_seen() -> None:
    assert_in_order("a 1\nb 2\n", ["a", "2"])
    with pytest.raises(AssertionError, match="'a' is not there"):
        assert_in_order("b\na\n", ["b", "a", "a"])


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_serve_stops_cleanly(number: signal.Signals, tiny_config: Config, tmp_path: Path) -> None:
    with serving(tiny_config, tmp_path) as (process, endpoint), RolloutClient(endpoint) as client:
        handle = client.submit([5, 6, 7], Sampling(n=2, max_tokens=8000, ignore_eos=True))
        until(lambda: client.status()["running"] == 2, "running")
        process.send_signal(number)
        samples = handle.result(timeout=60)
        assert [sample.finish_reason for sample in samples] == ["aborted", "aborted"]
        assert process.wait(60) == (130 if number == signal.SIGINT else 0)
        assert process.stderr is not None
        said = process.stderr.read()
        assert "Traceback" not in said and "leaked" not in said
        assert_in_order(
            said, [*PHASES, "ready in", "rollout top --address " + endpoint, "stopping: 2 samples aborted", "s, 2 samples, "]
        )


def test_a_child_service_ends_with_its_parent(tiny_config: Config, tmp_path: Path) -> None:
    """Even if the parent is killed: nobody is left to clean up then."""
    (tmp_path / "config.toml").write_text(dump(tiny_config))
    program = f"""
import os, signal
from rollout.config import load
from rollout.process import service_process
with service_process(load({str(tmp_path / "config.toml")!r}), python={str(as_python(tmp_path))!r}) as service:
    print(service.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the service ended")


def test_a_child_service_is_stopped_when_the_block_raises(tiny_config: Config, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with service_process(tiny_config, python=str(as_python(tmp_path))) as service:
            assert psutil.pid_exists(service.pid)
            raise KeyboardInterrupt
    assert not psutil.pid_exists(service.pid)


def test_a_child_service_that_cannot_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailed, match="exit status 1 before it was listening"):
        with service_process(Config(service=ServiceConfig(keys=str(tmp_path / "none.json")))):
            raise AssertionError("it is not there")


HANGS = "import time\nprint('importing', flush=True)\ntime.sleep(200)\n"


@pytest.mark.parametrize(
    ("module", "command"), [("tyro", "--help"), ("zmq", "serve"), ("zmq", "status"), ("rich", "top"), ("tqdm", "generate")]
)
def test_ctrl_c_while_modules_are_imported(module: str, command: str, tmp_path: Path) -> None:
    """The process says so in one line, without a traceback; `module` takes long to import. The first line of `serve` is there
    before the libraries of the command line."""
    (tmp_path / f"{module}.py").write_text(HANGS)
    before = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}{os.pathsep}{before}"}
    files = ["--prompts", "in.jsonl", "--out", "-"] if command == "generate" else []
    status, said = interrupted([*ROLLOUT, command, *files], environment)
    first = ["rollout serve: starting, process "] if command == "serve" else []
    assert status == 130 and len(lines := said.splitlines()) == len(first) + 1, said
    assert all(line.startswith(begin) for line, begin in zip(lines, [*first, "rollout: stopped"], strict=True))


@pytest.mark.parametrize(("command", "line"), [("top", "rollout top: stopped"), ("pause", "stopped; the service resumes")])
def test_ctrl_c_of_a_command_that_is_connected(command: str, line: str, tiny_service: str) -> None:
    """One line, the exit status of Ctrl-C, no traceback, and the service runs on."""
    words = [*ROLLOUT, command, "--address", tiny_service]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process, RolloutClient(tiny_service) as client:
        try:
            here = lambda: {one["name"] for one in client.status()["service"]["clients"]}  # noqa: E731
            until(lambda: f"rollout {command}" in here(), "it is connected")
            if command == "pause":
                assert process.stdout is not None and process.stdout.readline().startswith("paused: ")
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130 and "Traceback" not in said and line in said.splitlines()[-1], said
        until(lambda: client.status()["state"] == "running", "the service runs on")


def test_ctrl_c_that_whoever_started_us_ignores_is_ignored(tmp_path: Path) -> None:
    """As `nohup` and a shell's background jobs have it. And without that, outside of `rollout`, there is a traceback."""
    (tmp_path / "slow.py").write_text(HANGS.replace("200", "0.2"))
    program = "import rollout.__main__ as r, signal; {}; r.imports_begin(); import slow; print(signal.getsignal(2))"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    ignoring = program.format("signal.signal(2, signal.SIG_IGN)")
    assert interrupted([sys.executable, "-c", ignoring], environment) == (0, "")
    code, told = interrupted([sys.executable, "-c", "import slow"], environment)
    assert code and "KeyboardInterrupt" in told, "the negative control"


def interrupted(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and standard error of a process that gets SIGINT once it prints."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=100)
        finally:
            process.kill()
    return process.returncode, told


def test_status(tiny_service: str) -> None:
    done = rollout("status", "--address", tiny_service)
    assert done.returncode == 0 and 6 <= len(done.stdout.splitlines()) <= 15, done.stderr
    assert "version 0, digest" in done.stdout
    done = rollout("status", "--address", tiny_service, "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["version"] == 0 and status["kv"]["device_blocks"] == 2048


GENERATE = """
import sys
from functools import partial
from rollout.commands import generate
from rollout.commands.main import main
python, *words = sys.argv[1:]
if python:
    generate.service_process = partial(generate.service_process, python=python)
status = main(words)
print("torch" if sys.modules.get("torch") else "no torch")
sys.exit(status)
"""


@pytest.mark.parametrize("with_model", [False, pytest.param(True, marks=pytest.mark.long)])
def test_generate_with_a_service_of_its_own(with_model: bool, tiny_model: Path, tmp_path: Path) -> None:
    """The command itself tokenizes without torch, and starts the service, which has an engine of a script by day."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once upon a time"}\n')
    files = ["--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    engine = ["--model", str(tiny_model), "--engine.dtype", "float32", "--engine.kv-tokens", "4096"]
    python = "" if with_model else str(as_python(tmp_path))
    command = [sys.executable, "-c", GENERATE, python, "generate", *files, *engine]
    done = subprocess.run([*command, "--n", "2", "--max-tokens", "4"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "no torch" in done.stdout.splitlines() and "PyTorch" not in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == [0, 1] and {len(row["token_ids"]) for row in rows} == {4}
    assert {row["prompt_tokens"] for row in rows} == {16}


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        ([], 2, "Expected one of {serve, generate,"),
        (["sreve"], 2, "unknown command 'sreve'; did you mean serve?"),
        (["serve", "--engine.blok-size", "3"], 2, "--engine.blok-size"),
        (["serve", "--config", "nowhere.toml"], 1, "nowhere.toml"),
        (["serve", "--model", "/nowhere"], 2, "neither a folder"),
        (["bench", "fan"], 1, "there are: fanout"),
        (["bench", "fan"], 1, "fidelity, host, http, refresh"),
        (["bench", "delta"], 1, "`python -m tests.bench delta`"),
        (["bench", "vanish", "--replicas", "3"], 1, "`python -m tests.bench vanish`"),
        (["keys", "add", "one", "--role", "read", "--file", "/nowhere/service.json"], 1, "`rollout keys init"),
        (["generate", "--prompts", "nowhere.jsonl", "--out", "-"], 1, "nowhere.jsonl"),
        (["generate", "--prompts", __file__, "--out", "-"], 1, "line 1"),
        (["bench", "refresh", "--engine.kv-dtype", "fp8_e4m3"], 1, "refresh needs KV in the model's dtype"),
        (["bench", "fanout", "--floor", "--engine.kv-dtype", "fp8_e4m3"], 1, "--floor needs KV in the model's dtype"),
        (["serve", "--engine.device", "cuda:99", "--model", "{model}"], 1, "CUDA"),
        (["bench", "fanout", "--json", "/nowhere/x", "--model", "{model}"], 1, "--json /nowhere/x: "),
        (["status", "--address", "tcp://127.0.0.1:9", "--timeout", "0.3"], 1, "127.0.0.1:9"),
        (["status", "--address", "127.0.0.1:5655"], 1, "must be tcp://HOST:PORT or ipc://PATH"),
        (["top", "--address", "tcp://10.0.0.5:5655"], 1, "is not on this host"),
        (["fleet", "scale", "x"], 1, "say how many replicas"),
        (["fleet", "drain"], 1, "say which replica"),
        (["fleet", "roll", "2"], 1, "restarts all replicas"),
        (["generate", "--prompts", "x", "--out", "-", "--address", "x", "--engine.kv-gib", "1"], 1, "leave one of them out"),
    ],
)
def test_mistakes_have_a_status_and_a_reason(
    argv: list[str], code: int, named: str, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        result = main([word.format(model=tiny_model) for word in argv])
    except SystemExit as stopped:
        result = stopped.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capfd.readouterr()
    assert result == code
    assert named in (out + err).replace("\n", " ")
    assert "Traceback" not in err


def test_an_address_that_is_not_loopback_is_refused(tiny_model: Path) -> None:
    done = rollout("serve", "--model", str(tiny_model), "--service.endpoint", "tcp://0.0.0.0:0", "--engine.kv-tokens", "4096")
    assert done.returncode == 1
    assert "loopback" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", sorted(commands(Config())))
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: rollout {command}" in capsys.readouterr().out


def ended(process: psutil.Process) -> bool:
    """Also if nobody asked for its exit status: a signal that comes while the child is being started leaves it to init."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def services(parent: int) -> list[psutil.Process]:
    """Children that are `rollout serve`, not helpers of Python's."""
    found = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if "serve" in child.cmdline() else []
    return found


@pytest.mark.long
def test_the_demo_stops_what_it_started_on_ctrl_c(smollm2: Path) -> None:
    process = subprocess.Popen([*ROLLOUT, "demo"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        until(lambda: len(services(process.pid)) == 1, "the service was started", 200)
        (child,) = services(process.pid)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        until(lambda: ended(child), "the service has ended")
    finally:
        process.kill()
        process.stdout.close()


def test_the_program_that_serve_prints_runs(tiny_service: str) -> None:
    program = shlex.split(next_lines(tiny_service, Config())[1].removeprefix("try it: python "))
    done = subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "Sample(" in done.stdout, done.stderr


def test_the_version_names_what_computes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    lines = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["rollout"] == __version__ and lines["torch"] == metadata.version("torch")
    assert f"{isa.best()} (" in lines["kernels"] and lines["arithmetic"].startswith(isa.isa_of(isa.best()).arithmetic)


def test_the_version_says_where_kernels_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SHIPPED", tmp_path)
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cc").touch(mode=0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert version.state_of("plain") == "compiled at first use"
    cached = build._cached("plain", str(tmp_path / "cc"))
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert version.state_of("plain") == "compiled"
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")
    assert version.state_of("plain") == "no compiler"
    (tmp_path / build.library_name("plain")).touch()
    assert version.state_of("plain") == "installed"


def test_help_says_what_each_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and all(line in shown for line in DESCRIPTIONS.values())
    assert DESCRIPTIONS.keys() == commands(Config()).keys()
