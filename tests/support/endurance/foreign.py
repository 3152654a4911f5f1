"""Files of the user in every folder that the service writes to: they must survive untouched, with their mode and owner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

FILES = {
    "id_ed25519": b"a key",
    "model.safetensors": b"a model",
    "127.0.0.1:5655-0123456789abcdef": b"a name as secrets have",
    "a-digest": b"a" * 64,
    "journal.replicas.old": b"mine",
    "draft.new": b"mine",
    "ab/draft.new": b"mine",
    "rollout-data-abcdefgh/.lock": b"a lock of mine",
    "rollout-data-abcdefgh/data": b"mine",
    ".smollm2-abcdefgh/data": b"mine",
    f"{'a' * 16}-{'b' * 16}-{'c' * 40}.memo": b"a name as entries of a memo have",
    f"{'a' * 16}-{'b' * 16}-{'d' * 40}.memo.new": b"mine",
    "other.cookie": b"beside a socket",
}
MODES = (0o600, 0o644, 0o400)
LINK, TARGET = "link.new", "id_ed25519"


class Seen(NamedTuple):
    """A file as it was written."""

    content: bytes
    mode: int
    owner: tuple[int, int]
    changed_ns: int
    """when it was made, written, renamed, or given another mode or owner"""


def seen(path: Path) -> Seen | None:
    """Read a file, or a link. None: there is none."""
    try:
        about = path.lstat()
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
    except OSError:
        return None
    return Seen(content, about.st_mode, (about.st_uid, about.st_gid), about.st_ctime_ns)


class Foreign:
    """The files of one folder, which is made if there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number, (name, content) in enumerate(FILES.items()):
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            path.chmod(MODES[number % len(MODES)])
        (folder / LINK).symlink_to(TARGET)
        self._written = {name: seen(folder / name) for name in (*FILES, LINK)}

    def __len__(self) -> int:
        return len(self._written)

    def harmed(self) -> list[str]:
        """List the files that are gone, or have another content, mode or owner, or were touched."""
        return [name for name, before in self._written.items() if before is None or seen(self.folder / name) != before]
