"""`rollout generate`: prompts of a JSONL file in, one JSON object a sample out.

In, one object a line:   {"messages": [{"role": "user", "content": "…"}]}   through the model's chat template
                         {"prompt": "text"}                                tokenized as it stands
                         {"token_ids": [1, 42, 7]}                         as given
        with an optional "id"; without it a line's id is its number, from 0. Other fields are copied to the samples.
Out, as samples finish:  {"group_id", "index", "prompt", "text", "token_ids", "logprobs", "finish_reason", "weight_versions",
                          "prompt_tokens", "error"} and the fields of the line
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec
from tqdm import tqdm

from rollout import models
from rollout.client.token_text import TokenText
from rollout.commands.connecting import connected
from rollout.commands.interrupt import INTERRUPTED
from rollout.commands.lines import counted
from rollout.commands.progress import Phases
from rollout.commands.sample_file import Prompt, complete_groups, keep_groups, open_out
from rollout.config import Config, InputError, nearest
from rollout.engine.values import Sample, Sampling
from rollout.process import service_process

WAYS = ("messages", "prompt", "token_ids")
"""fields of which a line has exactly one"""
OWN = (
    *("group_id", "index", "prompt", "text", "token_ids", "logprobs", "finish_reason", "weight_versions", "prompt_tokens"),
    *("raw_logprobs", "error"),
)
"""fields of a sample, which no copied field may have"""


class PromptLine(msgspec.Struct):
    """One line of the prompts file: exactly one of messages, prompt and token_ids."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    id: str | int | None = None
    fields: dict[str, Any] = {}
    """other fields, which are copied to the samples"""


class RunFiles(NamedTuple):
    """Paths of a run. out: - = standard output. resume: keep the samples that `out` has."""

    prompts: str
    out: str
    resume: bool = False


class Written:
    """Counts what was written, for the bar and the summary."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.failed = 0
        self.began = time.perf_counter()

    @property
    def rate(self) -> float:
        """Return tokens per second."""
        return self.tokens / max(1e-9, time.perf_counter() - self.began)

    def add(self, sample: Sample) -> None:
        self.samples += 1
        self.tokens += len(sample.token_ids)
        self.failed += sample.finish_reason == "error"

    def summary(self) -> str:
        """Describe the run in one line."""
        mean = self.tokens / max(1, self.samples)
        seconds = time.perf_counter() - self.began
        return (
            f"{counted(self.samples, 'sample')}, {counted(self.tokens, 'token')} (mean length {mean:.0f}) in {seconds:.1f} s: "
            f"{self.rate:,.0f} tokens/s"
        )


def run(files: RunFiles, sampling: Sampling, address: str | None, config: Config, tokenizer: str | None = None) -> int:
    """Sample the prompts of a file. Returns the exit status: 0, 1 if a sample ended in an error, or 130 after Ctrl-C.

    address: a running service; None starts one with `config` for this run. tokenizer: a model as `models.resolve` takes
    it; None = the service's own. Raises InputError before anything is started.
    """
    lines = read_lines(Path(files.prompts))
    ids = group_ids(lines)
    if files.resume and files.out == "-":
        raise InputError("--resume with --out -: name the file that has the samples of the first run")
    with ExitStack() as stack:
        sink = stack.enter_context(open_out(files.out))
        if address is None:
            address = start(stack, config)
        client = stack.enter_context(connected(address, "rollout generate"))
        folder = models.resolve(tokenizer or client.info.model)
        models.without_torch()
        coder = models.load_tokenizer(folder)
        prompts = [prompt_of(coder, line, id, number) for number, (line, id) in enumerate(zip(lines, ids, strict=True), 1)]
        todo = prompts
        if files.resume:
            todo = not_done(Path(files.out), prompts, sampling.n)
            sink = stack.enter_context(open_out(files.out))  # the file was replaced
        elif files.out != "-" and sink.seekable():  # not before there is something to put in the place of what the file has
            sink.truncate(0)
        samples = client.generate([one.token_ids for one in todo], sampling, group_ids=[one.id for one in todo])
        rows = {one.id: (one.text, line.fields) for one, line in zip(prompts, lines, strict=True)}
        return write(sink, samples, rows, coder, len(todo) * sampling.n)


def start(stack: ExitStack, config: Config) -> str:
    """Start a service for this run. Returns its address."""
    with Phases("rollout generate") as progress:
        progress.begin(f"opening {config.engine.model}")
        models.resolve(config.engine.model)  # a download or conversion belongs to this terminal
        progress.begin(f"starting a service of {config.engine.model}")
        return stack.enter_context(service_process(config)).endpoint


def not_done(out: Path, prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """Return the prompts that the file has not all samples of, and drop from it what it has of these. Raises InputError."""
    done = complete_groups(out, {one.id: one for one in prompts}, n)
    keep_groups(out, done)
    print(f"rollout generate: {counted(len(done), 'prompt')} of {len(prompts):,} already done", file=sys.stderr)
    return [one for one in prompts if one.id not in done]


def write(
    sink: TextIO, samples: Iterable[Sample], rows: Mapping[str, tuple[str, dict[str, Any]]], coder: Any, total: int
) -> int:
    """Write samples as they come, show a bar on a terminal, and print a summary. Returns the exit status.

    rows: text and further fields of each prompt, by id."""
    written, stopped, texts = Written(), "", TokenText(coder)
    with tqdm(total=total, unit="sample", disable=None, dynamic_ncols=True) as bar:
        try:
            for sample in samples:
                text, fields = rows[sample.group_id]
                sink.write(json.dumps({**record(sample, texts, text), **fields}, ensure_ascii=False) + "\n")
                written.add(sample)
                bar.set_postfix_str(f"{written.rate:.0f} tokens/s", refresh=False)
                bar.update()
        except KeyboardInterrupt:
            stopped = f"stopped, --resume generates the other {total - written.samples:,}: "
    errors = f"; {counted(written.failed, 'sample')} ended in an error, see their lines" if written.failed else ""
    print(f"rollout generate: {stopped}{written.summary()}{errors}", file=sys.stderr)
    return INTERRUPTED if stopped else 1 if written.failed else 0


def read_lines(path: Path) -> list[PromptLine]:
    """Read the prompts. Raises InputError naming the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts {path}: must be UTF-8: {error}") from error
    lines = []
    for number, raw in enumerate(text.removesuffix("\n").split("\n") if text else [], 1):
        try:
            lines.append(read_line(raw))
        except (InputError, msgspec.DecodeError) as error:
            raise InputError(f"{path}, line {number}: {error}") from error
    if not lines:
        raise InputError(f"--prompts {path}: the file has no prompts; write one JSON object per line")
    return lines


def read_line(raw: str) -> PromptLine:
    """Read one line. Raises InputError, DecodeError."""
    if not raw.strip():
        raise InputError("the line is empty, remove it")
    row = msgspec.json.decode(raw, type=dict[str, Any])
    known = {name: row.pop(name) for name in (*WAYS, "id") if name in row}
    line = msgspec.convert(known, PromptLine)
    given = [name for name in WAYS if getattr(line, name) is not None]
    if len(given) != 1:
        hint = next((found for name in row if not given and (found := nearest(name, WAYS))), "")
        has = f"; it has {', '.join([*known, *row]) or 'nothing'}"
        raise InputError(f"give exactly one of {', '.join(WAYS)}{has}{hint}")
    if taken := [name for name in row if name in OWN]:
        raise InputError(f"{taken[0]!r} is a field of the samples, so it cannot be copied to them: rename it")
    line.fields = row if line.messages is None else {"messages": line.messages, **row}
    return line


def group_ids(lines: list[PromptLine]) -> list[str]:
    """Return the lines' ids as text. Raises InputError where two are the same."""
    ids = [str(i if line.id is None else line.id) for i, line in enumerate(lines)]
    seen: dict[str, int] = {}
    for number, name in enumerate(ids, 1):
        if name in seen:
            raise InputError(f"lines {seen[name]} and {number} have the same id {name!r}; give each its own")
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
        raise InputError(f"line {number}: the chat template refused the messages: {error}") from error


def prompt_of(tokenizer: Any, line: PromptLine, id: str, number: int) -> Prompt:
    """Return the tokens of a line, and its text: as given, or decoded. Raises InputError as `encode`."""
    token_ids = encode(tokenizer, line, number)
    return Prompt(id, tokenizer.decode(token_ids) if line.prompt is None else line.prompt, token_ids)


def record(sample: Sample, texts: TokenText, prompt: str) -> dict[str, Any]:
    """Return the JSON object of one sample."""
    return {
        "group_id": sample.group_id,
        "index": sample.index,
        "prompt": prompt,
        "text": texts.sample_text(sample),
        "token_ids": sample.token_ids.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "finish_reason": sample.finish_reason,
        "weight_versions": sample.weight_versions,
        "prompt_tokens": sample.prompt_tokens,
        **({"raw_logprobs": sample.raw_logprobs.tolist()} if sample.raw_logprobs is not None else {}),
        **({"error": sample.error} if sample.error is not None else {}),
    }
