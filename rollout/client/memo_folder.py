"""Entries of a memo as files in a folder of this user, of bounded size.

    FOLDER/rollout-memo        marks the folder, and is locked while a client uses it
    FOLDER/NAME.memo           MAGIC, then SHA-256 of name and data, then the data

A file is written as NAME.memo.RANDOM.new and then renamed, so a killed process leaves no half of one. A file without our form
of a name, or without MAGIC at its beginning, is neither read nor deleted; one without any content, as a kill or a crash of the
machine leaves it, is ours as well. Links are not followed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import threading
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

from rollout.logs import logger
from rollout.transport.own_files import is_alone

MAGIC = b"rollout memo 1\n"
HEAD = len(MAGIC) + 32
MARKER, ENDING, NEW = "rollout-memo", ".memo", ".new"
WELCOME = "welcome"
"""entry that is never evicted: how the service describes itself"""
OURS = re.compile(r"(welcome|refresh-[0-9a-f]{40}|[0-9a-f]{16}-[0-9a-f]{16}-[0-9a-f]{40})\.memo((?:\.[0-9a-f]{8})?\.new)?")

log = logger(__name__)


class MemoFolder:
    """Entries by name. Thread-safe.

    Args:
        most_bytes: of all entries; the one that was used longest ago goes first.

    Raises ValueError for a folder that is not this user's alone, is neither empty nor a memo, or is in use; OSError if it
    cannot be written."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.path, self._most_bytes = folder, most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """bytes of each file, in the order of last use"""
        self.bytes = 0
        self.evicted = self.damaged = self.unread = self.unwritten = 0
        """entries that were deleted for room, that had another digest, that could not be read, and that could not be written"""
        self._lock = threading.Lock()
        self._folder = _open_folder(folder)
        try:
            self._marker = _marked(folder, self._folder)
            try:
                self._scan()
            except BaseException:
                os.close(self._marker)
                raise
        except BaseException:
            os.close(self._folder)
            raise

    def __len__(self) -> int:
        return len(self._sizes)

    def get(self, name: str) -> bytes | None:
        """Return the data of an entry, and note its use. None: there is none, it cannot be read, or it is damaged."""
        with self._lock:
            if name not in self._sizes:
                return None
            try:
                content = self._read(name)
            except OSError as error:  # of a disk or of this process: the entry may be whole
                self.unread += 1
                log.error("memo entry cannot be read entry=%s reason=%r", name, str(error))
                return None
            data = content[HEAD:]
            if content[:HEAD] != _head(name, data):
                self.damaged += 1
                log.error("memo entry is damaged, and is not used entry=%s", name)
                self._remove(name)
                return None
            self._sizes.move_to_end(name)
            return data

    def put(self, name: str, data: bytes) -> bool:
        """Store an entry, and delete the longest unused ones if there is no room. Returns whether it was stored."""
        size = HEAD + len(data)
        with self._lock:
            if size > self._most_bytes or (name not in self._sizes and self._is_there(name)):
                self.unwritten += 1
                return False
            if name in self._sizes:
                self._sizes.move_to_end(name)
            self._evict(size - self._sizes.get(name, 0))
            try:
                self._write(name, _head(name, data) + data)
            except OSError as error:  # a full disk: groups are computed nevertheless
                self.unwritten += 1
                log.error("memo entry cannot be written entry=%s reason=%r", name, str(error))
                return False
            self._forget(name)  # now: until here the old file is there
            self._sizes[name] = size
            self.bytes += size
            return True

    def has_prefix(self, prefix: str) -> bool:
        """Return whether there is an entry whose name begins with `prefix`."""
        with self._lock:
            return any(name.startswith(prefix) for name in self._sizes)

    def close(self) -> None:
        """Release the folder. May be repeated."""
        with self._lock:
            for descriptor in (self._marker, self._folder) if self._folder >= 0 else ():
                os.close(descriptor)
            self._folder = self._marker = -1
            self._sizes.clear()

    def _scan(self) -> None:
        """Find the entries of earlier processes, and delete what they left half-written."""
        found = []
        with os.scandir(self._folder) as files:
            for file in files:
                if (named := OURS.fullmatch(file.name)) is None:
                    continue
                about = file.stat(follow_symlinks=False)
                if not is_alone(about):
                    continue
                if named[2]:
                    self._remove_file(file.name)
                else:
                    found.append((about.st_mtime_ns, named[1], about.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.bytes += size
        self._evict(0)

    def _evict(self, size: int) -> None:
        """Delete the longest unused entries until there is room for `size` bytes."""
        while self.bytes + size > self._most_bytes:
            name = next((name for name in self._sizes if name != WELCOME), None)
            if name is None:
                return
            self.evicted += self._remove(name)

    def _read(self, name: str) -> bytes:
        """Return the content of a file; "" for what is not ours. Raises OSError."""
        with open(self._open(name + ENDING, os.O_RDONLY), "rb") as file:
            about = os.fstat(file.fileno())
            if not is_alone(about) or about.st_size > self._most_bytes:
                return b""
            os.utime(file.fileno())
            return file.read(about.st_size)

    def _write(self, name: str, content: bytes) -> None:
        """Write a file as a whole. Raises OSError."""
        new = f"{name}{ENDING}.{secrets.token_hex(4)}{NEW}"
        with open(self._open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            try:
                file.write(content)
                file.flush()
                os.rename(new, name + ENDING, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except BaseException:
                os.unlink(new, dir_fd=self._folder)  # made here
                raise

    def _open(self, file: str, flags: int) -> int:
        return os.open(file, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=self._folder)

    def _is_there(self, name: str) -> bool:
        """Return whether a file has the name of an entry that is not ours."""
        try:
            os.stat(name + ENDING, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _forget(self, name: str) -> None:
        self.bytes -= self._sizes.pop(name, 0)

    def _remove(self, name: str) -> bool:
        """Delete an entry, if its file is ours. Returns whether it was."""
        self._forget(name)
        return self._remove_file(name + ENDING)

    def _remove_file(self, file: str) -> bool:
        try:
            with open(self._open(file, os.O_RDONLY), "rb") as opened:
                if not is_alone(os.fstat(opened.fileno())) or not _begins_as_ours(opened):
                    return False
                os.unlink(file, dir_fd=self._folder)
        except OSError:
            return False
        return True


def _open_folder(folder: Path) -> int:
    """Create a folder if there is none, and open it. Raises ValueError, OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"memo {folder}: {error.strerror}: name a folder, and no link to one") from None
    about = os.fstat(descriptor)
    why = ""
    if about.st_uid != os.geteuid():
        why = f"it belongs to user {about.st_uid}: name a folder of the user of this process"
    elif about.st_mode & 0o077:
        why = f"others can read it (mode {about.st_mode & 0o777:o}); chmod 700 {folder}"
    if why:
        os.close(descriptor)
        raise ValueError(f"memo {folder}: {why}")
    return descriptor


def _marked(path: Path, folder: int) -> int:
    """Open and lock the file that marks a memo, and make it in an empty folder. Raises ValueError, OSError."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    is_new = set(os.listdir(folder)) <= {MARKER}  # a process that made it may have been killed before it wrote
    try:
        marker = os.open(MARKER, flags | (os.O_CREAT if is_new else 0), 0o600, dir_fd=folder)
    except OSError:
        raise ValueError(f"memo {path}: the folder is neither empty nor a memo: name a new one") from None
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begin = os.pread(marker, len(MAGIC) + 1, 0)
        if is_alone(os.fstat(marker)) and is_new and not begin.strip(b"\0"):
            os.pwrite(marker, MAGIC, 0)
        elif not is_alone(os.fstat(marker)) or begin != MAGIC:
            raise ValueError(f"memo {path}: {MARKER} in it is not of this version of rollout: name a new folder")
    except BlockingIOError:
        os.close(marker)
        raise ValueError(f"memo {path}: another client uses this folder; give each its own") from None
    except BaseException:
        os.close(marker)
        raise
    return marker


def _begins_as_ours(file: BinaryIO) -> bool:
    """Return whether a file begins with MAGIC, or has no content: it is empty, or has nothing but zeros."""
    begin = file.read(len(MAGIC))
    if begin == MAGIC:
        return True
    while begin and not begin.strip(b"\0"):
        begin = file.read(1 << 20)
    return not begin


def _head(name: str, data: bytes) -> bytes:
    return MAGIC + hashlib.sha256(name.encode() + b"\0" + data).digest()
