"""`rollout bench keys`: what encryption costs on a connection, and what the journal costs a turn of the loop. No model.

    ServiceEnd ── samples of 2,048 tokens ──→ ClientEnd            ClientEnd ── chunks of 4 MiB ──→ ServiceEnd

Both ends are those of the service and of its clients, over loopback, each in a thread of this process. CURVE is computed in the
I/O threads of libzmq, one at either end. MB are 10⁶ bytes of arrays. The journal's turn takes a group, the end of
its sample, its ack and its end: one transaction, on the file system of the temporary folder.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.types import NONE_SERVED, Limits, Sample, Sampling
from rollout.bench.errors import BenchFailed
from rollout.service.journal import Journal
from transport import messages as m
from transport.columns import pack_samples
from transport.frames import Frame, frame_bytes, pack
from transport.keys import files
from transport.sockets import ClientEnd, ServiceEnd
from transport.weights.inline import CHUNK_BYTES, WINDOW_BYTES

NAME = "keys"
SAMPLE_TOKENS = 2048
SAMPLES, CHUNKS, TURNS = 4000, 64, 400
WAIT_S = 60.0


class Pair:
    """A service's end and a client's, connected."""

    def __init__(self, folder: Path, keyed: bool) -> None:
        file, mine = folder / "service.json", folder / "client.json"
        if keyed:
            files.create(file, "tcp://127.0.0.1:1")
        self.service = ServiceEnd("tcp://127.0.0.1:*", Limits(), str(file) if keyed else None)
        address = self.service.endpoint
        if keyed:
            keys = msgspec.structs.replace(files.add(file, "bench", ("rollout",), mine), address=address)
            mine.unlink()
            files._write(mine, keys, replace=False)
        self.client = ClientEnd(str(mine) if keyed else address, Limits())
        self.peer = self._introduced()

    def _introduced(self) -> bytes:
        """Send something each way. Returns what the service calls the client. Raises BenchFailed."""
        until, peer = time.monotonic() + WAIT_S, b""
        while time.monotonic() < until:
            self.client.receive(0.01)
            if not peer and self.client.connected:
                self.client.send([b"hello"])
                peer = next((peer for peer, _ in self.service.receive(0.1)), b"")
            if peer and self.service.send(peer, [b"hello"]):
                return peer
        raise BenchFailed("the two ends did not meet")

    def close(self) -> None:
        self.client.close()
        self.service.close()


def sample() -> list[Frame]:
    """Make the message of one sample."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, SAMPLE_TOKENS, np.int32)
    done = Sample(
        group_id="group", index=0, token_ids=tokens, logprobs=rng.standard_normal(SAMPLE_TOKENS, np.float32),
        finish_reason="length", weight_versions=[(0, 1)], prompt_tokens=256,
    )  # fmt: skip
    return pack(pack_samples(["group"], [done]))


def measure(scale: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each thing that travels, without and with keys, one for the journal, and the ratios."""
    speeds: dict[tuple[str, bool], float] = {}
    for keyed in (False, True):
        for what, one in (("samples", samples_per_second), ("weights", weights_per_second)):
            with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
                pair = Pair(Path(folder), keyed)
                try:
                    speeds[what, keyed] = one(pair, scale)
                finally:
                    pair.close()
            yield {"workload": NAME, "what": what, "keys": keyed, "mb_per_s": round(speeds[what, keyed], 1)}
    turns = journal_turns(max(20, int(TURNS * scale)))
    micros = {"median_us": round(statistics.median(turns) * 1e6, 1), "longest_us": round(max(turns) * 1e6, 1)}
    yield {"workload": NAME, "what": "journal", **micros}
    ratios = {f"{what}_ratio": round(speeds[what, True] / speeds[what, False], 3) for what in ("samples", "weights")}
    yield {"workload": NAME, "summary": True, **ratios}


def samples_per_second(pair: Pair, scale: float) -> float:
    """Send samples to a client. Returns MB/s."""
    count, frames = max(20, int(SAMPLES * scale)), sample()
    started = time.perf_counter()

    def send() -> None:
        left = count
        while left:
            if pair.service.send(pair.peer, frames):
                left -= 1
            else:
                pair.service.receive(0.0005)

    thread = threading.Thread(target=send)
    thread.start()
    got, until = -1, time.monotonic() + WAIT_S  # the first one is the introduction
    while got < count and time.monotonic() < until:
        got += len(pair.client.receive(0.1))
    seconds = time.perf_counter() - started
    thread.join(WAIT_S)
    if got < count:
        raise BenchFailed(f"{got} of {count} samples came")
    return count * frame_bytes(frames) / seconds / 1e6


def weights_per_second(pair: Pair, scale: float) -> float:
    """Send chunks of weights to a service. Returns MB/s."""
    count, chunk = max(4, int(CHUNKS * scale)), np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, np.uint8)
    pair.service.expect(WINDOW_BYTES)
    taken = threading.Semaphore(WINDOW_BYTES // CHUNK_BYTES)
    started = time.perf_counter()

    def send() -> None:
        left = count
        while left:
            taken.acquire()
            frames = pack(m.Chunk(left, "a" * 32, 0, [chunk]))
            while not pair.client.send(frames):
                pair.client.receive(0.01, sending=True)
            left -= 1

    thread = threading.Thread(target=send)
    thread.start()
    got, until = 0, time.monotonic() + WAIT_S
    while got < count and time.monotonic() < until:
        for _ in pair.service.receive(0.1):
            got += 1
            taken.release()
    seconds = time.perf_counter() - started
    thread.join(WAIT_S)
    if got < count:
        raise BenchFailed(f"{got} of {count} chunks came")
    return count * CHUNK_BYTES / seconds / 1e6


def journal_turns(count: int) -> list[float]:
    """Return the seconds of each of so many turns of a journal."""
    submit = pack(m.Submit("group", np.arange(256, dtype=np.int32), Sampling(n=1, max_tokens=SAMPLE_TOKENS)))
    done, seconds = sample(), []
    with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
        journal = Journal(f"{folder}/journal", "none")
        journal.opened("", "session", "bench", 1)
        try:
            for number in range(count):
                started = time.perf_counter()
                journal.accepted("", "session", f"1.{number}", submit, 7, NONE_SERVED)
                journal.ended(f"1.{number}", 0, "length", done)
                journal.acked(f"1.{number - 1}", 0)
                journal.dropped(f"1.{number - 1}")
                journal.commit(NONE_SERVED)
                seconds.append(time.perf_counter() - started)
        finally:
            journal.close()
    return seconds
