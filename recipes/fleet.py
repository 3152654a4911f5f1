"""A trainer on a fleet: nothing of it knows how many replicas there are, and nothing is lost when one dies.

    python -m recipes.fleet --replicas 2                     # smollm2; starts the fleet itself
    python -m recipes.fleet --launcher join                  # replicas that join with keys, as from other hosts
    python -m recipes.fleet --launcher ray                   # replicas on a Ray of this machine: pip install 'rollout[ray]'
    python -m recipes.fleet --address tcp://127.0.0.1:5655   # one that runs: rollout serve --replicas 2

Samples groups, kills a replica in the middle (--kill), and shows that the same seeds give the same samples with and without it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.types import Sampling
from rollout.client import RolloutClient
from rollout.config import Config, FleetConfig, dump
from rollout.process import service_process

GROUPS, PROMPT_TOKENS = 8, 64


@contextmanager
def address_of(args: argparse.Namespace) -> Iterator[str]:
    """Use the fleet at --address, or run one until the block ends."""
    if args.address:
        yield args.address
        return
    config = Config(engine=EngineConfig(model=args.model, dtype=args.dtype))
    if args.launcher == "join":
        with joined_fleet(config, args.replicas) as address:
            yield address
        return
    ray = "local" if args.launcher == "ray" else None
    with service_process(msgspec.structs.replace(config, fleet=FleetConfig(replicas=args.replicas, ray=ray))) as service:
        yield service.endpoint


@contextmanager
def joined_fleet(config: Config, replicas: int) -> Iterator[str]:
    """Run a front, and replicas that join it, each as a shell on its own host would start it. Yields a connection file."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys, ready, toml = folder / "service.json", folder / "ready", folder / "config.toml"
        front, joins = free_port(), free_port()
        rollout = [sys.executable, "-m", "rollout"]
        toml.write_text(dump(config))

        def run(*words: str) -> None:
            subprocess.run([*rollout, *words, "--file", str(keys)], check=True, stdout=subprocess.DEVNULL)

        def start(*words: str) -> None:
            command = [*rollout, "serve", "--config", str(toml), "--exit-on-stdin-close", *words]
            child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
            stack.callback(child.terminate)

        run("keys", "init", "--address", f"tcp://127.0.0.1:{front}")
        run("keys", "add", "trainer", "--role", "rollout", "weights", "read")
        run("keys", "add", "gpu", "--role", "replica", "--address", f"tcp://127.0.0.1:{joins}")
        at = ["--service.endpoint", f"tcp://127.0.0.1:{front}", "--service.keys", str(keys)]
        start(*at, "--listen-replicas", f"tcp://127.0.0.1:{joins}", "--ready-file", str(ready))
        for i in range(replicas):
            start("--join", str(folder / "gpu.json"), "--fleet.name", f"host-{i}")
        address = str(folder / "trainer.json")
        with RolloutClient(address, connect_timeout_s=600) as client:
            while client.status()["fleet"]["serving"] < replicas:
                time.sleep(0.2)
        yield address


def free_port() -> int:
    """Find a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def sample(client: RolloutClient, args: argparse.Namespace, kill: bool) -> list[list[int]]:
    """Sample all groups. kill: SIGKILL to a replica once the first sample is here. Returns the tokens, by group and child."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, client.info.vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(GROUPS)]
    handles = [
        client.submit(prompt, Sampling(n=args.n, max_tokens=args.max_tokens, seed=i)) for i, prompt in enumerate(prompts)
    ]
    if kill:
        next(handles[0].samples(timeout=600))
        victim = max(client.status()["replicas"], key=lambda replica: replica["outstanding_tokens"])
        os.kill(victim["pid"], signal.SIGKILL)
        print(f"killed replica {victim['name']} with {victim['parts']} groups")
    return [one.token_ids.tolist() for handle in handles for one in handle.result(600)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of a fleet that runs on this host")
    parser.add_argument("--launcher", choices=["host", "join", "ray"], default="host", help="of the replicas")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--n", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    with address_of(args) as address, RolloutClient(address, connect_timeout_s=60) as client:
        first = sample(client, args, kill=False)
        again = sample(client, args, kill=args.kill)
        fleet = client.status()["fleet"]
    same = "equal" if first == again else "NOT equal"
    print(f"{len(again)} samples, {same} to the first run's; {fleet['moved']} children moved")


if __name__ == "__main__":
    main()
