"""A process that renders chat templates and tokenizes: `python -m rollout.commands.prompt_process FOLDER CHARS SECONDS BYTES`.

It reads one JSON job per line from standard input and writes one JSON answer per line, in order, until its input ends. A job
that takes too long ends the process (SIGALRM). So does one that needs too much memory, unless the allocation fails in Python.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from rollout.http.prompts import Answer, Job, PromptRefused, Prompts


def serve(prompts: Prompts, jobs: Iterable[bytes], answers: BinaryIO, seconds: float) -> None:
    """Execute jobs until the input ends. seconds: maximum time of each."""
    decoder: msgspec.json.Decoder[Job] = msgspec.json.Decoder(Job)
    for line in jobs:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer: Answer = prompts.answer(decoder.decode(line))
        except (RecursionError, MemoryError) as error:
            answer = PromptRefused(f"the prompt is too deeply nested or too large: {type(error).__name__}")
        data = msgspec.json.encode(answer) + b"\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(data)
        answers.flush()


def bound_memory(more: int) -> None:
    """Limit the memory that this process allocates from now on, in bytes. Without /proc there is no limit."""
    status = Path("/proc/self/status")
    if status.exists():
        held = next(line for line in status.read_text().splitlines() if line.startswith("VmData:"))
        most = int(held.split()[1]) * 1024 + more
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    """Load the tokenizer, and execute jobs from standard input."""
    folder, chars, seconds, more = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to standard output
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RUST_BACKTRACE"] = "0"  # of a tokenizer that runs out of memory; the pool reports it
    from rollout.models import load_tokenizer, without_torch

    without_torch()
    prompts = Prompts(load_tokenizer(folder), int(chars))
    bound_memory(int(more))
    serve(prompts, sys.stdin.buffer, answers, float(seconds))


if __name__ == "__main__":
    main()
