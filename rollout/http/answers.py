"""What answers are made of: log-probs, ends and counts, as the dialects write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from engine.types import Sample, Sampling, TokenChunk

FINISH = {"stop": "stop", "length": "length"}
"""every other end is "abort": cut, at a deadline, aborted, stale"""


def as_id(id: int) -> str:
    return f"token_id:{id}"


def contents(ids: list[int], logprobs: list[float], heads: dict[int, bytes]) -> msgspec.Raw:
    """Write log-probs as /inference/v1/generate lists them, in the superset of its versions. A JSON text instead of objects:
    these are most of an answer, and all but the number is the same for every token of an id. `heads`: keeps that part."""
    if not ids:
        return msgspec.Raw(b"[]")
    for id in ids:
        if id not in heads:
            heads[id] = b'},{"token":"token_id:%d","token_id":%d,"top_logprobs":[],"logprob":' % (id, id)
    parts = [b""] * (2 * len(ids))
    parts[::2] = map(heads.__getitem__, ids)
    parts[1::2] = msgspec.json.encode(logprobs)[1:-1].split(b",")
    parts[0] = b"[" + parts[0].removeprefix(b"},")
    return msgspec.Raw(b"".join(parts) + b"}]")


def named_id(id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{id}", "token_id": id, "logprob": logprob}


def tops(sample: Sample | TokenChunk) -> list[list[tuple[int, float]]]:
    """Return (id, log-prob) of the likeliest tokens of each position, as many as could be drawn."""
    if sample.top_ids is None or sample.top_logprobs is None:
        return [[] for _ in sample.token_ids]
    rows = zip(sample.top_ids.tolist(), sample.top_logprobs.tolist(), strict=True)
    return [[(id, logprob) for id, logprob in zip(ids, logprobs, strict=True) if id >= 0] for ids, logprobs in rows]


def token_logprobs(ids: list[int], sample: Sample | TokenChunk, named: Callable[[int], str]) -> dict[str, Any]:
    """List log-probs as /v1/completions does; the drawn token is among the likeliest in any case."""
    tokens, logprobs = [named(id) for id in ids], sample.logprobs.tolist()
    likeliest = [
        {named(id): value for id, value in top} | {token: logprob}
        for token, logprob, top in zip(tokens, logprobs, tops(sample), strict=True)
    ]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets_of(tokens)}


def offsets_of(tokens: list[str]) -> list[int]:
    """Return where each token begins in their text."""
    return list(itertools.accumulate(map(len, tokens), initial=0))[: len(tokens)]


def prompt_logprobs(score: Sample | None, named: Callable[[int], str]) -> list[dict[str, Any] | None]:
    """List the log-probs of a prompt's tokens as vLLM does: none for the first, then for each the token itself and the
    likeliest ones, at temperature 1. The rank of a token that is not among those is not known."""
    if score is None:
        return [None]
    rows: list[dict[str, Any] | None] = [None]
    for id, logprob, likeliest in zip(score.token_ids.tolist(), score.logprobs.tolist(), tops(score), strict=True):
        ranks = {one: rank for rank, (one, _) in enumerate(likeliest, 1)}
        entries = {id: logprob} | dict(likeliest)
        rows.append(
            {
                str(one): {"logprob": value, "rank": ranks.get(one), "decoded_token": named(one)}
                for one, value in entries.items()
            }
        )
    return rows


def stopped_by(ids: list[int], sampling: Sampling, sample: Sample) -> dict[str, Any]:
    """Tell the stop string or token that ended a sample, None for the model's own end."""
    if sample.stopped_by is not None:
        return {"stop_reason": sample.stopped_by}
    stopped = sample.finish_reason == "stop" and ids and ids[-1] in sampling.stop_token_ids
    return {"stop_reason": ids[-1] if stopped else None}


def usage(prompts: Sequence[np.ndarray], children: Sequence[Sequence[Sample]]) -> dict[str, int]:
    prompt = sum(map(len, prompts))
    completion = sum(len(sample.token_ids) for samples in children for sample in samples)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def json(content: Any, status: int = 200) -> Response:
    """Answer with JSON; a number that is not finite is a mistake that was caught before."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def ending(ids: list[int], sampling: Sampling, sample: Sample) -> dict[str, Any]:
    """Tell how a child ended, and which weights made it."""
    return {
        "finish_reason": FINISH.get(sample.finish_reason, "abort"),
        **stopped_by(ids, sampling, sample),
        "weight_versions": sample.weight_versions,
    }
