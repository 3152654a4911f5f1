"""A trainer on a fleet: nothing of it knows how many replicas there are, and nothing is lost when one dies.

    python -m recipes.fleet --replicas 2                     # smollm2; starts the fleet itself
    python -m recipes.fleet --address tcp://127.0.0.1:5655   # one that runs: rollout serve --replicas 2

Samples groups, kills a replica in the middle (--kill), and shows that the same seeds give the same samples with and without it.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from engine.config import EngineConfig
from engine.types import Sampling
from rollout.client import RolloutClient
from rollout.config import Config, FleetConfig
from rollout.process import service_process

GROUPS, PROMPT_TOKENS = 8, 64


@contextmanager
def address_of(args: argparse.Namespace) -> Iterator[str]:
    """Use the fleet at --address, or run one until the block ends."""
    if args.address:
        yield args.address
        return
    config = Config(engine=EngineConfig(model=args.model, dtype=args.dtype), fleet=FleetConfig(replicas=args.replicas))
    with service_process(config) as service:
        yield service.endpoint


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
