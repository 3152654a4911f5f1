"""What the rows of one step have in common: prefixes to read once, and prefixes to compute once."""

from __future__ import annotations

from engine.kv.prefix import block_key, content_key
from engine.scheduling.plan import SharedPrefix
from engine.scheduling.sequence import Row, Sequence


def shared_prefixes(rows: list[Row], block_size: int) -> list[SharedPrefix]:
    """Find runs of rows of one group that stand on the same prompt blocks."""
    shared = []
    first = 0
    while first < len(rows):
        seq, start, *_ = rows[first]
        state = seq.state
        blocks = seq.num_prompt // block_size
        end = first + 1
        if blocks and start >= blocks * block_size:
            prefix = seq.blocks[blocks - 1]
            while end < len(rows):
                other, start, *_ = rows[end]
                if other.state is not state or start < blocks * block_size or other.blocks[blocks - 1] is not prefix:
                    break
                end += 1
            if end - first > 1:
                shared.append(SharedPrefix(first, end - first, blocks))
        first = end
    return shared


def computed_by_other(seq: Sequence, count: int, planned: set[bytes], block_size: int, version: int) -> bool:
    """True if another row of this step computes the block that the next `count` tokens of `seq` start with. Otherwise the full
    blocks of these tokens are added to `planned`, keys of what this step computes."""
    first = seq.cached // block_size
    parent = seq.blocks[first - 1].key if first else None
    if (first and parent is None) or (seq.cached % block_size and seq.blocks[-1].version != version):
        return False

    def key(i: int) -> bytes:
        return block_key(content_key(parent, seq.tokens(i * block_size, block_size)), ((0, version),))

    if seq.cached % block_size == 0 and key(first) in planned:
        return True  # whether or not this row would fill that block
    for i in range(first, (seq.cached + count) // block_size):
        parent = key(i)
        planned.add(parent)
    return False
