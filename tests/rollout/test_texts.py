"""Texts that people see end where a stop string begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.client.token_text import TokenText
from rollout.engine.values import Sample


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def sample(ids: list[int], **fields: Any) -> Sample:
    return Sample(
        group_id="g",
        index=0,
        token_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason="stop",
        weight_versions=[(0, 0)],
        prompt_tokens=1,
        **fields,
    )


def test_a_text_is_cut_where_its_stop_string_begins(tokenizer: Any) -> None:
    ids = tokenizer("One, two. Three é.\n\nMore", add_special_tokens=False)["input_ids"]
    stopped = sample(ids, stopped_by="\n\n", text_end=len("One, two. Three é."))
    assert TokenText(tokenizer).sample_text(stopped) == "One, two. Three é."
    assert TokenText(tokenizer).sample_text(stopped, keep_stop=True) == "One, two. Three é.\n\n"
    assert TokenText(tokenizer).sample_text(sample(ids)) == "One, two. Three é.\n\nMore"


def test_special_tokens_are_counted_before_they_are_left_out(tokenizer: Any) -> None:
    special = tokenizer.all_special_ids[0]
    written = tokenizer.decode([special])
    ids = [special, *tokenizer("yes STOP", add_special_tokens=False)["input_ids"]]
    stopped = sample(ids, stopped_by=" STOP", text_end=len(written) + len("yes"))
    assert TokenText(tokenizer).sample_text(stopped) == "yes"
    assert TokenText(tokenizer).sample_text(stopped, skip_special=False) == f"{written}yes"
