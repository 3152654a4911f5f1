"""How attention is cut for a GPU: whatever the step, each query meets each chunk that it sees exactly once, and in memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rollout.engine.cuda import tiles
from rollout.engine.cuda.tiles import DIRECT, SPAN_CHUNKS, Tiles, chunk_tokens, cut

BLOCK = 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 8)


def step(r: random.Random) -> dict[str, np.ndarray]:
    """Rows of several groups, children of a group side by side, prefixes nested; decode, prefill and chunks of it."""
    counts, contexts, blocks, fresh = [], [], [], iter(range(100_000))
    system = [next(fresh) for _ in range(r.choice([0, 2, 5]))]
    for _ in range(r.randint(1, 5)):
        prefix = system + [next(fresh) for _ in range(r.choice([0, 1, 2, 4, 9]))]
        for _ in range(r.choice([1, 1, 2, 6])):
            count = r.choice([1, 1, 1, 1, 2, 15, 30, 70])
            own = r.randint(0, 40)
            contexts.append(len(prefix) * BLOCK + own + count)
            counts.append(count)
            blocks.append(prefix + [next(fresh) for _ in range(-(-contexts[-1] // BLOCK) - len(prefix))])
    table = np.zeros((len(blocks), max(map(len, blocks))), np.int32)
    for row, ids in zip(table, blocks, strict=True):
        row[: len(ids)] = ids
    starts = np.cumsum([0, *counts]).astype(np.int32)
    return {"query_starts": starts, "context_lens": np.array(contexts, np.int32), "block_table": table}


def sizes_of(group: int) -> tuple[int, int]:
    return max(16 // group, 1), max(64 // group, 1)


def cut_it(r: random.Random, arrays: dict[str, np.ndarray], group: int, share: bool, max_parts: int = 10_000) -> Tiles:
    return cut(
        **arrays,
        share=share,
        block_size=BLOCK,
        sizes=sizes_of(group),
        groups=(r.choice([1, 4, 32, 500]), r.choice([1, 16])),
        max_parts=max_parts,
    )


def every(made: Tiles) -> np.ndarray:
    """Without the gaps."""
    both = np.concatenate([made.small, made.large])
    return both[both[:, 1] > 0]


def met(arrays: dict[str, np.ndarray], made: Tiles) -> list[dict[int, list[tuple[int, ...]]]]:
    """For each token: chunk → the blocks of it, as each of the tiles that meet it finds them."""
    table, chunk = arrays["block_table"].ravel(), chunk_tokens(BLOCK) // BLOCK
    found: list[dict[int, list[tuple[int, ...]]]] = [{} for _ in range(arrays["query_starts"][-1])]
    for first, tokens, at, begin, end, split in every(made).tolist():
        for token in range(first, first + tokens):
            assert split == (made.parts[token] != DIRECT)
            for c in range(begin, end):
                found[token].setdefault(c, []).append(tuple(table[at + c * chunk : at + (c + 1) * chunk]))
    return found


def test_every_query_meets_every_chunk_once() -> None:
    shared = 0
    for seed in range(60):
        r = random.Random(seed)
        arrays, group = step(r), r.choice([1, 3, 4, 8, 71])
        chunk = chunk_tokens(BLOCK)
        made = cut_it(r, arrays, group, share=r.random() < 0.8)
        found = met(arrays, made)
        small, large = sizes_of(group)
        assert (made.small[:, 1] <= small).all() and (made.large[:, 1] <= large).all()
        places: list[int] = []
        for row, (start, stop, length) in enumerate(
            zip(arrays["query_starts"], arrays["query_starts"][1:], arrays["context_lens"], strict=False)
        ):
            for token in range(start, stop):
                position = length - stop + token
                chunks = position // chunk + 1
                assert set(range(chunks)) <= found[token].keys(), "a chunk is missed"
                for c in range(chunks):
                    own = arrays["block_table"][row][c * chunk // BLOCK : (c + 1) * chunk // BLOCK]
                    wanted = [min(chunk, position + 1 - c * chunk + BLOCK - 1) // BLOCK]  # blocks with a visible token
                    assert [blocks[: wanted[0]] for blocks in found[token][c]] == [tuple(own[: wanted[0]])], (
                        "other blocks, or twice"
                    )
                if made.parts[token] != DIRECT:
                    places += [made.parts[token] + c for c in found[token]]
        assert len(places) == len(set(places)) and all(0 <= place < made.num_parts for place in places)
        shared += any(tokens > small for tokens in made.large[:, 1]) and made.num_parts > 0
    assert shared > 15, "nothing was ever shared"


def test_a_prefix_is_read_once_for_its_group() -> None:
    """64 chunks in common of 16 rows: tiles read them once, not sixteen times; with sharing off they are read by each."""
    table = np.tile(np.arange(130, dtype=np.int32), (16, 1))
    table[:, 128:] = 1000 + np.arange(32).reshape(16, 2)
    arrays = {"query_starts": np.arange(17, dtype=np.int32), "context_lens": np.full(16, 515, np.int32), "block_table": table}
    read = {}
    for share in (True, False):
        made = cut_it(random.Random(0), arrays, 4, share)
        both = every(made)
        read[share] = int((both[:, 4] - both[:, 3]).sum())
    assert read == {True: 64 + 16, False: 16 * 65}


def test_runs_of_long_rows_are_whole_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tile writes one partial result a span."""
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 256)
    contexts = np.full(4, 130_000, np.int32)
    table = np.arange(4 * 4063, dtype=np.int32).reshape(4, -1)
    made = cut(
        np.arange(5, dtype=np.int32), contexts, table, False, block_size=32, sizes=(4, 16), groups=(33, 16), max_parts=1 << 15
    )
    begins, ends = every(made)[:, 3], every(made)[:, 4]
    whole = (begins % SPAN_CHUNKS == 0) & ((ends % SPAN_CHUNKS == 0) | (ends == -(-130_000 // 256)))
    assert whole.mean() > 0.9 and len(whole) > 100


def test_rows_beyond_the_memory_for_parts_are_not_split() -> None:
    for seed in range(100):
        r = random.Random(seed)
        arrays, most = step(r), r.choice([0, 3, 40])
        made = cut_it(r, arrays, 2, True, max_parts=most)
        assert made.num_parts <= most
        assert all(len(blocks) == 1 for chunks in met(arrays, made) for blocks in chunks.values())


def test_a_long_row_is_split_where_programs_idle() -> None:
    arrays = {
        "query_starts": np.array([0, 1], np.int32),
        "context_lens": np.array([320], np.int32),
        "block_table": np.arange(80, dtype=np.int32)[None],
    }
    made = cut(**arrays, share=False, block_size=BLOCK, sizes=(4, 16), groups=(32, 32), max_parts=1000)
    assert len(every(made)) == 40 and made.num_parts == 40
    made = cut(**arrays, share=False, block_size=BLOCK, sizes=(4, 16), groups=(1, 1), max_parts=0)
    assert len(every(made)) == 1 and made.parts.tolist() == [DIRECT]
    made = cut(**arrays, share=False, block_size=BLOCK, sizes=(4, 16), groups=(1, 1), max_parts=1000)
    assert len(every(made)) == 5, "one program alone gets no more than a few tiles, of a span each"


def test_a_load_is_what_the_tiles_of_a_group_add_up_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as the kernel walks the list: program p has a KV head of tile p // heads, and of each `groups` further."""
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 256)
    contexts, groups = np.minimum(np.exp(np.random.default_rng(0).normal(8.3, 1, 48)), 16384).astype(np.int32), 33
    rows = len(contexts)
    columns = -(-int(contexts.max()) // 32)
    table = np.arange(rows * columns, dtype=np.int32).reshape(rows, -1)
    made = cut(
        np.arange(rows + 1, dtype=np.int32), contexts, table, False, block_size=32, sizes=(4, 16), groups=(groups, groups),
        max_parts=1 << 15,
    )  # fmt: skip
    for group in range(groups):
        steps = 0
        for _, tokens, at, begin, end, _ in made.small[group::groups].tolist():
            keys = min(end * 256, int(contexts[at // columns])) - begin * 256 if tokens else 0
            steps += -(-keys // tiles.STEP_KEYS)
        assert steps == made.loads[0][group]
