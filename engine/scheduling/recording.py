"""What a step has drawn goes into its sequences: tokens, forks, ends."""

from __future__ import annotations

from collections.abc import Callable

from engine.scheduling.drafts import Drafts
from engine.scheduling.groups import Groups
from engine.scheduling.plan import SampledTokens
from engine.scheduling.sequence import Row, Sequence
from engine.types import FinishReason, Sample

Take = Callable[[Sequence, int], FinishReason | None]
"""appends a draw of the step, by its number, to a sequence; returns why that ends the child, if it does"""


def record(children: Groups, drafts: Drafts, rows: list[Row], drawn: SampledTokens, version: int) -> list[Sample]:
    """Append what was drawn by the weights `version` to the sequences of a step. Returns the children that ended; those of
    groups that end with their first `finish_after` are decided over all rows. Rows whose child ended while the step was under
    way are passed over."""
    samples: list[Sample] = []
    racing: list[tuple[Sequence, FinishReason]] = []
    tokens, logprobs, finite = drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.finite.tolist()
    raws = [None] * len(tokens) if drawn.raw_logprobs is None else drawn.raw_logprobs.tolist()
    first, top = 0, drawn.top

    def take(seq: Sequence, at: int) -> FinishReason | None:
        return children.take_token(seq, tokens[at], logprobs[at], raws[at], finite[at], version, top, at)

    def end(seq: Sequence, reason: FinishReason) -> None:
        if reason in ("stop", "length") and seq.state.races:
            racing.append((seq, reason))
        else:
            samples.append(children.end(seq, reason, seq.not_finite() if reason == "error" else None))

    for seq, start, count, draws, expected in rows:
        if seq.ended:
            children.counters.unused_draws += draws
        elif expected:
            had = len(seq.output)
            reason = _take_run(children, seq, expected, tokens, range(first, first + draws), take)
            if seq.given is None:
                drafts.learn(seq, expected, seq.output[had:])
            if reason is not None:
                end(seq, reason)
        elif draws:
            forks = not seq.state.forked
            for at, child in enumerate(children.fork(seq) if forks else (seq,), first):
                reason = take(child, at)
                if reason is not None:
                    end(child, reason)
                elif child.pending and child.cached % children.block_size == 0:
                    children.tables.fill(child, start + count)  # the next step computes the token that is known only now
            if forks:
                samples += [each for index in seq.state.cancelled for each in children.abort(seq.state.group.id, index)]
        first += draws
    assert first == len(tokens)
    return samples + children.end_races(racing) if racing else samples


def _take_run(
    children: Groups, seq: Sequence, expected: tuple[int, ...], tokens: list[int], run: range, take: Take
) -> FinishReason | None:
    """Append the draws `run` of a row that has computed the `expected` tokens ahead, up to the end of the child or the first
    that is another one; what lies behind is thrown away. Returns why that ends the child, if it does."""
    had, reason = len(seq.output), None
    for at, number in enumerate(run):
        reason = take(seq, number)
        if reason is not None or at == len(expected) or tokens[number] != expected[at]:
            break
    if reason != "error":
        children.tables.settle(seq, seq.cached + len(seq.output) - had - 1)
    return reason
