"""The writer of a ledger: `rollout serve --ledger FILE`.

    accepted, ended, refreshed → payloads → commit: one write() an iteration of the service's loop → FILE, at most `most_bytes`
                                                                                       full → FILE.1, which is replaced

What was written survives the end of the process, even by SIGKILL, because the page cache belongs to the kernel. The next
service cuts a frame whose end is missing. There is no fsync until the file is closed: if the machine crashes, the last records
may be lost, as with the journal.

If the file cannot be written, for example because the disk is full, the service continues. The records are counted and dropped;
each second the writer tries again, and then writes how many were lost, and all that later records need.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout.config import InputError
from rollout.engine.values import Group, Sample, Sampling, Served, TensorInfo
from rollout.identity import given_digest, prompt_digest, result_digest
from rollout.ledger import records as r
from rollout.ledger.frames import HEADER, NAME, Chain, DamagedLedger, frames
from rollout.logs import logger
from rollout.private_files import check_if_there, check_private, open_private
from rollout.service.engine_api import EngineLike, HasDigests, live_of
from rollout.service.recording import AcceptedAs, AppliedRefresh, Ledger
from rollout.transport.own_files import remove_if_same

MOST_NAMED = 65_536
"""prompts, and sampling options, that the writer remembers having written"""
RETRY_S = 1.0

log = logger(__name__)


class LedgerFile:
    """The file: appends frames, and keeps it whole. FILE.new and FILE.1 are used when it is full.

    Raises InputError for a file that is no ledger, is damaged, is in use, or is not this user's alone, and for a FILE.new or
    FILE.1 that is no ledger of this user."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.cut = 0
        """bytes of an incomplete end that were cut when the file was opened"""
        self._torn = False
        """whether a frame of a failed write may be in the file"""
        try:
            self._clear()  # before a file is made
            self._file = self._opened(path)
            try:
                self.size, self._chain = self._whole()
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise InputError(f"ledger {path}: {error.strerror}") from None
        if self.cut:
            log.warning("ledger cut path=%s bytes=%d: they are the incomplete end of a service that was killed", path, self.cut)

    def append(self, payloads: Iterable[bytes]) -> int:
        """Write frames at the end, all or none. Returns their bytes. Raises OSError."""
        chain = Chain(self._chain.digest)
        data = b"".join(map(chain.frame, payloads))
        data = data if self.size else HEADER + data
        if self._torn:
            os.ftruncate(self._file, self.size)
        self._torn, done = True, 0
        while done < len(data):
            done += os.write(self._file, data[done:] if done else data)
        self._torn = False
        self.size += done
        self._chain = chain
        return done

    def replace(self) -> None:
        """Rename the file to FILE.1 and begin a new one. Raises OSError."""
        try:
            self._clear()
            with self._beside(".1"):
                new = self._opened(f"{self.path}.new", os.O_EXCL)
                os.rename(self.path, f"{self.path}.1")
                os.rename(f"{self.path}.new", self.path)
        except InputError as error:  # another file was put there after the start
            raise OSError(errno.EEXIST, str(error)) from None
        os.close(self._file)
        self._file, self.size, self._chain = new, 0, Chain()

    def close(self) -> None:
        """Close the file. Raises OSError if it cannot be synchronized with the disk."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def _clear(self) -> None:
        """Check that FILE.1 is a ledger that no service writes, which a new one replaces, and delete an empty FILE.new that a
        killed service has left. Raises InputError for other files, OSError."""
        with self._beside(".1"), self._beside(".new") as new:
            if new is not None:
                remove_if_same(Path(f"{self.path}.new"), new)

    @contextmanager
    def _beside(self, ending: str) -> Iterator[int | None]:
        """Open and lock FILE.1, or FILE.new, which is empty until it gets its name. None: there is none. Raises InputError for
        a file that is no ledger of this user, or that may be another service's, OSError."""
        path, needed = f"{self.path}{ending}", "and its name is needed when the file is full; move it away"
        check_if_there(path, "ledger")
        if not os.path.lexists(path):
            yield None
            return
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            check_private(os.fstat(file), path, "ledger")
            begin = os.pread(file, len(NAME), 0)
            if not NAME.startswith(begin):
                raise InputError(f"ledger {self.path}: {path} is no ledger, {needed}")
            self._lock(file, path)
            if begin and ending == ".new":
                raise InputError(f"ledger {self.path}: {path} is a ledger of its own, {needed}")
            yield file
        finally:
            os.close(file)

    def _opened(self, path: str, flags: int = 0) -> int:
        file = open_private(path, "ledger", os.O_APPEND | flags)
        try:
            self._lock(file, path)
        except BaseException:
            os.close(file)
            raise
        return file

    def _lock(self, file: int, path: str) -> None:
        """Lock an open file. Raises InputError if another service has it, or has replaced it since it was opened."""
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.lstat(path)):
                return
        raise InputError(f"ledger {self.path}: another service writes {path}; end that one, or name another file")

    def _whole(self) -> tuple[int, Chain]:
        """Cut a torn frame. Returns the size and the chain."""
        size, end, digest = os.fstat(self._file).st_size, 0, Chain().digest
        if not size:
            return 0, Chain()
        try:
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                end = len(HEADER) if bytes(view[: len(HEADER)]) == HEADER else 0
                for frame in frames(view):
                    end, digest = frame.end, frame.digest
                    frame.payload.release()
        except DamagedLedger as error:
            raise InputError(f"ledger {self.path}: {error}; move it away to begin a new one") from None
        if end < size:
            os.ftruncate(self._file, end)
        self.cut = size - end
        return end, Chain(digest)


class KnownNumbers:
    """Numbers of things that the file has: a bounded map from their digests or values."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[Any, int] = OrderedDict()
        self._next = 0

    def find(self, key: Any) -> tuple[int, bool]:
        """Return the number of a thing, and whether it is new."""
        if (number := self._numbers.get(key)) is not None:
            self._numbers.move_to_end(key)
            return number, False
        self._numbers[key] = self._next
        self._next += 1
        if len(self._numbers) > MOST_NAMED:
            self._numbers.popitem(last=False)
        return self._next - 1, True


class UnfinishedGroup(msgspec.Struct):
    """A group with unfinished children."""

    record: r.GroupOpened
    sampling: Sampling
    prompt: np.ndarray | None
    """if prompts are stored"""
    left: set[int]
    """children without a sample"""


class Contents:
    """What the file has, so that records name it by number."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[int, TensorInfo]] = {}
        """number and last state of each tensor, by name"""
        self.hows, self.prompts = KnownNumbers(), KnownNumbers()


class LedgerWriter(Ledger):
    """Writes the ledger of one service.

    Args:
        path: the file; a service that is started again continues it.
        most_bytes: the size at which it is renamed to PATH.1 and a new one begins. Each has all that its records need.
        prompts, tokens: also store the token ids of prompts; of samples, with their log-probs.
        clock: seconds, monotonic.

    Raises InputError for a file that is no ledger, is damaged or in use."""

    def __init__(
        self,
        path: str,
        most_bytes: int,
        *,
        prompts: bool = False,
        tokens: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = LedgerFile(path)
        self._most_bytes = most_bytes
        self._prompts, self._tokens = prompts, tokens
        self._clock = clock
        self._contents = Contents()
        self._open: dict[str, UnfinishedGroup] = {}
        """by the engine's name"""
        self._groups = 0
        self._about: r.Started | None = None
        self._live: r.WeightsLive | None = None
        self._pending: list[r.AnyRecord] = []
        self._lost = r.Lost(0, 0, "")
        """since the last successful write"""
        self._total_lost = 0
        self._error = ""
        self._retry_at = 0.0
        self._closed = False

    def started(self, engine: EngineLike) -> None:
        live = live_of(engine)
        self._about = r.Started(
            at=time.time(), arithmetic=engine.arithmetic, block_size=engine.block_size, kv_dtype=engine.kv_dtype,
            vocab_size=engine.vocab_size, context=engine.context, eos_token_ids=tuple(sorted(engine.model.eos_token_ids)),
            model=engine.model.name, version=live.version, weights=bytes.fromhex(hex_of(live)),
            configuration=bytes.fromhex(engine.configuration), tokenizer=bytes.fromhex(engine.tokenizer),
        )  # fmt: skip
        self._pending.append(self._about)
        if isinstance(engine.weights, HasDigests):
            self._weights(r.WeightsLive(live.version, bytes.fromhex(hex_of(live)), -1, b""), engine.weights.live_manifest())
        self.commit()
        if self._error:
            raise InputError(f"ledger {self._file.path}: {self._error}")

    def accepted(self, name: AcceptedAs, group: Group, version: int) -> None:
        if group.score:
            return
        given = tuple((child.index, len(child.token_ids)) for child in group.partials)
        self._groups += 1
        opened = r.GroupOpened(
            number=self._groups, group_id=name.group_id, client=name.client, version=version,
            prompt=bytes.fromhex(prompt_digest(group.prompt)), prompt_tokens=len(group.prompt), how=0,
            seed=group.sampling.seed, indices=group.indices, after=name.after, given=given,
            given_digest=bytes.fromhex(given_digest(group.partials)),
        )  # fmt: skip
        prompt = group.prompt if self._prompts else None
        self._open[group.id] = UnfinishedGroup(opened, group.sampling, prompt, set(group.wanted))
        self._group(self._open[group.id])

    def ended(self, sample: Sample) -> None:
        group = self._open.get(sample.group_id)
        if group is None or sample.index not in group.left:
            return
        group.left.remove(sample.index)
        if not group.left:
            del self._open[sample.group_id]
        usual = [(0, group.record.version)]
        self._pending.append(
            r.SampleEnded(
                group=group.record.number,
                index=sample.index,
                reason=r.REASONS.index(sample.finish_reason),
                tokens=len(sample.token_ids),
                result=bytes.fromhex(result_digest(sample)),
                token_digest=r.token_digest(sample.token_ids),
                marks=r.marks_of(sample),
                weight_versions=() if sample.weight_versions == usual else r.flat(sample.weight_versions),
                kv_versions=r.flat(sample.kv_versions),
                seed=sample.seed if group.record.seed is None else None,
                ids=sample.token_ids.astype("<i4").tobytes() if self._tokens else b"",
                logprobs=sample.logprobs.astype("<f4").tobytes() if self._tokens else b"",
            )
        )

    def forgotten(self, engine_id: str) -> None:
        self._open.pop(engine_id, None)

    def refreshed(self, refresh: AppliedRefresh, engine: EngineLike) -> None:
        result = refresh.result
        weights = engine.weights
        tensors = weights.live_manifest() if isinstance(weights, HasDigests) else refresh.manifest
        sent = not isinstance(weights, HasDigests)
        live = r.WeightsLive(
            result.version, bytes.fromhex(hex_of(Served(result.version, result.digest))), r.POLICIES.index(refresh.kv), b"",
            time.time(), sent, refresh.partial, refresh.adapter,
        )  # fmt: skip
        self._weights(live, tensors)

    def commit(self) -> None:
        if not self._pending or self._closed:
            return
        if self._error:
            self._drop()
            if self._clock() < self._retry_at:
                return
            self._pending = [self._lost, *self._again()]
        try:
            self._file.append(map(r.encode, self._pending))
            self._written()
            if self._file.size >= self._most_bytes:
                self._begin_new_file()
        except OSError as error:
            self._failed(error)

    def status(self) -> dict[str, Any]:
        return {
            "path": self._file.path,
            "bytes": self._file.size,
            "groups": self._groups,
            "lost_samples": self._total_lost,
            "error": self._error,
        }

    def close(self) -> None:
        if self._closed:
            return
        if self._about is not None:
            self._pending.append(r.Stopped())
            self.commit()
        self._closed = True
        try:
            self._file.close()
        except OSError as error:
            log.error("ledger not synchronized path=%s reason=%s", self._file.path, error)

    # records

    def _group(self, group: UnfinishedGroup) -> None:
        """Append the record of a group, after what it names."""
        fields = r.fields_of(group.sampling)
        how, is_new = self._contents.hows.find(r.pack(fields))
        if is_new:
            self._pending.append(r.HowSampled(how, fields))
        digest = group.record.prompt
        if group.prompt is not None and self._contents.prompts.find(digest)[1]:
            self._pending.append(r.PromptTokens(digest, group.prompt.astype("<i4").tobytes()))
        group.record = msgspec.structs.replace(group.record, how=how)
        self._pending.append(group.record)

    def _weights(self, live: r.WeightsLive, tensors: Iterable[TensorInfo]) -> None:
        """Append the record of weights: the tensors that differ from what the file has."""
        changed: dict[int, bytes] = {}
        known = self._contents.tensors
        for info in tensors:
            number, before = known.get(info.name, (len(known), None))
            if before is None or (before.dtype, before.shape) != (info.dtype, info.shape):
                self._pending.append(r.TensorNamed(number, info.name, info.dtype, info.shape))
            if before != info:
                changed[number] = bytes.fromhex(info.digest)[: r.TENSOR_DIGEST]
            known[info.name] = number, info
        numbers = tuple(sorted(changed))
        digests = b"".join(changed[number] for number in numbers)
        numbers = () if len(numbers) == len(known) else numbers
        self._live = msgspec.structs.replace(live, digests=digests, numbers=numbers)
        self._pending.append(self._live)

    def _again(self) -> list[r.AnyRecord]:
        """Return all that later records need, in place of what waits to be written."""
        assert self._about is not None
        tensors = [info for _, info in self._contents.tensors.values()]
        self._contents, self._pending, live = Contents(), [], self._live
        about = self._about if live is None else msgspec.structs.replace(self._about, version=live.version, weights=live.digest)
        self._pending.append(msgspec.structs.replace(about, at=time.time(), goes_on=True))
        if live is not None:
            self._weights(live, tensors)
        for group in self._open.values():
            self._group(group)
        return self._pending

    def _begin_new_file(self) -> None:
        """Go on in a new file, which has all that later records need."""
        self._file.append([r.encode(r.Stopped(full=True))])
        self._file.replace()
        log.info("ledger is full path=%s: it is now %s.1", self._file.path, self._file.path)
        self._file.append(map(r.encode, self._again()))
        self._pending = []

    # a file that cannot be written

    def _written(self) -> None:
        if self._error:
            path, lost = self._file.path, self._lost
            log.warning("ledger is written again path=%s lost_samples=%d lost_refreshes=%d", path, lost.samples, lost.refreshes)
        self._pending, self._lost, self._error = [], r.Lost(0, 0, ""), ""

    def _failed(self, error: OSError) -> None:
        """Count and drop what waits to be written; after a failure before, that is only what later records need."""
        if self._error:
            self._pending = []
        else:
            log.error("ledger not written path=%s reason=%s: the service continues without it", self._file.path, error)
        self._error = error.strerror or str(error)
        self._retry_at = self._clock() + RETRY_S
        self._drop()

    def _drop(self) -> None:
        """Count and drop what waits to be written."""
        samples = sum(isinstance(record, r.SampleEnded) for record in self._pending)
        refreshes = sum(isinstance(record, r.WeightsLive) for record in self._pending)
        self._lost = r.Lost(self._lost.samples + samples, self._lost.refreshes + refreshes, self._error)
        self._total_lost += samples
        self._pending = []


def hex_of(live: Served) -> str:
    """Return the digest of weights in hex; "" for engines of tests, whose digests are words."""
    try:
        bytes.fromhex(live.digest)
    except ValueError:
        return ""
    return live.digest
