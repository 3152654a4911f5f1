"""Follows a page of the documentation as its reader would: in an empty folder, from top to bottom.

`SUBSTITUTED` and `TOOLS` are all that differs from the page: free ports, this machine's address in place of another host's, and
a tiny model in the place where `smollm2` is cached.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from rollout import RolloutClient, models
from rollout.commands import arguments
from rollout.config import InputError, load
from rollout.engine.paths import cache_dir
from tests.support.ports import free_port
from tests.support.snippets import SHELL, Snippet, commands_of, words_of

ROOT = Path(__file__).parents[2]
WAIT_S = 200.0
"""for a command to end and a server to be ready: a bound for hangs only"""
PORTS = ("5655", "5656", "8000", "8001", "9000", "9100")
"""each is replaced by a free one"""
SUBSTITUTED = (
    (".venv/bin/", ""),
    ("tcp://10.0.0.5:", "tcp://127.0.0.1:"),
    ("tcp://*:", "tcp://127.0.0.1:"),
    ("--model /path/to/model", "smollm2"),
    ("checkpoints/step-100", "$ROLLOUT_CACHE/smollm2-*"),
)
SERVERS = (["rollout", "serve"], ["rollout", "http"])
"""commands that run until the page ends, or until another one serves at the same address"""
SHARED = ("rollout serve smollm2",)
"""commands that pages share: the first one starts it"""
PROGRAM = re.compile(r"python (\w+\.py)((?: [^\s|&;<>]+)*)")
"""a command that runs a program of the page: in this process, which has imported torch; of a whole page in its own"""
TOOLS = {
    "python": """exec {python} "$@" """,
    "rollout": """
command=$1
case "$command $*" in  # at the page's address, unless the command names one
  *--join*|*--service.endpoint*|*--address*|serve*--port*) ;;
  serve*--host*) set -- "$@" --port "$PORT_5655" ;;
  serve*) set -- "$@" --service.endpoint "tcp://127.0.0.1:$PORT_5655" ;;
  status*|top*|fleet*|http*|pause*|resume*|drain*|sleep*|wake*|abort*|refresh*)
    set -- "$@" --address "tcp://127.0.0.1:$PORT_5655" ;;
esac
case "$command $*" in  # little memory
  *--engine.kv-*|generate*--address*) ;;
  serve*|generate*) set -- "$@" --engine.kv-tokens 65536 --engine.cpu-offload-gib 0 ;;
esac
case "$command $*" in
  http*--port*) ;;
  http*) set -- "$@" --port "$PORT_8000" ;;
  top*) set -- "$@" --once ;;
  pause*|drain*|sleep*) timeout 5 {python} -m rollout "$@"; [ $? = 124 ]; exit $? ;;  # which last until they are ended
esac
if [ -n "$READY" ]; then set -- "$@" --ready-file "$READY"; fi
if [ "$command" = serve ]; then set -- "$@" --exit-on-stdin-close; fi  # with the test
exec {python} -m rollout "$@"
""",
}
"""what the names in a command run"""


class Broken(AssertionError):
    """A snippet does not work as printed."""


class Desk:
    """What all pages have: programs, a cache in which `smollm2` is a tiny model, and the servers that they share."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.cache, programs = folder / "cache", folder / "bin"
        programs.mkdir()
        self.cache.mkdir()
        for name, script in TOOLS.items():
            (programs / name).write_text("#!/bin/sh\n" + script.replace("{python}", sys.executable))
            (programs / name).chmod(0o700)
        (self.cache / models.smollm2_folder().name).symlink_to(model)
        (self.cache / "native").symlink_to(cache_dir() / "native")  # compiled kernels
        (cache_dir() / "native").mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "ROLLOUT_CACHE": str(self.cache),
            "ROLLOUT_COOKIES": str(folder / "cookies"),
            "WANDB_MODE": "disabled",
        }
        self.shared: dict[str, Server] = {}

    def close(self) -> None:
        """Stop the shared servers."""
        for server in self.shared.values():
            server.stop()


class Server:
    """A command that serves."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str], ports: dict[str, int]) -> None:
        self.command, self.ports = command, ports
        self._ready, self._log = folder / f"ready-{time.monotonic_ns()}", folder / f"log-{time.monotonic_ns()}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=folder, env={**environment, "READY": str(self._ready)}, stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def await_ready(self) -> None:
        """Wait until it listens. Raises Broken if it ends before."""
        deadline = time.monotonic() + WAIT_S
        while not self._ready.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise Broken(f"{self.command} ended with {self._process.wait(0.02)}: {self._log.read_text()[-2000:]}")
            if time.monotonic() > deadline:
                raise Broken(f"{self.command} is not ready after {WAIT_S} s: {self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


class Reader:
    """Runs the snippets of one page, in order.

    Args:
        folder: an empty one.
        long: also run what is marked long.
    """

    def __init__(self, desk: Desk, folder: Path, long: bool = False) -> None:
        self.desk, self.folder, self.long = desk, folder, long
        self.counts = Counter[str]()
        """snippets and commands, by what was done with them"""
        self.ports = {port: free_port() for port in PORTS}
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self._servers: dict[str, Server] = {}
        self._printed = ""

    def read(self, snippet: Snippet) -> None:
        """Do what the page says. Raises Broken."""
        self._printed = ""
        try:
            if snippet.shown:
                self.counts["shown"] += 1
            elif why := self._not_here(snippet):
                self.counts[why] += self._check(snippet)
            elif (name := snippet.mark("file")) is not None:
                (self.folder / name).write_text(self._substituted(snippet.text))
                self._check_syntax(snippet)
                self.counts["run"] += 1
            else:
                self._run(snippet)
                self._compare(snippet)
        except Broken:
            raise
        except (Exception, SystemExit) as error:
            raise Broken(f"{snippet}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Stop servers and clients that the page has left open."""
        for value in self.namespace.values():
            if isinstance(value, RolloutClient):
                value.close()
        for server in self._servers.values():
            if server not in self.desk.shared.values():
                server.stop()

    def _not_here(self, snippet: Snippet) -> str | None:
        """Return why a snippet is only checked, None if it is run."""
        if snippet.mark("elsewhere") is not None:
            return "elsewhere"
        if snippet.mark("long") is not None and not self.long:
            return "long"
        return snippet.mark("not run:")

    def _run(self, snippet: Snippet) -> None:
        if snippet.language in SHELL:
            for command in commands_of(snippet):
                self._run_command(snippet, command)
            self._await_servers()
            return
        self.counts["run"] += 1
        if snippet.language == "python":
            self._await_servers()
            self._run_python(snippet)
        else:
            self._check_syntax(snippet)

    def _run_python(self, snippet: Snippet) -> None:
        """Execute it in this process: its line numbers are those of the page."""
        tree = ast.parse(self._substituted(snippet.text), str(snippet.page))
        ast.increment_lineno(tree, snippet.line - 1)
        namespace = {"__name__": "__main__"} if snippet.mark("apart") is not None else self.namespace
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, snippet.page, "exec"), namespace)
        self._printed += printed.getvalue()

    def _run_command(self, snippet: Snippet, command: str) -> None:
        words, where = words_of(command), f"{snippet}: {command.strip()}"
        if check := CHECKED.get(words[0]):
            self.counts["checked"] += 1
            check(where, words[1:])
            return
        self.counts["run"] += 1
        if words[:2] in SERVERS:
            self._serve(command)
            return
        self._await_servers()
        if not self.long and (program := PROGRAM.fullmatch(self._substituted(command).strip())):
            self._run_program(program[1], words_of(program[2]))
            return
        done = subprocess.run(
            ["bash", "-c", self._substituted(command)], cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        self._printed += done.stdout
        if done.returncode != 0:
            raise Broken(f"{where} ends with {done.returncode}: {done.stderr[-2000:]}")

    def _run_program(self, name: str, arguments: list[str]) -> None:
        """Run a program as `python NAME` does, without the start of a process."""
        printed, argv = io.StringIO(), sys.argv
        sys.argv = [name, *arguments]
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(str(self.folder / name), run_name="__main__")
        finally:
            sys.argv = argv
        self._printed += printed.getvalue()

    def _serve(self, command: str) -> None:
        """Start a server, in place of the one that has its address; replicas have addresses of their own."""
        words = words_of(self._substituted(command))
        plain = " ".join(words)
        place = plain if "--join" in words else words[1]
        before = self._servers.get(place)
        if before is not None:
            before.await_ready()
            if before not in self.desk.shared.values():
                before.stop()
        if plain in SHARED and plain in self.desk.shared:
            server = self.desk.shared[plain]
            self.ports["5655"] = server.ports["5655"]
        else:
            if plain in SHARED or before in self.desk.shared.values():
                self.ports["5655"] = free_port()
            server = Server(self._substituted(command), self.folder, self._environment(), dict(self.ports))
            if plain in SHARED:
                self.desk.shared[plain] = server
        self._servers[place] = server

    def _compare(self, snippet: Snippet) -> None:
        """Search what the snippet has printed for what the page expects."""
        expected = snippet.mark("prints")
        if expected is not None and not re.search(expected, self._printed):
            raise Broken(f"{snippet}: prints {self._printed[-500:]!r}, not {expected!r}")

    def _await_servers(self) -> None:
        for server in self._servers.values():
            server.await_ready()

    def _environment(self) -> dict[str, str]:
        return {
            **self.desk.environment,
            "HOME": str(self.folder),
            **{f"PORT_{port}": str(free) for port, free in self.ports.items()},
        }

    def _substituted(self, text: str) -> str:
        for printed, used in SUBSTITUTED:
            text = text.replace(printed, used)
        return re.sub(rf"\b({'|'.join(self.ports)})\b", lambda port: str(self.ports[port[0]]), text)

    def _check(self, snippet: Snippet) -> int:
        """Check what is not run. Returns the number of blocks and commands."""
        if (path := snippet.mark("elsewhere")) is not None:
            check_test(str(snippet), path)
        if snippet.language not in SHELL:
            self._check_syntax(snippet)
            return 1
        done = subprocess.run(["bash", "-n"], input=snippet.text, capture_output=True, text=True)
        if done.returncode != 0:
            raise Broken(f"{snippet}: {done.stderr}")
        if snippet.text.startswith("#!"):
            return 1
        commands = commands_of(snippet)
        for command in commands:
            self._check_command(f"{snippet}: {command.strip()}", words_of(command))
        return len(commands)

    def _check_command(self, where: str, words: list[str]) -> None:
        check = CHECKED.get(words[0])
        if check is not None:
            check(where, words[1:])
        elif words[0] == "python":
            check_module(where, words[1:])
        elif words[0] == "rollout":
            check_arguments(where, [word for word in words[1:] if word != "&"])

    def _check_syntax(self, snippet: Snippet) -> None:
        text = self._substituted(snippet.text)
        if snippet.language == "python":
            ast.parse(text, snippet.page)
        elif snippet.language in ("json", "jsonl"):
            for each in text.splitlines() if snippet.language == "jsonl" else [text]:
                json.loads(each)
        elif snippet.language == "yaml":
            list(yaml.safe_load_all(text))
        elif snippet.language == "toml" and (snippet.excepted or snippet.mark("elsewhere") is not None):
            tomllib.loads(text)
        elif snippet.language == "toml":
            file = self.folder / (snippet.mark("file") or "snippet.toml")
            file.write_text(text)
            load(file)


def check_arguments(where: str, words: list[str]) -> None:
    """Parse the arguments of `rollout`. Raises Broken."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            arguments.parse(words)
        except InputError as error:
            raise Broken(f"{where}: {error}") from error
        except SystemExit as end:
            if end.code != 0:
                raise Broken(f"{where}: {said.getvalue()[:1000]}") from None


def check_pip(where: str, words: list[str]) -> None:
    """Check an installation against pyproject.toml: this project with extras that it has, or packages that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = {_name_of(each) for each in [*project["dependencies"], *(each for some in extras.values() for each in some)]}
    wanted = [word for word in words[1:] if not word.startswith(("-", "dist", "https://"))]
    if words[0] not in ("install", "wheel"):
        raise Broken(f"{where}: not an installation")
    for each in wanted:
        own = re.fullmatch(rf"(?:\.|{project['name']})(?:\[([\w,-]+)\])?", each)
        unknown = set((own[1] or "").split(",")) - {"", *extras} if own else {_name_of(each)} - listed
        if unknown:
            raise Broken(f"{where}: pyproject.toml has no {', '.join(sorted(unknown))}")


def _name_of(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    return "" if name is None else name[0].lower().replace("_", "-")


def check_make(where: str, words: list[str]) -> None:
    """Check that the Makefile has the target, and uses the variables."""
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        if not re.search(rf"\b{name}\b" if is_variable else rf"^{re.escape(name)}:", makefile, re.MULTILINE):
            raise Broken(f"{where}: the Makefile has no {name}")


def check_test(where: str, path: str) -> None:
    """Check that a file of tests exists."""
    if not path.startswith("tests/") or not (ROOT / path).is_file():
        raise Broken(f"{where}: there is no {path}")


def check_module(where: str, words: list[str]) -> None:
    """Check that the module of `python -m` exists, if it is of this project."""
    if words[:1] == ["-m"] and words[1].startswith("rollout."):
        path = words[1].replace(".", "/") + ".py"
        if not (ROOT / path).is_file() and not (ROOT / path.removeprefix("rollout/")).is_file():
            raise Broken(f"{where}: there is no module {words[1]}")


CHECKED: dict[str, Callable[[str, list[str]], None]] = {"pip": check_pip, "make": check_make}
"""commands that are compared with files of this project and never run"""


@contextmanager
def reading(desk: Desk, folder: Path, long: bool = False) -> Iterator[Reader]:
    """Read a page; what it started ends with the block."""
    reader = Reader(desk, folder, long)
    try:
        yield reader
    finally:
        reader.close()
