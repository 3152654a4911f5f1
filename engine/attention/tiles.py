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

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CHUNK_TOKENS = 256
"""of a chunk, or one block where blocks are larger. A partial result is written and read in fp32 for each query head: with four
of them to a KV head, three percent of the bytes of the chunk's K and V"""
SPLIT_TOKENS = 16
"""rows with more tokens than this in a step (prefill) have tiles enough; they are neither split nor shared"""
COLUMNS = 6
"""of a tile: first token, tokens, where the row's blocks begin in the table, first chunk, end chunk, split"""
STEP_KEYS = 64
"""keys that a tile's work is counted in"""
BEGIN_STEPS, PARTIAL_STEPS = 1.0, 0.25
"""what it costs to begin a tile, and to write a partial result of a chunk and read it again; by estimate"""
FINER = (4, 8, 16)
"""tiles for each program that are tried, in turn, until the programs have nearly the same work"""
TAIL_ROUNDS, TAIL_FINER = 2, 4
"""of the tiles, those dealt last fill the gaps: their rows are cut so much finer where that helps"""
BALANCED = 0.95
"""mean / largest work of the programs that ends this search"""
DIRECT, PADDING = -1, -2
"""in `Tiles.parts`: the token's only tile writes its output; nobody does"""


class Tiles(NamedTuple):
    small: np.ndarray
    """[n, COLUMNS] int32, in the order of `deal`"""
    large: np.ndarray
    """[n, COLUMNS] int32"""
    parts: np.ndarray
    """[T] int32: where the partial results of a token begin, one for each chunk that it sees; or DIRECT"""
    num_parts: int
    loads: tuple[np.ndarray, np.ndarray]
    """[programs // kv_heads] each, of small and of large tiles: the steps of STEP_KEYS keys that fall to a program"""


class Dealt(NamedTuple):
    """Tiles of one kind in the order in which programs take them."""

    tiles: np.ndarray
    """[n, COLUMNS] int32"""
    steps: np.ndarray
    """[groups]: what falls to each"""
    longest: float
    """the most steps of a program, with what tiles cost beside their keys"""


def balance(loads: Sequence[np.ndarray]) -> float:
    """Mean / largest of the programs' loads: 1 = none waits for another. Each kind of tiles is a launch of its own."""
    longest = sum(load.max() for load in loads)
    return float(sum(load.mean() for load in loads) / longest) if longest else 1.0


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
    which ones is found here, so prefixes nest. group: query heads of a KV head. programs: that run at once, each with one KV
    head of its tiles. max_parts: partial results that there is memory for.

    Rows and prefixes are cut into runs of chunks, which get shorter until the programs have nearly the same work."""
    chunk = chunk_tokens(block_size)
    counts = np.diff(query_starts)
    chunks = -(-context_lens // chunk)
    splits = counts <= SPLIT_TOKENS
    splits &= np.cumsum(np.where(splits, counts * chunks, 0)) <= max_parts
    own = np.zeros(len(counts), np.int32)
    shared = _shared(counts, context_lens, block_table, splits, chunk // block_size, block_size, own) if share else []
    sizes = small, large = tuple(rows // group for rows in tile_rows(group))
    size = np.where(counts <= small, small, large)  # tokens of a row's tiles
    todo = -(-counts // size) * (chunks - own)
    of_kind = np.array([todo[counts <= small].sum(), todo[counts > small].sum()])
    for first, end, begin, stop in shared:
        tokens = int(query_starts[end] - query_starts[first])
        of_kind[int(tokens > small)] += (stop - begin) * -(-tokens // large)
    groups, columns = program_groups(programs, kv_heads), block_table.shape[1]
    best: tuple[float, list[Dealt], np.ndarray] | None = None
    last_rows = np.zeros(0, np.int64)
    for finer, tail in itertools.product(FINER, (False, True)):
        run_of_kind = np.maximum(1, -(-of_kind // (finer * groups))).tolist()
        run = np.where(counts <= small, *run_of_kind)
        if tail:
            run[last_rows] = np.maximum(1, run[last_rows] // TAIL_FINER)
        split = splits & ((own > 0) | (chunks > run))
        cut_ones = [_of_rows(query_starts, context_lens, own, split, run, size, chunk, columns)]
        if shared:
            cut_ones.append(_of_prefixes(query_starts, shared, run_of_kind, sizes, chunk, columns))
        every = np.concatenate(cut_ones).astype(np.int32)
        is_small = every[:, 1] <= small
        dealt = [deal(every[kind, :COLUMNS], every[kind, COLUMNS], groups) for kind in (is_small, ~is_small)]
        longest = sum(each.longest for each in dealt)
        if best is None or longest < best[0]:
            best = longest, dealt, split
        if balance([each.steps for each in dealt]) >= BALANCED or max(run_of_kind) == 1:
            break
        last_rows = np.unique(np.concatenate([each.tiles[-TAIL_ROUNDS * groups :, 2] // columns for each in dealt]))
    assert best is not None
    _, dealt, split = best
    parts = np.where(split, counts * chunks, 0)
    first_part = np.cumsum(parts) - parts
    row_of = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(row_of)) - query_starts[row_of]
    return Tiles(
        small=dealt[0].tiles,
        large=dealt[1].tiles,
        parts=np.where(split[row_of], first_part[row_of] + within * chunks[row_of], DIRECT).astype(np.int32),
        num_parts=int(parts.sum()),
        loads=(dealt[0].steps, dealt[1].steps),
    )


def program_groups(programs: int, kv_heads: int) -> int:
    """Programs side by side that take the KV heads of one tile."""
    return max(1, programs // kv_heads)


def most_tiles(tokens: int, rows: int, groups: int) -> int:
    """Room for tiles of one kind: enough for every step of so many tokens and rows that neither shares nor splits, and for all
    but odd ones of those that do."""
    return tokens + 3 * rows + (TAIL_FINER * FINER[-1] + 2) * groups


def deal(tiles: np.ndarray, steps: np.ndarray, groups: int) -> Dealt:
    """tiles [n, COLUMNS], steps [n] of work. Round by round, the longest tiles first, and in each round the longest one to the
    group of programs that has least so far. Group g takes the tiles g, g + groups, … of the result, whose last round may have
    gaps: tiles of no tokens."""
    cost = steps + BEGIN_STEPS + PARTIAL_STEPS * tiles[:, 5] * (tiles[:, 4] - tiles[:, 3])
    order = np.argsort(-cost, kind="stable")
    work, load = np.zeros(groups), np.zeros(groups, np.int64)
    made = np.zeros((-(-len(tiles) // groups) * groups, COLUMNS), np.int32)
    for at in range(0, len(tiles), groups):
        which = order[at : at + groups]
        mine = np.argsort(work, kind="stable")[: len(which)]
        made[at + mine] = tiles[which]
        work[mine] += cost[which]
        load[mine] += steps[which]
    return Dealt(made, load, float(work.max()))


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
    query_starts: np.ndarray,
    shared: list[tuple[int, int, int, int]],
    runs: list[int],
    sizes: tuple[int, int],
    chunk: int,
    columns: int,
) -> np.ndarray:
    """A piece of at most the larger of `sizes` tokens of all rows that share × a run of the chunks in common. `runs`: for those
    that fit into the smaller one, and for the others. Returns [n, COLUMNS + 1], the last of them the steps of work."""
    tiles = []
    small, size = sizes
    for first, end, begin, stop in shared:
        run = runs[int(query_starts[end] - query_starts[first]) > small]
        for token in range(int(query_starts[first]), int(query_starts[end]), size):
            tokens = min(size, int(query_starts[end]) - token)
            for at in range(begin // run * run, stop, run):
                since, until = max(at, begin), min(at + run, stop)
                tiles.append((token, tokens, first * columns, since, until, 1, -(-(until - since) * chunk // STEP_KEYS)))
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
    """What each row has for itself: a piece of at most `size` of its tokens × all of its chunks, or × a run of them. Runs begin
    at multiples of their length. Returns [n, COLUMNS + 1], the last of them the steps of work."""
    row, piece = _each(-(-np.diff(query_starts) // size))
    first = query_starts[row] + piece * size[row]
    tokens = np.minimum(size[row], query_starts[row + 1] - first)
    context = context_lens[row] - (query_starts[row + 1] - first - tokens)
    end = (context - 1) // chunk + 1
    run_before = own // run
    tile, at = _each(np.where(split[row], -(-end // run[row]) - run_before[row], 1))
    row = row[tile]
    begin = np.where(split[row], np.maximum((run_before[row] + at) * run[row], own[row]), own[row])
    stop = np.where(split[row], np.minimum((run_before[row] + at + 1) * run[row], end[tile]), end[tile])
    steps = -(-(np.minimum(stop * chunk, context[tile]) - begin * chunk) // STEP_KEYS)
    return np.stack([first[tile], tokens[tile], row * columns, begin, stop, split[row], steps], axis=1)


def _each(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For i of N things, each counts[i] times: i, and which time it is."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
