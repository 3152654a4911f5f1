"""`rollout bench http`: the cost of the HTTP gateway, compared with the native client.

    native   8 groups of 32 through `RolloutClient`
    http     256 concurrent requests of n = 1 for the same 8 prompts, a connection each, POST /inference/v1/generate

Both generate the same number of tokens on one service, in turn, with prompts that no run has had. Microseconds per request are
CPU time of the gateway's process. The first model has two tiny layers, so that the gateway dominates; its lengths do not scale.
The second one is `--model`; `--scale` multiplies its tokens per request.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path

import msgspec
import numpy as np
import psutil

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import PromptSource, RandomText, save_tiny
from rollout.bench.target import connected
from rollout.client.api import RolloutClient
from rollout.config import Config
from rollout.engine.processes import run_module
from rollout.engine.values import Sampling

PROMPTS, N = 8, 32
PROMPT_TOKENS, NEW_TOKENS = 128, 128
WARM_UP_TOKENS = 8
WAIT_S = 300.0
VOCABULARY = 1024
"""of the tiny model"""


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per pair of runs and a summary per model. Raises BenchFailed if the gateway does not start (it needs the
    extra `http`) or sends a wrong response."""
    with tempfile.TemporaryDirectory(prefix="rollout-") as temporary:
        tiny = save_tiny(Path(temporary), 64, VOCABULARY, "bfloat16")
        models: list[tuple[str, Path, PromptSource, int]] = [
            ("tiny", tiny, RandomText(VOCABULARY), NEW_TOKENS),
            (setup.folder.name, setup.folder, setup.text, setup.scaled(NEW_TOKENS, WARM_UP_TOKENS)),
        ]
        for name, model, prompts, new_tokens in models:
            engine = setup.config(model=str(model), kv_tokens=131_072, cpu_offload_gib=0, max_num_seqs=PROMPTS * N)
            runs = list(in_turn(Config(engine=engine), setup.folder, prompts, new_tokens, setup.repeat))
            yield from ({"model": name, "run": run, **row} for run, row in enumerate(runs))
            yield {
                "summary": True,
                "model": name,
                **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
                "prompts": PROMPTS,
                "n": N,
                "prompt_tokens": PROMPT_TOKENS,
                "new_tokens": new_tokens,
                "runs": len(runs),
            }


def in_turn(config: Config, tokenizer: Path, text: PromptSource, new_tokens: int, repeat: int) -> Iterator[Row]:
    """Yield the figures of each pair of runs. The first pair warms up and is left out."""
    with connected(config) as (service, client), gateway(service.endpoint, tokenizer) as (port, process):
        for turn in range(repeat + 1):
            start = 2 * turn * PROMPTS * PROMPT_TOKENS
            tokens = new_tokens if turn else WARM_UP_TOKENS
            native = run_native(client, text.slices(start, PROMPTS, PROMPT_TOKENS), tokens)
            prompts = text.slices(start + PROMPTS * PROMPT_TOKENS, PROMPTS, PROMPT_TOKENS)
            with connections(port, PROMPTS * N) as sockets:  # the gateway closes connections that stay idle
                before = process.cpu_times()
                seconds = run_http(sockets, prompts, tokens)
                after = process.cpu_times()
            cpu = after.user + after.system - before.user - before.system
            if turn:
                yield {
                    "native_seconds": native,
                    "http_seconds": seconds,
                    "ratio_to_native": native / seconds,
                    "microseconds_per_request": 1e6 * cpu / len(sockets),
                }


def run_native(client: RolloutClient, prompts: list[np.ndarray], new_tokens: int) -> float:
    """Run groups of N through the client. Returns the seconds."""
    sampling = Sampling(n=N, max_tokens=new_tokens, ignore_eos=True)
    started = time.perf_counter()
    tokens = sum(len(sample.token_ids) for sample in client.generate(prompts, sampling, timeout=WAIT_S))
    seconds = time.perf_counter() - started
    check(tokens, new_tokens)
    return seconds


def run_http(sockets: list[socket.socket], prompts: list[np.ndarray], new_tokens: int) -> float:
    """Send N requests for each prompt, all at once. Returns the seconds."""
    params = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1, "temperature": 1.0}
    requests = [request(msgspec.json.encode({"token_ids": prompt.tolist(), "sampling_params": params})) for prompt in prompts]
    started = time.perf_counter()
    for i, connection in enumerate(sockets):
        connection.sendall(requests[i % len(requests)])
    bodies = [response(connection) for connection in sockets]
    seconds = time.perf_counter() - started
    check(sum(len(msgspec.json.decode(body)["choices"][0]["token_ids"]) for body in bodies), new_tokens)
    return seconds


def check(tokens: int, new_tokens: int) -> None:
    if tokens != PROMPTS * N * new_tokens:
        raise BenchFailed(f"{tokens} of {PROMPTS * N * new_tokens} tokens arrived, so the time means nothing")


def request(body: bytes) -> bytes:
    """Build a request in advance: this process takes little time from the gateway."""
    head = "POST /inference/v1/generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def response(connection: socket.socket) -> bytes:
    """Read a response. Returns its body. Raises BenchFailed for one that is not 200, incomplete, or later than WAIT_S."""
    reader = HTTPResponse(connection, method="POST")
    try:
        reader.begin()
        body = reader.read()
    except (HTTPException, OSError) as error:
        raise BenchFailed(f"the gateway sent no response: {type(error).__name__}: {error}") from error
    if reader.status != 200:
        raise BenchFailed(f"the gateway answered with status {reader.status}: {body[:500]!r}")
    return body


@contextmanager
def gateway(endpoint: str, tokenizer: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run `rollout http` on a free port. Yields its port and process. Raises BenchFailed if it does not start."""
    with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
        ready = Path(folder) / "ready"
        command = run_module("rollout", "http", "--address", endpoint, "--port", "0", "--tokenizer", tokenizer)
        child = subprocess.Popen([*command, "--ready-file", str(ready)], env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + WAIT_S
            while not ready.exists():
                if child.poll() is not None or time.monotonic() > deadline:
                    raise BenchFailed("rollout http did not start; standard error says why")
                time.sleep(0.05)
            yield int(ready.read_text().split()[0].rsplit(":", 1)[1]), psutil.Process(child.pid)
        finally:
            child.kill()
            child.wait()


@contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open connections to a local port, and close them when the block ends."""
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)) for _ in range(count)]
        for connection in opened:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield opened
