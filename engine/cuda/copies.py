"""Runs the KV copies of a step on two CUDA streams, in parallel with compute: an engine of `rollout.engine.kv.copies`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.engine.kv.block import BlockCopies, Copied
from rollout.engine.kv.copies import ALL_SLOTS, Copy, Pairs, SlotClaims


def copy_claims(pairs: Pairs) -> SlotClaims:
    """Return the slots of copies on the device."""
    written = {target for _, target in pairs}
    used = written.union(source for source, _ in pairs)
    return SlotClaims(
        reads=lambda slots: not used.isdisjoint(slots.tolist()), writes=lambda slots: not written.isdisjoint(slots.tolist())
    )


class IssuedCopies(NamedTuple):
    """Copies of one list between device and host, and the events at their start and end."""

    device: np.ndarray
    """device slots"""
    host: frozenset[int]
    """host slots"""
    began: Any
    ended: Any


class CopyStream:
    """A stream for one direction between device and host, and its copies in flight, oldest first."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.under_way: deque[IssuedCopies] = deque()

    def ended(self) -> Copied:
        """Remove copies that have finished. Returns their number and duration."""
        blocks, seconds = 0, 0.0
        while self.under_way and self.under_way[0].ended.query():
            issued = self.under_way.popleft()
            blocks += len(issued.device)
            seconds += issued.began.elapsed_time(issued.ended) / 1000
        return Copied(blocks, seconds)


class StreamCopies:
    """Runs copies on two CUDA streams, one per direction; copies within the device run on the compute stream.

        compute  … step k ─────────┤ within ─ step k + 1 ──────────┤ …
        out        offloads ─ mirrors ─┤  offloads ─ mirrors ─┤
        into            restores ─ prefetches ─┤  restores ─┤

    A copy and a step, or two copies, wait for each other only if they use the same slot and one of them writes it. So nothing
    waits for mirrors (full blocks do not change), for prefetches (into slots that were free), or for offloads whose slot is not
    reused yet. Events order the streams; no call blocks the host.

    Args:
        cuda: torch.cuda, or a stand-in for tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._out, self._into = CopyStream(cuda.Stream(device)), CopyStream(cuda.Stream(device))
        self._before: Any = None
        """event before the newest step; copies wait for all older work"""
        self._newest: list[SlotClaims] = [ALL_SLOTS]
        """slots of the newest step, and of the copies on the device launched with it"""

    def run(self, moves: BlockCopies, copy: Copy, uses: SlotClaims) -> Copied:
        compute = self._cuda.current_stream(self._device)
        ended = [way.ended() for way in (self._out, self._into)]
        now = compute.record_event()
        spans = [(self._before, ALL_SLOTS), *((now, claims) for claims in self._newest)]
        self._issue(self._out, copy.out, moves.offloads, spans)
        self._issue(self._into, copy.into, moves.restores, spans)
        within = copy_claims(moves.copies)
        if moves.copies:
            self._hold(compute, within)
            copy.within(moves.copies)
            spans.append((compute.record_event(), within))
        self._issue(self._out, copy.out, moves.mirrors, spans)
        self._issue(self._into, copy.into, moves.prefetches, spans)
        self._hold(compute, uses)
        self._before, self._newest = now, [uses, within]
        return Copied(sum(each.blocks for each in ended), sum(each.seconds for each in ended))

    def finish(self) -> None:
        for way in (self._out, self._into):
            way.stream.synchronize()
        self._newest = [ALL_SLOTS]  # the following compute is not a step

    def _issue(
        self, way: CopyStream, copy: Callable[[Pairs], None], pairs: Pairs, spans: Iterable[tuple[Any, SlotClaims]]
    ) -> None:
        """Launch copies on a stream. They wait for work that uses the same slots. spans: earlier compute, as (event at its end,
        its slots)."""
        if not pairs:
            return
        outwards = way is self._out
        device = np.array([pair[0 if outwards else 1] for pair in pairs])
        host = frozenset(pair[1 if outwards else 0] for pair in pairs)
        for event, claims in spans:
            if event is not None and (claims.writes(device) if outwards else claims.reads(device)):
                way.stream.wait_event(event)
        for other in (self._into if outwards else self._out).under_way:
            if not host.isdisjoint(other.host) or np.isin(device, other.device).any():
                way.stream.wait_event(other.ended)
        began, ended = (self._cuda.Event(enable_timing=True) for _ in range(2))
        with self._cuda.stream(way.stream):
            began.record(way.stream)
            try:
                copy(pairs)
            finally:
                ended.record(way.stream)
                way.under_way.append(IssuedCopies(device, host, began, ended))

    def _hold(self, compute: Any, claims: SlotClaims) -> None:
        """Let the compute that follows wait for the copies that write slots it uses, or read slots it writes."""
        for issued in self._into.under_way:
            if claims.reads(issued.device):
                compute.wait_event(issued.ended)
        for issued in self._out.under_way:
            if claims.writes(issued.device):
                compute.wait_event(issued.ended)
