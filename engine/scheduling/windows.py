"""KV blocks of layers with a sliding window: a sequence holds only those that its next tokens attend to.

    blocks   [ 0  ][ 1  ][ 2  ][ 3  ][ 4  ][ 5  ]     of layers with full attention
    window                  [ 2  ][ 3  ][ 4  ][ 5  ]  of layers with a window of w tokens
                               └──── w ────┘ └ the next token to compute

Block i of both lists has the KV of the same tokens, in pools of their own; both lists end with the same block. A block that has
left the window is released when a row of several tokens is launched, when drafts are accepted or rejected, and when its
sequence gets a new block, forks or stops. The query of the next token, at position
`Sequence.cached`, attends to w positions with its own; `cached` never counts a draft that may be rejected, so a released block
is not needed again. Until its slot is needed, the prefix index may find it.

A sequence can be cut to its first p tokens only if the window of position p is there; otherwise it is prefilled again, as one
that has lost a block of its window. The same holds for tokens found in the prefix index.

That a cache of one kind of layer can hold fewer tokens, and that a prefix counts as found only as far as every kind has it, are
ideas of vLLM (hybrid KV cache manager) and Jenga (arXiv 2503.18292).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import NamedTuple

from rollout.engine.kv.block import Block, WindowCounts
from rollout.engine.kv.store import BlockStore
from rollout.engine.scheduling.sequence import Sequence


class FoundWindow(NamedTuple):
    """Blocks of a window that a sequence can continue with."""

    depth: int
    """blocks of full attention before the next token"""
    window: list[Block]
    """blocks of the window before it that the sequence does not have, in order"""


class WindowBlocks:
    """Writes `Sequence.window` and `Sequence.window_first`, for `SchedulerState` and `BlockTables`."""

    def __init__(self, counts: WindowCounts, block_size: int, most_tokens: int, keep: bool) -> None:
        """most_tokens: of a step. keep: blocks without owners stay in the prefix index."""
        self.store = BlockStore(counts.device, counts.host, keep)
        self.tokens, self.block_size = counts.tokens, block_size
        self.most = counts.most_held(block_size) - (-most_tokens // block_size)
        """most blocks that a sequence holds, in a prefill"""

    # ── transitions ───────────────────────────────────────────────────────────────────────────────────────────────────
    def start(self, seq: Sequence) -> None:
        """Use, and restore, the blocks of a sequence that starts to run. Raises OutOfBlocks."""
        full = seq.cached // self.block_size
        for i, block in enumerate(seq.window, seq.window_first):
            self.store.activate(block, full=i < full)

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def first(self, position: int) -> int:
        """Return the first block to which queries at this position and later ones attend."""
        return max(0, position - self.tokens + 1) // self.block_size

    def trim(self, seq: Sequence) -> None:
        """Release the blocks that have left the window of a sequence."""
        behind = min(self.first(seq.cached) - seq.window_first, len(seq.window))
        if behind > 0:
            for block in seq.window[:behind]:
                self.store.release(block, used=seq.running)
            if seq.window_table is not None:
                seq.window_table[seq.window_first : seq.window_first + behind] = 0
            del seq.window[:behind]
            seq.window_first += behind

    def append(self, seq: Sequence, block: Block) -> None:
        """Append a block that is on the device to the window of a running sequence."""
        assert block.device is not None and seq.window_table is not None
        seq.window_table[seq.window_first + len(seq.window)] = block.device
        seq.window.append(block)

    def extend(self, seq: Sequence, cached: int, version: int) -> None:
        """Do for the window of a running sequence what `BlockTables.extend` does; release what has left it first."""
        self.trim(seq)
        if seq.cached % self.block_size and seq.window[-1].owners > 1:
            block = seq.window.pop()
            self.append(seq, self.store.copy(block) if self.store.available else self.store.take_over(block))
        while seq.window_first + len(seq.window) < -(-cached // self.block_size):
            self.append(seq, self.store.allocate(version))

    def index(self, seq: Sequence, i: int, like: Block) -> None:
        """Index block `i` of a sequence under the key of its block of full attention."""
        if i >= seq.window_first:
            block = seq.window[i - seq.window_first]
            block.content, block.key = like.content, like.key
            self.store.index.add(block)

    # ── cutting and finding ───────────────────────────────────────────────────────────────────────────────────────────
    def covers(self, seq: Sequence, blocks: int) -> bool:
        """Return whether a sequence could continue after its first `blocks` blocks."""
        first = self.first(blocks * self.block_size)
        needed = seq.window[max(0, first - seq.window_first) : max(0, blocks - seq.window_first)]
        return not blocks or (seq.window_first <= first and not any(block.lost for block in needed))

    def truncate(self, seq: Sequence, blocks: int) -> None:
        """Release all blocks but those among the first `blocks` of a sequence."""
        kept = max(0, blocks - seq.window_first)
        for block in reversed(seq.window[kept:]):
            self.store.release(block, used=seq.running)
        if seq.window_table is not None:
            seq.window_table[seq.window_first + kept : seq.window_first + len(seq.window)] = 0
        del seq.window[kept:]
        if not seq.window:
            seq.window_first = 0 if not blocks else seq.window_first

    def find(self, seq: Sequence, chain: Sequences[Block], in_use: bool) -> FoundWindow:
        """Return how far a sequence can continue along full blocks with keys, those that it has and ones that follow them.
        in_use: only with blocks that running sequences use."""
        depth, since, found = len(seq.blocks), seq.window_first, dict[int, Block]()
        for i in range(len(seq.blocks), len(chain)):
            key = chain[i].key
            block = None if key is None else self.store.index.get(key)
            if block is None or (in_use and not block.users):
                since = i + 1
                continue
            found[i] = block
            if since <= self.first((i + 1) * self.block_size):
                depth = i + 1
        begin = max(len(seq.blocks), self.first(depth * self.block_size))
        return FoundWindow(depth, [found[i] for i in range(begin, depth)])

    def has_room(self, blocks: Sequences[Block]) -> bool:
        """Return whether a running sequence can hold blocks that the index has."""
        return sum(block.device is None or not block.owners for block in blocks) <= self.store.available

    def adopt(self, seq: Sequence, depth: int, added: Sequences[Block]) -> None:
        """Give a sequence the blocks that `find` returned, which it owns already and uses if it runs; it has the tokens of its
        first `depth` blocks."""
        self.trim(seq)
        if not seq.window:
            seq.window_first = depth - len(added)
        for block in added:
            if seq.running:
                self.append(seq, block)
            else:
                seq.window.append(block)
