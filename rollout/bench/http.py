"""`rollout bench http`: what the HTTP facade costs, against the native client.

    native   8 groups of 32 through `RolloutClient`
    http     256 requests of n = 1 at once, over the same 8 prompts, a connection each, POST /inference/v1/generate

Both make the same tokens on one service, in turn, with prompts that no run had before. The load comes from this process, as
plain bytes, so that it costs little beside the facade; microseconds a request are CPU time of the facade's process.
Once with a model of two tiny layers, where the facade is what costs and a run takes a second at any `--scale`, and once with
`--model`, of which `--scale` says how many tokens each request wants.
"""

from __future__ import annotations

import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from engine.config import EngineConfig
from engine.types import Sampling
from rollout.bench.errors import BenchFailed
from rollout.bench.inputs import PromptSource, PromptText, RandomText, save_tiny
from rollout.client.api import RolloutClient
from rollout.config import Config
from rollout.process import service_process

NAME = "http"
PROMPTS, N = 8, 32
PROMPT_TOKENS, NEW_TOKENS = 128, 128
WARM_UP_TOKENS = 8
WAIT_S = 300.0
VOCABULARY = 1024
"""of the tiny model"""


def measure(folder: Path, engine: EngineConfig, scale: float, repeat: int, text: PromptText) -> Iterator[dict[str, Any]]:
    """Yield one object for each pair of runs and a summary for each model. Raises BenchFailed where the facade does not start,
    as without the extra `http`, or answers otherwise than it was asked."""
    scaled = max(WARM_UP_TOKENS, round(NEW_TOKENS * scale))
    with tempfile.TemporaryDirectory(prefix="rollout-") as temporary:
        tiny = Path(temporary)
        save_tiny(tiny, 64, VOCABULARY, "bfloat16")
        models: list[tuple[str, Path, PromptSource, int]] = [
            ("tiny", tiny, RandomText(VOCABULARY), NEW_TOKENS),
            (folder.name, folder, text, scaled),
        ]
        for name, model, prompts, new_tokens in models:
            config = msgspec.structs.replace(
                engine, model=str(model), kv_tokens=131_072, cpu_offload_gib=0, max_num_seqs=PROMPTS * N
            )
            runs = list(turns(Config(engine=config), folder, prompts, new_tokens, repeat))
            for row in runs:
                yield {"workload": NAME, "model": name, **row}
            yield summarise(name, new_tokens, runs)


def turns(config: Config, tokenizer: Path, text: PromptSource, new_tokens: int, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of each turn; the first one warms up and is left out."""
    with (
        service_process(config) as service,
        RolloutClient(service.endpoint, name="rollout bench") as client,
        facade_process(service.endpoint, tokenizer) as (port, facade),
    ):
        for turn in range(repeat + 1):
            start = 2 * turn * PROMPTS * PROMPT_TOKENS
            tokens = new_tokens if turn else WARM_UP_TOKENS
            native = run_native(client, text.slices(start, PROMPTS, PROMPT_TOKENS), tokens)
            prompts = text.slices(start + PROMPTS * PROMPT_TOKENS, PROMPTS, PROMPT_TOKENS)
            with connections(port, PROMPTS * N) as sockets:  # a facade hangs up on those that say nothing for long
                before = facade.cpu_times()
                seconds = run_http(sockets, prompts, tokens)
                after = facade.cpu_times()
            cpu = after.user + after.system - before.user - before.system
            if turn:
                yield {
                    "run": turn - 1,
                    "native_seconds": round(native, 4),
                    "http_seconds": round(seconds, 4),
                    "ratio_to_native": round(native / seconds, 4),
                    "microseconds_per_request": round(1e6 * cpu / len(sockets), 1),
                }


def run_native(client: RolloutClient, prompts: list[np.ndarray], new_tokens: int) -> float:
    """Return the seconds of groups of N through the client."""
    sampling = Sampling(n=N, max_tokens=new_tokens, ignore_eos=True)
    started = time.perf_counter()
    tokens = sum(len(sample.token_ids) for sample in client.generate(prompts, sampling, timeout=WAIT_S))
    seconds = time.perf_counter() - started
    check(tokens, new_tokens)
    return seconds


def run_http(sockets: list[socket.socket], prompts: list[np.ndarray], new_tokens: int) -> float:
    """Return the seconds of N requests for each prompt, all at once."""
    params = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1, "temperature": 1.0}
    requests = [request(msgspec.json.encode({"token_ids": prompt.tolist(), "sampling_params": params})) for prompt in prompts]
    started = time.perf_counter()
    for i, connection in enumerate(sockets):
        connection.sendall(requests[i % len(requests)])
    bodies = answers(sockets)
    seconds = time.perf_counter() - started
    check(sum(len(msgspec.json.decode(body)["choices"][0]["token_ids"]) for body in bodies), new_tokens)
    return seconds


def check(tokens: int, new_tokens: int) -> None:
    if tokens != PROMPTS * N * new_tokens:
        raise BenchFailed(f"{NAME}: {tokens} tokens came of {PROMPTS * N * new_tokens}, so the time means nothing")


def request(body: bytes) -> bytes:
    head = "POST /inference/v1/generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def answers(sockets: list[socket.socket]) -> list[bytes]:
    """Return the body of one answer from each connection. Raises BenchFailed for one that is not served in WAIT_S."""
    received = {connection: bytearray() for connection in sockets}
    bodies: dict[socket.socket, bytes] = {}
    deadline = time.monotonic() + WAIT_S
    with selectors.DefaultSelector() as selector:
        for connection in sockets:
            selector.register(connection, selectors.EVENT_READ)
        while len(bodies) < len(sockets):
            for key, _ in selector.select(1.0):
                ready: Any = key.fileobj
                part = ready.recv(1 << 18)
                received[ready] += part
                body = whole(received[ready])
                if body is not None:
                    bodies[ready] = body
                    selector.unregister(ready)
                elif not part:
                    raise BenchFailed(f"{NAME}: the facade hung up: {bytes(received[ready][:200])!r}")
            if time.monotonic() > deadline:
                raise BenchFailed(f"{NAME}: {len(bodies)} of {len(sockets)} answers after {WAIT_S} s")
    return [bodies[connection] for connection in sockets]


def whole(data: bytearray) -> bytes | None:
    """Return the body of an answer, None if more is to come. Raises BenchFailed for one that is not 200."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(data[:end]).lower()
    if not head.startswith(b"http/1.1 200"):
        raise BenchFailed(f"{NAME}: {bytes(data[:500])!r}")
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    return bytes(data[end + 4 :]) if len(data) - end - 4 >= length else None


@contextmanager
def facade_process(endpoint: str, tokenizer: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run `rollout http` on a free port until the block ends. Raises BenchFailed if it does not start."""
    with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "rollout", "http", "--address", endpoint, "--port", "0", "--tokenizer", str(tokenizer)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        child = subprocess.Popen([*command, "--ready-file", str(ready)], env=environment)
        try:
            deadline = time.monotonic() + WAIT_S
            while not ready.exists():
                if child.poll() is not None or time.monotonic() > deadline:
                    raise BenchFailed(f"{NAME}: rollout http did not start; what it said is on standard error")
                time.sleep(0.05)
            yield int(ready.read_text().split()[0].rsplit(":", 1)[1]), psutil.Process(child.pid)
        finally:
            child.kill()
            child.wait()


@contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open connections, and close them."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.append(connection)
        yield opened
    finally:
        for connection in opened:
            connection.close()


def summarise(name: str, new_tokens: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    median = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "run"}
    sizes = {"prompts": PROMPTS, "n": N, "prompt_tokens": PROMPT_TOKENS, "new_tokens": new_tokens, "runs": len(runs)}
    return {
        "workload": NAME,
        "summary": True,
        "model": name,
        **{key: round(value, 4) for key, value in median.items()},
        **sizes,
    }
