"""Numbers of the engine since it started: counted where things happen, read by `Engine.status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.kv.block import BlockCopies
from engine.kv.copies import Copied
from engine.scheduling.plan import Plan
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Rate:
    """Items per second: two sums that decay with a half-life of `span` items, so that a short measurement, which may be mostly
    noise, weighs little."""

    span: int
    count: float = 0.0
    seconds: float = 0.0

    def add(self, count: int, seconds: float) -> float:
        """Count items and the seconds that they took. Returns the rate; 0 until `span / 8` items were counted."""
        kept = 0.5 ** (count / self.span)
        self.count = kept * self.count + count
        self.seconds = kept * self.seconds + seconds
        return self.count / self.seconds if self.seconds > 0 and self.count >= self.span / 8 else 0.0


@dataclass(slots=True)
class Counters:
    steps: int = 0
    generated_tokens: int = 0
    draft_rows: int = 0
    """rows of steps that may draft: each made accepted_tokens / draft_rows tokens more than one"""
    drafted_tokens: int = 0
    """computed ahead on the guess that they would be drawn"""
    accepted_tokens: int = 0
    """of them, those that were: each a step saved for its child"""
    scored_tokens: int = 0
    """given tokens whose log-probs were computed"""
    prefill_tokens: int = 0
    """computed without being drawn: prompts, and prefill after a soft reset"""
    recomputed_tokens: int = 0
    """computed a second time"""
    prefix_hit_tokens: int = 0
    """taken over from the prefix index"""
    kept_tokens: int = 0
    """taken over from the turn that a group continues, which was kept"""
    forks: int = 0
    fork_saved_tokens: int = 0
    """prompt tokens that children did not have to prefill"""
    fork_shared_blocks: int = 0
    """full prompt blocks that children took by reference"""
    offloads: int = 0
    """sequences offloaded to host memory"""
    offloaded_blocks: int = 0
    """blocks copied device → host, mirrored ones included"""
    restored_blocks: int = 0
    """blocks copied host → device, for sequences that came back and for prefixes that were found there"""
    soft_resets: int = 0
    unused_draws: int = 0
    """made for children that had ended by then: the price of steps that overlap"""
    failed_moves: int = 0
    failed_steps: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    step_seconds: float = 0.0
    decode_seconds: float = 0.0
    """of steps that did nothing but draw: behind each of their tokens"""
    decode_tokens: int = 0
    move_seconds: float = 0.0
    """copies between the pools and copies of a fork; on CUDA by its own clock, those that nothing waits for included, and
    without a fork's, which are compute there"""
    plan_seconds: float = 0.0
    build_seconds: float = 0.0
    """the batch and what the attention prepares for it"""
    commit_seconds: float = 0.0
    model_seconds: float = 0.0
    sample_seconds: float = 0.0
    copy_blocks_per_second: float = 0.0
    """measured, 0 = not yet"""
    prefill_tokens_per_second: float = 0.0
    """measured, 0 = not yet"""
    ended: Counter[str] = field(default_factory=Counter)
    """children by finish reason"""
    _copies: Rate = field(default_factory=lambda: Rate(512), repr=False)
    _prefills: Rate = field(default_factory=lambda: Rate(8192), repr=False)

    def computed(self, seq: Sequence, start: int, count: int) -> None:
        """Count a launched row of `count` tokens from `start` on that is not a decode row."""
        if not seq.state.forked or seq.uncached > 1:
            self.prefill_tokens += count
        self.recomputed_tokens += max(0, min(seq.computed, start + count) - start)

    def moved(self, moves: BlockCopies, copied: Copied, block_bytes: int) -> None:
        """Count a step's copies of blocks, and those that have ended."""
        to_host = len(moves.offloads) + len(moves.mirrors)
        self.offloaded_blocks += to_host
        to_device = len(moves.restores) + len(moves.prefetches)
        self.restored_blocks += to_device
        self.bytes_to_host += to_host * block_bytes
        self.bytes_to_device += to_device * block_bytes
        self.move_seconds += copied.seconds
        if copied.blocks:
            self.copy_blocks_per_second = self._copies.add(copied.blocks, copied.seconds)

    def stepped(self, plan: Plan, seconds: float, generated: int) -> None:
        """Count a committed step. seconds: since it was planned, or since the one before was committed, if that was later.
        generated: tokens that came of it."""
        self.steps += 1
        self.step_seconds += seconds
        if plan.draws_only:
            self.decode_seconds += seconds
            self.decode_tokens += generated

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Count the forward of a step, nearly all of whose tokens were prefill."""
        self.prefill_tokens_per_second = self._prefills.add(tokens, seconds)


def stale_token_frac(sequences: Iterable[Sequence], block_size: int, version: int) -> float:
    """Return the share of the sequences' cached tokens in blocks that were begun by other weights than `version`."""
    cached = stale = 0
    for seq in sequences:
        cached += seq.cached
        for i, block in enumerate(seq.blocks):
            if block.version != version:
                stale += min(block_size, seq.cached - i * block_size)
    return stale / cached if cached else 0.0
