"""The prefix index: full blocks of KV found by what they hold.

The key of a block is a hash over (key of the block before it, its token ids, which weights computed which of them), so that
equal keys mean equal tokens from the start of the prompt on, each computed by the same version: KV of older weights cannot be
found by accident. A block in which several versions met has a key like any other and counts as old as its oldest token.
Chained block hashes are vLLM's idea (automatic prefix caching).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from engine.kv.block import Block
    from engine.kv.versions import Versions


def content_key(parent: bytes | None, tokens: np.ndarray) -> bytes:
    """Return the 128-bit hash of the block of `tokens` ([block_size] int32) that follows the block with key `parent` (None: the
    first), whatever computed it."""
    digest = xxhash.xxh3_128(parent or b"")
    digest.update(tokens.tobytes())
    return digest.digest()


def block_key(content: bytes, versions: Versions) -> bytes:
    """Return the 128-bit key of the block with that `content_key` whose tokens these versions computed."""
    digest = xxhash.xxh3_128(content)
    for first, version in versions:
        digest.update(first.to_bytes(8, "little") + version.to_bytes(8, "little"))
    return digest.digest()


class PrefixIndex:
    """key → block. Of two blocks with the same content the first one stays."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._alike: dict[bytes, list[Block]] = {}
        """by content: what several versions computed of the same tokens"""

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> set[bytes]:
        return set(self._blocks)

    def add(self, block: Block) -> None:
        """Index a full block that has a key, unless the index has one with the same key."""
        assert block.key is not None and block.content is not None
        if block.key not in self._blocks:
            self._blocks[block.key] = block
            self._alike.setdefault(block.content, []).append(block)

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()
        self._alike.clear()

    def holds(self, block: Block) -> bool:
        """True if this very block is indexed."""
        return block.key is not None and self._blocks.get(block.key) is block

    def remove(self, block: Block) -> None:
        """Forget a block, if it is indexed."""
        if self.holds(block):
            assert block.key is not None and block.content is not None
            del self._blocks[block.key]
            alike = self._alike[block.content]
            alike.remove(block)
            if not alike:
                del self._alike[block.content]

    def find(self, parent: bytes | None, tokens: np.ndarray, oldest: int, own: Versions = ()) -> Block | None:
        """Find the block that continues `parent` with `tokens`: the one that just the versions `own` computed, however old they
        are, else the newest of those that have nothing of a version below `oldest`."""
        content = content_key(parent, tokens)
        if own and (block := self._blocks.get(block_key(content, own))) is not None:
            return block
        alike = self._alike.get(content, ())
        fresh = (block for block in alike if block.version >= oldest)
        return max(fresh, key=lambda block: [version for _, version in block.versions], default=None)
