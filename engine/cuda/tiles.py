"""How the attention of a step is cut into tiles for a GPU. Plain numpy, no torch.

A context is cut into chunks of a fixed number of tokens, counted from its first one, and chunks into spans of SPAN_CHUNKS.
Softmax is computed chunk by chunk; the chunks of a span are merged in their order by log-sum-exp, and then the spans in theirs.
So a query's numbers do not depend on how the work was cut:

    row 0   ║ chunk 0 ║ chunk 1 ║ chunk 2 │          a tile is (some queries) × (some chunks of one row's block table)
    row 1   ║ chunk 0 ║ chunk 1 ║ chunk │
            └ blocks in common ─┘

    [rows 0, 1] × [chunks 0, 1]     one tile for the prefix that the rows share: its KV is read once for all their queries
    [row 0] × [chunk 2]             and each row's own chunks
    [row 1] × [chunk 2]

A tile that has all chunks of its queries merges them itself and writes the output. The others write one partial result for each
span that they have whole and for each other chunk, which a second kernel merges: flash-decoding's split (Dao et al. 2023), and
Hydragen's shared prefix (Juravsky et al. 2024).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CHUNK_TOKENS = 256
"""of a chunk, or one block where blocks are larger. A partial result is written and read in fp32 for each query head: with four
of them to a KV head, three percent of the bytes of the chunk's K and V; sixteen rows that share a chunk write as many each"""
SPLIT_TOKENS = 16
"""rows with more tokens than this in a step (prefill) have tiles enough; they are neither split nor shared"""
SPAN_CHUNKS = 8
"""chunks of a span: the results of its chunks are merged first, so that a tile that has all of them writes a single one"""
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


class TileQueue(NamedTuple):
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
    """The tiles of a step of R rows.

    query_starts [R + 1], context_lens [R], block_table [R, M]: as in `Batch`. share: some rows have leading blocks in common;
    which ones is found here, so prefixes nest. sizes: most tokens of a small and of a large tile. groups: programs of either
    kind that run at once, by KV heads: those of a group take the heads of one tile. max_parts: partial results that there is
    memory for.

    Rows and prefixes are cut into runs of chunks, which get shorter until the programs have nearly the same work."""
    chunk = chunk_tokens(block_size)
    counts = np.diff(query_starts)
    chunks = -(-context_lens // chunk)
    splits = counts <= SPLIT_TOKENS
    splits &= np.cumsum(np.where(splits, counts * chunks, 0)) <= max_parts
    own = np.zeros(len(counts), np.int32)
    shared = _shared(counts, context_lens, block_table, splits, chunk // block_size, block_size, own) if share else []
    size = np.where(counts <= sizes[0], *sizes)
    step = TilingInput(query_starts, context_lens, chunks, own, splits, size, shared, sizes, chunk, block_table.shape[1])
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
    """What is cut: R rows."""

    query_starts: np.ndarray
    """[R + 1]"""
    context_lens: np.ndarray
    """[R]"""
    chunks: np.ndarray
    """[R]: of the context"""
    own: np.ndarray
    """[R]: the first chunk that is not in a prefix in common"""
    splits: np.ndarray
    """[R]: there is memory for partial results"""
    size: np.ndarray
    """[R]: most tokens of a tile"""
    shared: list[tuple[int, int, int, int]]
    """of `_shared`"""
    sizes: tuple[int, int]
    """most tokens of a small and of a large tile"""
    chunk: int
    """tokens of a chunk"""
    columns: int
    """of the block table"""


def _balanced(step: TilingInput, groups: tuple[int, int]) -> tuple[np.ndarray, list[TileQueue]]:
    """[R] rows whose tiles write partial results, and the small and the large tiles: whatever ends first."""
    small, large = step.sizes
    counts = np.diff(step.query_starts)
    todo = -(-counts // step.size) * (step.chunks - step.own)
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
    """Chunks of a tile where so many are cut into so many tiles: a part of a span, or whole spans."""
    run = -(-chunks // max(1, tiles))
    return max(1, run // SPAN_CHUNKS * SPAN_CHUNKS if run >= SPAN_CHUNKS else 1 << run.bit_length() - 1 if run else 1)


def most_tiles(tokens: int, rows: int, groups: int) -> int:
    """Room for tiles of one kind: enough for every step of so many tokens and rows that neither shares nor splits, and for all
    but odd ones of those that do."""
    return tokens + 3 * rows + (TAIL_FINER * FINER[-1] + 2) * groups


def deal(tiles: np.ndarray, steps: np.ndarray, groups: int) -> TileQueue:
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


def _of_prefixes(step: TilingInput, runs: list[int]) -> np.ndarray:
    """A piece of the tokens of all rows that share × a run of the chunks in common. `runs`: of small and of large tiles.
    Returns [n, COLUMNS + 1], the last of them the steps of work."""
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
    """What each row has for itself: a piece of its tokens × all of its chunks, or × a run of them. Runs begin at multiples of
    their length. Returns [n, COLUMNS + 1], the last of them the steps of work."""
    starts, own, size, chunk = step.query_starts, step.own, step.size, step.chunk
    row, piece = _each(-(-np.diff(starts) // size))
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
    """For i of N things, each counts[i] times: i, and which time it is."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
