"""`python -m tests.bench keys`: the cost of encryption on a connection, and of the journal per turn of the service's loop. No
model.

    ServiceEnd ── samples of 2,048 tokens ──→ ClientEnd            ClientEnd ── chunks of 4 MiB ──→ ServiceEnd

The two ends are those of the service and its clients, over loopback, each in a thread of this process; libzmq encrypts in an
I/O thread per end. MB are 10⁶ bytes of arrays. A turn of the journal is one transaction in the temporary folder's file system:
it accepts a group, stores and acknowledges a sample, and ends the group."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.engine.values import NONE_SERVED, Limits, Sample, Sampling
from rollout.service.journal import Journal
from rollout.service.persistence import SessionIdentity
from rollout.transport import messages as m
from rollout.transport.columns import pack_samples
from rollout.transport.frames import Frame, frame_bytes, pack
from rollout.transport.keys import files
from rollout.transport.sockets import ClientEnd, ServiceEnd
from rollout.transport.weights.inline import CHUNK_BYTES, WINDOW_BYTES

SAMPLE_TOKENS = 2048
SAMPLES, CHUNKS, TURNS = 4000, 64, 400
WAIT_S = 60.0


class ConnectedPair:
    """A service's end and a client's end, connected. Raises BenchFailed."""

    def __init__(self, folder: Path, keyed: bool) -> None:
        file, mine = folder / "service.json", folder / "client.json"
        if keyed:
            files.create(file, "tcp://127.0.0.1:1")
        self.service = ServiceEnd("tcp://127.0.0.1:*", Limits(), str(file) if keyed else None)
        address = self.service.endpoint
        if keyed:
            files.add(file, "bench", ("rollout",), mine, address)
        self.client = ClientEnd(str(mine) if keyed else address, Limits())
        self.peer = self._introduced()

    def _introduced(self) -> bytes:
        """Send a message each way. Returns the service's name for the client."""
        until, peer = time.monotonic() + WAIT_S, b""
        while time.monotonic() < until:
            self.client.receive(0.01)
            if not peer and self.client.connected:
                self.client.send([b"hello"])
                peer = next((peer for peer, _ in self.service.receive(0.1)), b"")
            if peer and self.service.send(peer, [b"hello"]):
                return peer
        raise BenchFailed("the two ends did not connect")

    def close(self) -> None:
        self.client.close()
        self.service.close()


def sample() -> list[Frame]:
    """Return the frames of a message with one sample."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, SAMPLE_TOKENS, np.int32)
    done = Sample(
        group_id="group", index=0, token_ids=tokens, logprobs=rng.standard_normal(SAMPLE_TOKENS, np.float32),
        finish_reason="length", weight_versions=[(0, 1)], prompt_tokens=256,
    )  # fmt: skip
    return pack(pack_samples(["group"], [done]))


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row for samples and one for weights, without and with keys, a row for the journal, and the ratios."""
    speeds: dict[tuple[str, bool], float] = {}
    for keyed in (False, True):
        for what, one in (("samples", samples_per_second), ("weights", weights_per_second)):
            with tempfile.TemporaryDirectory(prefix="rollout-") as folder, closing(ConnectedPair(Path(folder), keyed)) as pair:
                speeds[what, keyed] = one(pair, setup.scale)
            yield {"what": what, "keys": keyed, "mb_per_s": speeds[what, keyed]}
    seconds = journal_turns(max(20, int(TURNS * setup.scale)))
    yield {"what": "journal", "median_us": 1e6 * statistics.median(seconds), "longest_us": 1e6 * max(seconds)}
    ratios = {f"{what}_ratio": speeds[what, True] / speeds[what, False] for what in ("samples", "weights")}
    yield {"summary": True, **ratios}


def samples_per_second(pair: ConnectedPair, scale: float) -> float:
    """Send samples to the client. Returns MB/s."""
    count, frames = max(20, int(SAMPLES * scale)), sample()

    def send() -> None:
        left = count
        while left:
            if pair.service.send(pair.peer, frames):
                left -= 1
            else:
                pair.service.receive(0.0005)

    seconds = timed(send, lambda: len(pair.client.receive(0.1)), count + 1)  # the first message is the introduction
    return count * frame_bytes(frames) / seconds / 1e6


def weights_per_second(pair: ConnectedPair, scale: float) -> float:
    """Send chunks of weights to the service. Returns MB/s."""
    count, chunk = max(4, int(CHUNKS * scale)), np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, np.uint8)
    pair.service.expect(WINDOW_BYTES)
    window = threading.Semaphore(WINDOW_BYTES // CHUNK_BYTES)

    def send() -> None:
        for left in range(count, 0, -1):
            window.acquire()
            frames = pack(m.Chunk(left, "a" * 32, 0, [chunk]))
            while not pair.client.send(frames):
                pair.client.receive(0.01, sending=True)

    def receive() -> int:
        chunks = len(list(pair.service.receive(0.1)))
        if chunks:
            window.release(chunks)
        return chunks

    return count * CHUNK_BYTES / timed(send, receive, count) / 1e6


def timed(send: Callable[[], None], receive: Callable[[], int], count: int) -> float:
    """Send in a thread and receive until `count` messages have arrived. Returns the seconds. Raises BenchFailed after
    WAIT_S."""
    thread = threading.Thread(target=send)
    started, got = time.perf_counter(), 0
    thread.start()
    until = time.monotonic() + WAIT_S
    while got < count and time.monotonic() < until:
        got += receive()
    seconds = time.perf_counter() - started
    thread.join(WAIT_S)
    if got < count:
        raise BenchFailed(f"{got} of {count} messages arrived")
    return seconds


def journal_turns(count: int) -> list[float]:
    """Return the seconds of each turn of a journal."""
    submit = pack(m.Submit("group", np.arange(256, dtype=np.int32), Sampling(n=1, max_tokens=SAMPLE_TOKENS)))
    done, seconds = sample(), []
    with tempfile.TemporaryDirectory(prefix="rollout-") as folder, closing(Journal(f"{folder}/journal", "none")) as journal:
        journal.opened(SessionIdentity("", "session", "bench", 1))
        for number in range(count):
            started = time.perf_counter()
            journal.accepted("", "session", f"1.{number}", submit, 7, NONE_SERVED)
            journal.ended(f"1.{number}", 0, "length", done)
            journal.acked(f"1.{number - 1}", 0)
            journal.dropped(f"1.{number - 1}")
            journal.commit(NONE_SERVED)
            seconds.append(time.perf_counter() - started)
    return seconds
