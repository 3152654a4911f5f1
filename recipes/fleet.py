"""A trainer on a fleet: nothing of it knows how many replicas there are, and nothing is lost when one dies.

    python -m rollout.recipes.fleet --replicas 2                     # smollm2; starts the fleet itself
    python -m rollout.recipes.fleet --launcher join                  # replicas that join with keys, as from other hosts
    python -m rollout.recipes.fleet --launcher ray                   # replicas on a Ray of this machine: extra [ray]
    python -m rollout.recipes.fleet --address tcp://127.0.0.1:5655   # one that runs: rollout serve --replicas 2

Samples groups, kills a replica in the middle (--kill), and shows that the same seeds give the same samples with and without it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from rollout import RolloutClient, Sampling
from rollout.config import Config, FleetConfig, dump
from rollout.engine.config import EngineConfig
from rollout.engine.processes import run_module
from rollout.process import service_process
from rollout.recipes import program
from rollout.recipes.program import say

GROUPS, PROMPT_TOKENS = 8, 64


@dataclass(frozen=True)
class Options:
    """Which fleet, and what to sample there."""

    address: str | None = None
    """of a fleet that runs on this host; without it one is started"""
    launcher: Literal["host", "join", "ray"] = "host"
    """what starts the replicas"""
    replicas: int = 2
    """of a fleet that is started"""
    model: str = "smollm2"
    """smollm2, a folder, or a hub id"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """of the weights"""
    n: int = 4
    """samples of each prompt"""
    max_tokens: int = 64
    """maximum number of tokens of a sample"""
    kill: bool = True
    """kill a replica in the middle; --no-kill is the control"""


@contextmanager
def address_of(options: Options) -> Iterator[str]:
    """Use the fleet at --address, or run one until the block ends."""
    if options.address is not None:
        yield options.address
        return
    say(f"starting a fleet of {options.replicas} replicas")
    config = Config(engine=EngineConfig(model=options.model, dtype=options.dtype))
    if options.launcher == "join":
        with joined_fleet(config, options.replicas) as address:
            yield address
        return
    ray = "local" if options.launcher == "ray" else None
    with service_process(msgspec.structs.replace(config, fleet=FleetConfig(replicas=options.replicas, ray=ray))) as service:
        yield service.endpoint


@contextmanager
def joined_fleet(config: Config, replicas: int) -> Iterator[str]:
    """Run a router, and replicas that join it, each as a shell on its own host would start it. Yields a connection file."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys, ready, toml = folder / "service.json", folder / "ready", folder / "config.toml"
        router, joins = free_port(), free_port()
        rollout = run_module("rollout")
        toml.write_text(dump(config))

        def run(*words: str) -> None:
            subprocess.run([*rollout, *words, "--file", str(keys)], check=True, stdout=subprocess.DEVNULL)

        def start(*words: str) -> None:
            command = [*rollout, "serve", "--config", str(toml), "--exit-on-stdin-close", *words]
            child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
            stack.callback(child.terminate)

        run("keys", "init", "--address", f"tcp://127.0.0.1:{router}")
        run("keys", "add", "trainer", "--role", "rollout", "weights", "read")
        run("keys", "add", "gpu", "--role", "replica", "--address", f"tcp://127.0.0.1:{joins}")
        at = ["--service.endpoint", f"tcp://127.0.0.1:{router}", "--service.keys", str(keys)]
        start(*at, "--listen-replicas", f"tcp://127.0.0.1:{joins}", "--ready-file", str(ready))
        for i in range(replicas):
            start("--join", str(folder / "gpu.json"), "--fleet.name", f"host-{i}")
        address = str(folder / "trainer.json")
        with RolloutClient(address, connect_timeout_s=600) as client:
            while client.status()["fleet"]["serving"] < replicas:
                time.sleep(0.2)
        yield address


def free_port() -> int:
    """Find a free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def sample(client: RolloutClient, options: Options, kill: bool) -> list[list[int]]:
    """Sample all groups. kill: SIGKILL to a replica once the first sample is here. Returns the tokens, by group and child."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, client.info.vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(GROUPS)]
    handles = [
        client.submit(prompt, Sampling(n=options.n, max_tokens=options.max_tokens, seed=i)) for i, prompt in enumerate(prompts)
    ]
    if kill:
        next(handles[0].samples(timeout=600))
        victim = max(client.status()["replicas"], key=lambda replica: replica["outstanding_tokens"])
        os.kill(victim["pid"], signal.SIGKILL)
        print(f"killed replica {victim['name']} with {victim['parts']} groups")
    return [one.token_ids.tolist() for handle in handles for one in handle.result(600)]


def main(options: Options) -> None:
    """Sample twice with the same seeds, the second time with a death in the middle, and print whether all is equal."""
    with address_of(options) as address, RolloutClient(address, connect_timeout_s=60) as client:
        say("sampling")
        first = sample(client, options, kill=False)
        say("sampling again, by the same seeds" + (", and killing a replica meanwhile" if options.kill else ""))
        again = sample(client, options, kill=options.kill)
        fleet = client.status()["fleet"]
    same = "equal" if first == again else "NOT equal"
    print(f"{len(again)} samples, {same} to the first run's; {fleet['moved']} children moved")


if __name__ == "__main__":
    raise SystemExit(program.run("fleet", main, Options))
