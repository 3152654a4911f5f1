"""The file of a ledger: a header, then frames whose digests form a chain.

    header    rollout ledger 2\\n
    frame     length (4 bytes, little-endian)   payload   digest (8 bytes): BLAKE2b of the digest before and the payload

A frame that is left out, exchanged or changed breaks the chain. So the digest of the last frame names the whole file. The chain
detects accidental changes; it does not detect a file that was rewritten as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from rollout.config import InputError

HEADER = b"rollout ledger 2\n"
"""the number is the version of the format: another meaning of a record gets another one"""
NAME = b"rollout ledger "
CHUNK = 1 << 16
"""bytes that are searched at once"""
LENGTH, DIGEST = 4, 8
"""bytes"""
MOST_BYTES = 1 << 30
"""of a payload"""
START = bytes(DIGEST)
"""digest before the first frame"""


class DamagedLedger(InputError):
    """A ledger has bytes that its writer did not write."""


class Frame(NamedTuple):
    """One frame of a file."""

    payload: memoryview
    end: int
    """bytes of the file up to its end"""
    digest: bytes


class Chain:
    """Makes the frames of a file. digest: of the frame before the first one to make."""

    def __init__(self, digest: bytes = START) -> None:
        self.digest = digest

    def frame(self, payload: bytes) -> bytes:
        """Return the next frame."""
        self.digest = linked(self.digest, payload)
        return len(payload).to_bytes(LENGTH, "little") + payload + self.digest


def linked(before: bytes, payload: bytes | memoryview) -> bytes:
    """Return the digest of a frame. before: that of the frame before."""
    return hashlib.blake2b(payload, digest_size=DIGEST, key=before).digest()


def frames(data: memoryview) -> Iterator[Frame]:
    """Yield the frames of a file up to its end or to a torn one: the beginning of a frame whose end was never written, or is
    zeros, which a file system may leave when the machine crashes. Raises DamagedLedger where anything else is wrong."""
    at, digest = header_of(data), START
    while (frame := _frame(data, at, digest)) is not None:
        yield frame
        at, digest = frame.end, frame.digest
    if at < len(data) and not _torn(data, at):
        raise DamagedLedger(f"damaged at byte {at} of {len(data)}: the frame there is not as it was written")


def header_of(data: memoryview) -> int:
    """Return the bytes of the header; 0 for a torn one. Raises DamagedLedger for another file or another version."""
    begin = bytes(data[: len(HEADER)])
    if begin == HEADER:
        return len(HEADER)
    if HEADER.startswith(begin):
        return 0
    if begin.startswith(NAME):
        version = bytes(data[len(NAME) : len(NAME) + 20]).split(b"\n")[0].decode(errors="replace")
        raise DamagedLedger(f"a ledger of version {version}: this rollout reads {HEADER[len(NAME) : -1].decode()}")
    raise DamagedLedger("no ledger: it does not begin with the header of one")


def _frame(data: memoryview, at: int, before: bytes) -> Frame | None:
    """Return the frame that begins at a byte; None if no valid one does."""
    if not at or (end := _end(data, at)) > len(data):
        return None
    payload, digest = data[at + LENGTH : end - DIGEST], bytes(data[end - DIGEST : end])
    return Frame(payload, end, digest) if linked(before, payload) == digest else None


def _end(data: memoryview, at: int) -> int:
    """Return where the frame at a byte would end, past the file for one whose length is not there or is impossible."""
    length = int.from_bytes(data[at : at + LENGTH], "little")
    return at + LENGTH + length + DIGEST if at + LENGTH <= len(data) and length <= MOST_BYTES else len(data) + 1


def _before_zeros(data: memoryview, at: int) -> int:
    """Return where the zeros at the end of a file begin, at a byte or behind it; the end of the file if they are as few as a
    digest may have."""
    end = len(data)
    while end > at:
        start = max(at, end - CHUNK)
        left = bytes(data[start:end]).rstrip(b"\0")
        end = start + len(left)
        if left:
            break
    return end if len(data) - end >= DIGEST else len(data)


def _torn(data: memoryview, at: int) -> bool:
    """Return whether the bytes from here on are the beginning of a frame, and no valid one follows: otherwise its length was
    changed, and cutting it would lose what follows."""
    if not at:
        return True
    end = _before_zeros(data, at)
    if end > at and _end(data, at) <= end:
        return False
    later = range(at + LENGTH + DIGEST, end - LENGTH - DIGEST + 1)
    return not any(_frame(data, start, bytes(data[start - DIGEST : start])) for start in later)
