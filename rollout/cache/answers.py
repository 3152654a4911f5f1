"""Encodes the answer to a group as a cache entry: samples, with the digests of the weights that generated them.

    samples of a group ──→ recorded ──→ bytes ──→ Answer.read ──→ Answer.frames ──→ SamplesDone with this client's names

Versions are stored relative to the version that was live at the submission, and each with its digest: a sample that was
generated during a refresh is returned once the same weights are live again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from rollout.engine.types import Limits, Sample
from rollout.transport import messages as m
from rollout.transport.columns import pack_samples, unpack_samples
from rollout.transport.frames import Decoder, Frame, pack

KEPT = frozenset(("stop", "length", "cut", "scored"))
"""reasons of children that are stored: others do not repeat"""
MESSAGE_BYTES, MESSAGE_SAMPLES = 1 << 18, 256
"""most in one message"""
SAMPLE_OVERHEAD = 160
"""bytes that a sample counts in addition to its arrays"""


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: int
    """live at the submission"""
    digests: dict[int, str]
    """digest of each version that was used"""
    messages: list[list[bytes]]
    """frames of SamplesDone"""


def used_versions(samples: Sequence[Sample]) -> set[int]:
    """Return the versions of the weights that generated tokens or computed the KV that they attended to."""
    spans = [span for sample in samples for span in (*sample.weight_versions, *sample.kv_versions)]
    return {span[-1] for span in spans}


def recorded(samples: Sequence[Sample], version: int, digest_of: Callable[[int], str]) -> bytes | None:
    """Encode the samples of a group that was submitted when `version` was live. None: they would not repeat, or the digest of
    their weights is unknown."""
    digests = {used: digest_of(used) for used in used_versions(samples)}
    if not all(digests.values()) or not all(sample.finish_reason in KEPT for sample in samples):
        return None
    frames = [[bytes(frame) for frame in message] for message in messages_of("", samples)]
    return msgspec.msgpack.encode(_Stored(version, digests, frames))


class Answer(NamedTuple):
    """A stored answer."""

    samples: list[Sample]
    version: int
    """that was live at its submission"""
    digests: dict[int, str]
    """of each version that was used"""

    @classmethod
    def read(cls, data: bytes) -> Answer:
        """Decode what `recorded` wrote. Raises ValueError, ProtocolError for anything else."""
        stored = msgspec.msgpack.decode(data, type=_Stored)
        decoder: Decoder[m.SamplesDone] = Decoder(m.SamplesDone, m.answer_limits(Limits()))
        samples = [sample for frames in stored.messages for sample in unpack_samples(decoder.unpack(frames))]
        return cls(samples, stored.version, stored.digests)

    def awaits(self, live: int, digest_of: Callable[[int], str]) -> int | None:
        """Return the newest version that must become live before this can be returned to a group that was submitted when
        `live` was: at most `live` if none must. None: a version has other weights now."""
        shift, latest = live - self.version, live
        for used, digest in self.digests.items():
            now = digest_of(used + shift)
            if now and now != digest or not now and used + shift <= live:
                return None
            latest = max(latest, used + shift)
        return latest

    def frames(self, group_id: str, live: int, seconds: float) -> Iterator[list[Frame]]:
        """Yield messages with the samples, as of a group that was submitted when `live` was. seconds: since then."""
        shift = live - self.version
        samples = [
            msgspec.structs.replace(
                sample,
                seconds=seconds,
                offloads=0,
                weight_versions=[(first, version + shift) for first, version in sample.weight_versions],
                kv_versions=[(first, position, version + shift) for first, position, version in sample.kv_versions],
            )
            for sample in self.samples
        ]
        return messages_of(group_id, samples)


def messages_of(group_id: str, samples: Sequence[Sample]) -> Iterator[list[Frame]]:
    """Yield SamplesDone messages of bounded size. Samples of another layout begin a new one."""
    some: list[Sample] = []
    size = 0
    for sample in samples:
        more = sample.nbytes + SAMPLE_OVERHEAD
        full = size + more > MESSAGE_BYTES or len(some) == MESSAGE_SAMPLES
        if some and (full or sample.layout != some[0].layout):
            yield pack(pack_samples([group_id] * len(some), some))
            some, size = [], 0
        some.append(sample)
        size += more
    if some:
        yield pack(pack_samples([group_id] * len(some), some))
