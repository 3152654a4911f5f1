"""Sends tensors in shared memory: the trainer writes it once, the service reads it. Linux, one host, one user.

    segment (memfd)   ┌ nonce 64 ┬ tensor ─────┬ tensor ──┬ … ┐
    trainer           maps and writes it, and keeps it for the next refresh: pages that exist are written much faster
    service           maps /proc/PID/fd/FD read-only, and keeps the map as long as the same segment is offered

A memfd has no name. It cannot be guessed, nothing must be unlinked, and when both ends have closed it, or died, it is gone.
It is sealed against shrinking, so reading it cannot fault. Whether both ends see the same memory is tested, not configured: the
service must find the nonce that the trainer writes before each payload. `host_key` shows beforehand whether this can succeed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import xxhash

from rollout.transport.errors import SourceUnreachable
from rollout.transport.weights.ends import Expected, Payload, Sender, WeightTransport
from rollout.transport.weights.offers import ShmOffer
from rollout.transport.weights.tensors import Tensors, on_host

NONCE_BYTES = 64
NAME = "rollout-weights"
SLICE_BYTES = 1 << 20
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


def host_key() -> str | None:
    """Return the key that two ends that can share memory have in common: kernel, PID namespace, user. None without memfd."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
    return f"shm:{boot}:{namespace}:{os.getuid()}" if hasattr(os, "memfd_create") else None


# the trainer's end


def check_host(capabilities: Collection[str]) -> None:
    """Raises SourceUnreachable if a service with these capabilities cannot share memory with this process."""
    key = host_key()
    if key is None or key not in capabilities:
        raise SourceUnreachable("this process and the service share no memory: another host, user or container")


class Shm(WeightTransport):
    """Keeps its segment for further refreshes."""

    via = "shm"

    def __init__(self) -> None:
        self.segment = Segment()

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        check_host(capabilities)
        arrays = tensors.on_host()
        offer, digests = self._written(arrays)
        return Sender(self.via, offer, tensors.manifest(digests), arrays)

    def after(self, other: Sender, capabilities: Collection[str]) -> Sender:
        """Offer the tensors of another sender that the service refused. Raises SourceUnreachable as `offer_tensors`."""
        check_host(capabilities)
        arrays = on_host(other.data)
        return Sender(self.via, self._written(arrays)[0], other.manifest, arrays)

    def _written(self, arrays: Sequence[np.ndarray]) -> tuple[ShmOffer, list[str]]:
        try:
            return self.segment.write(arrays)
        except OSError as error:
            raise SourceUnreachable(f"no shared memory for {sum(map(len, arrays))} bytes: {error}") from None

    def close(self) -> None:
        self.segment.close()


class Segment:
    """Shared memory of the trainer. Grows to the largest payload; `close` and the end of the process free it."""

    def __init__(self) -> None:
        self._fd = -1
        self._memory = np.zeros(0, np.uint8)

    def write(self, arrays: Sequence[np.ndarray]) -> tuple[ShmOffer, list[str]]:
        """Write the payload, the concatenation of [bytes] uint8 `arrays`. Returns the xxh3-128 of each, computed on the way.
        Raises OSError without memory for it."""
        total = sum(map(len, arrays))
        payload, at, digests = self.reserve(total), 0, []
        for array in arrays:
            digest = xxhash.xxh3_128()
            for start in range(0, len(array), SLICE_BYTES):
                piece = array[start : start + SLICE_BYTES]
                digest.update(piece.data)
                payload[at : at + len(piece)] = piece  # while it is in the cache
                at += len(piece)
            digests.append(digest.hexdigest())
        return self.offer(total), digests

    def reserve(self, total: int) -> np.ndarray:
        """Return [total] uint8 to write a payload into; earlier offers become invalid. Raises OSError."""
        self._reserve(NONCE_BYTES + total)
        self._memory[:NONCE_BYTES] = np.frombuffer(secrets.token_bytes(NONCE_BYTES), np.uint8)
        return self.payload(total)

    def payload(self, total: int) -> np.ndarray:
        """Return the [total] uint8 of the last payload."""
        return self._memory[NONCE_BYTES : NONCE_BYTES + total]

    def offer(self, total: int) -> ShmOffer:
        """Offer the last payload, of [total] bytes."""
        nonce = self._memory[:NONCE_BYTES].tobytes().hex()
        return ShmOffer(os.getpid(), self._fd, os.fstat(self._fd).st_ino, total, nonce)

    def _reserve(self, size: int) -> None:
        if len(self._memory) >= size:
            return
        self.close()
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self._fd, 0, size)  # an error here, where memory is short, instead of SIGBUS when it is written
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        self._memory = np.frombuffer(mmap.mmap(self._fd, size), np.uint8)

    def close(self) -> None:
        self._memory = np.zeros(0, np.uint8)  # the map goes with the last view of it
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


# the service's end


def opened(offer: ShmOffer, expected: Expected) -> Payload:
    """Open the service's end of an offer. Raises InvalidRequest, SourceUnreachable."""
    expected.check_total(offer.total)
    return ShmPayload(expected.segment.open(offer))


class SegmentView:
    """The service's mapping of the last offered segment."""

    def __init__(self) -> None:
        self._inode = -1
        self._memory = np.zeros(0, np.uint8)

    def open(self, offer: ShmOffer) -> np.ndarray:
        """Map the payload, [bytes] uint8. Raises SourceUnreachable if this process cannot see it."""
        if offer.inode != self._inode:
            self.close()
            self._memory, self._inode = _map(offer), offer.inode
        payload = self._memory[NONCE_BYTES : NONCE_BYTES + offer.total]
        if self._memory[:NONCE_BYTES].tobytes().hex() != offer.nonce or len(payload) != offer.total:
            self.close()
            raise SourceUnreachable("the shared memory is not what was offered: another host or container?")
        return payload

    def close(self) -> None:
        self._memory, self._inode = np.zeros(0, np.uint8), -1


def _map(offer: ShmOffer) -> np.ndarray:
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise SourceUnreachable(f"{path} is not shared memory of a rollout client: another host or container?")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if status.st_ino != offer.inode or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise SourceUnreachable(f"{path} is not the memory that was offered")
            return np.frombuffer(mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise SourceUnreachable(f"shared memory cannot be reached at {path}: {error}") from None


class ShmPayload(Payload):
    via = "shm"

    def __init__(self, payload: np.ndarray) -> None:
        self._left = payload

    def read(self, memory: np.ndarray) -> int:
        piece = self._left[: len(memory)]
        memory[: len(piece)] = piece
        self._left = self._left[len(piece) :]
        return len(piece)

    def close(self) -> None:
        self._left = np.zeros(0, np.uint8)  # no view keeps the map alive
