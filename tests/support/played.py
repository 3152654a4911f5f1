"""A service played by hand, for a real client of threads or of event loops."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.client.api import Handle, RolloutClient
from rollout.engine.values import Limits, Sample, Served
from rollout.transport import errors as e
from rollout.transport import messages as m
from rollout.transport.columns import pack_samples
from rollout.transport.frames import Decoder, Frame, pack
from rollout.transport.loopback import LoopbackService
from tests.support.fake_engine import VOCAB

WAIT = 60.0
"""for what comes: a bound for hangs only"""


class Played:
    """The service's end of a client; `answer` says Welcome, everything else is the test's."""

    def __init__(self, kind: type[Any] = RolloutClient, **options: Any) -> None:
        self.end = LoopbackService()
        self.incarnation, self.starts, self.live = "one", 0, Served(1)
        self.capabilities: tuple[str, ...] = ()
        self._decoder: Decoder[m.ClientMessage] = Decoder(m.ClientMessage, Limits())
        self._inbox: list[tuple[bytes, Any]] = []
        self.peer = b""
        connected: list[Any] = []
        thread = threading.Thread(
            target=lambda: connected.append(kind(transport=self.end.connect(), connect_timeout_s=WAIT, **options))
        )
        thread.start()
        self.welcome(self.get(m.Hello))
        thread.join(WAIT)
        (self.client,) = connected

    def get(self, kind: Any) -> Any:
        """The next message of this kind; others are skipped."""
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            for peer, frames in self.end.receive(0.1):
                self._inbox.append((peer, self._decoder.unpack([bytes(frame) for frame in frames])))
            while self._inbox:
                self.peer, message = self._inbox.pop(0)
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind} came")

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self.send_frames(pack(message))

    def send_frames(self, frames: list[Frame]) -> None:
        assert self.end.send(self.peer, frames)

    def welcome(self, hello: m.Hello, groups: np.ndarray | None = None) -> None:
        info = ("played", VOCAB, 9999, (), self.live.version, Limits(), self.capabilities)
        more = {"starts": self.starts, "digest": self.live.digest}
        self.send(m.Welcome(m.PROTOCOL, hello.number, self.incarnation, *info, groups, **more))

    def sample(self, group_id: str, index: int, first: int = 0, **fields: Any) -> m.SamplesDone:
        """The message of one sample of three tokens; `fields` replaces some of its fields."""
        array = np.arange(first, first + 3, dtype=np.int32)
        sample = Sample(
            group_id=group_id,
            index=index,
            token_ids=array,
            logprobs=np.zeros(3, np.float32),
            finish_reason="aborted",
            weight_versions=[(0, self.live.version)],
            prompt_tokens=1,
        )
        return pack_samples([group_id], [msgspec.structs.replace(sample, **fields)])


def failure(handle: Handle) -> e.RolloutError:
    with pytest.raises(e.RolloutError) as caught:
        handle.result(WAIT)
    return caught.value
