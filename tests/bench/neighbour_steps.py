"""The neighbour of `python -m tests.bench neighbour`: `python -m tests.bench.neighbour_steps THREADS` trains a small network
for as many seconds as each line of standard input says, and prints its steps per second. THREADS: 0 = torch's number."""

from __future__ import annotations

import json
import sys
from time import perf_counter

import torch
from torch import nn

WIDTH, TOKENS = 512, 256


def main() -> None:
    if int(sys.argv[1]):
        torch.set_num_threads(int(sys.argv[1]))
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(TOKENS, WIDTH)
    for line in sys.stdin:
        began, steps = perf_counter(), 0
        while perf_counter() < began + float(line):
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
            steps += 1
        print(json.dumps({"steps_per_second": steps / (perf_counter() - began)}), flush=True)


if __name__ == "__main__":
    main()
