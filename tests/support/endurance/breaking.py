"""Pushes that break on their way:  python -m tests.support.endurance.breaking KIND SCRATCH

A line of JSON on standard input is one push, by a process forked for it; a line of JSON answers how that ended.

    {"address": "tcp://...", "version": 3, "fault": "flip" | "die", "where": 0.37}
    {"ok": 3} | {"error": "WeightsRefused: ..."} | {"killed": 9}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from rollout.client.api import RolloutClient
from tests.support.endurance.models import TestModel
from tests.support.watermark_pusher import die, flip

MESSAGES = 3
"""of a push through shared memory, about: Begin, Commit, and what is asked around them"""


def push(model: TestModel, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    weights = model.weights(job["version"])
    if job["fault"] == "flip":
        flip(job["where"])
    try:
        with RolloutClient(job["address"], name="breaking", connect_timeout_s=60, link_timeout_s=60) as client:
            if job["fault"] == "die":
                die(job["where"] * MESSAGES)
            return {"ok": client.refresh(weights, version=job["version"], via="shm", timeout=120).version}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    torch.set_num_threads(1)
    model = TestModel(sys.argv[1], Path(sys.argv[2]))  # type: ignore[arg-type]
    print("ready", flush=True)
    for line in sys.stdin:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(send, json.dumps(push(model, json.loads(line))).encode())
            os._exit(0)
        os.close(send)
        with os.fdopen(receive, "rb") as pipe:
            answer = pipe.read().decode()
        _, status = os.waitpid(child, 0)
        print(answer or json.dumps({"killed": -os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
