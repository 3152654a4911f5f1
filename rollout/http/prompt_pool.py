"""The processes that turn prompts into token ids, from the event loop.

A job that exceeds its time or its memory ends its process, and whoever asked gets an error; the next job gets another process.
Up to `RequestLimits.prompt_processes` work at a time, each started when it is first needed.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from rollout.http.app import RequestLimits
from rollout.http.errors import HttpError, bad
from rollout.http.prompts import Answer, Conversation, Ids, Job, Messages, PromptRefused, Texts, longest_token, reserved_names


class PromptPool:
    """For one event loop.

    Args:
        tokenizer: of transformers; its processes load it from the same folder.
        tokens: that a prompt can have.
    """

    def __init__(self, tokenizer: Any, tokens: int, bounds: RequestLimits) -> None:
        self.reserved = reserved_names(tokenizer)
        """names that `chat_template_kwargs` may not hold"""
        self.most_chars = tokens * longest_token(tokenizer)
        """of a text, and of a conversation as JSON: no longer one fits the context"""
        self._why = f"{tokens} tokens of at most {longest_token(tokenizer)} characters"
        self._bounds, self._folder = bounds, str(tokenizer.name_or_path)
        self._threads = ThreadPoolExecutor(bounds.prompt_processes, "rollout-http-prompt")
        self._idle: deque[subprocess.Popen[bytes]] = deque()
        self._all: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self._waiting = 0
        """bytes of jobs that are not done"""
        self._answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)

    async def texts(self, texts: list[str], special: bool, param: str) -> list[list[int]]:
        """Return the ids of each text; `special`: with the model's own tokens at the start. Raises HttpError, at once for a
        text that no context holds."""
        for text in texts:
            if len(text) > self.most_chars:
                raise bad(
                    f"a text of {len(text)} characters: at most {self.most_chars} ({self._why}) can fit the context", param
                )
        ids: list[list[int]] = []
        for some in batches(texts, self.most_chars):
            ids += (await self._done(Texts(some, special), param)).ids
        return ids

    def check(self, messages: Messages, template: dict[str, Any]) -> None:
        """Raise HttpError for a conversation that no context holds."""
        data = msgspec.json.encode([messages, template])
        chars = len(data) if len(data) <= self.most_chars else len(data.decode())
        if chars > self.most_chars:
            raise bad(
                f"messages, tools and chat_template_kwargs of {chars} characters of JSON: at most {self.most_chars} "
                f"({self._why}) can fit the context",
                "messages",
            )

    async def conversation(self, job: Conversation) -> Ids:
        """Return the ids of a conversation that was checked. Raises HttpError, also with the template's own words."""
        return await self._done(job, "messages")

    async def _done(self, job: Job, param: str) -> Ids:
        data = msgspec.json.encode(job) + b"\n"
        if self._waiting + len(data) > self._bounds.max_buffered_bytes:
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
        """Have a process do a job. For a thread of the pool; the process is this thread's until it is done."""
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
        bounds = self._bounds
        words = (self._folder, self.most_chars, bounds.prompt_timeout_s, bounds.prompt_memory_bytes)
        command = [sys.executable, "-m", "rollout.commands.prompt_process", *map(str, words)]
        # a session of its own: Ctrl-C is for this process, which ends them
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise HttpError(503, f"no process could be started to tokenize: {error.strerror}; try again") from None
        self._all.add(process)
        if self._closed:
            process.kill()
        return process

    def _lost(self, status: int) -> Answer:
        """Return the answer to a job that ended its process. Raises HttpError where that was not the job's fault."""
        bounds = self._bounds
        if status == -signal.SIGALRM:
            return PromptRefused(
                f"the prompt took longer than {bounds.prompt_timeout_s} s to be tokenized (prompt_timeout_s): shorten it"
            )
        if status in (-signal.SIGABRT, -signal.SIGSEGV):  # how a tokenizer ends that gets no memory
            most = bounds.prompt_memory_bytes >> 20
            return PromptRefused(f"the prompt needs more than {most} MiB to be tokenized (prompt_memory_bytes): shorten it")
        raise HttpError(503, f"the process that tokenizes ended with status {status}; try again")

    def close(self) -> None:
        """End the processes; jobs under way fail."""
        self._closed = True
        for process in list(self._all):
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that ends, and close its pipes."""
    assert process.stdin is not None and process.stdout is not None
    process.wait()
    process.stdout.close()
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass


def batches(texts: list[str], most_chars: int) -> list[list[str]]:
    """Split texts into as few runs as have so many characters at most; a longer text is alone."""
    runs: list[list[str]] = []
    chars = 0
    for text in texts:
        if not runs or chars + len(text) > most_chars:
            runs.append([])
            chars = 0
        runs[-1].append(text)
        chars += len(text)
    return runs
