"""The plan of one step: the scheduler's decisions as a value of ints and arrays. `Batch.build` converts it to tensors, in this
process or in another one (`Plan.encode`). `Scheduler.commit` finds the sequences of a plan by its number."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.engine.kv.block import BlockCopies, Spans
from rollout.engine.values.sampling import DRAW_COLUMNS

SAMPLING = np.dtype(
    [
        ("seed", np.uint64),
        ("index", np.uint64),
        ("prompt", np.int64),
        ("min_tokens", np.int64),
        ("adjusted", np.bool_),
        ("redraw", np.bool_),
        *DRAW_COLUMNS.items(),
    ]
)
"""How a child samples: seed of its group, its index, tokens of its prompt; `min_tokens`: 0 where no token can end it;
`adjusted`: its logits are changed; `redraw`: its given tokens are drawn. Then the options that the sampler reads."""


class SharedPrefix(NamedTuple):
    """Rows `first_row` … `first_row + num_rows - 1` have their first `num_blocks` blocks in common, all of them full."""

    first_row: int
    num_rows: int
    num_blocks: int


class Penalties(NamedTuple):
    """Penalties of `Sampling`: 1, 0 and 0 change nothing."""

    repetition: float
    presence: float
    frequency: float


class LogitAdjustment(NamedTuple):
    """Changes of the logits of adjacent draws of one row, before temperature and truncation: the bias is added, tokens that are
    not allowed are masked, then repetition, frequency and presence are penalised."""

    first: int
    """the first of the draws"""
    draws: int
    bias_ids: np.ndarray
    """[B] int32, each once"""
    bias: np.ndarray
    """[B] float32"""
    allowed: np.ndarray
    """[A] int32, each once; empty: all tokens are"""
    penalties: Penalties | None
    seen: np.ndarray
    """[N] int32, each once: tokens of prompt and output if repetition is penalised, else none"""
    counted: np.ndarray
    """[K] int32, each once: tokens of the output if anything is penalised, else none"""
    counts: np.ndarray
    """[K] int32: how often"""


class Plan(NamedTuple):
    """One step: R rows compute T tokens and sample D. A row computes `counts[r]` tokens of one sequence from position
    `starts[r]` on; prefill, a chunk of it, decode and recomputation after a preemption are the same row with other numbers.

    The newest token of a row may still be *pending*: sampled by the step in flight and not read yet. Its id is the result of
    draw number `pending_draws[k]` of that step, so T tokens are `token_ids`, with these K put in.

    No array of a plan is shared with anything else."""

    step: int
    """number of the plan, counted by the scheduler"""
    starts: np.ndarray
    """[R] int32: position of the first token that a row computes"""
    counts: np.ndarray
    """[R] int32: tokens that a row computes, at least 1"""
    samples: np.ndarray
    """[R] int32: tokens to sample from a row: 0 within a prefill, n where a group forks, one for each of its `logits` if tokens
    were drafted or are given"""
    logits: np.ndarray
    """[R] int32: number of last tokens of a row after which logits are computed: 0 or 1, more if tokens were drafted or are
    given"""
    token_ids: np.ndarray
    """[T] int32: the tokens to compute, row after row; 0 where a token is pending"""
    pending_tokens: np.ndarray
    """[K] int64, ascending: which of the T tokens are pending"""
    pending_draws: np.ndarray
    """[K] int64: which draw of the step in flight each of them is"""
    block_table: np.ndarray
    """[R, M] int32: device slots of each row's blocks, then 0"""
    sampling: np.ndarray
    """[D] SAMPLING: how each token is sampled; the draws of a row are adjacent"""
    positions: np.ndarray
    """[D] int64: tokens of output before the sampled one"""
    given: np.ndarray
    """[D] int32: the given token, which is scored instead of sampling one, unless it is drawn again; -1 = none"""
    forbidden: tuple[tuple[int, tuple[int, ...]], ...]
    """(draw, token ids that min_tokens forbids it), draws ascending"""
    adjustments: tuple[LogitAdjustment, ...]
    """of the draws whose logits are changed, in their order"""
    shared: tuple[SharedPrefix, ...]
    """rows of one group are adjacent"""
    moves: BlockCopies
    """copies of KV blocks, made before the rows are computed"""
    state_reads: np.ndarray
    """[R] int32: slot of each row's recurrent state before its first token, -1 for zeros; [0] for a model without such state"""
    state_writes: np.ndarray
    """[R] int32: slot that gets the state after its last token, -1 for none; [0] for a model without such state"""
    state_advances: np.ndarray
    """[K, 4] int32: (row of the step before, its first tokens, slot read, slot written). That row had drafts and wrote no
    state: its state advances by the tokens that count, before anything else"""
    state_moves: BlockCopies
    """copies of recurrent states, made before the rows are computed"""
    window_table: np.ndarray
    """[R, M] int32: device slots of each row's blocks in layers with a sliding window, at the columns of `block_table`; 0 where
    the block has left the window; [0, 0] for a model without such layers"""
    window_moves: BlockCopies
    """copies of KV blocks of these layers, made before the rows are computed"""
    prompt_routes: tuple[tuple[int, int], ...] = ()
    """(row, number of its first tokens whose routes are read after the step)"""

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def spans(self) -> Spans:
        """Positions that the rows compute, and their block table."""
        return Spans(self.block_table, self.starts, self.starts + self.counts)

    @property
    def window_spans(self) -> Spans:
        """The same with the block table of the windows."""
        return self.spans._replace(block_table=self.window_table if self.num_rows else self.block_table)

    @property
    def draws_only(self) -> bool:
        """Whether a token is sampled after every computed token, so that the step has no prefill."""
        return self.num_tokens == int(self.logits.sum()) and not np.count_nonzero(self.given >= 0)

    @property
    def followed(self) -> bool:
        """Whether tokens were drafted or are given: then only the draws decide how many tokens of a row count."""
        return bool(np.count_nonzero(self.logits > 1) or np.count_nonzero(self.given >= 0))

    def encode(self) -> bytes:
        """Write the plan as msgpack, arrays as raw bytes in this machine's byte order. Raises TypeError for a field that holds
        another kind of object, or an array of another dtype than DTYPES."""
        return msgspec.msgpack.encode(self, enc_hook=array_fields)

    @staticmethod
    def decode(data: bytes) -> Plan:
        """Read a plan that `encode` wrote; its arrays are its own. Raises msgspec.ValidationError for anything else."""
        return msgspec.msgpack.decode(data, type=Plan, dec_hook=array_of)


DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in ("int32", "int64", "float32")},
    "sampling": SAMPLING,
}
"""dtypes of the arrays of a plan, by the name that `encode` writes"""


def array_fields(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return an array as (name in DTYPES, shape, bytes in C order), for msgspec's `enc_hook`. Raises TypeError."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a plan holds a {type(value).__name__}, and only ints and arrays can be sent")
    for name, dtype in DTYPES.items():
        if value.dtype == dtype:
            return name, value.shape, value.tobytes()
    raise TypeError(f"a plan holds an array of {value.dtype}, and only {', '.join(DTYPES)} can be sent")


def array_of(kind: Any, fields: Any) -> np.ndarray:
    """Undo `array_fields`, for msgspec's `dec_hook`. Raises ValueError for an unknown dtype, or for bytes that do not fit the
    shape."""
    assert kind is np.ndarray
    name, shape, data = msgspec.convert(fields, tuple[str, tuple[int, ...], bytes])
    if name not in DTYPES:
        raise ValueError(f"a plan has an array of {name!r}, and only {', '.join(DTYPES)} can be sent")
    flat: np.ndarray = np.frombuffer(data, DTYPES[name])
    return flat.reshape(shape).copy()


def copies_only(
    step: int,
    moves: BlockCopies,
    state_advances: np.ndarray,
    state_moves: BlockCopies,
    window_moves: BlockCopies | None = None,
) -> Plan:
    """Make a plan that computes nothing."""
    none, draws, table = np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros((0, 0), np.int32)
    return Plan(
        step,
        none,
        none,
        none,
        none,
        none,
        draws,
        draws,
        table,
        np.zeros(0, SAMPLING),
        draws,
        none,
        (),
        (),
        (),
        moves,
        none,
        none,
        state_advances,
        state_moves,
        table,
        window_moves or BlockCopies(),
    )


def plan_by_hand(
    token_ids: np.ndarray,
    starts: np.ndarray,
    block_table: np.ndarray,
    shared: tuple[SharedPrefix, ...] = (),
    seed: int = 0,
) -> Plan:
    """Make a plan without a scheduler, for benchmarks and checks: R rows of C tokens each, which sample one token each at
    temperature 1. token_ids [R, C], starts [R], block_table [R, M] int32."""
    rows, count = token_ids.shape
    sampling = np.zeros(rows, SAMPLING)
    sampling["seed"], sampling["index"], sampling["temperature"], sampling["top_p"] = seed, np.arange(rows), 1, 1
    none = np.zeros(0, np.int64)
    return Plan(
        step=0,
        starts=np.asarray(starts, np.int32),
        counts=np.full(rows, count, np.int32),
        samples=np.ones(rows, np.int32),
        logits=np.ones(rows, np.int32),
        token_ids=token_ids.ravel().astype(np.int32),
        pending_tokens=none,
        pending_draws=none,
        block_table=np.array(block_table, np.int32),
        sampling=sampling,
        positions=np.zeros(rows, np.int64),
        given=np.full(rows, -1, np.int32),
        forbidden=(),
        adjustments=(),
        shared=shared,
        moves=BlockCopies(),
        state_reads=np.zeros(0, np.int32),
        state_writes=np.zeros(0, np.int32),
        state_advances=np.zeros((0, 4), np.int32),
        state_moves=BlockCopies(),
        window_table=np.zeros((0, 0), np.int32),
        window_moves=BlockCopies(),
    )


class TopLogprobs(NamedTuple):
    """The most probable tokens of the distributions of D draws, K of each: the likeliest first, of equal ones the lower id."""

    ids: np.ndarray
    """[D, K] int32; -1 in unused entries, where fewer tokens are possible or the draw wants fewer"""
    logprobs: np.ndarray
    """[D, K] float32, -inf in unused entries"""


class StepRoutes(NamedTuple):
    """Which experts tokens of a step chose."""

    draws: np.ndarray
    """[D, layers, chosen] uint8 or uint16: at the position whose logits each draw is from"""
    prompts: dict[int, np.ndarray]
    """by row: [tokens, layers, chosen] of its first tokens, as `Plan.prompt_routes` asks"""


class SampledTokens(NamedTuple):
    """What the sampler drew, one entry for each sample of each row in the order of the plan."""

    tokens: np.ndarray
    """[samples] int32"""
    logprobs: np.ndarray
    """[samples] float32, of the distribution drawn from"""
    raw_logprobs: np.ndarray | None
    """[samples] float32 at temperature 1 without truncation; None if no row wants them"""
    finite: np.ndarray
    """[samples] bool: False where the logits held NaN or infinity, so that nothing was drawn"""
    top: TopLogprobs | None = None
    """None if no row wants them"""
    routes: StepRoutes | None = None
    """None if no row wants them; the worker adds it"""
    ranks: np.ndarray | None = None
    """[samples] int32: 1 + the number of tokens with a larger logit, of given tokens whose row wants the most probable ones; 0
    of others. None if there are none"""


class MaskedTokens(NamedTuple):
    """Which tokens D draws mask."""

    any: np.ndarray
    """[D] bool: whether a draw masks any token"""
    cuts: dict[str, np.ndarray]
    """by name of TRUNCATIONS: [D] values of the option"""
    forbidden: list[tuple[int, list[int]]]
    """(draw, tokens), draws ascending"""
