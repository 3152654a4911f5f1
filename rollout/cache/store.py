"""A folder of entries: bounded in bytes, evicted by last use (LRU), verified by a digest at each read.

    get(name) -> data, or None        put(name, data)        DIR/ab/NAME: MAGIC, SHA-256 of name and data, data

An entry appears whole, by renaming, so a killed process leaves no half of one. What is damaged is deleted and counts as absent.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import Counter, OrderedDict
from pathlib import Path

from rollout.logs import logger

MAGIC = b"rollout cache 1\n"
HEAD = len(MAGIC) + 32
LOCK = "lock"
PINNED = "welcome"
"""prefix of entries that are not evicted"""
NEW = ".new"
"""suffix of a file that is being written"""

log = logger(__name__)


class FolderStore:
    """Entries by name. Names are file names; what precedes each "-" in them is a prefix that `has_prefix` finds.

    Args:
        most_bytes: of all entries; the one that was used longest ago goes first.

    Raises ValueError if another process has the folder open, OSError if it cannot be written."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """bytes of each file, in the order of last use"""
        self._prefixes: Counter[str] = Counter()
        self.bytes = 0
        self.evicted = self.damaged = self.unwritten = 0
        """entries that were deleted for room, that had another digest, and that could not be written"""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ValueError(f"{folder}: another `rollout cache` uses this folder; give each its own") from None
        self._scan()

    def __len__(self) -> int:
        return len(self._sizes)

    def get(self, name: str) -> bytes | None:
        """Return the data of an entry, and note its use. None: there is none, or it is damaged, and is deleted."""
        if name not in self._sizes:
            return None
        path = self._path(name)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError as error:
            log.error("cache entry cannot be read entry=%s reason=%r", name, str(error))
            content = b""
        data = content[HEAD:]
        if content[:HEAD] != _head(name, data):
            self.damaged += 1
            log.error("cache entry is damaged, and is deleted entry=%s", name)
            self._delete(name)
            return None
        self._sizes.move_to_end(name)
        return data

    def put(self, name: str, data: bytes) -> bool:
        """Store an entry, and delete the longest unused ones if there is no room. Returns whether it was stored."""
        size = HEAD + len(data)
        if size > self._most_bytes:
            self.unwritten += 1
            return False
        if name in self._sizes:
            self._delete(name)
        self._evict(size)
        path = self._path(name)
        new = path.with_name(path.name + NEW)
        try:
            path.parent.mkdir(exist_ok=True)
            new.write_bytes(_head(name, data) + data)
            new.rename(path)
        except OSError as error:  # a full disk: groups are answered nevertheless
            new.unlink(missing_ok=True)
            self.unwritten += 1
            log.error("cache entry cannot be written entry=%s reason=%r", name, str(error))
            return False
        self._add(name, size)
        return True

    def has_prefix(self, prefix: str) -> bool:
        """Return whether there is an entry whose name begins with `prefix` and "-"."""
        return self._prefixes[prefix] > 0

    def close(self) -> None:
        """Release the folder."""
        os.close(self._lock)

    def _scan(self) -> None:
        """Find the entries of earlier processes, and delete what they left half-written."""
        found = []
        for path in self._folder.glob("??/*"):
            if path.name.endswith(NEW):
                path.unlink(missing_ok=True)
            else:
                about = path.stat()
                found.append((about.st_mtime_ns, path.name, about.st_size))
        for _, name, size in sorted(found):
            self._add(name, size)
        self._evict(0)

    def _evict(self, size: int) -> None:
        """Delete the longest unused entries until there is room for `size` bytes."""
        while self.bytes + size > self._most_bytes:
            name = next((name for name in self._sizes if not name.startswith(PINNED)), None)
            if name is None:
                return
            self._delete(name)
            self.evicted += 1

    def _path(self, name: str) -> Path:
        return self._folder / name[-2:] / name

    def _add(self, name: str, size: int) -> None:
        self._sizes[name] = size
        self.bytes += size
        self._prefixes.update(_prefixes(name))

    def _delete(self, name: str) -> None:
        self.bytes -= self._sizes.pop(name)
        self._prefixes.subtract(_prefixes(name))
        self._prefixes = +self._prefixes if len(self._prefixes) > 2 * len(self._sizes) + 64 else self._prefixes
        self._path(name).unlink(missing_ok=True)


def _prefixes(name: str) -> list[str]:
    return [name[:i] for i, letter in enumerate(name) if letter == "-"]


def _head(name: str, data: bytes) -> bytes:
    return MAGIC + hashlib.sha256(name.encode() + b"\0" + data).digest()
