"""Cuts the attention of a step into tiles for a GPU. Plain numpy, no torch.

A context is cut into chunks of a fixed number of tokens, counted from its first one, and chunks are grouped into spans of
SPAN_CHUNKS. Softmax is computed chunk by chunk; the chunks of a span are merged in order by log-sum-exp, and then the spans in
order. So a query's numbers do not depend on how the work is cut:

    row 0   ║ chunk 0 ║ chunk 1 ║ chunk 2 │          a tile is (some queries) × (some chunks of one row's block table)
    row 1   ║ chunk 0 ║ chunk 1 ║ chunk │
            └── shared blocks ──┘

    [rows 0, 1] × [chunks 0, 1]     one tile for the shared prefix: its KV is read once for all queries
    [row 0] × [chunk 2]             and each row's own chunks
    [row 1] × [chunk 2]

A tile with all chunks of its queries merges them and writes the output. Other tiles write one partial result per complete span
and per other chunk, and a second kernel merges these: the split of flash-decoding (Dao et al. 2023) and the shared prefix of
Hydragen (Juravsky et al. 2024).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CHUNK_TOKENS = 256
"""tokens of a chunk; one block, if blocks are larger. A partial result is written and read in fp32 for each query head: with
four query heads per KV head, three percent of the bytes of the chunk's K and V; sixteen rows that share a chunk write as many
each"""
SPLIT_TOKENS = 16
"""rows with more tokens than this in a step (prefill) have enough tiles; they are neither split nor shared"""
SPAN_CHUNKS = 8
"""chunks of a span: their results are merged first, so that a tile with all of them writes a single one"""
COLUMNS = 6
"""of a tile: first token, tokens, offset of the row's blocks in the table, first chunk, end chunk, split"""
STEP_KEYS = 64
"""keys per unit of a tile's work"""
BEGIN_STEPS, PARTIAL_STEPS = 1.0, 0.25
"""estimated cost of starting a tile, and of writing and reading a partial result of a chunk"""
FINER = (4, 8, 16)
"""numbers of tiles per program to try, in order, until the programs have nearly equal work"""
TAIL_ROUNDS, TAIL_FINER = 2, 4
"""the last tiles fill gaps: their rows are cut this much finer if that helps"""
BALANCED = 0.95
"""mean / largest work of the programs at which the search stops"""
DIRECT, PADDING = -1, -2
"""in `Tiles.parts`: the token's only tile writes its output; padding, without output"""


class Tiles(NamedTuple):
    small: np.ndarray
    """[n, COLUMNS] int32, in the order of `deal`"""
    large: np.ndarray
    """[n, COLUMNS] int32"""
    parts: np.ndarray
    """[T] int32: first partial result of each token, of one per chunk of its context; or DIRECT"""
    num_parts: int
    loads: tuple[np.ndarray, np.ndarray]
    """[programs // kv_heads] each, of small and of large tiles: units of STEP_KEYS keys per program"""


class TileQueue(NamedTuple):
    """Tiles of one kind, in the order in which programs process them."""

    tiles: np.ndarray
    """[n, COLUMNS] int32"""
    steps: np.ndarray
    """[groups]: work of each"""
    longest: float
    """largest work of a program, including the fixed costs of tiles"""


def balance(loads: Sequence[np.ndarray]) -> float:
    """Return mean / largest of the programs' loads: 1 = no program waits for another. Each kind of tile is a launch of its
    own."""
    longest = sum(load.max() for load in loads)
    return float(sum(load.mean() for load in loads) / longest) if longest else 1.0


def chunk_tokens(block_size: int) -> int:
    return max(1, CHUNK_TOKENS // block_size) * block_size


def cut(
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_table: np.ndarray,
    share: bool,
    *,
    block_size: int,
    sizes: tuple[int, int],
    groups: tuple[int, int],
    max_parts: int,
) -> Tiles:
    """Return the tiles of a step of R rows. Rows and prefixes are cut into runs of chunks, which get shorter until the programs
    have nearly equal work.

    Args:
        query_starts, context_lens, block_table: [R + 1], [R], [R, M], as in `Batch`.
        share: some rows share leading blocks. Which ones is found here, so prefixes nest.
        sizes: most tokens of a small and of a large tile.
        groups: programs of either kind that run at a time, per KV head; those of a group process the heads of one tile.
        max_parts: partial results for which there is memory.
    """
    chunk = chunk_tokens(block_size)
    counts = np.diff(query_starts)
    chunks = -(-context_lens // chunk)
    splits = counts <= SPLIT_TOKENS
    splits &= np.cumsum(np.where(splits, counts * chunks, 0)) <= max_parts
    own = np.zeros(len(counts), np.int32)
    shared = _shared(counts, context_lens, block_table, splits, chunk // block_size, block_size, own) if share else []
    size = np.where(counts <= sizes[0], *sizes)
    pieces = -(-counts // size)
    columns = block_table.shape[1]
    step = TilingInput(query_starts, context_lens, chunks, own, splits, size, pieces, shared, sizes, chunk, columns)
    split, dealt = _balanced(step, groups)
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


class TilingInput(NamedTuple):
    """The R rows to cut."""

    query_starts: np.ndarray
    """[R + 1]"""
    context_lens: np.ndarray
    """[R]"""
    chunks: np.ndarray
    """[R]: chunks of the context"""
    own: np.ndarray
    """[R]: first chunk that is not in a shared prefix"""
    splits: np.ndarray
    """[R]: whether there is memory for partial results"""
    size: np.ndarray
    """[R]: most tokens of a tile"""
    pieces: np.ndarray
    """[R]: tiles side by side that a row's tokens need"""
    shared: list[tuple[int, int, int, int]]
    """result of `_shared`"""
    sizes: tuple[int, int]
    """most tokens of a small and of a large tile"""
    chunk: int
    """tokens of a chunk"""
    columns: int
    """columns of the block table"""


def _balanced(step: TilingInput, groups: tuple[int, int]) -> tuple[np.ndarray, list[TileQueue]]:
    """Return [R] whether a row's tiles write partial results, and the small and the large tiles of the fastest variant."""
    small, large = step.sizes
    counts = np.diff(step.query_starts)
    todo = step.pieces * (step.chunks - step.own)
    of_kind = [int(todo[counts <= small].sum()), int(todo[counts > small].sum())]
    for first, end, begin, stop in step.shared:
        tokens = int(step.query_starts[end] - step.query_starts[first])
        of_kind[int(tokens > small)] += (stop - begin) * -(-tokens // large)
    best: tuple[float, np.ndarray, list[TileQueue]] | None = None
    last_rows = np.zeros(0, np.int64)
    for finer, tail in itertools.product(FINER, (False, True)):
        runs = [_run(chunks, finer * each) for chunks, each in zip(of_kind, groups, strict=True)]
        run = np.where(counts <= small, *runs)
        if tail:
            run[last_rows] = np.maximum(1, run[last_rows] // TAIL_FINER)
        split = step.splits & ((step.own > 0) | (step.chunks > run))
        tiles = [_of_rows(step, split, run)]
        if step.shared:
            tiles.append(_of_prefixes(step, runs))
        every = np.concatenate(tiles).astype(np.int32)
        is_small = every[:, 1] <= small
        kinds = every[is_small], every[~is_small]
        dealt = [deal(kind[:, :COLUMNS], kind[:, COLUMNS], each) for kind, each in zip(kinds, groups, strict=True)]
        longest = sum(each.longest for each in dealt)
        if best is None or longest < best[0]:
            best = longest, split, dealt
        if balance([each.steps for each in dealt]) >= BALANCED or max(runs) == 1:
            break
        last = [each.tiles[-TAIL_ROUNDS * number :, 2] for each, number in zip(dealt, groups, strict=True)]
        last_rows = np.unique(np.concatenate(last) // step.columns)
    assert best is not None
    return best[1:]


def _run(chunks: int, tiles: int) -> int:
    """Return the chunks per tile if `chunks` are cut into `tiles`: a part of a span, or whole spans."""
    run = -(-chunks // max(1, tiles))
    return max(1, run // SPAN_CHUNKS * SPAN_CHUNKS if run >= SPAN_CHUNKS else 1 << run.bit_length() - 1 if run else 1)


def most_tiles(tokens: int, rows: int, groups: int) -> int:
    """Return the number of tiles of one kind to allocate: enough for every step of this size that neither shares nor splits,
    and for all but unusual ones of those that do."""
    return tokens + 3 * rows + (TAIL_FINER * FINER[-1] + 2) * groups


def deal(tiles: np.ndarray, steps: np.ndarray, groups: int) -> TileQueue:
    """Assign tiles [n, COLUMNS] with `steps` [n] of work to groups of programs: round by round, longest tiles first, and in
    each round the longest tile to the group with the least work so far. Group g processes tiles g, g + groups, … of the result;
    its last round may contain empty tiles."""
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
    return TileQueue(made, load, float(work.max()))


def _shared(
    counts: np.ndarray,
    context_lens: np.ndarray,
    table: np.ndarray,
    splits: np.ndarray,
    chunk_blocks: int,
    block_size: int,
    own: np.ndarray,
) -> list[tuple[int, int, int, int]]:
    """Return (first row, end row, first chunk, end chunk) of prefixes that rows share. Writes the first chunk of each row's own
    part into `own`."""
    written = (context_lens - counts) // block_size  # blocks that are full before this step
    same = table[1:] == table[:-1]
    lead = np.where(same.all(1), table.shape[1], same.argmin(1))  # leading blocks that a row shares with the next one
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


def _of_prefixes(step: TilingInput, runs: list[int]) -> np.ndarray:
    """Tile the shared prefixes: a piece of the tokens of all rows that share × a run of the shared chunks. Returns [n, COLUMNS
    + 1]; the last column is the work. runs: of small and of large tiles."""
    tiles = []
    small, size = step.sizes
    for first, end, begin, stop in step.shared:
        start, past = int(step.query_starts[first]), int(step.query_starts[end])
        run = runs[past - start > small]
        for token in range(start, past, size):
            tokens = min(size, past - token)
            for at in range(begin // run * run, stop, run):
                since, until = max(at, begin), min(at + run, stop)
                steps = -(-(until - since) * step.chunk // STEP_KEYS)
                tiles.append((token, tokens, first * step.columns, since, until, 1, steps))
    return np.array(tiles)


def _of_rows(step: TilingInput, split: np.ndarray, run: np.ndarray) -> np.ndarray:
    """Tile each row's own part: a piece of its tokens × all of its chunks, or × a run of them. Runs begin at multiples of their
    length. Returns [n, COLUMNS + 1]; the last column is the work."""
    starts, own, size, chunk = step.query_starts, step.own, step.size, step.chunk
    row, piece = _each(step.pieces)
    first = starts[row] + piece * size[row]
    tokens = np.minimum(size[row], starts[row + 1] - first)
    context = step.context_lens[row] - (starts[row + 1] - first - tokens)
    end = (context - 1) // chunk + 1
    before = own // run
    tile, at = _each(np.where(split[row], -(-end // run[row]) - before[row], 1))
    row, run_at = row[tile], (before[row[tile]] + at) * run[row[tile]]
    begin = np.where(split[row], np.maximum(run_at, own[row]), own[row])
    stop = np.where(split[row], np.minimum(run_at + run[row], end[tile]), end[tile])
    steps = -(-(np.minimum(stop * chunk, context[tile]) - begin * chunk) // STEP_KEYS)
    return np.stack([first[tile], tokens[tile], row * step.columns, begin, stop, split[row], steps], axis=1)


def _each(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Repeat each i of N counts[i] times. Returns i, and the number of the repetition."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
