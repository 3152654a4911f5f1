"""Records which weight version computed which span of a sequence's KV."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

Versions = tuple[tuple[int, int], ...]
"""(first token, weight version) of each span, ascending in both"""


class KVVersions(NamedTuple):
    """Weight versions that computed the first `tokens` tokens of a sequence."""

    tokens: int
    spans: Versions

    @classmethod
    def of(cls, blocks: Iterable[Versions], tokens: int, block_size: int) -> KVVersions:
        """Join the spans of the blocks of a sequence, up to `tokens`."""
        spans: list[tuple[int, int]] = []
        for i, versions in enumerate(blocks):
            for first, version in versions:
                at = i * block_size + first
                if at < tokens and (not spans or spans[-1][1] != version):
                    spans.append((at, version))
        return cls(tokens, tuple(spans))

    def of_block(self, i: int, block_size: int) -> Versions:
        """Return the spans of block `i`, counted from its first token, up to `tokens`; () if the block starts after
        `tokens`."""
        start, end = i * block_size, min((i + 1) * block_size, self.tokens)
        if start >= end:
            return ()
        at = bisect_right(self.spans, start, key=lambda span: span[0])
        return (0, self.spans[at - 1][1]), *((first - start, version) for first, version in self.spans[at:] if first < end)
