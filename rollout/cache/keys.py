"""Keys of cache entries: digests of all arguments that determine an answer.

    group     weights digest ─ prompt digest ─ SHA-256(arithmetic, block size, dtype of KV, sampling with its seed, children …)
    refresh   "refresh" ─ SHA-256(digest of the weights before, manifest, adapter)

The names begin with the digests of weights and prompt, so that a miss can say which of them was never seen.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rollout.client.receipts import prompt_digest
from rollout.client.verification import BATCH
from rollout.engine.types import PartialSample, Sampling, Served, manifest_digest
from rollout.transport import messages as m
from rollout.transport.columns import unpack_partials
from rollout.transport.weights.manifest import unpack_manifest

PREFIX = 16
"""hex digits of the digests of weights and prompt"""
DIGITS = 40
"""hex digits of the digest of everything else"""
NEUTRAL: dict[str, Any] = {"stream_every": 0, "priority": 0, "kv_ttl_s": 0.0, "deadline_s": None, "max_version_lag": None}
"""fields of `Sampling` that change no stored answer"""
MOST_TENSORS = 1_000_000
"""of a manifest"""
REMEMBERED = 4096
"""versions whose digest is remembered"""


class NotCacheable(Exception):
    """A group whose answer is not stored. The message says why."""


class KnownWeights:
    """Versions of the service's weights and their digests."""

    def __init__(self) -> None:
        self.live = Served()
        self.base = ""
        """digest of the live weights without an adapter"""
        self._digests: OrderedDict[int, str] = OrderedDict()
        self._incarnation = ""

    def welcomed(self, welcome: m.Welcome) -> None:
        """Record the weights of a Welcome. If the service has been restarted, forget all others."""
        if welcome.incarnation != self._incarnation:
            self._incarnation, self.live, self.base = welcome.incarnation, Served(), welcome.digest
            self._digests.clear()
        self.seen(Served(welcome.version, welcome.digest))

    def seen(self, served: Served) -> None:
        """Record that weights are live, unless newer ones are."""
        if served.version < self.live.version or not served.digest:
            return
        self.live = served
        self._digests[served.version] = served.digest
        while len(self._digests) > REMEMBERED:
            self._digests.popitem(last=False)

    def digest(self, version: int) -> str:
        """Return the digest of a version, "" if it is unknown."""
        return self._digests.get(version, "")


def group_name(submit: m.Submit, info: m.Welcome, live: Served, digest_of: Callable[[int], str]) -> str:
    """Return the name of the entry of a group. live: the weights at its submission. Raises NotCacheable."""
    sampling = submit.sampling
    if BATCH in info.arithmetic or not info.arithmetic:
        raise NotCacheable(f"the bits of arithmetic {info.arithmetic!r} depend on the batch")
    if not live.digest:
        raise NotCacheable("the digest of the live weights is unknown")
    if submit.redraw:
        raise NotCacheable("a verification is computed each time")
    if sampling.seed is None and sampling.temperature > 0:
        raise NotCacheable("it has no Sampling.seed, so each of its answers differs")
    fields = (
        info.arithmetic, info.block_size, info.kv_dtype, info.vocab_size, sorted(info.eos_token_ids), live.digest,
        len(submit.prompt), prompt_digest(submit.prompt), _plain(sampling), submit.indices, submit.score,
        *_partials(submit, info, digest_of),
    )  # fmt: skip
    digest = hashlib.sha256(msgspec.msgpack.encode(fields)).hexdigest()
    return f"{live.digest[:PREFIX]}-{prompt_digest(submit.prompt)[:PREFIX]}-{digest[:DIGITS]}"


def _plain(sampling: Sampling) -> Any:
    """Return the fields that decide an answer, in an order that does not depend on how they were given."""
    fields = msgspec.structs.asdict(msgspec.structs.replace(sampling, **NEUTRAL))
    bias = fields["logit_bias"]
    return sorted((fields | {"logit_bias": None if bias is None else sorted(bias.items())}).items())


def _partials(submit: m.Submit, info: m.Welcome, digest_of: Callable[[int], str]) -> list[Any]:
    """Return what identifies the given tokens of children."""
    if submit.partials is None:
        return []
    try:
        children = unpack_partials(submit.partials, info.limits.max_samples_per_client)
    except Exception as error:  # the service says what is wrong
        raise NotCacheable(f"its partial children cannot be read: {error}") from None
    return [_partial(child, submit.score, digest_of) for child in children]


def _partial(child: PartialSample, score: bool, digest_of: Callable[[int], str]) -> tuple[Any, ...]:
    if score:  # only the tokens are read
        return child.index, _bytes(child.token_ids)
    spans = [*((first, -1, version) for first, version in child.weight_versions), *child.kv_versions]
    digests = [(first, position, digest_of(version)) for first, position, version in spans]
    if not all(digest for _, _, digest in digests):
        raise NotCacheable(f"child {child.index} has tokens of weights whose digest is unknown")
    arrays = {name: _bytes(value) for name, value in child.columns().items() if isinstance(value, np.ndarray)}
    return child.index, digests, sorted(arrays.items())


def _bytes(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()


def refresh_name(begin: m.Begin, weights: KnownWeights) -> str:
    """Return the name of the entry of a refresh: of what it begins with, and of what is sent. Raises InvalidRequest for a
    manifest that is none."""
    before = weights.live.digest if begin.partial else weights.base if begin.adapter is not None else ""
    adapter = None if begin.adapter is None else _bytes(begin.adapter)
    manifest = manifest_digest(unpack_manifest(begin.manifest, MOST_TENSORS))
    digest = hashlib.sha256(msgspec.msgpack.encode((manifest, begin.partial, adapter, before))).hexdigest()
    return f"refresh-{digest[:DIGITS]}"


def missing(name: str, has_prefix: Callable[[str], bool]) -> str:
    """Say which argument of a group was never seen."""
    weights, prompt, _ = name.split("-")
    if not has_prefix(weights):
        return f"weights {weights}… were never seen"
    if not has_prefix(f"{weights}-{prompt}"):
        return f"prompt {prompt}… was never seen with weights {weights}…"
    return f"sampling, seed or children were never seen with prompt {prompt}… and weights {weights}…"
