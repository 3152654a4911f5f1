"""What the drivers share: a setup and runs come as JSON lines on standard input, results leave as JSON lines on the file
descriptor that RESULTS_FD names.

in    {"model", "random_weights", "dtype", "device", "threads", "kv_tokens", "block_size",
       "max_num_seqs", "context", "prompts", "prompt_tokens", "n"}                                once
      {"prompts": [[ids]], "n", "new_tokens", "seed"}     for each run; new_tokens: of all, or a list with those of each prompt
out   {"ready": version}, then {"seconds", "generated_tokens"} for each run

Standard output stays free for whatever an engine prints. No dependencies: a peer's environment has none of ours.
"""

import json
import os
import sys
import time


def serve(start):
    """Answer runs until standard input ends. `start(setup)` returns (version, generate); `generate(prompts, n, new_tokens,
    seed)` returns how many tokens it made, or that and the seconds that count."""
    out = os.fdopen(int(os.environ["RESULTS_FD"]), "w")

    def send(row):
        out.write(json.dumps(row) + "\n")
        out.flush()

    version, generate = start(json.loads(sys.stdin.readline()))
    send({"ready": version})
    for line in sys.stdin:
        started = time.perf_counter()
        made = generate(**json.loads(line))
        tokens, seconds = made if isinstance(made, tuple) else (made, time.perf_counter() - started)
        send({"seconds": seconds, "generated_tokens": tokens})
