"""Which files this program may delete or replace: those that it named, made and owns. Links are never followed.

A name alone is no proof: a folder that the user names may hold files of theirs. So each kind of file that is deleted or
replaced has a content that tells it (`holds`), and everything else stays.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def open_own(path: Path) -> int:
    """Open a file for reading and locking. Returns its descriptor. Raises OSError, PermissionError for what is no regular file
    of this user, for a link, and for a file with a second name (hard link)."""
    held = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    about = os.fstat(held)
    if is_alone(about):
        return held
    os.close(held)
    raise PermissionError(f"{path} is no file of this user alone")


def is_alone(about: os.stat_result) -> bool:
    """Return whether this is a regular file of this user that has no second name."""
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and about.st_nlink == 1


def holds(held: int, content: re.Pattern[bytes]) -> bool:
    """Return whether the whole of an open file, of at most 4 KiB, matches `content`."""
    data = os.pread(held, 4097, 0)
    return len(data) <= 4096 and content.fullmatch(data) is not None


def is_own(path: Path, content: re.Pattern[bytes]) -> bool:
    """Return whether there is a file of this user at `path`, no link, whose whole content matches."""
    try:
        held = open_own(path)
    except OSError:
        return False
    try:
        return holds(held, content)
    finally:
        os.close(held)


def is_there(path: Path) -> bool:
    """Return whether anything has this name, a dangling link included."""
    return os.path.lexists(path)


def is_same(path: Path, held: int) -> bool:
    """Return whether a name is that of the open file."""
    try:
        return os.path.samestat(os.fstat(held), path.lstat())
    except OSError:
        return False


def remove_if_same(path: Path, held: int) -> None:
    """Remove a name if it is still that of the open file."""
    if is_same(path, held):
        with suppress(FileNotFoundError):
            path.unlink()


def open_new(path: Path, mode: int = 0o600) -> int:
    """Make a file that is not there yet, with exactly this mode, and open it. Raises OSError, FileExistsError for any name that
    is taken."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    os.fchmod(held, mode)
    return held


def beside(path: Path) -> Path:
    """Return a hidden name in the same folder, for a file that is to be renamed to `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")
