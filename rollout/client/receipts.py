"""Receipts: the arguments that a sample is a function of, in about a hundred bytes, with a digest of the sample.

    Receipt = arithmetic, block size, dtype of KV · weights · prompt · sampling, seed · index · digest of the result

A client makes them of what the service has sent; nothing is computed again. Digests are the first 20 bytes of SHA-256, so that
no other prompt or result with the same digest can be constructed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import numpy as np

from rollout.client.submission import TokenIds, token_array
from rollout.engine.types import Sample, Sampling
from rollout.transport.errors import InvalidRequest
from rollout.transport.messages import Welcome

FORMAT = 1
"""first number of a packed receipt; another meaning of a field gets another one"""
DIGEST = 20
"""bytes of a digest"""
DRAWN_BY = (
    "seed", "temperature", "max_tokens", "min_tokens", "top_k", "top_p", "min_p", "stop_token_ids", "ignore_eos", "stop",
    "logit_bias", "allowed_token_ids", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""fields of `Sampling` that decide tokens and log-probs. A packed receipt names them by their numbers here: append only"""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a sample is a function of, and a digest of the sample. Equal receipts are of equal samples.

    Example:
        receipt = client.receipt(sample, prompt, sampling)
        stored = receipt.pack()                              # about 100 bytes
        assert Receipt.unpack(stored) == receipt
    """

    arithmetic: str
    """as `Welcome.arithmetic`"""
    block_size: int
    """tokens of a KV block, which decide the order of sums"""
    kv_dtype: str
    """dtype in which KV is stored"""
    weights: tuple[tuple[int, str], ...]
    """(version, digest) of the weights that generated its tokens or computed its KV, ascending; the digest is the first 40 hex
    digits of `manifest_digest`, "" if the client has not seen it"""
    weight_versions: tuple[tuple[int, int], ...]
    """as `Sample.weight_versions`"""
    kv_versions: tuple[tuple[int, int, int], ...] = ()
    """as `Sample.kv_versions`"""
    prompt: str
    """digest of the token ids, 40 hex digits"""
    sampling: Sampling
    """what decides its tokens, with its seed: all end tokens are in `stop_token_ids`; other fields have their defaults"""
    index: int
    """of the child"""
    result: str
    """digest of tokens, log-probs and finish_reason, 40 hex digits"""

    def pack(self) -> bytes:
        """Encode the receipt: MessagePack of its fields in order, without names, `sampling` by the numbers in DRAWN_BY. Raises
        ValueError for a digest that is not hex."""
        weights = [(version, bytes.fromhex(digest)) for version, digest in self.weights]
        default, changed = Sampling(), {}
        for number, name in enumerate(DRAWN_BY):
            if (value := getattr(self.sampling, name)) != getattr(default, name):
                changed[number] = value
        fields = (
            FORMAT, self.arithmetic, self.block_size, self.kv_dtype, weights, self.weight_versions, self.kv_versions,
            bytes.fromhex(self.prompt), changed, self.index, bytes.fromhex(self.result),
        )  # fmt: skip
        return msgspec.msgpack.encode(fields)

    @classmethod
    def unpack(cls, data: bytes) -> Receipt:
        """Decode what `pack` wrote. Raises ValueError for anything else."""
        try:
            packed = msgspec.msgpack.decode(data, type=_Packed)
            if packed.format != FORMAT or max(packed.sampling, default=0) >= len(DRAWN_BY):
                raise ValueError(f"format {packed.format} of a receipt: this version reads {FORMAT}")
            return cls(
                arithmetic=packed.arithmetic,
                block_size=packed.block_size,
                kv_dtype=packed.kv_dtype,
                weights=tuple((version, digest.hex()) for version, digest in packed.weights),
                weight_versions=packed.weight_versions,
                kv_versions=packed.kv_versions,
                prompt=packed.prompt.hex(),
                sampling=Sampling(**{DRAWN_BY[number]: value for number, value in packed.sampling.items()}),
                index=packed.index,
                result=packed.result.hex(),
            )
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise ValueError(f"these {len(data)} bytes are no receipt: {error}") from None


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Fields of a packed receipt."""

    format: int
    arithmetic: str
    block_size: int
    kv_dtype: str
    weights: tuple[tuple[int, bytes], ...]
    weight_versions: tuple[tuple[int, int], ...]
    kv_versions: tuple[tuple[int, int, int], ...]
    prompt: bytes
    sampling: dict[int, Any]
    index: int
    result: bytes


def receipt_of(sample: Sample, prompt: TokenIds, sampling: Sampling, info: Welcome, digest_of: Callable[[int], str]) -> Receipt:
    """Make the receipt of a sample. info: of the service that generated it; digest_of: returns the digest of the weights of a
    version, "" if it is unknown. Raises InvalidRequest for a prompt of another length, and for tokens that were given."""
    ids = token_array(prompt)
    if len(ids) != sample.prompt_tokens:
        raise InvalidRequest(
            f"prompt of {len(ids)} tokens, the sample has prompt_tokens={sample.prompt_tokens}: give the prompt of its group"
        )
    if sample.finish_reason == "scored":
        raise InvalidRequest("the tokens of this sample were given, not sampled: it has no receipt")
    used = {version for _, version in sample.weight_versions} | {version for _, _, version in sample.kv_versions}
    return Receipt(
        arithmetic=info.arithmetic,
        block_size=info.block_size,
        kv_dtype=info.kv_dtype,
        weights=tuple((version, short(digest_of(version))) for version in sorted(used)),
        weight_versions=tuple(sample.weight_versions),
        kv_versions=tuple(sample.kv_versions),
        prompt=prompt_digest(ids),
        sampling=drawn_by(sampling, sample.seed, info.eos_token_ids),
        index=sample.index,
        result=result_digest(sample),
    )


def drawn_by(sampling: Sampling, seed: int, eos_token_ids: Collection[int]) -> Sampling:
    """Return what of a `Sampling` decides tokens and log-probs, with the seed of the group and the model's end tokens."""
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    kept = {name: getattr(sampling, name) for name in DRAWN_BY}
    return Sampling(**(kept | {"seed": seed, "stop_token_ids": tuple(sorted(ends)), "ignore_eos": True}))


def prompt_digest(prompt: np.ndarray) -> str:
    """Return the digest of [prompt_tokens] int32 token ids."""
    return _digest(prompt.astype("<i4").tobytes())


def result_digest(sample: Sample) -> str:
    """Return the digest of the tokens, log-probs and finish_reason of a sample."""
    tokens, logprobs = sample.token_ids.astype("<i4").tobytes(), sample.logprobs.astype("<f4").tobytes()
    return _digest(len(tokens).to_bytes(8, "little") + tokens + logprobs + sample.finish_reason.encode())


def short(digest: str) -> str:
    """Return as much of a `manifest_digest` as a receipt has."""
    return digest[: 2 * DIGEST]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).digest()[:DIGEST].hex()
