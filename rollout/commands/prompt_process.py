"""A process that turns prompts into token ids: `python -m rollout.commands.prompt_process FOLDER CHARS SECONDS BYTES`.

One JSON job a line comes in, one JSON answer a line goes out, in turn. It ends with its input. A job that takes too long ends
the process (SIGALRM). So does one that needs too much memory, unless Python is the one that gets none.
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
    """Do jobs until there are no more, each in at most so many seconds."""
    decoder: msgspec.json.Decoder[Job] = msgspec.json.Decoder(Job)
    for line in jobs:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer: Answer = prompts.answer(decoder.decode(line))
        except (RecursionError, MemoryError) as error:
            answer = PromptRefused(f"the prompt cannot be read: {type(error).__name__}")
        data = msgspec.json.encode(answer) + b"\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(data)
        answers.flush()


def bound_memory(more: int) -> None:
    """Let this process have so many bytes more than it has. Where the system does not count them, only time is bounded."""
    status = Path("/proc/self/status")
    if status.exists():
        held = next(line for line in status.read_text().splitlines() if line.startswith("VmData:"))
        most = int(held.split()[1]) * 1024 + more
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    """Load the tokenizer, and serve standard input."""
    folder, chars, seconds, more = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers does without, and starts in a quarter of the time
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RUST_BACKTRACE"] = "0"  # of a tokenizer without memory: the pool says it in words
    from rollout.models import load_tokenizer

    prompts = Prompts(load_tokenizer(folder), int(chars))
    bound_memory(int(more))
    serve(prompts, sys.stdin.buffer, answers, float(seconds))


if __name__ == "__main__":
    main()
