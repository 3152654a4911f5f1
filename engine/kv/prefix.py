"""The prefix index: full blocks of KV found by what they hold.

The key of a block is a hash over (key of the block before it, its token ids, the weight version that computed it), so that
equal keys mean equal tokens from the start of the prompt on, computed by the same versions all the way: KV of older
weights cannot be found by accident. Chained block hashes are vLLM's idea (automatic prefix caching).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from engine.kv.block import Block


def block_key(parent: bytes | None, tokens: np.ndarray, version: int) -> bytes:
    """Return the 128-bit key of the block of `tokens` ([block_size] int32) that follows the block with key `parent` (None: the
    first)."""
    digest = xxhash.xxh3_128(parent or b"")
    digest.update(version.to_bytes(8, "little"))
    digest.update(tokens.tobytes())
    return digest.digest()


class PrefixIndex:
    """key → block. Of two blocks with the same content the first one stays."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._versions: Counter[int] = Counter()
        """how many blocks there are of each version"""

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> set[bytes]:
        return set(self._blocks)

    def add(self, block: Block) -> None:
        """Index a full block that has a key, unless the index has one with the same key."""
        assert block.key is not None and not block.mixed
        if block.key not in self._blocks:
            self._blocks[block.key] = block
            self._versions[block.version] += 1

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()
        self._versions.clear()

    def holds(self, block: Block) -> bool:
        """True if this very block is indexed."""
        return block.key is not None and self._blocks.get(block.key) is block

    def remove(self, block: Block) -> None:
        """Forget a block, if it is indexed."""
        if self.holds(block):
            assert block.key is not None
            del self._blocks[block.key]
            self._versions[block.version] -= 1
            if not self._versions[block.version]:
                del self._versions[block.version]

    def find(self, parent: bytes | None, tokens: np.ndarray, newest: int, oldest: int) -> Block | None:
        """Find the block that continues `parent` with `tokens`, computed by the newest version in [oldest, newest] there is."""
        for version in sorted((v for v in self._versions if oldest <= v <= newest), reverse=True):
            block = self._blocks.get(block_key(parent, tokens, version))
            if block is not None:
                return block
        return None
