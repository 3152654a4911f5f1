"""How the children of a group are sampled."""

from __future__ import annotations

import difflib
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from rollout.engine.values.limits import LARGEST_LIMIT, Limits

SEED_LIMIT = 2**63
MAX_PRIORITY = 1_000_000


class Accepted(NamedTuple):
    """Values that a numeric field of `Sampling` accepts."""

    low: float
    high: float
    words: str
    """after "must be" """
    optional: bool = False
    """None is accepted too"""

    @property
    def either(self) -> str:
        return "None or " if self.optional else ""


def python_of(value: Any) -> Any:
    """Convert a scalar of numpy, and containers of them, to Python's types; other values stay as they are."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return [python_of(each) for each in value] if isinstance(value, list | tuple) else value


def integer_of(name: str, value: Any) -> int:
    """Return an integer given in another type: 2.0, or numpy's. Raises ValueError naming the field."""
    plain = python_of(value)
    if type(plain) is int or (type(plain) is float and plain.is_integer()):
        return int(plain)
    raise ValueError(f"{name}={value!r:.40}: must be an integer")


def number_of(name: str, value: Any) -> float:
    """Return a float given in another type. Raises ValueError naming the field."""
    plain = python_of(value)
    if type(plain) in (int, float):
        try:
            return float(plain)
        except OverflowError:
            return math.inf
    raise ValueError(f"{name}={value!r:.40}: must be a number")


def bool_of(name: str, value: Any) -> bool:
    """Return a bool of numpy as Python's. Raises ValueError naming the field."""
    plain = python_of(value)
    if type(plain) is bool:
        return plain
    raise ValueError(f"{name}={value!r:.40}: must be True or False")


def token_ids_of(name: str, value: Any) -> tuple[int, ...]:
    """Return token ids as a tuple. Raises ValueError naming the field."""
    plain = python_of(value)
    if not isinstance(plain, list):
        raise ValueError(f"{name}={value!r:.40}: must be token ids, e.g. (2, 7)")
    for id in plain:
        if type(id) is not int:
            raise ValueError(f"{name} holds {id!r:.40}: must be integers")
        if not 0 <= id <= LARGEST_ID:
            raise ValueError(f"{name} holds {id}: token ids are 0 to {LARGEST_ID}")
    return tuple(plain)


def bias_of(name: str, value: Any) -> dict[int, float]:
    """Return a logit bias in Python's types. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r:.40}: must map token ids to numbers, e.g. {{7: -100.0}}")
    bias = dict(zip(token_ids_of(name, list(value)), map(python_of, value.values()), strict=True))
    for id, each in bias.items():
        if type(each) not in (int, float):
            raise ValueError(f"{name} holds {each!r:.40}: must be numbers")
        if not -100.0 <= each <= 100.0:
            raise ValueError(f"{name} of token {id} is {each}: must be between -100 and 100")
    return {id: float(each) for id, each in bias.items()}


def stop_of(name: str, value: Any) -> tuple[str, ...]:
    """Return stop strings as a tuple. Raises ValueError."""
    plain = python_of(value)
    strings = [plain] if isinstance(plain, str) else plain
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ValueError(f"{name}={value!r:.40}: must be a string or a tuple of strings")
    for string in strings:
        try:
            string.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} holds {string!r:.40}: must be Unicode text, without lone surrogates") from None
        if not string:
            raise ValueError("stop holds an empty string: it would end every child; leave it out")
    return tuple(str(string) for string in strings)


POSITIVE, BELOW_1 = math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0)
LARGEST_FLOAT, LARGEST_ID = sys.float_info.max, 2**31 - 1
ONE_OR_MORE, ZERO_OR_MORE = Accepted(1, LARGEST_LIMIT, "at least 1"), Accepted(0, LARGEST_LIMIT, "at least 0")
NONE_OR_MORE = Accepted(0, LARGEST_LIMIT, "None or at least 0", optional=True)
NONE_OR_ONE = Accepted(1, LARGEST_LIMIT, "None or at least 1", optional=True)
PRIORITY = Accepted(-MAX_PRIORITY, MAX_PRIORITY, f"between -{MAX_PRIORITY} and {MAX_PRIORITY}")
SEED = Accepted(0, SEED_LIMIT - 1, "None or between 0 and 2**63 - 1", optional=True)
TOP_K = Accepted(0, 2**31 - 1, f"between 0 and {2**31 - 1}; 0 is off")
PENALTY = Accepted(-2.0, 2.0, "between -2 and 2; 0 is none")
SECONDS = Accepted(POSITIVE, LARGEST_FLOAT, "None or a positive, finite number of seconds", optional=True)

Role = Literal["draws", "truncates", "ends", "returns", "nothing"]
"""what a field of `Sampling` decides. draws, truncates: tokens and log-probs of a child. ends: which children end from outside,
or how old KV and weights may be. returns: which columns a sample has. nothing: only when it is computed or sent"""


class Option(NamedTuple):
    """Describes a field of `Sampling` to the code that lists fields. Its default and its meaning stand at the field."""

    role: Role
    convert: Callable[[str, Any], Any]
    """makes the field of what a caller gave. Raises ValueError naming the field"""
    accepts: Accepted | None = None
    """of numbers"""
    limit: str = ""
    """field of `Limits` that bounds it, or its number of entries"""
    column: type[np.generic] | None = None
    """dtype of its column in the record of a draw (`scheduling.plan.SAMPLING`); None: the sampler does not read it"""


OPTIONS: dict[str, Option] = {
    "seed": Option("draws", integer_of, SEED),
    "temperature": Option("draws", number_of, Accepted(0.0, 100.0, "0 (greedy) or between 0.001 and 100"), column=np.float32),
    "max_tokens": Option("draws", integer_of, ONE_OR_MORE, "max_tokens"),
    "min_tokens": Option("draws", integer_of, ZERO_OR_MORE),
    "top_k": Option("truncates", integer_of, TOP_K, column=np.int64),
    "top_p": Option("truncates", number_of, Accepted(POSITIVE, 1.0, "in (0, 1]"), column=np.float32),
    "min_p": Option("truncates", number_of, Accepted(0.0, BELOW_1, "in [0, 1)"), column=np.float32),
    "stop_token_ids": Option("draws", token_ids_of, limit="max_stop_token_ids"),
    "ignore_eos": Option("draws", bool_of),
    "stop": Option("draws", stop_of, limit="max_stop_strings"),
    "logit_bias": Option("draws", bias_of, limit="max_logit_bias"),
    "allowed_token_ids": Option("draws", token_ids_of, limit="max_allowed_token_ids"),
    "repetition_penalty": Option("draws", number_of, Accepted(0.01, 100.0, "between 0.01 and 100; 1 is none")),
    "presence_penalty": Option("draws", number_of, PENALTY),
    "frequency_penalty": Option("draws", number_of, PENALTY),
    "n": Option("ends", integer_of, ONE_OR_MORE, "max_n"),
    "max_kv_lag": Option("ends", integer_of, ZERO_OR_MORE, "max_kv_lag"),
    "max_version_lag": Option("ends", integer_of, NONE_OR_MORE, "max_kv_lag"),
    "finish_after": Option("ends", integer_of, NONE_OR_ONE),
    "min_len_to_cut": Option("ends", integer_of, ZERO_OR_MORE),
    "deadline_s": Option("ends", number_of, SECONDS),
    "raw_logprobs": Option("returns", bool_of, column=np.bool_),
    "top_logprobs": Option("returns", integer_of, ZERO_OR_MORE, "max_top_logprobs", np.int64),
    "routed_experts": Option("returns", bool_of, column=np.bool_),
    "priority": Option("nothing", integer_of, PRIORITY),
    "stream_every": Option("nothing", integer_of, Accepted(0, LARGEST_LIMIT, "0 (off) or a number of tokens")),
    "kv_ttl_s": Option("nothing", number_of, Accepted(0.0, LARGEST_FLOAT, "at least 0"), "max_kv_ttl_s"),
}
"""every field of `Sampling`: whatever lists options is made of this table. Receipts and ledgers name fields by their places
in it: append only"""
ACCEPTED = {name: option.accepts for name, option in OPTIONS.items() if option.accepts is not None}
"""of the numeric fields"""
DRAW_COLUMNS = {name: option.column for name, option in OPTIONS.items() if option.column is not None}
"""dtypes of the columns of a draw"""
draw_columns_of = operator.attrgetter(*DRAW_COLUMNS)
TRUNCATIONS = tuple(name for name, option in OPTIONS.items() if option.role == "truncates")
"""options that leave out tokens of a distribution; each changes nothing by default"""
SCALARS = tuple(
    (name, int if OPTIONS[name].convert is integer_of else float, accepted.low, accepted.high)
    for name, accepted in ACCEPTED.items()
)
scalars_of = operator.attrgetter(*ACCEPTED)
others_of = operator.attrgetter(*(name for name, option in OPTIONS.items() if option.accepts is None))
OTHERS = tuple((name, option.convert) for name, option in OPTIONS.items() if option.accepts is None)


def nearest(unknown: str, known: Sequence[str]) -> str:
    """Say which of the known names was probably meant, or all of them."""
    alike = difflib.get_close_matches(unknown, known, 1, 0.5)
    return f"did you mean {alike[0]}?" if alike else f"it has {', '.join(known)}"


class NearestField(msgspec.StructMeta):
    """Names the nearest field if a value is made with an unknown one."""

    if not TYPE_CHECKING:  # pyright would take its result, Any, for the type of every value

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make the value. Raises TypeError."""
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                unknown = next((name for name in kwargs if name not in cls.__struct_fields__), None)
                if unknown is None:
                    raise
                raise TypeError(f"{cls.__name__} has no field {unknown!r}; {nearest(unknown, cls.__struct_fields__)}") from None


class Sampling(
    msgspec.Struct, metaclass=NearestField, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """How the children of a group are sampled. It checks itself: a value that no service accepts raises ValueError, which names
    the field. Numbers of numpy, and floats such as 2.0 for an integer, are converted; one string as `stop` becomes a tuple.

    Example:
        Sampling(n=8, temperature=1.0, top_p=0.95, max_tokens=2048, seed=7)

    Attributes:
        n: number of children (`num_return_sequences`).
        max_tokens: maximum tokens of a child, which then ends with "length".
        min_tokens: minimum tokens of a child before it may end with "stop".
        temperature: 0 = greedy.
        top_k: sample from the k most probable tokens; 0 = all. Order and ties of truncation: docs/decisions/logprobs.md.
        top_p: in (0, 1]: sample from the most probable tokens that sum to this probability.
        min_p: in [0, 1): exclude tokens with less than min_p times the probability of the most probable token.
        stop_token_ids: token ids that end a child with "stop", besides the model's own end tokens.
        ignore_eos: ignore the model's own end tokens; `stop_token_ids` still apply.
        seed: None = the engine chooses one.
        raw_logprobs: also return log-probs at temperature 1 without truncation.
        max_kv_lag: maximum age, in weight versions, of cached prompt KV that a new sample may use, and of KV from before a
            refresh with kv="keep" in the middle of its prefill. A refresh with kv="recompute" recomputes all KV of started
            groups regardless.
        max_version_lag: maximum age, in weight versions, of a child's first token; an older child ends with "stale". None = no
            bound.
        finish_after: number of children that must end by themselves ("stop" or "length"); then the others return with "cut" and
            their tokens so far. Ties within a step, and the bias towards short samples: docs/decisions/long-tail.md.
        min_len_to_cut: minimum tokens of a child before it is cut.
        deadline_s: seconds from the arrival of the group, after which unfinished children return with "deadline".
        priority: order of one client's groups: a higher priority starts first and is preempted last.
        stream_every: stream the tokens of a running child whenever it has so many new ones; 0 = off.
        top_logprobs: also return the ids and log-probs of so many most probable tokens at each position.
        kv_ttl_s: seconds for which the KV of a finished child stays pinned for the next turn (`Group.after`), up to
            `Limits.max_kv_ttl_s`. 0 = whole blocks stay in the prefix cache until their space is needed. Pinned KV takes at
            most half of the KV pools: docs/decisions/turns.md.
        logit_bias: values from -100 to 100, added to the logits of these token ids.
        allowed_token_ids: sample only these token ids; None = all.
        repetition_penalty: from 0.01 to 100: positive logits of tokens in the prompt or the output are divided by it, others
            multiplied. Order of the changes to logits: docs/decisions/logprobs.md.
        presence_penalty: from -2 to 2: subtracted from the logits of tokens in the output.
        frequency_penalty: from -2 to 2: subtracted from the logits of tokens in the output once for each time they occur.
        stop: strings that end a child with "stop" when its text contains one: see `Sample.stopped_by`, `Sample.text_end`. The
            text includes special tokens. Ignored for the first `min_tokens` tokens.
        routed_experts: also return which experts of a mixture each token chose: `Sample.routed_experts`, for
            `rollout.exact.replay`. The service must run with `EngineConfig.routed_experts`: docs/mixtures.md.
    """

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    raw_logprobs: bool = False
    max_kv_lag: int = 0
    max_version_lag: int | None = None
    finish_after: int | None = None
    min_len_to_cut: int = 0
    deadline_s: float | None = None
    priority: int = 0
    stream_every: int = 0
    top_logprobs: int = 0
    kv_ttl_s: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    routed_experts: bool = False

    @property
    def truncates(self) -> bool:
        """Whether tokens of the model's distribution may be left out."""
        return any(getattr(self, name) != NEUTRAL[name] for name in TRUNCATIONS)

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are sampled from other logits than the model's."""
        neutral = self.repetition_penalty == 1 and self.presence_penalty == self.frequency_penalty == 0
        return bool(self.logit_bias) or self.allowed_token_ids is not None or not neutral

    def __post_init__(self) -> None:
        """Convert and check the fields, also of a decoded message. Raises ValueError naming the field, its value and what is
        accepted."""
        for value, default, (name, kind, low, high) in zip(scalars_of(self), DEFAULTS, SCALARS, strict=True):
            if value is not default and not (type(value) is kind and low <= value <= high):
                force_setattr(self, name, scalar_of(name, value))
        if 0.0 < self.temperature < 1e-3:
            raise ValueError(f"temperature={self.temperature}: must be {ACCEPTED['temperature'].words}")
        for value, default, (name, convert) in zip(others_of(self), OTHER_DEFAULTS, OTHERS, strict=True):
            if value is not default:
                force_setattr(self, name, convert(name, value))
        self._check_together()

    def _check_together(self) -> None:
        """Check fields that bound each other, and that a token is left to sample."""
        for name, value, most, bound in (
            ("min_tokens", self.min_tokens, "max_tokens", self.max_tokens),
            ("min_len_to_cut", self.min_len_to_cut, "max_tokens", self.max_tokens),
            ("finish_after", self.finish_after, "n", self.n),
        ):
            if value is not None and value > bound:
                accepted = ACCEPTED[name]
                raise ValueError(f"{name}={value}: must be {accepted.either}between {accepted.low} and {most}={bound}")
        if self.min_len_to_cut and self.finish_after is None:
            raise ValueError(f"min_len_to_cut={self.min_len_to_cut} without finish_after: nothing is cut; set finish_after")
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids=(): no token is left to sample; give at least one, or None for all")

    def validate(self, limits: Limits, vocab_size: int) -> None:
        """Check the fields against the limits and the model of a service. Raises ValueError naming the field, its value and
        what would be accepted."""
        for name, option in OPTIONS.items():
            value, most = getattr(self, name), getattr(limits, option.limit) if option.limit else math.inf
            if value is None:
                continue
            if option.accepts is None:
                size = len(value) if option.limit else 0
                if size > most:
                    what = "stop strings" if name == "stop" else f"entries of {name}"
                    raise ValueError(f"{size} {what}: at most {most} (Limits.{option.limit})")
            elif value > most:
                shown = f"{option.accepts.either}between {option.accepts.low:g} and {most} (Limits.{option.limit})"
                raise ValueError(f"{name}={value}: must be {shown}")
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise ValueError(f"{name} holds {token}: the model's token ids are 0 to {vocab_size - 1}")
        for size in (len(string.encode()) for string in self.stop):
            if size > limits.max_stop_bytes:
                raise ValueError(f"a stop string of {size} bytes: must be 1 to {limits.max_stop_bytes} (Limits.max_stop_bytes)")


_DEFAULT_OF = {field.name: field.default for field in msgspec.structs.fields(Sampling)}
DEFAULTS = tuple(_DEFAULT_OF[name] for name in ACCEPTED)
OTHER_DEFAULTS = tuple(_DEFAULT_OF[name] for name, _ in OTHERS)
"""defaults need no check"""
assert OPTIONS.keys() == _DEFAULT_OF.keys(), "each field has its row in OPTIONS"
NEUTRAL = {name: _DEFAULT_OF[name] for name in TRUNCATIONS}
"""values of truncations that leave nothing out"""


def scalar_of(name: str, value: Any) -> int | float | None:
    """Return the value of a numeric field in its type. Raises ValueError for one that is not accepted."""
    accepted = ACCEPTED[name]
    if value is None and accepted.optional:
        return None
    plain: int | float = OPTIONS[name].convert(name, value)
    if accepted.low <= plain <= accepted.high:  # not NaN
        return plain
    most = f"at most {LARGEST_LIMIT}" if plain > accepted.high == LARGEST_LIMIT else accepted.words
    raise ValueError(f"{name}={plain}: must be {most}")
