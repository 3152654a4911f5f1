"""Counters for the status report, and measured rates of copies and prefill, which the policies use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout.engine.kv.block import BlockCopies, Copied
from rollout.engine.scheduling.plan import Plan
from rollout.engine.scheduling.sequence import GroupState, Sequence


@dataclass(slots=True)
class Rate:
    """Measures items per second: two sums that decay with a half-life of `span` items, so that a short measurement, which may
    be mostly noise, weighs little."""

    span: int
    count: float = 0.0
    seconds: float = 0.0

    def add(self, count: int, seconds: float) -> float:
        """Count items and the seconds that they took. Returns the rate; 0 until `span / 8` items were counted."""
        kept = 0.5 ** (count / self.span)
        self.count = kept * self.count + count
        self.seconds = kept * self.seconds + seconds
        return self.count / self.seconds if self.seconds > 0 and self.count >= self.span / 8 else 0.0


class Rates:
    """Measured rates that decide whether copying KV to host memory pays."""

    def __init__(self) -> None:
        self.copy_blocks_per_second = 0.0
        """between the device and host memory; 0 = not measured yet"""
        self.prefill_tokens_per_second = 0.0
        """0 = not measured yet"""
        self._copies, self._prefills = Rate(512), Rate(8192)

    def copied(self, blocks: int, seconds: float) -> None:
        """Add copies of blocks."""
        if blocks:
            self.copy_blocks_per_second = self._copies.add(blocks, seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Add the forward of a step, nearly all of whose tokens were prefill."""
        self.prefill_tokens_per_second = self._prefills.add(tokens, seconds)

    def copy_pays(self, blocks: int, tokens: int) -> bool:
        """Return whether copying so many blocks out and back takes no longer than prefilling the tokens again, or a rate is not
        known."""
        if not self.copy_blocks_per_second or not self.prefill_tokens_per_second:
            return True
        return 2 * blocks / self.copy_blocks_per_second <= tokens / self.prefill_tokens_per_second


@dataclass(slots=True)
class Counters:
    """Counts since the engine started, for `Engine.status`."""

    steps: int = 0
    generated_tokens: int = 0
    draft_rows: int = 0
    """rows of steps that may draft: each sampled 1 + accepted_tokens / draft_rows tokens"""
    drafted_tokens: int = 0
    """draft tokens that were computed"""
    accepted_tokens: int = 0
    """draft tokens that equal the draw: each saves its child a step"""
    scored_tokens: int = 0
    """given tokens whose log-probs were computed"""
    prefill_tokens: int = 0
    """tokens of prompts, and of prefill after a preemption by recompute"""
    recomputed_tokens: int = 0
    """tokens that were computed a second time"""
    prefix_hit_tokens: int = 0
    """tokens whose KV was found in the prefix index"""
    kept_tokens: int = 0
    """tokens whose KV was pinned, of the turn that a group continues"""
    forks: int = 0
    fork_saved_tokens: int = 0
    """prompt tokens that children did not have to prefill"""
    fork_shared_blocks: int = 0
    """full prompt blocks that children share"""
    offloads: int = 0
    """sequences offloaded to host memory"""
    offloaded_blocks: int = 0
    """blocks copied device → host, mirrored ones included"""
    restored_blocks: int = 0
    """blocks copied host → device, for sequences that start again and for prefixes that were found there"""
    offloaded_states: int = 0
    """recurrent states copied device → host"""
    restored_states: int = 0
    """recurrent states copied host → device"""
    copied_states: int = 0
    """recurrent states copied on the device; a fork copies none"""
    recompute_preemptions: int = 0
    """sequences whose KV was dropped, to be prefilled again"""
    first_tokens: int = 0
    """groups whose first tokens were sampled; not those of given tokens"""
    first_token_seconds: float = 0.0
    """sum over them, from a group's arrival"""
    unused_draws: int = 0
    """tokens sampled for children that had already finished: the cost of overlapping steps"""
    failed_moves: int = 0
    failed_steps: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    step_seconds: float = 0.0
    decode_seconds: float = 0.0
    """of steps that only decode"""
    decode_tokens: int = 0
    move_seconds: float = 0.0
    """copies between the pools and copies of a fork; on CUDA measured by the device, including copies that overlap with
    compute, without those of a fork"""
    plan_seconds: float = 0.0
    build_seconds: float = 0.0
    """of building batches and attention metadata"""
    commit_seconds: float = 0.0
    model_seconds: float = 0.0
    sample_seconds: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    """children by finish reason"""

    def computed(self, seq: Sequence, start: int, count: int) -> None:
        """Count a launched row of `count` tokens from `start` on that is not a decode row."""
        if not seq.state.forked or seq.uncached > 1:
            self.prefill_tokens += count
        self.recomputed_tokens += max(0, min(seq.computed, start + count) - start)

    def began(self, group: GroupState, now: float) -> None:
        """Count a group whose first tokens were sampled."""
        if not group.group.score:
            self.first_tokens += 1
            self.first_token_seconds += now - group.arrived

    def moved(self, moves: BlockCopies, copied: Copied, block_bytes: int) -> None:
        """Count the copies of a step, and copies that ended."""
        to_host = len(moves.offloads) + len(moves.mirrors)
        self.offloaded_blocks += to_host
        to_device = len(moves.restores) + len(moves.prefetches)
        self.restored_blocks += to_device
        self.bytes_to_host += to_host * block_bytes
        self.bytes_to_device += to_device * block_bytes
        self.move_seconds += copied.seconds

    def states_moved(self, moves: BlockCopies) -> None:
        """Count the copies of recurrent states of a step."""
        self.offloaded_states += len(moves.offloads)
        self.restored_states += len(moves.restores)
        self.copied_states += len(moves.copies)

    def stepped(self, plan: Plan, seconds: float, generated: int) -> None:
        """Count a committed step. seconds: since it was planned, or since the step before was committed, if that was later.
        generated: tokens that it added."""
        self.steps += 1
        self.step_seconds += seconds
        if plan.draws_only:
            self.decode_seconds += seconds
            self.decode_tokens += generated


def stale_token_ratio(sequences: Iterable[Sequence], block_size: int, version: int) -> float:
    """Return the ratio of cached tokens of the sequences in blocks whose first token other weights than `version` computed."""
    cached = stale = 0
    for seq in sequences:
        cached += seq.cached
        for i, block in enumerate(seq.blocks):
            if block.version != version:
                stale += min(block_size, seq.cached - i * block_size)
    return stale / cached if cached else 0.0
