"""Receipts: the arguments that a sample is a function of, in about a hundred bytes, with a digest of the sample.

    Receipt = configuration, arithmetic, block size, dtype of KV · weights · prompt · sampling, seed · index · result's digest

A client makes them of what the service has sent; nothing is computed again. `rollout.identity` says what identifies a
sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rollout.client.submission import TokenIds, token_array
from rollout.engine.values import Role, Sample, Sampling
from rollout.identity import drawn_by, numbered, prompt_digest, result_digest, sampling_of, short
from rollout.transport.errors import InvalidRequest
from rollout.transport.messages import Welcome

FORMAT = 2
"""first number of a packed receipt; another meaning of a field gets another one"""
ROLES: tuple[Role, ...] = ("draws", "truncates")
"""fields of `Sampling` in a receipt"""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a sample is a function of, and a digest of the sample. Equal receipts are of equal samples.

    Example:
        receipt = client.receipt(sample, prompt, sampling)
        stored = receipt.pack()                              # about 100 bytes
        assert Receipt.unpack(stored) == receipt
    """

    configuration: str
    """as `Welcome.configuration`"""
    tokenizer: str
    """as `Welcome.tokenizer` if `sampling` has stop strings, else "" """
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
        """Encode the receipt: MessagePack of its fields in order, without names, `sampling` by the numbers in OPTIONS. Raises
        ValueError for a digest that is not hex."""
        weights = [(version, bytes.fromhex(digest)) for version, digest in self.weights]
        fields = (
            FORMAT, bytes.fromhex(self.configuration), bytes.fromhex(self.tokenizer), self.arithmetic, self.block_size,
            self.kv_dtype, weights, self.weight_versions, self.kv_versions, bytes.fromhex(self.prompt),
            numbered(self.sampling, ROLES), self.index, bytes.fromhex(self.result),
        )  # fmt: skip
        return msgspec.msgpack.encode(fields)

    @classmethod
    def unpack(cls, data: bytes) -> Receipt:
        """Decode what `pack` wrote. Raises ValueError for anything else."""
        try:
            if (found := msgspec.msgpack.decode(data, type=_Format).format) != FORMAT:
                raise ValueError(f"format {found} of a receipt: this version reads {FORMAT}")
            packed = msgspec.msgpack.decode(data, type=_Packed)
            return cls(
                configuration=packed.configuration.hex(),
                tokenizer=packed.tokenizer.hex(),
                arithmetic=packed.arithmetic,
                block_size=packed.block_size,
                kv_dtype=packed.kv_dtype,
                weights=tuple((version, digest.hex()) for version, digest in packed.weights),
                weight_versions=packed.weight_versions,
                kv_versions=packed.kv_versions,
                prompt=packed.prompt.hex(),
                sampling=sampling_of(packed.sampling, ROLES),
                index=packed.index,
                result=packed.result.hex(),
            )
        except (msgspec.MsgspecError, LookupError, ValueError, TypeError) as error:
            raise ValueError(f"these {len(data)} bytes are no receipt: {error}") from None


class _Format(msgspec.Struct, frozen=True, array_like=True):
    """The first field of a packed receipt."""

    format: int


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Fields of a packed receipt."""

    format: int
    configuration: bytes
    tokenizer: bytes
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
    if sample.configuration not in ("", info.configuration):
        raise InvalidRequest(
            f"the sample is of configuration {sample.configuration} of the model, the service has {info.configuration}: ask "
            "the client of the service that generated it"
        )
    used = {version for _, version in sample.weight_versions} | {version for _, _, version in sample.kv_versions}
    return Receipt(
        configuration=info.configuration,
        tokenizer=info.tokenizer if sampling.stop else "",
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
