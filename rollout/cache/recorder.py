"""Stores groups, refreshes and the service's Welcome as entries of the folder."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.cache.answers import Answer, recorded
from rollout.cache.clients import CachedClient
from rollout.cache.keys import KnownWeights, refresh_name
from rollout.cache.store import PINNED, FolderStore
from rollout.engine.types import Limits, Refreshed, Served
from rollout.logs import logger
from rollout.transport import messages as m
from rollout.transport.columns import unpack_samples
from rollout.transport.errors import ProtocolError, RolloutError
from rollout.transport.frames import Decoder, pack

WELCOME = f"{PINNED}-recorded"
"""entry with the Welcome that `--offline` repeats"""

log = logger(__name__)


class Recorder:
    """Stores what passes, and finds it again. Called by the proxy's thread."""

    def __init__(self, store: FolderStore, weights: KnownWeights) -> None:
        self.store = store
        self._weights = weights

    def find(self, name: str) -> Answer | None:
        """Return a stored answer, None if there is none."""
        data = self.store.get(name)
        try:
            return None if data is None else Answer.read(data)
        except (ValueError, RolloutError) as error:
            log.error("cache entry is not readable entry=%s reason=%r", name, str(error))
            return None

    def requested(self, client: CachedClient, message: Any) -> None:
        """Note what of a request is needed for its answer."""
        match message:
            case m.StatusRequest(request_id=number):
                client.status_requests.add(number)
            case m.Begin(push_id=push):
                try:
                    client.begun[push] = refresh_name(message, self._weights), message.adapter is not None
                except RolloutError:
                    pass  # the service says what is wrong
            case m.Commit(request_id=number, push_id=push) if push in client.begun:
                client.commits[number] = client.begun.pop(push)
            case m.Abandon(push_id=push):
                client.begun.pop(push, None)

    def record(self, client: CachedClient, done: m.SamplesDone) -> None:
        """Note the samples of groups that are recorded; store those that are complete."""
        try:
            samples = [sample for sample in unpack_samples(done) if sample.group_id in client.recordings]
        except ProtocolError:
            return  # the client says what is wrong
        for sample in samples:
            recording = client.recordings.get(sample.group_id)
            if recording is None or sample.index not in recording.wanted:
                continue
            recording.wanted.discard(sample.index)
            recording.samples.append(sample)
            if not recording.wanted:
                del client.recordings[sample.group_id]
                data = recorded(recording.samples, recording.version, self._weights.digest)
                if data is not None:
                    self.store.put(recording.name, data)

    def welcomed(self, welcome: m.Welcome) -> None:
        """Store the first Welcome of each start of the service."""
        before = stored_welcome(self.store, welcome.limits)
        if before is None or before.incarnation != welcome.incarnation:
            plain = msgspec.structs.replace(welcome, groups=None)
            self.store.put(WELCOME, msgspec.msgpack.encode([bytes(frame) for frame in pack(plain)]))

    def applied(self, client: CachedClient, request_id: int, refreshed: Refreshed) -> None:
        """Note weights that are live, and store which refresh has led to them."""
        self._weights.seen(Served(refreshed.version, refreshed.digest))
        if request_id in client.commits:
            name, adapter = client.commits.pop(request_id)
            self.store.put(name, refreshed.digest.encode())
            if not adapter:
                self._weights.base = refreshed.digest


def stored_welcome(store: FolderStore, limits: Limits) -> m.Welcome | None:
    """Return the Welcome of the service that was recorded last; None: nothing was recorded."""
    data = store.get(WELCOME)
    if data is None:
        return None
    decoder: Decoder[m.Welcome] = Decoder(m.Welcome, m.answer_limits(limits))
    return decoder.unpack(msgspec.msgpack.decode(data, type=list[bytes]))
