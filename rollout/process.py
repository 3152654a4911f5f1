"""The service as a child process: how `rollout generate`, `demo`, `bench` and the tests start one and are sure to end it.

    with service_process(Config(engine=EngineConfig(model="smollm2"))) as service:
        client = RolloutClient(service.endpoint)

The child has its own session, so Ctrl-C reaches only the parent, which then stops the child in order. If the parent is killed,
the pipe to the child's standard input closes, and the child stops by itself.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rollout.config import Config, InputError, dump
from rollout.engine.processes import run_module
from rollout.transport import own_files

STOP_TIMEOUT_S = 15.0
LOCK = ".lock"
"""file of a folder, held by the processes that need it"""
LOCK_CONTENT = b"This folder is removed with the processes of rollout that hold this file.\n"
FOLDER_NAME = re.compile(r"rollout-[a-z]+-[a-z0-9_]{8}")
ADDRESS = rb"(?:ipc://[^\n]*|(?:tcp|http)://[^\n/@]*/?)"
READY = re.compile(rb"(?:" + ADDRESS + rb"(?:\n" + ADDRESS + rb"?)?\n?)?")
"""what a service writes to --ready-file: its address, and perhaps another one"""


class ServiceFailed(RuntimeError):
    """The service process ended before it was ready, or was not ready in time; its own message is on standard error."""


class RunningService(msgspec.Struct, frozen=True):
    """Address and process of a service that is listening."""

    endpoint: str
    pid: int

    def peak_rss_bytes(self) -> int:
        """Return the largest resident memory of the process so far; where the system does not say, the present one."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            import psutil

            return int(psutil.Process(self.pid).memory_info().rss)
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024


@contextmanager
def service_process(config: Config, *, start_timeout_s: float = 300.0, python: str | None = None) -> Iterator[RunningService]:
    """Run `rollout serve` with `config` on a free loopback port until the block ends, however it ends. `python`: the
    interpreter of the environment that it runs in, None = this one.

    Raises ServiceFailed if it is not listening after start_timeout_s.
    """
    service = msgspec.structs.replace(config.service, endpoint="tcp://127.0.0.1:*")
    config = msgspec.structs.replace(config, service=service)
    with Folder("service") as folder:
        toml, ready = folder / "config.toml", folder / "ready"
        toml.write_text(dump(config))
        command = run_module("rollout", "serve", "--config", toml, "--ready-file", ready, python=python)
        child = subprocess.Popen(
            [*command, "--exit-on-stdin-close", "--quiet"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _await_ready(child, ready, start_timeout_s)
            yield RunningService(endpoint=ready.read_text(), pid=child.pid)
        finally:
            _stop(child)


def _await_ready(child: subprocess.Popen[bytes], ready: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready.exists():
        try:
            code = child.wait(timeout=0.02)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise ServiceFailed(f"the service was not listening after {timeout_s:.0f} s") from None
        else:
            raise ServiceFailed(f"the service ended with exit status {code} before it was listening")


def _stop(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"rollout: the service did not stop in {STOP_TIMEOUT_S:.0f} s and was killed", file=sys.stderr)
        child.kill()
        child.wait()
    finally:
        child.stdin.close()


def check_ready_file(path: str | None) -> None:
    """Check that `--ready-file` can appear at `path`, before anything is done that takes time, and takes the place of no file
    but one of an earlier service. Raises InputError."""
    if path is None:
        return
    if os.path.isdir(path):
        raise InputError(f"--ready-file {path}: is a folder; name a file in it")
    if own_files.is_there(Path(path)) and not own_files.is_own(Path(path), READY):
        raise InputError(f"--ready-file {path}: is there, and no service wrote it: it stays; name another file, or move it")
    try:
        with tempfile.NamedTemporaryFile(dir=Path(path).parent, prefix=f".{Path(path).name}."):
            pass
    except OSError as error:
        raise InputError(f"--ready-file {path}: {error.strerror}; name a file in a folder that can be written") from None


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that a process that waits for it never reads a part."""
    temporary = own_files.beside(path)
    with open(own_files.open_new(temporary, 0o644), "w") as file:
        file.write(text)
    temporary.rename(path)


class Folder:
    """A folder for what a process needs while it runs: of this user alone, with a name short enough for sockets in it.

    Removed by `close`, or at the end of a block. A process that was killed leaves its folder unlocked; the next one removes it.

    Example:
        with Folder("restart") as path:
            (path / "serve.toml").write_text(text)
    """

    def __init__(self, what: str) -> None:
        remove_dead()
        self.path = Path(tempfile.mkdtemp(prefix=f"rollout-{what}-"))
        new = self.path / f"{LOCK}.new"
        self.lock = own_files.open_new(new)
        """descriptor, for children that are to hold it as well (`pass_fds`)"""
        fcntl.flock(self.lock, fcntl.LOCK_SH)
        os.write(self.lock, LOCK_CONTENT)
        new.rename(self.path / LOCK)  # held from the first moment on

    @classmethod
    def of_another(cls, path: Path) -> Folder:
        """Hold, and later remove, the folder of a process that was killed, whose children need it. Raises OSError where it is
        gone, or no such folder."""
        folder = cls.__new__(cls)
        folder.path = path
        folder.lock = open_lock(path)
        try:
            fcntl.flock(folder.lock, fcntl.LOCK_SH)
            os.stat(path / LOCK)  # it was not removed before the lock was ours
        except OSError:
            os.close(folder.lock)
            raise
        return folder

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_dead() -> None:
    """Remove the folders of this user that no process holds."""
    for path in Path(tempfile.gettempdir()).glob("rollout-*"):
        with suppress(OSError):  # it belongs to another user, is locked or no folder of ours, or another process removes it
            _remove_if_dead(path)


def open_lock(path: Path) -> int:
    """Open the lock of a folder that a `Folder` made. Returns its descriptor. Raises OSError, PermissionError for any other
    folder."""
    about = path.lstat()
    if not (FOLDER_NAME.fullmatch(path.name) and stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()):
        raise PermissionError(f"{path} is no folder of a process of ours")
    lock = own_files.open_own(path / LOCK)
    if own_files.holds(lock, re.compile(re.escape(LOCK_CONTENT))):
        return lock
    os.close(lock)
    raise PermissionError(f"{path}: its {LOCK} is not ours")


def _remove_if_dead(path: Path) -> None:
    lock = open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
