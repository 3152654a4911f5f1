"""Folders of processes are gone with them, also after SIGKILL; nobody else's are touched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.fleet.launcher import Host, Launcher, RouterFolder
from rollout.process import Folder, remove_dead

ROOT = Path(__file__).parents[2]
WAIT = 60.0
HOLDS = """
import sys
from rollout.process import Folder
folder = Folder("test")
(folder.path / "file").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder."""
    words = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_ends_with_its_block(place: Path) -> None:
    with Folder("test") as path:
        assert path.parent == place and path.stat().st_mode & 0o777 == 0o700
        (path / "file").touch()
    assert not list(place.iterdir())


def test_a_killed_process_s_folder_is_removed_by_the_next(holder: tuple[subprocess.Popen[str], Path], place: Path) -> None:
    process, path = holder
    with Folder("test"):
        assert (path / "file").exists()  # it lives
    process.kill()
    process.wait(WAIT)
    assert path.exists()
    with Folder("test") as own:
        assert [*place.iterdir()] == [own]


def test_what_is_no_such_folder_stays(place: Path) -> None:
    (place / "rollout-other").mkdir()
    (place / "rollout-file").touch()
    (place / "rollout-link").symlink_to(place / "rollout-other")
    (place / "other").mkdir()
    (place / "other" / ".lock").touch()
    remove_dead()
    assert len(list(place.iterdir())) == 4


def test_a_folder_that_another_process_needs_stays(holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = holder
    taken = Folder.of_another(path)
    process.kill()
    process.wait(WAIT)
    remove_dead()
    assert path.exists()
    taken.close()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        Folder.of_another(path)


def test_replicas_that_outlive_their_router_keep_its_folder(tmp_path: Path) -> None:
    """Their sockets are there."""
    command = [sys.executable, "-c", "__import__('time').sleep(600)"]
    launcher = Launcher(lambda name: command, [Host()], RouterFolder(tmp_path / "note"))
    launcher.poll()
    os.close(launcher.folder.folder.lock)  # all that a kill of the router does to it
    remove_dead()
    assert launcher.folder.path.exists()
    second = Launcher(lambda name: command, [Host()], RouterFolder(tmp_path / "note"))
    assert second.folder.returning and second.folder.path == launcher.folder.path
    child = launcher._processes["local-0"].child
    assert child is not None and second.admit("local-0", child.pid)
    second.close()
    assert child.wait(WAIT) is not None and not launcher.folder.path.exists()
