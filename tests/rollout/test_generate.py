"""`rollout generate`: what it reads and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout import models
from rollout.client.token_text import TokenText
from rollout.commands.generate import OWN, RunFiles, encode, group_ids, prompt_of, read_lines, record, run
from rollout.commands.sample_file import complete_groups, keep_groups
from rollout.config import Config, InputError
from rollout.engine.values import Sample, Sampling

LINES = [
    {"messages": [{"role": "user", "content": "Hi"}]},
    {"prompt": "Once upon a time", "id": "story"},
    {"token_ids": [5, 6, 7], "id": 17},
]


def write(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_three_ways_to_give_a_prompt(tmp_path: Path, tiny_model: Path) -> None:
    lines = read_lines(write(tmp_path, *LINES))
    tokenizer = models.load_tokenizer(tiny_model)
    chat, text, ids = (encode(tokenizer, line, number) for number, line in enumerate(lines, 1))
    assert tokenizer.decode(chat) == "<s>user\nHi</s><s>assistant\n"
    assert tokenizer.decode(text) == "Once upon a time"
    assert ids == [5, 6, 7]
    assert group_ids(lines) == ["0", "story", "17"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"prompt": "a"', "."),
        ({"prompt": "a", "token_ids": [1]}, "exactly one"),
        ({"id": "nothing"}, "exactly one"),
        ({"promt": "typo"}, "it has promt; did you mean prompt"),
        ({"prompt": "a", "text": "b"}, "'text' is a field of the samples"),
        ("[1]", "Expected `object`"),
        ({"token_ids": ["x"]}, r"token_ids\[0\]"),
        ("", "is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, named: str) -> None:
    with pytest.raises(InputError, match=rf"prompts\.jsonl.*line 2: .*{named}"):
        read_lines(write(tmp_path, LINES[0], line))


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no prompts"):
        read_lines(write(tmp_path))
    with pytest.raises(InputError, match="nowhere"):
        read_lines(tmp_path / "nowhere.jsonl")


def test_two_equal_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lines 1 and 3 have the same id 'a'"):
        group_ids(read_lines(write(tmp_path, {"prompt": "x", "id": "a"}, {"prompt": "y"}, {"prompt": "z", "id": "a"})))


def test_record_is_json(tiny_model: Path) -> None:
    sample = Sample(
        group_id="g",
        index=1,
        token_ids=np.array([100, 101, 2], np.int32),
        logprobs=np.array([-0.5, -1.0, -1.5], np.float32),
        finish_reason="stop",
        weight_versions=[(0, 3)],
        prompt_tokens=4,
    )
    tokenizer = models.load_tokenizer(tiny_model)
    row = json.loads(json.dumps(record(sample, TokenText(tokenizer), "Hi")))
    assert row["prompt"] == "Hi" and row.keys() <= {*OWN}
    assert row["text"] == tokenizer.decode([100, 101])
    assert (row["token_ids"], row["logprobs"], row["weight_versions"]) == ([100, 101, 2], [-0.5, -1.0, -1.5], [[0, 3]])
    assert (row["group_id"], row["index"], row["finish_reason"], row["prompt_tokens"]) == ("g", 1, "stop", 4)


def test_through_a_running_service(tmp_path: Path, tiny_service: str) -> None:
    out = tmp_path / "out.jsonl"
    prompts = write(tmp_path, *LINES)
    out.write_text("samples of another run\n")
    assert run(RunFiles(str(prompts), str(out)), Sampling(n=3, max_tokens=6, seed=1), tiny_service, Config()) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted((row["group_id"], row["index"]) for row in rows) == [(g, i) for g in ("0", "17", "story") for i in range(3)]
    for row in rows:
        assert len(row["token_ids"]) == len(row["logprobs"]) <= 6
        assert row["finish_reason"] in ("stop", "length")
        assert row["weight_versions"] == [[0, 0]]


def test_a_file_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    prompts = write(tmp_path, {"token_ids": [1]})
    with pytest.raises(InputError, match=r"--out /nowhere/x: No such file"):
        run(RunFiles(str(prompts), "/nowhere/x"), Sampling(), None, Config())


def test_a_file_stays_as_it_is_where_nothing_is_sampled(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("samples of another run\n")
    with pytest.raises(InputError, match="no address"):
        run(RunFiles(str(write(tmp_path, {"token_ids": [1]})), str(out)), Sampling(), "no address", Config())
    assert out.read_text() == "samples of another run\n"


def test_a_refused_group_is_an_error_with_its_reason(tmp_path: Path, tiny_service: str) -> None:
    from rollout.transport.errors import RolloutError

    prompts = write(tmp_path, {"token_ids": [99_999]})
    with pytest.raises(RolloutError, match="99999"):
        run(RunFiles(str(prompts), str(tmp_path / "out.jsonl")), Sampling(), tiny_service, Config())


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_other_columns_and_the_prompt_are_in_the_output(
    tmp_path: Path, tiny_model: Path, tiny_service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"prompt": "Two and two", "answer": 4, "meta": {"source": ["x", None]}},
        {"messages": [{"role": "user", "content": "Hi"}], "id": "chat"},
        {"token_ids": [100, 101], "id": 17},
    ]
    out = tmp_path / "out.jsonl"
    assert run(RunFiles(str(write(tmp_path, *lines)), str(out)), Sampling(n=2, max_tokens=3), tiny_service, Config()) == 0
    by_id = {row["group_id"]: row for row in rows_of(out)}
    assert (by_id["0"]["answer"], by_id["0"]["meta"]) == (4, {"source": ["x", None]})
    assert by_id["0"]["prompt"] == "Two and two" and "answer" not in by_id["chat"]
    assert by_id["chat"]["messages"] == lines[1]["messages"]
    assert by_id["chat"]["prompt"] == "<s>user\nHi</s><s>assistant\n"
    assert by_id["17"]["prompt"] == models.load_tokenizer(tiny_model).decode([100, 101])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("rollout generate: 6 samples, ") and said.endswith(" tokens/s")


def test_an_interrupted_run_is_resumed(tmp_path: Path, tiny_service: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is complete stays as it is, to the byte; a torn line and the rest of its group go, and are generated."""
    prompts, out = write(tmp_path, *LINES, {"prompt": "more"}), tmp_path / "out.jsonl"
    files, sampling = RunFiles(str(prompts), str(out), resume=True), Sampling(n=3, max_tokens=6, seed=1)
    assert run(files, sampling, tiny_service, Config()) == 0
    whole = sorted(rows_of(out), key=lambda row: (row["group_id"], row["index"]))
    lines = sorted(out.read_text().splitlines(keepends=True), key=lambda line: json.loads(line)["group_id"])
    failed = json.dumps({**json.loads(lines[8]), "finish_reason": "error"}) + "\n"
    kept, torn = "".join(lines[3:6]), lines[9][:40]
    out.write_text(lines[0] + kept + "".join(lines[6:8]) + failed + lines[10] + torn)
    capsys.readouterr()
    assert run(files, sampling, tiny_service, Config()) == 0
    assert out.read_text().startswith(kept)
    assert sorted(rows_of(out), key=lambda row: (row["group_id"], row["index"])) == whole, "seeded, so as before"
    said = capsys.readouterr().err
    assert "1 prompt of 4 already done" in said and "9 samples, " in said
    before = out.read_text()
    assert run(files, sampling, tiny_service, Config()) == 0
    assert out.read_text() == before and "4 prompts of 4 already done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "n", "named"),
    [
        ([{"prompt": "Once upon another", "id": "a"}], 2, "line 1: the prompt of 'a' differs from --prompts"),
        ([{"prompt": "Once upon a time", "id": "b"}], 2, "line 1: --prompts has no id 'a'"),
        ([{"prompt": "Once upon a time", "id": "a"}], 1, "line 2: sample 1 of 'a' exceeds --n 1"),
    ],
)
def test_another_input_is_never_mixed_in(lines: list[object], n: int, named: str, tmp_path: Path, tiny_service: str) -> None:
    out, first = tmp_path / "out.jsonl", write(tmp_path, {"prompt": "Once upon a time", "id": "a"})
    assert run(RunFiles(str(first), str(out)), Sampling(n=2, max_tokens=3), tiny_service, Config()) == 0
    out.write_text("".join(sorted(out.read_text().splitlines(keepends=True), key=lambda line: json.loads(line)["index"])))
    before = out.read_text()
    with pytest.raises(InputError, match=named):
        files = RunFiles(str(write(tmp_path, *lines)), str(out), resume=True)
        run(files, Sampling(n=n, max_tokens=3), tiny_service, Config())
    assert out.read_text() == before


def test_a_file_that_is_not_of_samples_is_not_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"answer": 4}\n')
    with pytest.raises(InputError, match="line 1: not a sample of `rollout generate`"):
        complete_groups(out, {}, 1)
    with pytest.raises(InputError, match="--resume with --out -"):
        run(RunFiles(str(write(tmp_path, {"token_ids": [1]})), "-", resume=True), Sampling(), None, Config())


def test_groups_are_kept_in_order(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = models.load_tokenizer(tiny_model)
    (line,) = read_lines(write(tmp_path, {"token_ids": [100], "id": "a"}))
    prompt, out = prompt_of(tokenizer, line, "a", 1), tmp_path / "out.jsonl"
    sample = {"group_id": "a", "finish_reason": "stop", "prompt_tokens": 1, "prompt": prompt.text}
    text = "".join(json.dumps({**sample, "index": index}) + "\n" for index in (1, 0))
    out.write_text(text + '{"group_id": "a"')
    assert complete_groups(out, {"a": prompt}, 2) == {"a"} and complete_groups(out, {"a": prompt}, 3) == set()
    keep_groups(out, {"a"})
    assert out.read_text() == text
    keep_groups(out, set())
    assert out.read_text() == "" and [path.name for path in tmp_path.iterdir()].count("out.jsonl") == 1


def test_ctrl_c_says_what_is_left(
    tmp_path: Path, tiny_service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was written stays, and `--resume` makes the rest."""
    from rollout.commands import generate

    made = generate.record
    records: list[Sample] = []

    def interrupted(sample: Sample, tokenizer: Any, prompt: str) -> dict[str, Any]:
        records.append(sample)
        if len(records) == 3:
            raise KeyboardInterrupt
        return made(sample, tokenizer, prompt)

    monkeypatch.setattr(generate, "record", interrupted)
    out = tmp_path / "out.jsonl"
    files = RunFiles(str(write(tmp_path, *LINES)), str(out))
    assert run(files, Sampling(n=2, max_tokens=4), tiny_service, Config()) == 130
    assert len(rows_of(out)) == 2
    assert "rollout generate: stopped, --resume generates the other 4: 2 samples, " in capsys.readouterr().err
    monkeypatch.undo()
    assert run(files._replace(resume=True), Sampling(n=2, max_tokens=4), tiny_service, Config()) == 0
    assert len(rows_of(out)) == 6
