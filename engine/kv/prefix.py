"""Prefix index: finds full KV blocks by their tokens.

The key of a block is a hash of the key of the previous block, its token ids and the weight versions that computed them. So
blocks with equal keys hold equal tokens from the start of the prompt, and each token was computed by the same version; KV of
older weights cannot be used by accident. A block computed by several versions counts as old as its oldest token. Chained block
hashes follow vLLM's automatic prefix caching.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from rollout.engine.kv.block import Block
    from rollout.engine.kv.versions import Versions


def content_key(parent: bytes | None, tokens: np.ndarray) -> bytes:
    """Return the 128-bit hash of a block's tokens, [block_size] int32, and of all tokens before it, for any weight versions.

    Args:
        parent: content key of the previous block; None: this is the first block.
    """
    digest = xxhash.xxh3_128(parent or b"")
    digest.update(tokens.tobytes())
    return digest.digest()


def block_key(content: bytes, versions: Versions) -> bytes:
    """Return the 128-bit key of a block with this `content_key` whose tokens these versions computed."""
    digest = xxhash.xxh3_128(content)
    for first, version in versions:
        digest.update(first.to_bytes(8, "little") + version.to_bytes(8, "little"))
    return digest.digest()


class PrefixIndex:
    """Maps keys to blocks. If a second block has the same key, the first one stays."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._alike: dict[bytes, list[Block]] = {}
        """by content key: blocks with the same tokens, computed by different versions"""

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> set[bytes]:
        return set(self._blocks)

    def get(self, key: bytes) -> Block | None:
        """Return the block with this key."""
        return self._blocks.get(key)

    def add(self, block: Block) -> None:
        """Index a full block, unless the index has a block with the same key."""
        assert block.key is not None and block.content is not None
        if block.key not in self._blocks:
            self._blocks[block.key] = block
            self._alike.setdefault(block.content, []).append(block)

    def clear(self) -> None:
        """Remove all blocks."""
        self._blocks.clear()
        self._alike.clear()

    def holds(self, block: Block) -> bool:
        """Return whether this block, not only one with the same key, is indexed."""
        return block.key is not None and self._blocks.get(block.key) is block

    def remove(self, block: Block) -> None:
        """Remove a block, if it is indexed."""
        if self.holds(block):
            assert block.key is not None and block.content is not None
            del self._blocks[block.key]
            alike = self._alike[block.content]
            alike.remove(block)
            if not alike:
                del self._alike[block.content]

    def find(self, parent: bytes | None, tokens: np.ndarray, oldest: int, own: Versions = ()) -> Block | None:
        """Find a block that continues `parent` with `tokens`: one computed by exactly the versions `own`, at any age; otherwise
        the newest block without tokens of a version below `oldest`."""
        content = content_key(parent, tokens)
        if own and (block := self._blocks.get(block_key(content, own))) is not None:
            return block
        alike = self._alike.get(content, ())
        fresh = (block for block in alike if block.version >= oldest)
        return max(fresh, key=lambda block: [version for _, version in block.versions], default=None)
