"""Trainers that push watermarked weights and break:  python -m tests.support.watermark_pusher ADDRESS

A line of JSON on standard input is one push, by a process forked for it; a line of JSON answers how that ended.

    {"version": 3, "via": "shm", "fault": "none" | "flip" | "missing" | "die", "where": 0.37}
    {"ok": {...}} | {"error": "WeightsRefused: ..."} | {"killed": 9}

`where` is a share: of the payload for a flipped byte, of the tensors for the missing one; "die" sends SIGKILL to itself before
the first, second, ... last message of the push, or a moment after it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import msgspec
import torch

from rollout.client.api import RolloutClient
from rollout.client.link import Link
from rollout.client.refresh import WeightSender
from rollout.transport.weights import distributed, inline
from rollout.transport.weights.shm import NONCE_BYTES
from tests.support.watermark import weights_of

MESSAGES = {"inline": 17, "shm": 2, "gloo": 2}
"""of a push: Begin, chunks of half a megabyte, Commit"""


def push(address: str, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    inline.CHUNK_BYTES = distributed.SLOT_BYTES = 500_000
    named, where = weights_of(job["version"]), job["where"]
    if job["fault"] == "missing":
        del named[f"w{int(where * len(named))}"]
    if job["fault"] == "flip":
        flip(where)
    with RolloutClient(address, name="pusher", connect_timeout_s=60, link_timeout_s=60) as client:
        if job["fault"] == "die":
            die(where * MESSAGES[job["via"]])
        try:
            return {"ok": msgspec.to_builtins(client.refresh(named, version=job["version"], via=job["via"], timeout=60))}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def flip(where: float) -> None:
    """Flip a byte after the digests were taken and before the bytes leave."""
    offer = WeightSender._offer

    def damaged(self: WeightSender, named: Any, via: Any) -> Any:
        sender = offer(self, named, via)
        arrays: Any = sender.data
        byte = int(where * sum(map(len, arrays)))
        flipped = self._transports["shm"].segment._memory[NONCE_BYTES:] if via == "shm" else arrays[byte // len(arrays[0])]
        flipped[byte if via == "shm" else byte % len(flipped)] ^= 1 << byte % 8
        return sender

    WeightSender._offer = damaged  # type: ignore[method-assign]


def die(after: float) -> None:
    request, sent = Link.request, iter(range(10_000))

    def dying(self: Link, make: Any) -> Any:
        if next(sent) == int(after):
            threading.Thread(target=later, daemon=True).start()
        return request(self, make)

    def later() -> None:
        time.sleep(after % 1 * 0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    Link.request = dying  # type: ignore[method-assign]


def main() -> None:
    for line in sys.stdin:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(send, json.dumps(push(sys.argv[1], json.loads(line))).encode())
            os._exit(0)
        os.close(send)
        with os.fdopen(receive, "rb") as pipe:
            answer = pipe.read().decode()
        _, status = os.waitpid(child, 0)
        killed = os.waitstatus_to_exitcode(status)
        print(answer or json.dumps({"killed": -killed}), flush=True)


if __name__ == "__main__":
    main()
