"""A memo: answers groups that a client has had before from a folder, and stores those that a service computes.

    group ──→ Memo.name ──→ NAME of all that decides its samples ──→ in the folder: samples, at once
                  │                                                    else: the service ──→ Memo.arrived ──→ folder
                  └──→ None: it is computed each time

A stored answer is a function of its name alone: every token is of one set of weights, and attended to KV of these weights
alone. What spans a refresh, or may read older KV, depends on when and how the weights changed, which no name says: it is not
stored.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from rollout.client.handle import OpenHandle
from rollout.client.memo_folder import WELCOME, MemoFolder
from rollout.engine.values import Group, Limits, Role, Sample, Served
from rollout.engine.values.arithmetic import Arithmetic
from rollout.identity import COMPUTED_BY, computed_by, drawn_by, given_digest, numbered, prompt_digest, unnumbered
from rollout.logs import logger
from rollout.transport import messages as m
from rollout.transport.checks import Bounds, check_sample
from rollout.transport.columns import pack_samples, unpack_samples
from rollout.transport.errors import RolloutError
from rollout.transport.frames import Decoder, Frame, pack

FORMAT = 1
"""first field of each name; another meaning of an entry gets another one"""
KEPT = frozenset(("stop", "length", "scored"))
"""finish reasons of children that are stored: others are decided by the time at which something happened"""
DRAWS: tuple[Role, ...] = ("draws", "truncates")
RETURNS: tuple[Role, ...] = ("returns",)
"""fields of `Sampling` in a name, by what they decide"""
PREFIX, DIGITS = 16, 40
"""hex digits in a name: of the digests of weights and of the prompt each, and of everything else"""
MESSAGE_BYTES, MESSAGE_SAMPLES, SAMPLE_OVERHEAD = 1 << 18, 256, 160
"""most in one stored message; bytes that a sample counts in addition to its arrays"""
MOST_UNWRITTEN = 256 << 20
"""bytes of entries that wait to be written; further ones are not stored"""
REMEMBERED = 65_536
"""children whose KV is known to be of one set of weights"""

log = logger(__name__)


class NotMemoised(Exception):
    """A group whose answer is neither stored nor looked up. The message says why."""


class Memo:
    """The memo of one client. Thread-safe.

    Args:
        folder: of this user alone; created if there is none. One client at a time uses it.
        gib: its largest size; the answers that were used longest ago are deleted first.

    Raises ValueError for another folder, OSError for one that cannot be written."""

    def __init__(self, folder: Path, gib: float) -> None:
        if not gib > 0:
            raise ValueError(f"memo_gib={gib}: must be positive")
        self.folder = MemoFolder(folder, int(gib * 2**30))
        self.hits = self.misses = self.not_memoised = 0
        """groups"""
        self.first_miss: dict[str, Any] | None = None
        self._pure: OrderedDict[tuple[str, int], int] = OrderedDict()
        """version of the weights of children, by (group id, index), if all of their KV is of these weights"""
        self._unwritten: dict[str, bytes] = {}
        """entries that wait to be written"""
        self._unwritten_bytes = self._not_kept = 0
        """of these entries; entries that found too many of them"""
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "rollout-memo")
        self._closed = False

    def status(self) -> dict[str, Any]:
        """Return the counts of groups, and what the folder has."""
        folder = self.folder
        with self._lock:
            return {
                **{name: getattr(self, name) for name in ("hits", "misses", "not_memoised", "first_miss")},
                "entries": len(folder),
                **{name: getattr(folder, name) for name in ("bytes", "evicted", "damaged", "unread")},
                "unwritten": folder.unwritten + self._not_kept,
            }

    def name(self, group: Group, info: m.Welcome, live: Served) -> str | None:
        """Return the name of the answer to a group; None: it is computed each time, and counted. live: the weights now."""
        try:
            with self._lock:
                turn_at = None if group.after is None else self._pure.get(group.after, -1)
            return name_of(group, info, live, turn_at)
        except NotMemoised as error:
            self.passed(group, str(error))
            return None

    def passed(self, group: Group, why: str) -> None:
        """Count a group that is computed each time."""
        with self._lock:
            self.not_memoised += 1
        log.debug("group is not memoised group=%r why=%r", group.id, why)

    def find(self, name: str, group: Group, info: m.Welcome, live: Served) -> list[Sample] | None:
        """Return the stored samples of a group, as of the live weights; None: there are none. Counts a hit or a miss."""
        began, data = time.perf_counter(), self.get(name)
        samples = None if data is None else _samples(data, group, info, live, began)
        if samples is None:
            self._missed(name, group, live)
            return None
        with self._lock:
            self.hits += 1
        self._note_pure(samples)
        return samples

    def why_missing(self, name: str | None) -> str:
        """Say which argument of a group was never seen. name: of its answer; None: such groups are not stored."""
        if name is None:
            return "such groups are not memoised"
        weights, prompt, _ = name.split("-")
        if not self.folder.has_prefix(f"{weights}-"):
            return f"weights {weights}… were never seen"
        if not self.folder.has_prefix(f"{weights}-{prompt}-"):
            return f"prompt {prompt}… was never seen with weights {weights}…"
        return f"sampling, seed or children were never seen with prompt {prompt}… and weights {weights}…"

    def arrived(
        self, name: str | None, live: Served, same: Callable[[], bool], handle: OpenHandle, new: Sequence[Sample]
    ) -> None:
        """Take samples of a group that a service computes; store all of them when the last one has arrived.

        Args:
            live: the weights when the group was sent.
            same: whether that version still has these weights, and the service computes as it did.
            new: the samples that have just arrived."""
        self._note_pure(new)
        samples = handle.finished
        if name is None or len(samples) < handle.n or not all(is_pure(each, live.version) for each in samples) or not same():
            return
        self.keep(name, msgspec.msgpack.encode([[bytes(frame) for frame in frames] for frames in _messages(samples)]))

    def keep(self, name: str, data: bytes) -> None:
        """Store an entry. It is found from now on, and a thread writes it. If too many bytes wait for a slow disk, it is not
        stored, and counted."""
        with self._lock:
            if self._closed:
                return
            more = len(data) - len(self._unwritten.get(name, b""))
            if self._unwritten_bytes + more > MOST_UNWRITTEN:
                self._not_kept += 1
                return
            self._unwritten[name] = data
            self._unwritten_bytes += more
            self._writer.submit(self._write, name)

    def get(self, name: str) -> bytes | None:
        """Return an entry; None: there is none that can be read."""
        with self._lock:
            data = self._unwritten.get(name)
        return self.folder.get(name) if data is None else data

    def welcomed(self, welcome: m.Welcome) -> None:
        """Store the first Welcome of each start of a service, for clients without one."""
        before = self.welcome()
        if before is None or before.incarnation != welcome.incarnation:
            plain = msgspec.structs.replace(welcome, groups=None)
            self.keep(WELCOME, msgspec.msgpack.encode([bytes(frame) for frame in pack(plain)]))

    def welcome(self) -> m.Welcome | None:
        """Return the Welcome that was stored last; None: there is none."""
        if (data := self.get(WELCOME)) is None:
            return None
        decoder: Decoder[m.Welcome] = Decoder(m.Welcome, m.answer_limits(Limits()))
        try:
            return decoder.unpack(list(msgspec.msgpack.decode(data, type=list[bytes])))
        except (ValueError, RolloutError) as error:
            log.error("memo entry is not readable entry=%s reason=%r", WELCOME, str(error))
            return None

    def close(self) -> None:
        """Write what waits, and release the folder. May be repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._writer.shutdown()
        counts = self.status()
        log.info(
            "memo closed folder=%s hits=%s misses=%s not_memoised=%s evicted=%s damaged=%s unread=%s unwritten=%s",
            self.folder.path,
            *(counts[name] for name in ("hits", "misses", "not_memoised", "evicted", "damaged", "unread", "unwritten")),
        )
        self.folder.close()

    def _write(self, name: str) -> None:
        with self._lock:
            data = self._unwritten.get(name)
        if data is None:  # kept twice, and written with the first
            return
        self.folder.put(name, data)
        with self._lock:
            if self._unwritten.get(name) is data:
                del self._unwritten[name]
                self._unwritten_bytes -= len(data)

    def _note_pure(self, samples: Sequence[Sample]) -> None:
        with self._lock:
            for sample in samples:
                versions = {version for _, version in sample.weight_versions}
                if len(versions) == 1 and not sample.kv_versions:
                    self._pure[sample.group_id, sample.index] = versions.pop()
                else:
                    self._pure.pop((sample.group_id, sample.index), None)
            while len(self._pure) > REMEMBERED:
                self._pure.popitem(last=False)

    def _missed(self, name: str, group: Group, live: Served) -> None:
        """Count a miss, and note the first one."""
        why = self.why_missing(name)
        with self._lock:
            self.misses += 1
            if self.first_miss is not None:
                return
            fields = {"group": group.id, "version": live.version, "after_hits": self.hits, "why": why}
            self.first_miss = fields
        say = log.warning if fields["after_hits"] else log.info  # after hits, it is where a change began to act
        say("first miss group=%r version=%d after_hits=%d why=%r", *fields.values())


def name_of(group: Group, info: m.Welcome, live: Served, turn_at: int | None) -> str:
    """Return the name of the answer to a group. turn_at: version of all KV of the child that it continues; None: it continues
    none, -1: unknown. Raises NotMemoised."""
    sampling = group.sampling
    _refuse(group, info, live, turn_at)
    drawn = drawn_by(sampling, sampling.seed or 0, info.eos_token_ids)
    fields = (
        FORMAT, [getattr(info, name) for name in computed_by(sampling)], live.digest, prompt_digest(group.prompt),
        sorted(_plain(numbered(drawn, DRAWS)).items()), sorted(numbered(sampling, RETURNS).items()),
        sampling.n if group.indices is None else None, group.indices, group.score, given_digest(unnumbered(group.partials)),
    )  # fmt: skip
    digest = hashlib.sha256(msgspec.msgpack.encode(fields)).hexdigest()
    return f"{live.digest[:PREFIX]}-{fields[3][:PREFIX]}-{digest[:DIGITS]}"


def refresh_name(info: m.Welcome, manifest: str, partial: bool, adapter: tuple[bytes, str | None] | None, before: str) -> str:
    """Return the name of a refresh, whose entry is the digest of the weights that it led to.

    Args:
        manifest: digest of what is sent.
        adapter: its packed targets and the digest of its base, if one is sent.
        before: digest of the live weights, and of those without an adapter; counts for what is added to them."""
    how = [getattr(info, name) for name in COMPUTED_BY]
    fields = FORMAT, how, manifest, partial, adapter, before if partial or adapter is not None else ""
    return f"refresh-{hashlib.sha256(msgspec.msgpack.encode(fields)).hexdigest()[:DIGITS]}"


def is_pure(sample: Sample, version: int) -> bool:
    """Return whether a sample is a function of one set of weights and its arguments."""
    same = all(each == version for _, each in sample.weight_versions)
    return sample.finish_reason in KEPT and same and not sample.kv_versions


def _refuse(group: Group, info: m.Welcome, live: Served, turn_at: int | None) -> None:
    """Raises NotMemoised for a group whose answer is no function of its name."""
    sampling, by_batch = group.sampling, Arithmetic.parse(info.arithmetic).by_batch
    reasons = {
        "it is drawn again to be verified": group.redraw,
        f"the bits of arithmetic {info.arithmetic!r} depend on the batch": by_batch or not info.arithmetic,
        "the configuration of the model is unknown": not info.configuration,
        "the digest of the live weights is unknown": not live.digest,
        "it has no Sampling.seed": sampling.seed is None and sampling.temperature > 0 and not group.score,
        "finish_after ends children by the time of others": sampling.finish_after is not None,
        "max_kv_lag allows KV of older weights": sampling.max_kv_lag > 0,
        "it continues a child whose KV may be of other weights": turn_at not in (None, live.version),
        "its children have tokens of other weights": not group.score
        and any(
            child.kv_versions or any(version != live.version for _, version in child.weight_versions)
            for child in group.partials
        ),
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
        raise NotMemoised(why)


def _plain(fields: dict[int, Any]) -> dict[int, Any]:
    """Return fields in an order that does not depend on how they were given."""
    return {number: sorted(value.items()) if isinstance(value, dict) else value for number, value in fields.items()}


# ── entries ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _messages(samples: Sequence[Sample]) -> Iterator[list[Frame]]:
    """Yield SamplesDone messages of bounded size. Samples of another layout begin a new one. Only the first sample has the
    routes of the prompt, as those of a service."""
    some: list[Sample] = []
    size = 0
    for place, sample in enumerate(sorted(samples, key=lambda sample: sample.index)):
        sample = msgspec.structs.replace(sample, prompt_routed_experts=None) if place else sample
        more = sample.nbytes + SAMPLE_OVERHEAD
        full = size + more > MESSAGE_BYTES or len(some) == MESSAGE_SAMPLES
        if some and (full or sample.layout != some[0].layout):
            yield pack(pack_samples([""] * len(some), some))
            some, size = [], 0
        some.append(sample)
        size += more
    if some:
        yield pack(pack_samples([""] * len(some), some))


def _samples(data: bytes, group: Group, info: m.Welcome, live: Served, began: float) -> list[Sample] | None:
    """Return stored samples as those of a group under the live weights; None: they are not of this group, and are not used.
    began: time.perf_counter of the submission."""
    bounds = Bounds(info.vocab_size, frozenset(info.eos_token_ids), live.version, routing=info.routing)
    given = {child.index: child for child in group.partials}
    decoder: Decoder[m.SamplesDone] = Decoder(m.SamplesDone, m.answer_limits(info.limits))
    try:
        messages = msgspec.msgpack.decode(data, type=list[list[bytes]])
        stored = [sample for frames in messages for sample in unpack_samples(decoder.unpack(list(frames)))]
        own = {"group_id": group.id, "configuration": info.configuration, "seconds": time.perf_counter() - began, "offloads": 0}
        samples = [_as_of(sample, live.version, own) for sample in stored]
        for sample in samples:
            check_sample(sample, group, given.get(sample.index), bounds)
        if len({sample.index for sample in samples}) != len(group.wanted) or len(samples) != len(group.wanted):
            raise ValueError(f"{len(samples)} samples for {len(group.wanted)} children")
    except (ValueError, RolloutError) as error:
        log.error("memo entry is not of its group group=%r reason=%r", group.id, str(error))
        return None
    return samples


def _as_of(sample: Sample, version: int, fields: dict[str, Any]) -> Sample:
    spans = [(first, version) for first, _ in sample.weight_versions]
    return msgspec.structs.replace(sample, weight_versions=spans, **fields)
