"""Sends tensors by torch.distributed: gloo between CPUs, NCCL between GPUs, on one host or two.

    trainer, rank 0                               service, rank 1
    TCPStore at host:port         ←────────────   a helper thread connects and opens the group
    slots ┌ 4 MiB ┬ 4 MiB ┬ … ┐    broadcasts     slots ┌ 4 MiB ┬ 4 MiB ┬ … ┐
          filled from the tensors ────────────→         posted ahead, polled by `read`, copied into the staging
    GROUP/sent/0, 1, … in the store ───────────→        NCCL: posted after the announcement

A posted receive of NCCL is a kernel that occupies processors until the bytes arrive, so none is posted ahead: the trainer
announces each broadcast in the store, the helper thread reads the announcement, and the loop posts only announced ones.

The group has two members and exists for one refresh. It is made of torch's objects without `init_process_group`, so it does not
touch the trainer's default group; opening it takes milliseconds with gloo. Broadcasts are used because gloo's receives do not
report their end without a wait (pytorch issue 30723).

Every process that reaches the store can read and write it, so it contains no secrets. The secret of the group is sent in Begin,
encrypted if there are keys (`rollout.transport.keys`). No byte of the payload is sent before both ends have proved that they
know it.

The helper thread makes all blocking calls: connecting, and leaving the group, which waits for gloo's threads. The service's
loop only polls broadcasts. Both ends listen on one address only, that of `host` or the one that reaches it. torch is imported
at the first use.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

from rollout.engine.values import TensorInfo
from rollout.transport.errors import RequestTimeout, RolloutError, SourceUnreachable
from rollout.transport.weights.ends import Expected, Payload, Sender, WeightTransport
from rollout.transport.weights.group import join, leave, leave_aside, listen
from rollout.transport.weights.offers import Backend, DistributedOffer
from rollout.transport.weights.tensors import Tensors, digest

SLOT_BYTES = 4 << 20
"""bytes of a broadcast; the last one of a payload is shorter"""
NCCL_SLOT_BYTES = 32 << 20
"""the same for NCCL, whose broadcasts are launches"""
SLOTS = 8
"""number of buffers of the trainer"""
POSTED = 16
"""number of buffers of the service, which empties them only between two steps"""
REACH_S = 5.0
"""timeout of the service for reaching the store; torch's own are longer than requested, or none"""
JOIN_S = 30.0
"""timeout of both ends for joining the group; NCCL may take seconds"""
STALL_S = 60.0
"""timeout of the service for a broadcast"""
POLL_S = 0.001
PROOF_BYTES = 32
HUNG = "rollout-weights-hung"
"""name of a helper thread whose refresh ended before it has joined"""
MOST_HUNG = 2
"""maximum of hanging NCCL joins: if the two ends do not find each other, no timeout ends them, and each keeps a thread and
sockets"""


def slot_bytes(offer: DistributedOffer) -> int:
    """Return the bytes of a broadcast."""
    return NCCL_SLOT_BYTES if offer.backend == "nccl" else SLOT_BYTES


# the trainer's end


class Gloo(WeightTransport):
    """host: an address of this machine that the service can reach."""

    via = "gloo"

    def __init__(self, host: str) -> None:
        self._host = host

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        check_backend("gloo", capabilities)
        arrays = tensors.on_host()
        manifest = tensors.manifest(map(digest, arrays))
        return DistributedSender(Broadcaster("gloo", self._host, sum(map(len, arrays))), manifest, arrays)


class Nccl(WeightTransport):
    """host: an address of this machine that the service can reach."""

    via = "nccl"

    def __init__(self, host: str) -> None:
        self._host = host

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        tensors.check_on_gpus(self.via)
        check_backend("nccl", capabilities)
        data = tensors.finished()
        manifest, device = tensors.manifest(tensors.digests()), min(tensors.devices, key=str)
        return DistributedSender(Broadcaster("nccl", self._host, sum(map(len, data)), device), manifest, data)


def check_backend(backend: Backend, capabilities: Collection[str]) -> None:
    """Raises SourceUnreachable if the service does not have the backend."""
    if backend not in capabilities:
        raise SourceUnreachable(f'the service has no {backend} here; via="inline" takes no more than the connection')


class DistributedSender(Sender):
    """Broadcasts after Commit, when the service reads the bytes."""

    def __init__(self, broadcaster: Broadcaster, manifest: list[TensorInfo], data: Sequence[Any]) -> None:
        super().__init__(broadcaster.offer.backend, broadcaster.offer, manifest, data)
        self._broadcaster = broadcaster

    def after_commit(self, over: Callable[[], bool], end: float) -> None:
        self._broadcaster.send(self.data, over, end)

    def close(self) -> None:
        self._broadcaster.close()


class Broadcaster:
    """Rank 0 of the group of one refresh.

    Example:
        broadcaster = Broadcaster("gloo", "127.0.0.1", total)
        …                       # broadcaster.offer goes to the service
        broadcaster.send(pieces, over, end)
        …                       # the service answers that it has everything
        broadcaster.close()

    Args:
        host: an address of this machine that the service can reach.
        device: torch.device of the slots, for NCCL; None: this process's CPU.
        announced: whether each broadcast is announced in the store; None = those of NCCL.

    Raises SourceUnreachable without the address or the backend."""

    def __init__(self, backend: Backend, host: str, total: int, device: Any = None, announced: bool | None = None) -> None:
        import torch.distributed as dist

        self._device = device
        self._group: Any = None
        try:
            listener = listen(host)
        except OSError as error:
            raise SourceUnreachable(f"no address {host!r} of this machine to meet the service at: {error}") from None
        port, wait = listener.getsockname()[1], timedelta(seconds=JOIN_S)
        # a socket that the store makes itself listens on every address of the machine
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, 2, True, wait, False, master_listen_fd=listener.detach()
        )
        announced = backend == "nccl" if announced is None else announced
        secret = secrets.token_hex(32)
        self.offer = DistributedOffer(backend, host, port, secrets.token_hex(16), total, secret, announced)

    def send(self, pieces: Sequence[Any], over: Callable[[], bool], end: float) -> None:
        """Send [bytes] uint8 `pieces`, numpy arrays or tensors on the device. They must not change before the service has
        everything. Returns early when `over` says that the service wants no more; it has said why elsewhere.

        Raises SourceUnreachable if the service does not join or leaves, RequestTimeout at `end` (time.monotonic)."""
        failure: RolloutError | None = None
        try:
            self._send(deque(pieces), over, end)
        except RuntimeError as error:
            failure = SourceUnreachable(f"the service did not take the weights by {self.offer.backend}: {_first_line(error)}")
        except RequestTimeout as error:
            failure = RequestTimeout(error.message)
        if failure is not None:
            try:
                raise failure  # out here, so that no traceback holds a broadcast, and with it the connections of the group
            finally:
                del failure  # nor this frame the error that holds it

    def _send(self, left: deque[Any], over: Callable[[], bool], end: float) -> None:
        slots, sent = _slots(self._device, SLOTS, self.offer), 0
        in_flight: deque[tuple[Any, tuple[Any, Any]]] = deque()
        while not self._store.check([_joined(self.offer)]):
            if _waited(over, end):
                return
        if not self._join(over, end) or not self._recognise(over, end):
            return
        while left or in_flight:
            if not left or not slots:
                work, slot = in_flight.popleft()
                if not _finished(work, over, end):
                    return
                slots.append(slot)
                continue
            tensor, view = slot = slots.pop()
            if count := _fill(view, left):
                rest = timedelta(seconds=1 + max(0.0, end - time.monotonic()))  # the service's loop takes its time
                in_flight.append((self._group.broadcast(tensor[:count], 0, rest), slot))
                if self.offer.announced:
                    self._store.set(_sent(self.offer, sent), "1")
                sent += 1

    def _join(self, over: Callable[[], bool], end: float) -> bool:
        """Make the group, in a thread of its own: if the other end has just died, gloo waits for five times its timeout.
        Returns False if `over` returns True first. Raises RuntimeError, RequestTimeout."""
        future: Future[Any] = Future()
        make = partial(_group, self.offer, self._store, 0, self.offer.host, self._device)
        threading.Thread(target=_into, args=(future, make), name="rollout-weights-join", daemon=True).start()
        try:
            while not future.done():
                if _waited(over, end):
                    return False
            self._group = future.result()
            return True
        finally:
            if self._group is None:  # it has no user
                future.add_done_callback(partial(_left, self.offer.backend))
            del future, make  # an error's traceback would hold them, and they it, and with both all that is sent

    def _recognise(self, over: Callable[[], bool], end: float) -> bool:
        """Check the proof of the service, then send the trainer's. Returns False if `over` returns True first. Raises
        RuntimeError for a wrong proof, RequestTimeout."""
        rest = timedelta(seconds=1 + max(0.0, end - time.monotonic()))
        theirs, mine = _proof_tensor(None, self._device), _proof_tensor(proof(self.offer, 0), self._device)
        if not _finished(self._group.broadcast(theirs, 1, rest), over, end):
            return False
        check_proof(theirs, self.offer, 1)
        return _finished(self._group.broadcast(mine, 0, rest), over, end)

    def close(self) -> None:
        """Leave the group and close the store; if gloo still waits for the other end, the store closes after that. May be
        repeated."""
        holder, self._group, self._store = [self._group], None, None
        if holder[0] is not None:
            leave_aside(holder, self.offer.backend)


# the service's end


def opened(offer: DistributedOffer, expected: Expected) -> Payload:
    """Open the service's end of an offer. Raises InvalidRequest."""
    expected.check_total(offer.total)
    return DistributedPayload(offer, expected.device)


class DistributedPayload(Payload):
    """device: torch.device of the model, where NCCL receives."""

    unannounced = True

    def __init__(self, offer: DistributedOffer, device: Any) -> None:
        """Raises SourceUnreachable if MOST_HUNG joins hang already."""
        self.via: str = offer.backend
        self._offer = offer
        hung = sum(thread.name == HUNG for thread in threading.enumerate())
        if offer.backend == "nccl" and hung >= MOST_HUNG:
            raise SourceUnreachable(
                f"{hung} groups of NCCL that were never joined are still open here: its versions or networks do not fit "
                '(NCCL_DEBUG=INFO tells); via="gloo" works, and a restart of the service clears them'
            )
        self._device = device if offer.backend == "nccl" else None
        self._unasked = offer.total
        """bytes without a posted broadcast"""
        self._read = 0
        """of the oldest slot"""
        self._group: Any = None
        self._in_flight: deque[tuple[Any, int, tuple[Any, Any]]] = deque()
        """(work, bytes, slot) of posted broadcasts, in order"""
        self._free: deque[tuple[Any, Any]] = deque()
        """free slots"""
        self._posted = 0
        self._announced = 0 if offer.announced else sys.maxsize
        """number of broadcasts that may be posted; written by the helper thread"""
        self._last_received_at = time.monotonic()
        """when a broadcast last completed"""
        self._failure: str | None = None
        self._line: socket.socket | None = None
        """an idle connection to the trainer's store, which ends when the trainer dies: torch would retry for seconds"""
        self._next_by = time.monotonic() + REACH_S
        """deadline of the helper thread's next progress"""
        self._joined = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run_helper, name="rollout-weights-group", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        if not self._joined.is_set():
            return self._given_up
        return self._failure is not None or self._may_post or (bool(self._in_flight) and self._in_flight[0][0].is_completed())

    @property
    def _may_post(self) -> bool:
        return bool(self._free and self._unasked) and self._posted < self._announced

    def read(self, memory: Any) -> int:
        """Read as every Payload. Raises SourceUnreachable if the trainer cannot be reached, or was lost."""
        where = f"{self._offer.host}:{self._offer.port}"
        if not self._joined.is_set():
            if self._given_up:
                raise SourceUnreachable(f"no group with the trainer at {where}: it is gone, or does not answer")
            return 0
        if self._failure is not None:
            raise SourceUnreachable(f"no group with the trainer at {where}: {self._failure}")
        self._post()
        if not self.ready or not len(memory):
            return 0
        if (lost := _error_of(self._in_flight[0][0])) is not None:
            self._in_flight.clear()  # errors are kept, with their frames: none may hold a broadcast
            # of two broadcasts that time out together gloo says so of one, and of the other that its connection was closed
            silence = f"{time.monotonic() - self._last_received_at:.1f} s after its last bytes"
            raise SourceUnreachable(f"the trainer was lost while it sent the weights, {silence}: {lost}")
        _, size, slot = self._in_flight[0]
        count: int = min(len(memory), size - self._read)
        _copy_out(memory[:count], slot[1][self._read : self._read + count])
        self._read += count
        if self._read == size:
            self._in_flight.popleft()
            self._read = 0
            self._last_received_at = time.monotonic()
            self._free.append(slot)
            self._post()
        return count

    def close(self) -> None:
        """Make the helper thread leave the group: now, or when connecting has failed."""
        self._closed.set()
        if self._joined.is_set():
            self._in_flight.clear()
            self._group = None
        else:
            self._thread.name = HUNG

    @property
    def _given_up(self) -> bool:
        """Return whether to give up waiting for the group."""
        if self._line is not None:
            try:
                return not self._line.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                pass
            except OSError:
                return True
        return time.monotonic() > self._next_by

    def _post(self) -> None:
        while self._may_post:
            slot, size = self._free.popleft(), min(slot_bytes(self._offer), self._unasked)
            self._unasked -= size
            self._posted += 1
            work = self._group.broadcast(slot[0][:size], 0, timedelta(seconds=STALL_S))
            self._in_flight.append((work, size, slot))

    def _hear(self, store: Any) -> str | None:
        """Count the trainer's announcements until all have arrived or this end is closed. Returns the error, if announcements
        or announced broadcasts fail to arrive."""
        pieces = -(-self._offer.total // slot_bytes(self._offer))
        heard_at = time.monotonic()
        while not self._closed.wait(POLL_S):
            try:
                while self._announced < pieces and store.check([_sent(self._offer, self._announced)]):
                    self._announced, heard_at = self._announced + 1, time.monotonic()
            except RuntimeError as error:
                return _first_line(error)
            if self._announced == pieces and not self._unasked and not self._in_flight:
                return None
            silence = time.monotonic() - max(heard_at, self._last_received_at)
            awaited = any(not work.is_completed() for work, *_ in tuple(self._in_flight)[:1])
            if silence > STALL_S and (self._announced < pieces or awaited):
                return f"nothing was heard of it for {silence:.0f} s"
        return None

    def _run_helper(self) -> None:
        """Run the helper thread. It owns the group until `_joined`, then the loop does; after `_closed` it leaves the group."""
        import torch.distributed as dist

        offer, group = self._offer, None
        try:
            line = socket.create_connection((offer.host, offer.port), REACH_S)
            line.setblocking(False)
            self._line = line
            reach = timedelta(seconds=REACH_S)
            store = dist.TCPStore(offer.host, offer.port, 2, False, reach, False)  # type: ignore[attr-defined]
            self._next_by = time.monotonic() + JOIN_S
            store.set(_joined(offer), "1")
            group = self._group = _group(offer, store, 1, line.getsockname()[0], self._device)
            _introduce(group, offer, self._device)
            self._last_received_at = time.monotonic()
            self._free.extend(_slots(self._device, POSTED, offer))
            self._post()
        except Exception as error:
            self._failure = _first_line(error)  # not the error itself, whose traceback holds sockets
        self._joined.set()
        if offer.announced and self._failure is None:
            self._failure = self._hear(store)
            if self._failure is not None:  # at once: the loop may be waiting for the device that waits for a broadcast
                leave(group, offer.backend)
                group = None
        self._closed.wait()
        if self._line is not None:
            self._line.close()
        self._in_flight.clear()
        self._group = None
        if group is not None:
            leave(group, offer.backend)


def _sent(offer: DistributedOffer, number: int) -> str:
    """Return the key that the trainer sets when it starts a broadcast."""
    return f"{offer.group}/sent/{number}"


def _joined(offer: DistributedOffer) -> str:
    """Return the key that the service sets when it has reached the store."""
    return f"{offer.group}/joined"


def proof(offer: DistributedOffer, rank: int) -> bytes:
    """Return the PROOF_BYTES by which a rank proves that it knows the secret. Any process that reaches the store may join the
    group; without the secret it neither receives nor sends payload."""
    return hmac.digest(bytes.fromhex(offer.secret), f"{offer.group}/{rank}".encode(), "sha256")


def check_proof(shown: Any, offer: DistributedOffer, rank: int) -> None:
    """Raises RuntimeError unless the [PROOF_BYTES] uint8 tensor is the proof of this rank."""
    if not hmac.compare_digest(shown.cpu().numpy().tobytes(), proof(offer, rank)):
        raise RuntimeError("a process that does not know the secret joined the group")


def _proof_tensor(content: bytes | None, device: Any) -> Any:
    import torch

    return torch.tensor(list(content or bytes(PROOF_BYTES)), dtype=torch.uint8, device=device or "cpu")


def _introduce(group: Any, offer: DistributedOffer, device: Any) -> None:
    """Send the service's proof, then check the trainer's. Raises RuntimeError."""
    theirs, mine = _proof_tensor(None, device), _proof_tensor(proof(offer, 1), device)
    wait = timedelta(seconds=JOIN_S)
    group.broadcast(mine, 1, wait).wait()
    group.broadcast(theirs, 0, wait).wait()
    check_proof(theirs, offer, 0)


def _group(offer: DistributedOffer, store: Any, rank: int, own_address: str, device: Any) -> Any:
    import torch.distributed as dist

    prefixed = dist.PrefixStore(offer.group, store)  # type: ignore[attr-defined]
    return join(offer.backend, prefixed, rank, own_address, device, JOIN_S)


def _into(future: Future[Any], make: Callable[[], Any]) -> None:
    try:
        future.set_result(make())
    except Exception as error:
        future.set_exception(RuntimeError(_first_line(error)))  # not the error itself, whose traceback holds sockets


def _left(backend: Backend, future: Future[Any]) -> None:
    """Leave a group that was joined too late."""
    if future.exception() is None:
        leave(future.result(), backend)


def _slots(device: Any, most: int, offer: DistributedOffer) -> list[tuple[Any, Any]]:
    """Allocate the slots that a payload can use: pairs of a [slot_bytes] uint8 tensor and its view for copies, on the CPU a
    numpy array, since its copies wait for no threads."""
    import torch

    count = max(1, min(most, -(-offer.total // slot_bytes(offer))))
    tensors = [torch.empty(slot_bytes(offer), dtype=torch.uint8, device=device or "cpu") for _ in range(count)]
    return [(tensor, tensor if tensor.is_cuda else tensor.numpy()) for tensor in tensors]


def _fill(view: Any, pieces: deque[Any]) -> int:
    """Copy the next bytes of the pieces to the beginning of a slot. Returns their number."""
    filled = 0
    while pieces and filled < len(view):
        piece = pieces.popleft()
        count = min(len(piece), len(view) - filled)
        view[filled : filled + count] = piece[:count]
        filled += count
        if count < len(piece):
            pieces.appendleft(piece[count:])
    return filled


def _copy_out(memory: Any, view: Any) -> None:
    """Copy a slot to a host array, or to a tensor on its device, on the current stream."""
    if isinstance(view, np.ndarray):
        memory[:] = view
    elif isinstance(memory, np.ndarray):
        import torch

        torch.from_numpy(memory).copy_(view)
    else:
        memory.copy_(view)


def _error_of(work: Any) -> str | None:
    """Return the error of a completed broadcast, None without one."""
    try:
        work.wait()
    except RuntimeError as error:
        return _first_line(error)
    return None


def _finished(work: Any, over: Callable[[], bool], end: float) -> bool:
    """Wait for a broadcast. Returns False if `over` returns True first. Raises RuntimeError if it failed, RequestTimeout."""
    while not work.is_completed():
        if _waited(over, end):
            return False
    work.wait()
    return True


def _waited(over: Callable[[], bool], end: float) -> bool:
    """Sleep a moment. Returns whether waiting has become pointless. Raises RequestTimeout at `end`."""
    if time.monotonic() > end:
        raise RequestTimeout("the service did not take all of the weights in time")
    time.sleep(POLL_S)
    return over()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300] or type(error).__name__
