"""Decodes samples to text. Needs a tokenizer."""

from __future__ import annotations

from typing import Any

from rollout.engine.types import Sample


def text_of(tokenizer: Any, sample: Sample, *, skip_special: bool = True, keep_stop: bool = False) -> str:
    """Return the text of a sample, without the stop string that ended it.

    Args:
        tokenizer: of transformers.
        skip_special: without special tokens.
        keep_stop: keep the stop string."""
    ids = sample.token_ids.tolist()
    if sample.text_end is None or sample.stopped_by is None:
        text: str = tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text
    # `text_end` counts characters of the text with special tokens
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    text = text[: sample.text_end + (len(sample.stopped_by) if keep_stop else 0)]
    if skip_special:
        for id in set(ids) & set(tokenizer.all_special_ids):
            text = text.replace(tokenizer.decode([id]), "")
    return text
