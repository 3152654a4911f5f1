"""`rollout generate`: prompts of a JSONL file in, one JSON object a sample out.

In, one object a line:   {"messages": [{"role": "user", "content": "…"}]}   through the model's chat template
                         {"prompt": "text"}                                tokenised as it stands
                         {"token_ids": [1, 42, 7]}                         as given
        with an optional "id"; without it a line's id is its number, from 0.
Out, as samples finish:  {"group_id", "index", "text", "token_ids", "logprobs", "finish_reason", "weight_versions",
                          "prompt_tokens", "error"}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec
from tqdm import tqdm

from rollout import models
from rollout.client.text import text_of
from rollout.commands.connecting import connected
from rollout.config import Config, InputError
from rollout.engine.types import Sample, Sampling
from rollout.process import service_process


class PromptLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the prompts file: exactly one of messages, prompt and token_ids."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    id: str | int | None = None


def run(prompts: str, out: str, sampling: Sampling, address: str | None, config: Config, tokenizer: str | None = None) -> int:
    """Sample the prompts of a file. Returns the exit status: 0, or 1 if a sample ended in an error.

    address: a running service; None starts one with `config` for this run. tokenizer: a model as `models.resolve` takes
    it; None = the service's own. Raises InputError before anything is started.
    """
    lines = read_lines(Path(prompts))
    ids = group_ids(lines)
    with ExitStack() as stack:
        sink = stack.enter_context(open_out(out))
        if address is None:
            models.resolve(config.engine.model)  # a download or conversion belongs to this terminal
            address = stack.enter_context(service_process(config)).endpoint
        client = stack.enter_context(connected(address, "rollout generate"))
        coder = models.load_tokenizer(models.resolve(tokenizer or client.info.model))
        tokens = [encode(coder, line, number) for number, line in enumerate(lines, 1)]
        if out != "-" and sink.seekable():  # not before there is something to put in the place of what the file has
            sink.truncate(0)
        bar = stack.enter_context(tqdm(total=len(tokens) * sampling.n, unit="sample", disable=None))
        failed = 0
        for sample in client.generate(tokens, sampling, group_ids=ids):
            sink.write(json.dumps(record(sample, coder), ensure_ascii=False) + "\n")
            failed += sample.finish_reason == "error"
            bar.update()
    if failed:
        print(f"rollout generate: {failed} samples ended in an error; their lines say why", file=sys.stderr)
    return 1 if failed else 0


def read_lines(path: Path) -> list[PromptLine]:
    """Read the prompts. Raises InputError naming the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts {path}: {error}") from error
    decoder = msgspec.json.Decoder(PromptLine)
    lines = []
    for number, raw in enumerate(text.removesuffix("\n").split("\n") if text else [], 1):
        if not raw.strip():
            raise InputError(f"{path}, line {number}: the line is empty, remove it")
        try:
            line = decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        if sum(given is not None for given in (line.messages, line.prompt, line.token_ids)) != 1:
            raise InputError(f"{path}, line {number}: give exactly one of messages, prompt and token_ids")
        lines.append(line)
    if not lines:
        raise InputError(f"{path}: no prompts in it")
    return lines


def group_ids(lines: list[PromptLine]) -> list[str]:
    """Return the lines' ids as text. Raises InputError where two are the same."""
    ids = [str(i if line.id is None else line.id) for i, line in enumerate(lines)]
    seen: dict[str, int] = {}
    for number, name in enumerate(ids, 1):
        if name in seen:
            raise InputError(f"lines {seen[name]} and {number} have the same id {name!r}")
        seen[name] = number
    return ids


def encode(tokenizer: Any, line: PromptLine, number: int) -> list[int]:
    """Return the token ids of one line. Raises InputError if the chat template refuses its messages."""
    if line.token_ids is not None:
        return line.token_ids
    if line.prompt is not None:
        ids: list[int] = tokenizer(line.prompt)["input_ids"]
        return ids
    try:
        ids = tokenizer.apply_chat_template(line.messages, add_generation_prompt=True, return_dict=False)
        return ids
    except Exception as error:  # templates are programs of their own and raise what they like
        raise InputError(f"line {number}: the chat template refused it: {error}") from error


def record(sample: Sample, tokenizer: Any) -> dict[str, Any]:
    """Return the JSON object of one sample."""
    return {
        "group_id": sample.group_id,
        "index": sample.index,
        "text": text_of(tokenizer, sample),
        "token_ids": sample.token_ids.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "finish_reason": sample.finish_reason,
        "weight_versions": sample.weight_versions,
        "prompt_tokens": sample.prompt_tokens,
        **({"raw_logprobs": sample.raw_logprobs.tolist()} if sample.raw_logprobs is not None else {}),
        **({"error": sample.error} if sample.error is not None else {}),
    }


@contextmanager
def open_out(out: str) -> Iterator[TextIO]:
    """Open the file of samples, whose content stays for now, or standard output. Raises InputError if it cannot be written."""
    if out == "-":
        yield sys.stdout
        return
    try:
        file = Path(out).open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from error
    with file:
        yield file
