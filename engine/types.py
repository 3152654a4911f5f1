"""Value types: inputs and outputs of the engine. No torch.

A `Group` is a prompt and `sampling.n` children; a `Sample` is one finished child. `transport` and `rollout.client` import only
this module of the engine. To send tensors, the client also imports `rollout.engine.weights.tensors` and, for tensors on a GPU,
`rollout.engine.cuda.digests`.
"""

from __future__ import annotations

import difflib
import enum
import hashlib
import html
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import force_setattr

FinishReason = Literal["stop", "length", "cut", "deadline", "aborted", "stale", "error", "scored"]
"""why a child ended: see `Sample`"""
KVPolicy = Literal["keep", "recompute", "abort"]
"""what a refresh does with running groups: keep their KV, recompute it under the new weights, or abort them"""
Tag = Literal["weights", "kv"]
"""a part of an engine's memory that sleep releases and wake can allocate by itself"""

SEED_LIMIT = 2**63
MAX_PRIORITY = 1_000_000
LARGEST_LIMIT = 2**40


class Mode(enum.Enum):
    """Lifecycle state of an engine."""

    RUNNING = "running"
    DRAINING = "draining"
    """started groups run to their end, no others start"""
    PAUSED = "paused"
    """no steps; submitted groups wait"""
    ASLEEP = "asleep"
    """paused, with memory released"""
    WITHOUT_WEIGHTS = "without weights"
    """awake after a sleep that dropped the weights, until a refresh of all tensors"""
    TORN = "torn"
    """the undo of a failed refresh failed too: nothing is sampled any more"""

    @property
    def rests(self) -> bool:
        """Whether the engine plans no steps until another mode is requested."""
        return self in (Mode.PAUSED, Mode.ASLEEP, Mode.WITHOUT_WEIGHTS)


class DeviceLost(RuntimeError):
    """The device fails every call: the process must end, so that another one takes over its groups."""


class RankLost(DeviceLost):
    """Another rank of the replica has ended, did not come in time, or is out of step: this one must end, too."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on everything a client can make large, checked before anything is allocated. docs/limits.md has them as a
    table."""

    max_n: int = 1024
    """children of one group"""
    max_tokens: int = 131_072
    """`Sampling.max_tokens` of one child"""
    max_prompt_tokens: int = 131_072
    """token ids in one prompt"""
    max_stop_token_ids: int = 64
    """entries of `Sampling.stop_token_ids`"""
    max_id_bytes: int = 128
    """UTF-8 bytes of a group id or a client name"""
    max_groups_per_client: int = 4096
    """unfinished groups of one client"""
    max_samples_per_client: int = 65_536
    """samples (n of each group, summed) of unfinished groups of one client"""
    max_clients: int = 256
    """client sessions at a time"""
    max_header_bytes: int = 65_536
    """the first frame of a message"""
    max_frame_bytes: int = 16_777_216
    """any other frame"""
    max_frames: int = 64
    """frames of one message"""
    max_kv_lag: int = 1_000_000
    """`Sampling.max_kv_lag` and `Sampling.max_version_lag`"""
    max_top_logprobs: int = 20
    """`Sampling.top_logprobs`"""
    max_kv_ttl_s: int = 3600
    """`Sampling.kv_ttl_s`: seconds for which the KV of a finished child stays pinned"""
    max_logit_bias: int = 1024
    """entries of `Sampling.logit_bias`"""
    max_allowed_token_ids: int = 4096
    """entries of `Sampling.allowed_token_ids`"""
    max_stop_strings: int = 16
    """entries of `Sampling.stop`"""
    max_stop_bytes: int = 256
    """UTF-8 bytes of one stop string"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""
        for name in self.__struct_fields__:
            least = 2 if name == "max_frames" else 0 if name in ("max_kv_lag", "max_kv_ttl_s") else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
            if getattr(self, name) > LARGEST_LIMIT:
                raise ValueError(f"{name}={getattr(self, name)}: must be at most {LARGEST_LIMIT}")


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


POSITIVE, BELOW_1 = math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0)
LARGEST_FLOAT, LARGEST_ID = sys.float_info.max, 2**31 - 1
ONE_OR_MORE, ZERO_OR_MORE = Accepted(1, LARGEST_LIMIT, "at least 1"), Accepted(0, LARGEST_LIMIT, "at least 0")
INTEGERS = {
    "n": ONE_OR_MORE,
    "max_tokens": ONE_OR_MORE,
    "min_tokens": ZERO_OR_MORE,
    "top_k": Accepted(0, 2**31 - 1, f"between 0 and {2**31 - 1}; 0 is off"),
    "seed": Accepted(0, SEED_LIMIT - 1, "None or between 0 and 2**63 - 1", optional=True),
    "max_kv_lag": ZERO_OR_MORE,
    "max_version_lag": Accepted(0, LARGEST_LIMIT, "None or at least 0", optional=True),
    "finish_after": Accepted(1, LARGEST_LIMIT, "None or at least 1", optional=True),
    "min_len_to_cut": ZERO_OR_MORE,
    "priority": Accepted(-MAX_PRIORITY, MAX_PRIORITY, f"between -{MAX_PRIORITY} and {MAX_PRIORITY}"),
    "stream_every": Accepted(0, LARGEST_LIMIT, "0 (off) or a number of tokens"),
    "top_logprobs": ZERO_OR_MORE,
}
NUMBERS = {
    "temperature": Accepted(0.0, 100.0, "0 (greedy) or between 0.001 and 100"),
    "top_p": Accepted(POSITIVE, 1.0, "in (0, 1]"),
    "min_p": Accepted(0.0, BELOW_1, "in [0, 1)"),
    "deadline_s": Accepted(POSITIVE, LARGEST_FLOAT, "None or a positive, finite number of seconds", optional=True),
    "kv_ttl_s": Accepted(0.0, LARGEST_FLOAT, "at least 0"),
    "repetition_penalty": Accepted(0.01, 100.0, "between 0.01 and 100; 1 is none"),
    "presence_penalty": Accepted(-2.0, 2.0, "between -2 and 2; 0 is none"),
    "frequency_penalty": Accepted(-2.0, 2.0, "between -2 and 2; 0 is none"),
}
SCALARS = tuple(
    (name, kind, accepted.low, accepted.high)
    for kind, fields in ((int, INTEGERS), (float, NUMBERS))
    for name, accepted in fields.items()
)
scalars_of = operator.attrgetter(*INTEGERS, *NUMBERS)


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
                alike = difflib.get_close_matches(unknown, cls.__struct_fields__, 1, 0.5)
                hint = f"did you mean {alike[0]}?" if alike else f"it has {', '.join(cls.__struct_fields__)}"
                raise TypeError(f"{cls.__name__} has no field {unknown!r}; {hint}") from None


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
            raise ValueError(f"temperature={self.temperature}: must be {NUMBERS['temperature'].words}")
        for name in ("ignore_eos", "raw_logprobs", "routed_experts"):
            if type(flag := getattr(self, name)) is not bool:
                force_setattr(self, name, bool_of(name, flag))
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", self.allowed_token_ids)):
            if ids is not None and (type(ids) is not tuple or ids):
                force_setattr(self, name, token_ids_of(name, ids))
        if self.logit_bias is not None:
            force_setattr(self, "logit_bias", bias_of(self.logit_bias))
        if type(self.stop) is not tuple or self.stop:
            force_setattr(self, "stop", stop_of(self.stop))
        self._check_together()

    def _check_together(self) -> None:
        """Check fields that bound each other, and that a token is left to sample."""
        for name, value, most, bound in (
            ("min_tokens", self.min_tokens, "max_tokens", self.max_tokens),
            ("min_len_to_cut", self.min_len_to_cut, "max_tokens", self.max_tokens),
            ("finish_after", self.finish_after, "n", self.n),
        ):
            if value is not None and value > bound:
                accepted = INTEGERS[name]
                raise ValueError(f"{name}={value}: must be {accepted.either}between {accepted.low} and {most}={bound}")
        if self.min_len_to_cut and self.finish_after is None:
            raise ValueError(f"min_len_to_cut={self.min_len_to_cut} without finish_after: nothing is cut; set finish_after")
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids=(): no token is left to sample; give at least one, or None for all")

    def validate(self, limits: Limits, vocab_size: int) -> None:
        """Check the fields against the limits and the model of a service. Raises ValueError naming the field, its value and
        what would be accepted."""
        for name, limit in (
            ("n", "max_n"), ("max_tokens", "max_tokens"), ("max_kv_lag", "max_kv_lag"), ("max_version_lag", "max_kv_lag"),
            ("kv_ttl_s", "max_kv_ttl_s"), ("top_logprobs", "max_top_logprobs"),
        ):  # fmt: skip
            value, most = getattr(self, name), getattr(limits, limit)
            if value is not None and value > most:
                accepted = INTEGERS.get(name) or NUMBERS[name]
                shown = f"{accepted.either}between {accepted.low:g} and {most} (Limits.{limit})"
                raise ValueError(f"{name}={value}: must be {shown}")
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            ids, most = getattr(self, name) or (), getattr(limits, f"max_{name}")
            if len(ids) > most:
                raise ValueError(f"{len(ids)} entries of {name}: at most {most} (Limits.max_{name})")
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(f"{name} holds {token}: the model's token ids are 0 to {vocab_size - 1}")
        if len(self.stop) > limits.max_stop_strings:
            raise ValueError(f"{len(self.stop)} stop strings: at most {limits.max_stop_strings} (Limits.max_stop_strings)")
        for size in (len(string.encode()) for string in self.stop):
            if size > limits.max_stop_bytes:
                raise ValueError(f"a stop string of {size} bytes: must be 1 to {limits.max_stop_bytes} (Limits.max_stop_bytes)")


_DEFAULT_OF = {field.name: field.default for field in msgspec.structs.fields(Sampling)}
DEFAULTS = tuple(_DEFAULT_OF[name] for name, *_ in SCALARS)
"""of the numeric fields; they need no check"""


def scalar_of(name: str, value: Any) -> int | float | None:
    """Return the value of a numeric field in its type. Raises ValueError for one that is not accepted."""
    accepted = INTEGERS.get(name) or NUMBERS[name]
    if value is None and accepted.optional:
        return None
    plain = integer_of(name, value) if name in INTEGERS else number_of(name, value)
    if accepted.low <= plain <= accepted.high:  # not NaN
        return plain
    most = f"at most {LARGEST_LIMIT}" if plain > accepted.high == LARGEST_LIMIT else accepted.words
    raise ValueError(f"{name}={plain}: must be {most}")


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


def bias_of(value: Any) -> dict[int, float]:
    """Return a logit bias in Python's types. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias={value!r:.40}: must map token ids to numbers, e.g. {{7: -100.0}}")
    bias = dict(zip(token_ids_of("logit_bias", list(value)), map(python_of, value.values()), strict=True))
    for id, each in bias.items():
        if type(each) not in (int, float):
            raise ValueError(f"logit_bias holds {each!r:.40}: must be numbers")
        if not -100.0 <= each <= 100.0:
            raise ValueError(f"logit_bias of token {id} is {each}: must be between -100 and 100")
    return {id: float(each) for id, each in bias.items()}


def stop_of(value: Any) -> tuple[str, ...]:
    """Return stop strings as a tuple. Raises ValueError."""
    plain = python_of(value)
    strings = [plain] if isinstance(plain, str) else plain
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ValueError(f"stop={value!r:.40}: must be a string or a tuple of strings")
    for string in strings:
        try:
            string.encode()
        except UnicodeEncodeError:
            raise ValueError(f"stop holds {string!r:.40}: must be Unicode text, without lone surrogates") from None
        if not string:
            raise ValueError("stop holds an empty string: it would end every child; leave it out")
    return tuple(str(string) for string in strings)


class Routing(msgspec.Struct, frozen=True):
    """Shape of the routes of a mixture of experts: which experts each token chose in each layer that has experts.

    Example:
        Routing(layers=(1, 2, 3), chosen=8, experts=128, decoder_layers=4)      # layer 0 is dense; 24 bytes a token
    """

    layers: tuple[int, ...]
    """decoder layer of each row of a token's routes, ascending"""
    chosen: int
    """experts that a token chooses in a layer"""
    experts: int
    """experts of a layer; ids are 0 to experts - 1"""
    decoder_layers: int
    """of the model, those without experts included"""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the routes of one token."""
        return len(self.layers), self.chosen

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of expert ids: uint8 for up to 256 experts, else uint16."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of the routes of one token."""
        return len(self.layers) * self.chosen * self.dtype.itemsize

    def by_decoder_layer(self, routes: np.ndarray) -> np.ndarray:
        """Return [positions, decoder_layers, chosen] of routes [positions, layers, chosen]: 0 in layers without experts. vLLM,
        SGLang and verl have routes in this form."""
        whole = np.zeros((len(routes), self.decoder_layers, self.chosen), routes.dtype)
        whole[:, list(self.layers)] = routes
        return whole

    def check(self, routes: np.ndarray, tokens: int, who: str) -> None:
        """Raises ValueError, which begins with `who`, unless these are routes of so many tokens."""
        wanted = (tokens, *self.shape)
        if routes.dtype != self.dtype or routes.shape != wanted:
            raise ValueError(f"{who} {routes.dtype} {routes.shape}: must be {self.dtype} {list(wanted)}")
        if routes.size and (most := int(routes.max())) >= self.experts:
            raise ValueError(f"{who} holds expert {most}: must be 0 to {self.experts - 1}")


COLUMNS: dict[str, tuple[tuple[type[np.generic], ...], int]] = {
    "token_ids": ((np.int32,), 1),
    "logprobs": ((np.float32,), 1),
    "raw_logprobs": ((np.float32,), 1),
    "top_ids": ((np.int32,), 2),
    "top_logprobs": ((np.float32,), 2),
    "routed_experts": ((np.uint8, np.uint16), 3),
}
"""dtypes and number of dimensions of each array of `TokenColumns`"""

Spans = Sequence[tuple[int, int]]
"""(first token, weight version), ascending by token"""
KVSpans = Sequence[tuple[int, int, int]]
"""(token, position, weight version), ascending by token: from that token on, this version computed the KV of the position and
of all positions after it"""


class Layout(NamedTuple):
    """Optional arrays of `TokenColumns`."""

    raw: bool
    """whether there are raw log-probs"""
    top: int
    """number of top log-probs of a token"""
    routes: tuple[tuple[int, ...], str] | None
    """shape of a token's routes, and their dtype"""


class TokenColumns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Generated tokens of one child: arrays with one row per token. Base of `Sample`, which explains the fields, of
    `PartialSample` and of `TokenChunk`."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    weight_versions: list[tuple[int, int]]
    raw_logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    kv_versions: list[tuple[int, int, int]] = []

    def columns(self) -> dict[str, Any]:
        """Return the fields of `TokenColumns` as keyword arguments, for a constructor."""
        spans = {"weight_versions": self.weight_versions, "kv_versions": self.kv_versions}
        return {**spans, **{name: getattr(self, name) for name in COLUMNS}}

    @property
    def mean_logprob(self) -> float:
        """Return the mean of `logprobs`, NaN without tokens."""
        return float(self.logprobs.mean()) if len(self.logprobs) else math.nan

    @property
    def versions(self) -> str:
        """Say which weights generated the tokens: "version 3", "versions 3 to 5"."""
        versions = [version for _, version in self.weight_versions]
        if len(set(versions)) < 2:
            return f"version {versions[0]}" if versions else "no version"
        return f"versions {min(versions)} to {max(versions)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name in plain lists and numbers, for pandas, datasets or JSON."""
        plain = {name: getattr(self, name) for name in self.__struct_fields__}
        lists = {name: array.tolist() for name, array in self._arrays()}
        return plain | lists | {name: [list(span) for span in plain[name]] for name in ("weight_versions", "kv_versions")}

    def slice(self, first: int, last: int | None = None) -> TokenColumns:
        """Return the tokens from `first` to before `last` (None = the end), as views. Spans count from the new first token."""
        end = len(self.token_ids) if last is None else last
        spans, kv = slice_spans(self.weight_versions, first, end), slice_kv_spans(self.kv_versions, first, end)
        arrays = {name: array[first:last] for name, array in TokenColumns._arrays(self)}
        return TokenColumns(weight_versions=spans, kv_versions=kv, **arrays)

    @staticmethod
    def concat(parts: Sequence[TokenColumns]) -> TokenColumns:
        """Join consecutive tokens of one child; the arrays are copies. An optional array is kept if all parts have it."""
        spans, kv = list[tuple[int, int]](), list[tuple[int, int, int]]()
        length = 0
        for part in parts:
            for first, version in part.weight_versions:
                if not spans or spans[-1][1] != version:
                    spans.append((length + first, version))
            kv += [(length + token, position, version) for token, position, version in part.kv_versions]
            length += len(part.token_ids)
        return TokenColumns(weight_versions=spans, kv_versions=kv, **concat_arrays(parts))

    @property
    def layout(self) -> Layout:
        """Return which optional arrays there are. Columns of equal layout can share a message."""
        routes = None if self.routed_experts is None else (self.routed_experts.shape[1:], self.routed_experts.dtype.name)
        return Layout(self.raw_logprobs is not None, 0 if self.top_ids is None else self.top_ids.shape[1], routes)

    @property
    def nbytes(self) -> int:
        """Count the bytes of the arrays."""
        return sum(array.nbytes for _, array in self._arrays())

    def _arrays(self) -> list[tuple[str, np.ndarray]]:
        return [(name, array) for name in COLUMNS if (array := getattr(self, name)) is not None]


def no_tokens() -> TokenColumns:
    """Return columns without rows."""
    return TokenColumns(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), weight_versions=[])


def slice_spans(spans: Spans, first: int, last: int) -> list[tuple[int, int]]:
    """Return the spans of the tokens from `first` to before `last`, counted from `first`."""
    ends = [*(start for start, _ in spans[1:]), last] if spans else []
    return [
        (max(start, first) - first, version)
        for (start, version), end in zip(spans, ends, strict=True)
        if max(start, first) < min(end, last)
    ]


def valid_kv_spans(spans: KVSpans, tokens: int) -> bool:
    """Return whether spans of KV are possible in a child of so many tokens."""
    firsts = [token for token, _, _ in spans]
    inside = firsts == sorted(firsts) and (not spans or 0 <= firsts[0] <= firsts[-1] < tokens)
    return inside and all(position >= 0 and 0 <= version < SEED_LIMIT for _, position, version in spans)


def slice_kv_spans(spans: KVSpans, first: int, last: int) -> list[tuple[int, int, int]]:
    """Return the spans that begin with the tokens from `first` to before `last`, counted from `first`."""
    return [(token - first, position, version) for token, position, version in spans if first <= token < last]


def concat_arrays(parts: Sequence[TokenColumns]) -> dict[str, Any]:
    """Concatenate each array over all parts; None unless every part has it."""
    joined: dict[str, Any] = {}
    for name in COLUMNS:
        arrays = [getattr(part, name) for part in parts]
        joined[name] = None if any(array is None for array in arrays) else np.concatenate(arrays)
    return joined


class PartialSample(TokenColumns, frozen=True, kw_only=True, eq=False):
    """The existing tokens of an unfinished child, at least one: it continues with the token after them. A child that already
    has its last token ends at once.

    Example:
        PartialSample.of(sample)
    """

    index: int
    """of the child, 0 to n - 1"""
    configuration: str = ""
    """as in its sample; "": unknown"""

    def __repr__(self) -> str:
        """Describe the tokens in one line."""
        return f"{type(self).__name__}([{self.index}] {len(self.token_ids)} tokens, {self.versions})"

    @classmethod
    def of(cls, sample: Sample) -> PartialSample:
        """Take the tokens of a sample that ended early."""
        return cls(index=sample.index, configuration=sample.configuration, **sample.columns())

    def validate(self, sampling: Sampling, vocab_size: int) -> None:
        """Check dtypes, shapes and values. Raises ValueError naming the child and what would be accepted."""
        who, tokens, most = f"partial sample {self.index}", self.token_ids, sampling.max_tokens
        if tokens.dtype != np.int32 or tokens.ndim != 1 or not 1 <= len(tokens) <= most:
            raise ValueError(f"{who} has token_ids {tokens.dtype} {tokens.shape}: must be int32 [1 to max_tokens={most}]")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"{who} holds token id {bad}: the model's token ids are 0 to {vocab_size - 1}")
        wanted = {"logprobs": self.logprobs, **({"raw_logprobs": self.raw_logprobs} if sampling.raw_logprobs else {})}
        for name, values in wanted.items():
            if values is None or values.dtype != np.float32 or values.shape != tokens.shape:
                found = "none" if values is None else f"{values.dtype} {values.shape}"
                raise ValueError(f"{who} has {name} {found}: must be float32 [{len(tokens)}], one for each token")
        self._validate_top(sampling.top_logprobs, vocab_size)
        if sampling.routed_experts and (self.routed_experts is None or len(self.routed_experts) != len(tokens)):
            found = "none" if self.routed_experts is None else f"of {len(self.routed_experts)} tokens"
            raise ValueError(f"{who} has routed_experts {found}: must be [{len(tokens)}, layers, chosen], as in its sample")
        firsts = [first for first, _ in self.weight_versions]
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)) or firsts[-1] >= len(tokens):
            raise ValueError(f"{who} has weight_versions that begin at {firsts}: must ascend from 0 to below {len(tokens)}")
        if any(version < 0 for _, version in self.weight_versions):
            raise ValueError(f"{who} has a weight version below 0: versions count up from 0")
        if not valid_kv_spans(self.kv_versions, len(tokens)):
            raise ValueError(f"{who} has kv_versions {str(self.kv_versions)[:80]}: must be as in its sample")

    def _validate_top(self, k: int, vocab_size: int) -> None:
        if not k:
            return
        shape, ids = (len(self.token_ids), k), self.top_ids
        for name, values, dtype in (("top_ids", ids, np.int32), ("top_logprobs", self.top_logprobs, np.float32)):
            if values is None or values.dtype != dtype or values.shape != shape:
                found = "none" if values is None else f"{values.dtype} {values.shape}"
                raise ValueError(
                    f"partial sample {self.index} has {name} {found}: must be {np.dtype(dtype).name} {list(shape)}"
                )
        assert ids is not None
        if int(ids.min()) < -1 or int(ids.max()) >= vocab_size:
            raise ValueError(f"partial sample {self.index} has top_ids outside of 0 to {vocab_size - 1}, and -1 for none")

    def ended_as(self, sampling: Sampling, eos: frozenset[int]) -> FinishReason | None:
        """Return how the child has ended, if its last token is one of `eos` or it has all its tokens."""
        tokens = self.token_ids
        if int(tokens[-1]) in eos and len(tokens) > sampling.min_tokens:
            return "stop"
        return "length" if len(tokens) == sampling.max_tokens else None

    def validate_unfinished(self, sampling: Sampling, eos: frozenset[int], version: int) -> None:
        """Raises ValueError if the child has tokens after one of `eos`, or if its first token is older than
        `Sampling.max_version_lag` allows under the live `version`."""
        for at, token in enumerate(self.token_ids[sampling.min_tokens : -1].tolist(), sampling.min_tokens):
            if token in eos:
                raise ValueError(f"partial sample {self.index} has tokens after stop token {token} at position {at}")
        lag, first = sampling.max_version_lag, self.weight_versions[0][1]
        if lag is not None and first < version - lag:
            raise ValueError(
                f"partial sample {self.index} began with version {first}, {version} is live: more than max_version_lag={lag}; "
                "leave it out or raise max_version_lag"
            )


class TokenChunk(PartialSample, frozen=True, kw_only=True, eq=False):
    """New tokens of a running child since the last chunk. Spans count from the first token of the chunk.

    Example:
        TokenChunk(index=2, first=16, token_ids=array([11, 5], int32), logprobs=array([-0.1, -2.3], float32),
                   weight_versions=[(0, 4), (1, 5)], seed=7)
        # tokens 16 and 17 of child 2; version 5 of the weights generated the second one
    """

    first: int
    """position of the first token in the output of the child"""
    seed: int
    """of the group, also if the engine chose it"""


class Group(msgspec.Struct, frozen=True, eq=False):
    """One prompt, and how to sample its children.

    Example:
        Group(id="step3/17", prompt=np.array([1, 42, 7], np.int32), sampling=Sampling(n=8))
    """

    id: str
    prompt: np.ndarray
    """[prompt_tokens] int32 token ids"""
    sampling: Sampling
    indices: tuple[int, ...] | None = None
    """requested children of the n, ascending; None = all. Another engine may generate the others: the tokens of a child depend
    on its own index only"""
    partials: tuple[PartialSample, ...] = ()
    """existing tokens of children, which continue from there"""
    score: bool = False
    """score the tokens in `partials`: nothing is sampled, and the children return as "scored" with the log-probs that these
    tokens have under `sampling`"""
    after: tuple[str, int] | None = None
    """(group id, index) of the child that this group continues: its prompt is that child's prompt and tokens, and more. A hint
    that allows reuse of the child's KV, whichever weights computed it; an unknown child, or one of another client, is
    ignored"""
    redraw: bool = False
    """with `score`: draw each token of `partials` again, with the counters of its child. A child ends with the first draw that
    is another token, or that ends a child; its tokens are the draws"""
    label: str = ""
    """the client's id of the group where `id` is another one, for messages to people"""

    def __repr__(self) -> str:
        """Describe the group in one line."""
        more = "".join(f", {name}={value!r}" for name, value in (("indices", self.indices), ("after", self.after)) if value)
        partials = f", {len(self.partials)} partials" if self.partials else ""
        return f"Group({self.id!r} {len(self.prompt)} prompt tokens, {self.sampling!r}{more}{partials})"

    @property
    def wanted(self) -> Sequence[int]:
        """Indices of the requested children, ascending."""
        return range(self.sampling.n) if self.indices is None else self.indices

    def validate(self, limits: Limits, vocab_size: int, context: int) -> None:
        """Check the group. vocab_size: rows of the embedding; context: positions of the model. Raises ValueError."""
        size = len(self.id.encode())
        if not 1 <= size <= limits.max_id_bytes:
            raise ValueError(f"group id of {size} bytes: must be 1 to {limits.max_id_bytes} bytes (Limits.max_id_bytes)")
        kind = type(self.prompt).__name__
        if kind != "ndarray":
            raise ValueError(f"prompt is a {kind}: must be int32 [prompt_tokens], np.array(tokenizer.encode(text), np.int32)")
        if self.prompt.ndim != 1 or self.prompt.dtype != np.int32:
            raise ValueError(f"prompt is {self.prompt.dtype} of shape {self.prompt.shape}: must be int32 [prompt_tokens]")
        most = min(limits.max_prompt_tokens, context - 1)
        if not 1 <= len(self.prompt) <= limits.max_prompt_tokens:
            bound = "Limits.max_prompt_tokens" if most == limits.max_prompt_tokens else f"the context of {context} tokens"
            raise ValueError(f"prompt of {len(self.prompt)} tokens: must be 1 to {most} ({bound})")
        low, high = int(self.prompt.min()), int(self.prompt.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"prompt holds token id {bad}: the model's token ids are 0 to {vocab_size - 1}")
        self.sampling.validate(limits, vocab_size)
        self._validate_children(vocab_size)
        if len(self.prompt) + self.sampling.max_tokens > context:
            left = context - len(self.prompt)
            fix = f"lower max_tokens to {left}" if left > 0 else f"shorten the prompt to less than {context}"
            raise ValueError(
                f"prompt of {len(self.prompt)} + max_tokens {self.sampling.max_tokens} exceeds the context of {context} "
                f"tokens; {fix}"
            )

    def validate_routes(self, routing: Routing | None) -> None:
        """Check what concerns routes. routing: of an engine that keeps them; None: it keeps none. Raises ValueError."""
        if not self.sampling.routed_experts:
            return
        if routing is None:
            raise ValueError(
                "routed_experts=True: no routes are kept; start the service of a mixture of experts with "
                "routed_experts = true, or leave it out"
            )
        for child in () if self.score else self.partials:
            if child.routed_experts is not None:
                who = f"partial sample {child.index} has routed_experts"
                routing.check(child.routed_experts, len(child.token_ids), who)

    def _validate_children(self, vocab_size: int) -> None:
        n = self.sampling.n
        if self.indices is not None:
            if list(self.indices) != sorted(set(self.indices)) or not self.indices:
                raise ValueError(f"indices={self.indices}: must be ascending, each once, and at least one")
            if self.indices[0] < 0 or self.indices[-1] >= n:
                raise ValueError(f"indices={self.indices}: must be between 0 and n - 1 = {n - 1}")
            if self.sampling.finish_after is not None and self.sampling.finish_after > len(self.indices):
                raise ValueError(
                    f"finish_after={self.sampling.finish_after}: at most the {len(self.indices)} requested children"
                )
        having = [child.index for child in self.partials]
        if len(set(having)) < len(having) or not set(having) <= set(self.wanted):
            raise ValueError(f"partial samples of children {having}: each must be requested, once")
        sampling = self.sampling
        if self.score:  # the service computes these columns
            sampling = msgspec.structs.replace(sampling, raw_logprobs=False, top_logprobs=0, routed_experts=False)
        for child in self.partials:
            child.validate(sampling, vocab_size)
        if self.score and set(having) != set(self.wanted):
            raise ValueError(
                f"score of children {list(self.wanted)[:20]}, given {having[:20]}: give the tokens of all, in partials"
            )
        if self.redraw and not self.score:
            raise ValueError("redraw=True without score: only given tokens are drawn again; set score, or leave it out")
        if self.score and self.sampling.finish_after is not None:
            raise ValueError(f"finish_after={self.sampling.finish_after} with score: all children end; leave it out")


class Sample(TokenColumns, frozen=True, kw_only=True, eq=False, omit_defaults=True, gc=False):
    """One finished child.

    Example:
        Sample(group_id="step3/17", index=2, token_ids=array([11, 5], int32), logprobs=array([-0.1, -2.3], float32),
               finish_reason="stop", weight_versions=[(0, 4), (1, 5)], prompt_tokens=3)
        # version 4 of the weights generated token 0, version 5 token 1 and all later ones

    Attributes:
        group_id: id of its group.
        index: 0 to n - 1.
        token_ids: [tokens] int32, the stop token included.
        logprobs: [tokens] float32: log-probability under the distribution from which each token was sampled, after temperature
            and truncation. At temperature 0, the log-probability at temperature 1.
        weight_versions: (first token, version) spans, ascending from token 0: which weights generated which tokens.
        kv_versions: (token, position, version) spans, ascending by token: from that token on, this version of the weights
            computed the KV of the position in prompt and output, and of all positions after it. Empty if each token attended
            only to KV of the version that generated it.
        finish_reason: why it ended. stop, length: by itself. cut: enough siblings had finished. deadline: of its group.
            aborted: by a client, a refresh or a shutdown. stale: its first token is too many versions old. error: see `error`.
            scored: its given tokens have their log-probs, or were drawn again (`Group.redraw`).
        prompt_tokens: length of the prompt.
        raw_logprobs: [tokens] float32 at temperature 1 without truncation, if `Sampling.raw_logprobs`.
        top_ids: [tokens, k] int32, if `Sampling.top_logprobs` = k: the most probable tokens of the distribution from which each
            token was sampled, most probable first, lower id first among equals; -1 where fewer than k tokens could be sampled.
        top_logprobs: [tokens, k] float32: their log-probs, as in `logprobs`; -inf where the id is -1.
        ranks: [tokens] int32 of scored tokens, if `Sampling.top_logprobs`: 1 + the number of tokens with a larger logit. None
            if the tokens were sampled.
        routed_experts: [tokens, layers with experts, experts chosen] uint8, or uint16 above 256 experts, if
            `Sampling.routed_experts`: row i has the choices at the position whose logits token i was sampled from, which is
            the one before it. In the router's order.
        prompt_routed_experts: [prompt_tokens - 1, layers with experts, experts chosen]: the same for the positions before.
            Together these are the prompt_tokens + tokens - 1 positions of a trainer's forward. An engine returns them once a
            group, with the first child that ends after the prompt was computed; a client gives them to all its samples.
        error: why the child failed, if finish_reason is "error".
        seconds: from the arrival of the group to the end of this child.
        offloads: how often its KV was offloaded to host memory.
        seed: of the group, also if the engine chose it: an unfinished child needs it to continue.
        stopped_by: the string of `Sampling.stop` that ended the child: if its last token completes several, the one that begins
            first.
        text_end: characters of the text before that string: `tokenizer.decode(token_ids)[:text_end]`;
            docs/decisions/stop-strings.md.
        configuration: digest of the configuration of the model that generated it (`Welcome.configuration`), as its client has
            noted it; "" = unknown.
    """

    group_id: str
    index: int
    finish_reason: FinishReason
    prompt_tokens: int
    error: str | None = None
    seconds: float = 0.0
    offloads: int = 0
    seed: int = 0
    stopped_by: str | None = None
    text_end: int | None = None
    prompt_routed_experts: np.ndarray | None = None
    ranks: np.ndarray | None = None
    configuration: str = ""

    def __repr__(self) -> str:
        """Describe the sample in one line."""
        why = self.finish_reason if self.error is None else f"{self.finish_reason}: {self.error!r}"
        mean = f"mean logprob {self.mean_logprob:.2f}, " if len(self.logprobs) else ""
        return f"Sample({self.group_id!r}[{self.index}] {len(self.token_ids)} tokens, {why}, {mean}{self.versions})"

    def _repr_html_(self) -> str:
        return html_table([self])

    @property
    def routes(self) -> np.ndarray | None:
        """Return the routes of all positions of a trainer's forward: [prompt_tokens + tokens - 1, layers, chosen]; None if
        those of the prompt or of the tokens are not there."""
        if self.prompt_routed_experts is None or self.routed_experts is None:
            return None
        return np.concatenate([self.prompt_routed_experts, self.routed_experts])

    def _arrays(self) -> list[tuple[str, np.ndarray]]:
        more = [(name, getattr(self, name)) for name in ("prompt_routed_experts", "ranks")]
        return super()._arrays() + [(name, array) for name, array in more if array is not None]


def html_table(samples: Iterable[Sample]) -> str:
    """Return a table of samples for notebooks."""
    names = ("sample", "tokens", "finish_reason", "mean logprob", "weights", "seconds", "error")
    rows = [
        (f"{each.group_id}[{each.index}]", len(each.token_ids), each.finish_reason, f"{each.mean_logprob:.2f}", each.versions)
        + (f"{each.seconds:.1f}", each.error or "")
        for each in samples
    ]
    lines = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


class TensorInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of a manifest: a tensor whose bytes follow.

    Example:
        TensorInfo("model.norm.weight", "bfloat16", (576,), "5a1f…")
    """

    name: str
    dtype: str
    """dtype of the sent bytes, in torch's name, e.g. "bfloat16"; the model's may differ"""
    shape: tuple[int, ...]
    digest: str
    """xxh3-128, 32 hex digits, of the elements in C order, little-endian"""


def manifest_digest(tensors: Iterable[TensorInfo]) -> str:
    """Return the SHA-256 of a manifest in hex, independent of its order."""
    lines = sorted(f"{len(t.name)}:{t.name}\t{t.dtype}\t{t.shape}\t{t.digest}\n" for t in tensors)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class Served(NamedTuple):
    """Weights that are or were live: a version, and its digest."""

    version: int = 0
    digest: str = ""
    """`manifest_digest` of all tensors in the model's dtype; "": unknown"""

    def differ(self, other: Served) -> bool:
        """Return whether these are known to be different weights with the same version."""
        return self.version == other.version and "" not in (self.digest, other.digest) and self.digest != other.digest

    def follow(self, before: Served) -> bool:
        """Return whether groups of the weights `before` may continue under these: newer ones, or the same."""
        return self.version >= before.version and not self.differ(before)


NONE_SERVED = Served()


class LoraTarget(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor that an adapter changes to weight + scale · B A.

    Example:
        LoraTarget("model.layers.0.mlp.up_proj.weight", "….lora_A.weight", "….lora_B.weight", 2.0)
    """

    weight: str
    """name of the tensor in the model"""
    a: str
    """name in the manifest, [rank, in]"""
    b: str
    """name in the manifest, [out, rank]"""
    scale: float
    transposed: bool = False
    """the weight is [in, out], as in transformers' Conv1D (`fan_in_fan_out`)"""


class Adapter(msgspec.Struct, frozen=True):
    """Targets of a LoRA refresh. Tensors of the manifest that are not A or B of a target are sent whole."""

    base: str | None
    """`manifest_digest` of the weights that it was trained on; None = unknown, not compared"""
    targets: list[LoraTarget]


class WeightUpdate(msgspec.Struct, frozen=True):
    """What a refresh sends, and how it changes the live weights."""

    manifest: Sequence[TensorInfo]
    """the tensors that follow"""
    version: int | None = None
    """above all versions so far; None: the next one"""
    partial: bool = False
    """tensors that are not in the manifest stay unchanged"""
    adapter: Adapter | None = None
    """the new weights are base + adapter, and the manifest lists the adapter's tensors; None: it lists whole tensors"""
    on_device: bool = False
    """the payload is on the model's device; it is staged there if there is room"""
    stays: bool = False
    """the payload can be read once more at the commit, and a source that has returned its last byte begins again: without room,
    it replaces the live weights in place"""


class BaseMismatch(ValueError):
    """A delta or adapter was made for other weights than the live ones."""


class Refreshed(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a refresh that is live."""

    version: int
    """of the weights that are live now"""
    via: str
    """how the tensors were sent: memory, shm, inline, delta, files, cuda_ipc, gloo or nccl"""
    bytes: int
    """bytes of the new tensors; with an adapter, of the whole model"""
    seconds: float
    """from the call to its result"""
    staged_seconds: float
    """from the manifest to the last checked byte, while generation continues"""
    paused_seconds: float
    """for which generation stopped to exchange the weights"""
    digest: str
    """`manifest_digest` of all live weights in the model's dtype"""
    sent_bytes: int = 0
    """bytes sent: less than `bytes` for an adapter, and via delta"""
    reason: str = ""
    """why the client chose `via`"""
