"""Parts of `rollout.bench.gpu` about memory that changes hands: weights from a trainer's process on the same GPU, and naps."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import psutil

from rollout.bench.by_hand import free_on, synchronize
from rollout.bench.gpu_bench import Bench, Rows
from rollout.service.loop import Service

TRAINER_S = 240.0
"""most that the trainer's process may take"""


def ipc(bench: Bench) -> Rows:
    """Measure whole refreshes from another process while sequences run: staged beside the live weights, and, after a sleep that
    dropped them, straight into place. On a CPU they go by shared memory, which only shows that this runs."""
    sizes = bench.sizes
    engine = bench.engine(kv_tokens=sizes.rows * 1024, max_num_seqs=sizes.rows)
    service = Service(engine, "tcp://127.0.0.1:*")
    told: list[str] = []
    options = [service.endpoint, bench.name, bench.dtype, str(bench.device), str(sizes.refreshes), str(sizes.rows)]

    def follow() -> None:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "rollout.bench.gpu_trainer", *options], capture_output=True, text=True, timeout=TRAINER_S
            )
            told.append(done.stdout if done.returncode == 0 else f"error: {done.stderr[-2000:]}")
        except (OSError, subprocess.SubprocessError) as error:
            told.append(f"error: {error}")
        finally:
            service.stop()

    thread = threading.Thread(target=follow)
    thread.start()
    service.run()
    thread.join()
    if told[0].startswith("error"):
        raise RuntimeError(f"the trainer's process failed: {told[0]}")
    for line in told[0].splitlines():
        yield json.loads(line)


def naps(bench: Bench) -> Rows:
    """Measure the seconds of `sleep` and `wake`, and what both leave behind: bytes of the device and of the process, first and
    last."""
    engine = bench.engine(kv_tokens=bench.sizes.rows * 1024, max_num_seqs=bench.sizes.rows)
    process, taken = psutil.Process(), []
    for _ in range(bench.sizes.naps):
        began = time.perf_counter()
        freed = engine.sleep(1)
        asleep = time.perf_counter()
        engine.wake()
        synchronize(bench.device)
        taken.append(
            {
                "sleep_seconds": asleep - began,
                "wake_seconds": time.perf_counter() - asleep,
                "freed_bytes": freed,
                "free_bytes": free_on(bench.device),
                "process_bytes": process.memory_info().rss,
            }
        )
    for number in sorted({0, 1, len(taken) - 1}):
        yield {"nap": number, "stays": engine.weights.stays and engine.worker.kv.stays, **taken[number]}
