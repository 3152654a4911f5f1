"""Generated tokens of a child: arrays with one row per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.engine.values.sampling import SEED_LIMIT


class Routing(msgspec.Struct, frozen=True):
    """Shape of the routes of a mixture of experts: which experts each token chose in each layer that has experts.

    Example:
        Routing(layers=(1, 2, 3), chosen=8, experts=128, decoder_layers=4)      # layer 0 is dense; 24 bytes a token
    """

    layers: tuple[int, ...]
    """decoder layer of each row of a token's routes, ascending"""
    chosen: int
    """experts that a token chooses in a layer"""
    experts: int
    """experts of a layer; ids are 0 to experts - 1"""
    decoder_layers: int
    """of the model, those without experts included"""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the routes of one token."""
        return len(self.layers), self.chosen

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of expert ids: uint8 for up to 256 experts, else uint16."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of the routes of one token."""
        return len(self.layers) * self.chosen * self.dtype.itemsize

    def by_decoder_layer(self, routes: np.ndarray) -> np.ndarray:
        """Return [positions, decoder_layers, chosen] of routes [positions, layers, chosen]: 0 in layers without experts. vLLM,
        SGLang and verl have routes in this form."""
        whole = np.zeros((len(routes), self.decoder_layers, self.chosen), routes.dtype)
        whole[:, list(self.layers)] = routes
        return whole

    def check(self, routes: np.ndarray, tokens: int, who: str) -> None:
        """Raises ValueError, which begins with `who`, unless these are routes of so many tokens."""
        wanted = (tokens, *self.shape)
        if routes.dtype != self.dtype or routes.shape != wanted:
            raise ValueError(f"{who} {routes.dtype} {routes.shape}: must be {self.dtype} {list(wanted)}")
        if routes.size and (most := int(routes.max())) >= self.experts:
            raise ValueError(f"{who} holds expert {most}: must be 0 to {self.experts - 1}")


COLUMNS: dict[str, tuple[tuple[type[np.generic], ...], int]] = {
    "token_ids": ((np.int32,), 1),
    "logprobs": ((np.float32,), 1),
    "raw_logprobs": ((np.float32,), 1),
    "top_ids": ((np.int32,), 2),
    "top_logprobs": ((np.float32,), 2),
    "routed_experts": ((np.uint8, np.uint16), 3),
}
"""dtypes and number of dimensions of each array of `TokenColumns`"""

Spans = Sequence[tuple[int, int]]
"""(first token, weight version), ascending by token"""
KVSpans = Sequence[tuple[int, int, int]]
"""(token, position, weight version), ascending by token: from that token on, this version computed the KV of the position and
of all positions after it"""


class Layout(NamedTuple):
    """Optional arrays of `TokenColumns`."""

    raw: bool
    """whether there are raw log-probs"""
    top: int
    """number of top log-probs of a token"""
    routes: tuple[tuple[int, ...], str] | None
    """shape of a token's routes, and their dtype"""


class TokenColumns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Generated tokens of one child: arrays with one row per token. Base of `Sample`, which explains the fields, of
    `PartialSample` and of `TokenChunk`."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    weight_versions: list[tuple[int, int]]
    raw_logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    kv_versions: list[tuple[int, int, int]] = []

    def columns(self) -> dict[str, Any]:
        """Return the fields of `TokenColumns` as keyword arguments, for a constructor."""
        spans = {"weight_versions": self.weight_versions, "kv_versions": self.kv_versions}
        return {**spans, **{name: getattr(self, name) for name in COLUMNS}}

    @property
    def mean_logprob(self) -> float:
        """Return the mean of `logprobs`, NaN without tokens."""
        return float(self.logprobs.mean()) if len(self.logprobs) else math.nan

    @property
    def versions(self) -> str:
        """Say which weights generated the tokens: "version 3", "versions 3 to 5"."""
        versions = [version for _, version in self.weight_versions]
        if len(set(versions)) < 2:
            return f"version {versions[0]}" if versions else "no version"
        return f"versions {min(versions)} to {max(versions)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name in plain lists and numbers, for pandas, datasets or JSON."""
        plain = {name: getattr(self, name) for name in self.__struct_fields__}
        lists = {name: array.tolist() for name, array in self._arrays()}
        return plain | lists | {name: [list(span) for span in plain[name]] for name in ("weight_versions", "kv_versions")}

    def slice(self, first: int, last: int | None = None) -> TokenColumns:
        """Return the tokens from `first` to before `last` (None = the end), as views. Spans count from the new first token."""
        end = len(self.token_ids) if last is None else last
        spans, kv = slice_spans(self.weight_versions, first, end), slice_kv_spans(self.kv_versions, first, end)
        arrays = {name: array[first:last] for name, array in TokenColumns._arrays(self)}
        return TokenColumns(weight_versions=spans, kv_versions=kv, **arrays)

    @staticmethod
    def concat(parts: Sequence[TokenColumns]) -> TokenColumns:
        """Join consecutive tokens of one child; the arrays are copies. An optional array is kept if all parts have it."""
        spans, kv = list[tuple[int, int]](), list[tuple[int, int, int]]()
        length = 0
        for part in parts:
            for first, version in part.weight_versions:
                if not spans or spans[-1][1] != version:
                    spans.append((length + first, version))
            kv += [(length + token, position, version) for token, position, version in part.kv_versions]
            length += len(part.token_ids)
        return TokenColumns(weight_versions=spans, kv_versions=kv, **concat_arrays(parts))

    @property
    def layout(self) -> Layout:
        """Return which optional arrays there are. Columns of equal layout can share a message."""
        routes = None if self.routed_experts is None else (self.routed_experts.shape[1:], self.routed_experts.dtype.name)
        return Layout(self.raw_logprobs is not None, 0 if self.top_ids is None else self.top_ids.shape[1], routes)

    @property
    def nbytes(self) -> int:
        """Count the bytes of the arrays."""
        return sum(array.nbytes for _, array in self._arrays())

    def _arrays(self) -> list[tuple[str, np.ndarray]]:
        return [(name, array) for name in COLUMNS if (array := getattr(self, name)) is not None]


def no_tokens() -> TokenColumns:
    """Return columns without rows."""
    return TokenColumns(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), weight_versions=[])


def slice_spans(spans: Spans, first: int, last: int) -> list[tuple[int, int]]:
    """Return the spans of the tokens from `first` to before `last`, counted from `first`."""
    ends = [*(start for start, _ in spans[1:]), last] if spans else []
    return [
        (max(start, first) - first, version)
        for (start, version), end in zip(spans, ends, strict=True)
        if max(start, first) < min(end, last)
    ]


def valid_kv_spans(spans: KVSpans, tokens: int) -> bool:
    """Return whether spans of KV are possible in a child of so many tokens."""
    firsts = [token for token, _, _ in spans]
    inside = firsts == sorted(firsts) and (not spans or 0 <= firsts[0] <= firsts[-1] < tokens)
    return inside and all(position >= 0 and 0 <= version < SEED_LIMIT for _, position, version in spans)


def slice_kv_spans(spans: KVSpans, first: int, last: int) -> list[tuple[int, int, int]]:
    """Return the spans that begin with the tokens from `first` to before `last`, counted from `first`."""
    return [(token - first, position, version) for token, position, version in spans if first <= token < last]


def concat_arrays(parts: Sequence[TokenColumns]) -> dict[str, Any]:
    """Concatenate each array over all parts; None unless every part has it."""
    joined: dict[str, Any] = {}
    for name in COLUMNS:
        arrays = [getattr(part, name) for part in parts]
        joined[name] = None if any(array is None for array in arrays) else np.concatenate(arrays)
    return joined
