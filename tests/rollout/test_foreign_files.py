"""Files that are not ours stay as they are, in every folder and under every name that this program writes to."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.commands.sample_file import Prompt, complete_groups, keep_groups
from rollout.config import InputError
from rollout.engine.forward.shapes import write_configuration
from rollout.engine.values import Limits
from rollout.fleet.launcher import RouterFolder
from rollout.process import LOCK, Folder, check_ready_file, remove_dead, write_atomically
from rollout.recipes.program import make_folder_for_model
from rollout.transport import own_files
from rollout.transport.keys import cookie, files
from rollout.transport.keys.cookie import cookie_file
from rollout.transport.sockets import ServiceEnd

LIMITS = Limits()
FORM = "127.0.0.1:5655-0123456789abcdef"
"""a name as secrets have"""


@pytest.fixture(autouse=True)
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(cookie.FOLDER_VARIABLE, str(tmp_path))
    tmp_path.chmod(0o700)
    return tmp_path


def content(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else path.is_dir()
        for path in folder.rglob("*")
    }


def put(folder: Path) -> dict[str, object]:
    """Files of the user, some with names or contents as ours have. Returns what must be there later."""
    secret = b"a" * 64
    for name in ("id_ed25519", "model.safetensors", "router.journal", ".hidden"):
        (folder / name).write_bytes(b"mine")
    (folder / "a-digest").write_bytes(secret)  # the content of a secret
    (folder / FORM).write_bytes(b"mine")  # the name of a secret
    (folder / FORM.replace("5655", "5656")).write_bytes(secret + b"\n")
    (folder / FORM.replace("5655", "5657")).symlink_to(folder / "a-digest")
    (folder / FORM.replace("5655", "5658")).symlink_to(folder / "nowhere")
    os.link(folder / "a-digest", folder / FORM.replace("5655", "5659"))
    (folder / FORM.replace("5655", "5660")).mkdir()
    shared = folder / FORM.replace("5655", "5661")
    shared.write_bytes(secret)
    shared.chmod(0o644)
    return content(folder)


def test_a_service_leaves_what_is_beside_its_secret(where: Path) -> None:
    before = put(where)
    end = ServiceEnd("tcp://127.0.0.1:*", LIMITS)
    end.close()
    assert content(where) == before


def test_a_dead_service_s_secret_is_removed(where: Path) -> None:
    """The control: the same folder, and the one file that is ours."""
    before = put(where)
    dead = where / FORM.replace("5655", "5662")
    os.close(own_files.open_new(dead))
    dead.write_bytes(b"b" * 64)
    cookie.remove_dead(where)
    assert content(where) == before


@pytest.mark.parametrize("kind", ["file", "link", "folder", "dangling"])
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_secret_takes_nobody_s_place(kind: str, scheme: str, where: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}" if scheme == "tcp" else f"ipc://{where}/s"
    path = cookie_file(endpoint)
    (where / "mine").write_bytes(b"c" * 64)
    if kind == "file":
        path.write_bytes(b"mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(where / ("mine" if kind == "link" else "nowhere"))
    before = content(where)
    with pytest.raises(ValueError, match=r"which stays: move it"):
        ServiceEnd(endpoint, LIMITS)
    (where / "s").unlink(missing_ok=True)  # its own socket
    assert content(where) == before


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_socket_takes_nobody_s_place(kind: str, where: Path) -> None:
    """libzmq deletes what is at the path of ipc://."""
    path = where / "s"
    (where / "mine").write_bytes(b"mine")
    path.mkdir() if kind == "folder" else path.symlink_to(where / "mine") if kind == "link" else path.write_bytes(b"mine")
    before = content(where)
    with pytest.raises(ValueError, match="no socket of this user: it stays"):
        ServiceEnd(f"ipc://{path}", LIMITS)
    assert content(where) == before


def test_a_socket_at_which_somebody_listens_stays(where: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(where / "s"))
        listening.listen(1)
        with pytest.raises(ValueError, match="a process listens at"):
            ServiceEnd(f"ipc://{where}/s", LIMITS)
        assert (where / "s").is_socket()
    end = ServiceEnd(f"ipc://{where}/s", LIMITS)  # the control: that of a process that has ended is replaced
    end.close()


def test_a_socket_of_another_kind_stays(where: Path) -> None:
    """Whatever the error is that asking it brings, it is told with the path, and the end is closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(where / "s"))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ValueError, match=r"cannot listen at ipc://.*/s is there, and is not free \("):
            ServiceEnd(f"ipc://{where}/s", LIMITS)
        assert (where / "s").is_socket() and len(os.listdir("/proc/self/fd")) == before


def test_key_files_leave_temporary_files_of_others(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files.secrets, "token_hex", lambda n: "0" * 2 * n)
    (where / ".service.json.00000000").write_text("mine")
    with pytest.raises(files.BadKeys, match="exists"):
        files.create(where / "service.json", "tcp://127.0.0.1:1")
    assert content(where) == {".service.json.00000000": b"mine"}


def test_a_link_to_a_key_file_stays_a_link(where: Path) -> None:
    files.create(where / "real.json", "tcp://127.0.0.1:1")
    (where / "service.json").symlink_to(where / "real.json")
    files.add(where / "service.json", "me", ("rollout",), where / "me.json")
    assert (where / "service.json").is_symlink() and len(files.read_service(where / "real.json").clients) == 1
    assert sorted(path.name for path in where.iterdir()) == ["me.json", "real.json", "service.json"]


@pytest.mark.parametrize("lock", [b"", b"mine", None], ids=["empty", "other", "link"])
def test_folders_with_a_lock_of_others_stay(lock: bytes | None, where: Path) -> None:
    for name in ("rollout-data", "rollout-data-abcdefgh"):
        (where / name).mkdir()
        (where / name / "mine").touch()
        if lock is None:
            with Folder("test") as own:
                (where / "lock").write_bytes((own / LOCK).read_bytes())
            (where / name / LOCK).symlink_to(where / "lock")
        else:
            (where / name / LOCK).write_bytes(lock)
    before = content(where)
    remove_dead()
    assert content(where) == before


def test_a_note_of_others_stays(where: Path) -> None:
    (where / "journal.replicas").write_text("mine")
    before = content(where)
    with pytest.raises(FileExistsError, match="no router wrote it"):
        RouterFolder(where / "journal.replicas", "")
    assert content(where) == before


@pytest.fixture
def locked(where: Path) -> Iterator[Path]:
    """A folder of the user with a lock that somebody holds."""
    folder = where / "rollout-fleet-abcdefgh"
    folder.mkdir()
    (folder / "mine").touch()
    with (folder / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        yield folder


def test_a_note_makes_no_folder_ours(where: Path, locked: Path) -> None:
    (where / "journal.replicas").write_text(f"{locked}\n\n")
    RouterFolder(where / "journal.replicas", "").close()
    assert (locked / "mine").exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_ready_file_takes_nobody_s_place(kind: str, where: Path) -> None:
    (where / "mine").write_text("mine")
    (where / "ready").symlink_to(where / "mine") if kind == "link" else (where / "ready").write_text("mine")
    with pytest.raises(InputError, match="no service wrote it"):
        check_ready_file(str(where / "ready"))
    (where / "ready").unlink()
    for url in ("postgres://me:secret@db/mine", "https://example.org/", "http://me:secret@proxy:80", "tcp://h:1\nmine", "x://"):
        (where / "ready").write_text(f"{url}\n")
        with pytest.raises(InputError, match="no service wrote it"):
            check_ready_file(str(where / "ready"))
    (where / "ready").unlink()
    for text in ("tcp://127.0.0.1:1", "ipc:///tmp/a b@c", "http://[::1]:1\nhttp://127.0.0.1:2\n", "http://127.0.0.1:1\n\n", ""):
        write_atomically(where / "ready", text)
        check_ready_file(str(where / "ready"))  # the control: that of an earlier service is replaced


def test_a_link_to_a_file_of_samples_stays_a_link(where: Path) -> None:
    lines = [f'{{"group_id":"{id}","index":0,"finish_reason":"stop","prompt_tokens":1,"prompt":"p"}}\n' for id in "ab"]
    (where / "real").write_text("".join(lines))
    (where / "real").chmod(0o600)
    (where / "out").symlink_to(where / "real")
    ids = complete_groups(where / "out", {id: Prompt(id, "p", [1]) for id in "ab"}, 1)
    keep_groups(where / "out", ids - {"a"})
    assert (where / "out").is_symlink() and (where / "real").read_text() == lines[1]
    assert (where / "real").stat().st_mode & 0o777 == 0o600 and len(list(where.iterdir())) == 2


def test_a_model_is_not_saved_over_another(where: Path) -> None:
    (where / "model-00001-of-00002.safetensors").write_text("mine")
    with pytest.raises(InputError, match="new or an empty folder"):
        make_folder_for_model(where)
    make_folder_for_model(where / "new")


def test_a_drawn_model_is_not_written_over_a_real_one(where: Path) -> None:
    class Config:
        def to_json_string(self) -> str:
            return "{}"

    (where / "config.json").write_text("mine")
    with pytest.raises(FileExistsError, match="it stays"):
        write_configuration(Config(), where)
    assert content(where) == {"config.json": b"mine"}
    write_configuration(Config(), where / "new")
    write_configuration(Config(), where / "new")
