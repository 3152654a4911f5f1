"""How the attention of a step is cut into tiles for a GPU. Plain numpy, no torch.

A context is cut into chunks of a fixed number of tokens, counted from its first one. Softmax is computed chunk by chunk, and
chunks are merged in their order by log-sum-exp; so a query's numbers do not depend on how the work was cut:

    row 0   ║ chunk 0 ║ chunk 1 ║ chunk 2 │          a tile is (some queries) × (some chunks of one row's block table)
    row 1   ║ chunk 0 ║ chunk 1 ║ chunk │
            └ blocks in common ─┘

    [rows 0, 1] × [chunks 0, 1]     one tile for the prefix that the rows share: its KV is read once for all their queries
    [row 0] × [chunk 2]             and each row's own chunks
    [row 1] × [chunk 2]

A tile that has all chunks of its queries merges them itself and writes the output. The others write one partial result a chunk,
which a second kernel merges: flash-decoding's split (Dao et al. 2023), and Hydragen's shared prefix (Juravsky et al. 2024).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

CHUNK_TOKENS = 256
"""of a chunk, or one block where blocks are larger. A partial result is written and read in fp32 for each query head: with four
of them to a KV head, three percent of the bytes of the chunk's K and V"""
SPLIT_TOKENS = 16
"""rows with more tokens than this in a step (prefill) have tiles enough; they are neither split nor shared"""
COLUMNS = 6
"""of a tile: first token, tokens, where the row's blocks begin in the table, first chunk, end chunk, split"""
DIRECT, PADDING = -1, -2
"""in `Tiles.parts`: the token's only tile writes its output; nobody does"""


class Tiles(NamedTuple):
    small: np.ndarray
    """[n, COLUMNS] int32, the longest first"""
    large: np.ndarray
    """[n, COLUMNS] int32"""
    parts: np.ndarray
    """[T] int32: where the partial results of a token begin, one for each chunk that it sees; or DIRECT"""
    num_parts: int


def chunk_tokens(block_size: int) -> int:
    return max(1, CHUNK_TOKENS // block_size) * block_size


def tile_rows(group: int) -> tuple[int, int]:
    """Rows (tokens × `group` query heads of one KV head) of a small and of a large tile: powers of two that hold at least one
    token. Tensor cores take 16 rows and more."""
    least = 1 << (group - 1).bit_length()
    return max(16, least), max(64, least)


def cut(
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_table: np.ndarray,
    share: bool,
    *,
    block_size: int,
    group: int,
    kv_heads: int,
    programs: int,
    max_parts: int,
) -> Tiles:
    """The tiles of a step of R rows.

    query_starts [R + 1], context_lens [R], block_table [R, M]: as in `Batch`. share: some rows have leading blocks in common;
    which ones is found here, so prefixes nest. group: query heads of a KV head. programs: how many tiles × kv_heads keep the
    device busy; rows are split until there are so many. max_parts: partial results that there is memory for."""
    chunk = chunk_tokens(block_size)
    counts = np.diff(query_starts)
    chunks = -(-context_lens // chunk)
    splits = counts <= SPLIT_TOKENS
    splits &= np.cumsum(np.where(splits, counts * chunks, 0)) <= max_parts
    own = np.zeros(len(counts), np.int32)
    shared = _shared(counts, context_lens, block_table, splits, chunk // block_size, block_size, own) if share else []
    small, large = (rows // group for rows in tile_rows(group))
    size = np.where(counts <= small, small, large)  # tokens of a row's tiles
    todo = -(-counts // size) * (chunks - own)
    of_kind = [int(todo[counts <= small].sum()), int(todo[counts > small].sum())]
    for first, end, begin, stop in shared:
        tokens = int(query_starts[end] - query_starts[first])
        of_kind[tokens > small] += (stop - begin) * -(-tokens // large)
    # small and large tiles are launched one after the other: each kind has all programs
    runs = [max(1, -(-chunks_of_kind * kv_heads // programs)) for chunks_of_kind in of_kind]
    run = np.where(counts <= small, *runs)
    split = splits & ((own > 0) | (chunks > run))
    parts = np.where(split, counts * chunks, 0)
    first_part = np.cumsum(parts) - parts
    row_of = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(row_of)) - query_starts[row_of]
    tiles = [_of_rows(query_starts, context_lens, own, split, run, size, chunk, block_table.shape[1])]
    if shared:
        tiles.append(_of_prefixes(query_starts, shared, runs, (small, large), block_table.shape[1]))
    every = np.concatenate(tiles).astype(np.int32)
    every = every[np.argsort(every[:, 3] - every[:, 4], kind="stable")]
    is_small = every[:, 1] <= small
    return Tiles(
        small=every[is_small],
        large=every[~is_small],
        parts=np.where(split[row_of], first_part[row_of] + within * chunks[row_of], DIRECT).astype(np.int32),
        num_parts=int(parts.sum()),
    )


def _shared(
    counts: np.ndarray,
    context_lens: np.ndarray,
    table: np.ndarray,
    splits: np.ndarray,
    chunk_blocks: int,
    block_size: int,
    own: np.ndarray,
) -> list[tuple[int, int, int, int]]:
    """(first row, end row, first chunk, end chunk) that several rows have in common. Writes into `own` where each row's own
    chunks begin."""
    written = (context_lens - counts) // block_size  # blocks that are full before this step
    same = table[1:] == table[:-1]
    lead = np.where(same.all(1), table.shape[1], same.argmin(1))  # leading blocks that a row and the next one have in common
    lead = np.minimum(np.minimum(lead, written[1:]), written[:-1]) // chunk_blocks
    lead[~(splits[1:] & splits[:-1])] = 0
    found, stack = [], [(0, len(counts), 0)]
    while stack:
        first, end, known = stack.pop()
        between = lead[first : end - 1]
        depth = int(between.min()) if len(between) else known
        if depth > known:
            found.append((first, end, known, depth))
            own[first:end] = depth
        at = first
        for cut_after in np.flatnonzero(between == depth).tolist() if len(between) else []:
            if first + cut_after + 1 - at > 1:
                stack.append((at, first + cut_after + 1, depth))
            at = first + cut_after + 1
        if first < at < end - 1:
            stack.append((at, end, depth))
    return found


def _of_prefixes(
    query_starts: np.ndarray, shared: list[tuple[int, int, int, int]], runs: list[int], sizes: tuple[int, int], columns: int
) -> np.ndarray:
    """A piece of at most the larger of `sizes` tokens of all rows that share × a run of the chunks in common. `runs`: for those
    that fit into the smaller one, and for the others."""
    tiles = []
    small, size = sizes
    for first, end, begin, stop in shared:
        run = runs[int(query_starts[end] - query_starts[first]) > small]
        for token in range(int(query_starts[first]), int(query_starts[end]), size):
            tokens = min(size, int(query_starts[end]) - token)
            tiles += [(token, tokens, first * columns, at, min(at + run, stop), 1) for at in range(begin, stop, run)]
    return np.array(tiles)


def _of_rows(
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    own: np.ndarray,
    split: np.ndarray,
    run: np.ndarray,
    size: np.ndarray,
    chunk: int,
    columns: int,
) -> np.ndarray:
    """What each row has for itself: a piece of at most `size` of its tokens × all of its chunks, or × a run of them."""
    row, piece = _each(-(-np.diff(query_starts) // size))
    first = query_starts[row] + piece * size[row]
    tokens = np.minimum(size[row], query_starts[row + 1] - first)
    last = context_lens[row] - (query_starts[row + 1] - first - tokens) - 1
    end = last // chunk + 1
    tile, at = _each(np.where(split[row], -(-(end - own[row]) // run[row]), 1))
    row = row[tile]
    begin = own[row] + at * run[row]
    stop = np.where(split[row], np.minimum(begin + run[row], end[tile]), end[tile])
    return np.stack([first[tile], tokens[tile], row * columns, begin, stop, split[row]], axis=1)


def _each(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For i of N things, each counts[i] times: i, and which time it is."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
