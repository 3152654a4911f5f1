"""Files of the user in every folder that the service writes to: they must survive untouched."""

from __future__ import annotations

from pathlib import Path

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
}


def put(folder: Path) -> None:
    """Write the files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def harmed(folder: Path) -> list[str]:
    """List the files that are gone or changed."""
    return [name for name, content in FILES.items() if not (folder / name).is_file() or (folder / name).read_bytes() != content]
