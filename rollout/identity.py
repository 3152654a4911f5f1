"""The identity of a sample: all that its tokens and log-probs are a function of. Imports no torch.

    how the service computes (COMPUTED_BY) · weights · prompt · options of OPTIONS that "draw" or "truncate" · seed · index

Receipts, verification, replay, the ledger, bisection and the memo have this one table, so that none of them takes two samples
for equal that need not be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from rollout.engine.values import OPTIONS, PartialSample, Role, Sample, Sampling

DIGEST = 20
"""bytes of a digest: the first ones of a SHA-256, so that no other prompt or result with the same digest can be constructed"""

NAMES = tuple(OPTIONS)
DRAWN_BY = tuple(name for name, option in OPTIONS.items() if option.role in ("draws", "truncates"))
"""fields of `Sampling` that decide tokens and log-probs"""
COMPUTED_BY = ("configuration", "arithmetic", "block_size", "kv_dtype")
"""fields of Welcome that say how a service computes, of whatever prompt, weights and sampling"""
WORDS = {
    "configuration": "configuration of the model",
    "tokenizer": "tokenizer for stop strings",
    "block_size": "block_size",
    "kv_dtype": "kv_dtype",
    "arithmetic": "arithmetic",
}


class Computed(Protocol):
    """What says how samples are computed: Welcome, a receipt, or the record of a service."""

    @property
    def configuration(self) -> str: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def arithmetic(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...


def computed_by(sampling: Sampling) -> tuple[str, ...]:
    """Return the fields of `Computed` that decide the samples of a sampling: the tokenizer only where text ends them."""
    return (*COMPUTED_BY, "tokenizer") if sampling.stop else COMPUTED_BY


def first_difference(one: Computed, other: Computed, sampling: Sampling) -> str | None:
    """Return the first field by which two services compute samples of a sampling differently; None: they compute the same."""
    return next((name for name in computed_by(sampling) if getattr(one, name) != getattr(other, name)), None)


def drawn_by(sampling: Sampling, seed: int, eos_token_ids: Collection[int]) -> Sampling:
    """Return what of a `Sampling` decides tokens and log-probs, with the seed of the group and the model's end tokens."""
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    kept = {name: getattr(sampling, name) for name in DRAWN_BY}
    return Sampling(**(kept | {"seed": seed, "stop_token_ids": tuple(sorted(ends)), "ignore_eos": True}))


def numbered(sampling: Sampling, roles: Sequence[Role]) -> dict[int, Any]:
    """Return the fields of these roles that have other values than the defaults, by their places in OPTIONS."""
    default = Sampling()
    named = ((number, name) for number, (name, option) in enumerate(OPTIONS.items()) if option.role in roles)
    values = {number: (getattr(sampling, name), getattr(default, name)) for number, name in named}
    return {number: value for number, (value, usual) in values.items() if value != usual}


def sampling_of(fields: dict[int, Any], roles: Sequence[Role], **more: Any) -> Sampling:
    """Return the sampling of what `numbered` gave. Raises LookupError for another number or role, ValueError, TypeError."""
    if wrong := [number for number in fields if not 0 <= number < len(NAMES) or OPTIONS[NAMES[number]].role not in roles]:
        raise LookupError(f"no option {wrong[0]}")
    return Sampling(**{NAMES[number]: value for number, value in fields.items()}, **more)


# ── digests ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def prompt_digest(prompt: np.ndarray) -> str:
    """Return the digest of [prompt_tokens] int32 token ids."""
    return _digest(prompt.astype("<i4").tobytes())


def result_digest(sample: Sample) -> str:
    """Return the digest of the tokens, log-probs and finish_reason of a sample."""
    tokens, logprobs = sample.token_ids.astype("<i4").tobytes(), sample.logprobs.astype("<f4").tobytes()
    return _digest(len(tokens).to_bytes(8, "little") + tokens + logprobs + sample.finish_reason.encode())


def given_digest(children: Sequence[PartialSample]) -> str:
    """Return the digest of the tokens that children had when their group was sent, with all else that they bring into a sample;
    "": none had any."""
    return _digest(msgspec.msgpack.encode([list(_given(child)) for child in children])) if children else ""


def unnumbered(children: Sequence[PartialSample]) -> list[PartialSample]:
    """Return given children without the numbers of their versions: for a digest that is equal in runs whose versions have other
    numbers. The digest of a ledger has them, since its reader compares them."""
    return [msgspec.structs.replace(child, weight_versions=[], kv_versions=[]) for child in children]


def short(digest: str) -> str:
    """Return as much of a `manifest_digest` as a receipt has."""
    return digest[: 2 * DIGEST]


def _given(child: PartialSample) -> Iterator[Any]:
    yield from (child.index, child.weight_versions, child.kv_versions)
    for name, value in child.columns().items():
        if isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value)
            yield name, array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).digest()[:DIGEST].hex()
