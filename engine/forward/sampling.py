"""Sampling: logits to tokens and log-probs.

A counter-based generator gives one uniform number for each (seed, sample index, position), and the inverse of the cumulative
distribution turns it into a token. So a sampled token depends only on its own logits, not on the rest of the batch, and there
is no generator state to save. Counter-based generators: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011);
the mixing function is SplitMix64's finaliser (Steele et al., OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rollout.engine.forward.adjust import FAR, Adjust, Send, in_place
from rollout.engine.scheduling.plan import MaskedTokens, Plan, SampledTokens, TopLogprobs
from rollout.engine.values.sampling import NEUTRAL, TRUNCATIONS

DISTRIBUTIONS = 64
"""rows that torch processes together: each takes half a megabyte or more, for a whole vocabulary"""
NUCLEUS = 512
"""number of most likely tokens that nearly always hold top_p of the probability; a row is sorted only if they do not"""
OF_SEED, OF_INDEX, OF_POSITION = (np.array(x, np.uint64) for x in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7))
SHIFTS = [np.array(x, np.uint64) for x in (30, 27, 31, 11)]
FACTORS = [np.array(x, np.uint64) for x in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]
"""constants of `uniform`, as arrays: numpy would convert a number in each operation"""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Parameters of D draws. A row that forks into n children has n draws from one row of logits; a row with draft or given
    tokens has a draw from each of its rows of logits."""

    logits_row: np.ndarray
    """[D] int64: row of logits"""
    temperature: np.ndarray
    """[D] float32, 0 = greedy"""
    cuts: dict[str, np.ndarray]
    """by name of TRUNCATIONS: [D] values of the option"""
    uniform: np.ndarray
    """[D] float64 in [0, 1); or -1 - t: do not sample, return the log-prob of token t"""
    forbidden: list[tuple[int, list[int]]]
    """(draw, tokens forbidden by min_tokens)"""
    raw: bool
    """whether any draw needs log-probs at temperature 1 without truncation"""
    top: np.ndarray | None = None
    """[D] int64: number of most probable tokens to return; None: 0 for all"""
    adjust: tuple[Adjust, ...] = ()
    """draws from changed logits"""

    @staticmethod
    def build(plan: Plan) -> SamplingBatch:
        """Build the draws of a plan."""
        sampling, logits = plan.sampling, plan.logits
        repeats = (plan.samples // np.maximum(logits, 1)).repeat(logits)
        logits_row = np.arange(len(repeats)).repeat(repeats)
        drawn = uniform(sampling["seed"], sampling["index"], plan.positions.astype(np.uint64))
        scored = (plan.given >= 0) & ~sampling["redraw"]
        if np.count_nonzero(scored):
            drawn[scored] = -1.0 - plan.given[scored]
        return SamplingBatch(
            logits_row=logits_row,
            temperature=np.ascontiguousarray(sampling["temperature"]),
            cuts={name: np.ascontiguousarray(sampling[name]) for name in TRUNCATIONS},
            uniform=drawn,
            forbidden=[(draw, list(tokens)) for draw, tokens in plan.forbidden],
            raw=bool(np.count_nonzero(sampling["raw_logprobs"])),
            top=np.ascontiguousarray(sampling["top_logprobs"]) if np.count_nonzero(sampling["top_logprobs"]) else None,
            adjust=Adjust.build(plan.adjustments, logits_row),
        )

    def only(self, draws: np.ndarray) -> SamplingBatch:
        """Return some draws, [N] int64 ascending, as a batch, without their changes of logits."""
        columns = {name: getattr(self, name)[draws] for name in ("logits_row", "temperature", "uniform")}
        cuts = {name: values[draws] for name, values in self.cuts.items()}
        place = {draw: at for at, draw in enumerate(draws.tolist())}
        top = None if self.top is None or not self.top[draws].any() else self.top[draws]
        forbidden = [(place[draw], tokens) for draw, tokens in self.forbidden if draw in place]
        return replace(self, forbidden=forbidden, top=top, adjust=(), cuts=cuts, **columns)


class PendingTokens(NamedTuple):
    """Draws that were launched and not read."""

    tokens: torch.Tensor
    """[D] int32 on the device of the logits, input of the next step"""
    read: Callable[[], SampledTokens]
    """waits for the result"""


class DrawKernel(Protocol):
    """Samples on a device: `rollout.engine.cpu.kernels.Kernels`, or the module `rollout.engine.cuda.sampling`."""

    def fits(self, logits: torch.Tensor) -> bool:
        """Return whether it supports logits of this dtype and vocabulary."""

    def launch(
        self,
        logits: torch.Tensor,
        row: np.ndarray,
        temperature: np.ndarray,
        uniform: np.ndarray,
        raw: bool,
        cuts: MaskedTokens | None = None,
        top: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, Callable[[], SampledTokens]]:
        """Launch D ≥ 1 draws by inverse CDF from [S, V] logits.

        Args:
            row: [D] int64.
            temperature: [D] float32, 0 = greedy.
            uniform: [D] float64 in [0, 1), or -1 - t: return token t.
            raw: also return log-probs at temperature 1.
            top: [D] int64, number of most probable tokens to return.

        Returns:
            [D] int32 tokens on the device of the logits, and a function that waits for the result.
        """


def uniform(seed: np.ndarray, index: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return [D] float64 in [0, 1) for [D] uint64 seeds, sample indices and positions."""
    bits = _mix(seed + OF_SEED)
    bits = _mix(bits ^ (index * OF_INDEX))
    bits = _mix(bits ^ (position * OF_POSITION))
    unit: np.ndarray = (bits >> SHIFTS[3]).astype(np.float64) * 2.0**-53
    return unit


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> SHIFTS[0])) * FACTORS[0]
    x = (x ^ (x >> SHIFTS[1])) * FACTORS[1]
    mixed: np.ndarray = x ^ (x >> SHIFTS[2])
    return mixed


def launch_draws(
    logits: torch.Tensor, batch: SamplingBatch, kernel: DrawKernel | None = None, send: Send = in_place
) -> PendingTokens:
    """Sample as `_launch` does, and rank the given tokens of draws that want the most probable ones."""
    pending = _launch(logits, batch, kernel, send)
    ranked = np.zeros(0, np.int64) if batch.top is None else np.flatnonzero((batch.uniform < 0) & (batch.top > 0))
    if not len(ranked):
        return pending
    ranks = _ranks(logits, *send([batch.logits_row[ranked], (-1 - batch.uniform[ranked]).astype(np.int64)]))

    def read() -> SampledTokens:
        whole = np.zeros(len(batch.uniform), np.int32)
        whole[ranked] = ranks.cpu().numpy()
        return pending.read()._replace(ranks=whole)

    return PendingTokens(pending.tokens, read)


def _ranks(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return [N] int32: 1 + the number of tokens that are more probable than token `tokens[i]` in row `rows[i]`, both [N] int64
    on the device of the logits."""
    found = []
    for at in range(0, len(rows), DISTRIBUTIONS):
        row, token = rows[at : at + DISTRIBUTIONS], tokens[at : at + DISTRIBUTIONS]
        of_row = logits[row]
        found.append((of_row > of_row.gather(-1, token[:, None])).sum(-1, dtype=torch.int32) + 1)
    return torch.cat(found)


def _launch(
    logits: torch.Tensor, batch: SamplingBatch, kernel: DrawKernel | None = None, send: Send = in_place
) -> PendingTokens:
    """Sample D tokens from [S, V] logits of any float dtype: with `kernel` if it supports them, else with plain torch. On a GPU
    the host does not wait until it reads the result.

    Each draw is computed alone and depends only on its own sampling parameters. Log-probs are `log_softmax` of the scaled,
    truncated logits; on the CPU to the bit if `Kernels.torch_logprobs`.

    Args:
        send: moves arrays to the device of the logits."""
    if batch.adjust:
        return _launch_adjusted(logits, batch, kernel, send)
    if kernel is None or not len(batch.logits_row) or not kernel.fits(logits):
        drawn = _sample_torch(logits, batch)
        return PendingTokens(torch.from_numpy(drawn.tokens).to(logits.device), lambda: drawn)
    given = batch.logits_row, batch.temperature, batch.uniform, batch.raw, _cuts(batch), batch.top
    return PendingTokens(*kernel.launch(logits, *given))


def _launch_adjusted(logits: torch.Tensor, batch: SamplingBatch, kernel: DrawKernel | None, send: Send) -> PendingTokens:
    """Sample from changed rows separately. Log-probs at temperature 1 without truncation remain those of the model's logits."""
    draws = len(batch.logits_row)
    others = np.setdiff1d(np.arange(draws), np.concatenate([adjust.draws for adjust in batch.adjust]))
    parts = [(adjust.draws, _launch_changed(logits, batch, adjust, kernel, send)) for adjust in batch.adjust]
    if len(others):
        parts.append((others, _launch(logits, batch.only(others), kernel, send)))
    tokens = torch.empty(draws, dtype=torch.int32, device=logits.device)
    for places, (_, part) in zip(send([at for at, _ in parts]), parts, strict=True):
        tokens[places] = part.tokens
    return PendingTokens(tokens, lambda: merged([(at, part.read()) for at, part in parts]))


def _launch_changed(
    logits: torch.Tensor, batch: SamplingBatch, adjust: Adjust, kernel: DrawKernel | None, send: Send
) -> PendingTokens:
    """Launch the draws from the changed rows of `adjust`."""
    mine = replace(batch.only(adjust.draws), logits_row=adjust.taken, raw=False)
    drawn, raws = _launch(adjust.apply(logits, send), mine, kernel, send), None
    if batch.raw:
        (rows,) = send([adjust.source[adjust.taken]])
        raws = logits[rows].float().log_softmax(-1).gather(-1, drawn.tokens.long()[:, None])[:, 0]

    def read() -> SampledTokens:
        raw = None if raws is None else raws.cpu().numpy()
        return _without_far(drawn.read())._replace(raw_logprobs=raw)

    return PendingTokens(drawn.tokens, read)


def _without_far(drawn: SampledTokens) -> SampledTokens:
    """Remove tokens that are not allowed from the most probable ones, and set their log-probs to -inf."""
    drawn = drawn._replace(logprobs=np.where(drawn.logprobs < FAR, -np.inf, drawn.logprobs).astype(np.float32))
    if drawn.top is None:
        return drawn
    far = drawn.top.logprobs < FAR
    ids, logprobs = np.where(far, -1, drawn.top.ids), np.where(far, -np.inf, drawn.top.logprobs)
    return drawn._replace(top=TopLogprobs(ids.astype(np.int32), logprobs.astype(np.float32)))


def merged(parts: list[tuple[np.ndarray, SampledTokens]]) -> SampledTokens:
    """Join parts of a step, each with its draw numbers, in the order of the draws."""
    back = np.argsort(np.concatenate([draws for draws, _ in parts]))
    *columns, tops, _, _ = zip(*(drawn for _, drawn in parts), strict=True)
    whole: list[Any] = [None if column[0] is None else np.concatenate(column)[back] for column in columns]
    whole.append(_merged_top([(len(draws), top) for (draws, _), top in zip(parts, tops, strict=True)], back))
    return SampledTokens(*whole)


def _merged_top(parts: list[tuple[int, TopLogprobs | None]], back: np.ndarray) -> TopLogprobs | None:
    most = max((top.ids.shape[1] for _, top in parts if top is not None), default=0)
    if not most:
        return None
    ids, logprobs = np.full((len(back), most), -1, np.int32), np.full((len(back), most), -np.inf, np.float32)
    at = 0
    for draws, top in parts:
        if top is not None:
            ids[at : at + draws, : top.ids.shape[1]], logprobs[at : at + draws, : top.ids.shape[1]] = top
        at += draws
    return TopLogprobs(ids[back], logprobs[back])


def sample(logits: torch.Tensor, batch: SamplingBatch, kernel: DrawKernel | None = None) -> SampledTokens:
    """Sample as `launch_draws` does, and wait for the result."""
    return launch_draws(logits, batch, kernel).read()


def _cuts(batch: SamplingBatch) -> MaskedTokens | None:
    """Return the truncation of the draws; None: no draw is truncated."""
    some = _truncated(batch)
    if batch.forbidden:
        some[[draw for draw, _ in batch.forbidden]] = True
    if not np.count_nonzero(some):
        return None
    return MaskedTokens(some, batch.cuts, batch.forbidden)


def _truncated(batch: SamplingBatch) -> np.ndarray:
    """Return [draws] bool: a truncation may exclude tokens."""
    asked = np.zeros(len(batch.temperature), bool)
    for name, values in batch.cuts.items():
        asked |= values != NEUTRAL[name]
    asked &= batch.temperature != 0
    return asked


def _sample_torch(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
    """Sample with plain torch. Draws from the same distribution (a fork) share its computation."""
    draws = len(batch.logits_row)
    if not draws:
        empty = np.zeros(0, np.float32)
        return SampledTokens(empty.astype(np.int32), empty, empty if batch.raw else None, empty.astype(bool))
    forbidden = dict(batch.forbidden)
    kind: list[Any] = [[draw in forbidden for draw in range(draws)]]
    kind += [batch.logits_row, batch.temperature, *batch.cuts.values()]
    kind += [] if batch.top is None else [batch.top]
    _, first, which = np.unique(np.array(kind, np.float64), axis=1, return_index=True, return_inverse=True)
    parts = []
    for begin in range(0, len(first), DISTRIBUTIONS):
        mine = np.flatnonzero((which >= begin) & (which < begin + DISTRIBUTIONS))
        like = first[begin : begin + DISTRIBUTIONS]
        parts.append((mine, _draw(logits, batch, like, forbidden, which[mine] - begin, batch.uniform[mine])))
    return merged(parts)


def _draw(
    logits: torch.Tensor,
    batch: SamplingBatch,
    like: np.ndarray,
    forbidden: dict[int, list[int]],
    which: np.ndarray,
    uniform: np.ndarray,
) -> SampledTokens:
    """Return [D] draws, each from the distribution of draw number `like[which]`. Softmax and cumulative sum run along the
    vocabulary, row by row."""
    device = logits.device
    logits = logits[torch.from_numpy(batch.logits_row[like]).to(device)].float()
    finite = torch.isfinite(logits).all(-1)
    greedy = batch.temperature[like] == 0
    scale = np.where(greedy, np.float32(1), batch.temperature[like])
    drawn_from = logits / torch.from_numpy(scale).to(device)[:, None] if (scale != 1).any() else logits.clone()
    for i, draw in enumerate(like.tolist()):
        if draw in forbidden:
            drawn_from[i, forbidden[draw]] = -torch.inf
    finite &= drawn_from.amax(-1) > -torch.inf
    cut = np.flatnonzero(_truncated(batch)[like])
    if len(cut):
        at = torch.from_numpy(cut).to(device)
        drawn_from[at] = _truncate(drawn_from[at], batch, like[cut])
    logprobs = drawn_from.log_softmax(-1)
    row = torch.from_numpy(which).to(device)
    tokens = _inverse_cdf(logprobs, row, torch.from_numpy(uniform).to(device))
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(device)[row], drawn_from.argmax(-1)[row], tokens)
    if (uniform < 0).any():
        given = torch.from_numpy(uniform).to(device)
        tokens = torch.where(given < 0, (-1 - given).long(), tokens)
    raw = logits.log_softmax(-1)[row, tokens].cpu().numpy() if batch.raw else None
    top = None
    if batch.top is not None:
        found = _most_probable(drawn_from, logprobs, batch.top[like], int(batch.top.max()))
        top = TopLogprobs(*(each[which] for each in found))
    return SampledTokens(tokens.int().cpu().numpy(), logprobs[row, tokens].cpu().numpy(), raw, finite[row].cpu().numpy(), top)


def _most_probable(scaled: torch.Tensor, logprobs: torch.Tensor, wanted: np.ndarray, most: int) -> TopLogprobs:
    """Return the `wanted` [C] largest of [C, V] scaled logits (-inf: excluded) in `most` columns; of equal ones, the lower id
    first. Compares integers made of the bits of the number and of the id, so that no two are equal."""
    vocabulary = scaled.shape[-1]
    bits = (scaled + 0.0).view(torch.int32).long()  # + 0.0: -0.0 is 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order << 32) + torch.arange(vocabulary - 1, -1, -1, device=scaled.device)
    ids = vocabulary - 1 - (keys.topk(min(most, vocabulary), -1).values & 0xFFFFFFFF)
    values = logprobs.gather(-1, ids).cpu().numpy()
    top = TopLogprobs(np.full((len(wanted), most), -1, np.int32), np.full((len(wanted), most), -np.inf, np.float32))
    kept = (np.arange(values.shape[1]) < wanted[:, None]) & (values > -np.inf)
    top.ids[:, : values.shape[1]][kept] = ids.cpu().numpy()[kept]
    top.logprobs[:, : values.shape[1]][kept] = values[kept]
    return top


def _inverse_cdf(logprobs: torch.Tensor, row: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return [D] tokens of the distributions `logprobs[row]`: the first token whose cumulative probability exceeds u times the
    total. In double precision, since the sum runs over a whole vocabulary."""
    probabilities = logprobs.exp()
    total = probabilities.cumsum(-1, dtype=torch.float64)
    order = row.argsort(stable=True)
    counts = row.bincount(minlength=len(total))
    column = torch.empty_like(row)  # index of a draw among those of its distribution
    column[order] = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row[order]]
    targets = total.new_zeros(len(total), int(counts.max()))
    targets[row, column] = u * total[row, -1]
    token = torch.searchsorted(total, targets, right=True)[row, column]
    last = total.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(token, last[row])


def _truncate(scaled: torch.Tensor, batch: SamplingBatch, rows: np.ndarray) -> torch.Tensor:
    """Return [C, V] scaled logits of the draws `rows`, truncated to top_k, then min_p, then top_p of the rest; excluded logits
    are -inf. Ties with the last included token are included. Compares weights, exp(logit - largest)."""
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    cuts = {name: values[rows] for name, values in batch.cuts.items()}
    least = torch.from_numpy(cuts["min_p"]).to(scaled.device)[:, None]

    def raise_to(name: str, asking: np.ndarray, edge: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        if asking.any():
            at = torch.from_numpy(np.flatnonzero(asking)).to(scaled.device)
            value = torch.from_numpy(cuts[name][asking]).to(scaled.device)[:, None]
            least[at] = torch.maximum(least[at], edge(weights[at].where(weights[at] >= least[at], 0), value))

    raise_to("top_k", (cuts["top_k"] > 0) & (cuts["top_k"] < scaled.shape[-1]), _kth_best)
    raise_to("top_p", cuts["top_p"] < 1, _nucleus_edge)
    return scaled.masked_fill(weights < least, -torch.inf)


def _kth_best(weights: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return weights.topk(int(k.max()), -1).values.gather(-1, k - 1)


def _nucleus_edge(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the weight of the least likely token of the smallest set with at least top_p of the probability."""
    vocabulary = weights.shape[-1]
    wanted = top_p.double() * weights.sum(-1, keepdim=True, dtype=torch.float64)
    edge, held = _edge_among(weights.topk(min(NUCLEUS, vocabulary), -1).values, wanted)
    wide = torch.nonzero(held < wanted[:, 0])[:, 0]
    if len(wide) and vocabulary > NUCLEUS:
        edge[wide], _ = _edge_among(weights[wide].sort(-1, descending=True).values, wanted[wide])
    return edge


def _edge_among(ordered: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return that weight if it is among `ordered`, the largest weights in order; and the sum of these."""
    held = ordered.cumsum(-1, dtype=torch.float64)
    kept = (held - ordered < wanted).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, kept - 1), held[:, -1]
