"""A preempted group: how much of it travels. The prefix goes to host memory once, with the last child that leaves, and comes
back once, with the first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from rollout.engine.engine import Engine
from rollout.engine.kv.block import BlockCopies, Copied
from rollout.engine.values import Group, Sampling
from tests.support.tiny import tiny_engine

pytestmark = pytest.mark.usefixtures("copies_pay")
PREFIX, N, BLOCK = 1024, 32, 32
PREFIX_BLOCKS = PREFIX // BLOCK


class Travels:
    """Counts the copies of each slot, in an engine's place of copying."""

    def __init__(self, engine: Engine) -> None:
        self.to_host: Counter[int] = Counter()
        self.to_device: Counter[int] = Counter()
        move = engine.worker.kv.move

        def counted(moves: BlockCopies, *spans: Any) -> Copied:
            self.to_host.update(host for _, host in [*moves.offloads, *moves.mirrors])
            self.to_device.update(host for host, _ in moves.restores)
            return move(moves, *spans)

        engine.worker.kv.move = counted  # type: ignore[method-assign]


def parked_group() -> tuple[Engine, list[Any], Travels]:
    """An engine whose newest group (n = 32 over 1,024 tokens) has just left the device, for an older one that grows."""
    engine = tiny_engine(
        "llama-long",
        block_size=BLOCK,
        kv_tokens=PREFIX + 3 * N * BLOCK,
        max_batch_tokens=512,
        cpu_offload_gib=0.1,
    )
    travels = Travels(engine)
    rng = np.random.default_rng(0)
    for name, length, tokens in (("old", 40, 110), ("new", PREFIX, 64)):
        prompt = rng.integers(3, 199, length).astype(np.int32)
        engine.submit(
            Group(name, prompt, Sampling(n=N, max_tokens=tokens, ignore_eos=True, seed=1, priority=int(name == "old")))
        )
    state = engine.scheduler.state.groups["new"]
    while not state.forked or any(seq.running for seq in state.sequences.values()):
        assert engine.has_work and not engine.step() and engine.counters.steps < 200
    return engine, list(state.sequences.values()), travels


def test_the_prefix_of_a_parked_group_travels_once_each_way() -> None:
    engine, children, travels = parked_group()
    prefix = [block.host for block in children[0].blocks[:PREFIX_BLOCKS]]
    assert len(children) == N and None not in prefix
    assert [travels.to_host[host] for host in prefix] == [1] * PREFIX_BLOCKS
    moved, size = engine.counters.offloaded_blocks, engine.worker.kv.block_bytes
    assert engine.counters.offloads >= N and engine.counters.bytes_to_host == moved * size
    with_each = moved + (N - 1) * PREFIX_BLOCKS
    assert moved < with_each / 8
    print(
        f"\nparked group, n = {N} over {PREFIX} tokens: prefix_blocks {PREFIX_BLOCKS} to host memory, {moved * size:,} bytes "
        f"in all; taken along by each child: prefix_blocks {N * PREFIX_BLOCKS}, {with_each * size:,} bytes"
    )
    while engine.has_work:
        engine.step()
    assert [travels.to_device[host] for host in prefix] == [1] * PREFIX_BLOCKS
    assert engine.counters.recompute_preemptions == engine.counters.recomputed_tokens == 0


def test_a_second_copy_of_the_prefix_would_be_seen() -> None:
    engine, children, travels = parked_group()
    block = children[0].blocks[0]
    moves = BlockCopies()
    moves.offloads.append((0, block.host))
    engine.worker.kv.move(moves)
    assert travels.to_host[block.host] == 2
