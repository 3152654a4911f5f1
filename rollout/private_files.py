"""Files that a service writes for its user alone: the ledger and the journal.

What is there already is taken only if it is a regular file of this user (`own_files.is_alone`) that no other user can read or
write. Links are not
followed, so a name never leads to another file than the one that was named.
"""

from __future__ import annotations

import errno
import os
import stat

from rollout.config import InputError
from rollout.transport.own_files import is_alone


def open_private(path: str, what: str, flags: int = 0) -> int:
    """Open a file for reading and writing, mode 0600, and create it if there is none. Returns the descriptor.

    Args:
        what: name of the file in messages.
        flags: more flags of `os.open`.

    Raises InputError for a file that is not this user's alone, and OSError."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{what} {path}: it is a link: name the file itself") from None
        raise
    try:
        check_private(os.fstat(file), path, what)
    except BaseException:
        os.close(file)
        raise
    return file


def check_if_there(path: str, what: str) -> None:
    """Raises InputError if something has this name that is not a file of this user alone."""
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{what} {path}: {error.strerror}") from None
    check_private(about, path, what)


def check_private(about: os.stat_result, path: str, what: str) -> None:
    """Raises InputError unless this is a regular file of this user, with one name, that no other user can read or write."""
    if not stat.S_ISREG(about.st_mode):
        kind = "a link" if stat.S_ISLNK(about.st_mode) else "no regular file"
        raise InputError(f"{what} {path}: it is {kind}; name a file, or a new one")
    if about.st_uid != os.geteuid():
        raise InputError(f"{what} {path}: it belongs to user {about.st_uid}; it must belong to the user of this process")
    if not is_alone(about):
        raise InputError(f"{what} {path}: it has {about.st_nlink} names (hard links); name a file that has one")
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"{what} {path}: others can read it (mode {about.st_mode & 0o777:o}); chmod 600 {path}")
