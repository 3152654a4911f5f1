"""A pool of processes that render chat templates and tokenize.

A job that exceeds its time or memory ends its process, and its request gets an error; the next job gets a new process. Up to
`RequestLimits.prompt_processes` run at a time, each started when it is first needed.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from rollout.engine.processes import run_module
from rollout.http.errors import HttpError, bad
from rollout.http.prompts import Answer, Conversation, Ids, Job, Messages, PromptRefused, Texts, longest_token, reserved_names
from rollout.http.settings import RequestLimits


class PromptPool:
    """Encodes texts and conversations. For one event loop.

    Args:
        tokenizer: a transformers tokenizer; the processes load it from the same folder.
        tokens: maximum length of a prompt.
    """

    def __init__(self, tokenizer: Any, tokens: int, limits: RequestLimits) -> None:
        self.reserved = reserved_names(tokenizer)
        """names refused in `chat_template_kwargs`"""
        self.max_chars = tokens * longest_token(tokenizer)
        """of a text, and of a conversation as JSON: a longer one cannot fit the context"""
        self._reason = f"{tokens} tokens of at most {longest_token(tokenizer)} characters"
        self._limits, self._folder = limits, str(tokenizer.name_or_path)
        self._threads = ThreadPoolExecutor(limits.prompt_processes, "rollout-http-prompt")
        self._idle: deque[subprocess.Popen[bytes]] = deque()
        self._all: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self._waiting = 0
        """bytes of unfinished jobs"""
        self._answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)

    async def texts(self, texts: list[str], special: bool, param: str) -> list[list[int]]:
        """Return the ids of each text; see `Texts`. Raises HttpError, immediately for a text that cannot fit the context."""
        for text in texts:
            if len(text) > self.max_chars:
                raise bad(
                    f"a text of {len(text)} characters: at most {self.max_chars} ({self._reason}) can fit the context", param
                )
        ids: list[list[int]] = []
        for batch in batches(texts, self.max_chars):
            ids += (await self._run(Texts(batch, special), param)).ids
        return ids

    def check(self, messages: Messages, template: dict[str, Any]) -> None:
        """Raise HttpError for a conversation that cannot fit the context."""
        data = msgspec.json.encode([messages, template])
        chars = len(data) if len(data) <= self.max_chars else len(data.decode())
        if chars > self.max_chars:
            raise bad(
                f"messages, tools and chat_template_kwargs of {chars} characters of JSON: at most {self.max_chars} "
                f"({self._reason}) can fit the context",
                "messages",
            )

    async def conversation(self, job: Conversation) -> Ids:
        """Return the ids of a conversation that was checked. Raises HttpError, also for an error of the template."""
        return await self._run(job, "messages")

    async def _run(self, job: Job, param: str) -> Ids:
        data = msgspec.json.encode(job) + b"\n"
        if self._waiting + len(data) > self._limits.max_buffered_bytes:
            raise HttpError(503, f"prompts of {self._waiting} bytes wait to be tokenized; try again (max_buffered_bytes)")
        self._waiting += len(data)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, data)
        finally:
            self._waiting -= len(data)
        if isinstance(answer, PromptRefused):
            raise bad(answer.message, param)
        return answer

    def _ask(self, job: bytes) -> Answer:
        """Run a job in a process. In a thread of the pool, which holds the process until the job is done."""
        process = self._idle.pop() if self._idle else self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(job)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self._all.discard(process)
            end(process)
            return self._lost(process.returncode)
        self._idle.append(process)
        return self._answers.decode(line)

    def _start(self) -> subprocess.Popen[bytes]:
        limits = self._limits
        words = (self._folder, self.max_chars, limits.prompt_timeout_s, limits.prompt_memory_bytes)
        command = run_module("rollout.commands.prompt_process", *words)
        # a new session: Ctrl-C reaches this process only, which ends the others
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise HttpError(503, f"no process could be started to tokenize: {error.strerror}; try again") from None
        self._all.add(process)
        if self._closed:
            process.kill()
        return process

    def _lost(self, status: int) -> Answer:
        """Return the answer to a job that ended its process. Raises HttpError if the job did not cause it."""
        limits = self._limits
        if status == -signal.SIGALRM:
            return PromptRefused(
                f"the prompt took longer than {limits.prompt_timeout_s} s to be tokenized (prompt_timeout_s): shorten it"
            )
        if status in (-signal.SIGABRT, -signal.SIGSEGV):  # a tokenizer without memory
            most = limits.prompt_memory_bytes >> 20
            return PromptRefused(f"the prompt needs more than {most} MiB to be tokenized (prompt_memory_bytes): shorten it")
        raise HttpError(503, f"the process that tokenizes ended with status {status}; try again")

    def close(self) -> None:
        """End the processes; running jobs fail."""
        self._closed = True
        for process in list(self._all):
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, and close its pipes."""
    assert process.stdin is not None and process.stdout is not None
    process.wait()
    process.stdout.close()
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass


def batches(texts: list[str], max_chars: int) -> list[list[str]]:
    """Split texts, in order, into batches of at most this many characters; a longer text gets its own."""
    runs: list[list[str]] = []
    chars = 0
    for text in texts:
        if not runs or chars + len(text) > max_chars:
            runs.append([])
            chars = 0
        runs[-1].append(text)
        chars += len(text)
    return runs
