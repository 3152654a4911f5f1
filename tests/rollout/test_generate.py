"""`rollout generate`: what it reads and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollout import models
from rollout.commands.generate import encode, group_ids, read_lines, record, run
from rollout.config import Config, InputError
from rollout.engine.types import Sample, Sampling

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
        ({"promt": "typo"}, "promt"),
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
    row = json.loads(json.dumps(record(sample, tokenizer)))
    assert row["text"] == tokenizer.decode([100, 101])
    assert (row["token_ids"], row["logprobs"], row["weight_versions"]) == ([100, 101, 2], [-0.5, -1.0, -1.5], [[0, 3]])
    assert (row["group_id"], row["index"], row["finish_reason"], row["prompt_tokens"]) == ("g", 1, "stop", 4)


def test_through_a_running_service(tmp_path: Path, tiny_service: str) -> None:
    out = tmp_path / "out.jsonl"
    prompts = write(tmp_path, *LINES)
    out.write_text("samples of another run\n")
    assert run(str(prompts), str(out), Sampling(n=3, max_tokens=6, seed=1), tiny_service, Config()) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted((row["group_id"], row["index"]) for row in rows) == [(g, i) for g in ("0", "17", "story") for i in range(3)]
    for row in rows:
        assert len(row["token_ids"]) == len(row["logprobs"]) <= 6
        assert row["finish_reason"] in ("stop", "length")
        assert row["weight_versions"] == [[0, 0]]


def test_a_file_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    prompts = write(tmp_path, {"token_ids": [1]})
    with pytest.raises(InputError, match=r"--out /nowhere/x: No such file"):
        run(str(prompts), "/nowhere/x", Sampling(), None, Config())


def test_a_file_stays_as_it_is_where_nothing_is_sampled(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("samples of another run\n")
    with pytest.raises(InputError, match="no address"):
        run(str(write(tmp_path, {"token_ids": [1]})), str(out), Sampling(), "no address", Config())
    assert out.read_text() == "samples of another run\n"


def test_a_refused_group_is_an_error_with_its_reason(tmp_path: Path, tiny_service: str) -> None:
    from rollout.transport.errors import RolloutError

    prompts = write(tmp_path, {"token_ids": [99_999]})
    with pytest.raises(RolloutError, match="99999"):
        run(str(prompts), str(tmp_path / "out.jsonl"), Sampling(), tiny_service, Config())
