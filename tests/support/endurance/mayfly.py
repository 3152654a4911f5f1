"""A trainer that is going to be killed:  python -m tests.support.endurance.mayfly ADDRESS SEED

Submits groups, some of them endless, and waits. Imports no torch."""

from __future__ import annotations

import sys
import time

import numpy as np

from rollout.client.api import RolloutClient
from rollout.engine.values import Sampling


def main() -> None:
    address, seed = sys.argv[1], int(sys.argv[2])
    rng = np.random.default_rng(seed)
    with RolloutClient(address, name="mayfly", connect_timeout_s=60, link_timeout_s=60) as client:
        for number in range(6):
            prompt = rng.integers(3, 250, rng.integers(1, 40))
            client.submit(prompt, Sampling(n=2, max_tokens=20 if number % 2 else 4000, ignore_eos=True, kv_ttl_s=5.0))
        print("submitted", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
